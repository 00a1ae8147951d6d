"""RMSNorm, compiled (norm.c): on a CPU PyTorch makes a dozen passes of it, more in its backward pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from titans.ops.native.library import call, empty
from titans.ops.native.operators import Loop, Results, make_operator


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return _rms_norm(x, weight, eps)[0]


def _allocate(x: Tensor, weight: Tensor, eps: float) -> Results:
    return [empty(x)], []


def _fill(results: list[Tensor], kept: list[Tensor], x: Tensor, weight: Tensor, eps: float) -> None:
    _call("titans_rms_norm", eps, x, weight, *results)


def _allocate_backward(grads: Sequence[Tensor], x: Tensor, weight: Tensor, eps: float) -> Results:
    return [empty(x), empty(weight)], []


def _fill_backward(
    results: list[Tensor], kept: list[Tensor], grads: Sequence[Tensor], x: Tensor, weight: Tensor, eps: float
) -> None:
    _call("titans_rms_norm_backward", eps, x, weight, *grads, *results)


def _call(name: str, eps: float, x: Tensor, weight: Tensor, *others: Tensor) -> None:
    width = weight.shape[0]
    sizes = (ctypes.c_long(x.numel() // width), width, torch.get_num_threads(), ctypes.c_double(eps))
    call(name, x.dtype, *sizes, x, weight, *others)


_rms_norm = make_operator(
    "rms_norm",
    Loop("Tensor x, Tensor weight, float eps", _allocate, _fill),
    Loop("Tensor[] grads, Tensor x, Tensor weight, float eps", _allocate_backward, _fill_backward),
    inputs=2,
    save=lambda args, results, kept: args,
)
