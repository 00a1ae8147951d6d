"""What a store writes is for its owner's eyes only, whatever the umask; what is not the store's keeps its mode."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.text.conftest import Opener
from titans.text import index
from titans.text.memory import Memory
from titans.text.records import StoreError
from titans.text.recovery import recover

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=["umask 000", "umask 022", "umask 077"], autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the index for a few records."""
    for name in ("EXACT", "SEGMENT", "LEAST"):
        monkeypatch.setattr(index, name, 10)


def modes(*paths: Path) -> dict[str, int]:
    """The modes of files and folders, by name, and of what is in the folders."""
    found = {}
    for path in paths:
        for each in (path, *path.rglob("*")):
            found[each.relative_to(path.parent).as_posix()] = stat.S_IMODE(each.stat().st_mode)
    return found


def is_private(found: dict[str, int], folder: Path) -> bool:
    return all(mode == (0o700 if (folder / name).is_dir() else 0o600) for name, mode in found.items())


def open_up(folder: Path) -> None:
    """Gives a store the modes that it had before."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_the_files_and_folders_of_a_store_are_private(open_plain: Opener, tmp_path: Path, small: None) -> None:
    memory = open_plain("new/store")
    memory.add_many([f"Note {number}" for number in range(30)])
    found = modes(tmp_path / "new" / "store")
    endings = {Path(name).suffix for name in found}
    assert {".sqlite3", ".sqlite3-wal", ".sqlite3-shm", ".sqlite3-index", ".usearch"} <= endings
    assert is_private(found, tmp_path / "new")


def test_a_store_in_a_file_of_its_own_is_private_and_its_folder_as_it_was(open_plain: Opener, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    before = modes(tmp_path / "shared")
    open_plain("shared/notes.db").add("x")
    found = modes(tmp_path / "shared")
    assert {name: found.pop(name) for name in before} == before
    assert set(found) == {"shared/notes.db", "shared/notes.db-wal", "shared/notes.db-shm"}
    assert is_private(found, tmp_path)


def test_an_export_is_private(open_plain: Opener, tmp_path: Path) -> None:
    memory = open_plain()
    memory.add("x")
    memory.export(tmp_path / "all.jsonl")
    assert modes(tmp_path / "all.jsonl") == {"all.jsonl": 0o600}


def test_a_store_that_is_recovered_is_private(open_plain: Opener, tmp_path: Path) -> None:
    with open_plain() as memory:
        memory.add("x")
    recover(tmp_path / "store", tmp_path / "new", memory.encoder)
    assert is_private(modes(tmp_path / "new"), tmp_path)


def test_an_open_store_is_made_private_when_it_is_opened_for_writing(
    open_plain: Opener, tmp_path: Path, small: None
) -> None:
    with open_plain() as memory:
        memory.add_many([f"Note {number}" for number in range(30)])
        open_up(tmp_path / "store")  # while it is open, so that its log is there
        again = open_plain()
        found = modes(tmp_path / "store")
        assert is_private({name: mode for name, mode in found.items() if ".usearch" not in name}, tmp_path)
        assert again.get(memory.records(limit=1)[0].id) is not None


def test_reading_changes_no_mode(open_plain: Opener, tmp_path: Path) -> None:
    with open_plain() as memory:
        memory.add("x")
    open_up(tmp_path / "store")
    before = modes(tmp_path / "store")
    with open_plain(read_only=True) as memory:
        assert len(memory.search("x"))
    assert before.items() <= modes(tmp_path / "store").items()


def test_a_folder_that_holds_other_things_keeps_its_mode(open_plain: Opener, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").touch()
    home.chmod(0o755)
    (home / "letter.txt").chmod(0o644)
    for _ in range(2):  # new, and there already
        with open_plain("home") as memory:
            memory.add("x")
    found = modes(home)
    assert (found["home"], found["home/letter.txt"], found["home/memory.sqlite3"]) == (0o755, 0o644, 0o600)


def test_what_is_no_store_keeps_its_mode(tmp_path: Path) -> None:
    database, text = tmp_path / "theirs.db", tmp_path / "text.db"
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE notes (text)")
    connection.close()
    text.write_text("not a database at all")
    for file in (database, text):
        file.chmod(0o644)
        with pytest.raises(StoreError, match="not a memory store"):
            Memory(file)
        assert modes(file) == {file.name: 0o644}
