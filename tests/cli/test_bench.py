"""`titans bench`: every command measures, prints and writes the same kind of report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run
from titans.bench import carried, overhead, stream
from titans.bench import memory as memory_benchmark

TINY_MEMORY = ("--dim", "16", "--heads", "2", "--chunk-size", "8", "--lengths", "16,24", "--repeats", "1")
TINY_MODEL = (
    "--dim", "16", "--layers", "1", "--heads", "2", "--segment", "8", "--window", "8", "--persistent", "2",
    "--lengths", "16,24", "--decode-positions", "8,20", "--decode-tokens", "2", "--only", "mag,transformer++",
    "--memory-mode", "chunked", "--chunk-size", "4",
)  # fmt: skip
COMMANDS = ("memory", "model", "stream", "carried", "overhead", "text", "flops")


@pytest.fixture(autouse=True)
def nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rounds there is no garbage of other tests to collect, which takes longer than a round."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work runs in this process and on short texts: starting a process takes longer than it."""

    def answer(worker: Any, job: dict[str, Any], threads: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(worker(job)))
        return found

    monkeypatch.setattr(stream, "in_fresh_process", answer)
    monkeypatch.setattr(stream, "PRESENTATIONS", (4, 8))
    for module in (carried, overhead):
        monkeypatch.setattr(module, "answer_of", answer)
    monkeypatch.setattr(carried, "VALIDATION", 32)
    monkeypatch.setattr(overhead, "LENGTH", 32)
    monkeypatch.setattr(overhead, "TEXT", 4000)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    lines = [f"In the year {number} the harbour froze over once more." for number in range(60)]
    (folder / "harbour.txt").write_text(" ".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_is_measured(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", command, "--help") == 0
    shown = capsys.readouterr().out
    assert "--out" in shown and (command == "flops" or "--quick" in shown)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("memory", *TINY_MEMORY), ("Time of one call, forward.", "chunked", "of GEMM")),
        (("model", *TINY_MODEL), ("Training", "Prefill", "Decoding", "Faster in training than transformer++: mag")),
        (("stream", "--only", "decode-chunked-1,bounds-default-chunked-1"), ("decode-chunked-1", "resonance")),
        (("carried", "--steps", "2", "--documents", "100"), ("returning facts", "not carried, seed 0")),
        (("overhead", "--steps", "3"), ("bare loop", "of the speed of a bare loop")),
        (("text", "{books}", "--records", "20", "--queries", "2", "--batch", "3"), ("20 records", "in a batch")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and value[0] in COMMANDS else "",
)
def test_a_quick_run_prints_tables_and_writes_the_report(
    arguments: tuple[str, ...], words: tuple[str, ...], books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(books=books) for argument in arguments]
    assert run("bench", *given, "--quick", "--out", str(tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    assert all(word in " ".join(shown.split()) for word in words)
    name, folder = arguments[0], tmp_path / "out" / "quick"
    assert f"Report: {folder / 'report.html'}" in shown.replace("\n", "")
    report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert report["name"] == name and report["date"] and report["command"].startswith("titans")
    assert (folder / f"{name}.md").read_text(encoding="utf-8").startswith("# ")
    assert "<table" in (folder / "report.html").read_text(encoding="utf-8")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png")) and any(folder.glob("*.png"))


def test_flops_are_counted_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "flops", "--model", "mag", "--size", "1m", "--length", "512", "--out", str(tmp_path)) == 0
    report = json.loads((tmp_path / "flops.json").read_text(encoding="utf-8"))
    assert f"{report['executed'] / 1e9:.3f} GFLOP per token are executed" in " ".join(capsys.readouterr().out.split())
    assert {path.name for path in tmp_path.iterdir()} == {"flops.json", "flops.md", "flops.png", "report.html"}


def test_without_out_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("bench", "memory", *TINY_MEMORY, "--quick", "--only", "chunked-op") == 0
    assert "chunked-op" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_quick_changes_only_what_was_not_given(tmp_path: Path) -> None:
    assert run("bench", "memory", *TINY_MEMORY, "--quick", "--only", "chunked-op", "--out", str(tmp_path)) == 0
    settings = json.loads((tmp_path / "quick" / "memory.json").read_text(encoding="utf-8"))["settings"]
    assert settings["lengths"] == [16, 24]
    quick = {name: value for name, value in memory_benchmark.QUICK.items() if name != "lengths"}
    assert {name: settings[name] for name in quick} == quick


def test_without_titans_pytorch_the_memory_benchmark_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: None)
    assert run("bench", "memory", *TINY_MEMORY, "--quick") == 0
    assert capsys.readouterr().err.count("titans-pytorch is not installed") == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_quick_run_as_it_is(command: str, books: Path, tmp_path: Path) -> None:
    more = {"text": [str(books), "--records", "40"], "flops": ["--size", "1m", "--length", "512"]}.get(command, [])
    quick = [] if command == "flops" else ["--quick"]
    assert run("bench", command, *more, *quick, "--out", str(tmp_path / "out")) == 0
    assert len(list((tmp_path / "out").glob("**/report.html"))) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory", "extra"], "unexpected extra argument"),
        (["memory", "--dim", "wide"], "'--dim'"),
        (["memory", "--dim", "0"], "dim is 0; expected at least 1"),
        (["memory", "--dim", "10", "--heads", "3"], "dim is 10 and heads is 3; expected heads to divide dim"),
        (["memory", "--lengths", "12,many"], "--lengths takes whole numbers"),
        (["memory", "--lengths", ""], "--lengths takes whole numbers"),
        (["memory", "--lengths", "64,-1"], "lengths has -1; expected at least 1"),
        (["memory", "--repeats", "0"], "repeats is 0; expected at least 1"),
        (["memory", "--only", "chunky"], "only has 'chunky': did you mean chunked?"),
        (["memory", "--only", "recurrent", "--lengths", "4096"], "lengths is 4096; expected one within the maximum"),
        (["memory", "--out", "{file}"], "cannot be written to (it is a file)"),
        (["model", "--dim", "10", "--heads", "3"], "dim is 10 and heads is 3; expected heads to divide dim"),
        (["model", "--decode-positions", ""], "--decode-positions takes whole numbers"),
        (["model", "--memory-mode", "quick"], "memory_mode is 'quick': expected one of"),
        (["model", "--measures", "sleep"], "measures has 'sleep': expected one of train, prefill, decode, compile"),
        (["model", "--max-seconds", "-1"], "max_seconds is -1.0; expected a positive number"),
        (["stream", "--tokens", "5"], "tokens is 5; expected at least"),
        (["stream", "--only", "stream-exakt-1"], "only has 'stream-exakt-1': did you mean stream-exact-1?"),
        (["carried", "--seeds", "1,1"], "seeds is [1, 1]; expected one or more different numbers"),
        (["carried", "--steps", "0"], "steps is 0; expected at least 1"),
        (["overhead", "--data", "{folder}/none"], "none"),
        (["overhead", "--rounds", "0"], "rounds is 0; expected at least 1"),
        (["text"], "Missing argument 'texts'"),
        (["text", "{folder}/none"], "which is no folder; expected a folder of .txt files"),
        (["text", "{folder}"], "has 0 different sentences; expected at least"),
        (["flops", "--length", "100", "--size", "1m"], "length is 100; expected a multiple of the segment, 64"),
        (["flops", "--model", "mamba2"], "model is 'mamba2'; the formula is for lmm, mac, mag, mal, sliding-window"),
        (["flops", "--size", "3b"], "size is '3b'; expected one of"),
        (["flops", "--tokens", "0"], "tokens is 0.0; expected a positive number"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    places = {"folder": tmp_path, "file": tmp_path / "file"}
    assert run("bench", *(argument.format(**places) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.startswith("titans: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory", "--out", "{folder}"], "--out needs matplotlib: pip install 'titan-memory[plot]'"),
        (["model"], "bench model needs transformers: pip install 'titan-memory[models]'"),
        (["carried"], "bench carried needs transformers: pip install 'titan-memory[train]'"),
        (["overhead"], "bench overhead needs transformers: pip install 'titan-memory[train]'"),
        (["text", "{folder}"], "bench text needs transformers: pip install 'titan-memory[text]'"),
        (["flops"], "bench flops needs transformers: pip install 'titan-memory[models]'"),
    ],
)
def test_what_is_missing_is_named_before_the_work(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("bench", *(argument.format(folder=tmp_path) for argument in arguments)) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
