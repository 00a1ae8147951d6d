from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.ranking import Ranking
from titans.text.records import Hit, UnknownRecord

USERS = ("ann", "ben", "ann%", "Ann", "1")
TEXTS = [
    "The cat sleeps on the sofa.", "The cat sleeps.", "My key is under the mat.", "A key opens the door.",
    "Dinner is at eight.", "Dinner was late.", "The door is red.", "Call the doctor on Monday.",
]  # fmt: skip
NAMES = st.sampled_from([None, "x", "y"])
CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "add", "search", "use", "update", "delete", "delete_all", "records", "surprise"]
        ),
        st.sampled_from(USERS),
        NAMES,
        NAMES,
        st.integers(0, len(TEXTS) - 1),
    ),
    min_size=4,
    max_size=14,
)


def shown(hit: Hit) -> tuple[Any, ...]:
    """All that a hit tells, but for its random id and its time."""
    places = (hit.cosine_rank, hit.bm25_rank, hit.neural_rank)
    values = [None if value is None else round(value, 5) for value in (hit.score, hit.cosine, hit.bm25, hit.neural)]
    return (hit.record.text, hit.record.scope, hit.record.metadata, places, *values)


def take(memory: Memory, ids: dict[str, list[str]], call: tuple[str, str, str | None, str | None, int]) -> Any:
    """Makes a call for a user; returns all that it tells. Every record that comes back must be the user's."""
    kind, user, agent, session, number = call
    scope: dict[str, Any] = {"user": user, "agent": agent, "session": session}
    mine = ids.setdefault(user, [])
    if kind == "add":
        record = memory.add(TEXTS[number], **scope, metadata={"owner": user})
        mine.append(record.id)
        return record.surprise
    if kind == "search":
        filters = {"owner": list(USERS)} if number % 2 else None
        found = memory.search(TEXTS[number], **scope, filters=filters, threshold=0.1 if number % 3 else None)
        assert all(hit.record.metadata == {"owner": user} and hit.record.user == user for hit in found)
        return [shown(hit) for hit in found], found.below, found.note
    if kind == "records":
        records = memory.records(**scope)
        assert all(record.user == user and record.id in mine for record in records)
        return [(record.text, record.scope, record.surprise) for record in records]
    if kind == "surprise":
        return memory.surprise(TEXTS[number], **scope), memory.neural.pack(memory.scope_memory(**scope))
    if kind == "delete_all":
        gone = {record.id for record in memory.records(**scope)}
        mine[:] = [id for id in mine if id not in gone]
        return memory.delete_all(**scope)
    if mine:
        id = mine[number % len(mine)]
        for other in {"ann", "ben"} - {user}:
            assert memory.get(id, user=other) is None
            assert memory.history(id, user=other) == []
            with pytest.raises(UnknownRecord):
                memory.delete(id, user=other)
            with pytest.raises(UnknownRecord):
                memory.update(id, "taken over", user=other)
        if kind == "use":
            return memory.use([id], user=user)
        if kind == "delete":
            mine.remove(id)
            return memory.delete(id, user=user)
        return memory.update(id, TEXTS[number], user=user).surprise
    return None


def same_alone(folder: Path, encoder: TextEncoder, backend: str, calls: list[Any]) -> None:
    """Every user gets the same answers, to the last digit, as in a store where nobody else is."""

    def open_(name: str) -> Memory:
        url = ":memory:" if backend == "qdrant" else None
        return Memory(folder / name, encoder=encoder, ranking=Ranking(neural=0.5), url=url)

    # Every user asks for everything at the end.
    calls = [*calls, *(("search", user, None, None, number) for user in USERS for number in (0, 3))]
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
    for user in USERS:
        name = f"only {USERS.index(user)}"
        with open_(name) as memory:
            own: dict[str, list[str]] = {}
            alone = [take(memory, own, call) for call in calls if call[1] == user]
            assert alone == [answer for answer, call in zip(together, calls, strict=True) if call[1] == user]
            assert scopes[user] == memory.scopes()
            changing = ("oldest", "newest")
            one, other = stats[user], memory.stats(user)
            assert {name: one[name] for name in one if name not in changing} == {
                name: other[name] for name in other if name not in changing
            }
        with open_(name) as memory:
            assert uses[user] == [record.uses for record in memory.records(user=user)]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_no_call_reads_or_counts_another_users_records(
    calls: list[Any], encoder: TextEncoder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    same_alone(tmp_path_factory.mktemp("scopes"), encoder, "sqlite", calls)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_nor_with_qdrant(calls: list[Any], encoder: TextEncoder, tmp_path_factory: pytest.TempPathFactory) -> None:
    same_alone(tmp_path_factory.mktemp("scopes"), encoder, "qdrant", calls)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_no_call_reads_another_users_records_in_many_tries(
    calls: list[Any], encoder: TextEncoder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    same_alone(tmp_path_factory.mktemp("scopes"), encoder, "sqlite", calls)


def test_fewer_names_cover_more_and_none_is_a_scope_of_its_own(
    tmp_path: Path, encoder: TextEncoder, backend: str
) -> None:
    with Memory(tmp_path / "s", encoder=encoder, url=":memory:" if backend == "qdrant" else None) as memory:
        for agent in (None, "x", "y"):
            for session in (None, "1", "2"):
                memory.add(f"The cat of {agent} and {session}", user="ann", agent=agent, session=session)
        memory.add("The cat of ben", user="ben", agent="x", session="1")
        count = {
            names: len(memory.search("cat", user="ann", agent=names[0], session=names[1], limit=50))
            for names in ((None, None), ("x", None), (None, "1"), ("x", "1"), ("z", None))
        }
        assert count == {(None, None): 9, ("x", None): 3, (None, "1"): 3, ("x", "1"): 1, ("z", None): 0}
        alone = memory.scope_memory(user="ann")
        assert alone.count == 1
        assert memory.scope_memory(user="ann", agent="x").count == 1
        assert memory.scope_memory(user="ann", agent="z").count == 0
