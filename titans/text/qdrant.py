"""Qdrant as the vector index, for stores that outgrow one machine.

SQLite stays the record: texts, the log, the index of words, the memories and the order of writing are in its file, and
a write is done when that file has it. Qdrant holds, for every record, its vector and a payload that other programs can
read (text, names of the scope, metadata, times), and answers searches by meaning. It follows the log: what it has not
seen yet, because a process died or the server was away, it gets at the next write or opening, and all of it can be made
again from the store. A collection belongs to one store and one encoder. Deleting removes a record from both; a server
frees the bytes when it next optimises its files.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titans.text.index import Selection
from titans.text.records import Record, StoreError
from titans.text.sqlite import SqliteStore
from titans.words import sentence

BATCH = 256  # points of a request
TIMEOUT = 30  # seconds for an answer


class QdrantIndex:
    """The vectors of a store in Qdrant.

    Args:
        url: of a server (its key, if it needs one, is in ``QDRANT_API_KEY``); for local mode a folder or ":memory:".
        store, encoder: name the collection: the store's id and the fingerprint of what made its vectors.
        width: of the vectors.
    """

    def __init__(self, url: str, store: str, encoder: str, width: int) -> None:
        try:
            from qdrant_client import QdrantClient
        except ImportError:
            raise StoreError("a Qdrant index needs qdrant-client: pip install titan-memory[qdrant]") from None
        self.url, self.width = url, width
        self.collection = f"titans-{store[:16]}-{encoder}"
        self._folder = None if url == ":memory:" or "://" in url else Path(url)
        self._ready = False
        self._followed = 0  # of a collection that lives and dies with this process
        self._client: Any
        with self._as_sentences():
            if "://" in url:
                self._client = QdrantClient(
                    url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=TIMEOUT, check_compatibility=False
                )
            else:
                location: dict[str, Any] = {"location": url} if self._folder is None else {"path": url}
                self._client = QdrantClient(**location, force_disable_check_same_thread=True)

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def _make_collection(self) -> bool:
        """Makes the collection if it is not there; returns whether it was made."""
        models = _models()
        if self._client.collection_exists(self.collection):
            return False
        params = models.VectorParams(size=self.width, distance=models.Distance.COSINE)
        self._client.create_collection(self.collection, vectors_config=params)
        if "://" in self.url:  # local mode scans
            for name, kind in (("user", "keyword"), ("agent", "keyword"), ("session", "keyword"), ("scope", "integer")):
                self._client.create_payload_index(self.collection, name, field_schema=kind)
        return True

    def follow(self, store: SqliteStore) -> None:
        """Brings the collection up to the end of the store's log.

        The store is locked meanwhile, so that no older change can arrive after a newer one.
        """
        made = False
        if not self._ready:
            with self._as_sentences():
                made = self._make_collection()
            self._ready = True
        with store.reading():
            if not made and self._start(store) == store.last_event():
                return
        with store.writing(), self._as_sentences():
            events = store.events_after(0 if made else self._start(store))
            gone_scopes = sorted({scope for _, kind, _, scope in events if kind == "delete_all"})
            seqs = sorted({seq for _, _, seq, _ in events if seq is not None})
            erased = self._drop(gone_scopes)
            for first in range(0, len(seqs), BATCH):
                erased |= self._put(store, seqs[first : first + BATCH])
            self._followed = store.last_event()
            if self.url != ":memory:":
                store.set_meta(self._key, str(self._followed))
        if erased:
            self._wipe()

    def _start(self, store: SqliteStore) -> int:
        """The last line of the log that the collection has seen."""
        return self._followed if self.url == ":memory:" else int(store.get_meta(self._key) or 0)

    @property
    def _key(self) -> str:
        return f"followed:{self.collection}"

    def drop(self) -> None:
        """Deletes the collection."""
        with self._as_sentences():
            self._client.delete_collection(self.collection)

    def _put(self, store: SqliteStore, seqs: Sequence[int]) -> bool:
        """Writes records as they are now and deletes those that are gone; returns whether anything was erased."""
        models = _models()
        records = store.records(seqs)
        there = sorted(records)
        vectors = store.vectors(there, self.width)
        scopes = {seq: scope.id for scope, members in store.scopes_holding(there).items() for seq in members}
        points = [
            models.PointStruct(id=seq, vector=vector.tolist(), payload=_payload(records[seq], scopes[seq]))
            for seq, vector in zip(there, vectors, strict=True)
        ]
        if points:
            self._client.upsert(self.collection, points, wait=True)
        gone = [seq for seq in seqs if seq not in records]
        if gone:
            self._client.delete(self.collection, models.PointIdsList(points=gone), wait=True)
        # An upsert may have replaced an older text.
        return bool(gone) or any(record.version > 1 for record in records.values())

    def _drop(self, scopes: Sequence[int]) -> bool:
        models = _models()
        if not scopes:
            return False
        among = models.FieldCondition(key="scope", match=models.MatchAny(any=list(scopes)))
        selector = models.FilterSelector(filter=models.Filter(must=[among]))
        self._client.delete(self.collection, selector, wait=True)
        return True

    def _wipe(self) -> None:
        """Local mode leaves what was deleted in its file: the file is written again without it."""
        for file in self._folder.rglob("storage.sqlite") if self._folder else ():
            connection = sqlite3.connect(file)
            connection.execute("VACUUM")
            connection.close()

    def nearest(self, selection: Selection, vector: np.ndarray, many: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequence numbers of the nearest records of a selection, and their cosines, best first."""
        models = _models()
        must: list[Any] = [models.FieldCondition(key="user", match=models.MatchValue(value=selection.name))]
        if selection.scopes is not None:
            must.append(models.FieldCondition(key="scope", match=models.MatchAny(any=list(selection.scopes))))
        if selection.matching is not None:
            must.append(models.HasIdCondition(has_id=[int(seq) for seq in selection.matching]))
        with self._as_sentences():
            points = self._client.query_points(
                self.collection, query=vector.tolist(), query_filter=models.Filter(must=must), limit=many,
                with_payload=False,
            ).points  # fmt: skip
        seqs = np.array([int(point.id) for point in points], dtype=np.int64)
        return seqs, np.array([point.score for point in points], dtype=np.float32)

    @contextmanager
    def _as_sentences(self) -> Iterator[None]:
        """Turns what Qdrant raises into a :class:`StoreError` with one sentence."""
        try:
            yield
        except StoreError:
            raise
        except sqlite3.Error:  # the store's own
            raise
        except Exception as error:  # no connection, no such thing, wrong key: each its own class
            raise StoreError(f"Qdrant at {self.url} does not answer as expected: {sentence(error)[:200]}") from error


def _models() -> Any:
    from qdrant_client import models

    return models


def _payload(record: Record, scope: int) -> dict[str, Any]:
    # How surprising a record is changes when one before it is deleted, and how often it is used with every search.
    fields = {name: value for name, value in record.to_dict().items() if name not in ("surprise", "uses")}
    return {**fields, "scope": scope}
