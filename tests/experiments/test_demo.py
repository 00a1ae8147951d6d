from __future__ import annotations

import inspect
import json
import re
from copy import deepcopy
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import titans.experiments.demo as demo
from titans.cli import main
from titans.cli.demo import demo as command
from titans.experiments import runs
from titans.experiments.demo import (
    OURS,
    SEEDS,
    THEIRS,
    WITH,
    WITHOUT,
    about_speed,
    about_surprise,
    draw_progress,
    make_jobs,
    run_demo,
    sections,
    summary,
)
from titans.experiments.memory_tests import AGAIN, CHANGED, NEW
from titans.experiments.runs import check_jobs
from titans.files import locked
from titans.report.page import render_page

PICTURES = ["needle-memory-off.png", "needle-with-memory.png", "recall.png", "speed.png", "surprise.png"]
Shown = tuple[Path, dict[str, Any], str]  # the folder, the report, what the terminal showed


def show(out: Path, **options: Any) -> tuple[dict[str, Any], str]:
    text = StringIO()
    report = run_demo(out, quick=True, console=Console(file=text, width=200), **options)
    return report, text.getvalue()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    out = tmp_path_factory.mktemp("demo") / "new" / "demo"
    return out, *show(out)


def words(page: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", " ", page)).split())


def test_a_quick_demonstration_trains_both_models_and_writes_everything(quick: Shown) -> None:
    out, report, _ = quick
    files = [*PICTURES, "quick", "report.html", "report.json", "report.md"]
    assert sorted(path.name for path in out.iterdir()) == sorted(files)
    assert json.loads((out / "report.json").read_text()) == report
    assert [(run["model"], run["seed"], run["steps"]) for run in report["runs"]] == [(WITH, 0, 4), (WITHOUT, 0, 4)]
    places = [{"length": length, "depth": depth} for length in (64, 128) for depth in (0.0, 1.0)]
    for run in report["runs"]:
        assert [{key: cell[key] for key in ("length", "depth")} for cell in run["recall"]] == places
    assert report["command"] == "titans demo --seed 0 --quick"
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)


def test_the_page_begins_with_the_sentences_and_has_a_section_for_each_question(quick: Shown) -> None:
    out, report, _ = quick
    page = (out / "report.html").read_text()
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "In short", "Wherever the facts stand", "What surprises the memory", "Speed against length", "How it was made"
    ]  # fmt: skip
    assert page.count("<img ") == len(PICTURES)
    assert "http:" not in page and "https:" not in page
    first = page.split("<section")[1]
    assert all(sentence in unescape(first) for sentence in summary(report))
    assert first.count("<img ") == 1 and "quick run" in first
    assert about_surprise(report) in words(page)
    assert about_speed(report) in words(page)


def test_the_terminal_shows_the_runs_the_table_and_the_sentences(quick: Shown) -> None:
    out, report, text = quick
    assert "2 of 2 runs done" in text
    assert text.count("4/4") == 2
    assert "held-out accuracy" in text
    shown = " ".join(text.split())
    assert all(sentence in shown for sentence in (*summary(report), about_surprise(report), about_speed(report)))
    assert "quick run" in shown
    assert str(out / "report.html") in text.replace("\n", "")


def test_a_demonstration_that_is_complete_is_only_shown_again(quick: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    out, report, _ = quick
    for name in ("run_jobs", "surprise_of_facts", "run_model_benchmark"):
        monkeypatch.delattr(demo, name)
    (out / "recall.png").unlink()
    again, text = show(out)
    assert again == report
    assert "already" in text
    assert (out / "recall.png").is_file()


def test_runs_that_are_complete_are_kept_when_the_report_was_lost(
    quick: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, report, _ = quick
    monkeypatch.delattr(runs, "_start")
    (out / "report.json").unlink()
    again, text = show(out)
    assert again["runs"] == report["runs"]
    assert again["surprise"] == report["surprise"]
    assert "already" not in text


def test_a_quick_demonstration_is_not_in_the_way_of_a_whole_one(quick: Shown) -> None:
    out, _, _ = quick
    jobs = make_jobs(out, SEEDS, quick=False)
    check_jobs(jobs)
    assert [job.folder.relative_to(out).as_posix() for job in jobs] == [
        "runs/with-memory-0", "runs/memory-off-0", "runs/with-memory-1", "runs/memory-off-1"
    ]  # fmt: skip
    assert not any(job.folder.exists() for job in jobs)


def test_the_two_models_differ_in_nothing_but_writing(tmp_path: Path) -> None:
    memory, off = (job.config.to_dict() for job in make_jobs(tmp_path, (3,), quick=False))
    assert off["model"].pop("memory_writes") is False
    assert "memory_writes" not in memory["model"]
    del memory["output"], off["output"]
    assert memory == off
    assert memory["seed"] == 3


def test_the_sentences_say_what_the_runs_found(quick: Shown) -> None:
    report = deepcopy(quick[1])
    for run in report["runs"]:
        for cell in run["recall"]:
            near = cell["length"] == 64
            cell["value"] = (0.5 if near else 0.25) if run["model"] == WITH else (0.125 if near else None)
    second = deepcopy(report["runs"][0]) | {"seed": 1}
    for cell in second["recall"]:
        cell["value"] += 0.1
    report["runs"].append(second)
    text = " ".join(summary(report))
    assert "recalls 55.0% of 8 facts" in text
    assert "30.0% at 128 tokens, 2 times as long" in text
    assert "recalls 12.5% and 0.0%, where guessing gives 1.6%" in text  # a run that diverged recalls nothing


def test_the_sentence_on_surprise_is_about_the_values_of_the_facts() -> None:
    values = [9.0, 2.0] * 2 + [5.0] * 3 + [9.0, 0.5] * 2 + [9.0, 1.25] * 2
    parts = [(NEW, 4), ("fillers", 3), (AGAIN, 4), (CHANGED, 4)]
    text = about_surprise({"surprise": {"parts": parts, "layers": [values, [0.0] * 15]}})
    assert re.findall(r"\d\.\d\d", text) == ["2.00", "0.50", "1.25"]


@pytest.mark.parametrize(
    ("ours", "ending"),
    [
        ([10, 10, 10, 10], "Titans is faster from 4,096 on."),
        ([30, 10, 10, 10], "Titans is faster from 4,096 on."),
        ([40, 40, 40, 40], "Titans is faster from 256 on."),
        ([10, 10, 5.1, 10], "Titans is faster from 8,192 on."),
        ([10, 10, 10, 1], "from 20 to 2."),
    ],
)
def test_the_sentence_on_speed_says_from_where_on_ours_is_faster(ours: list[float], ending: str) -> None:
    speeds = {OURS: ours, THEIRS: [20, 20, 5, 2]}
    report = {"speed": {"lengths": [256, 1024, 4096, 8192], "tokens_per_second": speeds}}
    assert about_speed(report).endswith(ending)


def test_the_table_of_progress_is_what_the_runs_have_written(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, (0,), quick=False)
    jobs[0].folder.mkdir(parents=True)
    lines = [{"step": 10, "loss": 4.1}, {"step": 40, "loss": 3.2109}, {"step": 40, "eval_accuracy": 0.42}, {"step": 50}]
    (jobs[0].folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6')
    text = StringIO()
    Console(file=text, width=120).print(draw_progress(jobs, [jobs[0].name]))
    first, second = (line for line in text.getvalue().splitlines() if WITH in line or WITHOUT in line)
    steps = jobs[0].config.steps
    assert [cell.strip() for cell in first.strip("│").split("│")] == [
        WITH, "0", f"50/{steps}", "3.211", "42.0%", "training"
    ]  # fmt: skip
    assert [cell.strip() for cell in second.strip("│").split("│")] == [WITHOUT, "0", f"0/{steps}", "", "", "waiting"]


def test_a_page_can_be_drawn_of_runs_that_diverged(quick: Shown) -> None:
    report = deepcopy(quick[1])
    for run in report["runs"]:
        for cell in run["recall"]:
            cell["value"] = None
    assert "0.0%" in words(render_page(sections(report), "t"))


def test_wrong_arguments_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"seeds is \[0, 0\]; expected one or more different numbers"):
        run_demo(tmp_path, seeds=(0, 0))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"out_dir is the file .*; expected a folder"):
        run_demo(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_command_has_the_same_seeds() -> None:
    assert inspect.signature(command).parameters["seed"].default == list(SEEDS)


def test_two_demonstrations_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path, "titans demo"), pytest.raises(SystemExit) as end:
        main(["demo", "--quick", "--out-dir", str(tmp_path)])
    assert end.value.code == 2
    assert "is in use by another process (titans demo, " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_is_named_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        main(["demo"])
    assert end.value.code == 2
    assert "needs transformers: pip install 'titan-memory[demo]'" in capsys.readouterr().err
