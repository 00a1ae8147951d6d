"""The chunked rule as a compiled loop (chunked.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titans.ops.flat import FlatRule, FlatState, FlatTokens, Tensors, split_rest
from titans.ops.native.library import ACTIVATION_CODES, addresses, split_results
from titans.ops.native.operators import needs_gradients
from titans.ops.native.rules import Group, RuleLoop

SEGMENT = 64  # tokens between two states that the backward pass keeps, if chunks are shorter


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("rows", "slots", "tile", "depth", "width_in", "width_out", "activation")),
        *((name, ctypes.c_int) for name in ("every", "bias", "residual", "squared", "bounded", "crowding")),
        *((name, ctypes.c_int) for name in ("first_order", "momentum", "threads")),
        ("max_norm", ctypes.c_double),
    ]  # fmt: skip


def run_chunked(
    rule: FlatRule, tile: int, carry: FlatState, tokens: FlatTokens, every: int | None
) -> tuple[FlatState, Tensors]:
    """What ``run_tiles`` gives for whole chunks of ``tile`` tokens, with gradients.

    The backward pass keeps the state at every ``every``-th chunk; default: at every chunk, or every ``SEGMENT`` tokens.
    """
    gates = [x for x in (tokens.alpha, tokens.eta) if x is not None]
    state, rest = [*carry.weights, *carry.momentum], list(split_rest(tokens.rest, carry.weights))
    inputs = [tokens.q, tokens.k, tokens.v, tokens.theta, *gates]
    numbers = _LOOP.numbers(
        tile=tile, activation=ACTIVATION_CODES[rule.network.activation],
        every=max(1, min(every or SEGMENT // tile, tokens.k.shape[1] // tile)),
        bias=rule.network.bias, residual=rule.network.residual, squared=rule.squared, bounded=rule.bounded,
        crowding=rule.crowding, first_order=rule.first_order, alpha=tokens.alpha is not None,
        eta=tokens.eta is not None, momentum=bool(carry.momentum), surprise=rule.surprise,
        differentiable=needs_gradients(*inputs, *state, *rest),
    )  # fmt: skip
    results = _chunked(inputs, state, rest, tokens.live, None, numbers, rule.max_norm or 0.0)
    outputs, new_state = split_results(rule, results)
    depth = len(carry.weights)
    return FlatState(new_state[:depth], new_state[depth:], (), None), outputs


def _keep(named: Mapping[str, int], v: Tensor, state: Group, ends: Tensor | None) -> list[Tensor]:
    """Which chunks ended with a row clipped, and the states."""
    n, slots, _ = v.shape
    tiles, parts = slots // named["tile"], 1 + named["momentum"]
    room = (n, -(-tiles // named["every"]), parts)
    clipped = torch.zeros(n, tiles, dtype=torch.uint8, device=v.device)
    return [clipped, *(w.new_empty(*room, *w.shape[1:]) for w in state[: len(state) // parts])]


def _pass_kept(kept: Group, depth: int, named: Mapping[str, int]) -> Sequence[object]:
    return addresses(kept[1:]), kept[0] if kept else None


_LOOP = RuleLoop("chunked", _Settings, _keep, _pass_kept)
_chunked = _LOOP.make_operator()
