from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titans.text import index as module
from titans.text.index import Catalogue, LocalIndex, Segment, nearest_exact
from titans.text.records import Record, Scope, new_id
from titans.text.sqlite import SqliteStore
from titans.text.store import Selection

WIDTH = 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes at which files are made, made small."""
    for name, value in (("EXACT", 1_000), ("SEGMENT", 500), ("LEAST", 50)):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[], SqliteStore]]:
    """Opens the same store again, as another process would."""
    opened = []

    def open_() -> SqliteStore:
        store = SqliteStore(tmp_path / "store")
        with store.writing():
            store.set_meta("width", str(WIDTH))
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], SqliteStore]) -> SqliteStore:
    return open_store()


def unit(many: int, seed: int) -> np.ndarray:
    """Vectors like those of texts: around a hundred topics."""
    draw = np.random.default_rng(seed)
    vectors = draw.normal(size=(100, WIDTH))[draw.integers(0, 100, many)] + 0.7 * draw.normal(size=(many, WIDTH))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def fill(store: SqliteStore, vectors: np.ndarray, user: str = "ann", sessions: int = 1) -> None:
    """Writes vectors to a store, in sessions by turns."""
    with store.writing():
        scopes = [Scope(user, None, str(number)) for number in range(sessions)]
        rows = {scope: store.make_scope(scope) for scope in scopes}
        records = [
            Record(new_id(), "x", user, None, str(number % sessions), metadata={"n": number % 10})
            for number in range(len(vectors))
        ]
        store.insert(records, rows, vectors, "encoder")
        for row in rows.values():
            store.advance_scope(row.id, len(vectors) // sessions)


def erase(store: SqliteStore, seq: int) -> None:
    with store.writing():
        store.remove([seq], "delete")
        store.begin_erasing()
    store.finish_erasing()


def select(store: SqliteStore, user: str = "ann", session: str | None = None, n: int | None = None) -> Selection:
    selection = store.select(Scope(user, None, session), {} if n is None else {"n": {"lt": n}})
    assert selection is not None
    return selection


def segments(store: SqliteStore, user: int = 1) -> list[Segment]:
    with store.reading():
        return store.segments(user)


def files(store: SqliteStore) -> set[str]:
    return {path.name for path in store.index_folder.iterdir()}


def catalogue(index: LocalIndex, user: int = 1) -> Catalogue:
    with index.store.reading():
        return index.catalogue(user)


def recall(store: SqliteStore, index: LocalIndex, selection: Selection, many: int = 10) -> float:
    """The share of the nearest, by looking at all of them, that the index finds, over thirty questions."""
    seqs, matrix = store.vectors_between(selection.user, 0, 1 << 40, WIDTH)
    inside = np.ones(len(seqs), dtype=bool)
    if selection.scopes is not None:
        inside &= np.isin(store.rows_after(selection.user, 0)[:, 1], selection.scopes)
    matching = store.matching(selection)
    if matching is not None:
        inside &= np.isin(seqs, matching)
    seqs, matrix = seqs[inside], matrix[inside]
    shares = []
    questions = unit(30, seed=99)
    for vector, (found, cosines) in zip(questions, index.nearest(selection, questions, many), strict=True):
        expected = seqs[np.argsort(-(matrix @ vector), kind="stable")[:many]].tolist()
        assert len(set(found.tolist())) == len(found) == len(expected)
        assert list(cosines) == sorted(cosines, reverse=True)
        shares.append(len(set(found.tolist()) & set(expected)) / len(expected) if expected else 1.0)
    return float(np.mean(shares))


@given(st.integers(0, 30), st.integers(0, 40), st.integers(0, 5))
def test_exact_search_is_sorting(rows: int, many: int, seed: int) -> None:
    matrix = np.round(unit(rows, seed), 1)  # so that there are equals
    vector = np.round(unit(1, seed + 1)[0], 1)
    found, scores = nearest_exact(matrix, vector, many)
    everything = matrix @ vector
    assert scores.tolist() == sorted(everything.tolist(), reverse=True)[:many]
    assert everything[found].tolist() == scores.tolist()
    assert len(set(found.tolist())) == min(rows, many)


def test_a_small_user_is_searched_exactly_and_has_no_files(store: SqliteStore) -> None:
    fill(store, unit(500, 0), sessions=2)
    store.build_index("ann")
    store.build_index("nobody")
    with store.reading():
        for selection in (select(store), select(store, session="1"), select(store, n=3)):
            assert recall(store, store.index, selection) == 1.0
    assert not store.index_folder.exists()


def test_a_large_user_is_found_by_files_whatever_is_selected(store: SqliteStore) -> None:
    fill(store, unit(2_250, 0), sessions=3)
    fill(store, unit(300, 1), user="ben")
    store.build_index("ann")
    made = files(store)
    assert len(made) == 4
    store.build_index("ann")
    store.build_index("ben")
    assert files(store) == made == {segment.file for segment in segments(store)}
    index = store.index
    with store.reading():
        known = index.catalogue(select(store).user)
        assert len(known.files) == 4 and len(known.open_seqs) == 250
        assert recall(store, index, select(store)) >= 0.98
        assert recall(store, index, select(store, session="2")) >= 0.98
        assert recall(store, index, select(store, n=1)) == 1.0  # so few that they are looked at one by one
        assert recall(store, index, select(store, session="1", n=7), many=40) >= 0.98
        assert recall(store, index, select(store, n=0)) == 1.0  # none at all
        assert recall(store, index, select(store, "ben")) == 1.0


def test_files_are_opened_again_and_new_records_are_found_with_them(store: SqliteStore) -> None:
    fill(store, unit(1_000, 0))
    store.build_index("ann")
    index = LocalIndex(store)
    fill(store, unit(30, 5))
    with store.reading():
        assert recall(store, index, select(store)) >= 0.98
        assert len(index.catalogue(1).open_seqs) == 30
    fill(store, unit(30, 6))
    with store.reading():
        assert recall(store, index, select(store)) >= 0.98


def test_an_erased_record_is_in_no_file_and_its_neighbours_are_still_found(store: SqliteStore) -> None:
    vectors = unit(2_000, 0)
    fill(store, vectors)
    index, other = store.index, LocalIndex(store)
    index.build(1)
    assert len(segments(store)) == 4
    catalogue(other)
    trace = vectors[749].astype(np.float16).tobytes()  # files hold vectors of half precision
    assert sum(trace in file.read_bytes() for file in store.index_folder.iterdir()) == 1
    erase(store, 750)
    assert len(files(store)) == 3
    everything = [file for file in store.file.parent.rglob("*") if file.is_file()]
    assert not any(trace in file.read_bytes() or vectors[749].tobytes() in file.read_bytes() for file in everything)
    with store.reading():
        for each in (index, other, LocalIndex(store)):
            assert 750 not in each.nearest(select(store), vectors[749:750], 10)[0][0]
            assert recall(store, each, select(store)) >= 0.98
    index.build(1)
    assert len(segments(store)) == 3  # the hole is not worth a file yet
    fill(store, unit(501, 7))
    index.build(1)
    assert len(segments(store)) == 4  # the five hundred that came
    for seq in (250, 1_250):
        erase(store, seq)
    assert len(segments(store)) == 2
    index.build(1)
    assert len(segments(store)) == 5  # the holes are filled
    assert len(catalogue(index).open_seqs) == 1
    with store.reading():
        for each in (index, other):
            assert recall(store, each, select(store)) >= 0.98


def test_a_replaced_vector_takes_the_place_of_the_old(store: SqliteStore) -> None:
    vectors = unit(1_101, 0)
    fill(store, vectors)
    index = store.index
    index.build(1)
    assert len(segments(store)) == 2
    with store.reading():
        assert recall(store, index, select(store)) >= 0.98
    for seq in (50, 1_100):  # in a file, and in none
        with store.writing():
            found = store.records([seq])[seq]
            store.change(seq, replace(found, text="two words", version=2), -vectors[seq - 1], "encoder", False)
            store.begin_erasing()
        store.finish_erasing()
        with store.reading():
            assert index.nearest(select(store), -vectors[seq - 1 : seq], 1)[0][0].tolist() == [seq]
            known = index.catalogue(1)
            assert known.lengths[known.seqs == seq].tolist() == [2]
            assert recall(store, index, select(store)) >= 0.98


def test_a_change_of_a_record_that_came_later_hides_none_that_came_before_it(store: SqliteStore) -> None:
    fill(store, unit(2, 0))
    catalogue(store.index)
    fill(store, unit(3, 1))
    with store.writing():
        store.change(5, replace(store.records([5])[5], text="two words", version=2), unit(1, 2)[0], "encoder", False)
    assert catalogue(store.index).seqs.tolist() == [1, 2, 3, 4, 5]
    assert catalogue(store.index).open_seqs.tolist() == [1, 2, 3, 4, 5]


def while_building(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], after: bool) -> None:
    """Lets something happen once while a file of the index is being made: before it is on the disk, or after."""
    write, waiting = module.write_atomically, [action]

    def slow(path: Path, data: bytes, private: bool) -> None:
        if after:
            write(path, data, private)
        if waiting:
            waiting.pop()()
        if not after:
            write(path, data, private)

    monkeypatch.setattr(module, "write_atomically", slow)


@pytest.mark.parametrize("after", [False, True])
def test_a_file_made_while_something_of_it_was_erased_does_not_stay(
    open_store: Callable[[], SqliteStore], monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    store, other = open_store(), open_store()
    fill(store, unit(1_000, 0))
    while_building(monkeypatch, lambda: erase(other, 17), after)
    store.build_index("ann")
    assert files(store) == set() and segments(store) == []
    with store.reading():
        assert recall(store, store.index, select(store)) == 1.0


def test_a_file_made_while_its_user_was_erased_does_not_stay(
    open_store: Callable[[], SqliteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(), open_store()
    fill(store, unit(1_000, 0))

    def erase_user() -> None:
        with other.writing():
            other.remove_scope(1)
            other.begin_erasing()
        other.finish_erasing()

    while_building(monkeypatch, erase_user, after=True)
    store.build_index("ann")
    assert files(store) == set() and segments(store) == []


def test_a_small_file_is_the_same_each_time_it_is_made() -> None:
    vectors = unit(1_000, 0)
    assert len({module._make_file(np.arange(1_000), vectors) for _ in range(8)}) == 1


@pytest.mark.parametrize("after", [False, True])
def test_a_file_that_is_being_made_outlives_what_others_erase(
    open_store: Callable[[], SqliteStore], monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    store, other = open_store(), open_store()
    fill(store, unit(1_000, 0))
    fill(store, unit(1, 1), user="ben")
    while_building(monkeypatch, lambda: erase(other, 1_001), after)
    store.build_index("ann")
    assert {segment.file for segment in segments(store)} == files(store)
    assert len(files(store)) == 2
    with other.reading():
        assert recall(other, other.index, select(other)) >= 0.98
        assert all(other.index.catalogue(1).files.values())


def test_the_name_under_which_a_file_is_first_written_is_left_alone(store: SqliteStore) -> None:
    fill(store, unit(1, 0))
    with store.writing():
        store.begin_building("new.usearch")
    store.index_folder.mkdir()
    for name in (".new.usearch.1a2b", "old.usearch"):
        (store.index_folder / name).touch()
    erase(store, 1)
    assert files(store) == {".new.usearch.1a2b"}


def test_two_that_make_the_same_files_register_them_once(
    open_store: Callable[[], SqliteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(), open_store()
    fill(store, unit(1_000, 0))
    while_building(monkeypatch, lambda: other.build_index("ann"), after=False)
    store.build_index("ann")
    assert [(segment.low, segment.high) for segment in segments(store)] == [(1, 500), (501, 1_000)]
    assert {segment.file for segment in segments(store)} == files(store)
    with store.reading():
        assert recall(store, store.index, select(store)) >= 0.98


def test_the_files_of_a_builder_that_died_are_deleted_even_if_it_died_after_the_erasing(
    open_store: Callable[[], SqliteStore],
) -> None:
    store = open_store()
    fill(store, unit(3, 0))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as builder:
        with store.writing():
            store._run("INSERT INTO building VALUES ('theirs.usearch', ?)", (builder.pid,))
        store.index_folder.mkdir()
        (store.index_folder / "theirs.usearch").write_bytes(b"the vectors of all three")
        erase(store, 1)
        assert files(store) == {"theirs.usearch"}  # it may become valid yet
        builder.kill()
    open_store()
    assert files(store) == set()


def test_a_file_that_cannot_be_made_is_no_longer_said_to_be_in_the_making(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, unit(1_000, 0))
    monkeypatch.setattr(module, "write_atomically", lambda *args, **options: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        store.build_index("ann")
    assert store._all("SELECT * FROM building") == []


def damage_file(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if how == "cut" else data[:5000] + b"\xff" * 8 + data[5008:])


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_is_not_used_and_made_again_at_the_next_write(
    open_store: Callable[[], SqliteStore], damage: str, which: int
) -> None:
    store = open_store()
    fill(store, unit(1_000, 0))
    store.build_index("ann")
    old = segments(store)
    damage_file(store.index_folder / old[which].file, damage)
    other = open_store()
    with other.reading():
        assert recall(other, other.index, select(other)) >= 0.98
        assert [each is None for each in other.index.catalogue(1).files.values()] == [which == 0, which == 1]
    fill(other, unit(1, 2))
    other.build_index("ann")
    new = segments(other)
    assert [(each.low, each.high, each.count) for each in new] == [(each.low, each.high, each.count) for each in old]
    assert new[which].file != old[which].file and new[1 - which] == old[1 - which]
    for each in (store, other):
        with each.reading():
            assert all(each.index.catalogue(1).files.values())
            assert recall(each, each.index, select(each)) >= 0.98


def test_memory_is_given_back_when_there_are_many_users(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 50)
    index = store.index
    for number in range(5):
        fill(store, unit(20, number), user=f"user {number}")
        with store.reading():
            assert recall(store, index, select(store, f"user {number}")) == 1.0
    assert len(index._users) == 2
