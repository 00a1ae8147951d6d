"""The forecaster: every variant, both kinds of tokens, its losses, its masks, and what it must not see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForTimeSeriesPrediction, Trainer, TrainingArguments

from tests.models.forecasters import CHANNELS, CONTEXT, HORIZON, QUANTILES, TINY, VARIANTS, config, model, series
from titans import TitansForPrediction, TitansPredictionConfig
from titans.models.prediction import moments

every_variant = pytest.mark.parametrize("variant", VARIANTS)
both_tokens = pytest.mark.parametrize("tokens", ["patches", "variates"])


@every_variant
@both_tokens
@pytest.mark.parametrize("time", [1, CONTEXT - 5, CONTEXT, CONTEXT + 1, 3 * CONTEXT + 2])
@torch.no_grad()
def test_a_past_of_any_length_is_forecast(variant: str, tokens: str, time: int) -> None:
    output = model(variant=variant, tokens=tokens)(series(time))
    assert output.prediction_outputs.shape == (2, HORIZON, CHANNELS)
    assert output.loc.shape == output.scale.shape == (2, 1, CHANNELS)
    assert output.prediction_outputs.isfinite().all()
    assert output.loss is None and output.quantile_outputs is None


@pytest.mark.parametrize(
    ("context", "patch", "stride"), [(12, 12, 3), (12, 4, 4), (12, 1, 1), (7, 3, 5), (5, 2, 9)], ids=str
)
@torch.no_grad()
def test_patches_of_any_length_and_stride_cover_the_context(context: int, patch: int, stride: int) -> None:
    made = model(context_length=context, patch_length=patch, patch_stride=stride, linear_skip=False)
    past = series(context)
    before = made(past).prediction_outputs
    for place in range(max(0, context - 1 - (made.config.tokens_in_context - 1) * stride), context):
        moved = past.clone()
        moved[:, place] += 1
        assert not torch.equal(made(moved).prediction_outputs, before)


def test_the_point_losses_are_those_of_the_textbook() -> None:
    past, future = series(CONTEXT), series(HORIZON, seed=2)
    for loss, formula in {
        "mse": lambda error: error**2,
        "mae": lambda error: error.abs(),
        "huber": lambda error: torch.where(error.abs() < 0.7, error**2 / 2, 0.7 * (error.abs() - 0.35)),
    }.items():
        output = model(loss=loss, huber_delta=0.7)(past, future_values=future)
        torch.testing.assert_close(output.loss, formula(future - output.prediction_outputs).mean())


def test_the_quantile_loss_is_the_pinball_loss_and_its_quantiles_rise() -> None:
    past, future = series(CONTEXT), series(HORIZON, seed=2)
    output = model(loss="quantile", quantiles=QUANTILES)(past, future_values=future)
    found = output.quantile_outputs
    assert found.shape == (2, HORIZON, CHANNELS, 3)
    assert (found.diff(dim=-1) >= 0).all()
    assert torch.equal(output.prediction_outputs, found[..., 1])  # 0.4 is the closest to the median
    costs = [
        torch.where(future > found[..., i], q * (future - found[..., i]), (1 - q) * (found[..., i] - future))
        for i, q in enumerate(QUANTILES)
    ]
    torch.testing.assert_close(output.loss, torch.stack(costs).mean())


@pytest.mark.parametrize("loss", ["mse", "quantile"])
def test_what_is_masked_in_the_future_does_not_count(loss: str) -> None:
    made = model(loss=loss, quantiles=QUANTILES if loss == "quantile" else None)
    past, future = series(CONTEXT), series(HORIZON, seed=2)
    mask = torch.ones_like(future)
    mask[0, 2:], mask[1, 0, 1] = 0, 0
    poisoned = future.masked_fill(mask == 0, torch.nan)
    output = made(past, future_values=poisoned, future_observed_mask=mask)
    each = [
        made(past[i : i + 1, :, :], future_values=future[i : i + 1], future_observed_mask=mask[i : i + 1]).loss
        for i in range(2)
    ]
    counts = mask.sum((1, 2))
    torch.testing.assert_close(output.loss, (each[0] * counts[0] + each[1] * counts[1]) / counts.sum())
    assert made(past, future_values=poisoned, future_observed_mask=mask * 0).loss == 0


@every_variant
@both_tokens
@torch.no_grad()
def test_the_future_does_not_change_the_forecast(variant: str, tokens: str) -> None:
    made = model(variant=variant, tokens=tokens)
    past = series(CONTEXT + 9)
    alone = made(past).prediction_outputs
    assert torch.equal(made(past, future_values=series(HORIZON)).prediction_outputs, alone)


@every_variant
@both_tokens
@torch.no_grad()
def test_what_is_masked_in_the_past_leaves_no_trace(variant: str, tokens: str) -> None:
    made = model(variant=variant, tokens=tokens)
    past = series(2 * CONTEXT + 7)
    mask = torch.rand(past.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[0, :9], mask[0, 20:27, 1] = False, False  # whole tokens, in the history and in the context
    plain = made(past.masked_fill(~mask, 0), mask).prediction_outputs
    assert plain.isfinite().all()
    for poison in (torch.nan, torch.inf, 1e6):
        assert torch.equal(made(past.masked_fill(~mask, poison), mask).prediction_outputs, plain)
    assert not torch.equal(made(past, mask | (torch.rand(mask.shape) < 0.5)).prediction_outputs, plain)


@every_variant
@both_tokens
@torch.no_grad()
def test_a_batch_with_missing_values_is_each_of_its_rows_alone(variant: str, tokens: str) -> None:
    made = model(variant=variant, tokens=tokens)
    past = series(2 * CONTEXT + 7, batch=4)
    mask = torch.rand(past.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[1], mask[2, :15], mask[3] = True, False, False
    together = made(past, mask).prediction_outputs
    for row in range(4):
        alone = made(past[row : row + 1], mask[row : row + 1]).prediction_outputs
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)
    assert (together[3] == 0).all()  # nothing was observed


@torch.no_grad()
def test_a_mask_of_rows_masks_all_channels() -> None:
    made, past = model(), series(CONTEXT + 5)
    rows = torch.rand(2, CONTEXT + 5, generator=torch.Generator().manual_seed(3)) < 0.6
    whole = rows.unsqueeze(-1).expand(-1, -1, CHANNELS)
    assert torch.equal(made(past, rows).prediction_outputs, made(past, whole).prediction_outputs)


@torch.no_grad()
def test_a_short_past_is_a_context_whose_start_is_missing() -> None:
    made, past = model(), series(CONTEXT)
    mask = torch.arange(CONTEXT).view(1, -1, 1) >= 5
    expected = made(past, mask.expand_as(past)).prediction_outputs
    assert torch.equal(made(past[:, 5:]).prediction_outputs, expected)


@every_variant
@both_tokens
@torch.no_grad()
def test_another_unit_and_another_zero_give_the_same_forecast_in_them(variant: str, tokens: str) -> None:
    made = model(variant=variant, tokens=tokens, loss="quantile", quantiles=QUANTILES)
    past = series(2 * CONTEXT + 7)
    mask = torch.rand(past.shape, generator=torch.Generator().manual_seed(3)) < 0.8
    factor, shift = torch.tensor([0.01, 1.0, 300.0]), torch.tensor([-5.0, 90.0, 0.0])
    before, after = (made(x, mask).quantile_outputs for x in (past, past * factor + shift))
    torch.testing.assert_close(after, before * factor.unsqueeze(-1) + shift.unsqueeze(-1), rtol=1e-9, atol=1e-9)


@both_tokens
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_a_constant_series_goes_on_as_it_is(tokens: str, dtype: torch.dtype) -> None:
    made = model(dtype, tokens=tokens)
    past = torch.tensor([0.1, -77.7, 0.0], dtype=dtype).expand(2, 2 * CONTEXT + 1, -1)
    torch.testing.assert_close(made(past).prediction_outputs, past[:, :HORIZON], rtol=1e-6, atol=0)


@torch.no_grad()
def test_a_small_wave_at_a_high_level_is_no_constant() -> None:
    wave = torch.sin(torch.arange(2.0 * CONTEXT)).view(1, -1, 1)
    output = model(torch.float32, num_input_channels=1)(1e6 + 5 * wave)
    assert output.scale.item() == pytest.approx(5 * wave[:, -CONTEXT:].std(correction=0).item(), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [3, 96, 1000, 10_001])
def test_equal_values_have_no_deviation(count: int, dtype: torch.dtype) -> None:
    levels = torch.logspace(-6, 8, 300, dtype=dtype).view(-1, 1)
    _, scale = moments(levels.expand(-1, count), torch.ones(300, count, dtype=torch.bool))
    assert (scale == 0).all()


@both_tokens
@torch.no_grad()
def test_weights_of_half_precision_do_not_round_the_values(tokens: str) -> None:
    made, past = model(torch.bfloat16, tokens=tokens, use_level=True), series(2 * CONTEXT).float()
    output = made(past + 10_000)
    assert output.prediction_outputs.dtype == torch.float32
    torch.testing.assert_close(output.scale, model(torch.float32, use_level=True)(past).scale, rtol=1e-2, atol=0)
    off = model(torch.bfloat16, tokens=tokens)
    torch.testing.assert_close(
        off(past + 10_000).prediction_outputs - 10_000, off(past).prediction_outputs, rtol=0.05, atol=0.05
    )


@both_tokens
@torch.no_grad()
def test_of_a_constant_history_only_that_it_was_constant_counts(tokens: str) -> None:
    made, recent = model(torch.float32, tokens=tokens), series(CONTEXT).float()
    first, second = (
        made(torch.cat([torch.full((2, 2 * CONTEXT, CHANNELS), level), recent], dim=1)).prediction_outputs
        for level in (0.1, -77.7)
    )
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@every_variant
@both_tokens
@torch.no_grad()
def test_a_token_without_a_value_is_not_read(variant: str, tokens: str) -> None:
    made, past = model(variant=variant, tokens=tokens, patch_stride=4), series(3 * CONTEXT)
    late = torch.cat([torch.full((2, 2 * CONTEXT, CHANNELS), torch.nan), past], dim=1)
    found = made(late, ~late.isnan()).prediction_outputs
    torch.testing.assert_close(found, made(past).prediction_outputs, rtol=0, atol=1e-12)


@both_tokens
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_values_of_any_size_stay_finite(tokens: str, size: float) -> None:
    made = model(torch.float32, tokens=tokens)
    past = series(2 * CONTEXT).float()
    plain, scaled = (made(x).prediction_outputs for x in (past, past * size))
    torch.testing.assert_close(scaled / size, plain, rtol=1e-3, atol=1e-3)


@every_variant
@torch.no_grad()
def test_with_patches_the_channels_know_nothing_of_each_other(variant: str) -> None:
    made = model(variant=variant)
    past = series(2 * CONTEXT + 7)
    moved = past.clone()
    moved[..., 1] += torch.randn(2, 2 * CONTEXT + 7)
    before, after = made(past).prediction_outputs, made(moved).prediction_outputs
    assert torch.equal(after[..., [0, 2]], before[..., [0, 2]])
    assert not torch.equal(after[..., 1], before[..., 1])


@every_variant
@pytest.mark.parametrize("level", [False, True], ids=["", "level"])
@torch.no_grad()
def test_with_variates_every_forecast_depends_on_every_channel(variant: str, level: bool) -> None:
    channels = 9  # more than a segment or a window, and no multiple of them
    made = model(variant=variant, tokens="variates", num_input_channels=channels, use_level=level)
    for time in (CONTEXT, 2 * CONTEXT):
        past = series(time, batch=1, channels=channels).expand(channels, -1, -1)
        moved = past.clone()
        for row in range(channels):
            moved[row, -CONTEXT:, row] += torch.randn(CONTEXT)
        change = made(moved).prediction_outputs - made(past).prediction_outputs
        assert (change.abs().amax(1) > 1e-9).all()  # (channel that moved, channel that is forecast)


@every_variant
@both_tokens
@torch.no_grad()
def test_the_history_reaches_the_forecast(variant: str, tokens: str) -> None:
    made = model(variant=variant, tokens=tokens)
    past = series(3 * CONTEXT)
    far = past.clone()
    far[:, 1:4] += torch.randn(2, 3, CHANNELS)
    assert not torch.equal(made(far).prediction_outputs, made(past).prediction_outputs)
    assert not torch.equal(made(past[:, -CONTEXT:]).prediction_outputs, made(past).prediction_outputs)


@every_variant
@both_tokens
def test_every_parameter_of_a_new_model_gets_a_gradient(variant: str, tokens: str) -> None:
    torch.manual_seed(0)
    made = TitansForPrediction(config(variant=variant, tokens=tokens))
    made(series(3 * CONTEXT), future_values=series(HORIZON, seed=2)).loss.backward()
    idle = [name for name, x in made.named_parameters() if x.grad is None or not x.grad.abs().sum() > 0]
    assert not idle


@every_variant
def test_gradient_checkpointing_gives_the_same_gradients(variant: str) -> None:
    found = []
    for checkpointing in (False, True):
        made = model(variant=variant).train()
        if checkpointing:
            made.gradient_checkpointing_enable()
        made(series(2 * CONTEXT), future_values=series(HORIZON, seed=2)).loss.backward()
        found.append([x.grad for x in made.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=0, atol=1e-12)


@every_variant
@both_tokens
def test_it_trains_under_bfloat16_autocast(variant: str, tokens: str) -> None:
    made = model(torch.float32, variant=variant, tokens=tokens).train()
    past, future = series(2 * CONTEXT), series(HORIZON, seed=2)
    plain = made(past, future_values=future)
    with torch.autocast("cpu", torch.bfloat16):
        output = made(past, future_values=future)
    assert output.prediction_outputs.dtype == output.loss.dtype == torch.float32
    torch.testing.assert_close(output.prediction_outputs, plain.prediction_outputs, rtol=0.1, atol=0.3)
    output.loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in made.parameters())


@pytest.mark.parametrize("preset", ["gated-deltanet", "linear-attention", "ttt-mlp"])
@both_tokens
@torch.no_grad()
def test_the_memory_may_have_any_rule(preset: str, tokens: str) -> None:
    torch.manual_seed(0)
    made = TitansForPrediction(
        TitansPredictionConfig.from_preset(preset, **{**TINY, "tokens": tokens, "num_persistent_tokens": 0})
    )
    assert made.config.preset == preset
    assert made(series(2 * CONTEXT)).prediction_outputs.isfinite().all()


@torch.no_grad()
def test_without_dropout_in_evaluation_and_with_it_in_training() -> None:
    made, past = model(dropout=0.5), series(CONTEXT)
    assert torch.equal(made(past).prediction_outputs, made(past).prediction_outputs)
    made.train()
    assert not torch.equal(made(past).prediction_outputs, made(past).prediction_outputs)


@torch.no_grad()
def test_tuples_and_hidden_states() -> None:
    made, past = model(num_hidden_layers=2), series(CONTEXT)
    output = made(past, output_hidden_states=True)
    assert [tuple(x.shape) for x in output.hidden_states] == [(2 * CHANNELS, 4, 8)] * 3
    assert torch.equal(made(past, return_dict=False)[0], output.prediction_outputs)
    assert torch.equal(made(past, future_values=series(HORIZON), return_dict=False)[1], output.prediction_outputs)


@both_tokens
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForTimeSeriesPrediction, TitansForPrediction])
@torch.no_grad()
def test_a_saved_model_comes_back(auto: Any, tokens: str, tmp_path: Path) -> None:
    made = model(torch.float32, tokens=tokens, variant="mag", loss="quantile", quantiles=QUANTILES)
    made.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is TitansForPrediction and loaded.config.quantiles == QUANTILES
    past = series(2 * CONTEXT)
    assert torch.equal(loaded(past).quantile_outputs, made(past).quantile_outputs)


@pytest.mark.slow
def test_the_auto_classes_know_the_model_once_titans_is_imported(tmp_path: Path) -> None:
    model(torch.float32).save_pretrained(tmp_path)
    program = (
        "import sys, titans\n"
        "from transformers import AutoModelForTimeSeriesPrediction\n"
        "made = AutoModelForTimeSeriesPrediction.from_pretrained(sys.argv[1])\n"
        "assert type(made).__name__ == 'TitansForPrediction'\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_trainer_of_transformers_trains_and_evaluates_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wave = torch.sin(torch.arange(200) / 3).unsqueeze(-1) * torch.tensor([1.0, 5.0, 0.1]) + 3
    windows = [
        {"past_values": wave[i : i + CONTEXT], "future_values": wave[i + CONTEXT : i + CONTEXT + HORIZON]}
        for i in range(180)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=30, per_device_train_batch_size=16, learning_rate=0.01, report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True, label_names=["future_values"],
    )  # fmt: skip
    trainer = Trainer(TitansForPrediction(config()), arguments, train_dataset=windows, eval_dataset=windows[:50])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    found = trainer.predict(windows[:50])
    assert found.metrics["test_loss"] < before / 5
    assert found.predictions[0].shape == (50, HORIZON, CHANNELS)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"context_length": 0}, "context_length is 0; expected a whole number of at least 1"),
        ({"prediction_length": 2.5}, "prediction_length is 2.5; expected a whole number of at least 1"),
        ({"num_input_channels": -1}, "num_input_channels is -1; expected a whole number of at least 1"),
        ({"patch_stride": 0}, "patch_stride is 0; expected a whole number of at least 1"),
        ({"patch_length": 13}, "patch_length is 13 and context_length is 12; expected patches that fit"),
        ({"tokens": "words"}, "tokens is 'words'; expected one of patches, variates"),
        ({"loss": "rmse"}, "loss is 'rmse'; expected one of mse, mae, huber, quantile"),
        ({"huber_delta": 0}, "huber_delta is 0; expected a positive number"),
        ({"dropout": 1.0}, r"dropout is 1.0; expected a number in \[0, 1\)"),
        ({"dropout": "much"}, r"dropout is 'much'; expected a number in \[0, 1\)"),
        ({"linear_skip": 1}, "linear_skip is 1; expected True or False"),
        ({"loss": "quantile"}, "loss is 'quantile' and quantiles is None; expected quantiles with the quantile loss"),
        ({"quantiles": [0.5]}, "expected quantiles with the quantile loss"),
        ({"loss": "quantile", "quantiles": [0.9, 0.1]}, "expected a list of rising numbers between 0 and 1"),
        ({"loss": "quantile", "quantiles": [0.5, 1.0]}, "expected a list of rising numbers between 0 and 1"),
        ({"loss": "quantile", "quantiles": 0.5}, "quantiles is 0.5; expected a list of rising numbers between 0 and 1"),
        ({"loss": "quantile", "quantiles": ["low"]}, "expected a list of rising numbers between 0 and 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_makes_no_sense_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        config(**fields)
    assert "\n" not in str(caught.value)


def test_inputs_that_make_no_sense_are_refused() -> None:
    made, past, future = model(), series(CONTEXT), series(HORIZON)
    broken = past.clone()
    broken[1, 3, 0] = torch.nan
    for inputs, sentence in (
        ((past[0],), rf"past_values has shape \(12, 3\); expected \(batch, time, {CHANNELS}\)"),
        ((past[..., :2],), r"past_values has shape \(2, 12, 2\); expected \(batch, time, 3\)"),
        ((past[:, :0],), r"past_values has shape \(2, 0, 3\); expected \(batch, time, 3\)"),
        ((broken,), "past_values has values that are not finite; expected them to be masked"),
        ((past, None, future[:, :4]), r"future_values has shape \(2, 4, 3\); expected \(2, 5, 3\)"),
        ((past, None, future * torch.inf), "future_values has values that are not finite"),
        ((past, torch.ones(2, 11)), r"the mask of past_values has shape \(2, 11\); expected \(2, 12, 3\) or \(2, 12\)"),
        ((past, torch.ones(2, 12, 2)), r"the mask of past_values has shape \(2, 12, 2\); expected \(2, 12, 3\)"),
        ((past, None, future, torch.ones(3)), r"the mask of future_values has shape \(3,\); expected \(2, 5, 3\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            made(*inputs)
    with pytest.raises(ValueError, match="past_values has 3 new values; expected 4 or more"):
        made.remember(past[:, :3])
    with pytest.raises(ValueError, match="already_read is 9; expected at most 8, context_length less"):
        made.remember(past, already_read=9)
    with pytest.raises(ValueError, match="the cache comes from a model with tokens='patches'"):
        model(tokens="variates")(past, past_key_values=made.remember(past))
    with pytest.raises(ValueError, match="the cache holds 6 sequences and the batch has 3"):
        made(past[:1], past_key_values=made.remember(past))
