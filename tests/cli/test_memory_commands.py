from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run
from titans.text.encoder import TextEncoder
from titans.text.neural import NeuralConfig, NeuralTextMemory


@pytest.fixture(scope="session")
def loaded() -> TextEncoder:
    return TextEncoder.load()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: TextEncoder) -> Path:
    """An empty folder to work in, and an encoder that is loaded once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITANS_MEMORY", raising=False)
    load = TextEncoder.load
    monkeypatch.setattr(TextEncoder, "load", lambda name=None: loaded if name is None else load(name))
    return tmp_path


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_what_is_remembered_is_recalled(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("remember", "My sister Anna lives in Lisbon.", "--metadata", "topic=family") == 0
    assert "surprise 1.000." in capsys.readouterr().out
    assert run("remember", "The bicycle is [bold]red[/bold].") == 0
    capsys.readouterr()
    assert run("recall", "Where does Anna live?", "--threshold", "0.3", "--why") == 0
    captured = capsys.readouterr()
    first, why = captured.out.splitlines()
    assert first.startswith("1.000  20") and first.endswith("  My sister Anna lives in Lisbon.")
    assert "cosine 0." in why and "words" in why and "(rank 1)" in why
    assert captured.err == "1 found, 1 below the threshold.\n"
    assert run("recall", "bicycle", "--limit", "1") == 0
    assert "The bicycle is [bold]red[/bold]." in capsys.readouterr().out
    assert run("remember", "Anna is ill.", "--metadata", "topic=family", "--metadata", "day=2026-01-31") == 0
    capsys.readouterr()
    assert run("recall", "Anna", "--filter", "day=2026-01-31", "--json") == 0
    assert [hit["record"]["text"] for hit in read_json(capsys)["hits"]] == ["Anna is ill."]
    assert run("recall", "Where does Anna live?", "--filter", "topic=family", "--json") == 0
    found = read_json(capsys)
    assert len(found["hits"]) == 2 and found["hits"][0]["record"]["metadata"] == {"topic": "family"}


def test_scopes_are_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("remember", "I like tea.", "--user", "ann", "--agent", "a", "--session", "s", "--role", "user") == 0
    capsys.readouterr()
    assert run("recall", "tea", "--user", "ben") == 2
    assert "nothing is remembered of user 'ben' in titans-memory." in capsys.readouterr().err
    assert run("recall", "tea", "--user", "ann", "--session", "other") == 2
    capsys.readouterr()
    assert run("recall", "tea", "--user", "ann", "--json") == 0
    record = read_json(capsys)["hits"][0]["record"]
    assert (record["agent"], record["session"], record["role"]) == ("a", "s", "user")


def test_texts_come_from_a_file_or_the_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("notes.txt").write_text("One line.\nAnother line.\n\nThe last line.\n")
    assert run("remember", "--file", "notes.txt", "--split", "lines") == 0
    assert "Remembered 3 texts, mean surprise" in capsys.readouterr().out
    assert run("remember", "--file", "notes.txt", "--split", "paragraphs") == 0
    assert "Remembered 2 texts" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Größe\nzwei".encode())))
    assert run("remember", "-", "--json") == 0
    assert [record["text"] for record in read_json(capsys)] == ["Größe\nzwei"]


def test_the_store_may_be_named_in_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITANS_MEMORY", "elsewhere")
    assert run("remember", "x") == run("memory", "stats") == 0
    assert Path("elsewhere/memory.sqlite3").is_file() and not Path("titans-memory").exists()


def test_a_limited_store_stays_limited(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        assert run("remember", f"Number {number}", "--limit", "3") == 0
    capsys.readouterr()
    assert run("memory", "stats", "--json") == 0
    assert read_json(capsys)["records"] == 3


def test_figures_and_copies_of_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    for text, user in (("I like tea.", "ann"), ("I like milk.", "ben")):
        assert run("remember", text, "--user", user) == 0
    assert run("memory", "stats", "--check") == 0
    out = capsys.readouterr().out
    assert "records        2" in out and "1  user 'ann'" in out
    assert run("memory", "export", "out/all.jsonl") == 0
    assert run("memory", "export", "ann.jsonl", "--user", "ann") == 0
    assert run("memory", "import", "out/all.jsonl", "--store", "copy.db") == 0
    assert run("memory", "import", "out/all.jsonl", "--store", "copy.db") == 0
    out = capsys.readouterr().out
    assert "2 records: out/all.jsonl" in out and "1 records: ann.jsonl" in out
    assert "2 records added to copy.db" in out and "0 records added to copy.db" in out
    assert run("memory", "export", "again.jsonl", "--store", "copy.db") == 0
    assert Path("again.jsonl").read_bytes() == Path("out/all.jsonl").read_bytes()


def test_other_projections_need_a_reindex(capsys: pytest.CaptureFixture[str]) -> None:
    NeuralTextMemory(NeuralConfig(seed=3)).save("trained")
    assert run("remember", "I like tea.") == 0
    assert run("remember", "I like milk.", "--neural", "trained") == 2
    error = capsys.readouterr().err
    assert "memories by other projections" in error and "titans memory reindex" in error and error.count("\n") == 1
    assert run("memory", "reindex", "--neural", "trained") == 0
    assert "1 records of titans-memory have new vectors and memories" in capsys.readouterr().out
    assert run("remember", "I like milk.", "--neural", "trained") == 0


def test_a_damaged_store_is_read_and_recovered(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").write_text("\n".join(f"Note {number} is about tea." for number in range(40)))
    assert run("remember", "--file", "texts", "--split", "lines") == 0
    file = Path("titans-memory/memory.sqlite3")
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 9 // 10 // 8192 * 8192])
    capsys.readouterr()
    assert run("remember", "new") == 2
    error = capsys.readouterr().err
    assert "is damaged" in error and "titans memory recover" in error
    assert run("memory", "recover", "titans-memory", "--out", "new") == 0
    assert " records written to new; " in capsys.readouterr().out
    assert run("recall", "tea", "--store", "new") == 0
    assert run("memory", "recover", "titans-memory", "--out", "new") == 2
    assert "is there already" in capsys.readouterr().err


def test_a_letter_that_changed_is_told_by_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("remember", "The combination is 4711") == 0
    file = Path("titans-memory/memory.sqlite3")
    file.write_bytes(file.read_bytes().replace(b"4711", b"4712"))
    assert run("memory", "stats", "--check") == 2
    assert "is not what was written; `titans memory recover" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["remember"], "expected a text, - or --file"),
        (["remember", "x", "--file", "bad.txt"], "expected a text, - or --file, and only one of them."),
        (["remember", ""], "text is empty"),
        (["remember", "a\x07b"], "text has the control character U+0007 at character 1"),
        (["remember", "a\udcffb"], "text is not valid UTF-8 at character 1"),
        (["remember", "x", "--split", "words"], "--split takes whole, lines, paragraphs, got 'words'."),
        (["remember", "x", "--metadata", "topic"], "--metadata takes NAME=VALUE, got 'topic'."),
        (["remember", "x", "--user", ""], "user has 0 characters"),
        (["remember", "x", "--store", "bad.txt/below"], "bad.txt/below cannot be made: Not a directory"),
        (["remember", "x", "--store", "bad.txt"], "bad.txt is not a memory store"),
        (["remember", "x", "--encoder", "."], ". has no config.json; expected a folder of a BERT-like model"),
        (["remember", "x", "--neural", "nowhere"], "expected a folder written by `titans text train`"),
        (["remember", "--file", "bad.txt"], "bad.txt is not valid UTF-8 at byte 2."),
        (["remember", "--file", "huge.txt"], "text has 1,200,000 bytes; expected at most 1,000,000"),
        (["remember", "--file", "nowhere.txt"], "'nowhere.txt' does not exist"),
        (["recall", "x"], "there is no memory store at titans-memory/memory.sqlite3; `titans remember` makes one."),
        (["memory", "stats"], "there is no memory store at"),
        (["memory", "export", "x.jsonl"], "there is no memory store at"),
        (["memory", "reindex"], "there is no memory store at"),
        (["memory", "recover", "nowhere", "--out", "new"], "there is no memory store at nowhere"),
        (["memory", "import", "bad.txt"], "bad.txt, line 1 is not valid UTF-8"),
        (["memory", "nonsense"], "No such command 'nonsense'"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.txt").write_bytes(b"ab\xff\n")
    Path("huge.txt").write_text("abcd" * 300_000)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("titans: ") and error.count("\n") == 1


def test_help_tells_of_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("remember", "recall", "memory"))
    assert run("memory", "--help") == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("stats", "export", "import", "reindex", "recover"))
