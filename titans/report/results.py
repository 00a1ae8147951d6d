"""Results of evaluations: read, checked, and shown as sentences, tables, figures and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans.files import EVAL, EVAL_FOLDER
from titans.report.comparison import (
    Axis,
    Result,
    Task,
    compare,
    count_text,
    is_tampered,
    one_line,
    shorten,
    significant,
    split_name,
    with_figures,
    word,
)
from titans.report.page import Figure, Section, Table, print_table, write_page
from titans.report.plots import Curve, has_band, plot_bars, plot_heat, plot_lines
from titans.report.statistics import Estimate, as_number, is_number

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1  # of the results of `titans eval`
CROWDED = 12  # lines; a figure with more of them shows only models that were not tampered with


def load_results(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The results in files, or in the ``eval.json`` of folders, in that order.

    A ``ValueError`` says which one is missing or not a result, or that two of them are of the same run.
    """
    results: list[dict[str, Any]] = []
    seen: dict[str, Path] = {}
    for path in map(Path, paths):
        result = _read(path)
        model = result.get("fingerprint") or [result["name"], result["model"]["name"]]
        for name, task in result["tasks"].items():
            run = json.dumps([model, task.get("seed", result.get("seed")), name, task.get("control")])
            if run in seen:
                what = f"{one_line(name)} of the run {one_line(result['name'])}"
                raise ValueError(f"{seen[run]} and {path} both hold {what}; expected each run once")
            seen[run] = path
        results.append(result)
    return results


def _read(path: Path) -> dict[str, Any]:
    file = path
    if path.is_dir():  # of results, or of a model that has them
        file = next((place for place in (path / EVAL, path / EVAL_FOLDER / EVAL) if place.exists()), path / EVAL)
        if not file.exists():
            raise ValueError(f"{path} holds no {EVAL}; expected a folder that `titans eval` wrote")
    try:
        text = file.read_bytes().decode("utf-8")
        result = json.loads(text)
        json.dumps(result, ensure_ascii=False).encode()  # half a surrogate pair can be read, but not written
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
_CELL_FIELDS: dict[str, Any] = {"group": dict, **dict.fromkeys(("value", "low", "high", "count"), float)}


def check_result(result: Any, where: str) -> None:
    """Raise a ``ValueError`` of one sentence that begins with ``where`` if this is not a result that can be shown."""
    if not isinstance(result, dict):
        raise ValueError(f"{where} holds {shorten(result)}; expected an object")
    if result.get("format") != FORMAT:
        raise ValueError(f"{where} has format {shorten(result.get('format'))}; expected {FORMAT}")
    _check_fields(result, _RUN_FIELDS, where)
    _check_fields(result["model"], {"name": str, "parameters": float}, f"{where}: model")
    for name, task in result["tasks"].items():
        place = f"{where}: {one_line(name)}"
        if not isinstance(task, dict):
            raise ValueError(f"{place} is {shorten(task)}; expected an object")
        _check_fields(task, {**_TASK_FIELDS, **dict.fromkeys(_TASK_TEXTS)}, place)
        if task.get("better") not in (None, "higher", "lower"):
            raise ValueError(f"{place}: better is {shorten(task['better'])}; expected higher or lower")
        for index, cell in enumerate(task["cells"]):
            spot = f"{place}, cell {index + 1}"
            if not isinstance(cell, dict):
                raise ValueError(f"{spot} is {shorten(cell)}; expected an object")
            _check_fields(cell, _CELL_FIELDS, spot)
            if not isinstance(cell.get("values", []), list):
                raise ValueError(f"{spot}: values is {shorten(cell['values'])}; expected a list")
            for axis in task["axes"]:
                if not isinstance(axis, str) or axis not in cell["group"]:
                    raise ValueError(f"{spot} has no {shorten(axis)}; expected a value for each of the axes")
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
            raise ValueError(f"{where}: {name} is {shorten(value)}; expected {_WORDS[kind]}")


def summarise(results: Sequence[Result]) -> list[str]:
    """A sentence for each task: which model is best where it is hardest, and what chance gives."""
    return [_sentence(task) for task in with_figures(compare(results))]


def _sentence(task: Task) -> str:
    group: dict[str, str] = {}
    where = ""
    if task.axes and task.axes[0].numbers is not None:
        axis = task.axes[0]
        for place in reversed(axis.words):
            group = {axis.name: place}
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
        text += f"; chance is {task.chance_text}"
    return text + "."


def _task_table(task: Task) -> Table:
    """One row per line, one column per place of the first axis; a single column if nothing varies."""
    header, rows = ["model", task.measure], [[label, task.tell(task.estimate(label, {}))] for label in task.series]
    caption = f"{task.measure[0].upper()}{task.measure[1:]}"
    if task.axes:
        first, *others = task.axes
        header = ["model", *first.words]
        rows = [[label, *map(task.tell, task.along(label, first))] for label in task.series]
        caption += f", by {first.label}" + (f"; mean over {', '.join(axis.name for axis in others)}" if others else "")
    if task.fixed:
        caption += f"; at {', '.join(task.fixed)}"
    found = [as_number(cell.get("count")) for entry in task.entries for cell in entry["cells"]]
    counts = [count for count in found if count is not None]
    if counts:
        low, high = word(min(counts)), word(max(counts))
        caption += f"; {low if low == high else f'{low} to {high}'} {task.says('counted') or 'sequences'} per cell"
    cells = [cell for row in rows for cell in row[1:]]
    if any(" to " in cell for cell in cells):
        caption += "; 95% intervals in parentheses"
        if max(len(runs) for runs in task.series.values()) > 1:
            caption += ", over runs where there are several"
    caption += "."
    if any(cell.endswith("*") for cell in cells):
        caption += " * Some runs or cells are missing, and are left out of the mean"
        caption += ", or diverged, which counts as 0." if task.percent else ", or have no value."
    return Table(header, rows, caption)


def result_tables(results: Sequence[Result]) -> list[tuple[str, Table]]:
    """A title and a table for each task."""
    return [(task.title, _task_table(task)) for task in with_figures(compare(results))]


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
    measured = compare(results)
    if not measured:
        return list(more)
    tasks = with_figures(measured)
    sections = [Section("In short", [_sentence(task) for task in tasks]), *more]
    sections += [_task_section(task) for task in tasks if task.axes]
    if single := [task for task in tasks if not task.axes]:
        sections.append(Section("Single figures", ["Tasks with one figure per model."], [_single_table(single)]))
    return [*sections, _made_section(results, measured)]


def _single_table(tasks: Sequence[Task]) -> Table:
    """One row per task, one column per line."""
    labels = list(dict.fromkeys(label for task in tasks for label in task.series))
    rows = [
        [
            task.title + (f", {', '.join(task.fixed)}" if task.fixed else ""),
            task.measure,
            *(task.tell(task.estimate(label, {})) if label in task.series else "-" for label in labels),
            task.chance_text,
        ]
        for task in tasks
    ]
    return Table(["task", "measured as", *labels, "chance"], rows, "95% intervals in parentheses.")


def _task_section(task: Task) -> Section:
    first = task.axes[0]
    better = f"{'Higher' if task.higher else 'Lower'} is better."
    words = [f"Source: {task.says('source')}." if task.says("source") else "", better]
    if task.chance is not None:
        words.append(f"Chance is {task.chance_text}.")
    trained = sorted({number for entry in task.entries if (number := as_number(entry.get("trained_at"))) is not None})
    if trained:
        words.append(f"Trained at length {' and '.join(map(word, trained))}.")
    shown = list(task.series)
    if len(shown) > CROWDED:
        shown = [label for label in shown if not is_tampered(task.series[label][0])] or shown[:CROWDED]
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
    tables = [_task_table(task), *_run_tables(task), *_search_tables(task), *_cost_tables(task)]
    return Section(task.title, [" ".join(filter(None, words))], tables, figures)


def _run_tables(task: Task) -> list[Table]:
    """Each run of a line by itself, if there are several."""
    if max(map(len, task.series.values())) < 2:
        return []
    first = task.axes[0]

    def tell(label: str, place: str) -> str:
        found = [task.estimate_run(entry, {first.name: place}) for entry in task.series[label]]
        return ", ".join("-" if each is None else task.show(each.value) for each in found)

    rows = [[label, *(tell(label, place) for place in first.words)] for label in task.series]
    return [Table(["model", *first.words], rows, f"{task.measure[0].upper()}{task.measure[1:]}, each run by itself.")]


def _search_tables(task: Task) -> list[Table]:
    """What search has found, for lines that read only that."""

    def tell(cells: Sequence[Mapping[str, Any]]) -> str:
        shares = [share for cell in cells if (share := as_number(cell.get("found"))) is not None]
        counts = sorted({str(cell["sentences"]) for cell in cells if "sentences" in cell}, key=int)
        if not counts:
            return "-"
        return f"{' or '.join(counts)}" + (f": {100 * sum(shares) / len(shares):.0f}%" if shares else "")

    caption = "Sentences that were read, and in which share of the sequences all that is needed was among them."
    return _by_place(
        task, {label: [e["cells"] for e in entries] for label, entries in task.series.items()}, tell, caption
    )


def _cost_tables(task: Task) -> list[Table]:
    """What reading took."""

    def tell(costs: Sequence[Mapping[str, Any]]) -> str:
        seconds = sum(as_number(cost.get("seconds")) or 0.0 for cost in costs)
        memory = max((as_number(cost.get("peak_memory")) or 0.0 for cost in costs), default=0.0)
        return f"{seconds:,.0f} s, {memory / 2**30:.2f} GiB" if costs else "-"

    caption = "Time for all sequences of all runs, shared by those that read the same, and the most memory until then."
    costs = {label: [e.get("reading") or [] for e in entries] for label, entries in task.series.items()}
    return _by_place(task, costs, tell, caption)


def _by_place(
    task: Task,
    found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    tell: Callable[[Sequence[Mapping[str, Any]]], str],
    caption: str,
) -> list[Table]:
    """A row for each line with something to tell of the places of the first axis; no table without any."""
    first = task.axes[0]
    rows = []
    for label, runs in found.items():
        each = [item for run in runs for item in run]
        cells = [tell([item for item in each if word(item["group"].get(first.name)) == place]) for place in first.words]
        rows += [[label, *cells]] if any(cell != "-" for cell in cells) else []
    return [Table(["model", *first.words], rows, caption)] if rows else []


def _curve(task: Task, label: str, axis: Axis) -> Curve:
    means = task.along(label, axis)
    entries = task.series[label]
    runs = [[task.estimate_run(entry, {axis.name: place}) for place in axis.words] for entry in entries]
    trained = {as_number(entry.get("trained_at")) if axis.name == "length" else None for entry in entries}
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


def _heat_maps(task: Task) -> list[Figure]:
    """One map per line, the second axis downwards; all of them share one scale."""
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
        return f"{100 * value:.0f}" if task.percent else significant(value)

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


def _made_section(results: Sequence[Result], tasks: Sequence[Task]) -> Section:
    header = ["run", "model", "parameters", "seed", "date", "torch", "seconds", "command"]
    rows = []
    for result in results:
        seconds = [s for entry in result["tasks"].values() if (s := as_number(entry.get("seconds"))) is not None]
        calls = _calls(result)
        versions = [found if isinstance(found := call.get("versions"), dict) else {} for call in calls]
        cells = [result["name"], result["model"]["name"], count_text(result["model"].get("parameters"))]
        trained = result["model"].get("seed")
        seed = _each(calls, "seed") + ("" if trained is None else f", trained with {_plain(trained)}")
        cells += [seed, _each(calls, "date"), _each(versions, "torch")]
        rows.append([*cells, f"{sum(seconds):,.1f}" if seconds else "-", _each(calls, "command", "; ")])
    settings = [[task.name, _plain(task.says("source")), _settings(task)] for task in tasks]
    tables = [Table(header, rows, "Runs."), Table(["task", "source", "settings"], settings, "Tasks.")]
    return Section("How it was made", [], tables)


def _calls(result: Result) -> list[Mapping[str, Any]]:
    """What says how a result was made: the calls that its tasks name, or else the result itself."""
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


def _settings(task: Task) -> str:
    """The settings of a task; where runs differ, all of theirs."""
    found: dict[str, list[str]] = {}
    for entry in task.entries:
        settings = entry.get("settings")
        for name, value in settings.items() if isinstance(settings, dict) else ():
            texts = found.setdefault(name, [])
            if _plain(value) not in texts:
                texts.append(_plain(value))
    return "; ".join(f"{name}: {' or, in other runs, '.join(texts)}" for name, texts in found.items()) or "-"


def write_report(results: Sequence[Result], out: str | Path) -> Path:
    """Write the page of results and its figures into a folder; nothing if something is wrong.

    Args:
        results: as ``load_results`` gives them.
        out: the folder, for ``report.html``, ``TASK.png`` and ``TASK-heat-MODEL.png``; made if needed.

    Returns the path of the page.
    """
    return write_page(result_sections(results), out, "Titans: evaluation", _facts(results))


def _facts(results: Sequence[Result]) -> str:
    models = {result["model"]["name"] for result in results}
    tasks = {split_name(key, task)[0] for result in results for key, task in result["tasks"].items() if task["cells"]}
    counts = {"model": len(models), "run": len(results), "task": len(tasks)}
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items())
