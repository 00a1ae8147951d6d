from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MAE, MSE, DistributionLoss, HuberLoss, IQLoss, MQLoss
from neuralforecast.utils import AirPassengersDF, AirPassengersPanel, AirPassengersStatic

from titans.forecasting import Titans
from titans.models.prediction import TitansForPrediction

SMALL: dict[str, Any] = {
    "h": 6, "input_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "patch_length": 8, "patch_stride": 8,
    "max_steps": 2, "val_check_steps": 1, "windows_batch_size": 16, "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
LOSSES = [MAE(), MSE(), HuberLoss(), MQLoss(level=[80]), DistributionLoss("StudentT", level=[80]),
          DistributionLoss("Normal", level=[80]), IQLoss()]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lightning writes where it runs, if it writes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fitted(df: pd.DataFrame = AirPassengersDF, **arguments: Any) -> NeuralForecast:
    forecaster = NeuralForecast(models=[Titans(**SMALL | arguments)], freq="ME")
    forecaster.fit(df)
    return forecaster


def series(y: np.ndarray, **columns: np.ndarray) -> pd.DataFrame:
    dates = pd.date_range("2000-01-31", periods=len(y), freq="ME")
    return pd.DataFrame({"unique_id": "a", "ds": dates, "y": y, **columns})


def test_neuralforecast_is_imported_with_the_class_and_not_with_the_package() -> None:
    code = "import sys, titans.forecasting; print({'neuralforecast', 'pandas', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: getattr(loss, "distribution", type(loss).__name__))
def test_any_loss_goes_through_fit_predict_and_cross_validation(loss: torch.nn.Module, folder: Path) -> None:
    forecaster = NeuralForecast(models=[Titans(**SMALL, loss=loss, valid_loss=loss)], freq="ME")
    tested = forecaster.cross_validation(AirPassengersDF, n_windows=3, step_size=2, val_size=6)
    forecast = forecaster.predict(df=AirPassengersDF)
    assert len(tested) == 3 * 6 and len(forecast) == 6
    values = forecast.drop(columns=["unique_id", "ds"])
    assert len(values.columns) == len(loss.output_names)
    assert np.isfinite(values.to_numpy()).all()
    assert values.to_numpy().min() > -2000 and values.to_numpy().max() < 3000  # scaled back
    if isinstance(loss, DistributionLoss):
        assert (values["Titans-lo-80"] < values["Titans-hi-80"]).all()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_it_forecasts_what_the_same_network_forecasts_by_itself(variant: str) -> None:
    forecaster = fitted(variant=variant)
    network = forecaster.models[0].network
    alone = TitansForPrediction(network.config).eval()
    alone.load_state_dict(network.state_dict())
    past = torch.tensor(AirPassengersDF["y"].to_numpy()[-24:]).view(1, -1, 1)
    with torch.no_grad():
        expected = alone(past).prediction_outputs.flatten()
    np.testing.assert_allclose(forecaster.predict()["Titans"], expected, rtol=1e-4)


def test_what_is_saved_forecasts_the_same_when_it_is_loaded(folder: Path) -> None:
    loss = MQLoss(quantiles=[0.1, 0.5, 0.9])
    forecaster = fitted(loss=loss, variant="mac", config={"memory_depth": 1, "segment_size": 2})
    forecaster.save(str(folder / "kept"))
    loaded = NeuralForecast.load(str(folder / "kept"))
    assert loaded.models[0].network.config.memory_depth == 1
    pd.testing.assert_frame_equal(loaded.predict(), forecaster.predict())


def test_a_seed_gives_the_same_forecast_again_and_another_seed_another() -> None:
    first, again, other = (fitted(random_seed=seed).predict()["Titans"].to_numpy() for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert abs(first - other).max() > 1


def test_values_that_are_not_available_change_nothing() -> None:
    mask = np.ones(len(AirPassengersDF))
    mask[10:30] = mask[-5:-2] = 0
    forecasts = []
    for filled in (0.0, 1e6):
        df = AirPassengersDF.assign(available_mask=mask)
        df.loc[mask == 0, "y"] = filled
        forecasts.append(fitted(df).predict()["Titans"].to_numpy())
    assert np.isfinite(forecasts[0]).all()
    np.testing.assert_array_equal(*forecasts)


def test_a_series_shorter_than_the_input_is_forecast() -> None:
    forecaster = fitted(start_padding_enabled=True)
    short = forecaster.predict(df=AirPassengersDF.tail(10))["Titans"]
    assert np.isfinite(short).all()


def test_exogenous_variables_of_every_kind_are_read() -> None:
    model = Titans(
        **SMALL, hist_exog_list=["a", "b"], futr_exog_list=["c"], stat_exog_list=["d"], loss=MQLoss(), dropout=0.0
    )
    batch = {
        "insample_y": torch.randn(3, 24, 1), "insample_mask": torch.ones(3, 24, 1), "hist_exog": torch.randn(3, 24, 2),
        "futr_exog": torch.randn(3, 30, 1), "stat_exog": torch.randn(3, 1),
    }  # fmt: skip
    exogenous = [batch[name].requires_grad_() for name in ("hist_exog", "futr_exog", "stat_exog")]
    outputs = model(batch)
    assert outputs.shape == (3, 6, model.loss.outputsize_multiplier)
    for gradient in torch.autograd.grad(outputs.sum(), exogenous):
        assert bool((gradient != 0).all())


def test_a_panel_with_exogenous_and_categorical_variables_goes_through() -> None:
    panel = AirPassengersPanel.assign(month=AirPassengersPanel["ds"].dt.month)
    model = Titans(
        **SMALL, hist_exog_list=["y_[lag12]"], futr_exog_list=["trend", "month"], stat_exog_list=["airline1"],
        cat_exog_list=["month"], categorical_cardinalities={"month": 12},
    )  # fmt: skip
    forecaster = NeuralForecast(models=[model], freq="ME")
    tested = forecaster.cross_validation(panel, static_df=AirPassengersStatic, n_windows=2)
    assert len(tested) == 2 * 6 * 2
    assert np.isfinite(tested["Titans"]).all()


def test_noise_that_is_known_ahead_is_forecast_and_noise_that_is_not_is_not() -> None:
    noise = np.random.default_rng(0).normal(size=300)
    errors = {}
    for known in ([], ["noise"]):
        model = Titans(**SMALL | {"max_steps": 40, "learning_rate": 1e-2}, futr_exog_list=known)
        forecaster = NeuralForecast(models=[model], freq="ME")
        tested = forecaster.cross_validation(series(10 + noise, noise=noise), n_windows=10)
        errors[bool(known)] = (tested["Titans"] - tested["y"]).abs().mean()
    assert errors[True] < 0.3
    assert errors[False] > 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"h": 0}, "h is 0; expected at least 1"),
        ({"input_size": 24.0}, r"input_size is 24\.0; expected a whole number"),
        ({"variant": "mab"}, "variant is 'mab'; expected one of lmm, mac, mag, mal"),
        ({"patch_stride": 0}, "patch_stride is 0; expected a whole number of at least 1"),
        ({"dropout": 1.0}, r"dropout is 1\.0; expected a number in \[0, 1\)"),
        ({"hiden_size": 8}, "hiden_size is not an argument of Titans; did you mean hidden_size?"),
        ({"config": {"memory_dept": 1}}, "memory_dept is not a field for config; did you mean memory_depth?"),
        ({"config": {"memory_depth": 0}}, "memory_depth is 0; expected a whole number of at least 1"),
        ({"loss": torch.nn.MSELoss()}, r"loss is MSELoss\(\); expected one of neuralforecast.losses.pytorch"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Titans(**SMALL | arguments)
