from __future__ import annotations

import base64
import io
import itertools
import json
import math
import re
import shutil
import struct
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Canvas
from rich.console import Console

from titans.report.page import Figure, Section, Table, render_page
from titans.report.plots import COLOURS, Curve, plot_bars, plot_heat, plot_lines, short_number, thin
from titans.report.results import load_results, print_tables, result_sections, result_tables, summarise, write_report
from titans.report.statistics import Estimate, mean_of_cells, mean_of_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
HOSTILE = "<script>alert(1)</script> \"'& $\\frac{1} {{TITLE}} [/red] \x1b[31m ../../up"
PNG = base64.b64decode(  # one white dot
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)
LENGTHS, DEPTHS = (1024, 2048, 4096, 8192, 16384, 32768), (0.0, 0.5, 1.0)


def cell(value: float | None, half: float | None = 0.03, **group: Any) -> dict[str, Any]:
    low, high = (None, None) if value is None or half is None else (value - half, value + half)
    return {"group": group, "value": value, "low": low, "high": high, "count": 50, "loss": 0.1}


def entry(*cells: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What a run says of a task; its axes are the keys of the first cell's group."""
    said = {"title": "Needle", "source": "a paper", "metric": "accuracy", "unit": "", "better": "higher", "chance": 0.1}
    said |= {"axes": list(cells[0]["group"]), "settings": {"digits": 7}, "trained_at": None, "seconds": 2.5}
    return {**said, "control": None, "cells": list(cells), **fields}


def result(model: str = "mac", seed: int = 0, parameters: int | None = 1000, **tasks: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "name": f"{model}-{seed}",
        "model": {"name": model, "parameters": parameters, "fields": {}},
        "date": "2026-11-16",
        "command": f"titans eval {model} --seed {seed}",
        "versions": {"torch": "2.9.0"},
        "seed": seed,
        "tasks": tasks or {"needle": entry(*(cell(0.9, length=n) for n in LENGTHS))},
    }


def many() -> list[dict[str, Any]]:
    """Runs of all kinds: several seeds, values that are missing, words, one figure, a name that does harm."""
    results = []
    for model, seed in [("mac", 0), ("mac", 1), ("mac", 2), ("transformer", 0), (HOSTILE, 0)]:
        shift = 0.05 * seed
        needle = [
            cell(0.8 + shift - 0.02 * math.log2(n / 1024) * d if model != "transformer" or n <= 8192 else None,
                 length=n, depth=d)
            for n in LENGTHS for d in DEPTHS
        ]  # fmt: skip
        kinds = [cell(0.5 + shift, kind=kind) for kind in ("yes or no", "counting things in a long story", HOSTILE)]
        losses = [cell(3.0 - shift - 0.1 * i, None, distance=64 * 2**i) for i in range(7)]
        results.append(
            result(
                model,
                seed,
                needle=entry(*needle, trained_at=2048, title="Needle in noise"),
                kinds=entry(*kinds, title=f"Questions {HOSTILE}", source=HOSTILE),
                lm=entry(*losses, metric="loss", unit="nats", better="lower", chance=None, title="Language"),
                copy=entry(cell(0.7, length=512), title="Copying"),
            )
        )
    return results


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every figure that is saved."""
    seen: list[Axes] = []
    save = Canvas.savefig

    def remember(self: Canvas, *args: Any, **kwargs: Any) -> None:
        seen.append(self.axes[0])
        save(self, *args, **kwargs)

    monkeypatch.setattr(Canvas, "savefig", remember)
    return seen


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for box in axes.figure.legends for text in box.get_texts()]


def test_a_folder_and_a_file_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(result("mac")))
    (tmp_path / "other.json").write_text(json.dumps(result("mag")))
    assert load_results([tmp_path / "other.json", tmp_path]) == [result("mag"), result("mac")]


def broken(**fields: Any) -> str:
    return json.dumps({**result(), **fields})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "run holds no eval.json; expected a folder that `titans eval` wrote"),
        ("{", "eval.json cannot be read as JSON"),
        ("\udcff", "eval.json cannot be read as JSON"),
        (broken(name="\ud800"), "eval.json cannot be read as JSON"),
        ("[" * 100_000, "eval.json cannot be read as JSON"),
        ("[]", "eval.json holds []; expected an object"),
        ("{}", "eval.json has format null; expected 1"),
        (broken(format=2), "eval.json has format 2; expected 1"),
        (broken(name=None), "name is null; expected a text"),
        (broken(model="mac"), 'model is "mac"; expected an object'),
        (broken(model={}), "model: name is null; expected a text"),
        (broken(tasks=[]), "tasks is []; expected an object"),
        (broken(tasks={}), "holds no cells; expected a task with at least one"),
        (broken(tasks={"a": 1}), "a is 1; expected an object"),
        (broken(tasks={"a": entry(cell(1.0), metric=None)}), "a: metric is null; expected a text"),
        (broken(tasks={"a": entry(cell(1.0), chance="none")}), 'a: chance is "none"; expected a number or null'),
        (broken(tasks={"a": entry(cell(1.0), control={})}), "a: control is {}; expected a text or null"),
        (broken(tasks={"a": entry(cell(1.0), better="up")}), 'a: better is "up"; expected higher or lower'),
        (broken(tasks={"a": entry(cell(1.0), cells=[])}), "holds no cells; expected a task with at least one"),
        (broken(tasks={"a": entry(cell(1.0), cells=[1])}), "a, cell 1 is 1; expected an object"),
        (broken(tasks={"a": entry(cell(1.0), cell("x", None))}), 'a, cell 2: value is "x"; expected a number or null'),
        (broken(tasks={"a": entry(cell(1.0), axes=["depth"])}), 'a, cell 1 has no "depth"; expected a value'),
    ],
)  # fmt: skip
def test_what_is_not_a_result_is_one_sentence(text: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    if text is not None:
        (tmp_path / "run" / "eval.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_results([tmp_path / "run"])
    assert "\n" not in str(caught.value)


def test_a_path_that_leads_nowhere_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not there; expected a folder that `titans eval` wrote"):
        load_results([tmp_path / "nowhere"])


def test_the_same_run_twice_is_refused_but_not_its_other_tasks_and_controls(tmp_path: Path) -> None:
    needle = entry(cell(0.5, length=1))
    contents = {
        "a": result(needle=needle),
        "b": result(needle={**needle, "control": "reset"}),
        "c": result(other=needle),
        "e": {**result(needle=needle), "fingerprint": "other weights"},
        "d": result(needle=needle),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert len(load_results(tmp_path / name for name in "abce")) == 4
    with pytest.raises(ValueError, match=r"a and .*d both hold needle of the run mac-0; expected each run once"):
        load_results(tmp_path / name for name in "abd")
    with pytest.raises(ValueError, match="expected each run once"):
        load_results([tmp_path / "a", tmp_path / "a"])


def test_the_interval_of_a_mean_over_cells_shrinks_with_their_number() -> None:
    assert mean_of_cells([cell(0.5, 0.1)] * 4) == Estimate(0.5, pytest.approx(0.45), pytest.approx(0.55))


def test_the_interval_of_a_mean_over_runs_is_student_s() -> None:
    # the mean of 1, 2, 3 has a standard error of 1 / sqrt(3), and Student's factor for three is 4.30
    runs = [Estimate(value, value - 0.1, value + 0.1) for value in (1.0, 2.0, 3.0)]
    mean = mean_of_runs(runs)
    assert mean is not None and mean.value == 2
    assert mean.low == 0  # a measure is not negative
    assert mean.high == pytest.approx(2 + 4.30 / math.sqrt(3))
    clipped = mean_of_runs([Estimate(value, None, None) for value in (0.9, 1.0, 0.95)], top=1.0)
    assert clipped is not None and clipped.high == 1


def test_runs_that_agree_are_no_surer_than_one_as_all_were_measured_on_the_same() -> None:
    mean = mean_of_runs([Estimate(0.5, 0.4, 0.7)] * 4)
    assert mean == Estimate(0.5, pytest.approx(0.4), pytest.approx(0.7))


FINITE = st.floats(0, 1)


@given(st.lists(st.one_of(st.none(), FINITE), max_size=6), FINITE)
def test_a_mean_lies_among_its_values_and_within_its_interval(values: list[float | None], half: float) -> None:
    cells = [cell(value, half) for value in values]
    good = [value for value in values if value is not None]
    for mean in (mean_of_cells(cells), mean_of_runs([mean_of_cells([one]) for one in cells], 1.0)):
        if not good:
            assert mean is None
            continue
        assert mean is not None and mean.low is not None and mean.high is not None
        assert min(good) - 1e-9 <= mean.value <= max(good) + 1e-9
        assert mean.low <= mean.value <= mean.high
        assert mean.whole == (len(good) == len(values))


def rows(*results: dict[str, Any]) -> list[list[str]]:
    ((_, table),) = result_tables(results)
    return [list(table.header), *(list(row) for row in table.rows)]


def test_a_table_has_a_row_a_model_and_a_column_a_length_with_the_mean_over_depth() -> None:
    cells = [
        cell(v, 0.04, length=n, depth=d) for n, d, v in [(2048, 0, 0.2), (1024, 0, 1), (2048, 1, 0.4), (1024, 1, 0.9)]
    ]
    assert rows(result("mac", needle=entry(*cells)), result("mag", needle=entry(*cells[:2]))) == [
        ["model", "1,024", "2,048"],
        ["mac", "95.0 ±2.8", "30.0 ±2.8"],
        ["mag", "100.0 ±4.0*", "20.0 ±4.0*"],
    ]  # fmt: skip


def test_a_missing_value_is_a_dash_and_a_mean_without_it_is_marked() -> None:
    nan = {**cell(None, length=2, depth=1), "value": math.nan}
    cells = [cell(0.5, None, length=1, depth=0), cell(None, length=1, depth=1), cell(None, length=2, depth=0), nan]
    assert rows(result(needle=entry(*cells, metric="loss"))) == [["model", "1", "2"], ["mac", "0.500*", "-"]]
    assert "no value" in result_tables([result(needle=entry(*cells, metric="loss"))])[0][1].caption


def test_where_a_run_diverged_nothing_is_right() -> None:
    cells = [cell(0.5, length=1, depth=0), cell(None, length=1, depth=1), cell(None, length=2, depth=0)]
    run = result(needle=entry(*cells, cell(None, length=2, depth=1)))
    assert rows(run) == [["model", "1", "2"], ["mac", "25.0*", "0.0*"]]
    assert "diverged, which counts as 0" in result_tables([run])[0][1].caption
    seeds = [result("mac", seed, needle=entry(cell(value))) for seed, value in enumerate((0.9, 0.9, None))]
    assert rows(*seeds)[1][1].startswith("60.0 ±")


def test_a_length_that_is_half_measured_is_marked() -> None:
    cells = [cell(0.5, length=1, depth=0), cell(0.7, length=1, depth=1), cell(0.9, length=2, depth=0)]
    assert rows(result(needle=entry(*cells))) == [["model", "1", "2"], ["mac", "60.0 ±2.1", "90.0 ±3.0*"]]


def test_runs_of_a_model_are_one_line_and_another_size_is_another() -> None:
    def run(seed: int, value: float, parameters: int = 1000) -> dict[str, Any]:
        return result("mac", seed, parameters, needle=entry(cell(value, None)))

    assert rows(run(0, 0.4), run(1, 0.6))[1:] == [["mac", "50.0 ±50.0"]]  # two runs say little, and Student knows
    assert rows(run(0, 0.4), run(1, 0.6, 2000))[1:] == [["mac (1,000)", "40.0"], ["mac (2,000)", "60.0"]]


def test_models_of_one_name_that_differ_in_their_config_or_training_are_lines_of_their_own() -> None:
    def run(name: str, value: float, **about: Any) -> dict[str, Any]:
        made = result("mac", needle=entry(cell(value, None)))
        return {**made, "name": name, "model": {**made["model"], "fields": {"memory_writes": True}, **about}}

    off = {"memory_writes": False}
    runs = [run("on-0", 0.9), run("on-1", 0.7), run("off-0", 0.2, fields=off), run("off-1", 0.2, fields=off)]
    assert rows(*runs)[1:] == [["mac (on-0)", "80.0 ±80.0"], ["mac (off-0)", "20.0 ±0.0"]]
    for about in ({"trained_at": 64}, {"trained_on": "task:recall"}):
        assert [row[0] for row in rows(run("a", 0.9), run("b", 0.7, **about))[1:]] == ["mac (a)", "mac (b)"]
    alike = {"memory_writes": True, "transformers_version": "5.0"}
    assert [row[0] for row in rows(run("a", 0.9), run("b", 0.7, fields=alike))[1:]] == ["mac"]
    assert [row[0] for row in rows(run("a", 0.9), run("a", 0.7, fields=off))[1:]] == ["mac (a)", "mac (a, 2)"]


def test_what_a_run_says_of_a_whole_text_is_a_figure_of_its_own() -> None:
    whole = {"loss": 2.0, "perplexity": 7.389, "bits_per_byte": 2.885, "tokens": 100}
    cells = [{**cell(loss, length=n), "whole": whole} for n, loss in ((64, 2.5), (128, 1.5))]
    run = result(
        lm=entry(*cells, metric="loss", better="lower", chance=None, title="Text"),
        words=entry({**cell(0.25, set="words"), "whole": {"perplexity": 30.5}}, title="Words"),
    )
    *_, single, made = result_sections([run])
    assert single.tables[0].rows == [
        ["Text", "perplexity", "7.389", "-"],
        ["Text", "bits per byte", "2.885", "-"],
        ["Words, set words", "accuracy (%)", "25.0 ±3.0", "10.0%"],
        ["Words", "perplexity", "30.500", "-"],
    ]
    assert "Text: mac has perplexity 7.389." in summarise([run])
    assert [table.header for _, table in result_tables([run])][1:3] == [
        ["model", "perplexity"],
        ["model", "bits per byte"],
    ]
    assert [row[0] for row in made.tables[1].rows] == ["lm", "words"]


def test_the_caption_says_what_was_counted_and_an_axis_has_its_unit() -> None:
    cells = [cell(2.0, position=64), {**cell(1.0, position=128), "count": 70}]
    _, table = result_tables([result(lm=entry(*cells, metric="loss", counted="tokens"))])[0]
    assert "by position (tokens)" in table.caption and "; 50 to 70 tokens a cell" in table.caption


def test_how_it_was_made_names_every_call() -> None:
    def call(day: int, name: str) -> dict[str, Any]:
        return {"command": f"titans eval {name}", "date": f"2026-11-{day}", "seed": day, "versions": {"torch": "2.9"}}

    calls = {"a": [call(16, "a")], "b": [call(16, "a"), call(17, "b")]}
    run = result(**{name: entry(cell(0.5), made=made) for name, made in calls.items()})
    row = result_sections([run])[-1].tables[0].rows[0]
    assert row[3:6] == ["16, 17", "2026-11-16, 2026-11-17", "2.9"]
    assert row[-1] == "titans eval a; titans eval b"


def test_a_control_and_a_changed_model_are_lines_of_the_same_task_and_what_is_not_measured_yet_is_none() -> None:
    tasks = {
        "needle": entry(cell(0.9, None)),
        "needle reset": entry(cell(0.1, None), control="reset"),
        "needle chunk=4": entry(cell(0.8, None), fields={"chunk": 4}),
        "needle swap": entry(cell(0.8, None), control="swap", cells=[]),
        "later": entry(cell(0.8, None), cells=[]),
    }
    assert rows(result(**tasks))[1:] == [["mac", "90.0"], ["mac (reset)", "10.0"], ["mac (chunk=4)", "80.0"]]


def test_a_crowded_figure_leaves_what_was_tampered_with_to_the_table(drawn: list[Axes]) -> None:
    cells = [cell(0.5, length=n) for n in (16, 64)]
    controls = {f"needle {name}": entry(*cells, control=name) for name in ("no-writes", "reset", "swap")}
    runs = [result(name, needle=entry(*cells), **controls) for name in ("mac", "mag", "mal", "lmm")]

    def section_and_lines(many: int) -> tuple[Section, dict[str, str]]:
        section = next(section for section in result_sections(runs[:many]) if section.figures)
        (legend,) = drawn[-1].get_figure().legends
        named = zip(legend.get_texts(), legend.legend_handles, strict=True)
        return section, {text.get_text(): line.get_color() for text, line in named if text.get_text() != "chance"}

    section, lines = section_and_lines(3)
    assert len(section.tables[0].rows) == len(lines) == 12
    section, lines = section_and_lines(4)
    assert len(section.tables[0].rows) == 16
    assert list(lines) == ["mac", "mag", "mal", "lmm"] and len(set(lines.values())) == 4
    assert section.figures[0].caption.endswith("12 more are in the table only.")


def test_where_it_was_trained_is_drawn_on_the_axis_of_lengths_alone(drawn: list[Axes]) -> None:
    for axis in ("length", "pairs"):
        result_sections([result(a=entry(*(cell(0.5, **{axis: n}) for n in (16, 64)), trained_at=32))])
    assert [any(line.get_linestyle() == ":" for line in axes.lines) for axes in drawn] == [True, False]


def test_runs_that_measured_something_else_are_refused() -> None:
    one, other = entry(cell(1.0, length=1)), entry(cell(1.0, length=1), metric="loss")
    with pytest.raises(ValueError, match='needle has metric "accuracy" in one run and "loss" in another; expected'):
        summarise([result("mac", needle=one), result("mag", needle=other)])


@pytest.mark.parametrize(
    ("metric", "value", "half", "shown"),
    [
        ("accuracy", 0.9731, 0.02, "97.3 ±2.0"),
        ("loss", 2.34567, 0.0123, "2.346 ±0.012"),
        ("perplexity", 123.456, 4.5, "123.5 ±4.5"),
        ("tokens/s", 12345.6, 78.9, "12,346 ±79"),
        ("surprise", 1.5e-5, None, "1.5e-05"),
        ("perplexity", 1e99, None, "1e+99"),
    ],
)
def test_a_number_is_as_long_as_its_measure_needs(metric: str, value: float, half: float | None, shown: str) -> None:
    assert rows(result(a=entry(cell(value, half), metric=metric)))[1] == ["mac", shown]


def sentence(*values: float | None, half: float | None = None, **fields: Any) -> str:
    """Of a task whose models, a, b and so on, have these values at its longest length."""
    results = []
    for model, value in zip("abcdef", values, strict=False):
        cells = [cell(0.5, length=1024), cell(value, half, length=16384)]
        results.append(result(model, needle=entry(*cells, **fields)))
    (text,) = summarise(results)
    return text


def test_a_sentence_says_who_is_best_at_the_longest_length() -> None:
    assert (
        sentence(0.3, 0.9) == "Needle: at length 16,384 b is best with 90.0%, ahead of a with 30.0%; chance is 10.0%."
    )
    assert sentence(0.3, chance=1e-7) == "Needle: at length 16,384 a has 30.0%; chance is below 0.1%."
    assert sentence(0.9, 0.9, 0.1, chance=None) == "Needle: at length 16,384 a and b are level with 90.0%."
    assert "b is best with 90.0% ±5.0, but a with 87.0% ±5.0 may be as good" in sentence(0.87, 0.9, half=0.05)
    assert "a is best with loss 1.000 nats, ahead of b with 2.000 nats" in sentence(
        1.0, 2.0, metric="loss", better="lower"
    )
    assert "b is best with 2,000 tokens/s" in sentence(1.0, 2000.0, metric="tokens/s", unit="tokens/s", better=None)
    lacking = sentence(0.3, None, metric="loss")
    assert "a has loss 0.300" not in lacking and "b has no value there" in lacking
    assert sentence(None, metric="loss").startswith("Needle: at length 1,024 a has loss 0.500")


def test_a_sentence_about_words_is_about_their_mean_and_one_about_nothing_says_so() -> None:
    kinds = entry(cell(0.2, None, kind="x"), cell(0.4, None, kind="y"))
    assert summarise([result(a=kinds)]) == ["Needle: on average over kind mac has 30.0%; chance is 10.0%."]
    assert summarise([result(a=entry(cell(None), metric="loss"))]) == ["Needle: no run has a value."]


def test_an_axis_with_one_place_is_a_setting_and_a_task_with_one_cell_a_row() -> None:
    deep = entry(*(cell(0.5, length=4096, depth=d) for d in DEPTHS), trained_at=1024)
    _, section, single, _ = result_sections([result(deep=deep, one=entry(cell(0.7, length=512), title="Copying"))])
    assert section.tables[0].header == ["model", "0", "0.5", "1"]
    assert "at length 4,096" in section.tables[0].caption
    assert [figure.name for figure in section.figures] == ["deep"]
    assert single.figures == ()
    assert single.tables[0].rows == [["Copying, length 512", "accuracy (%)", "70.0 ±3.0", "10.0%"]]


def test_lines_have_labels_a_title_a_legend_chance_and_where_it_was_trained(drawn: list[Axes]) -> None:
    needle = [[one for one in run["tasks"]["needle"]["cells"] if one["group"]["depth"] == 1] for run in many()]
    entries = [entry(*cells, trained_at=2048, title="Needle in noise") for cells in needle]
    result_sections([{**run, "tasks": {"needle": one}} for run, one in zip(many(), entries, strict=True)])
    (axes,) = drawn
    assert axes.get_xlabel() == "length (tokens)"
    assert axes.get_ylabel() == "accuracy (%), higher is better"
    assert axes.figure.get_suptitle() == "Needle in noise"
    short = [name[:12] for name in legend(axes)]
    assert short == ["mac, 3 runs", "transformer", "<script>aler", "chance", "trained here"]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1k", "2k", "4k", "8k", "16k", "32k"]
    styles = {line.get_linestyle(): line for line in axes.lines}
    assert list(styles["--"].get_ydata()) == [0.1, 0.1]
    assert list(styles[":"].get_xdata()) == [2048, 2048]
    widths = sorted(line.get_linewidth() for line in axes.lines if to_hex(line.get_color()) == COLOURS[0].lower())
    assert widths == [0.8, 0.8, 0.8, 2.4]  # a thin line a seed, and their mean
    assert len(axes.collections) == 3  # bands


@pytest.mark.parametrize(("curves", "runs", "bands"), [(3, 3, 3), (4, 3, 0), (4, 0, 4)])
def test_many_curves_show_their_runs_and_no_bands(curves: int, runs: int, bands: int, drawn: list[Axes]) -> None:
    one = [Curve(str(i), [0.5, 0.6], [0.4, 0.5], [0.6, 0.7], [[0.5, 0.6]] * runs, i) for i in range(curves)]
    plot_lines([1, 2], one, "t", "x", "y")
    assert len(drawn[0].collections) == bands
    assert len(drawn[0].lines) == curves * (1 + runs)


def test_bands_are_only_spoken_of_where_they_are(drawn: list[Axes]) -> None:
    few, more = (
        result_sections([{**many()[seed], "model": {"name": f"m{i}"}} for i in range(models) for seed in (0, 1)])
        for models in (2, 5)
    )
    assert "Bands are 95% intervals." in str(few) and "Thin lines are runs" in str(few)
    assert "Bands are 95% intervals." not in str(more) and "Thin lines are runs" in str(more)


def test_a_line_stops_where_there_is_no_value_but_the_axis_does_not(drawn: list[Axes]) -> None:
    plot_lines([1, 2, 4], [Curve("a", [0.5, 0.6, None])], "t", "x", "y", percent=True)
    assert [math.isnan(y) for y in drawn[0].lines[0].get_ydata()] == [False, False, True]
    assert drawn[0].get_xlim()[1] > 4
    assert legend(drawn[0]) == []  # one line
    assert drawn[0].get_xscale() == "linear"  # 4x is not much


def test_words_are_bars(drawn: list[Axes]) -> None:
    runs = [[0.1, 0.1], [0.1, 0.3]]
    curves = [Curve("a", [0.5, None], [0.4, None], [0.7, None]), Curve("b", [0.1, 0.2], runs=runs, style=1)]
    plot_bars(["one", "two"], curves, "t", "kind", "accuracy (%)", percent=True, chance=0.25)
    axes = drawn[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["one", "two"]
    assert [bar.get_width() for bar in axes.patches if not math.isnan(bar.get_width())] == [0.5, 0.1, 0.2]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("accuracy (%)", "kind")
    assert legend(axes) == ["a", "b", "chance"]


def test_a_heat_map_has_depth_downwards_a_number_in_each_cell_and_a_scale_from_0_to_1(drawn: list[Axes]) -> None:
    run = many()[3]
    sections = result_sections([{**run, "tasks": {"needle": run["tasks"]["needle"]}}])
    names = [figure.name for section in sections for figure in section.figures]
    assert names == ["needle", "needle-heat-transformer"]
    axes = drawn[1]
    image = axes.images[0]
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("length (tokens)", "depth (share of the sequence)")
    texts = [text.get_text() for text in axes.texts]
    assert texts[:6] == ["80", "80", "80", "80", "0", "0"]  # depth 0, on top; where it diverged, nothing is right
    assert texts[12:16] == ["80", "78", "76", "74"]
    assert axes.figure.axes[1].get_ylabel() == "accuracy (%)"  # the bar of colours


def test_maps_of_what_is_no_share_use_one_scale_for_all_models(drawn: list[Axes]) -> None:
    def run(model: str, size: float) -> dict[str, Any]:
        cells = [cell(size * n + d, None, length=n, depth=d) for n in (1, 2) for d in (0, 1)]
        return result(model, a=entry(*cells, metric="perplexity", better="lower"))

    result_sections([run("a", 10), run("b", 100)])
    assert [(axes.images[0].norm.vmin, axes.images[0].norm.vmax) for axes in drawn[1:]] == [(10, 201), (10, 201)]


def test_no_two_models_look_alike_and_a_name_is_shown_as_it_is(drawn: list[Axes]) -> None:
    names = ["_under", r"$\frac{$", "chance", *(f"model {i}" for i in range(11))]
    plot_lines([1, 2], [Curve(name, [i, i], style=i) for i, name in enumerate(names)], "$t", "x", "y", chance=0.5)
    looks = {(line.get_color(), line.get_linestyle()) for line in drawn[0].lines[:-1]}
    assert len(looks) == 14
    assert legend(drawn[0])[:2] == ["_under", r"$\frac{$"]
    assert len(set(legend(drawn[0]))) == 15


def test_values_that_differ_much_are_drawn_in_powers_unless_they_are_shares(drawn: list[Axes]) -> None:
    plot_lines([1, 2], [Curve("a", [0.001, 1.0])], "t", "x", "y")
    plot_lines([1, 2], [Curve("a", [0.001, 1.0])], "t", "x", "y", percent=True)
    assert [axes.get_yscale() for axes in drawn] == ["log", "linear"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30, unique=True).map(sorted))
def test_names_on_an_axis_keep_their_distance_and_the_ends_have_one(places: list[float]) -> None:
    kept = thin(places)
    assert kept[0] == 0 and kept[-1] == len(places) - 1
    assert kept == sorted(set(kept))
    if len(kept) > 2:
        gaps = [places[b] - places[a] for a, b in itertools.pairwise(kept)]
        assert min(gaps) >= (places[-1] - places[0]) / 9


def test_a_number_on_an_axis_is_short() -> None:
    assert list(map(short_number, (0.25, 512, 1000, 1024, 16384))) == ["0.25", "512", "1,000", "1k", "16k"]


def test_a_map_with_many_columns_has_small_numbers(drawn: list[Axes]) -> None:
    def size(columns: int) -> float:
        names = [str(i) for i in range(columns)]
        plot_heat(names, ["r"], [[0.5] * columns], "t", "x", "y", "v", lambda value: f"{value:.3f}")
        return float(drawn[-1].texts[0].get_fontsize())

    assert size(2) == 12 > size(12)


class Page(HTMLParser):
    """What a browser would find: elements, attributes that fetch something, pictures, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag == "img":
            self.pictures.append(dict(attributes))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report of many runs."""
    folder = tmp_path_factory.mktemp("report")
    table, figure = Table(["a", HOSTILE], [["1", HOSTILE]], HOSTILE), Figure("extra", PNG, HOSTILE, HOSTILE)
    extra = Section(f"Why {HOSTILE}", [HOSTILE], [table], [figure])
    assert write_report(many(), folder / "new", f"Report {HOSTILE}", [extra]) == folder / "new" / "report.html"
    return folder / "new"


def test_the_page_shows_every_text_as_it_is_and_fetches_nothing(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    assert "script" not in page.tags
    assert "iframe" not in page.tags
    assert all(address.startswith(("data:", "#part-")) for address in page.addresses)
    assert page.text.count(HOSTILE) >= 6
    assert page.text.count("{{TITLE}}") >= 6
    for words in (
        "titans eval mac --seed 2",
        "2026-11-16",
        "2.9.0",
        "digits: 7",
        "In short",
        "Single figures",
        "1,000",
    ):
        assert words in page.text


def test_the_parts_stand_in_order(written: Path) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", (written / "report.html").read_text())
    begin = [unescape(title)[:9] for title in titles]
    assert begin == ["In short", "Why <scri", "Needle in", "Questions", "Language", "Single fi", "How it wa"]


def test_the_figures_are_in_the_page_and_beside_it(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    files = {path.name: path.read_bytes() for path in written.iterdir() if path.suffix == ".png"}
    hostile = "needle-heat-_script_alert_1_script_frac_1_TITLE_red_31m_.._.._up.png"
    heat = {"needle-heat-mac.png", "needle-heat-transformer.png", hostile}
    assert set(files) == {"extra.png", "needle.png", *heat, "kinds.png", "lm.png"}
    embedded = [base64.b64decode((picture["src"] or "").split(",", 1)[1]) for picture in page.pictures]
    assert sorted(embedded) == sorted(files.values())
    for picture, png in zip(page.pictures, embedded, strict=True):
        assert picture["alt"]
        assert (picture["width"], picture["height"]) == tuple(map(str, struct.unpack(">II", png[16:24])))
    assert {path.name for path in written.iterdir()} == {*files, "report.html"}


def test_figures_of_the_same_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    figures = [Figure(name, PNG, "a") for name in ("a.png", "A", "a", "../a", "..", "x" * 300)]
    write_report([], tmp_path / "out", sections=[Section("s", figures=figures)])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(["a.png", "A-2.png", "a-3.png", "a-4.png", "figure.png", "x" * 120 + ".png", "report.html"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_report_may_have_sections_alone_and_needs_something(tmp_path: Path) -> None:
    page = write_report([], tmp_path, sections=[Section("Only this", ["words"])]).read_text()
    assert "Only this" in page and "How it was made" not in page
    with pytest.raises(ValueError, match="there are no sections; expected at least one"):
        write_report([], tmp_path)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (Section("s", figures=[Figure("a", b"GIF89a", "a")]), "the figure a holds b'GIF89a'; expected a PNG"),
        (Section("s", tables=[Table(["a", "b"], [["1"]])]), "a row has 1 cells"),
    ],
)
def test_a_section_that_cannot_be_shown_leaves_nothing_behind(section: Section, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        write_report([result()], tmp_path / "out", sections=[section])
    assert not (tmp_path / "out").exists()


def test_a_result_that_cannot_be_shown_and_a_folder_that_is_a_file_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="result 2 has format 7; expected 1"):
        write_report([result(), {**result("mag"), "format": 7}], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out is the file .*file; expected a folder"):
        write_report([result()], tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_wide_tables_turn_on_a_narrow_screen_and_numbers_stand_to_the_right() -> None:
    wide, narrow = Table(["model", *"abcdefghi"], [["mac", *["97.0 ±3.0"] * 9]]), Table(["a", "b"], [["x", "1"]])
    text = Table(["a", "b"], [["x", "many words that are long enough to fill a line"]])
    date = Table(["a", "date"], [["x", "2026-11-16"]])
    pages = [
        render_page([Section("s", tables=[table])], "t").split("<main>")[1] for table in (wide, narrow, text, date)
    ]
    assert ['class="turn"' in page for page in pages] == [True, False, True, False]
    assert ['<td class="number"' in page for page in pages] == [True, True, False, False]


@pytest.mark.parametrize("width", [50, 80, 300])
def test_the_tables_of_a_terminal_hold_every_number_at_any_width(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    cells = [cell(i / 10, 0.011 * i, length=2**i) for i in range(10)]
    print_tables([result(HOSTILE, a=entry(*cells)), result("mag", a=entry(*cells))], console)
    text = console.export_text()
    for i in range(10):
        assert text.count(f"{10 * i}.0") >= 2
        assert f"±{1.1 * i:.1f}" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "\x1b[31m" not in text
    assert "level with 90.0%" in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_the_page_at_both_widths_without_scrolling_sideways(written: Path, tmp_path: Path) -> None:
    single = write_report([result()], tmp_path / "single")
    frames = [(page, width) for page in (written / "report.html", single) for width in (1280, 390)]
    body = "".join(
        f'<iframe src="{page.as_uri()}" style="width:{w}px;height:900px;border:0"></iframe>' for page, w in frames
    )
    script = """
      const boxes = d => [...d.querySelectorAll(".wide")].map(b => b.scrollWidth - b.clientWidth);
      const pictures = d => [...d.images].map(i => [i.alt.length, i.naturalWidth, i.clientWidth, i.clientHeight]);
      const look = f => ({ inner: f.contentWindow.innerWidth, over: boxes(f.contentDocument),
        page: f.contentDocument.documentElement.scrollWidth, pictures: pictures(f.contentDocument),
        ready: f.contentDocument.readyState, sections: f.contentDocument.querySelectorAll("section").length });
      const all = () => JSON.stringify([...document.querySelectorAll("iframe")].map(look));
      onload = () => { document.getElementById("found").textContent = all(); };
    """
    (tmp_path / "frames.html").write_text(f'<!doctype html>{body}<pre id="found"></pre><script>{script}</script>')
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
         "--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom",
         (tmp_path / "frames.html").as_uri()],
        capture_output=True, encoding="utf-8", timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    found = json.loads(unescape(done.stdout.split('<pre id="found">')[1].split("</pre>")[0]))
    assert [frame["sections"] for frame in found] == [7, 7, 3, 3]
    for (_, width), frame in zip(frames, found, strict=True):
        assert frame["ready"] == "complete"
        assert frame["inner"] == width
        assert frame["page"] <= width
        assert frame["over"] == [0] * len(frame["over"])  # no table scrolls inside its box either
        for alt, natural, across, down in frame["pictures"]:
            assert alt > 0 and natural > 0 and down > 0
            assert 330 <= across <= width  # at 330 the smallest letters are 10 pixels high
