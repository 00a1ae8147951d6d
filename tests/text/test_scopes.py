from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.text.conftest import Opener, Place
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.records import Hit, Scope, UnknownRecord

USERS = ("ann", "ben", "ann%", "Ann", "1")
TEXTS = [
    "The cat sleeps on the sofa.", "The cat sleeps.", "My key is under the mat.", "A key opens the door.",
    "Dinner is at eight.", "Dinner was late.", "Ann lives in Oslo.", "Ann lives in Lima.",
]  # fmt: skip
NAMES = st.sampled_from([None, "x", "y"])
KINDS = [
    "add", "add", "add", "add", "search", "use", "update", "delete", "delete_all", "records", "surprise", "history",
]  # fmt: skip
CALLS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(USERS), NAMES, NAMES, st.integers(0, len(TEXTS) - 1)),
    min_size=4,
    max_size=14,
)


def shown(hit: Hit, texts: dict[str, str]) -> tuple[Any, ...]:
    """All that a hit tells, but for random ids and its time."""
    places = (hit.cosine_rank, hit.bm25_rank, hit.neural_rank)
    values = [None if value is None else round(value, 5) for value in (hit.score, hit.cosine, hit.bm25, hit.neural)]
    newest = None if hit.replaced_by is None else texts[hit.replaced_by]
    return (hit.record.text, hit.record.scope, hit.record.metadata, hit.record.repeats, newest, places, *values)


def take(memory: Memory, ids: dict[str, list[str]], call: tuple[str, str, str | None, str | None, int]) -> Any:
    """Makes a call for a user; returns all that it tells. Every record that comes back must be the user's."""
    kind, user, agent, session, number = call
    scope: dict[str, Any] = {"user": user, "agent": agent, "session": session}
    mine = ids.setdefault(user, [])
    if kind == "add":
        record = memory.add(TEXTS[number], **scope, metadata={"owner": user})
        if record.repeats == 0:
            mine.append(record.id)
        assert record.id in mine and record.replaces in (None, *mine)
        return record.surprise, record.repeats
    if kind == "search":
        filters = {"owner": list(USERS)} if number % 2 else None
        hits = memory.search(TEXTS[number], **scope, filters=filters, threshold=0.1 if number % 3 else None)
        assert all(hit.record.metadata == {"owner": user} and hit.record.user == user for hit in hits)
        texts = {record.id: record.text for record in memory.records(user=user)}
        return [shown(hit, texts) for hit in hits], hits.below, hits.note, hits.ignored
    if kind == "records":
        records = memory.records(**scope)
        assert all(record.user == user and record.id in mine for record in records)
        return [(record.text, record.scope, record.surprise, record.repeats) for record in records]
    if kind == "surprise":
        found = memory.surprise(TEXTS[number], **scope)
        older = None if found.contradicts is None else memory.get(found.contradicts, user=user).text
        return replace(found, contradicts=older), memory.neural.pack(memory.scope_memory(**scope))
    if kind == "delete_all":
        below = number % 2 == 1
        gone = {r.id for r in memory.records(**scope) if below or r.scope == Scope(**scope)}
        mine[:] = [id for id in mine if id not in gone]
        assert memory.delete_all(**scope, below=below) == len(gone)
        assert sorted(record.id for record in memory.records(user=user)) == sorted(mine)
        return len(gone)
    if mine:
        id = mine[number % len(mine)]
        for other in {"ann", "ben", "default"} - {user}:
            assert memory.get(id, user=other) is None
            assert memory.history(id, user=other) == []
            with pytest.raises(UnknownRecord):
                memory.delete(id, user=other)
            with pytest.raises(UnknownRecord):
                memory.update(id, "taken over", user=other)
        if kind == "use":
            return memory.use([id], user=user)
        if kind == "history":
            return [(event.kind, event.text, event.metadata) for event in memory.history(id, user=user)]
        if kind == "delete":
            mine.remove(id)
            return memory.delete(id, user=user)
        return memory.update(id, TEXTS[number], user=user).surprise
    return None


def same_alone(place: Place, encoder: TextEncoder, folder: Path, calls: list[Any]) -> None:
    """Every user gets the same answers, to the last digit, as in a store where nobody else is."""
    start = uuid.uuid4().hex[:12]

    def open_(name: str) -> Memory:
        return Memory(place(f"{start}-{name}"), encoder=encoder)

    active = {user for _, user, *_ in calls}
    # Every user asks for everything at the end.
    calls = [*calls, *(("search", user, None, None, number) for user in USERS for number in (0, 3, 6))]
    with open_("shared") as memory:
        ids: dict[str, list[str]] = {}
        together = [take(memory, ids, call) for call in calls]
        scopes = {user: memory.scopes(user) for user in USERS}
        stats = {user: memory.stats(user) for user in USERS}
        for user in USERS:
            memory.export(folder / "export.jsonl", user=user)
            lines = (folder / "export.jsonl").read_text().splitlines()
            assert [json.loads(line)["id"] for line in lines] == ids.get(user, [])
        for user in USERS:  # passes over what is not theirs
            memory.use([id for owner in ids for id in ids[owner] if owner != user], user=user)
        assert memory.check() == []
    with open_("shared") as memory:  # counts of uses are written down when a memory is closed
        uses = {user: [record.uses for record in memory.records(user=user)] for user in USERS}
    for user in active:
        with open_(f"only-{USERS.index(user)}") as memory:
            own: dict[str, list[str]] = {}
            alone = [take(memory, own, call) for call in calls if call[1] == user]
            assert alone == [answer for answer, call in zip(together, calls, strict=True) if call[1] == user]
            assert scopes[user] == memory.scopes()
            changing = ("oldest", "newest")
            one, other = stats[user], memory.stats(user)
            assert {name: one[name] for name in one if name not in changing} == {
                name: other[name] for name in other if name not in changing
            }
        with open_(f"only-{USERS.index(user)}") as memory:
            assert uses[user] == [record.uses for record in memory.records(user=user)]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_no_call_reads_or_counts_another_users_records(
    calls: list[Any], place: Place, encoder: TextEncoder, tmp_path: Path
) -> None:
    same_alone(place, encoder, tmp_path, calls)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_no_call_reads_another_users_records_in_many_tries(
    calls: list[Any], place: Place, encoder: TextEncoder, tmp_path: Path
) -> None:
    same_alone(place, encoder, tmp_path, calls)


def fill(memory: Memory) -> None:
    for agent in (None, "x", "y"):
        for session in (None, "1", "2"):
            memory.add(f"The cat of {agent} and {session}", user="ann", agent=agent, session=session)
    memory.add("The cat of ben", user="ben", agent="x", session="1")


def test_fewer_names_cover_more_and_none_is_a_scope_of_its_own(open_memory: Opener) -> None:
    memory = open_memory()
    fill(memory)
    count = {
        names: len(memory.search("cat", user="ann", agent=names[0], session=names[1], limit=50))
        for names in ((None, None), ("x", None), (None, "1"), ("x", "1"), ("z", None))
    }
    assert count == {(None, None): 9, ("x", None): 3, (None, "1"): 3, ("x", "1"): 1, ("z", None): 0}
    alone = memory.scope_memory(user="ann")
    assert alone.count == 1
    assert memory.scope_memory(user="ann", agent="x").count == 1
    assert memory.scope_memory(user="ann", agent="z").count == 0


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize(("agent", "session"), [(None, None), ("x", None), (None, "1"), ("x", "1"), ("z", None)])
def test_delete_all_erases_exactly_its_scope_or_all_below_it(
    open_memory: Opener, agent: str | None, session: str | None, below: bool
) -> None:
    memory = open_memory()
    fill(memory)
    memory.search("cat", user="ann")
    asked = Scope("ann", agent, session)
    before = [scope for scope, _ in memory.scopes()]
    gone = [scope for scope in before if (asked.covers(scope) if below else scope == asked)]
    assert memory.delete_all(user="ann", agent=agent, session=session, below=below) == len(gone)
    left = [(scope, 1) for scope in before if scope not in gone]
    assert memory.scopes() == left == open_memory().scopes()
    assert {hit.record.scope for hit in memory.search("cat", user="ann", limit=50)} == {
        scope for scope, _ in left if scope.user == "ann"
    }
    assert memory.check() == []
    with memory.store.reading():  # not even the names stay
        assert len(memory.store._all("SELECT * FROM scopes")) == len(left)
        users = {scope.user for scope, _ in left}
        assert {row[0] for row in memory.store._all("SELECT name FROM users")} == users
