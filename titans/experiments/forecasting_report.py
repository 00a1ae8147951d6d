"""The tables and pictures of the experiment on forecasting, from the figures of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from titans.experiments.workers import mean_and_spread, missing_section
from titans.forecasting.data import Values
from titans.models.configuration import VARIANTS
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, Forecast, plot_dots, plot_forecasts

LABELS = {
    "lmm": "LMM", "mac": "MAC", "mag": "MAG", "mal": "MAL", "lmm-memory-off": "LMM, memory off",
    "lmm-linear-memory": "LMM, linear memory", "lmm-no-momentum": "LMM, no momentum",
    "lmm-with-level": "LMM, told the level", "patchtst": "PatchTST", "itransformer": "iTransformer",
    "dlinear": "DLinear", "nhits": "NHITS", "last-value": "last value", "last-season": "last season",
}  # fmt: skip
# Means of MSE and MAE over the horizons 96, 192, 336 and 720 at a look-back of 96: Table 3 of the Titans paper, whose
# Titans is the memory alone.
PUBLISHED = {
    "ETTh1": {"lmm": (0.420, 0.421), "itransformer": (0.454, 0.447), "patchtst": (0.469, 0.454),
              "dlinear": (0.456, 0.452)},
    "ETTm1": {"lmm": (0.358, 0.387), "itransformer": (0.407, 0.410), "patchtst": (0.387, 0.400),
              "dlinear": (0.403, 0.407)},
    "weather": {"lmm": (0.231, 0.265), "itransformer": (0.258, 0.278), "patchtst": (0.259, 0.281),
                "dlinear": (0.265, 0.317)},
}  # fmt: skip
PUBLISHED_HORIZONS = {96, 192, 336, 720}
ADDED = ("lmm-memory-off", "lmm-linear-memory", "lmm-no-momentum")
MEASURES = ("mse", "mae")
Runs = Sequence[Mapping[str, Any]]


def forecasting_sections(report: Mapping[str, Any], values: Mapping[str, Values]) -> list[Section]:
    """All that a reader sees.

    Args:
        values: (time, channels) of each data set.
    """
    experiment, runs = report["experiment"], report["runs"]
    horizons, context = experiment["horizons"], experiment["look_backs"][0]
    sections = []
    for data in dict.fromkeys(run["data"] for run in runs):
        mine = [run for run in runs if run["data"] == data]
        table = [run for run in mine if run["context"] == context and not run["history"]]
        if "table" in experiment["parts"]:
            models = [name for name in experiment["models"] if any(run["model"] == name for run in table)]
            rows = {name: [run for run in table if run["model"] == name] for name in models}
            sections.append(_data_section(data, rows, horizons, context, values[data]))
        if "look-back" in experiment["parts"]:
            sections.append(_look_back_section(data, mine, horizons, experiment["look_backs"]))
    if "table" in experiment["parts"]:
        added = _ablation_table([run for run in runs if run["context"] == context and not run["history"]], horizons)
        if len(added.rows) > 1:
            about = "The same model with a part of its memory switched off, in training and in the test."
            sections.append(Section("What the memory adds", [about], [added]))
    return [*sections, *missing_section(report)]


def _data_section(
    data: str, rows: Mapping[str, Runs], horizons: Sequence[int], context: int, values: Values
) -> Section:
    labelled = {LABELS[name]: runs for name, runs in rows.items()}
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    about = (
        f"{len(values):,} rows of {values.shape[1]} variate{'s' if values.shape[1] > 1 else ''}, look-back {context}, "
        "z-scores of the training part, "
        f"every model trained by the squared error, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."
    )
    tables = [error_table(labelled, horizons)]
    published = _published_table(data, rows, horizons)
    if published is not None:
        tables.append(published)
    figures = [_means_figure(data, rows, horizons), _example_figure(data, rows, horizons, context, values)]
    return Section(data, [about], tables, [figure for figure in figures if figure is not None])


def error_table(rows: Mapping[str, Runs], horizons: Sequence[int]) -> Table:
    """MSE and MAE at every horizon, and their means over the horizons."""
    header = ["model", f"parameters at {horizons[0]}"]
    header += [f"{horizon} {measure.upper()}" for horizon in horizons for measure in MEASURES]
    header += [f"mean {measure.upper()}" for measure in MEASURES]
    lines = []
    for label, runs in rows.items():
        first = [run["parameters"] for run in runs if run["horizon"] == horizons[0]]
        cells = [at_horizon(runs, horizon, measure) for horizon in horizons for measure in MEASURES]
        cells += [means_of_seeds(runs, horizons, measure) for measure in MEASURES]
        lines.append([label, f"{first[0]:,}" if first else "-", *map(mean_and_spread, cells)])
    windows = {run["horizon"]: run["windows"] for runs in rows.values() for run in runs}
    counts = ", ".join(f"{windows[horizon]:,} at {horizon}" for horizon in horizons if horizon in windows)
    caption = f"Means over the seeds, ± their standard deviation. Test windows: {counts}."
    return Table(header, lines, caption)


def at_horizon(runs: Runs, horizon: int, measure: str) -> list[float]:
    """The figure of every seed at one horizon."""
    return [run[measure] for run in runs if run["horizon"] == horizon]


def means_of_seeds(runs: Runs, horizons: Sequence[int], measure: str) -> list[float]:
    """The mean over the horizons of every seed that has all of them."""
    means = []
    for seed in dict.fromkeys(run["seed"] for run in runs):
        found = {run["horizon"]: run[measure] for run in runs if run["seed"] == seed}
        if found.keys() >= set(horizons):
            means.append(statistics.fmean(found[horizon] for horizon in horizons))
    return means


def _published_table(data: str, rows: Mapping[str, Runs], horizons: Sequence[int]) -> Table | None:
    lines = []
    known = {name.lower(): figures for name, figures in PUBLISHED.items()}
    for name, published in known.get(data.lower(), {}).items():
        found = [means_of_seeds(rows.get(name, ()), horizons, measure) for measure in MEASURES]
        own = [f"{statistics.fmean(values):.3f}" if values else "-" for values in found]
        same = found[0] and set(horizons) == PUBLISHED_HORIZONS
        apart = f"{statistics.fmean(found[0]) / published[0] - 1:+.1%}" if same else "-"
        lines.append([LABELS[name], *(f"{figure:.3f}" for figure in published), *own, apart])
    if not lines:
        return None
    header = ["model", "published MSE", "published MAE", "MSE here", "MAE here", "MSE against published"]
    caption = "Means over the horizons; the published ones are of 96, 192, 336 and 720. The paper's Titans is LMM."
    return Table(header, lines, caption)


def _ablation_table(runs: Runs, horizons: Sequence[int]) -> Table:
    """The LMM and its ablations, one column per data set."""
    names = [name for name in ("lmm", *ADDED) if any(run["model"] == name for run in runs)]
    sets = list(dict.fromkeys(run["data"] for run in runs))
    lines = []
    for name in names:
        cells = []
        for data in sets:
            whole, own = (
                means_of_seeds([run for run in runs if run["data"] == data and run["model"] == each], horizons, "mse")
                for each in ("lmm", name)
            )
            more = f" ({statistics.fmean(own) / statistics.fmean(whole) - 1:+.1%})" if whole and own else ""
            cells.append(mean_and_spread(own) + (more if name != "lmm" else ""))
        lines.append([LABELS[name], *cells])
    caption = "Mean MSE over the horizons, in brackets against the whole memory: more is worse."
    return Table(["model", *sets], lines, caption)


def _look_back_section(data: str, runs: Runs, horizons: Sequence[int], look_backs: Sequence[int]) -> Section:
    rows: dict[str, Runs] = {}
    for context in look_backs:
        for name in ("lmm", "lmm-memory-off"):
            found = [r for r in runs if (r["context"], r["history"], r["model"]) == (context, 0, name)]
            rows[f"look-back {context}" + (", memory off" if name != "lmm" else "")] = found
    streamed = [run for run in runs if run["history"]]
    label = f"look-back {look_backs[0]}, all before it streamed"
    rows[label] = streamed
    rows[f"{label}, but not read"] = [{**run, **run["without_history"]} for run in streamed]
    about = (
        f"The LMM with longer look-backs, against a look-back of {look_backs[0]} whose memory has read the series from "
        f"its first row on, through {look_backs[-1] - look_backs[0]} values before the look-back in training. The last "
        "row is the same model, whose memory starts with the look-back."
    )
    return Section(f"{data}: look-back or memory", [about], [error_table(rows, horizons)])


def _means_figure(data: str, rows: Mapping[str, Runs], horizons: Sequence[int]) -> Figure | None:
    found = {name: means_of_seeds(runs, horizons, "mse") for name, runs in rows.items() if not name.startswith("last-")}
    ranked = sorted((statistics.fmean(values), name) for name, values in found.items() if values)
    curves = [
        Curve(LABELS[name], [mean], runs=[[value] for value in found[name]], style=int(not name.startswith(VARIANTS)))
        for mean, name in ranked
    ]
    if not curves:
        return None
    png = plot_dots(curves, f"{data}: error of every model", "MSE, mean over the horizons")
    about = "Blue: Titans. Dots are seeds, strokes their mean; the last value and the last season are left out."
    return Figure(f"forecasting-{data}", png, f"Mean MSE on {data}, one row per model", about)


def _example_figure(
    data: str, rows: Mapping[str, Runs], horizons: Sequence[int], context: int, values: Values
) -> Figure | None:
    """What the best of ours and the best of the others forecast in one window."""
    horizon = horizons[0]
    trained = [run for runs in rows.values() for run in runs if run["horizon"] == horizon and run["steps"]]
    ours = [run for run in trained if run["model"] in VARIANTS]
    others = [run for run in trained if not run["model"].startswith(VARIANTS)]
    best = [min(group, key=lambda run: run["mse"]) for group in (ours, others) if group]
    if not best:
        return None
    origin, channel = best[0]["example"]["origin"], best[0]["example"]["channel"]
    observed = values[origin - context : origin + horizon, -1].tolist()
    times = range(-context, horizon)
    drawn = [Forecast(LABELS[run["model"]], times, observed, run["example"]["values"]) for run in best]
    png = plot_forecasts(drawn, f"{data}, {channel}: one test window", "rows from the start of the forecast")
    about = f"The best of ours and the best of the others at {horizon}, in the middle of the test part."
    return Figure(f"forecasting-{data}-example", png, f"Forecasts of {channel} against the truth", about)
