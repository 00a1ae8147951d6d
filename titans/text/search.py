"""A search: each signal names candidates, reciprocal rank fusion joins them, and every hit can say why."""

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
        """The sequence numbers of the nearest records of a selection, and their cosines, best first."""


class Search:
    """One question to a selection of records; used while the store is being read.

    Args:
        store: has the records.
        local: keeps the user's records in memory.
        index: finds the nearest vectors; ``local`` itself, or Qdrant.
        selection: nothing but these records is looked at.
        query: the question.
        vector: (width,), its vector.
        answer: (dim,), what the scope's memory answers to it; None: the memory is not asked.
        project: takes vectors to the space of the answer.
    """

    def __init__(
        self,
        store: SqliteStore,
        local: LocalIndex,
        index: Nearest,
        selection: Selection,
        query: str,
        vector: np.ndarray,
        answer: np.ndarray | None,
        project: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self.store, self.index, self.selection, self.query, self.vector = store, index, selection, query, vector
        self._answer, self._project = answer, project
        self._exact = local is index
        self._known = local.catalogue(selection.user, vectors=self._exact)
        self._allowed = self._known.allowed(selection)

    def find(self, ranking: Ranking, limit: int, threshold: float | None) -> tuple[Found, list[int]]:
        """The hits, best first, and their sequence numbers."""
        pool = max(ranking.pool, limit)
        named: dict[str, dict[int, float]] = {}
        if ranking.bm25:
            named["bm25"] = self._by_words(pool)
        if ranking.cosine:
            named["cosine"] = self._by_vector(pool)
        if ranking.neural:
            named["neural"] = self._by_memory(pool, {seq for values in named.values() for seq in values})
        orders = {name: order_by(list(values), values.__getitem__) for name, values in named.items()}
        candidates = sorted({seq for values in named.values() for seq in values})
        records: dict[int, Record] = {}
        if ranking.recency or ranking.surprise:
            records = self.store.records(candidates)
        if ranking.recency:
            orders["recency"] = order_by(candidates, lambda seq: records[seq].created)
        if ranking.surprise:
            orders["surprise"] = order_by(candidates, lambda seq: records[seq].surprise)

        chosen: list[tuple[int, float]] = []
        cosines: dict[int, float] = {}
        for seq, score in fuse(orders, ranking):
            # The index rounds its cosines, and has none for what only the words found.
            cosines[seq] = float(self._vectors([seq])[0] @ self.vector)
            if threshold is None or cosines[seq] >= threshold:
                chosen.append((seq, score))
                if len(chosen) == limit:
                    break
        below = len(cosines) - len(chosen)
        records |= self.store.records(seq for seq, _ in chosen if seq not in records)
        ranks = {name: {seq: rank for rank, seq in enumerate(order, 1)} for name, order in orders.items()}
        hits = [
            Hit(
                record=records[seq],
                score=score,
                cosine=cosines[seq],
                cosine_rank=ranks.get("cosine", {}).get(seq),
                bm25=named.get("bm25", {}).get(seq),
                bm25_rank=ranks.get("bm25", {}).get(seq),
                neural=named.get("neural", {}).get(seq),
                neural_rank=ranks.get("neural", {}).get(seq),
                surprise=records[seq].surprise,
                age=_age(records[seq]),
            )
            for seq, score in chosen
        ]
        return Found(hits, below, threshold), [seq for seq, _ in chosen]

    def _by_words(self, pool: int) -> dict[int, float]:
        """BM25 of the best records by the question's words."""
        stems = self.store.stems(self.selection.user.id, content_words(WORD.findall(self.query)))
        words = rarest({stem: self.store.frequency(stem) for stem in stems})
        postings = [self.store.postings(word) for word in words]
        seqs, scores = bm25(postings, self._known.seqs, self._known.lengths, self._allowed)
        return dict(zip(seqs[:pool].tolist(), scores[:pool].tolist(), strict=True))

    def _by_vector(self, pool: int) -> dict[int, float]:
        """Cosines of the nearest records, as the index has them."""
        seqs, cosines = self.index.nearest(self.selection, self.vector, pool)
        known = self._known.seqs
        # Whatever the index returns, nothing but the selection is looked at.
        inside = among(seqs, known if self._allowed is None else known[self._allowed])
        return dict(zip(seqs[inside].tolist(), cosines[inside].tolist(), strict=True))

    def _by_memory(self, pool: int, found: set[int]) -> dict[int, float]:
        """Cosines of the best records with the answer of the scope's memory.

        Among all of a user's records while they are searched one by one, and among the candidates of the other signals
        once there are files of the index.
        """
        if self._answer is None:
            return {}
        known = self._known
        if self._exact and not known.files:
            if known.projected is None:
                known.projected = self._project(known.open_vectors)
            inside = slice(None) if self._allowed is None else self._allowed
            seqs, projected = known.open_seqs[inside], known.projected[inside]
        else:
            seqs = np.array(sorted(found), dtype=np.int64)
            projected = self._project(self._vectors(sorted(found)))
        rows, cosines = nearest_exact(projected, self._answer, pool)
        return dict(zip(seqs[rows].tolist(), cosines.tolist(), strict=True))

    def _vectors(self, seqs: list[int]) -> np.ndarray:
        return self.store.vectors(seqs, len(self.vector))


def _age(record: Record) -> float:
    return (datetime.now(timezone.utc) - datetime.fromisoformat(record.created)).total_seconds()
