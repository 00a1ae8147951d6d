"""RMSNorm, compiled (norm.c): on a CPU PyTorch makes a dozen passes of it, more in its backward pass."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans.ops.native.library import address, call
from titans.ops.native.library import takes as available

__all__ = ["RMSNorm", "available"]


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        width = len(weight)
        ctx.sizes = (ctypes.c_long(x.numel() // width), width, torch.get_num_threads(), ctypes.c_double(eps))
        y = torch.empty_like(x)
        call("titans_rms_norm", x.dtype, *ctx.sizes, *(address(t) for t in (x, weight, y)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, grad = torch.empty_like(x), torch.empty_like(weight), grad.contiguous()
        call(
            "titans_rms_norm_backward", x.dtype, *ctx.sizes, *(address(t) for t in (x, weight, grad, to_x, to_weight))
        )  # fmt: skip
        return to_x, to_weight, None
