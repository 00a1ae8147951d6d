from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.qdrant import QdrantIndex
from titans.text.records import StoreError

Opener = Callable[..., Memory]
TEXTS = ["The cat sleeps.", "The dog barks.", "Dinner is at eight.", "The key is under the mat."]


def mirror(memory: Memory) -> QdrantIndex:
    """The Qdrant index of a memory."""
    return memory._mirror()


def payloads(memory: Memory, user: str) -> list[dict[str, Any]]:
    """What Qdrant holds of a user."""
    points, _ = mirror(memory)._client.scroll(mirror(memory).collection, limit=100)
    return [point.payload for point in points if point.payload["user"] == user]


def texts(memory: Memory, user: str = "default") -> set[str]:
    return {payload["text"] for payload in payloads(memory, user)}


def test_other_programs_can_read_the_records_from_qdrant(tmp_path: Path, encoder: TextEncoder) -> None:
    with Memory(tmp_path / "s", encoder=encoder, url=":memory:") as memory:
        record = memory.add(TEXTS[0], user="ann", session="one", metadata={"n": 1})
        memory.add("The cat of ben sleeps.", user="ben")
        (payload,) = payloads(memory, "ann")
    assert payload["id"] == record.id and payload["created"] == record.created
    assert (payload["text"], payload["session"], payload["metadata"]) == (TEXTS[0], "one", {"n": 1})


def test_qdrant_follows_every_change(tmp_path: Path, encoder: TextEncoder) -> None:
    with Memory(tmp_path / "s", encoder=encoder, url=":memory:") as memory:
        records = memory.add_many(TEXTS, user="ann", session="one")
        memory.add("The hen sings.", user="ann", session="two")
        memory.update(records[0].id, "The fox sleeps.")
        memory.delete(records[1].id)
        assert texts(memory, "ann") == {"The fox sleeps.", *TEXTS[2:], "The hen sings."}
        memory.delete_all(user="ann", session="one")
        assert texts(memory, "ann") == {"The hen sings."}


def test_what_was_written_without_qdrant_gets_there_later(tmp_path: Path, encoder: TextEncoder) -> None:
    folder = str(tmp_path / "qdrant")
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        first = memory.add(TEXTS[0])
    with Memory(tmp_path / "s", encoder=encoder) as memory:
        memory.add(TEXTS[1])
        memory.delete(first.id)
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        assert [hit.record.text for hit in memory.search("animals")] == [TEXTS[1]]
        assert texts(memory) == {TEXTS[1]}
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


def test_reindexing_makes_a_new_collection_and_drops_the_old(
    tmp_path: Path, encoder: TextEncoder, other_encoder: TextEncoder
) -> None:
    folder = str(tmp_path / "qdrant")
    with Memory(tmp_path / "s", encoder=encoder, url=folder) as memory:
        memory.add_many(TEXTS)
        old = mirror(memory).collection
    with Memory(tmp_path / "s", encoder=other_encoder, url=folder) as memory:
        memory.reindex()
        assert texts(memory) == set(TEXTS)
        assert mirror(memory).collection != old
        assert not mirror(memory)._client.collection_exists(old)
