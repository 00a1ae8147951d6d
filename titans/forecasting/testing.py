"""How good a trained forecaster is on rows that it has not seen, beside the last value and the last season."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from titans.forecasting.baselines import build_baseline
from titans.forecasting.data import Series, Values
from titans.forecasting.stream import streamed_errors
from titans.forecasting.trained import PANELS, TrainedForecaster, draw_forecasts, long_enough
from titans.forecasting.training import Errors, forecast_errors
from titans.forecasting.windows import Windows, make_windows
from titans.models.cache import TitansCache
from titans.report.page import Figure, Section, Table, show
from titans.report.progress import Progress, silent

BATCH = 128
STRETCHES = 4  # parts of the horizon with figures of their own
KINDS = ("squared", "absolute", "count")  # of Errors
ROWS = 50  # variates in a table; all of them are in the JSON file
MODEL, LAST_VALUE, LAST_SEASON = "Titans", "last value", "last season"


@dataclass(frozen=True)
class _Tested:
    """What one series came to."""

    series: Series
    windows: int
    deviation: Values
    errors: Mapping[str, Errors]
    inside: Values  # (horizon, channels): how many values lay in the interval


def evaluate_series(
    trained: TrainedForecaster,
    series: Sequence[Series],
    season: int | None = None,
    whole_past: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Figures of every window whose future the model has not seen, none dropped, as plain data.

    Series that are shorter than context and horizon are ``skipped``.

    Args:
        season: values of a season; default: that of the training. Where it is unknown or longer than what lies before
            the first window, nothing is compared with the last season.
        whole_past: see :meth:`TrainedForecaster.forecast`.
    """
    config = trained.model.config
    season = season or trained.about.season
    least = config.context_length + config.prediction_length
    kept, skipped = long_enough(series, least, "the context and the horizon of the model")
    found = []
    for one in kept:
        trained.check(one, whole_past)
        start = max(_unseen(trained, one), config.context_length)
        if len(one) - start >= config.prediction_length:
            scaled = trained.scaler(one).scale(one.values)
            windows = make_windows([scaled], [(start, len(one))], config.context_length, config.prediction_length)
            found.append((one, windows))
    if not found:
        raise ValueError(
            f"no {config.prediction_length} rows, the horizon, follow those that the model was fitted on and its "
            "context; expected newer rows, or a model that was fitted with a test part"
        )
    if season is not None and season > min(int(windows.origins[0]) for _, windows in found):
        season = None
    total, done, tested = sum(len(windows) for _, windows in found), 0, []
    for one, windows in found:

        def moved(windows: int, before: int = done) -> None:
            progress(before + windows, total, "testing")

        tested.append(_test(trained, one, windows, season, whole_past, moved))
        done += len(windows)
    return {"whole_past": whole_past, "skipped": skipped, **_summarize(trained, tested, season)}


def _unseen(trained: TrainedForecaster, series: Series) -> int:
    """The first row after those that the model was fitted on."""
    seen = trained.about.seen.get(series.name)
    if seen is None:
        return 0
    return int((series.times <= (pd.Timestamp(seen) if isinstance(seen, str) else seen)).sum())


def _test(
    trained: TrainedForecaster,
    series: Series,
    windows: Windows,
    season: int | None,
    whole_past: bool,
    moved: Callable[[int], None],
) -> _Tested:
    model, config = trained.model.eval(), trained.model.config
    inside = torch.zeros(config.prediction_length, len(series.names), dtype=torch.float64)
    done = 0

    def watched(past_key_values: TitansCache | None = None, **batch: torch.Tensor) -> Any:
        nonlocal done, inside
        made = model(**batch, past_key_values=past_key_values)
        truth = windows.batch(torch.arange(done, done + len(made.prediction_outputs)))
        if made.quantile_outputs is not None:
            low, high = made.quantile_outputs[..., 0].cpu(), made.quantile_outputs[..., -1].cpu()
            future = truth["future_values"]
            inside += ((low <= future) & (future <= high) & truth["future_observed_mask"]).sum(0)
        done += len(truth["future_values"])
        moved(done)
        return made

    if whole_past:
        errors = {MODEL: streamed_errors(model, windows, watched)}
    else:
        errors = {MODEL: forecast_errors(watched, windows, BATCH, model.device)}
    sizes = config.context_length, config.prediction_length, len(series.names)
    errors[LAST_VALUE] = forecast_errors(build_baseline("last-value", *sizes), windows, BATCH)
    if season is not None:
        past = max(season, config.context_length)
        baseline = build_baseline("last-season", past, *sizes[1:], season=season)
        errors[LAST_SEASON] = forecast_errors(baseline, replace(windows, past=past), BATCH)
    return _Tested(series, len(windows), trained.scaler(series).deviation, errors, inside.numpy())


def _summarize(trained: TrainedForecaster, tested: Sequence[_Tested], season: int | None) -> dict[str, Any]:
    methods = list(tested[0].errors)
    # (variates, horizon) each; a variate is a channel of a series
    sums = {
        method: [np.concatenate([getattr(one.errors[method], kind).T.numpy() for one in tested]) for kind in KINDS]
        for method in methods
    }
    inside = np.concatenate([one.inside.T for one in tested])
    count = sums[MODEL][2]
    horizon = count.shape[1]
    variates = [(one, channel) for one in tested for channel in range(len(one.series.names))]
    edges = np.unique(np.linspace(0, horizon, STRETCHES + 1).round().astype(int))
    by_variate = []
    for place, (one, channel) in enumerate(variates):
        figures = _means(sums, np.s_[place : place + 1])
        unit = float(one.deviation[channel])
        by_variate.append(
            {
                "name": one.series.name or one.series.names[channel],
                **figures,
                "in_units": {
                    method: {"mse": each["mse"] * unit**2, "mae": each["mae"] * unit}
                    for method, each in figures.items()
                },
                "covered": _share(inside[place], count[place]) if trained.interval else None,
            }
        )
    return {
        "windows": sum(one.windows for one in tested),
        "series": len(tested),
        "context": trained.model.config.context_length,
        "horizon": horizon,
        "season": season,
        "interval": trained.interval,
        "overall": _means(sums, np.s_[:]),
        "covered": _share(inside, count) if trained.interval else None,
        "by_horizon": [
            {
                "from": int(low) + 1,
                "to": int(high),
                **_means(sums, np.s_[:, low:high]),
                "covered": _share(inside[:, low:high], count[:, low:high]) if trained.interval else None,
            }
            for low, high in itertools.pairwise(edges)
        ],
        "by_variate": by_variate,
    }


def _means(sums: Mapping[str, Sequence[Values]], part: Any) -> dict[str, dict[str, float]]:
    return {
        method: {"mse": _share(squared[part], count[part]), "mae": _share(absolute[part], count[part])}
        for method, (squared, absolute, count) in sums.items()
    }


def _share(some: Values, all: Values) -> float:
    return float(some.sum() / all.sum()) if all.sum() else float("nan")


def evaluation_sections(
    trained: TrainedForecaster, series: Sequence[Series], report: Mapping[str, Any]
) -> list[Section]:
    """What a reader sees: tables of errors, and the last forecast of the test part beside what came."""
    horizon, methods = report["horizon"], list(report["overall"])
    about = (
        f"{report['windows']:,} windows of {report['context']} + {horizon} values, every one whose future comes after "
        "what the model was fitted on. Errors are those of z-scores with the mean and deviation of the training part."
    )
    if any(one.name not in trained.about.scalers for one in series):
        about += f" A series that was not in training has those of its first {report['context']} rows."
    if report["whole_past"]:
        about += " Before each forecast the memory has read the series from its first row on."
    covered = ["in the " + report["interval"]] if report["interval"] else []
    overall = Table(
        ["", "MSE", "MAE", *covered],
        [
            [method, *(show(figures[kind]) for kind in ("mse", "mae")), *_covered(report, covered, method)]
            for method, figures in report["overall"].items()
        ],
        "All variates and all steps.",
    )
    columns = [f"{method} {kind.upper()}" for kind in ("mse", "mae") for method in methods]
    steps = Table(
        ["steps ahead", *columns, *covered],
        [
            [f"{row['from']} to {row['to']}", *_figures(row, methods), *_covered(row, covered)]
            for row in report["by_horizon"]
        ],
        "All variates, by steps ahead.",
    )
    rows = report["by_variate"][:ROWS]
    some = "Each variate" if len(rows) == len(report["by_variate"]) else f"The first {ROWS} variates"
    names = Table(
        ["variate", *columns, *covered],
        [[row["name"], *_figures(row, methods), *_covered(row, covered)] for row in rows],
        f"{some}, in z-scores.",
    )
    units = Table(
        ["variate", *columns],
        [[row["name"], *_figures(row["in_units"], methods, ".4g")] for row in rows],
        f"{some}, in its own units.",
    )
    shown = [one for one in series if len(one) >= report["context"] + horizon][:PANELS]
    before = [replace(one, values=one.values[:-horizon], times=one.times[:-horizon]) for one in shown]
    made = [trained.forecast(one, whole_past=report["whole_past"]) for one in before]
    png = draw_forecasts(trained, shown, made, "The last forecast beside what came", truth=True)
    picture = Figure("forecast.png", png, "Observed values, the forecast of the last ones, and its interval.")
    return [
        Section("Errors", [about], [overall], [picture]),
        Section("Along the horizon", (), [steps]),
        Section("Variates", (), [names, units]),
    ]


def _figures(row: Mapping[str, Any], methods: Sequence[str], form: str = ".3f") -> list[str]:
    return [show(row[method][kind], form) for kind in ("mse", "mae") for method in methods]


def _covered(row: Mapping[str, Any], covered: Sequence[str], method: str = MODEL) -> list[str]:
    return [f"{row['covered']:.1%}" if method == MODEL else "–"] if covered else []
