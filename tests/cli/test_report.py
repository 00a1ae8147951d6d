from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli import commands


def result(model: str, seed: int, **fields: Any) -> str:
    """What `titans eval` writes of a run, as text."""
    cells = [
        {"group": {"length": n}, "value": 0.9 - n / 2**20, "low": 0.8, "high": 0.95, "count": 50} for n in (1024, 65536)
    ]
    task = {"title": "Needle", "metric": "accuracy", "axes": ["length"], "chance": 0.1, "cells": cells}
    about = {"format": 1, "name": f"{model}-{seed}", "model": {"name": model, "parameters": 10}, "seed": seed}
    return json.dumps({**about, "tasks": {"needle": task}, **fields})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with good results and bad ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    contents = {
        "mac-0/eval.json": result("mac", 0),
        "mac-1/eval.json": result("mac", 1),
        "copy/eval.json": result("mac", 0),
        "new/eval.json": result("mac", 0, format=2),
        "mag.json": result("mag [bold]", 0),
        "broken.json": "{",
        "empty/notes.txt": "",
    }
    for name, content in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    return tmp_path


run = partial(commands.run, "report")


def test_runs_are_compared_in_tables_and_on_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mac-0", "mac-1", "mag.json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for words in (
        "Needle",
        "65,536",
        "mac 89.9 (79 to 96)",
        "mag [bold]",
        "are level with 83.8% (71 to 91%)",
        "chance is 10.0%",
    ):
        assert words in " ".join(captured.out.split())
    assert captured.out.endswith("Report: report/report.html\n")
    assert sorted(path.name for path in Path("report").iterdir()) == ["needle.png", "report.html"]
    assert "mag [bold]" in Path("report/report.html").read_text()


def test_the_report_goes_where_it_is_asked_to_and_may_be_made_again(folder: Path) -> None:
    assert run("mac-0", "--out", "a/b") == run("mag.json", "--out", "a/b") == 0
    page = Path("a/b/report.html").read_text()
    assert "mag [bold]" in page and "mac-0" not in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'runs'"),
        (["nowhere"], "nowhere is not there; expected a folder that `titans eval` wrote"),
        (["mac-0", "empty"], "empty holds no eval.json; expected a folder that `titans eval` wrote."),
        (["broken.json"], "broken.json cannot be read as JSON"),
        (["new"], "new/eval.json has format 2; expected 1."),
        (["mac-0", "mac-0"], "mac-0 and mac-0 both hold needle of the run mac-0; expected each run once."),
        (["mac-0", "copy"], "mac-0 and copy both hold needle of the run mac-0; expected each run once."),
        (["mac-0", "--out", "mag.json"], "mag.json is not a directory to write in"),
        (["mac-0", "--out", "mag.json/x"], "mag.json is not a directory to write in"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_nothing_is_written(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words.lower() in captured.err.lower()
    assert captured.err.startswith("titans: ")
    assert captured.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_without_matplotlib_the_command_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("mac-0") == 2
    assert "titan-memory[plot]" in capsys.readouterr().err
    assert not Path("report").exists()
