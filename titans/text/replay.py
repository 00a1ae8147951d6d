"""A scope's memory, made from its texts, and the states that are kept along the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from titans.text.store import State

if TYPE_CHECKING:
    from titans.text.neural import NeuralTextMemory, ScopeMemory

BETWEEN = 64  # chunks between the states that are kept; the texts since the last one are replayed


@dataclass(frozen=True)
class Replay:
    """A scope's memory made again without some texts, or with others: what a deletion writes."""

    base: int  # the texts before this one are untouched
    memory: ScopeMemory | None
    surprises: list[tuple[int, float]]
    states: list[State]


def advance(
    neural: NeuralTextMemory, memory: ScopeMemory, vectors: np.ndarray
) -> tuple[ScopeMemory, np.ndarray, list[State]]:
    """Writes texts to a memory, and notes the states to keep.

    Args:
        neural: the projections.
        memory: the memory before.
        vectors: (n, width), of the texts.

    Returns:
        the new memory, the surprise of every text (n,), and the states.
    """
    start, end, step = memory.count, memory.count + len(vectors), neural.config.chunk_size * BETWEEN
    surprises, states = [], []
    for mark in [*range(start // step * step + step, end + 1, step), end]:
        part = vectors[memory.count - start : mark - start]
        if len(part):
            memory, found = neural.write(memory, part)
            surprises.append(found.numpy())
            if mark % step == 0:
                states.append(State(mark, neural.pack(memory)))
    return memory, np.concatenate([*surprises, np.empty(0, dtype=np.float32)]), states
