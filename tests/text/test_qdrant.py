from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.qdrant import QdrantIndex
from titans.text.records import Scope, StoreError

Opener = Callable[..., Memory]
TEXTS = ["The cat sleeps.", "The dog barks.", "Dinner is at eight.", "The key is under the mat."]


def mirror(memory: Memory) -> QdrantIndex:
    """The Qdrant index of a memory."""
    return memory._mirror()


def names(memory: Memory, query: str, scope: Scope) -> set[str]:
    """What Qdrant alone answers."""
    return {record.text for record, _ in mirror(memory).search(memory.encoder.encode([query])[0], scope)}


def test_a_machine_without_the_store_can_search(tmp_path: Path, encoder: TextEncoder) -> None:
    folder = str(tmp_path / "qdrant")
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        memory.add_many(TEXTS, user="ann", session="one", metadata={"n": 1})
        memory.add("The cat of ben sleeps.", user="ben")
        store, fingerprint = memory.stats(), encoder.fingerprint
        with memory.store.reading():
            name = memory.store.get_meta("store")
    assert store["records"] == 5 and name is not None
    alone = QdrantIndex(folder, name, fingerprint, encoder.width)
    vector = encoder.encode(["The cat sleeps."])[0]
    found = alone.search(vector, Scope("ann"), many=2)
    assert (found[0][0].text, found[0][0].session, found[0][0].metadata) == (TEXTS[0], "one", {"n": 1})
    assert found[1][1] < found[0][1] == pytest.approx(1.0, abs=1e-5)
    assert [record.user for record, _ in alone.search(vector, Scope("ben"))] == ["ben"]
    assert alone.search(vector, Scope("ann", None, "two")) == []
    alone.close()


def test_qdrant_follows_every_change(tmp_path: Path, encoder: TextEncoder) -> None:
    with Memory(tmp_path / "s", encoder=encoder, url=":memory:") as memory:
        records = memory.add_many(TEXTS, user="ann", session="one")
        memory.add("The hen sings.", user="ann", session="two")
        memory.update(records[0].id, "The fox sleeps.")
        memory.delete(records[1].id)
        assert names(memory, "sleeps", Scope("ann")) == {"The fox sleeps.", *TEXTS[2:], "The hen sings."}
        memory.delete_all(user="ann", session="one")
        assert names(memory, "sleeps", Scope("ann")) == {"The hen sings."}


def test_what_was_written_without_qdrant_gets_there_later(tmp_path: Path, encoder: TextEncoder) -> None:
    folder = str(tmp_path / "qdrant")
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        first = memory.add(TEXTS[0])
    with Memory(tmp_path / "s", encoder=encoder) as memory:
        memory.add(TEXTS[1])
        memory.delete(first.id)
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        assert [hit.record.text for hit in memory.search("animals")] == [TEXTS[1]]
        assert names(memory, "animals", Scope()) == {TEXTS[1]}
    with Memory(tmp_path / "s", encoder=encoder, url=str(tmp_path / "another")) as memory:  # made again from the store
        assert [hit.record.text for hit in memory.search("animals")] == [TEXTS[1]]


def test_a_server_that_is_away_loses_nothing(tmp_path: Path, encoder: TextEncoder) -> None:
    with Memory(tmp_path / "s", encoder=encoder, url="http://127.0.0.1:9") as memory:
        with pytest.warns(UserWarning, match="is in .*, but not in Qdrant yet: Qdrant at http://127.0.0.1:9 does not"):
            record = memory.add(TEXTS[0])
        assert memory.get(record.id) == record
        with pytest.warns(UserWarning), pytest.raises(StoreError, match="does not answer as expected"):
            memory.search("cat")
    with Memory(tmp_path / "s", encoder=encoder, url=":memory:") as memory:
        assert [hit.record.text for hit in memory.search("cat")] == [TEXTS[0]]


def test_what_qdrant_should_not_have_is_not_shown(tmp_path: Path, encoder: TextEncoder) -> None:
    with Memory(tmp_path / "s", encoder=encoder, url=":memory:") as memory:
        memory.add_many(TEXTS, user="ann")
        secret = memory.add("The secret of ben", user="ben")
        from qdrant_client import models

        # A point that claims to be ann's, as if somebody had written to the server.
        wrong = models.PointStruct(id=5, vector=encoder.encode([secret.text])[0].tolist(), payload={"user": "ann"})
        stray = models.PointStruct(id=77, vector=encoder.encode([secret.text])[0].tolist(), payload={"user": "ann"})
        mirror(memory)._client.upsert(mirror(memory).collection, [wrong, stray])
        assert {hit.record.text for hit in memory.search(secret.text, user="ann")} == set(TEXTS)


def test_a_folder_in_use_is_said_in_a_sentence(tmp_path: Path, encoder: TextEncoder) -> None:
    folder = str(tmp_path / "qdrant")
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        memory.add(TEXTS[0])
        with pytest.raises(StoreError, match=r"does not answer as expected: Storage folder .* is already accessed"):
            QdrantIndex(folder, "x" * 32, "y", 384)


def test_reindexing_makes_a_new_collection_and_drops_the_old(tmp_path: Path, encoder: TextEncoder) -> None:
    folder = str(tmp_path / "qdrant")
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        memory.add_many(TEXTS)
        old = mirror(memory).collection
    other = TextEncoder(encoder.name, encoder._model, encoder._tokenizer, "cls", encoder.max_tokens)
    with Memory(tmp_path / "s", encoder=other, url=folder) as memory:
        memory.reindex()
        assert names(memory, "cat", Scope()) == set(TEXTS)
        assert mirror(memory).collection != old
        assert not mirror(memory)._client.collection_exists(old)
