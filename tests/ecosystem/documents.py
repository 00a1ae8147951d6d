"""What the documents of a packed row give alone."""

from __future__ import annotations

import torch
from torch import Tensor

from titans import TitansForCausalLM


def loss_alone(made: TitansForCausalLM, ids: Tensor, starts: list[int]) -> Tensor:
    """The mean over all targets of the documents that begin at ``starts`` of one row."""
    total, count = torch.zeros(()), 0
    for start, stop in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
        if stop - start > 1:
            part = ids[:, start:stop]
            total, count = total + made(part, labels=part).loss * (stop - start - 1), count + stop - start - 1
    return total / count
