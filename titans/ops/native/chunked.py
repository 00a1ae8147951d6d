"""The chunked rule as a compiled loop (chunked.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans.ops.flat import FlatRule, FlatState, FlatTokens, Tensors, split_rest
from titans.ops.native.library import ACTIVATION_CODES, address, addresses, call, integers, plain, split_results

SEGMENT = 64  # tokens between two states that the backward pass keeps, if chunks are shorter


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("rows", "slots", "tile", "depth", "width_in", "width_out", "activation")),
        *((name, ctypes.c_int) for name in ("every", "bias", "residual", "squared", "bounded", "crowding")),
        *((name, ctypes.c_int) for name in ("first_order", "momentum", "threads")),
        ("max_norm", ctypes.c_double),
    ]  # fmt: skip


class _Inputs(ctypes.Structure):
    _fields_ = [
        ("outs", ctypes.POINTER(ctypes.c_int)),
        ("ins", ctypes.POINTER(ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "theta", "alpha", "eta", "live")),
        ("rest", ctypes.POINTER(ctypes.c_void_p)),
    ]  # fmt: skip


def run_chunked(
    rule: FlatRule, tile: int, carry: FlatState, tokens: FlatTokens, every: int | None
) -> tuple[FlatState, Tensors]:
    """What ``run_tiles`` gives for whole chunks of ``tile`` tokens, with gradients.

    The backward pass keeps the state at every ``every``-th chunk; default: at every chunk, or every ``SEGMENT`` tokens.
    """
    every = max(1, min(every or SEGMENT // tile, tokens.k.shape[1] // tile))
    results: Tensors = _NativeChunked.apply(
        rule, tile, every, tokens.live, (len(carry.weights), len(carry.momentum)),
        tokens.q, tokens.k, tokens.v, tokens.theta, tokens.alpha, tokens.eta,
        *carry.weights, *carry.momentum, *split_rest(tokens.rest, carry.weights),
    )  # fmt: skip
    outputs, state = split_results(rule, results)
    depth = len(carry.weights)
    return FlatState(state[:depth], state[depth:], (), None), outputs


class _NativeChunked(torch.autograd.Function):
    """titans_chunked and titans_chunked_backward of chunked.c; (n, slots, ...) tokens, (n, out, in) states."""

    @staticmethod
    def forward(
        ctx: Any, rule: FlatRule, tile: int, every: int, live: Tensor | None, counts: tuple[int, int],
        *tensors: Tensor | None,
    ) -> Tensors:  # fmt: skip
        tokens, groups = list(plain(tensors[:6])), [w.detach() for w in tensors[6:] if w is not None]
        depth = counts[0]
        state = [w.clone(memory_format=torch.contiguous_format) for w in groups[: sum(counts)]]
        rest = [w.contiguous() for w in groups[sum(counts) :]]
        weights, momentum = state[:depth], state[depth:]
        live = None if live is None else live.contiguous()
        settings, inputs = _describe(rule, tile, every, live, counts, weights, tokens, rest)
        n, slots = settings.rows, settings.slots
        saved: list[Tensor] = []
        if any(ctx.needs_input_grad):
            parts = 2 if momentum else 1
            saved = [w.new_empty(n, -(-slots // tile // every), parts, *w.shape[1:]) for w in weights]
        y = weights[0].new_empty(n, slots, weights[-1].shape[1])
        gradient, loss = (y.new_empty(n, slots), y.new_empty(n, slots)) if rule.surprise else (None, None)
        clipped = torch.zeros(n, slots // tile, dtype=torch.uint8)
        call(
            "titans_chunked", y.dtype, ctypes.byref(settings), ctypes.byref(inputs), addresses(weights),
            addresses(momentum), addresses(saved), address(clipped), address(y), address(gradient), address(loss),
        )  # fmt: skip
        ctx.rule, ctx.tile, ctx.every, ctx.live, ctx.counts, ctx.clipped = rule, tile, every, live, counts, clipped
        ctx.there = [x is not None for x in tokens]
        ctx.save_for_backward(*(x for x in tokens if x is not None), *rest, *saved)
        outputs = [y] if gradient is None or loss is None else [y, gradient, loss]
        return *outputs, *weights, *momentum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stored = iter(ctx.saved_tensors)
        tokens = [next(stored) if there else None for there in ctx.there]
        depth = ctx.counts[0]
        others = list(stored)
        rest, saved = others[:-depth], others[-depth:]
        count = 3 if ctx.rule.surprise else 1
        outputs = list(plain(grads[:count]))
        gradient, loss = outputs[1:] if ctx.rule.surprise else (None, None)
        state = [g.clone(memory_format=torch.contiguous_format) for g in grads[count:]]
        settings, inputs = _describe(ctx.rule, ctx.tile, ctx.every, ctx.live, ctx.counts, state[:depth], tokens, rest)
        to_tokens = [None if x is None else torch.empty_like(x) for x in tokens]
        to_rest = [torch.zeros_like(r) for r in rest]
        call(
            "titans_chunked_backward", state[0].dtype, ctypes.byref(settings), ctypes.byref(inputs), addresses(saved),
            address(ctx.clipped), address(outputs[0]), address(gradient), address(loss), addresses(state[:depth]),
            addresses(state[depth:]), *(address(x) for x in to_tokens), addresses(to_rest),
        )  # fmt: skip
        return None, None, None, None, None, *to_tokens, *state, *to_rest


def _describe(
    rule: FlatRule,
    tile: int,
    every: int,
    live: Tensor | None,
    counts: tuple[int, int],
    weights: Sequence[Tensor],
    tokens: Sequence[Tensor | None],
    rest: Sequence[Tensor],
) -> tuple[_Settings, _Inputs]:
    """The call's description for C; the tensors must outlive it."""
    k, v = tokens[1], tokens[2]
    assert k is not None and v is not None
    settings = _Settings(
        rows=k.shape[0], slots=k.shape[1], tile=tile, depth=len(weights), width_in=k.shape[-1],
        width_out=v.shape[-1], activation=ACTIVATION_CODES[rule.network.activation], every=every,
        bias=rule.network.bias, residual=rule.network.residual, squared=rule.squared, bounded=rule.bounded,
        crowding=rule.crowding, first_order=rule.first_order, momentum=bool(counts[1]),
        threads=torch.get_num_threads(), max_norm=rule.max_norm or 0.0,
    )  # fmt: skip
    inputs = _Inputs(
        integers([w.shape[1] for w in weights]),
        integers([w.shape[2] for w in weights]),
        *(address(x) for x in (*tokens, live)),
        addresses(rest),
    )
    return settings, inputs
