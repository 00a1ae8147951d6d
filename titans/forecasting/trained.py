"""A forecaster and what it knows of its data: trained on series, kept in a folder, forecasting what follows others."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from titans.files import write_json
from titans.forecasting.data import Series, Values, season_of
from titans.forecasting.stream import Forecaster
from titans.forecasting.training import FitSettings, fit
from titans.forecasting.windows import Scaler, make_windows, split_rows
from titans.models.configuration import TitansPredictionConfig
from titans.models.loading import choose_device, quiet, read_config
from titans.models.prediction import TitansForPrediction
from titans.models.tokenizer import check_new_folder
from titans.report.plots import Forecast, plot_forecasts
from titans.report.progress import Progress, silent
from titans.words import nearest, require_whole, sentence

FILE = "forecast.json"
CONTEXT = 96  # where nobody says otherwise, and the data is long enough
PANELS = 6  # variates that are drawn
EXPECTED = "expected a folder written by titans forecast fit"


@dataclass(frozen=True)
class About:
    """What a forecaster knows of its data.

    Attributes:
        names: of the channels.
        freq: from one time to the next, see :class:`Series`.
        season: values of a season; None: unknown.
        scalers: mean and deviation of each channel, by the name of the series.
        seen: the last time of each series that was trained or validated on; what follows is there to test.
        history: values before the context that the memory read in training, at most.
        reading: options of ``read_series`` that read such data.
        fitted: how the training went.
    """

    names: Sequence[str]
    freq: str
    season: int | None
    scalers: Mapping[str, Sequence[Sequence[float]]]
    seen: Mapping[str, str | int]
    history: int = 0
    reading: Mapping[str, Any] = field(default_factory=dict)
    fitted: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainedForecaster:
    """A model with what it knows of its data."""

    model: TitansForPrediction
    about: About

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Those of the model; the middle alone if it has none."""
        return tuple(self.model.config.quantiles or (0.5,))

    @property
    def point(self) -> int:
        """Which of the quantiles is the point forecast."""
        return self.model.config.point_quantile

    @property
    def interval(self) -> str:
        """What the outermost quantiles are called; empty without any."""
        return f"{self.quantiles[-1] - self.quantiles[0]:.0%} interval" if len(self.quantiles) > 1 else ""

    def scaler(self, series: Series) -> Scaler:
        """That of the training, or, for a series that was not there, of its first ``context_length`` rows.

        Later rows may be among those that are tested. Only a channel without a value in these has more of them read.
        """
        known = self.about.scalers.get(series.name)
        if known:
            return Scaler(*map(np.asarray, known))
        needed = 1 + int((~np.isnan(series.values)).argmax(axis=0).max())
        return Scaler.fit(series.values[: max(needed, self.model.config.context_length)])

    def forecast(self, series: Series, horizon: int | None = None, whole_past: bool = False) -> Values:
        """What follows the last row, (horizon, channels, quantiles), in the units of the data.

        NaN for a channel without a value in the last ``context_length`` rows.

        Args:
            horizon: rows; beyond those of the training, forecasts are taken for observations.
            whole_past: whether the memory reads the series from its first row on, or the context alone is looked at.
                Only a model that was trained with a history can read one.
        """
        self.check(series, whole_past)
        forecaster = Forecaster(self.model, self.scaler(series), test_time_learning=whole_past)
        forecaster.observe(series.values if whole_past else series.values[-self.model.config.context_length :])
        made = forecaster.forecast(horizon, quantiles=self.model.config.quantiles is not None)
        return made if made.ndim == 3 else made[..., None]

    def check(self, series: Series, whole_past: bool = False) -> None:
        """Raises a ``ValueError`` at a series that this model cannot forecast, or not from its whole past."""
        about, context, where = self.about, self.model.config.context_length, _called(series)
        if list(series.names) != list(about.names):
            raise ValueError(f"{where} has the columns {series.names}; expected {tuple(about.names)}, as in training")
        if series.freq != about.freq:
            raise ValueError(f"{where} has steps of {series.freq}; expected {about.freq}, as in training")
        if len(series) < context:
            raise ValueError(f"{where} has {len(series)} rows; expected at least the context of the model, {context}")
        if whole_past and not about.history:
            raise ValueError(
                "the model was trained without a history; expected one fitted with --history for forecasts from the "
                "whole past"
            )

    def save(self, folder: Path) -> None:
        """Writes model and data to a folder, new or empty, which has all of it or nothing."""
        check_new_folder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        try:
            with quiet():
                self.model.save_pretrained(temporary)
            write_json(temporary / FILE, asdict(self.about))
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> TrainedForecaster:
        """What :meth:`save` wrote; a ``ValueError`` says what is wrong with any other folder."""
        folder = Path(folder)
        if not (folder / FILE).is_file():
            raise ValueError(f"{folder / FILE} is not there; {EXPECTED}")
        try:
            about = About(**read_config(folder / FILE))
        except TypeError as error:
            raise ValueError(f"{folder / FILE} has other fields ({sentence(error)}); {EXPECTED}") from error
        try:
            with quiet():
                model = TitansForPrediction.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # a damaged file raises whatever its reader raises
            raise ValueError(f"{folder} cannot be loaded: {sentence(error)}") from error
        return cls(model.to(choose_device(device)).eval(), about)


def fit_series(
    series: Sequence[Series],
    horizon: int,
    context: int | None = None,
    history: int = 0,
    valid: float = 0.1,
    test: float = 0.2,
    season: int | None = None,
    fields: Mapping[str, Any] | None = None,
    settings: FitSettings = FitSettings(),  # noqa: B008, frozen
    device: str = "cpu",
    reading: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> TrainedForecaster:
    """Trains a forecaster on the first part of each series, chooses the best on the next, and keeps off the last.

    Args:
        series: with the same channels at the same distances.
        horizon, context: values that are forecast, and looked back on. By default the context is the longest of 96,
            the horizon and a season, but at most half of what there is to train on.
        history: values before the context that the memory reads in training at most, a random number of them for each
            batch, so that forecasts may start from the whole past.
        valid, test: shares of the rows, each at least a horizon; with ``test`` 0 there is no such part.
        season: values of a season; default: see :func:`season_of`.
        fields: of :class:`TitansPredictionConfig`, other than the defaults.
        reading: see :class:`About`.
    """
    require_whole(horizon=horizon, context=1 if context is None else context, season=1 if season is None else season)
    require_whole(least=0, history=history)
    if not (valid > 0 and test >= 0 and valid + test < 1):
        raise ValueError(f"valid is {valid} and test is {test}; expected shares that leave something to train on")
    known = [each.name for each in dataclass_fields(TitansPredictionConfig)]
    for name in fields or ():
        if name not in known:
            raise ValueError(f"{name} is not a field of the config: {nearest(name, known)}")
    freqs = {one.freq: one for one in series}
    if len(freqs) > 1:
        first, other = list(freqs.values())[:2]
        raise ValueError(
            f"{_called(first)} has steps of {first.freq} and {_called(other)} of {other.freq}; expected the same"
        )
    season = season or season_of(series[0].freq)
    parts = [_parts(len(one), horizon, valid, test) for one in series]
    if context is None:
        rows = int(np.median([train for train, _ in parts]))
        context = max(1, min(max(CONTEXT, horizon, season or 0), (rows - history - horizon) // 2))
    past = context + history
    used = [(one, part) for one, part in zip(series, parts, strict=True) if part[0] >= past + horizon]
    if not used:
        longest = max(series, key=len)
        enough = itertools.count(len(longest) + 1)
        least = next(rows for rows in enough if _parts(rows, horizon, valid, test)[0] >= past + horizon)
        with_history = f", a history of {history}" if history else ""
        raise ValueError(
            f"{_called(longest)} has {len(longest)} rows; expected at least {least} for a context of "
            f"{context}{with_history} and a horizon of {horizon}, with a horizon to validate on"
            f"{' and one to test' if test else ''}"
        )
    scalers = [_fit_scaler(one, train) for one, (train, _) in used]
    scaled = [scaler.scale(one.values) for scaler, (one, _) in zip(scalers, used, strict=True)]
    to_train = make_windows(scaled, [(0, train) for _, (train, _) in used], past, horizon)
    to_validate = make_windows(scaled, [part for _, part in used], past, horizon)
    given = {"patch_length": min(16, context), "patch_stride": min(8, (context + 1) // 2)} | dict(fields or {})
    torch.manual_seed(settings.seed)
    config = TitansPredictionConfig(
        context_length=context, prediction_length=horizon, num_input_channels=len(series[0].names), **given
    )
    if history:
        if history < config.token_length:
            raise ValueError(
                f"history is {history}; expected 0, or at least the {config.token_length} values of a token"
            )
        settings = replace(settings, shortest_past=context)
    model = TitansForPrediction(config).to(choose_device(device))
    fitted = fit(model, to_train, to_validate, settings, progress)
    about = About(
        names=list(series[0].names),
        freq=series[0].freq,
        season=season,
        scalers={one.name: [s.mean.tolist(), s.deviation.tolist()] for s, (one, _) in zip(scalers, used, strict=True)},
        seen={one.name: _stamp(one.times[end - 1]) for one, (_, end) in used},
        history=history,
        reading=dict(reading or {}),
        fitted={
            "windows": [len(to_train), len(to_validate)],
            "series": [len(used), len(series)],
            "parameters": model.num_parameters(),
            "settings": asdict(settings),
            **asdict(fitted),
        },
    )
    return TrainedForecaster(model, about)


def long_enough(series: Sequence[Series], rows: int, why: str) -> tuple[list[Series], list[str]]:
    """The series with at least so many rows, and the names of the others; a ``ValueError`` if all are too short."""
    kept = [one for one in series if len(one) >= rows]
    if not kept:
        longest = max(series, key=len)
        raise ValueError(f"{_called(longest)} has {len(longest)} rows; expected at least {why}, {rows}")
    return kept, [one.name for one in series if len(one) < rows]


def constant_channels(series: Sequence[Series]) -> list[str]:
    """Names of channels, or of univariate series, that never change."""
    return [
        name if not one.name else one.name
        for one in series
        for name, values in zip(one.names, one.values.T, strict=True)
        if np.nanmin(values) == np.nanmax(values)
    ]


def as_table(trained: TrainedForecaster, series: Sequence[Series], forecasts: Sequence[Values]) -> pd.DataFrame:
    """Forecasts in the layout of the data; a quantile is a column with _ql0.1 behind its name, as in neuralforecast."""
    parts = []
    for one, made in zip(series, forecasts, strict=True):
        unknown = np.isnan(made).any(axis=(0, 2))
        if unknown.any():
            name, context = one.names[int(unknown.argmax())], trained.model.config.context_length
            raise ValueError(f"{_called(one)}: {name} has no value in the last {context} rows; expected at least one")
        times = one.following(len(made))
        table = pd.DataFrame({times.name: times} if times.name is not None else {})
        if one.name:
            table.insert(0, trained.about.reading.get("id", "unique_id"), one.name)
        for channel, name in enumerate(("Titans",) if one.name else one.names):
            table[name] = made[:, channel, trained.point]
            for level, quantile in enumerate(trained.quantiles):
                if level != trained.point:
                    table[f"{name}_ql{quantile:g}"] = made[:, channel, level]
        parts.append(table)
    return pd.concat(parts, ignore_index=True)


def draw_forecasts(
    trained: TrainedForecaster, series: Sequence[Series], forecasts: Sequence[Values], title: str, truth: bool = False
) -> bytes:
    """The first variates with the end of what was observed, the forecast and its interval, as PNG.

    Args:
        truth: whether the forecasts are those of the last rows of the series, not of what follows them.
    """
    drawn = []
    for one, made in zip(series, forecasts, strict=True):
        ahead = len(made)
        shown = max(trained.model.config.context_length, 2 * ahead) + (ahead if truth else 0)
        times = one.times[-shown:] if truth else one.times[-shown:].append(one.following(ahead))
        dates = times.to_pydatetime() if isinstance(times, pd.DatetimeIndex) else times
        for channel, name in enumerate(one.names):
            known = [None if np.isnan(x) else float(x) for x in one.values[-shown:, channel]]
            drawn.append(
                Forecast(
                    one.name or name,
                    list(dates),
                    known if truth else [*known, *[None] * ahead],
                    made[:, channel, trained.point].tolist(),
                    *([made[:, channel, level].tolist() for level in (0, -1)] if trained.interval else []),
                )
            )
    more = f" (the first {PANELS} of {len(drawn)})" if len(drawn) > PANELS else ""
    return plot_forecasts(drawn[:PANELS], title + more, str(series[0].times.name or "row"), trained.interval)


def _parts(rows: int, horizon: int, valid: float, test: float) -> tuple[int, int]:
    """Where the training and the validation part end; validation and test have a horizon at least."""
    train, end, _ = split_rows(rows, valid, test)
    end = min(end, rows - horizon) if test else rows
    return min(train, end - horizon), end


def _fit_scaler(series: Series, train: int) -> Scaler:
    empty = np.isnan(series.values[:train]).all(axis=0)
    if empty.any():
        name = series.names[int(empty.argmax())]
        raise ValueError(
            f"{_called(series)}: {name} has no value in the {train} rows to train on; expected at least one"
        )
    return Scaler.fit(series.values[:train])


def _stamp(time: Any) -> str | int:
    """A time for a JSON file."""
    return time.isoformat() if isinstance(time, pd.Timestamp) else int(time)


def _called(series: Series) -> str:
    return f"the series {series.name}" if series.name else "the data"
