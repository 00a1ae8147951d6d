from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import assert_refused, run

pytest.importorskip("datasets")

from titans.cli.prepare import unescape

ROOT = Path(__file__).parents[2]
WORDS = random.Random(0).choices(
    ["the", "cat", "sat", "on", "a", "mat", "naïve", "漢字", "and\n", "slept.\n\n"], k=50_000
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with texts to prepare."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one\n---\ntwo\n---\n\n---\nthree")
    Path("b.jsonl").write_text("".join(json.dumps({"body": f"line {i}"}) + "\n" for i in range(40)))
    Path("long.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=50_000)))
    Path("empty.txt").write_text("")
    Path("junk.txt").write_bytes(b"ab\xff")
    return tmp_path


def files(folder: str | Path) -> dict[str, bytes]:
    folder = Path(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(out: str | Path) -> int:
    return len(list(Path(out, ".partial").glob("shard-*.arrow")))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def test_prepare_says_what_it_made_and_that_it_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", "a.txt", "--out", "out", "--separator", r"\n---\n"]
    assert run(*command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "train: 3 documents, 14 tokens (per document: median 4, longest 6)",
        "1.00 bytes of text per token",
        "left out: 1 document without text",
        "Prepared: out",
    ]
    before = files("out")
    assert run(*command) == 0
    assert capsys.readouterr().out.splitlines() == [
        "out is there already, prepared from these sources with these options:",
        "train: 3 documents, 14 tokens",
    ]
    assert files("out") == before
    assert run(*command, "--validation", "0.5", "--overwrite") == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "train: 2 documents, 7 tokens (per document: median 4, longest 4)",
        "validation: 2 documents, 8 tokens (per document: median 4, longest 6)",
    ]


def test_a_tokenizer_is_trained_and_then_prepares(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tokenizer", "long.txt", "b.jsonl", "--text-column", "body", "--out", "bpe", "--vocab-size", "280") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    counts, where = captured.out.splitlines()
    assert counts.startswith("280 tokens, ")
    assert 2 < float(counts.split()[2]) < 4
    assert where == "Tokenizer: bpe"
    assert sorted(path.name for path in folder.iterdir() if "bpe" in path.name) == ["bpe"]
    sources = ["long.txt", "b.jsonl", "--text-column", "body"]
    assert run("prepare", *sources, "--out", "out", "--tokenizer", "bpe", "--validation", "a.txt") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("train: 41 documents, ")
    assert said[1].startswith("validation: 1 document, ")
    assert 2 < float(said[2].split()[0]) < 4
    assert json.loads(Path("out/prepared.json").read_text())["tokenizer"]["vocab_size"] == 280


def test_a_small_text_gives_a_small_vocabulary_and_that_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tokenizer", "b.jsonl", "--text-column", "body", "--out", "bpe", "--max-bytes", "100") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("titans: the text gives 2")
    assert captured.err.endswith(" tokens, and not 32,000.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prepare"], "Missing argument 'sources'"),
        (["prepare", "a.txt"], "Missing option '--out'"),
        (["prepare", "nowhere.txt", "--out", "out"], "nowhere.txt is not there; expected a file, a folder"),
        (["prepare", "empty.txt", "--out", "out"], "empty.txt; expected at least one document that is not empty"),
        (["prepare", "junk.txt", "--out", "out"], "junk.txt is not text: byte 2 is 0xff; expected UTF-8"),
        (["prepare", "b.jsonl", "--out", "out"], "b.jsonl, line 1 has no column 'text'"),
        (["prepare", "a.txt", "--out", "a.txt"], "a.txt cannot be written"),
        (["prepare", "a.txt", "--out", "."], ". holds something that is no prepared set"),
        (["prepare", "a.txt", "--out", "out", "--tokenizer", "./no"], "the tokenizer ./no is not there"),
        (["prepare", "a.txt", "--out", "out", "--validation", "1.5"], "validation is 1.5; expected a part between 0"),
        (["prepare", "a.txt", "--out", "out", "--validation", "no.txt"], "no.txt is not there"),
        (["prepare", "a.txt", "--out", "out", "--separator", ""], "separator is empty"),
        (["prepare", "a.txt", "--out", "out", "--workers", "0"], "'--workers'"),
        (["prepare", "a.txt", "--out", "out", "--shard-bytes", "1"], "'--shard-bytes'"),
        (["prepare", "a.txt", "--out", "out", "--seed", "-1"], "'--seed'"),
        (["tokenizer", "nowhere.txt", "--out", "out"], "nowhere.txt is not there"),
        (["tokenizer", "junk.txt", "--out", "out"], "junk.txt is not text"),
        (["tokenizer", "empty.txt", "--out", "out"], "there is no text in empty.txt"),
        (["tokenizer", "a.txt", "--out", "out", "--vocab-size", "256"], "vocab_size is 256; expected at least 257"),
        (["tokenizer", "a.txt", "--out", "."], ". is not empty; expected a folder that is new or empty"),
        (["tokenizer", "a.txt", "--out", "a.txt"], "a.txt is a file"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_nothing_is_written(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(arguments, words, folder, capsys)


def test_bad_lines_are_an_error_or_skipped_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("b.jsonl").open("a") as file:
        file.write('{"body": "half a li\n{"body": "line 41"}\n')
    command = ["prepare", "b.jsonl", "--text-column", "body", "--out", "out"]
    assert run(*command) == 2
    said = capsys.readouterr().err
    assert "b.jsonl, line 41 is not JSON" in said and "--skip-bad leaves such lines out" in said
    assert run(*command, "--skip-bad") == 0
    assert "left out: 1 bad line" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("shard", ["100000", "4000"], ids=["in a shard", "in the set"])
def test_a_full_disk_is_one_sentence_and_the_work_goes_on_when_there_is_room(
    shard: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", "long.txt", "--out", "out", "--shard-bytes", shard, "--validation", "0.1"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # what happens then is what a full disk does
    try:
        code = run(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    place = "out/.partial/shard-" if shard == "100000" else "out/.partial/set/"
    assert captured.err.startswith(f"titans: {place}")
    assert captured.err.endswith(": File too large; what is done is kept; run the same command again to go on.\n")
    assert captured.err.count("\n") == 1
    assert sorted(path.name for path in Path("out").iterdir()) == [".partial"]
    assert not list(Path("out").rglob("*.tmp"))
    assert run(*command) == 0


def test_ctrl_c_leaves_what_is_done_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", "long.txt", "--out", "out", "--shard-bytes", "2000"]

    def press() -> None:
        wait_for(lambda: shards("out") > 3)
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    code = run(*command)
    finger.join()
    assert code == 130
    assert capsys.readouterr().err.splitlines() == [
        "titans: what is done is kept; run the same command again to go on.",
        "titans: interrupted.",
    ]
    assert 3 < shards("out") < 120
    assert run(*command) == 0
    assert run("prepare", "long.txt", "--out", "whole", "--shard-bytes", "2000") == 0
    assert files("out") == files("whole")


def test_a_killed_prepare_goes_on_to_the_same_set_and_leaves_no_cache(folder: Path) -> None:
    bpe = folder / "bpe"
    assert run("tokenizer", "long.txt", "--out", str(bpe), "--vocab-size", "300") == 0
    command = ["prepare", str(folder / "long.txt"), "--tokenizer", str(bpe), "--shard-bytes", "1500", "--workers", "2"]
    home = folder / "home"
    home.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", "from titans.cli import main; main()", *command, "--out", str(folder / "out")],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
        | {"HOME": str(home)},
    )
    try:
        wait_for(lambda: shards("out") > 3 or process.poll() is not None)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 3 < shards("out") < 150
    assert not Path("out/prepared.json").exists()
    assert not list(home.rglob("huggingface"))
    assert run(*command, "--out", "out") == 0
    assert run(*command, "--out", "whole") == 0
    assert files("out") == files("whole")


def test_without_the_extra_the_commands_say_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for verb in ("prepare", "tokenizer"):
        assert run(verb, "a.txt", "--out", "out") == 2
        assert "titan-memory[train]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(None, None), (r"\n\n", "\n\n"), ("<|end|>", "<|end|>"), (r"a\\n", r"a\n"), (r"\t\r", "\t\r"), (r"\d\\", "\\d\\")],
)
def test_a_separator_is_typed_with_escapes(typed: str | None, meant: str | None) -> None:
    assert unescape(typed) == meant
