"""The neural voice of a search: what a memory does not expect of a question, held against records in their context."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops import MemoryState
from titans.text.neural import NeuralTextMemory


def unexpected(neural: NeuralTextMemory, state: MemoryState, vectors: Tensor) -> Tensor:
    """x - M(W_Q x), of length 1, for the vectors (batch, n, width) of questions -> (batch, n, dim).

    A memory that was told what it should answer (``associate="self"``) has learned what its texts have in common: the
    names of the speakers, what they always talk about. Take that away, and the rest of a question is what tells one
    text from the others. With M the ridge regression of the texts X on themselves the rest is
    (X^T X + lambda)^-1 x up to a factor: the question, whitened by the scope's own texts.
    """
    x = neural.project(vectors)
    return F.normalize(x - neural.answer(state, x), dim=-1)


def in_context(projected: Tensor, share: float) -> Tensor:
    """Texts in their order (..., n, dim), each with a share of the one before: a question is part of its answer."""
    return torch.cat([projected[..., :1, :], projected[..., 1:, :] + share * projected[..., :-1, :]], dim=-2)
