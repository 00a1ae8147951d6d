from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titans.text import index as module
from titans.text.index import LocalIndex, Selection, nearest_exact
from titans.text.records import Record, Scope, new_id
from titans.text.sqlite import SqliteStore

WIDTH = 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes at which files are made, made small."""
    for name, value in (("EXACT", 2_000), ("SEGMENT", 1_000), ("LEAST", 50)):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "store")


def unit(many: int, seed: int) -> np.ndarray:
    """Vectors like those of texts: around a hundred topics."""
    draw = np.random.default_rng(seed)
    vectors = draw.normal(size=(100, WIDTH))[draw.integers(0, 100, many)] + 0.7 * draw.normal(size=(many, WIDTH))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def fill(store: SqliteStore, vectors: np.ndarray, user: str = "ann", sessions: int = 1) -> None:
    """Writes vectors to a store, in sessions by turns."""
    with store.writing():
        rows = [store.make_scope(Scope(user, None, str(number))) for number in range(sessions)]
        for number, vector in enumerate(vectors):
            row = rows[number % sessions]
            record = Record(new_id(), "x", user, None, str(number % sessions), metadata={"n": number % 10})
            store.insert(record, row, vector, "encoder")
        for row in rows:
            store.advance_scope(row.id, len(vectors) // sessions)


def select(store: SqliteStore, user: str = "ann", session: str | None = None, n: int | None = None) -> Selection:
    row = store.find_user(user)
    assert row is not None
    scopes = None if session is None else store.matching_scopes(row.id, None, session)
    matching = None if n is None else store.matching(row.id, {"n": {"lt": n}})
    return Selection(user, row, scopes, matching)


def recall(store: SqliteStore, index: LocalIndex, selection: Selection, many: int = 10) -> float:
    """The share of the nearest, by looking at all of them, that the index finds, over thirty questions."""
    seqs, matrix = store.vectors_between(selection.user.id, 0, 1 << 40, WIDTH)
    inside = np.ones(len(seqs), dtype=bool)
    if selection.scopes is not None:
        inside &= np.isin(store.rows_after(selection.user.id, 0)[:, 1], selection.scopes)
    if selection.matching is not None:
        inside &= np.isin(seqs, selection.matching)
    seqs, matrix = seqs[inside], matrix[inside]
    shares = []
    for vector in unit(30, seed=99):
        expected = seqs[np.argsort(-(matrix @ vector), kind="stable")[:many]].tolist()
        found, cosines = index.nearest(selection, vector, many)
        assert len(found) == len(expected) and list(cosines) == sorted(cosines, reverse=True)
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
    index = LocalIndex(store, WIDTH)
    assert index.build("ann") == 0
    with store.reading():
        for selection in (select(store), select(store, session="1"), select(store, n=3)):
            assert recall(store, index, selection) == 1.0
    assert not store.index_folder.exists()


def test_a_large_user_is_found_by_files_whatever_is_selected(store: SqliteStore) -> None:
    fill(store, unit(4_500, 0), sessions=3)
    fill(store, unit(300, 1), user="ben")
    index = LocalIndex(store, WIDTH)
    assert index.build("ann") == 4
    assert index.build("ann") == index.build("ben") == 0
    assert len(list(store.index_folder.iterdir())) == 4
    with store.reading():
        known = index.catalogue(select(store).user)
        assert len(known.files) == 4 and len(known.open_seqs) == 500
        assert recall(store, index, select(store)) >= 0.98
        assert recall(store, index, select(store, session="2")) >= 0.98
        assert recall(store, index, select(store, n=1)) == 1.0  # so few that they are looked at one by one
        assert recall(store, index, select(store, session="1", n=7), many=40) >= 0.98
        assert recall(store, index, select(store, n=0)) == 1.0  # none at all
        assert recall(store, index, select(store, "ben")) == 1.0


def test_files_are_opened_again_and_new_records_are_found_with_them(store: SqliteStore) -> None:
    fill(store, unit(2_000, 0))
    LocalIndex(store, WIDTH).build("ann")
    index = LocalIndex(store, WIDTH)
    fill(store, unit(30, 5))
    with store.reading():
        assert recall(store, index, select(store)) >= 0.98
        known = index.catalogue(select(store).user)
        assert len(known.open_seqs) == 30
    fill(store, unit(30, 6))
    with store.reading():
        assert recall(store, index, select(store)) >= 0.98


def erase(store: SqliteStore, seq: int) -> None:
    with store.writing():
        store.remove(seq, "delete")
        store.begin_erasing()
    store.finish_erasing()


def test_an_erased_record_is_in_no_file_and_its_neighbours_are_still_found(store: SqliteStore) -> None:
    vectors = unit(4_000, 0)
    fill(store, vectors)
    index, other = LocalIndex(store, WIDTH), LocalIndex(store, WIDTH)
    assert index.build("ann") == 4
    with store.reading():
        other.catalogue(select(store).user)
    trace = vectors[1_499].astype(np.float16).tobytes()  # files hold vectors of half precision
    assert sum(trace in file.read_bytes() for file in store.index_folder.iterdir()) == 1
    erase(store, 1_500)
    assert len(list(store.index_folder.iterdir())) == 3
    files = [file for file in store.file.parent.rglob("*") if file.is_file()]
    assert not any(trace in file.read_bytes() or vectors[1_499].tobytes() in file.read_bytes() for file in files)
    with store.reading():
        for each in (index, other, LocalIndex(store, WIDTH)):
            found, _ = each.nearest(select(store), vectors[1_499], 10)
            assert 1_500 not in found
            assert recall(store, each, select(store)) >= 0.98
    assert index.build("ann") == 0  # not worth a file yet
    fill(store, unit(1_001, 7))
    assert index.build("ann") == 1  # the thousand that came
    for seq in (500, 2_500):
        erase(store, seq)
    assert index.build("ann") == 3  # the holes are filled
    with store.reading():
        assert len(index.catalogue(select(store).user).open_seqs) == 1
        for each in (index, other):
            assert recall(store, each, select(store)) >= 0.98


def test_a_replaced_vector_takes_the_place_of_the_old(store: SqliteStore) -> None:
    vectors = unit(2_101, 0)
    fill(store, vectors)
    index = LocalIndex(store, WIDTH)
    assert index.build("ann") == 2
    with store.reading():
        assert recall(store, index, select(store)) >= 0.98
    for seq in (50, 2_100):  # in a file, and in none
        with store.writing():
            found = store.records([seq])[seq]
            store.change(seq, replace(found, text="two words", version=2), -vectors[seq - 1], "encoder", False)
            store.begin_erasing()
        store.finish_erasing()
        with store.reading():
            assert index.nearest(select(store), -vectors[seq - 1], 1)[0].tolist() == [seq]
            known = index.catalogue(select(store).user)
            assert known.lengths[known.seqs == seq].tolist() == [2]
            assert recall(store, index, select(store)) >= 0.98


def test_a_file_made_while_something_was_erased_does_not_stay(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, unit(2_000, 0))
    index = LocalIndex(store, WIDTH)
    make = module._make_file

    def slow(seqs: np.ndarray, vectors: np.ndarray) -> bytes:
        data = make(seqs, vectors)
        if seqs[0] == 1:
            erase(store, 17)
        return data

    monkeypatch.setattr(module, "_make_file", slow)
    assert index.build("ann") == 0
    assert list(store.index_folder.iterdir()) == []
    monkeypatch.setattr(module, "_make_file", make)
    with store.reading():
        assert recall(store, index, select(store)) == 1.0


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_file_is_not_used(store: SqliteStore, damage: str) -> None:
    fill(store, unit(2_000, 0))
    LocalIndex(store, WIDTH).build("ann")
    file = sorted(store.index_folder.iterdir())[0]
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else data[:5000] + b"\xff" * 8 + data[5008:])
    index = LocalIndex(store, WIDTH)
    with store.reading():
        assert recall(store, index, select(store)) >= 0.98
        assert len(index.catalogue(select(store).user).files) == 1


def test_memory_is_given_back_when_there_are_many_users(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 50)
    index = LocalIndex(store, WIDTH)
    for number in range(5):
        fill(store, unit(20, number), user=f"user {number}")
        with store.reading():
            assert recall(store, index, select(store, f"user {number}")) == 1.0
    assert len(index._users) == 2
