from __future__ import annotations

import asyncio
import functools
import json
import math
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.text.conftest import Opener
from titans.text import replay
from titans.text.async_memory import AsyncMemory
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.ranking import Eviction, Ranking
from titans.text.records import Found, OtherEncoder, Record, StoreError, UnknownRecord

ANIMALS, FOODS = ("cat", "dog", "horse", "owl", "fox", "hen"), ("milk", "hay", "mice", "bread", "corn", "fish", "eggs")
TEXTS = [f"The {animal} likes {food}!" for animal in ANIMALS for food in FOODS]  # no plain statements: no versions
FACTS = [
    "My sister Anna lives in Lisbon.",
    "The red bicycle was stolen in May.",
    "Our meeting is on Thursday at noon.",
    "I am allergic to peanuts.",
]
CITIES = ["Ann lives in Oslo.", "Ann lives in Lima.", "Ann lives in Rome."]  # versions of a statement


def bits(memory: Memory, **scope: Any) -> bytes:
    return memory.neural.pack(memory.scope_memory(**scope))


def states(memory: Memory) -> list[Any]:
    """All states that are kept, every bit."""
    with memory.store.reading():
        return [tuple(row) for row in memory.store._all("SELECT count, state FROM states ORDER BY count")]


def files_of(folder: Path) -> bytes:
    """Every byte of every file of a store and its index."""
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def texts_of(found: Found) -> list[str]:
    return [hit.record.text for hit in found]


def test_what_was_remembered_is_found_and_says_why(open_memory: Opener) -> None:
    memory = open_memory()
    records = memory.add_many(FACTS)
    found = memory.search("Where does Anna live?", limit=3)
    best = found.hits[0]
    assert best.record.text == FACTS[0]
    assert (best.score, best.cosine_rank, best.bm25_rank, best.neural_rank) == (pytest.approx(1.0), 1, 1, 1)
    assert best.bm25 is not None and best.bm25 > 0 and 0.3 < best.cosine < 1
    assert best.neural is not None and best.neural > 0
    assert best.surprise == best.record.surprise and 0 <= best.age < 600
    assert len(found) == 3 and found.below == 0 and found.note is None
    assert memory.get(records[2].id) == records[2]
    assert memory.get("0" * 32) is None
    assert [record.text for record in memory.records(limit=2)] == FACTS[:1:-1]


def test_words_alone_find_a_text_too(open_memory: Opener) -> None:
    memory = open_memory(ranking=Ranking(cosine=0, neural=0))
    memory.add_many([*FACTS, "Invoice XK-4711 is paid", "猫は魚が好きです"])
    assert [hit.record.text for hit in memory.search("xk 4711")] == ["Invoice XK-4711 is paid"]
    assert [hit.record.text for hit in memory.search("bicycles")] == [FACTS[1]]  # the stem is the same
    assert [hit.record.text for hit in memory.search("魚")] == ["猫は魚が好きです"]
    assert list(memory.search("nothing of the kind")) == []


def test_a_threshold_leaves_out_and_counts(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add_many(FACTS)
    everything = memory.search("Where does Anna live?")
    cosines = sorted((hit.cosine for hit in everything), reverse=True)
    found = memory.search("Where does Anna live?", threshold=(cosines[0] + cosines[1]) / 2)
    assert [hit.record.text for hit in found] == [FACTS[0]]
    assert (found.below, found.threshold) == (3, (cosines[0] + cosines[1]) / 2)
    assert memory.search("Where does Anna live?", threshold=-1.0).below == 0


def test_an_unknown_scope_is_said_and_nothing_is_found(open_memory: Opener) -> None:
    memory = open_memory()
    assert memory.search("anything").note == "nothing is remembered of user 'default'"
    memory.add_many(FACTS, session="one")
    assert memory.search("Anna", session="two").note == "nothing is remembered of user 'default', session 'two'"
    assert memory.search("Anna", user="ben", session="one").note is not None
    assert memory.search("Anna", session="one").note is None
    assert memory.records(session="two") == []


@pytest.mark.parametrize(
    ("filters", "places"),
    [
        ({"kind": "b"}, {1, 4}),
        ({"kind": ["a", "b"]}, {0, 1, 3, 4}),
        ({"kind": {"ne": "a"}}, {1, 2, 4}),
        ({"year": {"gte": 2021, "lt": 2024}}, {1, 2, 3}),
        ({"year": 2021, "kind": "b"}, {1}),
        ({"year": "2021"}, set()),
        ({"done": True}, {4}),
        ({"done": 1}, {5}),
        ({"done": {"in": [1, True]}}, {4, 5}),
        ({"kind": {"in": []}}, set()),
        ({"k'; --\"": "x"}, {5}),
        ({"no such": 1}, set()),
    ],
)
def test_filters_on_metadata(open_plain: Opener, filters: dict[str, Any], places: set[int]) -> None:
    memory = open_plain()
    data = [
        {"kind": "a", "year": 2020}, {"kind": "b", "year": 2021}, {"kind": "c", "year": 2022},
        {"kind": "a", "year": 2023}, {"kind": "b", "year": 2024, "done": True}, {"done": 1, "k'; --\"": "x"},
    ]  # fmt: skip
    memory.add_many(TEXTS[:6], metadata=data)
    found = {TEXTS.index(hit.record.text) for hit in memory.search("what does the cat like", filters=filters)}
    assert found == places
    assert {TEXTS.index(record.text) for record in memory.records(filters=filters)} == places


def test_filters_work_with_either_index(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add_many(TEXTS[:8], metadata=[{"even": index % 2 == 0} for index in range(8)])
    found = [hit.record.text for hit in memory.search(TEXTS[0], filters={"even": False})]
    assert sorted(found) == sorted(TEXTS[1:8:2])


def test_an_update_is_as_if_the_new_text_had_always_stood_there(open_memory: Opener) -> None:
    memory, other = open_memory(), open_memory("other")
    records = memory.add_many(TEXTS[:20], metadata={"n": 1})
    updated = memory.update(records[5].id, "The fox is asleep.", {"n": 2})
    other.add_many([*TEXTS[:5], "The fox is asleep.", *TEXTS[6:20]])
    assert bits(memory) == bits(other)
    assert (updated.text, updated.metadata, updated.version) == ("The fox is asleep.", {"n": 2}, 2)
    assert updated.created == records[5].created < updated.updated
    assert memory.get(updated.id) == updated
    assert memory.search("The fox is asleep.").hits[0].record == updated
    assert all(hit.record.text != TEXTS[5] for hit in memory.search(TEXTS[5], limit=30))
    assert [r.surprise for r in memory.records()] == [r.surprise for r in other.records()]


def test_history_tells_what_happened(open_memory: Opener) -> None:
    memory = open_memory()
    record = memory.add("first", metadata={"n": 1})
    memory.update(record.id, "second", keep_old=True)
    assert [(event.kind, event.version, event.text) for event in memory.history(record.id)] == [
        ("add", 1, "first"),
        ("update", 2, "second"),
    ]
    memory.update(record.id, "third")
    assert [event.text for event in memory.history(record.id)] == [None, None, "third"]
    memory.delete(record.id)
    events = memory.history(record.id)
    assert [(event.kind, event.text, event.metadata) for event in events] == [
        ("add", None, None), ("update", None, None), ("update", None, None), ("delete", None, None),
    ]  # fmt: skip
    assert memory.history("0" * 32) == []


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_any_changes_the_memory_is_that_of_a_store_which_saw_only_what_is_left(
    data: st.DataObject, open_memory: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With 1 every whole chunk is a state to go back to.
    monkeypatch.setattr(replay, "BETWEEN", data.draw(st.sampled_from([1, 2, 64]), label="between"))
    left: dict[str, str] = {}
    name = uuid.uuid4().hex
    some = st.sampled_from([*TEXTS[:30], *CITIES])
    memory = open_memory(name)
    for _ in range(data.draw(st.integers(1, 6), label="calls")):
        call = data.draw(st.sampled_from(["add", "add", "delete", "update"]), label="call")
        if call == "add":
            texts = data.draw(st.lists(some, min_size=1, max_size=24), label="texts")
            left |= {record.id: record.text for record in memory.add_many(texts)}
        elif left:
            id = data.draw(st.sampled_from(list(left)), label="id")
            if call == "delete":
                memory.delete(id)
                del left[id]
            else:
                left[id] = memory.update(id, data.draw(some, label="text")).text
    other = open_memory(f"{name}-other")
    other.restore([Record(id, text) for id, text in left.items()])
    assert bits(memory) == bits(other)
    assert states(memory) == states(other)
    assert [r.surprise for r in memory.records()] == [r.surprise for r in other.records()]
    again = open_memory(name)
    assert bits(memory) == bits(again)
    assert {r.id: r.text for r in reversed(again.records())} == left
    places = {id: place for place, id in enumerate(left)}
    links = [(r.replaces, r.id) for r in again.records() if r.replaces is not None]
    assert all(places[old] < places[new] for old, new in links)
    assert len({old for old, _ in links}) == len(links)
    assert again.check() == []


@pytest.mark.parametrize(("many", "position"), [(16, 3), (16, 15), (33, 20), (40, 0), (48, 47)])
def test_no_state_that_saw_a_deleted_text_is_left(
    open_memory: Opener, monkeypatch: pytest.MonkeyPatch, many: int, position: int
) -> None:
    monkeypatch.setattr(replay, "BETWEEN", 1)
    memory, other = open_memory(), open_memory("other")
    texts = [*TEXTS, *FACTS, *CITIES][:many]
    memory.delete(memory.add_many(texts)[position].id)
    other.add_many(texts[:position] + texts[position + 1 :])
    assert states(memory) == states(other)
    assert len(states(memory)) == (many - 1) // 16
    assert bits(memory) == bits(other)


def test_texts_one_by_one_or_all_at_once_make_the_same_memory(open_memory: Opener) -> None:
    one, many = open_memory("one"), open_memory("many")
    first = [one.add(text).surprise for text in TEXTS[:35]]
    second = [record.surprise for record in many.add_many(TEXTS[:35])]
    assert first == second
    assert bits(one) == bits(many)


SECRET = "The passphrase is zanzibarquokka"


@pytest.mark.parametrize("erase", ["delete", "update", "delete_all", "delete_all below", "evict"])
def test_an_erased_text_is_in_no_file(open_plain: Opener, tmp_path: Path, encoder: TextEncoder, erase: str) -> None:
    memory = open_plain(limit=22 if erase == "evict" else None, eviction="fifo")
    memory.add_many(TEXTS[:18])
    names = {"agent": "concealed", "session": "hidden"} if "delete_all" in erase else {}
    secret = memory.add(SECRET, metadata={"hint": "wombatlore"}, **names)
    memory.add(SECRET, metadata={"hint": "wombatlore"}, **names)
    memory.update(secret.id, f"{SECRET} still", keep_old=True)
    memory.search("passphrase")
    memory.add_many(TEXTS[18:20])
    old, new = encoder.encode([SECRET, f"{SECRET} still"])
    traces = [b"zanzibarquokka", b"wombatlore", old.tobytes(), new.tobytes(), new.astype(np.float16).tobytes()]
    assert [trace in files_of(tmp_path) for trace in traces] == [True, True, False, True, False]
    if erase == "delete":
        memory.delete(secret.id)
    elif erase == "update":
        memory.update(secret.id, "The passphrase is gone", {})
    elif erase == "delete_all":
        assert memory.delete_all(user="default", **names) == 1
        traces += [b"concealed", b"hidden"]
    elif erase == "delete_all below":
        assert memory.delete_all(user="default", agent="concealed", below=True) == 1
        traces += [b"concealed", b"hidden"]
    else:
        memory.add_many(TEXTS[20:])
    for moment in ("while the store is open", "when it is closed"):
        data = files_of(tmp_path)
        assert [trace for trace in traces if trace in data] == [], moment
        if moment == "while the store is open":
            assert all("zanzibar" not in hit.record.text for hit in memory.search("passphrase", limit=50))
            memory.close()


def test_what_could_not_be_erased_at_once_is_erased_by_the_next_to_open(
    open_plain: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_plain()
    memory.add_many(TEXTS[:3])
    secret = memory.add(SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory.store), "finish_erasing", lambda self: None)  # as if killed between the two steps
        memory.delete(secret.id)
    assert b"zanzibarquokka" in files_of(tmp_path)
    open_plain()
    assert b"zanzibarquokka" not in files_of(tmp_path)


def test_delete_all_leaves_nothing_of_a_scope(open_memory: Opener) -> None:
    memory = open_memory()
    kept = memory.add_many(TEXTS[:3], user="ann", session="one")
    gone = memory.add_many(TEXTS[3:6], user="ann", session="two")
    memory.add_many(TEXTS[6:9], user="ben")
    assert memory.delete_all(user="ann", session="two") == 3
    assert memory.history(gone[0].id, user="ann") == []
    assert {record.id for record in memory.records(user="ann")} == {record.id for record in kept}
    assert memory.delete_all(user="ann", below=True) == 3
    assert memory.delete_all(user="ann", below=True) == 0
    assert [(scope.user, count) for scope, count in memory.scopes()] == [("ben", 3)]
    memory.add("again", user="ann", session="two")
    assert bits(memory, user="ann", session="two") != bits(memory, user="ann")
    assert len(memory.search("again", user="ann")) == 1
    assert memory.check() == []


def test_only_a_record_that_is_there_can_be_changed(open_memory: Opener) -> None:
    memory = open_memory()
    record = memory.add("one", user="ann")
    for call in (
        lambda: memory.delete("0" * 32),
        lambda: memory.update("0" * 32, "x"),
        lambda: memory.delete(record.id),
        lambda: memory.update(record.id, "x"),
        lambda: memory.delete(record.id, user="ben"),
        lambda: memory.update(record.id, "x", user="ben"),
        lambda: memory.update(record.id, metadata={"x": 1}, user="Ann"),
    ):
        with pytest.raises(UnknownRecord, match="there is no record"):
            call()
    for user in ("default", "ben", "Ann", "ann "):
        assert memory.get(record.id, user=user) is None
        assert memory.history(record.id, user=user) == []
        memory.use([record.id], user=user)
    memory.add("two", user="ben")  # which writes the counts of uses
    assert memory.get(record.id, user="ann") == record


def test_surprise_without_writing_is_what_writing_says(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add_many(FACTS)
    before = bits(memory)
    asked = memory.surprise("The moon is made of stone.")
    assert bits(memory) == before
    assert memory.add("The moon is made of stone.").surprise == asked.loss
    assert memory.surprise("The moon is made of stone.").loss < asked.loss


def test_an_export_makes_the_same_store_elsewhere(open_memory: Opener, tmp_path: Path) -> None:
    memory, other = open_memory(), open_memory("other")
    memory.add_many(TEXTS[:19], metadata=[{"n": index} for index in range(19)], role="user")
    memory.add_many(TEXTS[19:23], user="ann", agent="helper", session="s")
    memory.delete(memory.records()[4].id)
    memory.update(memory.records()[2].id, "changed")
    assert memory.export(tmp_path / "a.jsonl") == 22
    assert other.import_(tmp_path / "a.jsonl") == 22
    assert other.records() == memory.records()
    assert bits(other) == bits(memory)
    names = {"user": "ann", "agent": "helper", "session": "s"}
    assert bits(other, **names) == bits(memory, **names) != bits(memory)
    other.export(tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert other.import_(tmp_path / "a.jsonl") == 0
    assert memory.export(tmp_path / "ann.jsonl", user="ann") == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2 cannot be read as JSON"),
        (b"\xff{}", "line 2 is not valid UTF-8"),
        (b"[1]", "line 2: a record is a list; expected an object"),
        (b"{}", "line 2: a record has no text"),
        (b'{"text": ""}', "line 2: text is empty"),
        (b'{"text": "x", "colour": 1}', "line 2: a record has the unknown field 'colour'"),
        (b'{"text": "x", "created": "soon"}', "line 2: created is 'soon'; expected a time"),
        (b'{"text": "x", "version": -1}', "line 2: version is -1"),
        (b'{"text": "x", "user": 5}', "line 2: user is of type int"),
        (b'{"text": "x", "id": "a"}\n{"text": "y", "id": "a"}', "line 3: the id 'a' is used twice"),
        (b'{"text": "y", "id": "there"}', "line 2: the store has another record with the id 'there'"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_imported(
    open_plain: Opener, tmp_path: Path, line: bytes, words: str
) -> None:
    memory = open_plain()
    (tmp_path / "first.jsonl").write_text(json.dumps({"text": "x", "id": "there"}))
    assert memory.import_(tmp_path / "first.jsonl") == 1
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=words):
        memory.import_(tmp_path / "bad.jsonl")
    assert memory.stats()["records"] == 1


def test_a_store_of_another_encoder_says_so_and_can_be_reindexed(
    open_memory: Opener, encoder: TextEncoder, other_encoder: TextEncoder, tmp_path: Path
) -> None:
    memory = open_memory()
    memory.add_many(TEXTS[:18])
    old = bits(memory)
    memory.close()
    memory = open_memory(encoder=other_encoder)
    for call in (lambda: memory.add("x"), lambda: memory.search("cat")):
        with pytest.raises(OtherEncoder, match=r"were made by another encoder .*reindex"):
            call()
    assert memory.export(tmp_path / "x.jsonl") == 18  # what needs no vectors works
    assert memory.reindex() == 18
    assert memory.search(TEXTS[3]).hits[0].record.text == TEXTS[3]
    assert bits(memory) != old
    memory.add("x")
    assert memory.check() == []
    memory.close()
    memory = open_memory(encoder=encoder)
    with pytest.raises(OtherEncoder):
        memory.search("cat")
    memory.reindex()
    memory.delete(memory.records(limit=1)[0].id)
    assert bits(memory) == old


def test_other_projections_are_said_and_can_be_taken(open_plain: Opener, tmp_path: Path) -> None:
    memory = open_plain()
    records = memory.add_many(TEXTS[:18])
    NeuralTextMemory(NeuralConfig(seed=1)).save(tmp_path / "trained")
    other = open_plain(neural=tmp_path / "trained")
    with pytest.raises(OtherEncoder, match=r"memories were made by other projections .*reindex"):
        other.add("x")
    with pytest.raises(OtherEncoder):
        other.scope_memory()
    other.delete(records[16].id)  # to forget must always be possible
    expected = open_plain("expected")
    expected.add_many([*TEXTS[:16], TEXTS[17]])
    again = open_plain()
    assert bits(again) == bits(expected)
    other.reindex()
    with pytest.raises(OtherEncoder):  # whoever had it open
        again.add("x")
    trained = open_plain("trained expected", neural=tmp_path / "trained")
    trained.add_many([*TEXTS[:16], TEXTS[17]])
    assert bits(other) == bits(trained)
    assert [r.surprise for r in other.records()] == [r.surprise for r in trained.records()]


def test_projections_of_another_width_are_refused(open_plain: Opener) -> None:
    memory = open_plain(neural=NeuralTextMemory(NeuralConfig(width=64)))
    with pytest.raises(OtherEncoder, match="take vectors of 64 numbers; the encoder makes 384"):
        memory.add("x")
    assert memory.stats()["records"] == 0


def test_a_reindex_that_fails_leaves_the_old_store(open_plain: Opener, other_encoder: TextEncoder) -> None:
    memory = open_plain()
    memory.add_many(TEXTS[:18])
    old = bits(memory)
    other = open_plain(encoder=other_encoder)

    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        other.reindex(stop)
    assert bits(open_plain()) == old
    assert memory.search(TEXTS[2]).hits[0].record.text == TEXTS[2]


def test_what_others_write_during_a_reindex_is_in_it(open_memory: Opener, other_encoder: TextEncoder) -> None:
    memory = open_memory()
    records = memory.add_many(TEXTS[:5])
    other, expected = open_memory(encoder=other_encoder), open_memory("expected", encoder=other_encoder)
    changes = [
        lambda: memory.add(FACTS[0]),
        lambda: memory.delete(records[2].id),
        lambda: memory.update(records[3].id, FACTS[1]),
        lambda: memory.add(TEXTS[0]),
    ]

    def write(done: int, total: int, what: str) -> None:
        if done == 5:
            changes.pop(0)()
        while done == 6 and changes:  # when that one has been encoded, too
            changes.pop(0)()

    assert other.reindex(write) == 5
    assert changes == []
    expected.add_many([*TEXTS[:2], FACTS[1], TEXTS[4], FACTS[0]])
    assert bits(other) == bits(expected)
    assert [(r.text, r.surprise) for r in other.records()] == [(r.text, r.surprise) for r in expected.records()]
    assert other.search(FACTS[1]).hits[0].record.repeats == 0
    assert other.search(TEXTS[0]).hits[0].record.repeats == 1
    assert other.check() == []
    with pytest.raises(OtherEncoder):
        memory.add("x")


@pytest.mark.parametrize("policy", ["informative", "fifo", "random", "longest"])
def test_a_limited_store_keeps_what_its_policy_says(open_memory: Opener, policy: str) -> None:
    memory = open_memory(limit=6, eviction=policy)
    texts = [FACTS[0], *(f"{FACTS[1]} {'again ' * index}" for index in range(6)), FACTS[2], FACTS[3]]
    for text in texts:
        memory.add(text)
        assert memory.stats()["records"] <= 6
        assert text in [record.text for record in memory.records()]  # what has just come stays
    left = [record.text for record in reversed(memory.records())]
    if policy == "fifo":
        assert left == texts[-6:]
    if policy == "informative":
        assert FACTS[0] in left
    if policy == "longest":
        assert texts[6] in left and FACTS[0] not in left
    with open_memory("fresh") as fresh:
        fresh.add_many(left)
        assert bits(memory) == bits(fresh)
    assert memory.check() == []


def test_what_is_used_is_kept(open_plain: Opener) -> None:
    memory = open_plain(limit=4, eviction=Eviction(details=0, surprise=0))
    record = memory.add(FACTS[0])
    for _ in range(3):
        memory.search("Where does Anna live?", limit=1)
    memory.add_many(FACTS[1:])
    memory.add_many(TEXTS[:2])
    assert memory.get(record.id) is not None
    assert memory.records()[-1].uses == 3


def test_an_update_keeps_the_count_of_uses(open_plain: Opener) -> None:
    memory = open_plain()
    record = memory.add(FACTS[0])
    memory.search(FACTS[0])
    memory.update(record.id, FACTS[1])
    memory.search(FACTS[1])
    memory.add(FACTS[2])  # which writes the counts
    updated = memory.get(record.id)
    assert updated is not None and updated.uses == 2


def test_a_search_may_leave_it_to_the_caller_what_was_used(open_plain: Opener) -> None:
    memory = open_plain()
    first, second = memory.add_many(FACTS[:2], user="anna")
    memory.search(FACTS[0], user="anna", count_uses=False)
    memory.use([second.id, "gone"], user="anna")
    memory.use([first.id], user="ben")
    memory.add(FACTS[2], user="anna")
    assert [record.uses for record in reversed(memory.records(user="anna"))] == [0, 1, 0]
    with pytest.raises(ValueError, match=r"^ids is one id; expected a list of them$"):
        memory.use(first.id)


def test_recency_and_surprise_can_speak(open_plain: Opener) -> None:
    texts = ["Anna lives in Lisbon!", "Anna lives in Porto!", "Anna lives in Faro!"]
    dates = ["2026-03-01", "2026-01-01", "2026-02-01"]
    memory = open_plain()
    memory.add_many(texts, created=dates)
    memory.ranking = Ranking(bm25=0, cosine=0.01, neural=0, near=0, recency=1)
    assert [hit.record.text for hit in memory.search("Anna lives")] == [texts[0], texts[2], texts[1]]
    memory.ranking = Ranking(bm25=0, cosine=0.01, neural=0, near=0, surprise=1)
    surprises = [hit.surprise for hit in memory.search("Anna lives")]
    assert surprises == sorted(surprises, reverse=True)


def unexpected(memory: Memory, question: str, *sessions: str) -> torch.Tensor:
    """What the memories of some sessions do not expect of a question, by the definition."""
    neural = memory.neural
    with torch.no_grad():
        left = neural.project(as_tensor(memory, question))
        for session in sessions:
            left = left - neural.answer(neural.current(memory.scope_memory(session=session)), left[None])[0]
            left = left / left.norm()
        return left[0]


def as_tensor(memory: Memory, text: str) -> torch.Tensor:
    return torch.from_numpy(memory.encoder.encode([text]))


def test_the_neural_signal_is_what_the_memories_of_the_scopes_searched_do_not_expect(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add_many(TEXTS[:20], session="one")
    memory.add_many(FACTS, session="two")
    memory.add_many(CITIES, user="ben")
    projected = memory.neural.project
    for sessions, names in ((["one"], {"session": "one"}), (["two", "one"], {})):  # the last written first
        left = unexpected(memory, "What does the cat like?", *sessions)
        hits = memory.search("What does the cat like?", limit=50, **names).hits
        by_text = {hit.record.text: hit for hit in hits}
        first, second = TEXTS[:2]
        with torch.no_grad():
            expected = float(projected(as_tensor(memory, first))[0] @ left)
            assert by_text[first].neural == pytest.approx(expected, abs=1e-4)
            expected = float(projected(as_tensor(memory, second))[0] @ left) + memory.ranking.context * expected
            assert by_text[second].neural == pytest.approx(expected, abs=1e-4)
        ranked = sorted((hit for hit in hits if hit.neural is not None), key=lambda hit: hit.neural, reverse=True)
        assert [hit.neural_rank for hit in ranked] == list(range(1, len(ranked) + 1))


def test_the_neural_signal_is_on_by_default_and_with_no_weight_the_memory_is_not_asked(
    open_plain: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_plain()
    memory.add_many(FACTS)
    assert memory.search("Where does Anna live?").hits[0].neural is not None
    monkeypatch.setattr(type(memory.neural), "current", lambda *args: pytest.fail("the memory is asked"))
    memory.add("hello")
    memory.ranking = Ranking(neural=0)
    assert [hit.neural for hit in memory.search("Where does Anna live?")] == [None] * 5


def test_a_search_is_the_same_whether_memories_are_kept_or_replayed(
    open_memory: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BETWEEN", 1)
    memory = open_memory()
    for text in TEXTS[:19]:
        memory.add(text, session="one")
    memory.add_many(FACTS, session="two")
    memory.search("Anna")  # so that the memories are kept, ready to be read
    other = open_memory()
    for change in (
        lambda: memory.delete(memory.add(SECRET, session="one").id),
        lambda: other.add(CITIES[0], session="two"),
        lambda: other.update(memory.records(session="one")[3].id, CITIES[1]),
    ):
        change()
        kept = memory.search("Where does Anna live?", limit=30)
        again = open_memory().search("Where does Anna live?", limit=30)
        assert [(hit.record.id, hit.score, hit.neural) for hit in kept] == [
            (hit.record.id, hit.score, hit.neural) for hit in again
        ]
    assert len(kept) == 24


def test_what_is_told_again_is_counted_and_not_stored_again(open_memory: Opener) -> None:
    memory = open_memory()
    first = memory.add(FACTS[0], role="user", metadata={"n": 1, "m": 2}, created="2026-01-01")
    memory.add_many(FACTS[1:])
    before = bits(memory)
    other = open_memory()  # as another process
    again = other.add(FACTS[0], role="user", metadata={"m": 2, "n": 1}, created="2026-02-01")
    assert (again.id, again.created, again.version, again.surprise) == (first.id, first.created, 1, first.surprise)
    assert (first.repeats, again.repeats) == (0, 1)
    assert again.updated == "2026-02-01T00:00:00.000000+00:00"
    assert memory.get(first.id) == again
    assert bits(memory) == bits(other) == before
    assert memory.stats()["records"] == 4
    assert texts_of(memory.search(FACTS[0])).count(FACTS[0]) == 1
    assert [event.kind for event in memory.history(first.id)] == ["add", "repeat"]
    earlier = memory.add(FACTS[0], role="user", metadata={"n": 1, "m": 2}, created="2025-01-01")
    assert (earlier.repeats, earlier.updated) == (2, again.updated)
    assert memory.check() == []


def test_repeats_in_one_batch_are_counted_as_those_of_several_calls(open_memory: Opener) -> None:
    one, many = open_memory("one"), open_memory("many")
    texts = [FACTS[0], FACTS[1], FACTS[0], FACTS[0], FACTS[2], FACTS[1]]
    dates = [f"2026-01-0{day}" for day in range(1, 7)]
    alone = [one.add(text, created=date) for text, date in zip(texts, dates, strict=True)]
    together = many.add_many(texts, created=dates)
    assert bits(one) == bits(many)
    for memory, records in ((one, alone), (many, together)):
        assert [record.id == records[0].id for record in records] == [True, False, True, True, False, False]
        assert [(r.text, r.repeats, r.updated[8:10]) for r in reversed(memory.records())] == [
            (FACTS[0], 2, "04"), (FACTS[1], 1, "06"), (FACTS[2], 0, "05"),
        ]  # fmt: skip
        assert [event.kind for event in memory.history(records[0].id)] == ["add", "repeat", "repeat"]
    assert together == [many.get(record.id) for record in together]
    more = many.add_many(texts[:3])  # all of them known
    assert [record.repeats for record in more] == [4, 2, 4] and many.stats()["records"] == 3
    assert many.add_many(texts[:1])[0].repeats == 5
    assert many.check() == []


def test_the_same_text_of_another_role_scope_or_metadata_is_a_record_of_its_own(open_memory: Opener) -> None:
    memory = open_memory()
    others: list[dict[str, Any]] = [
        {}, {"role": "user"}, {"role": "assistant"}, {"metadata": {"n": 1}}, {"metadata": {"n": 1, "m": 1}},
        {"metadata": {"n": True}}, {"metadata": {"n": "1"}}, {"session": "one"}, {"agent": "one"}, {"user": "ben"},
    ]  # fmt: skip
    for many in (1, 2):
        for options in others:
            assert memory.add(FACTS[0], **options).repeats == many - 1
        assert memory.stats()["records"] == len(others)
    assert memory.add(f"{FACTS[0]} ").repeats == 0
    assert memory.add(FACTS[0].lower()).repeats == 0


def test_a_record_that_was_erased_or_changed_is_not_repeated(open_memory: Opener) -> None:
    memory = open_memory()
    first = memory.add(FACTS[0])
    memory.delete(first.id)
    second = memory.add(FACTS[0])
    assert (second.repeats, second.id == first.id) == (0, False)
    memory.update(second.id, FACTS[1])
    assert memory.add(FACTS[0]).repeats == 0
    assert memory.add(FACTS[1]).id == second.id


def test_the_newest_version_of_a_statement_comes_first_and_nothing_is_lost(open_memory: Opener) -> None:
    memory = open_memory()
    oslo, lima = memory.add_many(CITIES[:2])
    memory.add_many(FACTS)
    rome = memory.add(CITIES[2])
    assert [record.replaces for record in (oslo, lima, rome)] == [None, oslo.id, lima.id]
    assert all(record.replaces is None for record in memory.records() if record.text in FACTS)
    for question in ("Where does Ann live?", "In which city does Ann live?"):
        found = memory.search(question)
        assert texts_of(found)[:3] == CITIES[::-1]
        assert sorted(texts_of(found)) == sorted(CITIES + FACTS)
        assert {hit.record.text: hit.replaced_by for hit in found} == {
            CITIES[0]: rome.id, CITIES[1]: rome.id, CITIES[2]: None, **dict.fromkeys(FACTS),
        }  # fmt: skip
    assert texts_of(memory.search("Where does Ann live?", limit=1)) == CITIES[2:]


def test_a_newest_version_that_the_question_did_not_find_takes_the_place_of_the_one_it_did(open_memory: Opener) -> None:
    memory = open_memory(ranking=Ranking(cosine=0, neural=0, pool=1))
    memory.add_many(CITIES)
    found = memory.search("Where does Ann live?", limit=1)
    assert texts_of(found) == CITIES[2:]
    assert found.hits[0].bm25 is None  # the words named another


def test_every_further_version_is_linked_one_by_one_or_all_at_once(open_memory: Opener) -> None:
    texts = [f"Ann lives in {city}." for city in ("Oslo", "Lima", "Rome", "Paris", "Cairo", "Tokyo", "Quito", "Bonn")]
    texts = [text for pair in zip(texts, [*FACTS, *TEXTS], strict=False) for text in pair]  # among others
    one, many = open_memory("one"), open_memory("many")
    for records in ([one.add(text) for text in texts], many.add_many(texts)):
        versions = [record for record in records if record.text.startswith("Ann lives")]
        assert [record.replaces for record in versions] == [None, *(record.id for record in versions[:-1])]
    for memory in (one, many):
        found = memory.search("Where does Ann live?", limit=20)
        assert [text for text in texts_of(found) if text.startswith("Ann lives")] == texts[-2::-2]


def test_of_the_versions_that_the_question_did_not_find_only_the_newest_is_shown(open_memory: Opener) -> None:
    memory = open_memory(ranking=Ranking(cosine=0, neural=0, pool=1))
    memory.add_many(["Live, Ann, live!", *CITIES, "Ann lives in Paris.", "Ann lives in Cairo."])
    found = memory.search("Where does Ann live?", limit=3)  # the words find three, of which two are versions
    assert texts_of(found) == ["Live, Ann, live!", "Ann lives in Cairo.", CITIES[1]]
    assert [hit.bm25_rank for hit in found] == [1, None, 2]


def test_a_version_that_the_question_names_stays_where_it_is(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add_many(CITIES)
    assert texts_of(memory.search("Does Ann live in Oslo?"))[0] == CITIES[0]
    assert memory.search("Does Ann live in Oslo?").hits[0].replaced_by == memory.records(limit=1)[0].id


@pytest.mark.parametrize("together", [False, True])
def test_a_version_that_is_told_again_is_the_newest(open_memory: Opener, together: bool) -> None:
    memory = open_memory()
    texts = [*CITIES[:2], CITIES[0]]
    oslo, lima, _ = memory.add_many(texts) if together else [memory.add(text) for text in texts]
    found = memory.search("Where does Ann live?")
    assert texts_of(found) == CITIES[:2]
    assert [hit.replaced_by for hit in found] == [None, oslo.id]
    memory.add(CITIES[2])
    assert texts_of(memory.search("Where does Ann live?")) == [CITIES[2], CITIES[0], CITIES[1]]
    assert [(event.kind, event.id) for event in memory.history(lima.id)] == [
        ("add", oslo.id), ("add", lima.id), ("repeat", oslo.id),
    ]  # fmt: skip


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_the_other_versions_stay_in_their_order_when_one_is_deleted(open_memory: Opener, gone: int) -> None:
    memory = open_memory()
    records = memory.add_many(CITIES)
    memory.delete(records[gone].id)
    left = [record.id for record in records if record != records[gone]]
    assert [record.replaces for record in memory.records()] == [left[0], None]
    found = memory.search("Where does Ann live?")
    assert [hit.record.id for hit in found] == left[::-1]
    assert [hit.replaced_by for hit in found] == [None, left[1]]
    assert [event.id for event in memory.history(left[1])] == left


def test_history_shows_the_versions_that_a_record_replaced(open_memory: Opener) -> None:
    memory = open_memory()
    ids = [memory.add(text).id for text in CITIES]
    memory.add_many(FACTS)
    events = memory.history(ids[2])
    assert [(event.id, event.kind, event.text) for event in events] == [
        (id, "add", text) for id, text in zip(ids, CITIES, strict=True)
    ]
    assert [event.id for event in memory.history(ids[1])] == ids[:2]
    assert memory.history(ids[2], user="ben") == []


def test_a_change_of_an_older_version_does_not_make_it_the_newest(open_memory: Opener) -> None:
    memory = open_memory()
    oslo, lima = memory.add_many(CITIES[:2])
    memory.update(oslo.id, metadata={"seen": True})
    memory.update(oslo.id, "Ann lives in Paris.")
    assert [hit.record.id for hit in memory.search("Where does Ann live?")] == [lima.id, oslo.id]
    assert [hit.replaced_by for hit in memory.search("Where does Ann live?")] == [None, lima.id]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_text_that_says_something_else_leaves_the_versions(open_memory: Opener, which: int) -> None:
    memory = open_memory()
    records = memory.add_many(CITIES)
    memory.update(records[which].id, FACTS[3])
    left = [record.id for record in records if record != records[which]]
    links = {record.id: record.replaces for record in memory.records()}
    assert links == {left[0]: None, left[1]: left[0], records[which].id: None}
    found = memory.search("Where does Ann live?")
    assert [hit.record.id for hit in found] == [*left[::-1], records[which].id]
    assert found.hits[2].replaced_by is None


def test_versions_are_ordered_across_one_that_a_filter_leaves_out(open_memory: Opener) -> None:
    memory = open_memory(ranking=Ranking(cosine=0, neural=0))  # which prefers the shorter text
    texts = [*CITIES[:2], "Ann lives in Rome these days."]
    memory.add_many(texts, metadata=[{"n": 1}, {"n": 2}, {"n": 1}])
    found = memory.search("Where does Ann live?", filters={"n": 1})
    assert texts_of(found) == [texts[2], texts[0]]
    assert [hit.bm25_rank for hit in found] == [2, 1]
    (left_out,) = memory.search("Where does Ann live?", filters={"n": 2})
    assert left_out.replaced_by == found.hits[0].record.id


def test_other_metadata_of_a_version_that_was_told_twice_does_not_make_it_the_newest(open_memory: Opener) -> None:
    memory = open_memory()
    first, _, second = [memory.add(text) for text in (CITIES[0], CITIES[0], CITIES[1])]
    memory.update(first.id, metadata={"seen": True})
    hits = memory.search("Where does Ann live?").hits
    assert [hit.record.id for hit in hits] == [second.id, first.id]
    memory.add(CITIES[0], metadata={"seen": True})
    assert memory.search("Where does Ann live?").hits[0].record.id == first.id


@pytest.mark.parametrize(
    ("one", "other", "query"),
    [
        ("The key of locker 3 is in the blue box.", "The key of locker 7 is in the blue box.", "the key of locker 3?"),
        ("Python 2 was released in 2000.", "Python 3 was released in 2008.", "When was Python 2 released?"),
        ("The code of door A is 4711.", "The code of door B is 9002.", "What is the code of door A?"),
        ("I take aspirin in the morning.", "I take zinc in the evening.", "What do I take in the morning?"),
        ("I work in Oslo on Mondays.", "I work in Bergen on Fridays.", "Where do I work on Mondays?"),
        ("In 2021 I lived in Rome.", "In 2023 I lived in Bonn.", "Where did I live in 2021?"),
    ],
)
def test_the_statement_that_a_question_names_comes_first(open_memory: Opener, one: str, other: str, query: str) -> None:
    memory = open_memory()
    memory.add(one)
    memory.add(other)
    assert texts_of(memory.search(query))[0] == one


def test_versions_are_of_one_scope_and_one_role(open_memory: Opener) -> None:
    memory = open_memory()
    records = [
        memory.add(CITIES[0]),
        memory.add(CITIES[1], session="one"),
        memory.add(CITIES[1], user="ben"),
        memory.add(CITIES[1], role="assistant"),
    ]
    assert [record.replaces for record in records] == [None] * 4


def test_an_import_keeps_repeats_and_versions(open_memory: Opener, tmp_path: Path) -> None:
    memory, other = open_memory(), open_memory("other")
    memory.add_many([*CITIES, CITIES[0], FACTS[0]])
    memory.export(tmp_path / "a.jsonl")
    other.import_(tmp_path / "a.jsonl")
    assert other.records() == memory.records()
    assert {record.text: record.repeats for record in other.records()} == dict.fromkeys([*CITIES, FACTS[0]], 0) | {
        CITIES[0]: 1
    }
    assert texts_of(other.search("Where does Ann live?"))[:3] == [CITIES[0], CITIES[2], CITIES[1]]


def test_lines_without_ids_are_imported_once(open_memory: Opener, tmp_path: Path) -> None:
    memory, file = open_memory(), tmp_path / "a.jsonl"
    lines: list[dict[str, Any]] = [{"text": FACTS[0]}, {"text": FACTS[1], "user": "ben"}, {"text": FACTS[0]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": FACTS[0], "metadata": {"n": 1}}]))
    assert memory.import_(file) == 3
    assert memory.import_(file) == 0
    assert memory.stats()["records"] == 3


def test_an_update_that_meets_another_writes_the_vector_of_its_own_text(
    open_memory: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_memory(), open_memory()
    record = one.add(FACTS[0])
    change = one._change

    def late(*arguments: Any) -> bool:
        monkeypatch.undo()
        other.update(record.id, FACTS[1])
        return change(*arguments)

    monkeypatch.setattr(one, "_change", late)
    one.update(record.id, FACTS[0])  # what it was, so that nothing is to be done, until the other one is
    assert one.get(record.id).text == FACTS[0]
    never_changed = open_memory("never changed")
    never_changed.add(FACTS[0])
    assert bits(one) == bits(never_changed)
    assert one.check() == []


def told(id: str, text: str, replaces: str, **names: str) -> Record:
    return Record.from_dict({"id": id, "text": text, "replaces": replaces, **names})


def test_a_record_replaces_only_what_its_scope_was_told_before(open_memory: Opener) -> None:
    memory = open_memory()
    theirs = memory.add(CITIES[0], user="ann", session="one")
    memory.restore(
        [
            told("a", CITIES[0], "b"),
            told("b", CITIES[1], "a"),
            told("c", CITIES[2], "c"),
            told("d", FACTS[0], "gone"),
            told("e", FACTS[1], theirs.id),
            told("f", CITIES[1], theirs.id, user="ann", session="two"),
            told("g", CITIES[1], theirs.id, user="ann", session="one"),
            told("h", CITIES[2], "g", user="ann", session="one"),
        ]
    )
    links = {r.id: r.replaces for user in ("default", "ann") for r in memory.records(user=user)}
    assert links == {
        "a": None, "b": "a", "c": None, "d": None, "e": None, "f": None, "g": theirs.id, "h": "g", theirs.id: None,
    }  # fmt: skip
    assert all(hit.record.user == "ann" for hit in memory.search(CITIES[0], user="ann", session="one"))
    assert [event.id for event in memory.history("b")] == ["a", "b"]
    assert memory.restore([told("i", FACTS[3], "b")]) == 1
    assert memory.get("i") == memory.records(limit=1)[0] and memory.records(limit=1)[0].replaces == "b"


def test_words_that_are_too_common_are_named_and_the_meaning_still_has_them(
    open_memory: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory()
    memory.add_many(TEXTS)  # 42 times "likes", 7 times "cat"
    question = "Who likes the cat, and likes cats like the owl?"
    assert memory.search(question).ignored == ()
    few = functools.partial(memory.store.find_words, most=14)
    monkeypatch.setattr(memory.store, "find_words", few)
    found = memory.search(question)
    assert set(found.ignored) == {"likes", "like"}
    assert found.hits[0].bm25 is not None
    assert memory.search("likes").ignored == ()  # the rarest word is always looked up


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": ""}, "text is empty"),
        ({"text": " \n"}, "text is empty"),
        ({"text": 5}, "text is of type int; expected a text"),
        ({"text": "x" * 1_000_001}, "text has 1,000,001 bytes; expected at most 1,000,000"),
        ({"text": "half \ud800 pair"}, "text is not valid UTF-8 at character 5"),
        ({"text": "a\x00b"}, r"text has the control character U\+0000 at character 1"),
        ({"text": "\x1b[31mred"}, r"control character U\+001B at character 0"),
        ({"text": "x", "user": ""}, "user has 0 characters"),
        ({"text": "x", "user": "u" * 201}, "user has 201 characters; expected a name of 1 to 200"),
        ({"text": "x", "user": None}, "user is of type NoneType"),
        ({"text": "x", "agent": "a\n"}, r"agent has the control character U\+000A"),
        ({"text": "x", "session": "\udfff"}, "session is not valid UTF-8"),
        ({"text": "x", "role": ""}, "role has 0 characters"),
        ({"text": "x", "metadata": [1]}, "metadata is 1; expected an object|metadata has 1 entries; expected 2"),
        ({"text": "x", "metadata": {"a": math.nan}}, "metadata cannot be written as JSON"),
        ({"text": "x", "metadata": {"a": object()}}, "metadata cannot be written as JSON"),
        ({"text": "x", "metadata": {1: 2}}, "expected an object whose keys are texts"),
        ({"text": "x", "metadata": {"a": "x" * 70_000}}, "metadata has 70,009 bytes"),
        ({"text": "x", "created": "yesterday"}, "created is 'yesterday'; expected a time"),
    ],
)
def test_wrong_input_is_one_sentence_and_changes_nothing(
    open_plain: Opener, arguments: dict[str, Any], words: str
) -> None:
    memory = open_plain()
    memory.add("there")
    with pytest.raises(ValueError, match=words) as caught:
        memory.add(**arguments)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=words.replace("text ", "(texts.1.|text) ", 1)):
        memory.add_many(["good", arguments.pop("text")], **arguments)
    assert memory.stats()["records"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": ""}, "query is empty"),
        ({"query": "x", "limit": 0}, "limit is 0; expected a whole number, 1 to 1,000"),
        ({"query": "x", "limit": 2.5}, "limit is 2.5"),
        ({"query": "x", "threshold": math.nan}, "threshold is nan; expected a cosine"),
        ({"query": "x", "threshold": "high"}, "threshold is 'high'"),
        ({"query": "x", "filters": ["a"]}, "filters is .*; expected an object"),
        ({"query": "x", "filters": {"a": {"like": 1}}}, "filters.'a'. is .*; expected ne, gt"),
        ({"query": "x", "filters": {"a": None}}, "filters.'a'. compares with None"),
        ({"query": "x", "user": ""}, "user has 0 characters"),
    ],
)
def test_a_wrong_question_is_one_sentence(open_plain: Opener, arguments: dict[str, Any], words: str) -> None:
    memory = open_plain()
    memory.add("x")
    with pytest.raises(ValueError, match=words):
        memory.search(**arguments)


def test_a_long_text_is_remembered_whole(open_memory: Opener) -> None:
    memory = open_memory()
    text = "The lighthouse keeper wrote down every ship that passed. " * 200
    record = memory.add(text)
    memory.add_many(FACTS)
    assert memory.search("Who wrote down the ships?").hits[0].record.text == text
    assert memory.get(record.id) == record


def test_stats_count_the_store_or_a_user(open_memory: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "BETWEEN", 1)
    memory = open_memory()
    memory.add_many(TEXTS[:17], user="ann")
    memory.add_many(TEXTS[:3], user="ben", session="s")
    figures = memory.stats()
    assert (figures["records"], figures["users"], figures["scopes"], figures["states"]) == (20, 2, 2, 1)
    assert figures["encoder"] == memory.encoder.fingerprint
    assert figures["bytes"] > 17 * 4 * 384
    assert memory.stats("ben")["records"] == 3
    assert memory.stats("nobody")["records"] == 0


def test_the_asynchronous_memory_does_the_same(open_plain: Opener) -> None:
    memory = open_plain()

    async def talk() -> list[str]:
        twin = AsyncMemory(memory)
        records = await asyncio.gather(*(twin.add(text) for text in FACTS))
        await twin.update(records[3].id, "I am allergic to milk.")
        await twin.delete(records[2].id)
        found = await twin.search("Where does Anna live?", limit=1)
        assert (await twin.stats())["records"] == 3
        assert await twin.get(records[0].id) is not None
        return [hit.record.text for hit in found]

    assert asyncio.run(talk()) == [FACTS[0]]
    names = {name for name in vars(Memory) if not name.startswith("_") and callable(getattr(Memory, name))}
    assert names <= set(vars(AsyncMemory))


def test_a_store_that_was_closed_cannot_be_used(open_plain: Opener) -> None:
    memory = open_plain()
    memory.add("x")
    memory.close()
    with pytest.raises(StoreError, match="is closed"):
        memory.search("x")
    memory.close()
