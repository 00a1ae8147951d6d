"""Convolution, SiLU and norms around the memory, fused and compiled (project.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans.ops.native.library import address, call
from titans.ops.native.library import takes as available

__all__ = ["Gate", "Project", "available"]


class Project(torch.autograd.Function):
    """x (batch, time, parts * heads * width) -> (parts, batch, heads, time, width), with norms; see project.c.

    ``past`` (batch, reach, channels) and ``kernel`` (reach + 1, channels) are None without a convolution.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, past: Tensor | None, kernel: Tensor | None, heads: int, eps: Sequence[float | None]
    ) -> Tensor:
        x = x.contiguous()
        past = None if past is None else past.contiguous()
        kernel = None if kernel is None else kernel.contiguous()
        batch, time, channels = x.shape
        reach = 0 if kernel is None else len(kernel) - 1
        parts = len(eps)
        width = channels // (parts * heads)
        numbers = (ctypes.c_double * parts)(*(-1.0 if e is None else e for e in eps))
        ctx.sizes = (batch, time, parts, heads, width, reach, torch.get_num_threads(), numbers)
        ctx.there = [past is not None, kernel is not None]
        ctx.save_for_backward(x, *(t for t in (past, kernel) if t is not None))
        result = x.new_empty(parts, batch, heads, time, width)
        call("titans_project", x.dtype, *ctx.sizes, *(address(t) for t in (x, past, kernel, result)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        past, kernel = ((others.pop(0) if there else None) for there in ctx.there)
        grads = [None if t is None else torch.zeros_like(t) for t in (x, past, kernel)]
        grad = grad.contiguous()
        call(
            "titans_project_backward", x.dtype, *ctx.sizes, *(address(t) for t in (x, past, kernel, grad, *grads))
        )  # fmt: skip
        return *grads, None, None


class Gate(torch.autograd.Function):
    """RMSNorm(y) * silu(gate): (batch, heads, time, width), (width,), (batch, time, heads * width) -> as the gate."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        y, weight, gate = y.contiguous(), weight.contiguous(), gate.contiguous()
        batch, heads, time, width = y.shape
        ctx.sizes = (batch, time, heads, width, torch.get_num_threads(), ctypes.c_double(eps))
        ctx.save_for_backward(y, weight, gate)
        result = torch.empty_like(gate)
        call("titans_gate", y.dtype, *ctx.sizes, *(address(t) for t in (y, weight, gate, result)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, gate = ctx.saved_tensors
        to_y, to_gate = torch.empty_like(y), torch.empty_like(gate)
        to_weight = weight.new_zeros(y.shape[1], len(weight))
        grad = grad.contiguous()
        tensors = (y, weight, gate, grad, to_y, to_weight, to_gate)
        call("titans_gate_backward", y.dtype, *ctx.sizes, *(address(t) for t in tensors))
        return to_y, to_weight.sum(0), to_gate, None
