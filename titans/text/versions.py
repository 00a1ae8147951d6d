"""Placeholder."""

from __future__ import annotations

from collections.abc import Sequence

from titans.text.records import Record

LEAST_COSINE = 0.6


def find_older_version(new: Record, candidates: Sequence[tuple[Record, float]]) -> Record | None:
    best = max(candidates, key=lambda each: each[1], default=None)
    return best[0] if best is not None and best[1] > 0.9 else None
