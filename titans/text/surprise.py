"""What is surprising about a text: several things, since no single number tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titans.text.records import Record
from titans.text.versions import contradiction, likeness

LAST = 2  # texts that a new one is compared with to see whether the topic changes


@dataclass(frozen=True)
class Surprise:
    """How a text differs from what a scope was told; every part is 0 for what is nothing new.

    Attributes:
        loss: ||M(k) - v||^2, what the scope's memory does not expect. It is 0 to 4, falls with every repetition, and is
            what :class:`Record` keeps. It tells neither a change of topic nor a contradiction.
        drift: 1 - the cosine with the nearer of the last two texts: high where the topic changes.
        novelty: 1 - the cosine with the nearest of all texts: high for what was never talked about.
        contradiction: how sure it is that the text gives another value to a statement, between 0 and 1.
        contradicts: the id of the record with that statement; None if there is none.
    """

    loss: float
    drift: float
    novelty: float
    contradiction: float
    contradicts: str | None


def assess(
    text: str, vector: np.ndarray, loss: float, last: np.ndarray, nearest: Sequence[tuple[Record, float]]
) -> Surprise:
    """The parts of a text's surprise to a scope.

    Args:
        text: what is new.
        vector: (width,), of the text alone.
        loss: of the scope's memory on it.
        last: (n, width), the vectors of the scope's last texts, ``LAST`` of them or as many as there are.
        nearest: the scope's nearest records with their cosines, any number of them.
    """
    # What it says most of the same as: an older version of that statement would always differ.
    old = max(nearest, key=lambda each: likeness(text, each[0].text, each[1]), default=None)
    certain = contradiction(text, old[0].text, old[1]) if old is not None and old[0].text != text else 0.0
    return Surprise(
        loss=loss,
        drift=1 - float((last @ vector).max(initial=0.0)),
        novelty=1 - max((cosine for _, cosine in nearest), default=0.0),
        contradiction=certain,
        contradicts=old[0].id if old is not None and certain else None,
    )
