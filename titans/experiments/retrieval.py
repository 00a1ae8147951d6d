"""Texts and questions as every arm of an experiment gets them, and how well a ranking of the texts answers."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titans.report.statistics import bootstrap
from titans.text.encoder import TextEncoder
from titans.text.index import nearest_exact
from titans.text.memory import Memory
from titans.text.ranking import Ranking, fuse

Orders = list[list[int]]  # for each question, the positions of texts, best first
Row = dict[str, Any]

# Reciprocal rank fusion as it is usually done. Every weight is written out, since the defaults may change.
HYBRID = Ranking(bm25=1.0, cosine=1.0, neural=0.0, recency=0.0, surprise=0.0, constant=60.0, pool=50, near=0.0)
WORDS, MEANING = replace(HYBRID, cosine=0.0), replace(HYBRID, bm25=0.0)


@dataclass(frozen=True)
class Corpus:
    """Texts in their order and questions about them, with the rankings that need no memory.

    Attributes:
        texts, questions: their vectors, (n, width) and (m, width).
        evidence: for each question, the positions of the texts that answer it.
        categories: one for each question.
        bm25, cosine, shipped: how words, meaning, and a search without any option rank the texts for each question.
    """

    name: str
    texts: Tensor
    questions: Tensor
    evidence: Sequence[Sequence[int]]
    categories: Sequence[int]
    bm25: Orders
    cosine: Orders
    shipped: Orders


def make_corpus(
    name: str, texts: Sequence[str], questions: Sequence[tuple[str, Sequence[int], int]], encoder: TextEncoder
) -> Corpus:
    """Writes texts to a store of their own and searches it; questions are (text, evidence, category)."""
    asked = [text for text, _, _ in questions]
    orders: list[Orders] = []
    with tempfile.TemporaryDirectory() as folder, Memory(folder, encoder=encoder) as memory:
        positions = {record.id: position for position, record in enumerate(memory.add_many(texts))}
        for ranking in (WORDS, MEANING, memory.ranking):
            memory.ranking = ranking
            found = [memory.search(text, limit=HYBRID.pool) for text in asked]
            orders.append([[positions[hit.record.id] for hit in hits] for hits in found])
    evidence, categories = [question[1] for question in questions], [question[2] for question in questions]
    vectors, asked_vectors = (torch.from_numpy(encoder.encode(each)) for each in (texts, asked))
    return Corpus(name, vectors, asked_vectors, evidence, categories, *orders)


def rank_nearest(questions: Tensor, texts: Tensor) -> Orders:
    """For each row of (m, dim), the positions of the nearest rows of (n, dim), as the store's search finds them."""
    matrix = texts.numpy()
    return [nearest_exact(matrix, vector, HYBRID.pool)[0].tolist() for vector in questions.numpy()]


def rank_fused(corpus: Corpus, ranking: Ranking, **more: Orders) -> Orders:
    """What a search finds with the given weights.

    Args:
        corpus: has the orders of ``bm25`` and ``cosine``.
        ranking: the weights; an order whose weight is 0 is not used.
        more: other orders by their names in :class:`Ranking`; ``cosine`` takes the place of the corpus's own.
    """
    orders = {"bm25": corpus.bm25, "cosine": corpus.cosine, **more}
    used = {name: order for name, order in orders.items() if getattr(ranking, name)}
    return [
        [position for position, _ in fuse({name: order[index] for name, order in used.items()}, ranking)]
        for index in range(len(corpus.evidence))
    ]


def score(corpus: Corpus, orders: Orders) -> np.ndarray:
    """R@10, R@5 and the reciprocal rank of the first evidence, (m, 3)."""
    return np.array([score_order(order, evidence) for order, evidence in zip(orders, corpus.evidence, strict=True)])


def score_order(order: Sequence[int], evidence: Sequence[int]) -> tuple[float, float, float]:
    """The shares of the evidence among the first 10 and the first 5, and 1 / the rank of the first of it."""
    ranks = [rank for rank, position in enumerate(order, 1) if position in evidence]
    ten, five = (sum(rank <= many for rank in ranks) / len(evidence) for many in (10, 5))
    return ten, five, 1 / ranks[0] if ranks else 0.0


def estimate(values: Sequence[float]) -> Row:
    """The mean and its 95% interval."""
    low, high = bootstrap(values)
    return {"value": statistics.fmean(values), "low": low, "high": high}


def with_interval(each: Row, form: str = ".3f") -> str:
    """What :func:`estimate` returns, for a table."""
    value = format(each["value"], form)
    return value if each["low"] is None else f"{value} ({format(each['low'], form)} to {format(each['high'], form)})"
