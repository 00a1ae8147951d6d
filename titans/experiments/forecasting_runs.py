"""One run of the experiment on forecasting: a model trained on the windows of a file, and tested on every window."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import titans
from titans.forecasting.baselines import build_baseline
from titans.forecasting.data import Values, read_series, season_of
from titans.forecasting.stream import streamed_errors
from titans.forecasting.training import FitSettings, fit, forecast_errors
from titans.forecasting.windows import Scaler, Windows, make_windows, split_rows
from titans.models import TitansForPrediction, TitansPredictionConfig

LOOK_BACKS = (96, 336, 720)
# Months of 30 days of training, validation and test, as all comparisons on the ETT files have them.
ETT_MONTHS = (12, 4, 4)


@dataclass(frozen=True)
class Run:
    """One model to train on one data set for one horizon with one seed, and to test.

    Attributes:
        path: of the CSV file.
        context: the look-back.
        history: values before it that the memory reads in training. In the test it has then read all there is, from the
            first row on. 0: none, and none.
        options: of the model; one of ours has a ``variant``.
        fit: fields of FitSettings.
    """

    path: str
    model: str
    horizon: int
    seed: int
    context: int
    history: int
    options: Mapping[str, Any]
    fit: Mapping[str, Any]
    test_windows: int | None

    @property
    def data(self) -> str:
        return Path(self.path).stem

    @property
    def name(self) -> str:
        """That of its file; ``context`` and ``history`` are in it where they are not those of the table."""
        data = re.sub(r"[^\w.+-]+", "-", self.data)
        name = f"{data}-{self.model}-{self.horizon}-{self.seed}"
        name += f"-context{self.context}" if self.context != LOOK_BACKS[0] else ""
        return name + (f"-history{self.history}" if self.history else "")

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that its figures depend on."""
        return asdict(self) | {"path": load_data(self.path).digest, "version": titans.__version__}

    def file(self, out: Path) -> Path:
        """Its figures, in the folder of an experiment."""
        return out / "runs" / f"{self.name}.json"


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        values: (time, channels), as they stand in the file.
        names: of the channels.
        season: values of one season; 1 where the stamps tell none.
        ends: where the training, validation and test parts end.
        digest: of the file.
    """

    values: Values
    names: tuple[str, ...]
    season: int
    ends: tuple[int, int, int]
    digest: str

    @property
    def scaler(self) -> Scaler:
        """Of the training part."""
        return Scaler.fit(self.values[: self.ends[0]])


@lru_cache(maxsize=8)
def load_data(path: str) -> Data:
    """The data set of a file with one column per variate; its rows are taken as they come."""
    series = read_series(path, stamps="rows")
    if series[0].name:
        raise ValueError(f"{path} has one row per series and time; expected one column per variate")
    values = series[0].values
    ends = split_ends(Path(path).stem, len(values))
    digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    return Data(values, series[0].names, season_of(series[0].freq) or 1, ends, digest)


def is_called(name: str, start: str) -> bool:
    """Whether the name of a data set begins so, in upper or lower case."""
    return name.lower().startswith(start.lower())


def split_ends(name: str, rows: int) -> tuple[int, int, int]:
    """Where the training, validation and test parts of a data set end."""
    if not is_called(name, "ETT"):
        return split_rows(rows)
    month = 30 * (96 if is_called(name, "ETTm") else 24)
    first, second, third = (month * sum(ETT_MONTHS[: count + 1]) for count in range(3))
    if rows < third:
        raise ValueError(f"{name} has {rows} rows; expected at least {third}, {sum(ETT_MONTHS)} months")
    return first, second, third


def _past(run: Run, data: Data) -> int:
    return max(run.context, data.season) if run.model == "last-season" else run.context + run.history


def check_run(run: Run) -> None:
    """Raises a ``ValueError`` where the parts of a data set have no window for a run."""
    data = load_data(run.path)
    past, (train, valid, test) = _past(run, data), data.ends
    if train < past + run.horizon:
        raise ValueError(
            f"the training part of {run.data} has {train} rows; expected at least {past + run.horizon}, for a "
            f"look-back of {past} and a horizon of {run.horizon}"
        )
    for name, rows in (("validation", valid - train), ("test", test - valid)):
        if rows < run.horizon:
            raise ValueError(
                f"horizon is {run.horizon} and the {name} part of {run.data} has {rows} rows; expected a shorter one"
            )
    for name, start, stop in (("training", 0, train), ("validation", train, valid), ("test", valid, test)):
        if not np.isfinite(data.values[start:stop]).any():
            raise ValueError(f"the {name} part of {run.data}, rows {start} to {stop}, has no values; expected some")


def windows_of(run: Run) -> tuple[Windows, Windows, Windows]:
    """The training, validation and test windows of a run, in z-scores; every one of them."""
    data = load_data(run.path)
    scaled, (train, valid, test) = data.scaler.scale(data.values), data.ends
    past = _past(run, data)
    parts = ((0, train), (train, valid), (valid, test))
    made = [make_windows([scaled], [part], past, run.horizon) for part in parts]
    return made[0], made[1], made[2] if run.test_windows is None else made[2].at_most(run.test_windows)


def build_model(run: Run) -> nn.Module:
    """The untrained model of a run."""
    data = load_data(run.path)
    channels = len(data.names)
    if "variant" not in run.options:
        return build_baseline(run.model, _past(run, data), run.horizon, channels, data.season, **run.options)
    lengths = {"context_length": run.context, "prediction_length": run.horizon}
    return TitansForPrediction(TitansPredictionConfig(num_input_channels=channels, **lengths, **run.options))


def do_run(run: Run) -> dict[str, Any]:
    """Trains and tests a model; its figures, in z-scores, and what it forecast in one window."""
    start = time.process_time()
    train, valid, test = windows_of(run)
    torch.manual_seed(run.seed)
    model = build_model(run)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shortest = run.context if run.history else None
    settings = FitSettings(**run.fit, seed=run.seed, shortest_past=shortest)
    fitted = fit(model, train, valid, settings) if parameters else None
    figures: dict[str, Any] = {
        "data": run.data, "model": run.model, "horizon": run.horizon, "seed": run.seed, "context": run.context,
        "history": run.history, "parameters": parameters, "windows": len(test),
        "steps": fitted.steps if fitted else 0, "valid": fitted.valid if fitted else None,
    }  # fmt: skip
    if isinstance(model, TitansForPrediction) and run.history:
        short = replace(test, past=run.context)
        errors, unread = streamed_errors(model, short), forecast_errors(model, short)
        figures["without_history"] = {"mse": unread.mse, "mae": unread.mae}
    else:
        errors = forecast_errors(model, test)
        figures["example"] = _example(run, model, test)
    if not math.isfinite(errors.mse):
        raise ValueError("its test error is not finite; expected a lower learning rate")
    figures |= {"mse": errors.mse, "mae": errors.mae, "seconds": time.process_time() - start}
    return figures | {"settings": run.settings}


@torch.no_grad()
def _example(run: Run, model: nn.Module, test: Windows) -> dict[str, Any]:
    """The forecast of the last channel in the window in the middle, in the units of the data."""
    data, middle = load_data(run.path), len(test) // 2
    batch = test.batch(torch.tensor([middle]))
    made = model(batch["past_values"], batch["past_observed_mask"]).prediction_outputs[0].double().numpy()
    values = data.scaler.restore(made)[:, -1]
    return {
        "origin": int(test.origins[middle]),
        "channel": data.names[-1],
        "values": [round(x, 5) for x in values.tolist()],
    }
