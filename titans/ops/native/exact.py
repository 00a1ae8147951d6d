"""The exact rule for deep memory as a compiled loop (exact.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans.ops.flat import FlatRule, FlatState, FlatTokens, Tensors, Tiling, split_rest
from titans.ops.native.library import ACTIVATION_CODES, address, addresses, call, integers, plain, split_results

SEGMENT = 32  # tokens between two states that the backward pass keeps


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("rows", "tokens", "tile", "depth", "width_in", "width_out", "activation")),
        *((name, ctypes.c_int) for name in ("segment", "bias", "residual", "squared", "bounded", "decay_first")),
        *((name, ctypes.c_int) for name in ("first_order", "threads")),
        ("max_norm", ctypes.c_double),
    ]  # fmt: skip


class _Inputs(ctypes.Structure):
    _fields_ = [
        ("outs", ctypes.POINTER(ctypes.c_int)),
        ("ins", ctypes.POINTER(ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "step", "alpha", "eta", "live", "ends")),
        ("rest", ctypes.POINTER(ctypes.c_void_p)),
    ]  # fmt: skip


def run_exact(rule: FlatRule, tiling: Tiling, carry: FlatState, tokens: FlatTokens) -> tuple[FlatState, Tensors]:
    """What ``run_tiles`` gives, from the compiled loop, with gradients."""
    ends = None
    if rule.max_norm is not None:
        n = len(tokens.k)
        rows = [
            end.to(torch.uint8).repeat_interleave(n // len(end))
            if isinstance(end, Tensor)
            else torch.full((n,), bool(end), dtype=torch.uint8)
            for end in tiling.ends
        ]
        ends = torch.stack(rows, dim=1)
    live = None if tokens.live is None else tokens.live.to(torch.uint8).contiguous()
    rest = split_rest(tokens.rest, carry.weights)
    weights = tuple(w + r for w, r in zip(carry.weights, rest, strict=True)) if rest else carry.weights
    results: Tensors = _NativeExact.apply(
        rule, tiling.tile, live, ends, (len(weights), len(carry.momentum)),
        tokens.q, tokens.k, tokens.v, rule.scale * tokens.theta, tokens.alpha, tokens.eta,
        *weights, *carry.momentum, *rest,
    )  # fmt: skip
    outputs, state = split_results(rule, results)
    depth = len(weights)
    away = tuple(w - r for w, r in zip(state[:depth], rest, strict=True)) if rest else state[:depth]
    return FlatState(away, state[depth:], (), None), outputs


class _NativeExact(torch.autograd.Function):
    """titans_exact and titans_exact_backward of exact.c; (n, slots, ...) tokens, (n, out, in) states."""

    @staticmethod
    def forward(
        ctx: Any, rule: FlatRule, tile: int, live: Tensor | None, ends: Tensor | None, counts: tuple[int, int],
        *tensors: Tensor | None,
    ) -> Tensors:  # fmt: skip
        tokens, groups = list(plain(tensors[:6])), [w.detach() for w in tensors[6:] if w is not None]
        depth = counts[0]
        state = [w.clone(memory_format=torch.contiguous_format) for w in groups[: sum(counts)]]
        rest = [w.contiguous() for w in groups[sum(counts) :]]
        weights, momentum = state[:depth], state[depth:]
        settings, inputs = _describe(rule, tile, live, ends, weights, tokens, rest)
        n, slots = settings.rows, settings.tokens
        needs = any(ctx.needs_input_grad)
        saved = [w.new_empty(n, -(-slots // SEGMENT), *w.shape[1:]) for w in state] if needs else []
        y = weights[0].new_empty(n, slots, weights[-1].shape[1])
        outs = [w.shape[1] for w in weights]
        trace = y.new_empty(n, slots, 3 * sum(outs) - 2 * outs[-1]) if needs else None  # trace_width of exact.c
        clipped = torch.empty_like(ends) if needs and ends is not None else None
        gradient, loss = (y.new_empty(n, slots), y.new_empty(n, slots)) if rule.surprise else (None, None)
        call(
            "titans_exact", y.dtype, ctypes.byref(settings), ctypes.byref(inputs), addresses(weights),
            addresses(momentum),
            addresses(saved[:depth]), addresses(saved[depth:]), address(trace), address(clipped), address(y),
            address(gradient), address(loss),
        )  # fmt: skip
        ctx.rule, ctx.tile, ctx.live, ctx.clipped, ctx.counts = rule, tile, live, clipped, counts
        ctx.there = [x is not None for x in (*tokens, trace)]
        ctx.save_for_backward(*(x for x in (*tokens, trace) if x is not None), *rest, *saved)
        outputs = [y] if gradient is None or loss is None else [y, gradient, loss]
        return *outputs, *weights, *momentum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stored = iter(ctx.saved_tensors)
        *tokens, trace = [next(stored) if there else None for there in ctx.there]
        depth, total = ctx.counts[0], sum(ctx.counts)
        others = list(stored)
        rest, saved = others[: len(others) - total], others[len(others) - total :]
        settings, inputs = _describe(ctx.rule, ctx.tile, ctx.live, None, [w[:, 0] for w in saved[:depth]], tokens, rest)
        count = 3 if ctx.rule.surprise else 1
        outputs = list(plain(grads[:count]))
        gradient, loss = outputs[1:] if ctx.rule.surprise else (None, None)
        state = [g.clone(memory_format=torch.contiguous_format) for g in grads[count:]]
        to_tokens = [None if x is None else torch.empty_like(x) for x in tokens]
        to_rest = [torch.zeros_like(r) for r in rest]
        call(
            "titans_exact_backward", state[0].dtype, ctypes.byref(settings), ctypes.byref(inputs),
            addresses(saved[:depth]), addresses(saved[depth:]), address(trace), address(ctx.clipped),
            address(outputs[0]), address(gradient), address(loss), addresses(state[:depth]),
            addresses(state[depth:]), *(address(x) for x in to_tokens), addresses(to_rest),
        )  # fmt: skip
        return None, None, None, None, None, *to_tokens, *state, *to_rest


def _describe(
    rule: FlatRule,
    tile: int,
    live: Tensor | None,
    ends: Tensor | None,
    weights: Sequence[Tensor],
    tokens: Sequence[Tensor | None],
    rest: Sequence[Tensor],
) -> tuple[_Settings, _Inputs]:
    """The call's description for C; the tensors must outlive it."""
    k, v = tokens[1], tokens[2]
    assert k is not None and v is not None
    settings = _Settings(
        rows=k.shape[0], tokens=k.shape[1], tile=tile, depth=len(weights), width_in=k.shape[-1],
        width_out=v.shape[-1], activation=ACTIVATION_CODES[rule.network.activation], segment=SEGMENT,
        bias=rule.network.bias, residual=rule.network.residual, squared=rule.squared, bounded=rule.bounded,
        decay_first=rule.decay_first, first_order=rule.first_order, threads=torch.get_num_threads(),
        max_norm=rule.max_norm or 0.0,
    )  # fmt: skip
    inputs = _Inputs(
        integers([w.shape[1] for w in weights]),
        integers([w.shape[2] for w in weights]),
        *(address(x) for x in (*tokens, live, ends)),
        addresses(rest),
    )
    return settings, inputs
