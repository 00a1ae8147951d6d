"""Results of evaluations side by side: the same task over all models and runs, with its means and intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titans.report.plots import short_number
from titans.report.statistics import Estimate, as_number, mean_of_cells, mean_of_runs, pool_shares

UNITS = {"accuracy": "%", "loss": "nats"}  # of metrics, where a result does not say
AXIS_UNITS = {"length": "tokens", "distance": "tokens", "position": "tokens", "depth": "share of the sequence"}
FIGURES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte"}  # of a whole text, as entries name them
IRRELEVANT = ("transformers_version", "_name_or_path")  # fields of a config that say nothing about the model

Result = Mapping[str, Any]  # what `titans eval` writes about a model
Entry = Mapping[str, Any]  # what a result says about one task


@dataclass(frozen=True)
class Axis:
    """An axis of a task: its places as texts, and as numbers if all of them are."""

    name: str
    words: list[str]
    numbers: list[float] | None

    @property
    def label(self) -> str:
        """The name with its unit."""
        return f"{self.name} ({AXIS_UNITS[self.name]})" if self.name in AXIS_UNITS else self.name

    @property
    def short(self) -> list[str]:
        """The places for a figure, where there is little room."""
        return self.words if self.numbers is None else [short_number(number) for number in self.numbers]


@dataclass(frozen=True)
class Task:
    """One task, over all runs that did it.

    Attributes:
        series: the entries of the runs of each line of a plot, by its label.
        styles: the number of each line, the same in the whole report.
        axes: those that vary.
        fixed: the axes that do not, as words.
    """

    name: str
    series: dict[str, list[Entry]]
    styles: Mapping[str, int]
    axes: list[Axis] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """Those of all lines."""
        return [entry for entries in self.series.values() for entry in entries]

    def says(self, name: str) -> Any:
        """A field of the first entry that has it, None if none has."""
        return next((entry[name] for entry in self.entries if entry.get(name) not in (None, "")), None)

    @property
    def title(self) -> str:
        """For a heading."""
        return one_line(self.says("title") or self.name)

    @property
    def metric(self) -> str:
        """What is measured."""
        return one_line(self.says("metric") or "value")

    @property
    def unit(self) -> str:
        """That of the metric; may be empty."""
        return one_line(self.says("unit") or UNITS.get(self.metric, ""))

    @property
    def percent(self) -> bool:
        """Whether values are shares, shown as percent."""
        return self.metric == "accuracy"

    @property
    def measure(self) -> str:
        """The metric with its unit."""
        return f"{self.metric} ({self.unit})" if self.unit and self.unit != self.metric else self.metric

    @property
    def higher(self) -> bool:
        """Whether higher is better."""
        return (self.says("better") or ("higher" if self.metric in ("accuracy", "tokens/s") else "lower")) == "higher"

    @property
    def chance(self) -> float | None:
        """What guessing gives."""
        return as_number(self.says("chance"))

    @property
    def chance_text(self) -> str:
        """The same as text, a dash if it is not known."""
        if self.chance is None:
            return "-"
        if self.percent:
            return f"{self.chance:.1%}" if self.chance >= 0.001 or self.chance == 0 else "below 0.1%"
        return f"{significant(self.chance)} {self.unit}".strip()

    def estimate(self, label: str, group: Mapping[str, str]) -> Estimate | None:
        """The mean over the runs of a line, and in each over the cells of a group."""
        runs = [self.estimate_run(entry, group) for entry in self.series[label]]
        return mean_of_runs(runs, 1.0 if self.percent else math.inf)

    def estimate_run(self, entry: Entry, group: Mapping[str, str]) -> Estimate | None:
        """The mean over the cells of a group in one run; where a run diverged, nothing is right."""
        cells = [cell for cell in entry["cells"] if all(word(cell["group"][axis]) == at for axis, at in group.items())]
        places = math.prod(len(axis.words) for axis in self.axes if axis.name not in group)
        good = [cell for cell in cells if as_number(cell.get("value")) is not None]
        lost = [cell for cell in cells if as_number(cell.get("value")) is None]
        if self.percent:
            mean = pool_shares([*good, *({"value": 0.0, "count": cell.get("count")} for cell in lost)])
        else:
            mean = mean_of_cells(good)
        return None if mean is None else replace(mean, whole=len(good) >= places)

    def along(self, label: str, axis: Axis) -> list[Estimate | None]:
        """An estimate for each place of an axis."""
        return [self.estimate(label, {axis.name: at}) for at in axis.words]

    def show(self, value: float) -> str:
        """A value as text, without its unit."""
        return f"{100 * value:.1f}" if self.percent else significant(value)

    def tell(self, estimate: Estimate | None, unit: bool = False) -> str:
        """An estimate as text: value, interval, and a star if it is not whole; a dash if there is none."""
        if estimate is None:
            return "-"
        percent = "%" if unit and self.unit == "%" else ""
        text = self.show(estimate.value)
        if estimate.low is not None and estimate.high is not None:
            text = f"{text}{percent} ({self._interval(text, estimate.low, estimate.high)}{percent})"
        else:
            text += percent
        text += "" if estimate.whole else "*"
        return f"{text} {self.unit}" if unit and self.unit and not percent else text

    def _interval(self, value: str, low: float, high: float) -> str:
        """Whole percent unless they are too coarse; other measures with the digits of their value."""
        if self.percent:
            digits = 0 if high - low >= 0.02 else 1
            return f"{100 * low:.{digits}f} to {100 * high:.{digits}f}"
        if "e" in value:
            return f"{significant(low)} to {significant(high)}"
        digits = len(value.partition(".")[2])
        return f"{low:,.{digits}f} to {high:,.{digits}f}"


def compare(results: Sequence[Result]) -> list[Task]:
    """The tasks of all results, each with its lines: runs of models of the same kind are one line."""
    tampered: dict[str, bool] = {}
    tasks: dict[str, dict[str, list[Entry]]] = {}
    names = _name_kinds(results)
    for result in results:
        model = names[_kind(result["model"])]
        for key, entry in result["tasks"].items():
            if not entry["cells"]:  # not measured yet
                continue
            name, variant = split_name(key, entry)
            label = f"{model} ({variant})" if variant else model
            tampered.setdefault(label, bool(variant))
            tasks.setdefault(name, {}).setdefault(label, []).append(entry)
    styles = {label: style for style, label in enumerate(sorted(tampered, key=lambda label: tampered[label]))}
    return [_make_task(name, series, styles) for name, series in tasks.items()]


def with_figures(tasks: Iterable[Task]) -> list[Task]:
    """The tasks, each followed by what its runs say about a whole text, as tasks of one figure."""
    found = []
    for task in tasks:
        found.append(task)
        for name, metric in FIGURES.items():
            series = {label: [_figure(entry, name, metric) for entry in runs] for label, runs in task.series.items()}
            known = {label: said for label, runs in series.items() if (said := [run for run in runs if run])}
            if known:
                found.append(Task(f"{task.name} {name}", known, task.styles))
    return found


def is_tampered(entry: Entry) -> bool:
    """Whether the model was measured with its memory tampered with, or with another config than its own."""
    return bool(entry.get("control") or entry.get("fields"))


def split_name(key: str, entry: Entry) -> tuple[str, str]:
    """The task of an entry, and in what the entry differs: "needle reset" with a control is a line of "needle"."""
    if not is_tampered(entry):
        return key, ""
    name, _, rest = key.partition(" ")
    return name, one_line(rest or entry.get("control") or "changed")


def _kind(model: Mapping[str, Any]) -> str:
    """What runs of one line have in common: the model's name, size and config, and what it was trained on."""
    fields = model.get("fields")
    known = {key: value for key, value in fields.items() if key not in IRRELEVANT} if isinstance(fields, dict) else None
    trained = [model.get("trained_at"), model.get("trained_on")]
    return json.dumps([one_line(model["name"]), model.get("parameters"), known, trained], sort_keys=True)


def _name_kinds(results: Sequence[Result]) -> dict[str, str]:
    """A name for each kind of model: the model's, and where several share it, with the size or the first run's name."""
    firsts: dict[str, dict[str, Result]] = {}
    for result in results:
        firsts.setdefault(one_line(result["model"]["name"]), {}).setdefault(_kind(result["model"]), result)
    names: dict[str, str] = {}
    for model, kinds in firsts.items():
        sizes = {first["model"].get("parameters") for first in kinds.values()}
        for kind, first in kinds.items():
            more = count_text(first["model"].get("parameters")) if len(sizes) == len(kinds) else one_line(first["name"])
            name, number = f"{model} ({more})" if len(kinds) > 1 else model, 2
            while name in names.values():
                name, number = f"{model} ({more}, {number})", number + 1
            names[kind] = name
    return names


def _figure(entry: Entry, name: str, metric: str) -> Entry:
    """A figure of a whole text as an entry; empty where cells are of several texts or do not have it."""
    wholes = [cell["whole"] for cell in entry["cells"] if isinstance(cell.get("whole"), dict)]
    if not wholes or name not in wholes[0] or any(whole != wholes[0] for whole in wholes):
        return {}
    cells = [{"group": {}, "value": wholes[0][name]}]
    return {"title": entry.get("title"), "metric": metric, "better": "lower", "axes": [], "cells": cells}


def _make_task(name: str, series: dict[str, list[Entry]], styles: Mapping[str, int]) -> Task:
    entries = [entry for runs in series.values() for entry in runs]
    for key in ("metric", "axes", "better", "unit"):
        for entry in entries:
            if entry.get(key) != entries[0].get(key):
                came = f"{shorten(entries[0].get(key))} in one run and {shorten(entry.get(key))} in another"
                raise ValueError(f"{one_line(name)} has {key} {came}; expected the same in all")
    axes = [_make_axis(axis, entries) for axis in entries[0]["axes"]]
    fixed = [f"{axis.name} {axis.words[0]}" for axis in axes if len(axis.words) == 1]
    return Task(name, series, styles, [axis for axis in axes if len(axis.words) > 1], fixed)


def _make_axis(name: str, entries: Iterable[Entry]) -> Axis:
    """An axis over all runs: numbers rise, words keep their order."""
    places = {word(cell["group"][name]): cell["group"][name] for entry in entries for cell in entry["cells"]}
    numbers = {text: number for text, place in places.items() if (number := as_number(place)) is not None}
    if len(numbers) < len(places):
        return Axis(name, list(places), None)
    words = sorted(places, key=lambda text: numbers[text])
    return Axis(name, words, [numbers[text] for text in words])


def word(value: Any) -> str:
    """A place on an axis as text."""
    if as_number(value) is None:
        return one_line(str(value))
    return f"{value:,.0f}" if value == int(value) else f"{value:.12g}"


def significant(value: float) -> str:
    """A number as text, with as many digits as its size asks for."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def count_text(number: Any) -> str:
    """A count as text, a dash if it is not known."""
    return f"{number:,}" if as_number(number) is not None else "-"


def one_line(text: str) -> str:
    """The text as one line in which nothing steers a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))


def shorten(value: Any) -> str:
    """A value for an error message, at most 40 letters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:39] + "…"
