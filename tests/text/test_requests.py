"""A call with a name is written once, however often it is made."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from tests.text.conftest import Opener, Place
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.records import UsedRequest

TEXTS = ["Ada plays the piano.", "Ben plays the drums."]


def test_the_same_call_returns_the_same_records_and_counts_no_repeat(open_memory: Opener) -> None:
    memory = open_memory()
    first = memory.add_many(TEXTS, user="ada", request="one")
    again = memory.add_many(TEXTS, user="ada", request="one")
    assert again == first
    assert [record.repeats for record in memory.records(user="ada")] == [0, 0]
    assert memory.add_many(TEXTS, user="ada")[0].repeats == 1
    assert memory.add(TEXTS[0], user="ben", request="one").user == "ben"


def test_another_call_of_that_name_writes_nothing(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add(TEXTS[0], user="ada", request="one")
    for other in ({"text": TEXTS[1]}, {"text": TEXTS[0], "session": "two"}, {"text": TEXTS[0], "role": "user"}):
        with pytest.raises(UsedRequest, match="has the name of another one"):
            memory.add(**{"user": "ada", "request": "one", **other})
    assert [(record.text, record.repeats) for record in memory.records(user="ada")] == [(TEXTS[0], 0)]


def test_agents_give_names_of_their_own(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add(TEXTS[0], user="ada", request="one")
    assert memory.add(TEXTS[1], user="ada", agent="bot", request="one").text == TEXTS[1]


def test_a_retry_is_answered_as_the_first_time_after_others_told_the_same(open_memory: Opener) -> None:
    memory = open_memory()
    told = [TEXTS[0], TEXTS[0], TEXTS[1]]
    first = memory.add_many(told, user="ada", request="one")
    memory.add_many(TEXTS, user="ada")
    again = memory.add_many(told, user="ada", request="one")
    assert [(record.id, record.repeats) for record in again] == [(record.id, record.repeats) for record in first]


def test_what_was_erased_does_not_come_back_by_a_late_retry(open_memory: Opener) -> None:
    memory = open_memory()
    record = memory.add(TEXTS[0], user="ada", request="one")
    memory.add(TEXTS[1], user="ada")
    memory.delete(record.id, user="ada")
    with pytest.raises(UsedRequest, match="was erased since"):
        memory.add(TEXTS[0], user="ada", request="one")


def test_two_of_the_same_name_at_once_are_one(open_memory: Opener) -> None:
    memories = [open_memory(), open_memory()]  # as two processes have the store
    memories[0].add(TEXTS[1], user="ada")
    barrier, ids = threading.Barrier(4), []

    def write(memory: Memory) -> None:
        barrier.wait()
        ids.append(memory.add(TEXTS[0], user="ada", request="one").id)

    threads = [threading.Thread(target=write, args=(memories[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 4
    assert len(set(ids)) == 1
    assert [record.repeats for record in memories[0].records(user="ada")] == [0, 0]


def test_old_requests_are_forgotten(open_memory: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = open_memory()
    memory.add(TEXTS[0], user="ada", request="one")
    for module in ("sqlite", "postgres"):
        monkeypatch.setattr(f"titans.text.{module}.oldest_request", lambda: "9999")
    assert memory.add(TEXTS[0], user="ada", request="one").repeats == 1


def test_nothing_of_a_text_or_a_name_is_kept_with_a_request(open_plain: Opener, tmp_path: Path) -> None:
    open_plain().add(TEXTS[0], user="ada", request="my secret name")
    with sqlite3.connect(tmp_path / "store" / "memory.sqlite3") as tables:
        kept = str(tables.execute("SELECT * FROM requests").fetchall())
    assert "piano" not in kept
    assert "secret" not in kept


def test_a_removed_user_leaves_no_requests(open_memory: Opener) -> None:
    memory = open_memory()
    memory.add(TEXTS[0], user="ada", request="one")
    memory.delete_all(user="ada")
    with memory.store.reading():
        assert memory.store._one("SELECT count(*) FROM requests")[0] == 0


@pytest.mark.slow
def test_a_writer_that_is_killed_and_made_again_writes_everything_once(place: Place, encoder: TextEncoder) -> None:
    texts = [f"Fact number {i} of those that a writer tells." for i in range(300)]
    encoder.encode(texts)
    for round in range(10):
        process = os.fork()
        if not process:
            with Memory(place("killed"), encoder=encoder) as memory:
                for index, text in enumerate(texts):
                    memory.add(text, user="ada", request=f"request {index}")
            os._exit(0)
        time.sleep(0.1 * (round + 1))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    with Memory(place("killed"), encoder=encoder) as memory:
        for index, text in enumerate(texts):
            memory.add(text, user="ada", request=f"request {index}")
        records = memory.records(user="ada", limit=1000)
    assert sorted(record.text for record in records) == sorted(texts)
    assert {record.repeats for record in records} == {0}


def test_pages_have_every_record_once(place: Place, open_memory: Opener, encoder: TextEncoder) -> None:
    memory = open_memory()
    memory.add_many([f"Number {i}." for i in range(7)], user="ada", metadata=[{"odd": i % 2} for i in range(7)])
    memory.add("Not hers.", user="ben")
    found, cursor = memory.page(user="ada", limit=3)
    while cursor is not None:
        memory.delete(found[-1].id, user="ada")  # a page does not begin at a record
        more, cursor = memory.page(user="ada", limit=3, cursor=cursor)
        found += more
    assert [record.text for record in found] == [f"Number {i}." for i in range(6, -1, -1)]
    assert [record.text for record in memory.page(user="ada", filters={"odd": 1}, limit=1)[0]] == ["Number 5."]
    assert memory.page(user="ada", limit=10)[1] is None
    with pytest.raises(ValueError, match="cursor is 'x'; expected what the page before gave"):
        memory.page(user="ada", cursor="x")
