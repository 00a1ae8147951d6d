"""Derivatives that are written by hand, and have none themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

REFUSAL = (
    "a neural memory and its attention have no second derivative; expected a backward pass without create_graph=True, "
    "or titans.ops.run_memory with engine='definition'"
)
Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """PyTorch's decorator of that name, which takes what was saved as constant: a second derivative may then come out
    as zero without a word. This one refuses it."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        sources = [x for x in (*grads, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(None if x is None else _End.apply(x, *sources) for x in found)

    return run


class _End(torch.autograd.Function):
    """x, as a function of ``sources`` whose derivative nobody has written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *sources: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(REFUSAL)
