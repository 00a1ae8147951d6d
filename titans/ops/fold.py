"""From a public call to the dual form: checks, channel gates folded into heads, empty calls, the frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titans.ops.dual import KeyPass, Rule, run_dual
from titans.ops.frame import make_frame
from titans.ops.inputs import check_inputs, check_position
from titans.ops.network import MemoryMLP
from titans.ops.state import MemoryState, Surprise


def call_dual(
    key_pass: KeyPass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    state: MemoryState,
    *,
    tile: int,
    period: int | None,
    network: MemoryMLP,
    loss: str,
    mask: Tensor | None,
    rest: Sequence[Tensor] | None,
    bounded: bool,
    crowding: bool,
    max_norm: float | None,
    anchored: bool,
    decay_first: bool,
    first_order: bool,
    return_surprise: bool,
    checkpoint_every: int | None,
    check_values: bool,
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
    """Checks a call of ``neural_memory_chunked`` or ``neural_memory_exact`` and runs it."""
    check_inputs(
        q, k, v, theta, alpha, eta, state,
        chunk_size=tile, network=network, loss=loss, mask=mask, rest=rest, max_norm=max_norm, check_values=check_values,
    )  # fmt: skip
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"checkpoint_every is {checkpoint_every}; expected a whole number of at least 1")
    if period is not None:
        check_position(state, period)
    if q.shape[0] == 0 or q.shape[2] == 0:
        empty = v.new_zeros(q.shape[:3])
        y = torch.empty_like(v)
        return (y, state, Surprise(empty, empty)) if return_surprise else (y, state)

    channels = v.shape[-1] if any(g is not None and g.ndim == 4 for g in (theta, alpha, eta)) else None
    heads = q.shape[1]
    if channels is not None:
        if network.residual or network.norm is not None:
            raise ValueError("gates per output channel need a memory without residual and norm")
        q, k = (x.repeat_interleave(channels, 1) for x in (q, k))
        v = v.mT.reshape(v.shape[0], heads * channels, -1, 1)
        theta, alpha, eta = (_spread(g, channels) for g in (theta, alpha, eta))  # type: ignore[assignment]
        state = _spread_state(state, channels)
        rest = None if rest is None else _spread_weights(rest)

    rule = Rule(
        network=network,
        squared=loss == "squared",
        bounded=bounded,
        crowding=crowding,
        max_norm=max_norm,
        first_order=first_order,
        anchored=anchored,
        decay_first=decay_first,
        surprise=return_surprise,
    )
    frame = make_frame(q.shape[2], mask, state.position, tile, period)
    y, new_state, surprise = run_dual(rule, key_pass, frame, q, k, v, theta, alpha, eta, state, rest, checkpoint_every)
    if channels is not None:
        y = y.squeeze(-1).unflatten(1, (heads, channels)).mT
        new_state = _gather_state(new_state, heads, channels)
        if surprise is not None:
            gradient, losses = (x.unflatten(1, (heads, channels)) for x in surprise)
            surprise = Surprise(gradient.square().sum(2).sqrt(), losses.sum(2))
    return (y, new_state) if surprise is None else (y, new_state, surprise)


def _spread(gate: Tensor | None, channels: int) -> Tensor | None:
    """A gate per head or per output channel -> (batch, heads * channels, time)."""
    if gate is None:
        return None
    return gate.repeat_interleave(channels, 1) if gate.ndim == 3 else gate.mT.flatten(1, 2)


def _spread_weights(group: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(w.flatten(1, 2).unsqueeze(2) for w in group)


def _spread_state(state: MemoryState, channels: int) -> MemoryState:
    """A linear memory's output channels as heads with one output each."""
    weights = _spread_weights(state.weights)
    return replace(
        state,
        weights=weights,
        momentum=_spread_weights(state.momentum),
        anchor=weights if state.anchor is state.weights else _spread_weights(state.anchor),
        gram=None if state.gram is None else state.gram.repeat_interleave(channels, 1),
    )


def _gather_state(state: MemoryState, heads: int, channels: int) -> MemoryState:
    def gather(group: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(w.squeeze(2).unflatten(1, (heads, channels)) for w in group)

    weights = gather(state.weights)
    return replace(
        state,
        weights=weights,
        momentum=gather(state.momentum),
        anchor=weights if state.anchor is state.weights else gather(state.anchor),
        gram=None if state.gram is None else state.gram[:, ::channels],
    )
