from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from titans.forecasting.data import Series
from titans.forecasting.testing import evaluate_series, evaluation_sections
from titans.forecasting.trained import TrainedForecaster, as_table, constant_channels, fit_series
from titans.forecasting.training import FitSettings
from titans.models.prediction import TitansForPrediction

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "memory_heads": 1, "dropout": 0.0}
QUANTILES = {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9]}
SHORT = FitSettings(steps=2, evaluate_every=1)


def waves(rows: int = 200, name: str = "", channels: int = 2) -> Series:
    """Noisy waves, a tenth of whose values are missing."""
    rng = np.random.default_rng(rows)
    times = pd.date_range("2020-01-01", periods=rows, freq="h", name="ds")
    phases = np.arange(rows)[:, None] / 12 + np.arange(channels)
    values = np.sin(2 * np.pi * phases) * [3.0, 500.0][:channels] + 20 + rng.normal(size=(rows, channels))
    values[rng.random(values.shape) < 0.1] = np.nan
    return Series(name, values, ("a", "b")[:channels] if not name else ("y",), times, "h")


def fitted(*series: Series, **options: Any) -> TrainedForecaster:
    options = {"fields": TINY | QUANTILES, "settings": SHORT, "context": 24, **options}
    return fit_series(series or [waves()], 12, **options)


trained = cache(fitted)


def first_rows(series: Series, rows: int) -> Series:
    return replace(series, values=series.values[:rows], times=series.times[:rows])


@pytest.mark.parametrize("history", [0, 24])
def test_the_figures_are_those_of_one_forecast_after_another(history: int) -> None:
    series, forecaster = waves(), trained(history=history)
    whole_past = history > 0
    start = int((series.times <= pd.Timestamp(forecaster.about.seen[""])).sum())
    assert start == 160
    scaler = forecaster.scaler(series)
    np.testing.assert_allclose(scaler.mean, np.nanmean(series.values[:140], axis=0))
    errors, inside = [], []
    for origin in range(start, 200 - 12 + 1):
        made = forecaster.forecast(first_rows(series, origin), whole_past=whole_past)
        made = scaler.scale(made.swapaxes(1, 2))  # (12, quantiles, channels)
        truth = scaler.scale(series.values[origin : origin + 12])
        errors.append(made[:, 1] - truth)
        inside.append(np.where(np.isnan(truth), np.nan, (made[:, 0] <= truth) & (truth <= made[:, 2])))
    report = evaluate_series(forecaster, [series], whole_past=whole_past)
    assert report["windows"] == len(errors) == 29
    assert report["season"] == 24
    assert report["overall"]["Titans"]["mse"] == pytest.approx(np.nanmean(np.square(errors)), rel=1e-4)
    assert report["overall"]["Titans"]["mae"] == pytest.approx(np.nanmean(np.abs(errors)), rel=1e-4)
    assert report["covered"] == pytest.approx(np.nanmean(inside))
    last = report["by_horizon"][-1]
    assert (last["from"], last["to"]) == (10, 12)
    assert last["Titans"]["mse"] == pytest.approx(np.nanmean(np.square(errors)[:, 9:]), rel=1e-4)
    second = report["by_variate"][1]
    assert second["name"] == "b"
    assert second["Titans"]["mae"] == pytest.approx(np.nanmean(np.abs(errors)[..., 1]), rel=1e-4)
    assert second["in_units"]["Titans"]["mse"] == pytest.approx(
        np.nanmean(np.square(errors)[..., 1]) * scaler.deviation[1] ** 2, rel=1e-4
    )
    assert second["covered"] == pytest.approx(np.nanmean(np.array(inside)[..., 1]))


def test_the_last_season_reaches_back_beyond_the_context_and_is_left_out_where_it_is_unknown() -> None:
    times = np.arange(200.0)
    seasons = Series("", (times % 48)[:, None], ("a",), pd.RangeIndex(200), "1")
    forecaster = fitted(seasons, season=48)
    overall = evaluate_series(forecaster, [seasons])["overall"]
    assert overall["last season"]["mse"] == 0 < overall["last value"]["mse"]
    assert "last season" not in evaluate_series(fitted(seasons), [seasons])["overall"]
    assert "last season" not in evaluate_series(forecaster, [seasons], season=170)["overall"]


def test_series_of_a_long_file_are_scaled_and_tested_each_by_itself() -> None:
    long, other = waves(200, "long", 1), waves(150, "other", 1)
    other = replace(other, values=other.values * 1000)
    forecaster = fitted(long, other, waves(50, "short", 1))
    assert set(forecaster.about.scalers) == {"long", "other"}
    assert forecaster.about.fitted["series"] == [2, 3]
    report = evaluate_series(forecaster, [long, other])
    assert report["windows"] == (40 - 11) + (30 - 11)
    assert [row["name"] for row in report["by_variate"]] == ["long", "other"]
    in_units = [row["in_units"]["last value"]["mae"] for row in report["by_variate"]]
    assert in_units[1] > 100 * in_units[0]


def test_an_unknown_series_is_all_test_and_scaled_by_itself() -> None:
    known = waves(200, "known", 1)
    forecaster = fitted(known)
    new = waves(120, "new", 1)
    assert evaluate_series(forecaster, [new])["windows"] == 120 - 24 - 11
    assert np.isfinite(forecaster.forecast(new)).all()
    changed = replace(new, values=np.concatenate([new.values[:24], 1000 * new.values[24:]]))
    assert forecaster.scaler(changed).deviation == forecaster.scaler(new).deviation == np.nanstd(new.values[:24])
    new.values[:30] = np.nan
    assert forecaster.scaler(new).mean == new.values[30]
    said = [
        evaluation_sections(forecaster, [one], evaluate_series(forecaster, [one]))[0].paragraphs[0]
        for one in (new, known)
    ]
    assert ["first 24 rows" in words for words in said] == [True, False]


def test_a_saved_forecaster_forecasts_the_same(tmp_path: Path) -> None:
    forecaster = trained(history=24)
    forecaster.save(tmp_path / "new" / "model")
    again = TrainedForecaster.load(tmp_path / "new" / "model")
    assert again.about.seen == forecaster.about.seen
    assert again.about.history == 24
    np.testing.assert_array_equal(again.forecast(waves()), forecaster.forecast(waves()))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model"]
    with pytest.raises(ValueError, match="is not empty; expected a folder that is new or empty"):
        forecaster.save(tmp_path / "new" / "model")


def test_a_save_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = TitansForPrediction.save_pretrained

    def interrupted(self: TitansForPrediction, folder: Path) -> None:
        save(self, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(TitansForPrediction, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained().save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_training_sees_nothing_of_the_test_part() -> None:
    series, changed = waves(), waves()
    changed.values[160:] = 1e6
    before, after = (fitted(one).model.state_dict() for one in (series, changed))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert fitted(changed).about.scalers == trained().about.scalers


def test_without_a_test_part_training_goes_to_the_end() -> None:
    forecaster = fitted(test=0.0)
    assert forecaster.about.seen[""] == "2020-01-09T07:00:00"
    with pytest.raises(ValueError, match="no 12 rows, the horizon, follow those that the model was fitted on"):
        evaluate_series(forecaster, [waves()])


@pytest.mark.parametrize(
    ("rows", "horizon", "context"), [(2000, 24, 96), (2000, 200, 200), (200, 12, 64), (200, 24, 56), (60, 10, 14)]
)
def test_the_context_is_as_long_as_it_helps_and_the_data_allows(rows: int, horizon: int, context: int) -> None:
    forecaster = fit_series([waves(rows)], horizon, fields=TINY, settings=SHORT)
    assert forecaster.model.config.context_length == context


def test_training_reads_histories_of_all_lengths_and_validation_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[bool, set[int]] = {True: set(), False: set()}
    forward = TitansForPrediction.forward

    def watched(self: TitansForPrediction, past_values: torch.Tensor, *others: Any, **options: Any) -> Any:
        read[self.training].add(past_values.shape[1])
        return forward(self, past_values, *others, **options)

    monkeypatch.setattr(TitansForPrediction, "forward", watched)
    settings = FitSettings(steps=8, evaluate_every=8)
    forecaster = fitted(history=24, settings=settings)
    assert len(read[True]) > 4 and min(read[True]) >= 24 and max(read[True]) <= 48
    assert read[False] == {48}
    assert forecaster.about.fitted["windows"] == [140 - 48 - 11, 20 - 11]
    read[True].clear()
    assert fitted(settings=settings).about.fitted["windows"] == [140 - 24 - 11, 20 - 11]
    assert read[True] == {24}


def test_a_memory_that_never_read_a_history_is_not_given_one() -> None:
    words = "trained without a history; expected one fitted with --history"
    with pytest.raises(ValueError, match=words):
        trained().forecast(waves(), whole_past=True)
    with pytest.raises(ValueError, match=words):
        evaluate_series(trained(), [waves()], whole_past=True)


def test_longer_horizons_go_on_from_forecasts_and_the_whole_past_makes_a_difference() -> None:
    series, forecaster = waves(), trained(history=24)
    short, longer = forecaster.forecast(series), forecaster.forecast(series, 30)
    assert short.shape == (12, 2, 3) and longer.shape == (30, 2, 3)
    np.testing.assert_allclose(longer[:12], short)
    whole = forecaster.forecast(series, whole_past=True)
    past = torch.from_numpy(forecaster.scaler(series).scale(series.values)).float()[None]
    made = forecaster.model(past.nan_to_num(), past.isfinite()).prediction_outputs.detach()[0].double().numpy()
    np.testing.assert_allclose(whole[..., 1], forecaster.scaler(series).restore(made), rtol=1e-4)
    assert np.abs(whole - short).max() > 1e-3


def test_a_forecast_has_the_layout_of_the_data() -> None:
    wide, forecaster = waves(), trained()
    made = forecaster.forecast(wide)
    table = as_table(forecaster, [wide], [made])
    assert list(table) == ["ds", "a", "a_ql0.1", "a_ql0.9", "b", "b_ql0.1", "b_ql0.9"]
    assert table["ds"].iloc[0] == wide.times[-1] + pd.Timedelta(hours=1)
    assert table["b_ql0.9"].tolist() == made[:, 1, 2].tolist()
    counted = replace(wide, times=pd.RangeIndex(200), freq="1")
    assert list(as_table(forecaster, [counted], [made]))[:2] == ["a", "a_ql0.1"]  # there were no stamps
    long = [waves(100, "x", 1), waves(90, "y", 1)]
    point = fitted(*long, fields=TINY)
    table = as_table(point, long, [point.forecast(one, 2) for one in long])
    assert list(table) == ["unique_id", "ds", "Titans"]
    assert table["unique_id"].tolist() == ["x", "x", "y", "y"]


def test_a_constant_is_forecast_as_it_is() -> None:
    series = waves()
    series.values[:, 1] = 7.1
    assert constant_channels([series]) == ["b"]
    forecaster = fitted(series)
    np.testing.assert_allclose(forecaster.forecast(series)[:, 1], 7.1, rtol=1e-6)
    assert evaluate_series(forecaster, [series])["by_variate"][1]["Titans"]["mse"] < 1e-9


def test_a_channel_without_a_value_to_learn_or_forecast_from_is_refused() -> None:
    series = waves()
    series.values[:140, 1] = np.nan
    with pytest.raises(ValueError, match="b has no value in the 140 rows to train on"):
        fitted(series)
    series = waves()
    series.values[-24:, 0] = np.nan
    with pytest.raises(ValueError, match="the data: a has no value in the last 24 rows; expected at least one"):
        as_table(trained(), [series], [trained().forecast(series)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 130}, "has 200 rows; expected at least 203 for a context of 130 and a horizon of 12, with a"),
        ({"valid": 0.0}, "valid is 0.0 and test is 0.2; expected shares that leave something to train on"),
        ({"valid": 0.5, "test": 0.5}, "expected shares that leave something to train on"),
        ({"context": 0}, "context is 0; expected at least 1"),
        ({"history": -1}, "history is -1; expected at least 0"),
        ({"history": 15}, "history is 15; expected 0, or at least the 16 values of a token"),
        ({"history": 106}, "rows; expected at least 203 for a context of 24, a history of 106 and a horizon of 12"),
        ({"fields": {"patch_length": 30}}, "expected patches that fit into the context"),
    ],
)
def test_wrong_options_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        fitted(**options)
    assert words in str(error.value)


def test_series_that_do_not_belong_together_are_refused() -> None:
    daily = replace(waves(100, "y", 1), freq="D")
    with pytest.raises(ValueError, match="the series x has steps of h and the series y of D; expected the same"):
        fitted(waves(100, "x", 1), daily)


@pytest.mark.parametrize(
    ("series", "words"),
    [
        (replace(waves(), names=("a", "c")), r"has the columns \('a', 'c'\); expected \('a', 'b'\), as in training"),
        (replace(waves(), freq="D"), "has steps of D; expected h, as in training"),
        (waves(23), "has 23 rows; expected at least the context of the model, 24"),
    ],
)
def test_other_data_than_in_training_is_refused(series: Series, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trained().check(series)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"forecast\.json is not there; expected a folder written by titans forecast"):
        TrainedForecaster.load(tmp_path)
    trained().save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="model cannot be loaded: "):
        TrainedForecaster.load(tmp_path / "model")
    (tmp_path / "model" / "forecast.json").write_text(json.dumps({"names": []}))
    with pytest.raises(ValueError, match="has other fields"):
        TrainedForecaster.load(tmp_path / "model")
