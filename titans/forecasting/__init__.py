"""Time series: reading them, training forecasters on them, forecasting from the whole past, and neuralforecast."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans.forecasting.data import read_series
    from titans.forecasting.neural import Titans
    from titans.forecasting.stream import Forecaster
    from titans.forecasting.trained import TrainedForecaster, fit_series
    from titans.forecasting.training import fit

_HOME = {
    "Forecaster": "stream", "Titans": "neural", "TrainedForecaster": "trained", "fit": "training",
    "fit_series": "trained", "read_series": "data",
}  # fmt: skip
__all__ = ["Forecaster", "Titans", "TrainedForecaster", "fit", "fit_series", "read_series"]


def __getattr__(name: str) -> Any:
    """Loads a part when it is asked for: only ``Titans`` needs neuralforecast."""
    if name in _HOME:
        return getattr(import_module(f"titans.forecasting.{_HOME[name]}"), name)
    raise AttributeError(f"module 'titans.forecasting' has no attribute {name!r}")
