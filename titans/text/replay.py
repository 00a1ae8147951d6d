"""A scope's memory, made from its texts, and the states that are kept along the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from titans.text.neural import NeuralTextMemory, ScopeMemory
from titans.text.sqlite import State

SPARSE = 64  # chunks between the older states that are kept: a deletion replays from the last one before it


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
    """Writes texts to a memory, and notes the states to keep: after the last whole chunk, and sparse older ones.

    Args:
        neural: the projections.
        memory: the memory before.
        vectors: (n, width), of the texts.

    Returns:
        the new memory, the surprise of every text (n,), and the states.
    """
    size, start, end = neural.config.chunk_size, memory.count, memory.count + len(vectors)
    sparse = size * SPARSE
    marks = set(range(start // sparse * sparse + sparse, end + 1, sparse))
    if end // size * size > start:
        marks.add(end // size * size)
    surprises, states = [], []
    for mark in [*sorted(marks), end]:
        part = vectors[memory.count - start : mark - start]
        if len(part):
            memory, found = neural.write(memory, torch.from_numpy(part))
            surprises.append(found.numpy())
            if mark in marks:
                states.append(State(mark, neural.pack(memory), mark % sparse == 0))
    return memory, np.concatenate([*surprises, np.empty(0, dtype=np.float32)]), states
