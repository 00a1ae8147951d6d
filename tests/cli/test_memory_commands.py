from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import assert_refused, run
from tests.text.postgres_server import PostgresServer, new_schema, postgres_server  # noqa: F401
from titans.text.encoder import TextEncoder
from titans.text.location import default_store
from titans.text.memory import Memory
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.records import Record
from titans.text.sqlite import SqliteStore


@pytest.fixture(scope="session")
def loaded() -> TextEncoder:
    return TextEncoder.load()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: TextEncoder) -> Path:
    """An empty folder to work in, and an encoder that is loaded once."""
    monkeypatch.chdir(tmp_path)
    load = TextEncoder.load
    monkeypatch.setattr(TextEncoder, "load", lambda name=None: loaded if name is None else load(name))
    return tmp_path


def default_file() -> Path:
    return Path(default_store()) / "memory.sqlite3"


def remember(text: str, *scope: str) -> str:
    """Remembers a text of a user, agent and session; returns the id."""
    with Memory() as memory:
        return memory.add(text, **dict(zip(("user", "agent", "session"), scope, strict=False))).id


def counts() -> dict[str, int]:
    """How many records the default store has of each scope."""
    with Memory(read_only=True) as memory:
        return {"/".join(filter(None, (s.user, s.agent, s.session))): count for s, count in memory.scopes()}


class Typist(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        return True


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


def test_metadata_are_the_json_or_the_text_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        "01234", "12:30", "Hello, world", "2026-01-31T12:00:00Z", "yes", "0x1F", "1_000", ".5", "NaN", "~", "", "a: b",
        "# 1", "'tea'", '"tea" and milk', " 7 up",
    ]  # fmt: skip
    typed = {text: text for text in texts} | {
        "12": 12, "-1.5e3": -1500.0, "true": True, "null": None, '"12"': "12", '["a", 1]': ["a", 1],
        '{"a": {"b": 2}}': {"a": {"b": 2}},
    }  # fmt: skip
    pairs = [f"{number}={text}" for number, text in enumerate(typed)]
    assert run("remember", "x", *(part for pair in pairs for part in ("--metadata", pair)), "--json") == 0
    assert read_json(capsys)[0]["metadata"] == {str(number): value for number, value in enumerate(typed.values())}
    filters = [pair for pair, value in zip(pairs, typed.values(), strict=True) if isinstance(value, str | int | float)]
    assert run("recall", "x", *(part for pair in filters for part in ("--filter", pair)), "--json") == 0
    assert len(read_json(capsys)["hits"]) == 1


def test_what_is_told_again_is_counted_and_not_kept_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("remember", "I like tea.") == run("remember", "I like tea.") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert second == first.replace(",", ", told 2 times,", 1)
    assert run("recall", "tea", "--why") == 0
    assert ", told 2 times, " in capsys.readouterr().out
    assert counts() == {"default": 1}


def test_a_newer_version_is_shown_with_the_older_one(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = remember("My favourite colour is blue."), remember("My favourite colour is green.")
    assert run("recall", "What is my favourite colour?", "--why") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("green.") and lines[2].endswith("blue.") and f"replaced by {new}" in lines[3]
    assert run("memory", "history", new) == 0
    assert [line.split(maxsplit=3)[1:] for line in capsys.readouterr().out.splitlines()] == [
        ["add", old[:8], "My favourite colour is blue."], ["add", new[:8], "My favourite colour is green."],
    ]  # fmt: skip


def test_words_that_were_too_common_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for drink in ("green tea", "black tea", "coffee"):
        remember(f"I like {drink}.")
    monkeypatch.setattr(SqliteStore, "find_words", partialmethod(SqliteStore.find_words, most=1))
    assert run("recall", "green tea") == 0
    assert capsys.readouterr().err.endswith("; too common to be looked up: tea.\n")


def test_scopes_are_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("remember", "I like tea.", "--user", "ann", "--agent", "a", "--session", "s", "--role", "user") == 0
    capsys.readouterr()
    assert run("recall", "tea", "--user", "ben") == 2
    assert f"nothing is remembered of user 'ben' in {default_file()}." in capsys.readouterr().err
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


@pytest.mark.parametrize("gap", ["\r\n\r\n", "\n \n", "\r\n\t\r\n \r\n"], ids=["CRLF", "space", "both"])
def test_paragraphs_end_at_any_empty_line(gap: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.txt").write_bytes(f"One\r\nline.{gap}Two.{gap}".encode())
    assert run("remember", "--file", "notes.txt", "--split", "paragraphs", "--json") == 0
    assert [record["text"] for record in read_json(capsys)] == ["One\r\nline.", "Two."]


@pytest.mark.parametrize(
    ("split", "content", "words"),
    [
        (
            "lines",
            "Fine.\n" * 1500 + "a\x07b\n",
            "line 1501 of notes.txt has the control character U+0007 at",
        ),
        ("lines", "\n\n  a\x07b", "line 3 of notes.txt has the control character"),
        (
            "paragraphs",
            "One\ntwo.\n\n \r\n\nThree\na\x07b",
            "the paragraph at line 6 of notes.txt has the control",
        ),
        ("whole", "\na\x07b", "notes.txt has the control character U+0007"),
        ("lines", " \n", "notes.txt is empty"),
    ],
    ids=["lines", "empty lines", "paragraphs", "whole", "empty"],
)
def test_a_text_that_is_refused_is_named_by_its_line_and_nothing_is_written(
    split: str, content: str, words: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    Path("notes.txt").write_text(content)
    assert_refused(["remember", "--file", "notes.txt", "--split", split, "--store", "new"], words, folder, capsys)


def test_an_empty_input_leaves_no_store_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert_refused(["remember", "-", "--store", "new"], "the input is empty; expected a text", folder, capsys)


def test_the_store_may_be_named_in_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITANS_MEMORY", "elsewhere")
    assert run("remember", "x") == run("memory", "stats") == 0
    assert Path("elsewhere/memory.sqlite3").is_file()
    monkeypatch.delenv("TITANS_MEMORY")
    assert not default_file().exists()


def test_what_is_remembered_in_one_folder_is_recalled_in_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    assert run("remember", "I like tea.") == 0
    assert list(folder.iterdir()) == []
    monkeypatch.chdir(folder.parent)
    capsys.readouterr()
    assert run("recall", "tea") == 0
    assert "I like tea." in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["remember", "x"], ["recall", "x"], ["memory", "stats"], ["chat", "--llm", "none", "-m", "x"]],
    ids=str,
)
def test_a_store_in_the_old_default_place_is_named_and_not_passed_over(
    arguments: list[str], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert run("remember", "I like tea.", "--store", "titans-memory") == 0
    assert_refused(arguments, "(`--store titans-memory`) or move it there", folder, capsys)
    assert not Path(os.environ["XDG_DATA_HOME"]).exists()
    assert run(*arguments, "--store", "titans-memory") == 0


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


def test_a_store_is_not_exported_over_itself(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run("remember", "I like tea.", "--store", "s") == 0
    Path("linked").symlink_to("s")
    Path("linked.jsonl").symlink_to("s/memory.sqlite3")
    for store, file in (
        ("s", "s/memory.sqlite3"), ("s", "s/memory.sqlite3-wal"), ("s", "s/memory.sqlite3-index/1.usearch"),
        ("s", "linked/memory.sqlite3"), ("s", "linked.jsonl"), ("linked", "s/memory.sqlite3"),
        ("s/memory.sqlite3", "s/../s/memory.sqlite3"),
    ):  # fmt: skip
        words = f"{file} belongs to the store itself; expected another file."
        assert_refused(["memory", "export", file, "--store", store], words, folder, capsys)
    assert run("memory", "export", "s/all.jsonl", "--store", "s") == 0
    assert "I like tea." in Path("s/all.jsonl").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["recall", "x"], ["memory", "stats"], ["memory", "show", "x"], ["memory", "history", "x"],
        ["memory", "export", "all.jsonl"], ["memory", "update", "x", "y"], ["memory", "delete", "x"],
        ["memory", "delete-all", "--yes"], ["memory", "reindex"], ["memory", "compact"],
    ],
    ids=lambda arguments: arguments[1],
)  # fmt: skip
def test_only_what_adds_records_makes_a_store_on_a_server(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    new_schema: Callable[[str], str],  # noqa: F811
    postgres_server: PostgresServer,  # noqa: F811
) -> None:
    url = new_schema("mistyped")
    assert_refused([*arguments, "--store", url], f"there is no memory store at {url}", folder, capsys)
    assert not postgres_server.execute("SELECT FROM pg_namespace WHERE nspname LIKE 'mistyped%'")


@contextmanager
def forbidden_to_write(folder: Path) -> Iterator[None]:
    """This process can read a folder and its files, and not write them."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # nothing is forbidden to root
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_store_that_cannot_be_written_answers_as_one_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as name:  # where other users may look
        top = Path(name)
        top.chmod(0o777)
        store = ["--store", str(top / "s")]
        assert run("remember", "I like tea.", *store, "--json") == 0
        (record,) = read_json(capsys)
        reading = (
            ["recall", "tea", "--why"], ["memory", "stats", "--check", "--user", "default"],
            ["memory", "show", record["id"], "--json"],
            ["memory", "history", record["id"]], ["memory", "export", str(top / "all.jsonl")],
        )  # fmt: skip
        assert [run(*arguments, *store) for arguments in reading] == [0] * 5
        written = capsys.readouterr()
        with forbidden_to_write(top / "s"):
            assert [run(*arguments, *store) for arguments in reading] == [0] * 5
            assert capsys.readouterr() == written
            assert run("memory", "delete", record["id"], *store) == run("remember", "x", *store) == 2
        error = capsys.readouterr().err
        assert error.count("memory.sqlite3 cannot be written: ") == error.count("\n") == 2


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_writes_that_cannot_be_seen_in_a_read_only_place_are_not_passed_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("remember", "I like tea.") == 0
    with tempfile.TemporaryDirectory() as name, Memory() as memory:  # which keeps a log of writes while it is open
        memory.add("I like coffee.")
        copy = Path(name) / "s"
        copy.mkdir()
        for ending in ("", "-wal"):  # as after a crash
            shutil.copy(f"{default_file()}{ending}", copy)
        Path(name).chmod(0o755)
        with forbidden_to_write(copy):
            assert run("recall", "coffee", "--store", str(copy)) == 2
        assert "memory.sqlite3-wal holds writes that cannot be read where nothing can be" in capsys.readouterr().err
        assert run("recall", "coffee", "--store", str(copy)) == 0
    assert "I like coffee." in capsys.readouterr().out


def test_other_projections_need_a_reindex(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    NeuralTextMemory(NeuralConfig(seed=3)).save("trained")
    assert run("remember", "I like tea.") == 0
    assert_refused(["remember", "I like milk.", "--neural", "trained"], "`titans memory reindex", folder, capsys)
    assert run("memory", "reindex", "--neural", "trained") == 0
    assert f"1 records of {default_file()} have new vectors and memories" in capsys.readouterr().out
    assert run("remember", "I like milk.", "--neural", "trained") == 0


@pytest.mark.parametrize(
    "arguments",
    [["remember", "x"], ["recall", "tea"], ["chat", "--llm", "none", "-m", "tea"]],
    ids=lambda each: each[0],
)
def test_a_store_of_other_weights_offers_the_command_that_makes_it_anew(
    arguments: list[str], capsys: pytest.CaptureFixture[str], folder: Path, loaded: TextEncoder
) -> None:
    with Memory("old", loaded, NeuralTextMemory(NeuralConfig(seed=3))) as memory:
        memory.add("I like tea.")
    assert_refused([*arguments, "--store", "old"], "`titans memory reindex", folder, capsys)
    assert run("memory", "reindex", "--store", "old") == 0
    assert run(*arguments, "--store", "old") == 0


def test_a_store_shrinks_when_it_is_compacted(capsys: pytest.CaptureFixture[str]) -> None:
    with Memory() as memory:
        memory.add_many([f"Note {number} is about tea." for number in range(40)], session="s")
        memory.delete_all(user="default", session="s")
    before = default_file().stat().st_size
    assert run("memory", "compact") == 0
    saved = before - default_file().stat().st_size
    assert saved > 0 and capsys.readouterr().out.endswith(" bytes smaller\n")


def test_a_damaged_store_is_read_and_recovered(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").write_text("\n".join(f"Note {number} is about tea." for number in range(40)))
    assert run("remember", "--file", "texts", "--split", "lines") == 0
    file = default_file()
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 9 // 10 // 8192 * 8192])
    capsys.readouterr()
    assert run("remember", "new") == 2
    error = capsys.readouterr().err
    assert "is damaged" in error and "titans memory recover" in error
    assert run("memory", "recover", str(default_store()), "--out", "new") == 0
    assert " records written to new; " in capsys.readouterr().out
    assert run("recall", "tea", "--store", "new") == 0
    assert run("memory", "recover", str(default_store()), "--out", "new") == 2
    assert "is there already" in capsys.readouterr().err


def test_a_store_without_records_is_recovered_as_one_and_wrong_weights_leave_none(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    Memory("empty").close()
    recover = ["memory", "recover", "empty", "--out", "new"]
    assert_refused([*recover, "--encoder", "."], ". has no config.json", folder, capsys)
    assert_refused(
        [*recover, "--neural", "nowhere"], "expected a folder written by `titans text train`", folder, capsys
    )
    assert run(*recover) == 0
    assert capsys.readouterr().out.startswith("0 records written to new; ")


def test_a_letter_that_changed_is_told_by_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("remember", "The combination is 4711") == 0
    file = default_file()
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
        (["remember", "x", "--metadata", "=1"], "--metadata takes NAME=VALUE, got '=1'."),
        (["remember", "x", "--metadata", "a={2026-01-01: 3}"], "got 'a={2026-01-01: 3}', whose value cannot be read"),
        (["remember", "x", "--metadata", "a=[tea"], "got 'a=[tea', whose value cannot be read"),
        (["remember", "x", "--metadata", "a=[NaN]"], "got 'a=[NaN]', whose value cannot be read"),
        (["remember", "x", "--metadata", "a=" + "[" * 3000 + "]" * 3000], "[[[...', whose value cannot be read"),
        (["remember", "x", "--metadata", "a=12345678901234567890"], "expected texts without U+0000"),
        (["recall", "x", "--filter", "a={2026-01-01: 3}"], "--filter takes NAME=VALUE, got 'a={2026"),
        (["remember", "x", "--user", ""], "user has 0 characters"),
        (["remember", "x", "--role", ""], "role has 0 characters"),
        (["remember", "x", "--store", "bad.txt/below"], "bad.txt/below cannot be made: Not a directory"),
        (["remember", "x", "--store", "bad.txt"], "bad.txt is not a memory store"),
        (["remember", "x", "--encoder", "."], ". has no config.json; expected a folder of a BERT-like model"),
        (["remember", "x", "--neural", "nowhere"], "expected a folder written by `titans text train`"),
        (["remember", "--file", "bad.txt"], "bad.txt is not valid UTF-8 at byte 2."),
        (["remember", "--file", "huge.txt"], "huge.txt has 1,200,000 bytes; expected at most 1,000,000"),
        (["remember", "--file", "nowhere.txt"], "'nowhere.txt' does not exist"),
        (["recall", "x"], "/titans-memory/memory.sqlite3; `titans remember` makes one."),
        (["recall", "x", "--store", "new"], "there is no memory store at new/memory.sqlite3; `titans remember` makes"),
        (["memory", "stats"], "there is no memory store at"),
        (["memory", "export", "x.jsonl"], "there is no memory store at"),
        (["memory", "reindex"], "there is no memory store at"),
        (["memory", "recover", "nowhere", "--out", "new"], "there is no memory store at nowhere"),
        (
            ["memory", "recover", "postgresql://a:secret@b/c", "--out", "new"],
            "a server repairs its own files; expected",
        ),
        (
            ["memory", "recover", "run.py", "--out", "new"],
            "run.py is not a memory store, or nothing can be read",
        ),
        (["memory", "recover", "other.db", "--out", "new"], "other.db is not a memory store, or nothing can be read"),
        (["memory", "recover", "empty.db", "--out", "new"], "empty.db is not a memory store, or nothing can be read"),
        (["memory", "delete-all"], "there is no memory store at"),
        (["memory", "import", "bad.txt"], "bad.txt, line 1 is not valid UTF-8"),
        (["memory", "nonsense"], "No such command 'nonsense'"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.txt").write_bytes(b"ab\xff\n")
    Path("huge.txt").write_text("abcd" * 300_000)
    Path("run.py").write_text("print(1)\n" * 5_000)
    Path("empty.db").touch()
    with closing(sqlite3.connect("other.db")) as other:
        other.execute("CREATE TABLE records (seq INTEGER PRIMARY KEY, text TEXT)")
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("titans: ") and error.count("\n") == 1
    assert not default_file().exists() and not Path("new").exists()


def test_a_record_is_shown_changed_and_erased_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    id, other = remember("I like tea.", "ann"), remember("I like milk.", "ann")
    assert run("memory", "show", id, "--user", "ann") == 0
    assert "text           I like tea.\n" in capsys.readouterr().out
    assert run("memory", "update", id, "I like coffee.", "--metadata", "topic=drinks", "--user", "ann") == 0
    assert capsys.readouterr().out.startswith(f"Updated {id}, version 2, surprise ")
    assert run("memory", "show", id, "--user", "ann", "--json") == 0
    shown = read_json(capsys)
    assert (shown["text"], shown["metadata"], shown["version"]) == ("I like coffee.", {"topic": "drinks"}, 2)
    assert run("memory", "delete", id, other, "--user", "ann") == 0
    assert capsys.readouterr().out == "2 records erased\n"
    assert counts() == {}
    assert run("memory", "history", id, "--user", "ann") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["add", "update", "delete"] and "tea" not in str(lines)


@pytest.mark.parametrize("owner", ["default", "ann"])
@pytest.mark.parametrize(
    "arguments",
    [("show", "ID"), ("history", "ID"), ("update", "ID", "new"), ("delete", "ID")],
    ids=lambda each: each[0],
)
def test_an_id_of_another_user_is_nobodys(
    arguments: tuple[str, ...], owner: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    id, asking = remember("I like tea.", owner), {"default": "ann", "ann": "default"}[owner]
    called = ["memory", *(id if word == "ID" else word for word in arguments)]
    if asking != "default":  # what `titans remember` takes, too
        called += ["--user", asking]
    assert_refused(called, f"there is no record '{id}' of user '{asking}'", folder, capsys)
    with Memory() as memory:
        kept = memory.get(id, user=owner)
    assert kept is not None and kept.text == "I like tea."


def remember_everywhere() -> None:
    for scope in (("ann",), ("ann", "a"), ("ann", "a", "s"), ("ann", "b"), ("ben",)):
        remember(f"I am {scope}.", *scope)


def test_exactly_the_scope_is_erased_or_what_is_below_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    remember_everywhere()
    assert run("memory", "delete-all", "--user", "ann", "--agent", "a", "--yes") == 0
    assert capsys.readouterr().out == "1 records erased; 1 below user 'ann', agent 'a' stay without --below\n"
    assert set(counts()) == {"ann", "ann/a/s", "ann/b", "ben"}
    assert run("memory", "delete-all", "--user", "ann", "--session", "s", "--yes") == 0
    assert set(counts()) == {"ann", "ann/a/s", "ann/b", "ben"}
    assert run("memory", "delete-all", "--user", "ann", "--session", "s", "--below", "--yes") == 0
    assert set(counts()) == {"ann", "ann/b", "ben"}
    capsys.readouterr()
    assert run("memory", "delete-all", "--user", "ann", "--below", "--yes") == 0
    assert capsys.readouterr().out == "2 records erased\n"
    assert set(counts()) == {"ben"}


@pytest.mark.parametrize(("answer", "left"), [("n\n", 5), ("\n", 5), ("y\n", 1)])
def test_before_scopes_are_erased_they_are_named_and_counted(
    answer: str, left: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_everywhere()
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", Typist(answer))
    assert run("memory", "delete-all", "--user", "ann", "--below") == 0
    out = capsys.readouterr().out
    assert "         1  user 'ann', agent 'a', session 's'\n" in out and "ben" not in out
    assert "Erase 4 records of 4 scopes? [y/N]: " in out
    assert ("nothing is erased" in out) == (left == 5) and sum(counts().values()) == left


def test_without_a_terminal_nothing_is_erased_unless_it_is_said(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_everywhere()
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    words = "there is no terminal to ask in, so 1 records of 1 scopes stay; --yes erases without asking"
    assert_refused(["memory", "delete-all", "--user", "ann"], words, folder, capsys)
    assert sum(counts().values()) == 5


def test_many_scopes_are_counted_and_not_all_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Memory() as memory:
        memory.restore([Record(f"{n}", f"Note {n}", session=f"{n}") for n in range(25)])
    monkeypatch.setattr(sys, "stdin", Typist("n\n"))
    assert run("memory", "delete-all", "--below") == 0
    out = capsys.readouterr().out
    assert out.count("session") == 20 and "and 5 more scopes" in out and "Erase 25 records of 25 scopes?" in out


def test_every_command_takes_a_server_and_none_shows_its_password(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    new_schema: Callable[[str], str],  # noqa: F811
) -> None:
    monkeypatch.setenv("TITANS_MEMORY", new_schema("one") + "&password=hush")
    assert run("remember", "I like tea.", "--json") == 0
    (record,) = read_json(capsys)
    other = ["--store", new_schema("other") + "&password=hush"]
    for arguments in (
        ["recall", "tea", "--why"], ["chat", "--llm", "none", "-m", "What do I like?"],
        ["memory", "show", record["id"]], ["memory", "update", record["id"], "I like coffee."],
        ["memory", "history", record["id"]], ["memory", "stats", "--check"], ["memory", "export", "all.jsonl"],
        ["memory", "import", "all.jsonl", *other], ["memory", "reindex", *other], ["memory", "stats", *other],
        ["memory", "delete", record["id"]], ["memory", "compact"], ["memory", "delete-all", "--yes"],
    ):  # fmt: skip
        assert run(*arguments) == 0, arguments
    out, err = capsys.readouterr()
    assert "I like tea." in out and "1 records erased" in out and "2 records added to postgresql://" in out
    assert run("recall", "tea") == run("memory", "show", record["id"]) == 2
    assert "hush" not in out + err + capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["all.jsonl"]


@pytest.mark.parametrize("arguments", [["remember", "x"], ["memory", "stats"]], ids=["remember", "stats"])
def test_a_server_that_is_away_is_one_sentence_without_the_password(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    url = "postgresql://ann:hush@127.0.0.1:1/memories"
    assert run(*arguments, "--store", url) == 2
    error = capsys.readouterr().err
    assert "postgresql://ann:***@127.0.0.1:1/memories" in error and "hush" not in error
    monkeypatch.setenv("TITANS_MEMORY", url)
    assert_refused(arguments, error.removeprefix("titans: "), folder, capsys)


def test_help_says_what_a_full_store_erases(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("remember", "chat"):
        assert run(verb, "--help") == 0
        assert "those that tell least are erased" in " ".join(capsys.readouterr().out.replace("│", "").split())


def test_help_tells_of_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("remember", "recall", "memory"))
    assert run("memory", "--help") == 0
    out = capsys.readouterr().out
    verbs = "stats show history update delete delete-all export import reindex compact recover"
    assert all(f" {verb} " in out for verb in verbs.split())
