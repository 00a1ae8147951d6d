"""Convolution, SiLU and norms around the memory, fused and compiled (project.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from titans.ops.native.library import call, empty, zeros
from titans.ops.native.operators import Loop, Results, make_operator


def project(x: Tensor, past: Tensor | None, kernel: Tensor | None, heads: int, eps: Sequence[float | None]) -> Tensor:
    """x (batch, time, parts * heads * width) -> (parts, batch, heads, time, width), with norms; see project.c.

    ``past`` (batch, reach, channels) and ``kernel`` (reach + 1, channels) are None without a convolution.
    """
    return _project(x, past, kernel, heads, [-1.0 if e is None else e for e in eps])[0]


def gate(y: Tensor, weight: Tensor, by: Tensor, eps: float) -> Tensor:
    """RMSNorm(y) * silu(by): (batch, heads, time, width), (width,), (batch, time, heads * width) -> as the last."""
    return _gate(y, weight, by, eps)[0]


def _allocate_project(
    x: Tensor, past: Tensor | None, kernel: Tensor | None, heads: int, eps: Sequence[float]
) -> Results:
    batch, time, channels = x.shape
    return [x.new_empty(len(eps), batch, heads, time, channels // (len(eps) * heads))], []


def _fill_project(
    results: list[Tensor], kept: list[Tensor], x: Tensor, past: Tensor | None, kernel: Tensor | None, heads: int,
    eps: Sequence[float],
) -> None:  # fmt: skip
    _call_project("titans_project", heads, eps, x, past, kernel, *results)


def _allocate_project_backward(
    grads: Sequence[Tensor], x: Tensor, past: Tensor | None, kernel: Tensor | None, heads: int, eps: Sequence[float]
) -> Results:
    return [zeros(t) for t in (x, past, kernel) if t is not None], []


def _fill_project_backward(
    results: list[Tensor], kept: list[Tensor], grads: Sequence[Tensor], x: Tensor, past: Tensor | None,
    kernel: Tensor | None, heads: int, eps: Sequence[float],
) -> None:  # fmt: skip
    found = iter(results)
    to_inputs = (None if t is None else next(found) for t in (x, past, kernel))
    _call_project("titans_project_backward", heads, eps, x, past, kernel, *grads, *to_inputs)


def _call_project(
    name: str, heads: int, eps: Sequence[float], x: Tensor, past: Tensor | None, kernel: Tensor | None,
    *others: Tensor | None,
) -> None:  # fmt: skip
    batch, time, channels = x.shape
    parts, reach = len(eps), 0 if kernel is None else kernel.shape[0] - 1
    sizes = (batch, time, parts, heads, channels // (parts * heads), reach, torch.get_num_threads())
    call(name, x.dtype, *sizes, (ctypes.c_double * parts)(*eps), x, past, kernel, *others)


def _allocate_gate(y: Tensor, weight: Tensor, by: Tensor, eps: float) -> Results:
    return [empty(by)], []


def _fill_gate(results: list[Tensor], kept: list[Tensor], y: Tensor, weight: Tensor, by: Tensor, eps: float) -> None:
    _call_gate("titans_gate", eps, y, weight, by, *results)


def _allocate_gate_backward(grads: Sequence[Tensor], y: Tensor, weight: Tensor, by: Tensor, eps: float) -> Results:
    return [empty(y), empty(weight), empty(by)], []


def _fill_gate_backward(
    results: list[Tensor], kept: list[Tensor], grads: Sequence[Tensor], y: Tensor, weight: Tensor, by: Tensor,
    eps: float,
) -> None:  # fmt: skip
    to_y, to_weight, to_gate = results
    by_head = weight.new_zeros(y.shape[1], weight.shape[0])
    _call_gate("titans_gate_backward", eps, y, weight, by, *grads, to_y, by_head, to_gate)
    torch.sum(by_head, 0, out=to_weight)


def _call_gate(name: str, eps: float, y: Tensor, *others: Tensor) -> None:
    batch, heads, time, width = y.shape
    sizes = (batch, time, heads, width, torch.get_num_threads(), ctypes.c_double(eps))
    call(name, y.dtype, *sizes, y, *others)


_project = make_operator(
    "project",
    Loop("Tensor x, Tensor? past, Tensor? kernel, int heads, float[] eps", _allocate_project, _fill_project),
    Loop(
        "Tensor[] grads, Tensor x, Tensor? past, Tensor? kernel, int heads, float[] eps",
        _allocate_project_backward,
        _fill_project_backward,
    ),
    inputs=3,
    save=lambda args, results, kept: args,
)
_gate = make_operator(
    "gate",
    Loop("Tensor y, Tensor weight, Tensor by, float eps", _allocate_gate, _fill_gate),
    Loop("Tensor[] grads, Tensor y, Tensor weight, Tensor by, float eps", _allocate_gate_backward, _fill_gate_backward),
    inputs=3,
    save=lambda args, results, kept: args,
)
