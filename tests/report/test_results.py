from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from rich.console import Console

from tests.report.cases import DEPTHS, HOSTILE, cell, entry, legend, many, result
from titans.report.page import Section
from titans.report.plots import COLOURS
from titans.report.results import load_results, print_tables, result_sections, result_tables, summarise, write_report
from titans.report.statistics import wilson


def test_a_folder_and_a_file_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(result("mac")))
    (tmp_path / "other.json").write_text(json.dumps(result("mag")))
    assert load_results([tmp_path / "other.json", tmp_path]) == [result("mag"), result("mac")]


def test_the_folder_of_a_model_is_read_where_its_results_are(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "eval.json").write_text(json.dumps(result("mac")))
    assert load_results([tmp_path]) == [result("mac")]


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


def rows(*results: dict[str, Any]) -> list[list[str]]:
    ((_, table),) = result_tables(results)
    return [list(table.header), *(list(row) for row in table.rows)]


def test_a_table_has_one_row_per_model_and_one_column_per_length_with_the_mean_over_depth() -> None:
    cells = [
        cell(v, 0.04, length=n, depth=d) for n, d, v in [(2048, 0, 0.2), (1024, 0, 1), (2048, 1, 0.4), (1024, 1, 0.9)]
    ]
    assert rows(result("mac", needle=entry(*cells)), result("mag", needle=entry(*cells[:2]))) == [
        ["model", "1,024", "2,048"],
        ["mac", "95.0 (89 to 98)", "30.0 (22 to 40)"],  # of 100 sequences
        ["mag", "100.0 (93 to 100)*", "20.0 (11 to 33)*"],  # of 50
    ]  # fmt: skip


def test_a_missing_value_is_a_dash_and_a_mean_without_it_is_marked() -> None:
    nan = {**cell(None, length=2, depth=1), "value": math.nan}
    cells = [cell(0.5, None, length=1, depth=0), cell(None, length=1, depth=1), cell(None, length=2, depth=0), nan]
    assert rows(result(needle=entry(*cells, metric="loss"))) == [["model", "1", "2"], ["mac", "0.500*", "-"]]
    assert "no value" in result_tables([result(needle=entry(*cells, metric="loss"))])[0][1].caption


def test_where_a_run_diverged_nothing_is_right() -> None:
    cells = [cell(0.5, length=1, depth=0), cell(None, length=1, depth=1), cell(None, length=2, depth=0)]
    run = result(needle=entry(*cells, cell(None, length=2, depth=1)))
    assert rows(run) == [["model", "1", "2"], ["mac", "25.0 (18 to 34)*", "0.0 (0 to 4)*"]]
    assert "diverged, which counts as 0" in result_tables([run])[0][1].caption
    seeds = [result("mac", seed, needle=entry(cell(value))) for seed, value in enumerate((0.9, 0.9, None))]
    assert rows(*seeds)[1][1] == "60.0 (0 to 100)*"


def test_a_length_that_is_half_measured_is_marked() -> None:
    cells = [cell(0.5, length=1, depth=0), cell(0.7, length=1, depth=1), cell(0.9, length=2, depth=0)]
    assert rows(result(needle=entry(*cells))) == [["model", "1", "2"], ["mac", "60.0 (50 to 69)", "90.0 (79 to 96)*"]]


def test_runs_of_a_model_are_one_line_and_another_size_is_another() -> None:
    def run(seed: int, value: float, parameters: int = 1000) -> dict[str, Any]:
        return result("mac", seed, parameters, needle=entry(cell(value, None)))

    assert rows(run(0, 0.4), run(1, 0.6))[1:] == [["mac", "50.0 (0 to 100)"]]  # two runs say little, and Student knows
    assert rows(run(0, 0.4), run(1, 0.6, 2000))[1:] == [["mac (1,000)", "40.0"], ["mac (2,000)", "60.0"]]


def test_a_section_shows_each_run_what_search_found_and_what_reading_cost() -> None:
    def run(seed: int, value: float) -> dict[str, Any]:
        costs = [{"group": {"length": n}, "seconds": n / 100, "peak_memory": 2.0**30} for n in (1000, 2000)]
        cells = [cell(value, length=n) for n in (1000, 2000)]
        found = [{**each, "sentences": 4 + seed, "found": 0.5 + seed / 2} for each in cells]
        searched = entry(*found, control="bm25")
        return result("mac", seed, **{"needle": entry(*cells, reading=costs), "needle bm25": searched})

    section = next(each for each in result_sections([run(0, 0.4), run(1, 0.6)]) if each.title == "Needle")
    _, runs, searched, costs = section.tables
    assert runs.rows == [["mac", "40.0, 60.0", "40.0, 60.0"], ["mac (bm25)", "40.0, 60.0", "40.0, 60.0"]]
    assert searched.rows == [["mac (bm25)", "4 or 5: 75%", "4 or 5: 75%"]]
    assert costs.rows == [["mac", "20 s, 1.00 GiB", "40 s, 1.00 GiB"]]
    (alone,) = next(each for each in result_sections([result()]) if each.title == "Needle").tables
    assert alone.rows[0][0] == "mac"


def test_models_of_one_name_that_differ_in_their_config_or_training_are_lines_of_their_own() -> None:
    def run(name: str, value: float, **about: Any) -> dict[str, Any]:
        made = result("mac", needle=entry(cell(value, None)))
        return {**made, "name": name, "model": {**made["model"], "fields": {"memory_writes": True}, **about}}

    off = {"memory_writes": False}
    runs = [run("on-0", 0.9), run("on-1", 0.7), run("off-0", 0.2, fields=off), run("off-1", 0.2, fields=off)]
    assert rows(*runs)[1:] == [["mac (on-0)", "80.0 (0 to 100)"], ["mac (off-0)", "20.0 (20.0 to 20.0)"]]
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
        ["Words, set words", "accuracy (%)", "25.0 (15 to 38)", "10.0%"],
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
    assert "by position (tokens)" in table.caption and "; 50 to 70 tokens per cell" in table.caption


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
        ("accuracy", 0.9731, 0.02, "97.3 (88 to 99)"),
        ("loss", 2.34567, 0.0123, "2.346 (2.333 to 2.358)"),
        ("perplexity", 123.456, 4.5, "123.5 (119.0 to 128.0)"),
        ("tokens/s", 12345.6, 78.9, "12,346 (12,267 to 12,424)"),
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
    close = "b is best with 90.0% (79 to 96%), but a with 87.0% (75 to 94%) may be as good"
    assert close in sentence(0.87, 0.9, half=0.05)
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
    assert single.tables[0].rows == [["Copying, length 512", "accuracy (%)", "70.0 (56 to 81)", "10.0%"]]


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


def test_bands_are_only_spoken_of_where_they_are(drawn: list[Axes]) -> None:
    few, more = (
        result_sections([{**many()[seed], "model": {"name": f"m{i}"}} for i in range(models) for seed in (0, 1)])
        for models in (2, 5)
    )
    assert "Bands are 95% intervals." in str(few) and "Thin lines are runs" in str(few)
    assert "Bands are 95% intervals." not in str(more) and "Thin lines are runs" in str(more)


def test_a_heat_map_has_depth_downwards_a_number_in_each_cell_and_a_scale_from_0_to_1(drawn: list[Axes]) -> None:
    run = many()[3]
    sections = result_sections([{**run, "tasks": {"needle": run["tasks"]["needle"]}}])
    names = [figure.name for section in sections for figure in section.figures]
    assert names == ["needle", "needle-heat-transformer"]
    axes = drawn[1]
    image = axes.images[0]
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("length (tokens)", "depth (share of the\nsequence)")
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


def test_other_parts_stand_after_the_summary_and_may_stand_alone(tmp_path: Path) -> None:
    other = Section("Only this", ["words"])
    assert result_sections([], [other]) == [other]
    assert [section.title for section in result_sections([result()], [other])][:2] == ["In short", "Only this"]
    with pytest.raises(ValueError, match="there are no sections; expected at least one"):
        write_report([], tmp_path)


def test_a_result_that_cannot_be_shown_and_a_folder_that_is_a_file_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="result 2 has format 7; expected 1"):
        write_report([result(), {**result("mag"), "format": 7}], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out is the file .*file; expected a folder"):
        write_report([result()], tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("width", [50, 80, 300])
def test_the_tables_of_a_terminal_hold_every_number_at_any_width(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    cells = [cell(i / 10, length=2**i) for i in range(10)]
    print_tables([result(HOSTILE, a=entry(*cells)), result("mag", a=entry(*cells))], console)
    text = console.export_text()
    for i in range(10):
        assert text.count(f"{10 * i}.0") >= 2
        low, high = wilson(i / 10, 50)
        assert f"({100 * low:.0f} to {100 * high:.0f})" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "\x1b[31m" not in text
    assert "level with 90.0%" in text
