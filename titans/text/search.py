"""A search: each voice names candidates, reciprocal rank fusion joins them, and every hit can say why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Protocol

import numpy as np

from titans.text.index import LocalIndex, Selection, among, nearest_exact
from titans.text.ranking import Ranking, bm25, content_words, fuse, order_by, rarest
from titans.text.records import Found, Hit, Record
from titans.text.sqlite import WORD, SqliteStore


class Nearest(Protocol):
    """A vector index."""

    def nearest(self, selection: Selection, vector: np.ndarray, many: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of the nearest records of a selection, and their cosines, best first."""


class Voices:
    """What is known of a question to a selection of records; used while the store is being read.

    Args:
        store: has the records.
        local: keeps the user's places in memory.
        index: finds the nearest vectors; ``local`` itself, or Qdrant.
        selection: nothing but these records is looked at.
        query: the question.
        vector: (width,), its vector.
    """

    def __init__(
        self,
        store: SqliteStore,
        local: LocalIndex,
        index: Nearest,
        selection: Selection,
        query: str,
        vector: np.ndarray,
    ) -> None:
        self.store, self.index, self.selection, self.query, self.vector = store, index, selection, query, vector
        self._exact = local is index
        self._known = local.catalogue(selection.user, vectors=self._exact)
        self._allowed = self._known.allowed(selection)
        self._answer: np.ndarray | None = None
        self._project: Callable[[np.ndarray], np.ndarray] | None = None

    def add_memory(self, answer: np.ndarray | None, project: Callable[[np.ndarray], np.ndarray]) -> None:
        """Lets the scope's memory speak: its answer (dim,), and what takes vectors to its space."""
        self._answer, self._project = answer, project

    def find(self, ranking: Ranking, limit: int, threshold: float | None) -> tuple[Found, list[int]]:
        """The hits, best first, and their places."""
        pool = max(ranking.pool, limit)
        named: dict[str, dict[int, float]] = {}
        if ranking.bm25:
            named["bm25"] = self._ask_words(pool)
        if ranking.cosine:
            named["cosine"] = self._ask_vectors(pool)
        if ranking.neural:
            named["neural"] = self._ask_memory(pool, {place for values in named.values() for place in values})
        orders = {name: order_by(list(values), values.__getitem__) for name, values in named.items()}
        candidates = sorted({place for values in named.values() for place in values})
        records: dict[int, Record] = {}
        if ranking.recency or ranking.surprise:
            records = self.store.records(candidates)
        if ranking.recency:
            orders["recency"] = order_by(candidates, lambda place: records[place].created)
        if ranking.surprise:
            orders["surprise"] = order_by(candidates, lambda place: records[place].surprise)

        chosen: list[tuple[int, float]] = []
        cosines: dict[int, float] = {}
        for place, score in fuse(orders, ranking):
            # What an index says is rounded, and what the words have found it does not say.
            cosines[place] = float(self._vectors([place])[0] @ self.vector)
            if threshold is None or cosines[place] >= threshold:
                chosen.append((place, score))
                if len(chosen) == limit:
                    break
        below = len(cosines) - len(chosen)
        records |= self.store.records(place for place, _ in chosen if place not in records)
        ranks = {name: {place: rank for rank, place in enumerate(order, 1)} for name, order in orders.items()}
        hits = [
            Hit(
                record=records[place],
                score=score,
                cosine=cosines[place],
                cosine_rank=ranks.get("cosine", {}).get(place),
                bm25=named.get("bm25", {}).get(place),
                bm25_rank=ranks.get("bm25", {}).get(place),
                neural=named.get("neural", {}).get(place),
                neural_rank=ranks.get("neural", {}).get(place),
                surprise=records[place].surprise,
                age=_age(records[place]),
            )
            for place, score in chosen
        ]
        return Found(hits, below, threshold), [place for place, _ in chosen]

    def _ask_words(self, pool: int) -> dict[int, float]:
        """BM25 of the best records by the question's words."""
        stems = self.store.stems(self.selection.user.id, content_words(WORD.findall(self.query)))
        words = rarest({stem: self.store.frequency(stem) for stem in stems})
        postings = [self.store.places(word) for word in words]
        places, scores = bm25(postings, self._known.places, self._known.lengths, self._allowed)
        return dict(zip(places[:pool].tolist(), scores[:pool].tolist(), strict=True))

    def _ask_vectors(self, pool: int) -> dict[int, float]:
        """Cosines of the nearest records, as the index says them."""
        places, cosines = self.index.nearest(self.selection, self.vector, pool)
        known = self._known.places
        # Whatever an index says, nothing but the selection is looked at.
        inside = among(places, known if self._allowed is None else known[self._allowed])
        return dict(zip(places[inside].tolist(), cosines[inside].tolist(), strict=True))

    def _ask_memory(self, pool: int, found: set[int]) -> dict[int, float]:
        """Cosines of the best records with the answer of the scope's memory.

        Among all of a user's records while they are searched one by one, and among the candidates of the other voices
        once there are files of the index.
        """
        if self._answer is None or self._project is None:
            return {}
        known = self._known
        if self._exact and not known.files:
            if known.projected is None:
                known.projected = self._project(known.open_vectors)
            inside = slice(None) if self._allowed is None else self._allowed
            places, projected = known.open_places[inside], known.projected[inside]
        else:
            places = np.array(sorted(found), dtype=np.int64)
            projected = self._project(self._vectors(sorted(found)))
        rows, cosines = nearest_exact(projected, self._answer, pool)
        return dict(zip(places[rows].tolist(), cosines.tolist(), strict=True))

    def _vectors(self, places: list[int]) -> np.ndarray:
        return self.store.vectors(places, len(self.vector))


def _age(record: Record) -> float:
    return (datetime.now(timezone.utc) - datetime.fromisoformat(record.created)).total_seconds()
