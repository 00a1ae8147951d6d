"""The exact rule for deep memory as a compiled loop (exact.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titans.ops.flat import FlatRule, FlatState, FlatTokens, Tensors, Tiling, split_rest
from titans.ops.native.library import ACTIVATION_CODES, addresses, empty, split_results
from titans.ops.native.operators import needs_gradients
from titans.ops.native.rules import Group, RuleLoop

BLOCK = 32  # tokens that the backward pass of exact.c takes together
KEPT_NUMBERS = 1 << 23  # the states that a call keeps for its backward pass are this large, or a block apart


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("rows", "slots", "tile", "depth", "width_in", "width_out", "activation")),
        *((name, ctypes.c_int) for name in ("segment", "bias", "residual", "squared", "bounded", "decay_first")),
        *((name, ctypes.c_int) for name in ("first_order", "threads")),
        ("max_norm", ctypes.c_double),
    ]  # fmt: skip


def run_exact(
    rule: FlatRule, tiling: Tiling, carry: FlatState, tokens: FlatTokens, *, every: int | None
) -> tuple[FlatState, Tensors]:
    """What ``run_tiles`` gives, from the compiled loop, with gradients.

    The backward pass keeps the state at every ``every``-th tile; default: as often as ``KEPT_NUMBERS`` allows.
    """
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
    gates = [x for x in (tokens.alpha, tokens.eta) if x is not None]
    inputs, state = [tokens.q, tokens.k, tokens.v, rule.scale * tokens.theta, *gates], [*weights, *carry.momentum]
    slots = tokens.k.shape[1]
    segment = choose_segment(state, slots) if every is None else min(every * tiling.tile, slots)
    numbers = _LOOP.numbers(
        tile=tiling.tile, activation=ACTIVATION_CODES[rule.network.activation], segment=segment,
        bias=rule.network.bias, residual=rule.network.residual, squared=rule.squared, bounded=rule.bounded,
        decay_first=rule.decay_first, first_order=rule.first_order, alpha=tokens.alpha is not None,
        eta=tokens.eta is not None, momentum=bool(carry.momentum), surprise=rule.surprise,
        differentiable=needs_gradients(*inputs, *state, *rest),
    )  # fmt: skip
    results = _exact(inputs, state, list(rest), live, ends, numbers, rule.max_norm or 0.0)
    outputs, new_state = split_results(rule, results)
    depth = len(weights)
    away = tuple(w - r for w, r in zip(new_state[:depth], rest, strict=True)) if rest else new_state[:depth]
    return FlatState(away, new_state[depth:], (), None), outputs


def choose_segment(state: Group, slots: int) -> int:
    """Tokens between two states that the backward pass keeps; what lies between is computed again from the trace."""
    size, segment = sum(x.numel() for x in state), BLOCK
    while segment < slots and -(-slots // segment) * size > KEPT_NUMBERS:
        segment *= 2
    return segment


def _keep(named: Mapping[str, int], v: Tensor, state: Group, ends: Tensor | None) -> list[Tensor]:
    """What was found of every token, the states, and, if there is a guard, where it acted."""
    n, slots, _ = v.shape
    outs = [w.shape[1] for w in state[: len(state) // (1 + named["momentum"])]]
    trace = v.new_empty(n, slots, 3 * sum(outs) - 2 * outs[-1])  # trace_width of exact.c
    saved = [w.new_empty(n, -(-slots // named["segment"]), *w.shape[1:]) for w in state]
    return [trace, *saved, *([] if ends is None else [empty(ends)])]


def _pass_kept(kept: Group, depth: int, named: Mapping[str, int]) -> Sequence[object]:
    if not kept:
        return None, None, None, None
    trace, *saved = kept
    clipped = saved.pop() if len(saved) > depth * (1 + named["momentum"]) else None
    return addresses(saved[:depth]), addresses(saved[depth:]), trace, clipped


_LOOP = RuleLoop("exact", _Settings, _keep, _pass_kept)
_exact = _LOOP.make_operator()
