from __future__ import annotations

import gzip
import os
import random
import shutil
import sqlite3
import threading
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.text.conftest import Opener
from tests.text.killing import replay_log
from titans.text import database, index, replay
from titans.text.database import FILE_NAME, locate
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.records import DamagedStore, OtherEncoder, Record, Scope, StoreError, UnknownRecord
from titans.text.recovery import recover, salvage
from titans.text.sqlite import SqliteStore
from titans.text.store import FORMAT

TEXTS = [f"Note {number}: the {animal} likes {food}." for number, (animal, food) in enumerate(
    (animal, food) for animal in ("cat", "dog", "horse", "owl", "fox") for food in ("milk", "hay", "mice", "bread")
)]  # fmt: skip


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, encoder: TextEncoder) -> Path:
    """The database file of a closed store with three times twenty records."""
    folder = tmp_path_factory.mktemp("filled")
    with Memory(folder, encoder=encoder) as memory:
        for user in ("ann", "ben", "cat"):
            memory.add_many(TEXTS, user=user, metadata={"of": user})
    return folder / FILE_NAME


@pytest.fixture
def copy(filled: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    shutil.copyfile(filled, tmp_path / FILE_NAME)
    return tmp_path / FILE_NAME


def test_writes_wait_for_the_disk_and_go_to_a_log_first(open_plain: Opener) -> None:
    store = open_plain().store
    settings = {name: store._one(f"PRAGMA {name}")[0] for name in ("journal_mode", "synchronous", "secure_delete")}
    assert settings == {"journal_mode": "wal", "synchronous": 2, "secure_delete": 1}


def test_what_is_raised_in_a_transaction_undoes_all_of_it(open_memory: Opener) -> None:
    memory = open_memory()
    record = memory.add("one")
    with memory.store.reading():
        (number,) = (seq for seq, _, _ in memory.store.texts())
    with pytest.raises(RuntimeError), memory.store.writing():
        memory.store.remove([number], "delete")
        memory.store.set_meta("new", "value")
        raise RuntimeError
    assert memory.get(record.id) == record
    assert memory.check() == []
    with memory.store.reading():
        assert memory.store.get_meta("new") is None


def test_a_store_is_given_by_its_folder_or_its_file(tmp_path: Path, encoder: TextEncoder) -> None:
    with Memory(tmp_path / "folder", encoder=encoder) as memory:
        record = memory.add("one")
    with Memory(tmp_path / "folder" / FILE_NAME, encoder=encoder) as memory:
        assert memory.get(record.id) == record
    with Memory(tmp_path / "notes.db", encoder=encoder) as memory:
        memory.add("two")
    assert (tmp_path / "notes.db").is_file()


def test_names_with_special_characters_are_names(tmp_path: Path, encoder: TextEncoder) -> None:
    with Memory(tmp_path / "what? #1 100%", encoder=encoder) as memory:
        memory.add("one")
    assert locate(tmp_path / "what? #1 100%").is_file()


def test_a_store_of_a_newer_version_is_refused_and_not_touched(copy: Path) -> None:
    connection = sqlite3.connect(copy)
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    before = copy.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=f"has format {FORMAT + 1} and was made by a newer version of titans"):
            SqliteStore(copy, read_only)
    assert copy.read_bytes() == before


def test_another_programs_database_is_refused_and_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = file.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="is a database, but not a memory store"):
            SqliteStore(file, read_only)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["other.db"]


def test_any_other_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("buy milk and bread, call Ann")
    with pytest.raises(StoreError, match=r"notes.txt is not a memory store"):
        SqliteStore(file)
    assert file.read_text() == "buy milk and bread, call Ann"


def test_a_place_where_nothing_can_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        SqliteStore(tmp_path / "file" / "below")
    with pytest.raises(StoreError, match="cannot be written"):
        SqliteStore(Path("/proc") / "memory.sqlite3")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_permission_is_said_in_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            SqliteStore(tmp_path / "memory.sqlite3")
    finally:
        tmp_path.chmod(0o700)


def test_a_store_opened_to_read_must_be_there_and_is_not_written(copy: Path, encoder: TextEncoder) -> None:
    with pytest.raises(StoreError, match="there is no memory store at"):
        Memory(copy.parent / "nowhere", read_only=True)
    assert not (copy.parent / "nowhere").exists()
    before = copy.read_bytes()
    with Memory(copy, encoder=encoder, read_only=True) as memory:
        assert memory.search("owl", user="ann").hits[0].record.user == "ann"
        id = memory.records(user="ann")[0].id
        for call in (
            lambda: memory.add("new"),
            lambda: memory.update(id, "new"),
            lambda: memory.delete(id),
            lambda: memory.delete_all(user="ann"),
            lambda: memory.reindex(),
        ):
            with pytest.raises(StoreError, match="was opened to read only"):
                call()
    assert copy.read_bytes() == before


def test_threads_share_a_memory(open_memory: Opener) -> None:
    memory = open_memory()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        user = f"user {number % 2}"  # of two threads
        try:
            for position in range(6):
                memory.add(TEXTS[position], user=user)
                record = memory.add(f"{TEXTS[position]} {number}", user=user)
                assert memory.search(TEXTS[position], user=user).hits
                if position % 3 == 2:
                    memory.delete(record.id, user=user)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    again = open_memory()
    for user in ("user 0", "user 1"):
        assert len(memory.records(user=user)) == 6 + 2 * 4
        assert sum(record.repeats for record in memory.records(user=user)) == 6
        assert memory.neural.pack(memory.scope_memory(user=user)) == again.neural.pack(again.scope_memory(user=user))
    assert memory.check() == []


def test_two_connections_see_each_others_writes(open_memory: Opener) -> None:
    one, two = open_memory(), open_memory()
    for number, text in enumerate(TEXTS):  # both sides of a whole chunk
        (one, two)[number % 2].add(text)
    assert one.neural.pack(one.scope_memory()) == two.neural.pack(two.scope_memory())
    found = [hit.record.text for hit in one.search(TEXTS[7])]
    assert found == [hit.record.text for hit in two.search(TEXTS[7])]
    id = one.search(TEXTS[7]).hits[0].record.id
    two.delete(id)
    assert id not in {hit.record.id for hit in one.search(TEXTS[7])}
    with pytest.raises(UnknownRecord, match="there is no record"):
        one.delete(id)


def open_damaged(path: Path, encoder: TextEncoder) -> Memory:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Memory(path, encoder=encoder)


def test_a_file_that_was_cut_off_can_be_read_and_salvaged(copy: Path, encoder: TextEncoder) -> None:
    original = {record.id: record for record in salvage(copy).records}
    assert len(original) == 60
    with copy.open("r+b") as stream:
        stream.truncate(copy.stat().st_size * 9 // 10 // 8192 * 8192)
    with pytest.warns(UserWarning, match=r"is damaged .* and can only be read; `titans memory recover .* salvages"):
        memory = Memory(copy, encoder=encoder)
    with memory, pytest.raises(DamagedStore, match="titans memory recover"):
        memory.add("new")
    found = recover(copy, copy.parent / "new", encoder)
    assert len(found.records) > 20
    assert all(replace(original[item.id], surprise=0) == replace(item, surprise=0) for item in found.records)
    assert found.lost is None or found.lost == 60 - len(found.records)
    with Memory(copy.parent / "new", encoder=encoder) as memory:
        assert memory.check() == []
        assert memory.add("new").id


@pytest.mark.parametrize("seed", range(12))
def test_whatever_bytes_are_damaged_the_answer_is_a_sentence_and_salvage_invents_nothing(
    copy: Path, encoder: TextEncoder, seed: int
) -> None:
    original = {record.id: record for record in salvage(copy).records}
    draw = random.Random(seed)
    data = bytearray(copy.read_bytes())
    for _ in range(2 ** (seed % 5)):
        start = draw.randrange(0 if seed % 2 else 100, len(data) - 64)
        data[start : start + 64] = draw.randbytes(64)
    copy.write_bytes(data)
    try:
        with open_damaged(copy, encoder) as memory:
            for record in memory.records(user="ann"):
                assert original[record.id].text == record.text
            memory.search("what does the owl like", user="ben")
            memory.check()
            memory.add("new", user="ann")
    except StoreError as error:
        assert len(str(error)) < 600 and "\n" not in str(error)
    try:
        found = salvage(copy)
    except StoreError as error:
        assert "nothing can be read" in str(error)
        return
    kept = [record for record in found.records if record.text != "new"]
    assert all((original[record.id].text, original[record.id].scope) == (record.text, record.scope) for record in kept)
    assert seed % 2 or len(kept) >= 20


def damage_record(file: Path, old: bytes, new: bytes) -> None:
    """Changes the first place where a text stands in a file: in its record."""
    data = file.read_bytes()
    assert data.count(old) == 2  # in the record, and in the log
    place = data.index(old) if b'"text"' not in data[data.index(old) - 100 : data.index(old)] else data.rindex(old)
    file.write_bytes(data[:place] + new + data[place + len(old) :])


def test_a_letter_that_changed_on_the_disk_is_noticed_and_taken_from_the_log(
    tmp_path: Path, encoder: TextEncoder
) -> None:
    with Memory(tmp_path, encoder=encoder) as memory:
        record = memory.add("The combination is 4711")
        memory.add("The house is green")
    damage_record(tmp_path / FILE_NAME, b"The combination is 4711", b"The combination is 4712")
    with Memory(tmp_path, encoder=encoder) as memory:
        assert memory.check() == [f"record {record.id} is not what was written"]
        with pytest.raises(DamagedStore, match=f"record {record.id} is not what was written"):
            memory.get(record.id)
    found = recover(tmp_path, tmp_path / "new", encoder)
    assert [item.text for item in found.records] == ["The combination is 4711", "The house is green"]
    assert found.lost == 0


def test_a_store_is_recovered_only_into_a_new_one(copy: Path, encoder: TextEncoder) -> None:
    with pytest.raises(StoreError, match="is there already"):
        recover(copy, copy, encoder)
    with pytest.raises(StoreError, match="there is no memory store at"):
        salvage(copy.parent / "nowhere")


def test_what_was_deleted_is_not_recovered(open_plain: Opener, tmp_path: Path) -> None:
    memory = open_plain()
    ids = [record.id for record in memory.add_many(TEXTS[:6])]
    memory.delete(ids[2])
    memory.update(ids[3], "another text")
    memory.close()
    assert [record.text for record in salvage(tmp_path / "store").records] == [
        *TEXTS[:2],
        "another text",
        *TEXTS[4:6],
    ]


def test_a_damaged_memory_state_is_made_again(open_plain: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "BETWEEN", 1)
    memory = open_plain()
    memory.add_many(TEXTS)
    good = memory.neural.pack(memory.scope_memory())
    with memory.store.writing():
        assert memory.store._run("UPDATE states SET state = zeroblob(length(state))").rowcount == 1
    other = open_plain()
    assert other.neural.pack(other.scope_memory()) == good


def test_the_log_tells_what_the_records_are(open_plain: Opener) -> None:
    memory = open_plain()
    records = memory.add_many(TEXTS[:5])
    memory.delete(records[1].id)
    memory.update(records[3].id, "new words")
    with memory.store.reading():
        row = memory.store.find_scope(Scope())
        assert row is not None
        assert [text for _, text in replay_log(memory.store, row.id)] == [TEXTS[0], TEXTS[2], "new words", TEXTS[4]]


def test_records_are_read_back_as_they_were_written(open_memory: Opener) -> None:
    memory = open_memory()
    record = memory.add(
        "  Grüße, 世界! \n\tname: 'x' -- ; DROP TABLE records; \f ",
        user="ü 'x'",
        agent="a",
        session="s",
        role="user",
        metadata={"1": [1, None, {"deep": 0.1}], "ä": True},
        created="2020-02-03T04:05:06+01:00",
    )
    assert isinstance(record, Record)
    assert record.created == "2020-02-03T03:05:06.000000+00:00"
    assert memory.get(record.id, user="ü 'x'") == record


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the index for a few records."""
    for name in ("EXACT", "SEGMENT", "LEAST"):
        monkeypatch.setattr(index, name, 5)


def test_a_text_is_written_once_even_if_the_index_cannot_be(
    open_plain: Opener, small_index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_plain()
    memory.add_many(TEXTS[:4])
    memory.store.index_folder.write_bytes(b"")  # a file where the folder should be
    with pytest.warns(UserWarning, match="everything is written to .*, but afterwards: .*Not a directory"):
        assert memory.add(TEXTS[4]).text == TEXTS[4]
    memory.store.index_folder.unlink()

    def fail(*arguments: object) -> bytes:
        raise RuntimeError("out of memory")  # as usearch does

    with monkeypatch.context() as patch:
        patch.setattr(index, "_make_file", fail)
        with pytest.warns(UserWarning, match="but afterwards: out of memory"):
            memory.add(TEXTS[5])
    assert [record.text for record in reversed(memory.records())] == TEXTS[:6]
    memory.add(TEXTS[6])
    assert len(list(memory.store.index_folder.iterdir())) == 1
    assert memory.check() == []


def test_a_text_is_written_once_even_if_nothing_can_be_evicted_or_erased(
    open_memory: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory(limit=3)
    memory.add_many(TEXTS[:3])

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory.store), "begin_erasing", fail)
        with pytest.warns(UserWarning, match="but afterwards: disk full"):
            record = memory.add(TEXTS[3])
        assert memory.stats()["records"] == 4
    with monkeypatch.context() as patch:
        patch.setattr(type(memory.store), "finish_erasing", fail)
        with pytest.warns(UserWarning, match="but afterwards: disk full"):
            assert memory.delete(record.id) == 1
        with pytest.warns(UserWarning, match="but afterwards: disk full"):
            assert memory.delete_all(user="default") == 3
    assert memory.scopes() == []
    assert memory.check() == []


OLD_STORE = Path(__file__).with_name("stores") / "format-1.sqlite3.gz"
OLD_TABLES = ("meta", "users", "scopes", "vectors", "events", "segments")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store that the last release made: four records of Ann, one text twice and one changed, and one of Bob."""
    file = tmp_path / "old" / FILE_NAME
    file.parent.mkdir()
    file.write_bytes(gzip.decompress(OLD_STORE.read_bytes()))
    return file


def content(file: Path) -> dict[str, list[Any]]:
    """What the tables hold that an upgrade leaves as they are, and the format."""
    fields = "seq, id, user, scope, role, text, metadata, created, updated, version, words, sum, surprise, uses"
    with closing(sqlite3.connect(file)) as connection:
        found = {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in OLD_TABLES}
        found["records"] = connection.execute(f"SELECT {fields} FROM records ORDER BY seq").fetchall()
        found["format"] = connection.execute("PRAGMA user_version").fetchall()
        return found


def test_a_store_of_the_last_release_is_upgraded_and_reindexed_with_nothing_lost(
    old: Path, encoder: TextEncoder
) -> None:
    before = content(old)
    with Memory(old, encoder=encoder) as memory:
        assert memory.stats()["format"] == FORMAT
        records = memory.records(user="ann")
        assert [record.text for record in reversed(records)] == [
            "Ann lives in Oslo.", "Ann has a pet rabbit.", "The meeting is on Friday.", "Ann lives in Oslo.",
        ]  # fmt: skip
        assert {(record.repeats, record.replaces) for record in records} == {(0, None)}
        changed = [(event.kind, event.text) for event in memory.history(records[1].id, user="ann")]
        assert changed == [("add", "The meeting is on Tuesday."), ("update", "The meeting is on Friday.")]
        assert [scope for scope, _ in memory.scopes()] == [Scope("ann"), Scope("bob", "cook", "monday")]
        sentence = rf"reindex --store {old}`$"
        for call in (
            lambda: memory.add("Ann lives in Lima.", user="ann"),
            lambda: memory.search("Ann", user="ann"),
            lambda: memory.update(records[0].id, "Ann lives in Lima.", user="ann"),
        ):
            with pytest.raises(OtherEncoder, match=sentence):
                call()
    assert content(old) == before | {"format": [(FORMAT,)]}
    with Memory(old, encoder=encoder) as memory:
        assert memory.reindex() == 5
        assert [replace(record, surprise=0) for record in memory.records(user="ann")] == [
            replace(record, surprise=0) for record in records
        ]
        assert memory.search("Where does Ann live?", user="ann").hits[0].record.text == "Ann lives in Oslo."
        assert memory.add("Ann lives in Oslo.", user="ann", metadata={"topic": "home"}).repeats == 1
        lima = memory.add("Ann lives in Lima.", user="ann")
        assert memory.search("Where does Ann live?", user="ann").hits[0].record == lima
        assert memory.delete_all(user="bob", below=True) == 1
        assert memory.check() == []
    after = content(old)
    assert [row for row in after["events"] if row in before["events"]] == [
        row
        for row in before["events"]
        if row[5] == 1  # Ann's scope
    ]


def test_a_store_of_the_last_release_is_not_upgraded_when_opened_to_read(old: Path, encoder: TextEncoder) -> None:
    before = old.read_bytes()
    with pytest.raises(
        StoreError, match=f"has format 1 of an older version of titans; expected {FORMAT}, so open it once"
    ):
        Memory(old, encoder=encoder, read_only=True)
    assert old.read_bytes() == before


def test_an_upgrade_that_is_cut_off_leaves_the_old_store(
    old: Path, tmp_path: Path, encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(old)
    crashed = tmp_path / "crashed"
    cut = [0]

    def crash(text: str) -> int:
        cut[0] += 1
        if cut[0] == 3:  # in the middle of the records: what a crash would leave on the disk, and an error
            shutil.copytree(old.parent, crashed)
            raise RuntimeError
        return 1

    with monkeypatch.context() as patch:
        patch.setattr(database, "checksum", crash)
        with pytest.raises(StoreError, match="cannot be written"):
            Memory(old, encoder=encoder)
    for file in (old, crashed / FILE_NAME):
        assert content(file) == before and before["format"] == [(1,)]
        with Memory(file, encoder=encoder) as memory:
            assert memory.reindex() == 5
            assert memory.check() == []


def test_the_records_of_a_store_of_the_last_release_can_be_salvaged(old: Path) -> None:
    found = salvage(old)
    assert (len(found.records), found.lost) == (5, 0)
    assert {record.repeats for record in found.records} == {0}
