"""The streamed forecaster: what one call over the whole past gives, in any pieces, in constant time and memory."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.models.forecasters import CHANNELS, HORIZON, QUANTILES, VARIANTS, model, series
from titans import TitansForPrediction
from titans.forecasting import Forecaster
from titans.forecasting.stream import BLOCK, streamed_errors, streamed_states
from titans.forecasting.training import forecast_errors
from titans.forecasting.windows import Scaler, make_windows

# small enough for several blocks of tokens in 300 rows, with patches that leave gaps, overlap, and fit badly
CONTEXT = 5
TOKENS: dict[str, dict[str, Any]] = {
    "patches": {"patch_length": 3, "patch_stride": 2},
    "sparse patches": {"patch_length": 1, "patch_stride": 3},
    "variates": {"tokens": "variates", "patch_length": 3},
}
MADE = {
    (variant, tokens): model(variant=variant, context_length=CONTEXT, **TOKENS[tokens])
    for variant in VARIANTS
    for tokens in TOKENS
}
SOME = [*((variant, "patches") for variant in VARIANTS), ("lmm", "sparse patches"), ("mag", "variates")]
every_kind = pytest.mark.parametrize("kind", SOME, ids=", ".join)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
LONG = CONTEXT * (BLOCK + 3) + 2  # more than a block of any tokens


def rows(time: int, missing: float = 0.0, seed: int = 1) -> NDArray[np.float64]:
    """(time, channels) of a random walk, NaN where a value is missing."""
    values = series(time, batch=1, seed=seed)[0].numpy()
    return np.where(np.random.default_rng(seed).random(values.shape) < missing, np.nan, values)


def streamed(made: TitansForPrediction, values: NDArray[Any], cuts: list[int] = [], **options: Any) -> Forecaster:  # noqa: B006
    """A forecaster that observed ``values``, in one call for every piece."""
    forecaster = Forecaster(made, **options)
    places = sorted({cut for cut in cuts if 0 < cut < len(values)})
    for start, stop in pairwise([0, *places, len(values)]):
        forecaster.observe(values[start:stop])
    return forecaster


@torch.no_grad()
def one_call(made: TitansForPrediction, values: NDArray[Any]) -> NDArray[Any]:
    """What the model forecasts from the whole past at once."""
    past = torch.from_numpy(values)[None]
    return made(past, ~past.isnan()).prediction_outputs[0].numpy()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(MADE)),
    length=st.integers(1, 300),
    cuts=st.lists(st.integers(1, 300), unique=True, max_size=6),
    missing=st.sampled_from([0.0, 0.0, 0.3, 0.9]),
)
def test_streamed_in_any_pieces_equals_one_call_over_the_whole_past(
    kind: tuple[str, str], length: int, cuts: list[int], missing: float
) -> None:
    values = rows(length, missing)
    forecaster = streamed(MADE[kind], values, cuts)
    assert forecaster.seen == length
    found, expected = forecaster.forecast(), one_call(MADE[kind], values)
    known = ~np.isnan(values[-CONTEXT:]).all(0)
    assert np.isnan(found[:, ~known]).all()
    np.testing.assert_allclose(found[:, known], expected[:, known], rtol=0, atol=1e-9)
    assert np.array_equal(streamed(MADE[kind], values).forecast(), found, equal_nan=True)


def digest(forecaster: Forecaster, path: Path) -> str:
    """What tells this state from any other, to the last bit."""
    forecaster.save(path)
    with safe_open(path, "pt") as file:
        return str(file.metadata()["digest"])


@every_kind
def test_row_by_row_or_all_at_once_leaves_the_same_bits(kind: tuple[str, str], tmp_path: Path) -> None:
    made, values = MADE[kind], rows(LONG, 0.1).astype(np.float32)
    found = {
        digest(streamed(made, values, cuts), tmp_path / "state")
        for cuts in ([], [1], [LONG // 2], list(range(1, LONG)))
    }
    assert len(found) == 1
    assert digest(streamed(made, values[:-1]), tmp_path / "state") not in found


@every_kind
def test_no_forecast_depends_on_a_later_value(kind: tuple[str, str]) -> None:
    values = rows(60)
    changed = values.copy()
    changed[40:] += 5
    one, other = Forecaster(MADE[kind]), Forecaster(MADE[kind])
    for stop in (3, 21, 40, 41, 60):
        one.observe(values[one.seen : stop])
        other.observe(changed[other.seen : stop])
        assert np.array_equal(one.forecast(), other.forecast()) == (stop <= 40)


@every_kind
def test_forecasting_changes_nothing(kind: tuple[str, str], tmp_path: Path) -> None:
    values = rows(LONG)
    forecaster = streamed(MADE[kind], values[:-1])
    before = digest(forecaster, tmp_path / "state")
    first = forecaster.forecast(3 * HORIZON)
    assert np.array_equal(forecaster.forecast(3 * HORIZON), first)
    assert digest(forecaster, tmp_path / "state") == before and forecaster.seen == LONG - 1
    forecaster.observe(values[-1])
    assert np.array_equal(forecaster.forecast(), streamed(MADE[kind], values).forecast())


@every_variant
def test_a_longer_horizon_takes_forecasts_for_observations(variant: str) -> None:
    forecaster = streamed(MADE[variant, "patches"], rows(50))
    first = forecaster.forecast()
    assert first.shape == (HORIZON, CHANNELS)
    ahead = forecaster.copy()
    ahead.observe(first)
    second = ahead.forecast()
    longer = forecaster.forecast(2 * HORIZON - 1)
    assert longer.shape == (2 * HORIZON - 1, CHANNELS)
    assert np.array_equal(longer, np.concatenate([first, second])[:-1])
    assert np.array_equal(forecaster.forecast(2), first[:2])


def test_a_model_of_half_precision_reads_and_forecasts_in_float32() -> None:
    made = model(torch.bfloat16)
    values = rows(60).astype(np.float32) + 1000
    found = streamed(made, values, [20]).forecast()
    np.testing.assert_allclose(found, one_call(made, values), rtol=0, atol=0.1)
    assert found.dtype == np.float32 and np.abs(found - 1000).max() < 100


def test_a_copy_goes_its_own_way() -> None:
    values = rows(LONG + 90)
    forecaster = streamed(MADE["mag", "patches"], values[:LONG])
    before, other = forecaster.forecast(), forecaster.copy()
    other.observe(values[LONG:])
    assert (forecaster.seen, other.seen) == (LONG, LONG + 90)
    assert np.array_equal(forecaster.forecast(), before) and not np.array_equal(other.forecast(), before)


@pytest.mark.parametrize("kind", ["patches", "variates"])
def test_several_series_together_are_each_of_them_alone(kind: str) -> None:
    made = MADE["mac", kind]
    values = np.stack([rows(LONG, 0.2, seed) for seed in (1, 2)])
    values[1, -40:] = np.nan
    forecaster = Forecaster(made, batch_size=2)
    for part in np.split(values, [1, 100], axis=1):
        forecaster.observe(part)
    found = forecaster.forecast(2 * HORIZON)
    assert found.shape == (2, 2 * HORIZON, CHANNELS) and np.isnan(found[1]).all()
    alone = streamed(made, values[0]).forecast(2 * HORIZON)
    np.testing.assert_allclose(found[0], alone, rtol=0, atol=1e-10)


def test_a_scaler_turns_observations_into_what_the_model_knows_and_forecasts_back() -> None:
    made = model(loss="quantile", quantiles=QUANTILES)
    values = rows(50, 0.1) * [1.0, 100.0, 0.01] + [0.0, -7.0, 1e4]
    scaler = Scaler.fit(values)
    forecaster, plain = streamed(made, values, scaler=scaler), streamed(made, scaler.scale(values))
    assert np.array_equal(forecaster.forecast(), scaler.restore(plain.forecast()))
    found = forecaster.forecast(2 * HORIZON, quantiles=True)
    assert found.shape == (2 * HORIZON, CHANNELS, 3)
    assert np.array_equal(found[..., 1], forecaster.forecast(2 * HORIZON))
    assert (np.diff(found, axis=-1) >= 0).all()


def test_rows_may_come_as_arrays_tensors_lists_and_numbers() -> None:
    made, values = MADE["lmm", "patches"], rows(9)
    expected = streamed(made, values).forecast()
    for given_values in (torch.from_numpy(values).requires_grad_(), values.tolist(), np.asfortranarray(values)):
        forecaster = Forecaster(made)
        forecaster.observe(given_values)
        assert np.array_equal(forecaster.forecast(), expected)
    forecaster = Forecaster(made)
    for row in values:
        forecaster.observe(torch.from_numpy(row))
    assert np.array_equal(forecaster.forecast(), expected)

    single = model(num_input_channels=1)
    expected = streamed(single, values[:, :1]).forecast()
    forecaster = Forecaster(single)
    forecaster.observe(values[:7, 0])
    forecaster.observe(float(values[7, 0]))
    forecaster.observe([[values[8, 0]]])
    assert np.array_equal(forecaster.forecast(), expected) and forecaster.seen == 9


def test_a_mask_says_what_nan_says() -> None:
    made, values = MADE["mal", "patches"], rows(40, 0.3)
    forecaster = Forecaster(made)
    known = ~np.isnan(values)
    forecaster.observe(np.where(known, values, 1e6), known)
    assert np.array_equal(forecaster.forecast(), streamed(made, values).forecast(), equal_nan=True)


@every_kind
def test_an_outage_longer_than_the_context_is_forecast_as_unknown_until_it_ends(kind: tuple[str, str]) -> None:
    values = rows(LONG + 3 * CONTEXT * BLOCK)
    values[LONG:, 1] = np.nan
    values[LONG + 40 : LONG + 2 * CONTEXT * BLOCK] = np.nan  # several blocks without a single value
    forecaster = streamed(MADE[kind], values)
    found = forecaster.forecast(2 * HORIZON)
    assert np.isnan(found[:, 1]).all() and np.isfinite(found[:, [0, 2]]).all()
    forecaster.observe(values[0])
    assert np.isfinite(forecaster.forecast()).all()


@every_kind
def test_without_learning_at_test_time_only_the_context_counts(kind: tuple[str, str]) -> None:
    made, values = MADE[kind], rows(LONG)
    off = streamed(made, values, [3, 50], test_time_learning=False)
    assert np.array_equal(
        off.forecast(2 * HORIZON), streamed(made, values[-CONTEXT:], test_time_learning=False).forecast(2 * HORIZON)
    )
    np.testing.assert_allclose(off.forecast(), one_call(made, values[-CONTEXT:]), rtol=0, atol=1e-12)
    assert np.abs(off.forecast() - streamed(made, values).forecast()).max() > 1e-6
    assert off.seen == LONG


def test_a_memory_without_writes_has_nothing_of_the_history() -> None:
    made = model(variant="lmm", memory_writes=False, memory_conv_kernel=0)
    values = rows(200)
    off = streamed(made, values, test_time_learning=False)
    np.testing.assert_allclose(streamed(made, values).forecast(), off.forecast(), rtol=0, atol=1e-12)


def test_a_model_in_training_is_used_without_dropout_and_stays_in_training() -> None:
    made = model(dropout=0.5)
    values = rows(60)
    expected = streamed(made, values).forecast()
    assert not made.training
    made.train()
    forecaster = streamed(made, values)
    assert np.array_equal(forecaster.forecast(), expected)
    assert made.training and all(x.grad is None for x in made.parameters())


@every_kind
@pytest.mark.parametrize("length", [1, LONG])
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(
    kind: tuple[str, str], length: int, tmp_path: Path
) -> None:
    values = rows(LONG + 100, 0.05)
    options = {"scaler": Scaler.fit(values), "test_time_learning": kind[0] != "mal"}
    forecaster = streamed(MADE[kind], values[:length], **options)
    forecaster.save(tmp_path / "state")
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]
    loaded = Forecaster.load(tmp_path / "state", MADE[kind])
    assert loaded.seen == length and loaded.test_time_learning == options["test_time_learning"]
    for each in (forecaster, loaded):
        each.observe(values[length:])
    assert np.array_equal(loaded.forecast(2 * HORIZON), forecaster.forecast(2 * HORIZON), equal_nan=True)
    assert digest(loaded, tmp_path / "one") == digest(forecaster, tmp_path / "other")


def test_a_batch_comes_back_as_a_batch(tmp_path: Path) -> None:
    forecaster = Forecaster(MADE["lmm", "patches"], batch_size=2)
    forecaster.observe(series(20).numpy())
    forecaster.save(tmp_path / "state")
    loaded = Forecaster.load(tmp_path / "state", forecaster.model)
    assert np.array_equal(loaded.forecast(), forecaster.forecast()) and loaded.batch_size == 2


def test_a_file_that_is_not_this_models_is_refused(tmp_path: Path) -> None:
    made, path = MADE["lmm", "patches"], tmp_path / "state"
    forecaster = streamed(made, rows(LONG))

    def refused(sentence: str, by: TitansForPrediction = made, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=sentence) as caught:
            Forecaster.load(path, by)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    refused("does not exist; expected a file written by Forecaster.save", kind=FileNotFoundError)
    path.write_bytes(b"not a forecaster" * 20)
    refused("cannot be read as a forecaster")
    made.remember(series(20)).save(path)
    refused(r"is not a forecaster \(its format is 'titans.TitansCache'\)")
    forecaster.save(path)
    refused("comes from a model with context_length=5; this one has context_length=12", model())
    refused("comes from a model with variant='lmm'; this one has variant='mac'", MADE["mac", "patches"])
    other = model(seed=1, context_length=CONTEXT, **TOKENS["patches"])
    refused("comes from a model with other weights; expected the model it was saved with", other)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    save_file(tensors, path, metadata=metadata | {"version": "9"})
    refused("has forecaster version '9'; this release reads '1'")
    tensors["values"][0, 0, 0] += 1
    save_file(tensors, path, metadata=metadata)
    refused("is damaged: its contents are not what was saved")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; expected a folder to write state into"):
        forecaster.save(tmp_path / "nowhere" / "state")


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    made, values = MADE["lmm", "patches"], rows(20)
    forecaster = streamed(made, values)
    before = forecaster.forecast()
    infinite, missing = values.copy(), values.copy()
    infinite[3, 1], missing[3, 1] = np.inf, np.nan
    finite = "values has numbers that are not finite; expected finite ones, or NaN or a 0 in observed where missing"
    for arguments, sentence in (
        ((values[:, :2],), r"values has shape \(20, 2\); expected \(time, 3\), with at least one row"),
        ((values[0, :2],), r"values has shape \(2,\); expected \(time, 3\)"),
        ((1.0,), r"values has shape \(\); expected \(time, 3\)"),
        ((values[None],), r"values has shape \(1, 20, 3\); expected \(time, 3\)"),
        ((values[:0],), r"values has shape \(0, 3\); expected \(time, 3\), with at least one row"),
        (([],), r"values has shape \(0,\); expected \(time, 3\)"),
        ((infinite,), finite),
        ((missing, np.ones_like(values)), finite),
        ((values, np.ones(20)), r"observed has shape \(20,\); expected that of values, \(20, 3\)"),
        ((["a", "b", "c"],), "values is a list that cannot be read as numbers; expected an array of them"),
        (([[1, 2, 3], [4, 5]],), "values is a list that cannot be read as numbers; expected an array of them"),
    ):
        with pytest.raises(ValueError, match=sentence):
            forecaster.observe(*arguments)
    with pytest.raises(ValueError, match=finite):
        Forecaster(model(torch.float32)).observe([1e300, 0, 0])
    for horizon, sentence in (
        (0, "horizon is 0; expected at least 1"),
        (-3, "horizon is -3; expected at least 1"),
        (2.5, "horizon is 2.5; expected a whole number"),
    ):
        with pytest.raises(ValueError, match=sentence):
            forecaster.forecast(horizon)
    with pytest.raises(ValueError, match="quantiles is True; expected a model with loss='quantile'"):
        forecaster.forecast(quantiles=True)
    assert forecaster.seen == 20 and np.array_equal(forecaster.forecast(), before)
    with pytest.raises(ValueError, match=r"nothing was observed; expected a call of observe\(\) before forecast\(\)"):
        Forecaster(made).forecast()
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        Forecaster(made, batch_size=0)
    with pytest.raises(ValueError, match=r"values has shape \(20, 3\); expected \(2, time, 3\)"):
        Forecaster(made, batch_size=2).observe(values)
    with pytest.raises(ValueError, match=r"scaler is of 2 channels; expected 3"):
        Forecaster(made, scaler=Scaler.fit(values[:, :2]))


@every_kind
def test_what_is_kept_does_not_grow(kind: tuple[str, str]) -> None:
    forecaster = Forecaster(MADE[kind])
    period = 30 * BLOCK  # a whole number of blocks of any tokens
    kept = []
    for turn in range(2):
        for part in np.split(rows(period, seed=turn), 16):
            forecaster.observe(part)
            kept.append(forecaster.nbytes)
    assert kept[20:] == kept[4:16] and forecaster.seen == 2 * period


@pytest.mark.slow
def test_a_hundred_thousand_observations_take_flat_memory_and_constant_time() -> None:
    made = model(torch.float32, context_length=CONTEXT, **TOKENS["patches"])
    forecaster = Forecaster(made)
    seconds, peaks, values = [], [], rows(10_000)
    for _ in range(10):
        start = time.perf_counter()
        for row in values:
            forecaster.observe(row)
        forecaster.forecast()
        seconds.append(time.perf_counter() - start)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert forecaster.seen == 100_000 and np.isfinite(forecaster.forecast()).all()
    assert peaks[-1] - peaks[0] < 2048  # KiB
    assert np.median(seconds[5:]) < 1.5 * np.median(seconds[:5])


@pytest.mark.parametrize("kind", [SOME[0], SOME[1], *SOME[-2:]], ids=", ".join)
def test_every_window_is_forecast_as_in_one_call_over_its_whole_past(kind: tuple[str, str]) -> None:
    made, length = MADE[kind], 24
    windows = make_windows([rows(length, missing=0.1)], [(CONTEXT + 1, length)], CONTEXT, HORIZON)
    seen = 0
    with torch.no_grad():
        for cache, block in streamed_states(made, windows):
            batch = block.batch(torch.arange(len(block)))
            forecasts = made(batch["past_values"], batch["past_observed_mask"], past_key_values=cache)
            for origin, forecast in zip(block.origins, forecasts.prediction_outputs, strict=True):
                whole = made(windows.values[None, :origin], windows.observed[None, :origin]).prediction_outputs[0]
                assert (forecast - whole).abs().max() < 1e-9
                seen += 1
    assert seen == len(windows) == length - CONTEXT - HORIZON
    alone = [forecast_errors(made, replace(windows, origins=at.view(1), past=int(at))) for at in windows.origins]
    together = streamed_errors(made, windows)
    torch.testing.assert_close(together.squared, sum(each.squared for each in alone), rtol=1e-9, atol=0)
    assert together.mse != pytest.approx(forecast_errors(made, windows).mse, rel=1e-3)
