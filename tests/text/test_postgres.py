from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titans.text.records import DamagedStore, Record, Scope, StoreError
from titans.text.sqlite import SqliteStore
from titans.text.store import FORMAT, ScopeRow, Selection, State, Store

psycopg = pytest.importorskip("psycopg")
postgres_schema = pytest.importorskip("titans.text.postgres_schema")
postgres_search = pytest.importorskip("titans.text.postgres_search")

from tests.text.postgres_server import PASSWORD, PostgresServer  # noqa: E402
from titans.text.postgres import PostgresStore  # noqa: E402

WIDTH = 8
WORDS = [*"the cat dog likes eats ran running quickly house sea café Straße bread 猫 milk 42 blue".split()]  # noqa: SIM905
SCOPES = [Scope("ann"), Scope("ann", "helper"), Scope("ann", None, "monday"), Scope("ben"), Scope("a", "nn")]
FILTERS: list[dict[str, Any]] = [
    {"n": {"eq": 1}}, {"n": {"eq": 1.0}}, {"n": {"ne": 1}}, {"n": {"gte": 0.5, "lt": 3}}, {"n": {"eq": True}},
    {"n": {"in": [1, "1", False]}}, {"n": {"eq": "1"}}, {"n": {"gt": "0"}}, {"n": {"lte": 9007199254740992}},
    {"n": {"in": []}}, {"missing": {"ne": 1}}, {"n": {"ne": True}, "who": {"eq": "Zoë"}}, {"who": {"lt": "a"}},
]  # fmt: skip
VALUES = [1, 1.0, 0, 2.5, -1, True, False, "1", "one", None, [1], {"n": 1}, 9007199254740993, 0.1]


def unit(draw: np.random.Generator, many: int) -> np.ndarray:
    """Some vectors of length 1."""
    made = draw.standard_normal((many, WIDTH)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def new_records(draw: random.Random, scopes: list[Scope], many: int) -> list[Record]:
    """Random records of random scopes."""
    made = []
    for _ in range(many):
        scope, at = draw.choice(scopes), f"2026-01-{draw.randint(1, 28):02d}T00:00:00.000000+00:00"
        metadata = {"n": draw.choice(VALUES), "who": draw.choice(["Zoë", "Al"])} if draw.random() < 0.8 else {}
        made.append(
            Record(
                id=f"{draw.getrandbits(64):016x}", text=" ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
                user=scope.user, agent=scope.agent, session=scope.session, role=draw.choice([None, "user"]),
                metadata=metadata, created=at, updated=at, surprise=draw.random(),
            )
        )  # fmt: skip
    return made


def write(store: Store, records: list[Record], vectors: np.ndarray) -> list[int]:
    """Adds records as a memory does, without one."""
    with store.writing():
        rows: dict[Scope, ScopeRow] = {}
        for scope in sorted({record.scope for record in records}, key=lambda scope: scope.names):
            rows[scope] = store.make_scope(scope)
            store.advance_scope(rows[scope].id, sum(record.scope == scope for record in records))
        return store.insert(records, rows, vectors, "encoder")


def mark(store: Store) -> None:
    """Notes in a store what a memory would note."""
    with store.writing(alone=True):
        store.set_meta("encoder", "encoder")
        store.set_meta("width", str(WIDTH))


@pytest.fixture
def open_store(new_schema: Callable[[str], str]) -> Iterator[Callable[..., PostgresStore]]:
    """Opens stores by name, those of one name in the same schema."""
    urls: dict[str, str] = {}
    opened: list[PostgresStore] = []

    def open_(name: str = "store", **options: Any) -> PostgresStore:
        opened.append(PostgresStore(urls.setdefault(name, new_schema(name)), **options))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., PostgresStore]) -> PostgresStore:
    made = open_store()
    mark(made)
    return made


# The same as SQLite


class Pair:
    """A store in SQLite and one in PostgreSQL that get the same calls, and what both say, by the ids of records."""

    def __init__(self, file: Path, other: PostgresStore) -> None:
        self.stores: tuple[Store, Store] = (SqliteStore(file), other)
        for each in self.stores:
            mark(each)

    def both(self, work: Callable[[Store], Any]) -> Any:
        """What a call gives, which is the same in both."""
        with self.stores[0].reading(), self.stores[1].reading():
            one, other = (work(store) for store in self.stores)
        assert one == other
        return one

    def write(self, work: Callable[[Store], object]) -> None:
        """Writes the same to both."""
        for each in self.stores:
            with each.writing():
                work(each)


def ids(store: Store, seqs: Any) -> list[str]:
    return [record.id for record in store.records(int(seq) for seq in seqs).values()]


def change_something(pair: Pair, draw: random.Random, numbers: np.random.Generator) -> None:
    """A random change of a random record, or of a scope."""
    known = pair.both(lambda store: [record.id for record in store.list_records(None)])
    id = draw.choice(known)
    kind = draw.choice(["remove", "text", "metadata", "repeat", "replace", "surprise", "uses", "states", "scope"])
    vector, word, data = unit(numbers, 1)[0], draw.choice(WORDS), {"n": draw.choice(VALUES)}
    others, kept = draw.sample(known, min(3, len(known))), draw.random() < 0.5

    def change(store: Store) -> None:
        seq, record = store.find(id, None) or (0, None)
        assert record is not None
        scope = next(iter(store.lock_scopes([seq])))
        new = replace(record, version=record.version + 1, updated="2026-02-01T00:00:00.000000+00:00")
        if kind == "remove":
            for row, members in store.lock_scopes(store.find(other, None)[0] for other in others).items():  # type: ignore[index]
                store.advance_scope(row.id, -len(members))
                store.remove(members, "delete")
        elif kind == "text":
            store.change(seq, replace(new, text=record.text + " " + word), vector, "encoder", kept)
        elif kind == "metadata":
            store.change(seq, replace(new, metadata=data), None, "", kept)
        elif kind == "repeat":
            store.repeat(seq, "2026-03-01T00:00:00.000000+00:00")
        elif kind == "replace":
            newer = replace(record, id="newer " + id, replaces=id)
            store.advance_scope(scope.id, 1)
            store.insert([newer], {record.scope: scope}, vector[None], "encoder")
        elif kind == "surprise":
            store.set_surprises([(seq, 0.25)])
        elif kind == "uses":
            assert store.add_uses({seq: 2}) == {}
        elif kind == "states":
            store.put_states(scope.id, [State(2, b"two"), State(4, b"four")])
            store.drop_states(scope.id, 3)
        elif len(known) > 20:
            number = store.matching_scopes(record.scope, below=False)
            assert len(number) == 1
            store.remove_scope(number[0])

    pair.write(change)


@pytest.mark.parametrize("seed", range(3))
def test_both_engines_say_the_same_after_any_changes(seed: int, tmp_path: Path, store: PostgresStore) -> None:
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    pair = Pair(tmp_path / "store.sqlite3", store)
    for many in (10, 30, 40):
        records, vectors = new_records(draw, SCOPES, many), unit(numbers, many)
        for each in pair.stores:
            write(each, records, vectors)
        for _ in range(8):
            change_something(pair, draw, numbers)
    for each in pair.stores:
        assert each.check() == []
    compare(pair, draw, unit(numbers, 6))
    pair.stores[0].close()


def compare(pair: Pair, draw: random.Random, vectors: np.ndarray) -> None:
    """Asks both everything."""
    both = pair.both
    everything = both(lambda store: list(store.list_records(None)))
    assert everything == both(lambda store: [store.find(record.id, record.user)[1] for record in everything])  # type: ignore[index]
    assert both(lambda store: store.find(everything[0].id, "nobody")) is None
    both(lambda store: [(event.kind, event.text) for record in everything for event in store.history(record.id, "ann")])
    both(lambda store: store.count())
    both(lambda store: [text for _, _, text in store.texts()])
    both(lambda store: [row[1:] for row in store.weighed()])
    both(lambda store: store.newest_versions([record.id for record in everything]))
    for user in (None, "ann", "nobody"):
        both(lambda store, user=user: store.list_scopes(user))
        figures = both(lambda store, user=user: {**store.stats(user), "mean_surprise": 0, "events": 0})
        assert figures["records"] == sum(user in (None, record.user) for record in everything)
    for scope in SCOPES:
        both(lambda store, scope=scope: of_scope(store, scope, everything))
        for exact in (False, True):
            for tests in ({}, {"n": {"lt": 9007199254740993}}, *draw.sample(FILTERS, 3)):
                words = draw.choices([*WORDS, "cats", "strasse", "nothing"], k=4)
                both(lambda store, s=scope, t=tests, e=exact, w=words: found(store, s, t, e, w, vectors))


def of_scope(store: Store, scope: Scope, everything: list[Record]) -> Any:
    """What a store knows of an exact scope."""
    row = store.find_scope(scope)
    if row is None:
        return None
    seqs = store.scope_seqs(row.id)
    named = [
        tuple(ids(store, [seq])[0] if seq is not None else None for seq in pair) for pair in store.neighbours(seqs)
    ]
    same = store.find_same(row.id, everything)
    return (
        row.count, row.version, ids(store, seqs), ids(store, store.scope_seqs(row.id, 2)), named,
        {place: ids(store, [seq]) for place, seq in same.items()}, store.find_state(row.id, 9),
        store.vectors(seqs, WIDTH).tobytes(),
        np.round(store.products(seqs, unit(np.random.default_rng(3), 2)), 5).tolist(),
        len(store.matching_scopes(scope, below=True)),
    )  # fmt: skip


def found(store: Store, scope: Scope, tests: Any, exact: bool, words: list[str], vectors: np.ndarray) -> Any:
    """What a store finds by names, tests, words and vectors."""
    selection = store.select(scope, tests, exact)
    if selection is None:
        return None
    assert selection.scopes is None or len(selection.scopes) == len(store.rows_of(selection, 100))
    matches = store.find_words(selection, words, 10)
    some = store.find_words(selection, words, 10, most=5)
    near = [*store.nearest(selection, vectors[:1], 5), *store.nearest(selection, vectors, 1000)]
    for name in ("Zoë", "Al"):  # in the same view
        other = store.select(scope, {"who": {"eq": name}}, exact)
        near += [] if other is None else store.nearest(other, vectors[:1], 1000)
    return (
        [record.id for record in store.newest(selection, 7).values()],
        [store.list_scopes(scope.user)[0][1], [row.count for row in store.rows_of(selection, 2)]],
        [(id, round(score, 9)) for id, score in zip(ids(store, matches.scores), matches.scores.values(), strict=True)],
        (ids(store, some.scores), some.ignored),
        [(ids(store, seqs), np.round(cosines, 4).tolist()) for seqs, cosines in near],
    )


# Large users


@pytest.fixture
def large(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> tuple[PostgresStore, np.ndarray]:
    """A user with an index, in three scopes of 20, 60 and 400 records, and the vectors in the order of numbers."""
    monkeypatch.setattr(postgres_search, "EXACT", 50)
    draw, vectors = random.Random(0), unit(np.random.default_rng(0), 480)
    records = [
        record
        for scope, many in zip(SCOPES, (20, 60, 400), strict=False)
        for record in new_records(draw, [scope], many)
    ]
    write(store, new_records(draw, [Scope("ben")], 30), unit(np.random.default_rng(1), 30))
    write(store, records, vectors)
    store.build_index("ann")
    return store, vectors


def uses_the_index(store: PostgresStore, work: Callable[[], Any]) -> bool:
    """Whether the server read an index of vectors for it, even if that is not worth it for a few records."""
    store._run("SET LOCAL enable_sort = off")
    sql = (
        "SELECT coalesce(sum(pg_stat_get_xact_numscans(indexrelid)), 0)::int8 FROM pg_index"
        " WHERE indrelid = 'vectors'::regclass AND indpred IS NOT NULL"
    )
    before = store._value(sql)
    work()
    return bool(store._value(sql) > before)


@pytest.mark.parametrize(
    ("selection", "many", "index"),
    [
        ((None, None), 10, True),  # all records of the user
        ((Scope("ann", None, "monday"), None), 10, True),  # most of them
        ((Scope("ann", "helper"), None), 10, True),  # an eighth of them: more is asked of the index
        ((Scope("ann", "helper"), None), 70, False),  # so many of them that the index could not tell
        ((Scope("ann"), None), 10, True),
        ((None, {"who": {"eq": "Zoë"}}), 10, True),
        ((None, {"n": {"eq": "one"}}), 10, False),
        ((None, None), 1000, True),
        ((None, None), 1001, False),
    ],
)
def test_what_an_index_finds_is_what_is_there(
    large: tuple[PostgresStore, np.ndarray], selection: Any, many: int, index: bool
) -> None:
    store, vectors = large
    scope, tests = selection
    with store.reading():
        chosen = store.select(scope or Scope("ann"), tests or {})
        assert chosen is not None
        assert uses_the_index(store, lambda: store.nearest(chosen, vectors[:1], many)) == index
        every = list(store.newest(chosen, 1000).values())
        for vector in vectors[::40]:
            seqs, cosines = store.nearest(chosen, vector[None], many)[0]
            assert len(set(seqs.tolist())) == len(seqs) == min(many, len(every))
            assert set(ids(store, seqs)) <= {record.id for record in every}
            exact = store._compare(store._select_vectors(chosen), vector, many)
            assert len({*seqs.tolist()} & {*exact[0].tolist()}) >= 0.9 * len(seqs)
            assert np.allclose(np.sort(cosines)[::-1], cosines) and cosines[0] == pytest.approx(exact[1][0], abs=1e-6)


def test_an_index_follows_what_is_written_and_erased(large: tuple[PostgresStore, np.ndarray]) -> None:
    store, _ = large
    new = unit(np.random.default_rng(5), 3)
    added = write(store, new_records(random.Random(1), [Scope("ann", None, "monday")], 3), new)
    with store.reading():
        user = Selection(store._user_id("ann") or 0)
        assert [int(store.nearest(user, vector[None], 1)[0][0][0]) for vector in new] == added
    with store.writing():
        for row, members in store.lock_scopes(added).items():
            store.advance_scope(row.id, -len(members))
            store.remove(members, "delete")
    with store.reading():
        assert not {*added} & {*store.nearest(user, new[:1], 200)[0][0].tolist()}
    assert store.check() == []


def test_several_vectors_are_looked_for_at_once_in_the_same_view(
    large: tuple[PostgresStore, np.ndarray], open_store: Callable[..., PostgresStore]
) -> None:
    store, vectors = large
    other, asked = open_store(), vectors[[3, 100, 200]]
    with store.reading():
        user = Selection(store._user_id("ann") or 0)
        alone = [store.nearest(user, each[None], 5)[0][0].tolist() for each in asked]
        write(other, new_records(random.Random(2), [Scope("ann")], 3), asked)  # which is not seen, by any connection
        assert [seqs.tolist() for seqs, _ in store.nearest(user, asked, 5)] == alone
        store._places = threading.BoundedSemaphore(1)
        store._places.acquire()  # no other connection is free
        assert [seqs.tolist() for seqs, _ in store.nearest(user, asked, 5)] == alone
    with other.reading():
        assert all(seqs[1] == before[0] for (seqs, _), before in zip(other.nearest(user, asked, 5), alone, strict=True))


def test_an_index_that_was_not_finished_is_built_again(large: tuple[PostgresStore, np.ndarray]) -> None:
    store, vectors = large
    with store._outside() as connection:
        connection.execute(
            "UPDATE pg_index SET indisvalid = false WHERE indpred IS NOT NULL AND indrelid = 'vectors'::regclass"
        )  # as a killed process leaves it
    with store.reading():
        user = Selection(store._user_id("ann") or 0)
        assert not uses_the_index(store, lambda: store.nearest(user, vectors[:1], 5))
    store.build_index("ann")
    with store.reading():
        assert uses_the_index(store, lambda: store.nearest(user, vectors[:1], 5))


def test_an_index_goes_with_its_user_and_with_its_encoder(large: tuple[PostgresStore, np.ndarray]) -> None:
    store, _ = large
    with store.reading():
        assert len(store._index_names()) == 1
        seqs = [seq for seq, _, _ in store.texts()]
    wider = np.concatenate([unit(np.random.default_rng(2), len(seqs))] * 2, axis=1) / np.sqrt(2).astype(np.float32)
    with store.writing(alone=True):  # another encoder, of another width
        store.replace_vectors(zip(seqs, wider, strict=True), "other")
        store.set_meta("encoder", "other")
        store.set_meta("width", str(2 * WIDTH))
    store.finish_erasing()
    with store.reading():
        assert store._index_names() == []
        assert store.vectors(seqs[:2], 2 * WIDTH).tobytes() == wider[:2].tobytes()
    store.build_index("ann")
    with store.reading():
        user = Selection(store._user_id("ann") or 0)
        assert uses_the_index(store, lambda: store.nearest(user, wider[:1], 5))
    with store.writing():
        for number in store.matching_scopes(Scope("ann"), below=True):
            store.remove_scope(number)
    store.finish_erasing()
    with store.reading():
        assert store._index_names() == [] and store._user_id("ann") is None
    assert store.check() == []


def test_only_one_process_builds_at_a_time(large: tuple[PostgresStore, np.ndarray]) -> None:
    store, _ = large
    with store.reading():
        (name,) = store._index_names()
    with store._outside() as connection:
        connection.execute(f"DROP INDEX {name}")
        connection.execute("SELECT pg_advisory_lock(%s)", (postgres_schema.lock_key("index", store.schema),))
        store.build_index("ann")
        assert connection.execute("SELECT to_regclass(%s)", (name,)).fetchone()[0] is None
    store.build_index("ann")
    with store.reading():
        assert store._index_names() == [name]


# Many writers


def test_writers_to_different_scopes_do_not_wait_for_each_other(open_store: Callable[..., PostgresStore]) -> None:
    one, other = open_store(), open_store()
    mark(one)
    draw = random.Random(0)
    write(one, new_records(draw, [Scope("ann")], 1), unit(np.random.default_rng(0), 1))
    with one.writing():
        row = one.make_scope(Scope("ann"))
        # Of the same user, new and old, while the first is in the middle of its transaction.
        for scope in (Scope("ann", "helper"), Scope("ann", "helper"), Scope("ben")):
            write(other, new_records(draw, [scope], 2), unit(np.random.default_rng(0), 2))
        started = time.monotonic()
        waiting = threading.Thread(
            target=lambda: write(other, new_records(draw, [Scope("ann")], 1), unit(np.random.default_rng(0), 1))
        )
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "two writers to one scope at the same time"
    waiting.join(10)
    assert not waiting.is_alive() and time.monotonic() - started < 10
    with one.reading():
        assert one.find_scope(Scope("ann")) == replace(row, count=2, version=row.version + 1)
    assert one.check() == []


def test_a_busy_scope_is_said_in_a_sentence(open_store: Callable[..., PostgresStore], monkeypatch: Any) -> None:
    one, other = open_store(), open_store()
    monkeypatch.setattr("titans.text.postgres_connection.PATIENCE", 0.2)
    with one.writing():
        one.make_scope(Scope("ann"))
        with pytest.raises(StoreError, match=r"is busy: others have been writing for 0.2 seconds$"), other.writing():
            other.make_scope(Scope("ann"))
    with other.writing():
        other.make_scope(Scope("ann"))


def test_who_is_alone_waits_for_all_writers_and_they_for_it(open_store: Callable[..., PostgresStore]) -> None:
    one, other = open_store(), open_store()
    said: list[str] = []

    def work() -> None:
        with other.writing(alone=True):
            said.append("alone")

    with one.writing():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.3)
        said.append("writer")
    thread.join(10)
    assert said == ["writer", "alone"]


def test_writers_that_lock_many_scopes_never_wait_in_a_circle(open_store: Callable[..., PostgresStore]) -> None:
    stores = [open_store() for _ in range(3)]
    mark(stores[0])
    failures: list[BaseException] = []

    def work(store: PostgresStore, seed: int) -> None:
        draw, numbers = random.Random(seed), np.random.default_rng(seed)
        try:
            mine: list[int] = []
            for _ in range(6):
                records = new_records(draw, SCOPES, 4)
                mine += write(store, records, unit(numbers, 4))
                with store.writing():
                    gone = draw.sample(mine, 2)
                    for row, members in store.lock_scopes(gone).items():
                        store.advance_scope(row.id, -len(members))
                        store.remove(members, "delete")
                    store.add_uses(dict.fromkeys(range(1, 40), 1))
                with store.writing():
                    for number in store.matching_scopes(Scope("ann", None, "monday"), below=False):
                        store.remove_scope(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(store, seed)) for seed, store in enumerate(stores * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert stores[0].check() == []


def test_a_user_who_is_erased_while_another_writes_is_erased_in_the_end(
    open_store: Callable[..., PostgresStore],
) -> None:
    one, other = open_store(), open_store()
    mark(one)
    write(one, new_records(random.Random(0), [Scope("ann")], 1), unit(np.random.default_rng(0), 1))

    def erase() -> None:
        with one.writing():
            for number in one.matching_scopes(Scope("ann"), below=True):
                one.remove_scope(number)

    with pytest.raises(RuntimeError), other.writing():
        other.make_scope(Scope("ann", "helper"))
        erase()
        with one.reading():
            assert one._user_id("ann") is not None  # the other one's scope needs it
        raise RuntimeError
    erase()
    with one.reading():
        assert one._user_id("ann") is None


def test_uses_of_a_record_that_another_is_changing_are_added_later(open_store: Callable[..., PostgresStore]) -> None:
    one, other = open_store(), open_store()
    mark(one)
    seqs = write(one, new_records(random.Random(0), [Scope("ann")], 2), unit(np.random.default_rng(0), 2))
    with one.writing():
        one.set_surprises([(seqs[0], 0.5)])
        with other.writing():
            assert other.add_uses({seqs[0]: 2, seqs[1]: 3, 999: 1}) == {seqs[0]: 2}
    with other.writing():
        assert other.add_uses({seqs[0]: 2}) == {}
    with one.reading():
        assert [record.uses for record in one.records(seqs).values()] == [2, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_forked_process_has_connections_of_its_own(store: PostgresStore) -> None:
    with store.reading():
        assert store.count() == 0
        process = os.fork()
        if not process:
            code = 1
            try:
                write(store, new_records(random.Random(0), [Scope("ann")], 3), unit(np.random.default_rng(0), 3))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(process, 0)[1] == 0
        assert store.count() == 0  # still the view from before
    with store.reading():
        assert store.count() == 3


def test_more_threads_than_connections_take_turns(store: PostgresStore) -> None:
    counts: list[int] = []

    def work() -> None:
        for _ in range(3):
            with store.reading():
                time.sleep(0.01)
                counts.append(store.count())

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == [0] * 60


# What can go wrong


def test_what_is_raised_undoes_the_transaction(store: PostgresStore) -> None:
    with pytest.raises(RuntimeError), store.writing():
        store.set_meta("new", "value")
        raise RuntimeError
    with pytest.raises(StoreError, match="a step of the transaction had failed"), store.writing():
        store.set_meta("new", "value")
        with pytest.raises(psycopg.Error):
            store._run("SELECT nonsense")
    with store.reading():
        assert store.get_meta("new") is None


def test_a_server_that_is_away_is_said_at_once_and_found_again(
    postgres_server: PostgresServer, open_store: Callable[..., PostgresStore]
) -> None:
    store = open_store()
    mark(store)
    draw = random.Random(0)
    seqs = write(store, new_records(draw, SCOPES, 5), unit(np.random.default_rng(0), 5))
    with pytest.raises(StoreError, match=r"^postgresql://.* does not answer: "), store.writing():
        store.set_meta("half", "written")
        postgres_server.kill()
        store.set_meta("half", "written")
    try:
        started = time.monotonic()
        for call in (store.reading, store.writing, lambda: PostgresStore(store.name.replace(":***", ""))):
            with pytest.raises(StoreError, match="does not answer"), call():
                raise AssertionError("never reached")
        assert time.monotonic() - started < 5
    finally:
        postgres_server.start()
    with store.reading():
        assert store.get_meta("half") is None
        assert len(store.records(seqs)) == 5
    write(store, new_records(draw, SCOPES, 5), unit(np.random.default_rng(0), 5))
    assert store.check() == []


def test_a_wrong_url_or_account_is_said_without_the_password(postgres_server: PostgresServer) -> None:
    schema = f"x{uuid.uuid4().hex[:8]}"
    postgres_server.execute(f"ALTER ROLE postgres PASSWORD '{PASSWORD}'")
    nowhere = postgres_server.tcp_url(schema).replace(f":{postgres_server.port}/", ":1/")
    cases = {
        postgres_server.tcp_url(
            schema, password="s3cret"
        ): r'refuses: password authentication failed for user "postgres"',
        postgres_server.tcp_url(schema, database="nobody"): r'refuses: database "nobody" does not exist',
        nowhere: "does not answer: .*[Cc]onnection refused",
        f"postgresql://ann:{PASSWORD}%zz@h/d": "is no URL of a PostgreSQL database",
        postgres_server.tcp_url("s" * 64): "schema is 's{64}'; expected a name of 1 to 63 bytes",
    }
    for url, words in cases.items():
        with pytest.raises(StoreError, match=words) as raised:
            PostgresStore(url)
        assert "s3cret" not in str(raised.value) and "\n" not in str(raised.value)
    with PostgresStore(postgres_server.tcp_url(schema)).reading():
        pass


def test_an_account_without_rights_and_a_missing_extension_are_said(postgres_server: PostgresServer) -> None:
    name = f"bare{uuid.uuid4().hex[:8]}"
    postgres_server.execute(f"CREATE DATABASE {name}")
    postgres_server.execute(f"CREATE ROLE {name} LOGIN")
    url = postgres_server.url("memory", user=name, database=name)
    with pytest.raises(StoreError, match=r"lacks the extension pgvector, and it cannot be added \(permission denied"):
        PostgresStore(url)
    postgres_server.execute("CREATE EXTENSION vector", name)
    with pytest.raises(StoreError, match="cannot be written: permission denied for database"):
        PostgresStore(url)
    with pytest.raises(StoreError, match="there is no memory store at"):
        PostgresStore(url, read_only=True)
    postgres_server.execute(f"GRANT CREATE ON DATABASE {name} TO {name}", name)
    store = PostgresStore(url)  # an ordinary account is enough
    mark(store)
    write(store, new_records(random.Random(0), SCOPES, 3), unit(np.random.default_rng(0), 3))
    with store.reading():
        assert store.nearest(Selection(1), unit(np.random.default_rng(0), 1), 5)
    store.close()
    reads = f"{name}reads"
    postgres_server.execute(f"CREATE ROLE {reads} LOGIN; GRANT USAGE ON SCHEMA memory TO {reads}", name)
    postgres_server.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA memory TO {reads}", name)
    reader = PostgresStore(postgres_server.url("memory", user=reads, database=name))
    with reader.reading():
        assert reader.count() == 3
    with pytest.raises(StoreError, match="cannot be written: permission denied for table meta"), reader.writing():
        reader.set_meta("a", "b")
    reader.close()


def test_another_programs_schema_and_a_newer_format_are_refused_and_not_touched(
    postgres_server: PostgresServer, store: PostgresStore
) -> None:
    other = f"other{uuid.uuid4().hex[:8]}"
    postgres_server.execute(f"CREATE SCHEMA {other} CREATE TABLE mine (x int)")
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"has tables, but is not a memory store; choose another one$"):
            PostgresStore(postgres_server.url(other), read_only)
    assert postgres_server.execute(f"SELECT count(*) FROM pg_class WHERE relnamespace = '{other}'::regnamespace") == [
        (1,)
    ]
    with store.writing():
        store.set_meta("format", str(FORMAT + 1))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=f"has format {FORMAT + 1} and was made by a newer version of titans"):
            PostgresStore(postgres_server.url(store.schema), read_only)


def test_an_older_format_is_brought_up_to_date_in_one_transaction(
    postgres_server: PostgresServer, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.url(store.schema)
    for module in ("postgres_schema", "postgres_connection"):
        monkeypatch.setattr(f"titans.text.{module}.FORMAT", FORMAT + 1)
    with pytest.raises(
        StoreError, match=f"has format {FORMAT}; open it once to write, which brings it to {FORMAT + 1}"
    ):
        PostgresStore(url, read_only=True)
    monkeypatch.setitem(postgres_schema.UPGRADES, FORMAT, "ALTER TABLE meta ADD note text; SELECT nonsense")
    with pytest.raises(StoreError, match="cannot be written: "):
        PostgresStore(url)
    with store.reading():
        assert store.get_meta("format") == str(FORMAT)
    monkeypatch.setitem(postgres_schema.UPGRADES, FORMAT, "ALTER TABLE meta ADD note text")
    upgraded = [PostgresStore(url), PostgresStore(url)]  # the second finds nothing left to do
    with upgraded[1].reading():
        assert upgraded[1]._one("SELECT value, note FROM meta WHERE key = 'format'") == (str(FORMAT + 1), None)
    for each in upgraded:
        each.close()


def test_a_store_of_the_format_before_is_upgraded(postgres_server: PostgresServer, store: PostgresStore) -> None:
    with store.writing():
        store._run("DROP TABLE requests")
        store.set_meta("format", "2")
    upgraded = PostgresStore(postgres_server.url(store.schema))
    with upgraded.writing():
        assert upgraded.get_meta("format") == str(FORMAT)
        assert upgraded.find_request(1, "a key") is None
    upgraded.close()


def test_many_can_make_a_store_at_once(new_schema: Callable[[str], str]) -> None:
    url, made, failures = new_schema("new"), [], []

    def work() -> None:
        try:
            made.append(PostgresStore(url))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == [] and len(made) == 4
    for each in made:
        each.close()


def test_a_store_that_is_closed_or_opened_to_read_is_not_written(open_store: Callable[..., PostgresStore]) -> None:
    mark(open_store())
    store = open_store(read_only=True)
    with store.reading():
        assert store.get_meta("encoder") == "encoder"
    with pytest.raises(StoreError, match="was opened to read only"), store.writing():
        pass
    store.close()
    with pytest.raises(StoreError, match="is closed"), store.reading():
        pass


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE records SET text = 'other' WHERE seq = 1", "is not what was written"),
        ("UPDATE vectors SET vector = '[1,0,0,0,0,0,0,0]' WHERE seq = 1", "the vector of record number 1 is not"),
        ("DELETE FROM vectors WHERE seq = 1", "1 records have no vector"),
        ("DELETE FROM records WHERE seq = 1", "vectors has 1 rows of records that are not there"),
        ("UPDATE scopes SET count = 9", "scope number 1 has 3 records"),
    ],
)
def test_damage_is_noticed(store: PostgresStore, damage: str, problem: str) -> None:
    seqs = write(store, new_records(random.Random(0), [Scope("ann")], 3), unit(np.random.default_rng(0), 3))
    assert store.check() == [] and seqs == [1, 2, 3]
    with store.writing():
        store._run(damage)
    assert any(problem in said for said in store.check())
    if "scope" not in damage and "DELETE FROM records" not in damage:
        with pytest.raises(DamagedStore), store.reading():
            store.records([1])
            store.vectors([1], WIDTH)


def test_a_damaged_state_is_passed_over(store: PostgresStore) -> None:
    with store.writing():
        store.put_states(7, [State(2, b"two"), State(4, b"four")])
        store._run("UPDATE states SET state = 'fuor' WHERE count = 4")
    with store.reading():
        assert store.find_state(7, 9) == b"two"
        assert store.find_state(7, 1) is None


# Erasing


def test_what_is_erased_is_in_no_table_and_after_compacting_in_no_file(
    postgres_server: PostgresServer, store: PostgresStore
) -> None:
    numbers, traces = np.random.default_rng(), list[bytes]()
    for erase in ("remove", "change", "remove_scope"):
        names = [uuid.uuid4().hex for _ in range(5)]
        scope, vectors = Scope(names[0], names[1]), unit(numbers, 2)
        records = [replace(record, role=names[2]) for record in new_records(random.Random(erase), [scope], 2)]
        secret = replace(records[0], text=f"The key is {names[3]}", metadata={"hint": names[4]})
        seq = write(store, [secret, records[1]], vectors)[0]
        with store._outside() as connection:  # the server takes samples for its planner now and then
            connection.execute(f"ANALYZE {', '.join(postgres_schema.TABLES)}")
        traces += [vectors[0].astype(">f4").tobytes(), vectors[0].tobytes(), names[3].encode(), names[4].encode()]
        with store.writing():
            (row,) = store.lock_scopes([seq])
            if erase == "remove":
                store.advance_scope(row.id, -1)
                store.remove([seq], "delete")
            elif erase == "change":
                store.change(seq, replace(secret, text="gone", metadata={}), unit(numbers, 1)[0], "encoder", False)
            else:
                store.remove_scope(row.id)
                traces += [name.encode() for name in names]
            store.begin_erasing()
        store.finish_erasing()
    assert store.check() == []
    with store._outside() as connection:
        kept = str(connection.execute("SELECT * FROM pg_stats WHERE schemaname = current_schema()").fetchall()).encode()
        for table in postgres_schema.TABLES:
            with connection.cursor().copy(f"COPY {table} TO STDOUT (FORMAT BINARY)") as copy:
                kept += b"".join(map(bytes, copy))
    assert [trace for trace in traces if trace in kept] == []
    store.compact()
    postgres_server.execute("CHECKPOINT")
    files = b"".join(
        file.read_bytes() for file in (postgres_server.folder / "data" / "base").rglob("*") if file.is_file()
    )
    assert secret.created.encode() in files and [trace for trace in traces if trace in files] == []
