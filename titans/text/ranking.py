"""How the signals of a search are joined, and which records a full store evicts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from titans.text.details import details

NEAR = 0.55  # a plain statement with a higher cosine is rarely there by chance
MOST_POSTINGS = 5_000  # of the words of one question; the rarest words come first
POLICIES = ("informative", "longest", "fifo", "random")
SAFE = 8  # what has just come is safe from eviction while it is no more than this part of what stays


@dataclass(frozen=True)
class Ranking:
    """The weight of each signal of a search; reciprocal rank fusion joins them.

    A signal ranks candidates. The one at rank r (from 1) gets ``weight / (constant + r)``, and one that is very near to
    the question more. The sum, divided by what a candidate gets that is first everywhere, and 1 at most, is its score.
    The defaults were found by measurement (see docs/text-memory.md); equal weights, a constant of 60 and nothing for
    what is near are the usual hybrid.

    Args:
        bm25: the words of the question.
        cosine: its meaning, by the encoder.
        neural: what the memory of a scope does not expect of it; with 0 the memory is not asked.
        recency: newer candidates first.
        surprise: more surprising candidates first.
        constant: of the fusion; the larger it is, the less the first ranks stand out.
        pool: how many candidates each of the first three signals may name.
        context: for ``neural``, how much of the text before it in its scope is added to each text.
        candidates: for ``neural``, how many of the nearest texts are looked at, with those that follow them.
        near: what a cosine adds by which a plain statement is nearer to the question than ``NEAR``, whatever its rank.
    """

    bm25: float = 1.0
    cosine: float = 0.25
    neural: float = 0.8
    recency: float = 0.0
    surprise: float = 0.0
    constant: float = 4.0
    pool: int = 50
    context: float = 0.45
    candidates: int = 64
    near: float = 3.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} is {value!r}; expected a number that is not negative")
        for name in ("pool", "candidates"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")
        if self.bm25 + self.cosine + self.neural == 0:
            raise ValueError("bm25, cosine and neural are all 0; expected at least one of them to find something")


@dataclass(frozen=True)
class Eviction:
    """Which records a full store keeps.

    ``"informative"`` keeps those that tell most: the weighted sum of :func:`titans.text.details.details`, surprise, and
    the root of how often they were found or told again. ``"longest"`` keeps the longest, ``"fifo"`` the newest,
    ``"random"`` any.

    Args:
        policy: one of the four.
        details, surprise, uses: the weights of ``"informative"``.
        spare: share of the limit that is freed beyond what is needed, since every eviction replays the memories of
            its scopes.
        seed: of ``"random"``.
    """

    policy: str = "informative"
    details: float = 1.0
    surprise: float = 0.5
    uses: float = 1.0
    spare: float = 1 / 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; expected one of {', '.join(POLICIES)}")
        if not 0 <= self.spare < 1:
            raise ValueError(f"spare is {self.spare}; expected a share between 0 and 1")


def choose_evicted(
    rows: Sequence[tuple[int, float, int, str]], many: int, eviction: Eviction, keep: frozenset[int] = frozenset()
) -> list[int]:
    """Which records a full store evicts.

    Args:
        rows: (sequence number, surprise, uses, text) of every record, in their order.
        many: how many must go.
        eviction: the policy.
        keep: sequence numbers of records that have just come. They stay as long as there are others, but only the
            newest of them once they are more than an eighth of what stays: one batch does not flush a store.

    Returns:
        the sequence numbers of those to evict.
    """
    seqs = np.array([row[0] for row in rows], dtype=np.int64)
    if eviction.policy == "fifo":
        worth = np.arange(len(rows), dtype=np.float64)
    elif eviction.policy == "longest":
        worth = np.array([len(text.encode()) for *_, text in rows], dtype=np.float64)
    elif eviction.policy == "random":
        worth = np.array([_lot(eviction.seed, int(seq)) for seq in seqs])
    else:
        told = np.array([details(text) for *_, text in rows]) if eviction.details else 0.0
        surprise, uses = (np.array([row[column] for row in rows], dtype=np.float64) for column in (1, 2))
        worth = eviction.details * told + eviction.surprise * surprise + eviction.uses * np.sqrt(uses)
    safe = sorted(keep)[-max(1, (len(rows) - many) // SAFE) :]
    # Among equals the oldest goes.
    order = np.lexsort((seqs, worth, np.isin(seqs, safe)))
    return [int(seq) for seq in seqs[order[:many]]]


def _lot(seed: int, seq: int) -> float:
    """A number in [0, 1) that depends on nothing else: the same record always draws the same."""
    return int.from_bytes(hashlib.sha256(f"{seed} {seq}".encode()).digest()[:6], "big") / 2**48


def rarest(frequencies: Mapping[str, int], most: int = MOST_POSTINGS) -> list[str]:
    """The words to look up: from the rarest on, while all their records together are no more than ``most``.

    Words that no record has are left out; the rarest of the others is always included.
    """
    chosen: list[str] = []
    total = 0
    for word, frequency in sorted(frequencies.items(), key=lambda item: (item[1], item[0])):
        if frequency == 0:
            continue
        total += frequency
        if chosen and total > most:
            break
        chosen.append(word)
    return chosen


def count_words(
    posting: np.ndarray, seqs: np.ndarray, lengths: np.ndarray, allowed: np.ndarray | None = None
) -> np.ndarray:
    """(3, m): the numbers of the records that have a word and may be found, how often they have it, and their lengths.

    Args:
        posting: the numbers of the records that have the word, once per occurrence.
        seqs: (n,) the numbers of all records, sorted.
        lengths: (n,) their numbers of words.
        allowed: (n,) bool, which of them may be found; None: all.
    """
    found, times = np.unique(posting, return_counts=True)
    rows = np.searchsorted(seqs[:-1], found)
    there = seqs[rows] == found
    if allowed is not None:
        there &= allowed[rows]
    return np.stack([found[there], times[there], lengths[rows[there]]])


def fuse(
    orders: Mapping[str, Sequence[int]], ranking: Ranking, cosines: Mapping[int, float] | None = None
) -> list[tuple[int, float]]:
    """Reciprocal rank fusion.

    Args:
        orders: the candidates of each signal, by its name in :class:`Ranking`, best first.
        ranking: the weights.
        cosines: of candidates with the question, for what is near.

    Returns:
        (candidate, score) with the best first; among equals the later one, which is the newer.
    """
    scores: dict[int, float] = {}
    most = 0.0
    for name, order in orders.items():
        weight: float = getattr(ranking, name)
        most += weight / (ranking.constant + 1)
        for rank, candidate in enumerate(order, 1):
            scores[candidate] = scores.get(candidate, 0.0) + weight / (ranking.constant + rank)
    for candidate, cosine in (cosines or {}).items():
        scores[candidate] += ranking.near * max(0.0, cosine - NEAR)
    best_first = sorted(scores.items(), key=lambda item: (-item[1], -item[0])) if most else []
    return [(candidate, min(1.0, score / most)) for candidate, score in best_first]


def order_by(candidates: Sequence[int], value: Callable[[int], float | str]) -> list[int]:
    """Candidates with the highest value first; among equals the later one."""
    return sorted(candidates, key=lambda candidate: (value(candidate), candidate), reverse=True)
