"""Results of evaluations: read, checked, compared, and shown as tables, figures, sentences and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans.files import EVAL
from titans.report.page import Figure, Section, Table, print_table, write_page
from titans.report.plots import Curve, has_band, plot_bars, plot_heat, plot_lines, short_number
from titans.report.statistics import Estimate, finite, is_number, mean_of_cells, mean_of_runs

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1  # of the results of `titans eval`
TITLE = "Titans: evaluation"
UNITS = {"accuracy": "%", "loss": "nats"}  # of metrics, where a result does not say
AXIS_UNITS = {"length": "tokens", "distance": "tokens", "position": "tokens", "depth": "share of the sequence"}
FIGURES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte"}  # of a whole text, as entries name them
IRRELEVANT = ("transformers_version", "_name_or_path")  # fields of a config that say nothing about the model
CROWDED = 12  # lines; a figure with more of them shows only models that were not tampered with

Result = Mapping[str, Any]


def load_results(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The results in files, or in the ``eval.json`` of folders, in that order.

    A ``ValueError`` says which one is not there or not a result, or that two of them are of the same run.
    """
    results: list[dict[str, Any]] = []
    seen: dict[str, Path] = {}
    for path in map(Path, paths):
        result = _read(path)
        model = result.get("fingerprint") or [result["name"], result["model"]["name"]]
        for name, task in result["tasks"].items():
            run = json.dumps([model, task.get("seed", result.get("seed")), name, task.get("control")])
            if run in seen:
                what = f"{_line(name)} of the run {_line(result['name'])}"
                raise ValueError(f"{seen[run]} and {path} both hold {what}; expected each run once")
            seen[run] = path
        results.append(result)
    return results


def _read(path: Path) -> dict[str, Any]:
    file = path / EVAL if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ValueError(f"{path} holds no {EVAL}; expected a folder that `titans eval` wrote")
    try:
        text = file.read_bytes().decode("utf-8")
        result = json.loads(text)
        json.dumps(result, ensure_ascii=False).encode()  # halves of letters can be read, but not written
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; expected a folder that `titans eval` wrote, or a result file") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {' '.join(str(error).split())}") from error
    check_result(result, str(file))
    return dict(result)


_WORDS = {str: "a text", dict: "an object", list: "a list", float: "a number or null", None: "a text or null"}
_RUN_FIELDS = {"name": str, "model": dict, "tasks": dict}
_TASK_FIELDS: dict[str, Any] = {"metric": str, "axes": list, "cells": list, "chance": float, "trained_at": float}
_TASK_TEXTS = ("title", "source", "unit", "better", "control", "counted")


def check_result(result: Any, where: str) -> None:
    """Raises a ``ValueError`` of one sentence that begins with ``where`` if this is not a result that can be shown."""
    if not isinstance(result, dict):
        raise ValueError(f"{where} holds {_shorten(result)}; expected an object")
    if result.get("format") != FORMAT:
        raise ValueError(f"{where} has format {_shorten(result.get('format'))}; expected {FORMAT}")
    _check_fields(result, _RUN_FIELDS, where)
    _check_fields(result["model"], {"name": str, "parameters": float}, f"{where}: model")
    for name, task in result["tasks"].items():
        place = f"{where}: {_line(name)}"
        if not isinstance(task, dict):
            raise ValueError(f"{place} is {_shorten(task)}; expected an object")
        _check_fields(task, {**_TASK_FIELDS, **dict.fromkeys(_TASK_TEXTS)}, place)
        if task.get("better") not in (None, "higher", "lower"):
            raise ValueError(f"{place}: better is {_shorten(task['better'])}; expected higher or lower")
        for index, cell in enumerate(task["cells"]):
            spot = f"{place}, cell {index + 1}"
            if not isinstance(cell, dict):
                raise ValueError(f"{spot} is {_shorten(cell)}; expected an object")
            _check_fields(cell, {"group": dict, **dict.fromkeys(("value", "low", "high"), float)}, spot)
            for axis in task["axes"]:
                if not isinstance(axis, str) or axis not in cell["group"]:
                    raise ValueError(f"{spot} has no {_shorten(axis)}; expected a value for each of the axes")
    if not any(task["cells"] for task in result["tasks"].values()):
        raise ValueError(f"{where} holds no cells; expected a task with at least one")


def _check_fields(data: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    for name, kind in fields.items():
        value = data.get(name)
        if kind is float:
            good = value is None or is_number(value)
        else:
            good = isinstance(value, str if kind is None else kind) or (kind is None and value is None)
        if not good:
            raise ValueError(f"{where}: {name} is {_shorten(value)}; expected {_WORDS[kind]}")


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:39] + "…"


@dataclass(frozen=True)
class _Axis:
    """An axis of a task: its places as texts, and as numbers if all of them are."""

    name: str
    words: list[str]
    numbers: list[float] | None

    @property
    def label(self) -> str:
        return f"{self.name} ({AXIS_UNITS[self.name]})" if self.name in AXIS_UNITS else self.name

    @property
    def short(self) -> list[str]:
        """The places for a figure, where there is little room."""
        return self.words if self.numbers is None else [short_number(number) for number in self.numbers]


@dataclass(frozen=True)
class _Task:
    """One task, over all runs that did it.

    Attributes:
        series: for each line of a plot, what each of its runs wrote about the task.
        styles: number of each line, the same in the whole report.
        axes: those that vary.
        fixed: the axes that do not, as words.
    """

    name: str
    series: dict[str, list[Mapping[str, Any]]]
    styles: Mapping[str, int]
    axes: list[_Axis] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    @property
    def entries(self) -> list[Mapping[str, Any]]:
        return [entry for entries in self.series.values() for entry in entries]

    def says(self, name: str) -> Any:
        """What the first run that says something says, None if none does."""
        return next((entry[name] for entry in self.entries if entry.get(name) not in (None, "")), None)

    @property
    def title(self) -> str:
        return _line(self.says("title") or self.name)

    @property
    def metric(self) -> str:
        return _line(self.says("metric") or "value")

    @property
    def unit(self) -> str:
        return _line(self.says("unit") or UNITS.get(self.metric, ""))

    @property
    def percent(self) -> bool:
        return self.metric == "accuracy"

    @property
    def measure(self) -> str:
        """The metric with its unit."""
        return f"{self.metric} ({self.unit})" if self.unit and self.unit != self.metric else self.metric

    @property
    def higher(self) -> bool:
        return (self.says("better") or ("higher" if self.metric in ("accuracy", "tokens/s") else "lower")) == "higher"

    @property
    def chance(self) -> float | None:
        return finite(self.says("chance"))

    def estimate(self, label: str, group: Mapping[str, str]) -> Estimate | None:
        """The mean over the runs of a line, and over the cells of a group in each."""
        runs = [self.estimate_run(entry, group) for entry in self.series[label]]
        return mean_of_runs(runs, 1.0 if self.percent else math.inf)

    def estimate_run(self, entry: Mapping[str, Any], group: Mapping[str, str]) -> Estimate | None:
        """The mean over the cells of a group in one run; where it diverged, nothing is right."""
        cells = _cells(entry, group)
        places = math.prod(len(axis.words) for axis in self.axes if axis.name not in group)
        good = sum(finite(cell.get("value")) is not None for cell in cells)
        if self.percent:
            cells = [{"value": 0.0} if finite(cell.get("value")) is None else cell for cell in cells]
        mean = mean_of_cells(cells)
        return None if mean is None else replace(mean, whole=good >= places)

    def along(self, label: str, axis: _Axis) -> list[Estimate | None]:
        """An estimate for each place of an axis."""
        return [self.estimate(label, {axis.name: word}) for word in axis.words]

    def show(self, value: float, digits: int | None = None) -> str:
        """A value of the task as text, without unit; ``digits`` after the point, or as many as its size asks for."""
        if self.percent:
            return f"{100 * value:.1f}"
        return _significant(value) if digits is None else f"{value:,.{digits}f}"

    def tell(self, estimate: Estimate | None, unit: bool = False) -> str:
        """An estimate as text: the value, its margin, a star if it is not whole; a dash without one."""
        if estimate is None:
            return "-"
        text = self.show(estimate.value)
        percent = "%" if unit and self.unit == "%" else ""
        if estimate.margin is None:
            text += percent
        else:
            digits = len(text.partition(".")[2]) if "e" not in text else None
            text += f"{percent} ±{self.show(estimate.margin, digits)}"
        text += "" if estimate.whole else "*"
        return f"{text} {self.unit}" if unit and self.unit and not percent else text


def _significant(value: float) -> str:
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def _word(value: Any) -> str:
    if finite(value) is None:
        return _line(str(value))
    return f"{value:,.0f}" if value == int(value) else f"{value:.12g}"


def _cells(entry: Mapping[str, Any], group: Mapping[str, str]) -> list[Mapping[str, Any]]:
    return [cell for cell in entry["cells"] if all(_word(cell["group"][axis]) == word for axis, word in group.items())]


def _axis(name: str, entries: Iterable[Mapping[str, Any]]) -> _Axis:
    """An axis over all runs: numbers rise, words keep their order."""
    places = {_word(cell["group"][name]): cell["group"][name] for entry in entries for cell in entry["cells"]}
    numbers = {word: number for word, place in places.items() if (number := finite(place)) is not None}
    if len(numbers) < len(places):
        return _Axis(name, list(places), None)
    words = sorted(places, key=lambda word: numbers[word])
    return _Axis(name, words, [numbers[word] for word in words])


def _collect(results: Sequence[Result]) -> list[_Task]:
    """The tasks of all results, each with its lines: runs of a model of the same kind are one."""
    tampered: dict[str, bool] = {}
    tasks: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    names = _name_kinds(results)
    for result in results:
        model = names[_kind(result["model"])]
        for key, entry in result["tasks"].items():
            if not entry["cells"]:  # not measured yet
                continue
            name, variant = _variant(key, entry)
            label = f"{model} ({variant})" if variant else model
            tampered.setdefault(label, bool(variant))
            tasks.setdefault(name, {}).setdefault(label, []).append(entry)
    styles = {label: style for style, label in enumerate(sorted(tampered, key=lambda label: tampered[label]))}
    return [_make_task(name, series, styles) for name, series in tasks.items()]


def _kind(model: Mapping[str, Any]) -> str:
    """What runs of one line have in common: the model's name, size and config, and what it was trained on."""
    fields = model.get("fields")
    known = {key: value for key, value in fields.items() if key not in IRRELEVANT} if isinstance(fields, dict) else None
    trained = [model.get("trained_at"), model.get("trained_on")]
    return json.dumps([_line(model["name"]), model.get("parameters"), known, trained], sort_keys=True)


def _name_kinds(results: Sequence[Result]) -> dict[str, str]:
    """A name for each kind of model: the model's, and where several share it, with the size or the first run's name."""
    firsts: dict[str, dict[str, Result]] = {}
    for result in results:
        firsts.setdefault(_line(result["model"]["name"]), {}).setdefault(_kind(result["model"]), result)
    names: dict[str, str] = {}
    for model, kinds in firsts.items():
        sizes = {first["model"].get("parameters") for first in kinds.values()}
        for kind, first in kinds.items():
            more = _count(first["model"].get("parameters")) if len(sizes) == len(kinds) else _line(first["name"])
            name, number = f"{model} ({more})" if len(kinds) > 1 else model, 2
            while name in names.values():
                name, number = f"{model} ({more}, {number})", number + 1
            names[kind] = name
    return names


def _with_figures(tasks: Iterable[_Task]) -> list[_Task]:
    """The tasks, each followed by what its runs say of a whole text, as tasks of one figure."""
    found = []
    for task in tasks:
        found.append(task)
        for name, metric in FIGURES.items():
            series = {label: [_figure(entry, name, metric) for entry in runs] for label, runs in task.series.items()}
            known = {label: said for label, runs in series.items() if (said := [run for run in runs if run])}
            if known:
                found.append(_Task(f"{task.name} {name}", known, task.styles))
    return found


def _figure(entry: Mapping[str, Any], name: str, metric: str) -> Mapping[str, Any]:
    """A figure of a whole text as an entry; nothing, where cells are of several texts or do not say it."""
    wholes = [cell["whole"] for cell in entry["cells"] if isinstance(cell.get("whole"), dict)]
    if not wholes or name not in wholes[0] or any(whole != wholes[0] for whole in wholes):
        return {}
    cells = [{"group": {}, "value": wholes[0][name]}]
    return {"title": entry.get("title"), "metric": metric, "better": "lower", "axes": [], "cells": cells}


def _is_tampered(entry: Mapping[str, Any]) -> bool:
    """Whether the model was measured with its memory tampered with, or with another config than it has."""
    return bool(entry.get("control") or entry.get("fields"))


def _variant(key: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """The task that an entry is of, and in what it differs: "needle reset" with a control is a line of "needle"."""
    if not _is_tampered(entry):
        return key, ""
    name, _, rest = key.partition(" ")
    return name, _line(rest or entry.get("control") or "changed")


def _make_task(name: str, series: dict[str, list[Mapping[str, Any]]], styles: Mapping[str, int]) -> _Task:
    entries = [entry for runs in series.values() for entry in runs]
    for key in ("metric", "axes", "better", "unit"):
        for entry in entries:
            if entry.get(key) != entries[0].get(key):
                came = f"{_shorten(entries[0].get(key))} in one run and {_shorten(entry.get(key))} in another"
                raise ValueError(f"{_line(name)} has {key} {came}; expected the same in all")
    axes = [_axis(axis, entries) for axis in entries[0]["axes"]]
    fixed = [f"{axis.name} {axis.words[0]}" for axis in axes if len(axis.words) == 1]
    return _Task(name, series, styles, [axis for axis in axes if len(axis.words) > 1], fixed)


def _line(text: str) -> str:
    """The text as one line in which nothing steers a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))


def _count(number: Any) -> str:
    return f"{number:,}" if finite(number) is not None else "-"


def summarise(results: Sequence[Result]) -> list[str]:
    """A sentence for each task: which model is best where it is hardest, and what chance gives."""
    return [_sentence(task) for task in _with_figures(_collect(results))]


def _sentence(task: _Task) -> str:
    group: dict[str, str] = {}
    where = ""
    if task.axes and task.axes[0].numbers is not None:
        axis = task.axes[0]
        for word in reversed(axis.words):
            group = {axis.name: word}
            if any(task.estimate(label, group) for label in task.series):
                break
        where = f"at {axis.name} {group[axis.name]} "
    elif task.axes:
        where = f"on average over {task.axes[0].name} "
    found = {label: estimate for label in task.series if (estimate := task.estimate(label, group)) is not None}
    missing = [label for label in task.series if label not in found]
    ranked = sorted(found, key=lambda label: found[label].value, reverse=task.higher)
    if not ranked:
        return f"{task.title}: no run has a value."
    best = found[ranked[0]]
    value = task.tell(best, unit=True)
    value = value if task.percent or task.metric == task.unit else f"{task.metric} {value}"
    level = [label for label in ranked if task.show(found[label].value) == task.show(best.value)]
    if len(task.series) == 1:
        text = f"{task.title}: {where}{ranked[0]} has {value}"
    elif len(level) > 1:
        names = f"{', '.join(level[:-1])} and {level[-1]}" if len(level) < 5 else f"{len(level)} models"
        text = f"{task.title}: {where}{names} are level with {value}"
    else:
        text = f"{task.title}: {where}{ranked[0]} is best with {value}"
    if len(ranked) > 1 and len(level) == 1:
        second = found[ranked[1]]
        following = f"{ranked[1]} with {task.tell(second, unit=True)}"
        close = best.holds(second.value) or second.holds(best.value)
        text += f", but {following} may be as good" if close else f", ahead of {following}"
    if missing:
        text += f"; {', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no value there"
    if task.chance is not None:
        text += f"; chance is {_chance(task)}"
    return text + "."


def _chance(task: _Task) -> str:
    chance = task.chance or 0.0
    if task.percent:
        return f"{chance:.1%}" if chance >= 0.001 or chance == 0 else "below 0.1%"
    return f"{task.show(chance)} {task.unit}".strip()


def _task_table(task: _Task) -> Table:
    """A row a line, a column a place of the first axis; one column if nothing varies."""
    header, rows = ["model", task.measure], [[label, task.tell(task.estimate(label, {}))] for label in task.series]
    caption = f"{task.measure[0].upper()}{task.measure[1:]}"
    if task.axes:
        first, *others = task.axes
        header = ["model", *first.words]
        rows = [[label, *map(task.tell, task.along(label, first))] for label in task.series]
        caption += f", by {first.label}" + (f"; mean over {', '.join(axis.name for axis in others)}" if others else "")
    if task.fixed:
        caption += f"; at {', '.join(task.fixed)}"
    found = [finite(cell.get("count")) for entry in task.entries for cell in entry["cells"]]
    counts = [count for count in found if count is not None]
    if counts:
        low, high = _word(min(counts)), _word(max(counts))
        caption += f"; {low if low == high else f'{low} to {high}'} {task.says('counted') or 'sequences'} a cell"
    cells = [cell for row in rows for cell in row[1:]]
    if any("±" in cell for cell in cells):
        caption += "; ± is the longer side of a 95% interval"
        if max(len(runs) for runs in task.series.values()) > 1:
            caption += ", over runs where there are several"
    caption += "."
    if any(cell.endswith("*") for cell in cells):
        caption += " * Some runs or cells are missing, and are left out of the mean"
        caption += ", or diverged, which counts as 0." if task.percent else ", or have no value."
    return Table(header, rows, caption)


def result_tables(results: Sequence[Result]) -> list[tuple[str, Table]]:
    """A title and a table for each task."""
    return [(task.title, _task_table(task)) for task in _with_figures(_collect(results))]


def print_tables(results: Sequence[Result], console: Console) -> None:
    """Print the table of each task and the sentence about it."""
    for (title, table), sentence in zip(result_tables(results), summarise(results), strict=True):
        print_table(console, table, title)
        console.print(f"{sentence}\n", markup=False, highlight=False)


def result_sections(results: Sequence[Result], more: Sequence[Section] = ()) -> list[Section]:
    """The parts of a page that results make: what came out, each task with its figures, and how it was made.

    Args:
        results: as ``load_results`` gives them; may be empty.
        more: other parts, which stand after the summary.
    """
    for index, result in enumerate(results):
        check_result(result, f"result {index + 1}")
    collected = _collect(results)
    if not collected:
        return list(more)
    tasks = _with_figures(collected)
    varied = [task for task in tasks if task.axes]
    single = [task for task in tasks if not task.axes]
    sections = [Section("In short", [_sentence(task) for task in tasks]), *more]
    sections += [_task_section(task) for task in varied]
    if single:
        sections.append(Section("Single figures", ["Tasks with one figure per model."], [_single_table(single)]))
    return [*sections, _made_section(results, collected)]


def _single_table(tasks: Sequence[_Task]) -> Table:
    """A row a task, a column a line."""
    labels = list(dict.fromkeys(label for task in tasks for label in task.series))
    rows = [
        [
            task.title + (f", {', '.join(task.fixed)}" if task.fixed else ""),
            task.measure,
            *(task.tell(task.estimate(label, {})) if label in task.series else "-" for label in labels),
            "-" if task.chance is None else _chance(task),
        ]
        for task in tasks
    ]
    return Table(["task", "measured as", *labels, "chance"], rows, "± is the longer side of a 95% interval.")


def _task_section(task: _Task) -> Section:
    first = task.axes[0]
    better = f"{'Higher' if task.higher else 'Lower'} is better."
    words = [f"Source: {task.says('source')}." if task.says("source") else "", better]
    if task.chance is not None:
        words.append(f"Chance is {_chance(task)}.")
    trained = sorted({number for entry in task.entries if (number := finite(entry.get("trained_at"))) is not None})
    if trained:
        words.append(f"Trained at length {' and '.join(map(_word, trained))}.")
    shown = list(task.series)
    if len(shown) > CROWDED:
        shown = [label for label in shown if not _is_tampered(task.series[label][0])] or shown[:CROWDED]
    curves = [_curve(task, label, first) for label in shown]
    names = ", ".join(shown)
    y_label = f"{task.measure}, {'higher' if task.higher else 'lower'} is better"
    about = f"{task.title}: {task.measure}, by {first.label}"
    notes = []
    if first.numbers and any(has_band(curve, curves) for curve in curves):
        notes.append("Bands are 95% intervals.")
    elif not first.numbers and any(curve.lows for curve in curves):
        notes.append("Whiskers are 95% intervals.")
    if any(curve.runs for curve in curves):
        notes.append("Thin lines are runs, thick ones their mean." if first.numbers else "Dots are runs.")
    if len(shown) < len(task.series):
        notes.append(f"{len(task.series) - len(shown)} more are in the table only.")
    if first.numbers is not None:
        png = plot_lines(first.numbers, curves, task.title, first.label, y_label, task.percent, task.chance)
    else:
        png = plot_bars(first.words, curves, task.title, first.label, y_label, task.percent, task.chance)
    figures = [Figure(task.name, png, f"{about}, of {names}", " ".join(notes))]
    if len(task.axes) == 2:
        figures += _heat_maps(task)
    return Section(task.title, [" ".join(filter(None, words))], [_task_table(task)], figures)


def _curve(task: _Task, label: str, axis: _Axis) -> Curve:
    means = task.along(label, axis)
    entries = task.series[label]
    runs = [[task.estimate_run(entry, {axis.name: word}) for word in axis.words] for entry in entries]
    trained = {finite(entry.get("trained_at")) if axis.name == "length" else None for entry in entries}
    has_interval = any(mean is not None and mean.low is not None for mean in means)
    return Curve(
        f"{label}, {len(entries)} runs" if len(entries) > 1 else label,
        _values(means),
        [None if mean is None else mean.low for mean in means] if has_interval else (),
        [None if mean is None else mean.high for mean in means] if has_interval else (),
        [_values(run) for run in runs] if len(entries) > 1 else (),
        task.styles[label],
        trained.pop() if len(trained) == 1 else None,
    )


def _values(estimates: Iterable[Estimate | None]) -> list[float | None]:
    return [None if estimate is None else estimate.value for estimate in estimates]


def _heat_maps(task: _Task) -> list[Figure]:
    """A map for each line, the second axis downwards; all of them share one scale."""
    columns, rows = task.axes
    grids = {
        label: [
            [task.estimate(label, {columns.name: column, rows.name: row}) for column in columns.words]
            for row in rows.words
        ]
        for label in task.series
    }
    values = [cell.value for grid in grids.values() for row in grid for cell in row if cell is not None]
    limits = (0.0, 1.0) if task.percent or not values else (min(values), max(values))

    def show(value: float) -> str:
        return f"{100 * value:.0f}" if task.percent else _significant(value)

    return [
        Figure(
            f"{task.name}-heat-{label}",
            plot_heat(
                columns.short,
                rows.short,
                [_values(row) for row in grid],
                f"{task.title}: {label}",
                columns.label,
                rows.label,
                task.measure,
                show,
                limits,
            ),
            f"{task.title}: {task.measure} of {label}, by {columns.name} and {rows.name}",
        )
        for label, grid in grids.items()
    ]


def _made_section(results: Sequence[Result], tasks: Sequence[_Task]) -> Section:
    header = ["run", "model", "parameters", "seed", "date", "torch", "seconds", "command"]
    rows = []
    for result in results:
        seconds = [s for entry in result["tasks"].values() if (s := finite(entry.get("seconds"))) is not None]
        calls = _calls(result)
        versions = [found if isinstance(found := call.get("versions"), dict) else {} for call in calls]
        cells = [result["name"], result["model"]["name"], _count(result["model"].get("parameters"))]
        trained = result["model"].get("seed")
        seed = _each(calls, "seed") + ("" if trained is None else f", trained with {_plain(trained)}")
        cells += [seed, _each(calls, "date"), _each(versions, "torch")]
        rows.append([*cells, f"{sum(seconds):,.1f}" if seconds else "-", _each(calls, "command", "; ")])
    settings = [[task.name, _plain(task.says("source")), _settings(task)] for task in tasks]
    tables = [Table(header, rows, "Runs."), Table(["task", "source", "settings"], settings, "Tasks.")]
    return Section("How it was made", [], tables)


def _calls(result: Result) -> list[Mapping[str, Any]]:
    """What says how a result was made: the calls that each of its tasks names, else the result."""
    named = [entry["made"] for entry in result["tasks"].values() if isinstance(entry.get("made"), list)]
    return [call for calls in named for call in calls if isinstance(call, dict)] or [result]


def _each(calls: Iterable[Mapping[str, Any]], name: str, between: str = ", ") -> str:
    return between.join(dict.fromkeys(_plain(call.get(name)) for call in calls))


def _plain(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _settings(task: _Task) -> str:
    """The settings of a task; where runs differ, each of theirs."""
    found: dict[str, list[str]] = {}
    for entry in task.entries:
        settings = entry.get("settings")
        for name, value in settings.items() if isinstance(settings, dict) else ():
            texts = found.setdefault(name, [])
            if _plain(value) not in texts:
                texts.append(_plain(value))
    return "; ".join(f"{name}: {' or, in other runs, '.join(texts)}" for name, texts in found.items()) or "-"


def write_report(
    results: Sequence[Result], out: str | Path, title: str = TITLE, sections: Sequence[Section] = ()
) -> Path:
    """Write the page of results and its figures into a folder; nothing if something is wrong.

    Args:
        results: as ``load_results`` gives them; may be empty if there are sections.
        out: the folder, for ``report.html``, ``TASK.png`` and ``TASK-heat-MODEL.png``; made if needed.
        title: of the page.
        sections: other parts, which stand after the summary.

    Returns the path of the page.
    """
    return write_page(result_sections(results, sections), out, title, _facts(results))


def _facts(results: Sequence[Result]) -> str:
    models = {result["model"]["name"] for result in results}
    tasks = {_variant(key, task)[0] for result in results for key, task in result["tasks"].items() if task["cells"]}
    counts = {"model": len(models), "run": len(results), "task": len(tasks)}
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items()) if results else ""
