"""Texts and questions as every arm of an experiment is given them, and how well what is found answers them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titans.text.encoder import TextEncoder
from titans.text.index import nearest_exact
from titans.text.memory import Memory
from titans.text.ranking import Ranking, fuse

Orders = list[list[int]]  # of every question, the places of texts, best first
Progress = Callable[[int, int, str], None]

# Reciprocal rank fusion as it is usually done; every voice is named, since what ships may change.
HYBRID = Ranking(bm25=1.0, cosine=1.0, neural=0.0, recency=0.0, surprise=0.0, constant=60.0, pool=50)
WORDS, MEANING = replace(HYBRID, cosine=0.0), replace(HYBRID, bm25=0.0)


class KnownEncoder(TextEncoder):
    """An encoder that keeps the vectors of texts in a file, since they are needed again and again."""

    def __init__(self, encoder: TextEncoder, file: Path) -> None:
        self.name, self.pooling, self.max_tokens = encoder.name, encoder.pooling, encoder.max_tokens
        self.width, self.fingerprint = encoder.width, encoder.fingerprint
        self._encoder, self._file = encoder, file
        self._known: dict[str, np.ndarray] = {}
        if file.is_file():
            kept = np.load(file)
            if str(kept["encoder"]) == self.fingerprint:
                self._known = dict(zip(kept["texts"].tolist(), kept["vectors"], strict=True))

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """As the encoder itself."""
        self.learn(texts)
        return np.stack([self._known[text] for text in texts])

    def learn(self, texts: Sequence[str], progress: Progress | None = None) -> None:
        """Computes what is missing, and keeps it."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._known]
        for start in range(0, len(missing), 64):
            if progress is not None:
                progress(start, len(missing), "reading texts")
            some = missing[start : start + 64]
            self._known |= dict(zip(some, self._encoder.encode(some), strict=True))
        if len(missing) > 64:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                self._file, encoder=self.fingerprint, texts=list(self._known), vectors=np.stack([*self._known.values()])
            )


@dataclass(frozen=True)
class Talk:
    """Texts in their order and questions about them, as vectors and as the voices that need no memory order them.

    Attributes:
        turns, asked: (n, width) and (m, width).
        evidence: of every question, the places of the turns that answer it.
        kinds: of every question, its category.
        words, meaning, shipped: the orders of BM25, of the cosine and of a search without any option.
    """

    name: str
    turns: Tensor
    asked: Tensor
    evidence: Sequence[Sequence[int]]
    kinds: Sequence[int]
    words: Orders
    meaning: Orders
    shipped: Orders


def listen(
    name: str, texts: Sequence[str], questions: Sequence[tuple[str, Sequence[int], int]], encoder: TextEncoder
) -> Talk:
    """Writes texts to a store of their own, and asks it; questions are (text, evidence, category)."""
    orders: list[Orders] = []
    with tempfile.TemporaryDirectory() as folder, Memory(folder, encoder=encoder) as memory:
        places = {record.id: place for place, record in enumerate(memory.add_many(texts))}
        for ranking in (WORDS, MEANING, memory.ranking):
            memory.ranking = ranking
            found = [memory.search(text, limit=HYBRID.pool) for text, _, _ in questions]
            orders.append([[places[hit.record.id] for hit in hits] for hits in found])
    turns, asked = (torch.from_numpy(encoder.encode(each)) for each in (texts, [text for text, _, _ in questions]))
    return Talk(name, turns, asked, [q[1] for q in questions], [q[2] for q in questions], *orders)


def name_nearest(asked: Tensor, records: Tensor) -> Orders:
    """For every row of (m, dim), the places of the records (n, dim) that it names, as the store's search does it."""
    matrix = records.numpy()
    return [nearest_exact(matrix, vector, HYBRID.pool)[0].tolist() for vector in asked.numpy()]


def join(talk: Talk, ranking: Ranking, third: Orders | None = None, meaning: Orders | None = None) -> Orders:
    """What a search finds with the voices that a ranking listens to.

    Args:
        talk: has the voices of words and of meaning.
        ranking: the weights.
        third: the neural voice.
        meaning: takes the place of the talk's own.
    """
    found = []
    for index in range(len(talk.evidence)):
        voices = {"bm25": talk.words[index], "cosine": (meaning or talk.meaning)[index]}
        if third is not None:
            voices["neural"] = third[index]
        heard = {name: places for name, places in voices.items() if getattr(ranking, name)}
        found.append([place for place, _ in fuse(heard, ranking)])
    return found


def judge(talk: Talk, orders: Orders) -> np.ndarray:
    """R@10, R@5 and the reciprocal rank of the first evidence, (m, 3)."""
    return np.array([measure(order, evidence) for order, evidence in zip(orders, talk.evidence, strict=True)])


def measure(order: Sequence[int], evidence: Sequence[int]) -> tuple[float, float, float]:
    """The shares of the evidence among the first 10 and the first 5, and 1 / the place of the first of it."""
    ranks = [rank for rank, place in enumerate(order, 1) if place in evidence]
    ten, five = (sum(rank <= many for rank in ranks) / len(evidence) for many in (10, 5))
    return ten, five, 1 / ranks[0] if ranks else 0.0
