"""Training and testing forecasters: what can be learned is learned, what cannot is not, and every window counts."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from titans import TitansForPrediction, TitansPredictionConfig
from titans.forecasting.training import Errors, FitSettings, fit, forecast_errors, mean_loss
from titans.forecasting.windows import Windows, make_windows


def parts(values: np.ndarray, past: int, future: int) -> list[Windows]:
    ends = [round(share * len(values)) for share in (0.0, 0.6, 0.8, 1.0)]
    return [make_windows([values], [part], past, future) for part in pairwise(ends)]


def forecaster(**fields: Any) -> TitansForPrediction:
    torch.manual_seed(0)
    small = {
        "context_length": 24, "hidden_size": 16, "num_hidden_layers": 1, "memory_heads": 1, "patch_length": 8,
        "patch_stride": 4, "dropout": 0.0, "linear_skip": False,
    }  # fmt: skip
    return TitansForPrediction(TitansPredictionConfig(**small | fields))


def test_a_sine_is_forecast_to_a_hundredth() -> None:
    train, valid, test = parts(np.sin(2 * np.pi * np.arange(300) / 12)[:, None], 24, 6)
    model = forecaster(prediction_length=6)
    fit(model, train, valid, FitSettings(steps=150, learning_rate=2e-2, batch_size=16, evaluate_every=75))
    root_mean_square = 0.5**0.5
    assert forecast_errors(model, test).mse ** 0.5 < 1e-2 * root_mean_square


def test_a_random_walk_is_forecast_no_better_than_by_its_last_value() -> None:
    values = np.random.default_rng(0).normal(size=(1500, 8)).cumsum(0)
    values /= values.std(0)
    train, valid, test = parts(values, 24, 4)
    model = forecaster(prediction_length=4, num_input_channels=8)
    settings = FitSettings(steps=40, learning_rate=1e-2, batch_size=16, valid_windows=50)
    fit(model, train, valid, settings)
    last = np.mean([np.square(values[t : t + 4] - values[t - 1]).mean() for t in range(1200, 1497)])
    assert 0.98 * last < forecast_errors(model, test).mse < 2 * last


def halves(**batch: Any) -> SimpleNamespace:
    """A forecast that is half of the last value."""
    return SimpleNamespace(prediction_outputs=0.5 * batch["past_values"][:, -1:].expand(-1, 3, -1))


@pytest.mark.parametrize("batch_size", [1, 4, 128])
def test_the_errors_are_those_of_every_window(batch_size: int) -> None:
    values = np.random.default_rng(0).normal(size=(40, 2))
    values[33, 1] = np.nan
    errors = forecast_errors(halves, make_windows([values], [(20, 40)], 5, 3), batch_size)
    off = np.stack([values[t : t + 3] - 0.5 * np.nan_to_num(values[t - 1]) for t in range(20, 38)])
    np.testing.assert_allclose(errors.mse, np.nanmean(off**2), rtol=1e-6)
    np.testing.assert_allclose(errors.mae, np.nanmean(abs(off)), rtol=1e-6)
    np.testing.assert_allclose(errors.squared, np.nansum(off**2, 0), rtol=1e-6)
    assert errors.count.tolist() == [[18, 17], [18, 17], [18, 17]]


def test_inputs_go_to_the_device_that_was_asked_for_or_that_of_the_module() -> None:
    windows = make_windows([np.ones((9, 1))], [(0, 9)], 2, 1)
    devices = []

    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), device="meta"))

        def forward(self, past_values: torch.Tensor, **masks: torch.Tensor) -> SimpleNamespace:
            devices.append(past_values.device.type)
            return SimpleNamespace(prediction_outputs=torch.zeros(len(past_values), 1, 1))

    model = Elsewhere()
    forecast_errors(model, windows)
    forecast_errors(model.forward, windows)
    forecast_errors(model.forward, windows, device=torch.device("meta"))
    assert devices == ["meta", "cpu", "meta"]


def test_means_weigh_every_observed_value_alike() -> None:
    sums = torch.tensor([[4.0, 0.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 3.0]])
    assert (Errors(*sums).mse, Errors(*sums).mae) == (1.0, 0.5)


class Scale(nn.Module):
    """Forecasts the last value, scaled; the loss is the squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.shown: list[float] = []

    def forward(self, past_values: torch.Tensor, future_values: torch.Tensor, **masks: torch.Tensor) -> Any:
        if self.training:
            self.shown += past_values[:, -1, 0].tolist()
        return SimpleNamespace(loss=(self.scale * past_values[:, -1:] - future_values).square().mean())


def test_every_training_window_is_shown_before_one_is_shown_again() -> None:
    model = Scale()
    windows = make_windows([np.arange(11.0)[:, None]], [(0, 11)], 1, 1)
    fit(model, windows, windows, FitSettings(steps=5, batch_size=4))
    assert sorted(model.shown[:10]) == sorted(model.shown[10:20]) == list(range(10))


def test_the_weights_that_were_best_in_validation_are_kept_and_training_ends_when_they_stay_best() -> None:
    values = np.ones((60, 1))
    train = make_windows([values], [(0, 50)], 1, 1)
    valid = make_windows([np.where(np.arange(60) % 2, 1.0, 0.5)[:, None]], [(0, 60)], 1, 1)  # other data: 1 is too much
    model = Scale()
    fitted = fit(model, train, valid, FitSettings(steps=500, learning_rate=0.05, evaluate_every=5, patience=2))
    looks = [figure for _, figure in fitted.curve]
    assert fitted.valid == min(looks) and looks.index(min(looks)) == len(looks) - 3
    assert fitted.steps == fitted.curve[-3][0] and fitted.curve[-1][0] < 500
    assert mean_loss(model, valid) == pytest.approx(fitted.valid)


def test_the_same_seed_gives_the_same_model() -> None:
    train, valid, _ = parts(np.random.default_rng(0).normal(size=(200, 1)), 24, 4)
    trained = []
    for seed in (0, 0, 1):
        model = forecaster(prediction_length=4, dropout=0.1)
        fit(model, train, valid, FitSettings(steps=2, seed=seed, valid_windows=4))
        trained.append(model.head.weight.detach())
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"batch_size": 1.5}, "batch_size is 1.5; expected a whole number"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive number"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(fields: dict[str, Any], said: str) -> None:
    windows = make_windows([np.ones((9, 1))], [(0, 9)], 1, 1)
    with pytest.raises(ValueError) as error:
        fit(Scale(), windows, windows, FitSettings(**fields))
    assert str(error.value) == said


def test_parts_without_a_window_and_losses_that_are_not_finite_are_one_sentence() -> None:
    windows, none = (make_windows([np.ones((9, 1))], [(0, stop)], 2, 1) for stop in (9, 2))
    with pytest.raises(ValueError, match=r"^the validation part has no window of 2 \+ 1 values; expected a longer"):
        fit(Scale(), windows, none)
    broken = Scale()
    broken.scale.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^the validation loss was never finite; expected a lower learning rate"):
        fit(broken, windows, windows, FitSettings(steps=2))


def test_pasts_of_random_lengths_end_where_the_future_begins() -> None:
    values = np.arange(60.0).reshape(-1, 1)
    windows = make_windows([values], [(0, 60)], 20, 4)
    seen = []

    class Listener(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
            if self.training:
                seen.append(batch["past_values"].shape[1])
                assert (batch["past_values"][:, -1] + 1 == batch["future_values"][:, 0]).all()
            return SimpleNamespace(loss=(self.weight - 1).square())

    fit(Listener(), windows, windows, FitSettings(steps=60, batch_size=4, shortest_past=8))
    assert min(seen) == 8 and max(seen) == 20
    with pytest.raises(ValueError, match="shortest_past is 21; expected a number from 1 to 20"):
        fit(Listener(), windows, windows, FitSettings(steps=2, shortest_past=21))
