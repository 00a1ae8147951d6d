"""BM25: how well the words of a question fit each of many texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

K1, B = 1.2, 0.75  # of BM25
STOP_WORDS = frozenset(
    """
    a about an and are as at be been but by can could did do does for from had has have he her him his how i if in into
    is it its me my no not of on or our she should so some than that the their them then there these they this to was
    we were what when where which who whom whose why will with would you your
    """.split()  # noqa: SIM905
)


def content_words(words: Sequence[str]) -> list[str]:
    """The words of a question without stop words; all of them if nothing else is left."""
    return [word for word in words if word.casefold() not in STOP_WORDS] or list(words)


def bm25(postings: Sequence[np.ndarray], count: int, total: int) -> tuple[np.ndarray, np.ndarray]:
    """BM25 over the records that may be found, and nothing else: no other record changes a score.

    Args:
        postings: for each word of the question (3, m): see :func:`count_words`.
        count, total: how many records may be found, and how many words they have.

    Returns:
        the numbers of the records that have a word of the question, and their scores, best first.
    """
    mean = max(1.0, total / max(1, count))
    found, parts = [np.empty(0, dtype=np.int64)], [np.empty(0)]
    for seqs, times, lengths in postings:
        weight = math.log(1 + (count - len(seqs) + 0.5) / (len(seqs) + 0.5))
        found.append(seqs)
        parts.append(weight * times * (K1 + 1) / (times + K1 * (1 - B + B * lengths / mean)))
    seqs, inverse = np.unique(np.concatenate(found), return_inverse=True)
    scores = np.bincount(inverse, weights=np.concatenate(parts), minlength=len(seqs))
    order = np.lexsort((seqs, -scores))
    return seqs[order], scores[order]
