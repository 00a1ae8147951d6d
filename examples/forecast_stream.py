"""Forecast from the whole past: 100,000 values stream through the memory, at the same cost each, and none is kept.

The day's swing grows and shrinks with the week, and two days of noisy context hardly tell where in the week they are. A
tiny model trains for some seconds on contexts after histories of all lengths, and so learns to read a stream without an
end. It is compared with itself, memory off, and with a model that was trained on contexts alone.

    python examples/forecast_stream.py
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from titans import TitansForPrediction, TitansPredictionConfig
from titans.forecasting import Forecaster, fit
from titans.forecasting.training import FitSettings
from titans.forecasting.windows import Scaler, make_windows

CONTEXT, HORIZON, TRAIN, VALID, ROWS = 48, 24, 6_000, 7_000, 107_024
day, week = (np.sin(2 * np.pi * np.arange(ROWS) / hours) for hours in (24, 168))
values = (50 + 10 * day * (1 + 0.5 * week) + 5 * week + np.random.default_rng(0).normal(size=ROWS))[:, None]
scaler = Scaler.fit(values[:TRAIN])


def train(history: int) -> TitansForPrediction:
    """A model that has seen contexts after histories of up to this length."""
    torch.manual_seed(0)
    sizes = {"context_length": CONTEXT, "prediction_length": HORIZON, "patch_length": 24, "patch_stride": 24}
    model = TitansForPrediction(TitansPredictionConfig(variant="mag", hidden_size=32, num_hidden_layers=1, **sizes))
    ranges = (0, TRAIN), (TRAIN, VALID)
    parts = [make_windows([scaler.scale(values)], [rows], CONTEXT + history, HORIZON) for rows in ranges]
    fit(model, *parts, FitSettings(steps=300, learning_rate=1e-2, valid_windows=100, shortest_past=CONTEXT))
    return model


model = train(history=768)
streamed, off = Forecaster(model, scaler), Forecaster(model, scaler, test_time_learning=False)
forecasters = {"memory on": streamed, "memory off": off, "contexts alone": Forecaster(train(0), scaler, False)}
errors, start = {name: 0.0 for name in forecasters}, time.perf_counter()
for row in range(VALID, ROWS - HORIZON, 500):
    for name, forecaster in forecasters.items():
        forecaster.observe(values[row : row + 500])
        errors[name] += np.abs(forecaster.forecast() - values[row + 500 : row + 500 + HORIZON]).mean() / 200
    if streamed.seen % 20_000 == 0:
        print(f"{streamed.seen:>7,} values, {streamed.nbytes / 1024:.1f} KiB kept, {time.perf_counter() - start:.1f} s")
print("\n".join(f"{name}: mean absolute error {error:.2f}" for name, error in errors.items()))
streamed.save(path := Path(tempfile.mkdtemp()) / "series.state")
later = Forecaster.load(path, model)  # in another process, on another day
print(
    f"A week ahead, in place and from the file: equal is {np.array_equal(later.forecast(168), streamed.forecast(168))}"
)
