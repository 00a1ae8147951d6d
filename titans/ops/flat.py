"""From a call to flat tiles and back: batch and heads as one dimension, channel gates as heads, tokens on the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from titans.ops.frame import make_frame
from titans.ops.losses import Loss, Squared
from titans.ops.network import MemoryMLP, append_one
from titans.ops.recurrent import ROOT_TINY
from titans.ops.rule import Rule, Tokens
from titans.ops.state import MemoryState, Surprise

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class FlatRule:
    """A rule as the loops over tiles use it; the tensors of its parts are those of :class:`FlatTokens`."""

    network: MemoryMLP
    loss: Loss
    bounded: bool
    max_norm: float | None
    first_order: bool
    anchored: bool  # the chunked rule: gradients are taken at the weights of the chunk's start
    decay_first: bool
    surprise: bool

    @property
    def squared(self) -> bool:
        """Whether the loss is the squared error."""
        return isinstance(self.loss, Squared)

    @property
    def scale(self) -> int:
        """The factor that the loss puts before its gradient: it goes into the step, not into the deltas."""
        return self.loss.scale

    @property
    def crowding(self) -> bool:
        """Whether a bounded step is also divided by how crowded its chunk is."""
        return self.bounded and self.anchored

    def inputs(self, x: Tensor) -> Tensor:
        """What a weight multiplies: x, or [x, 1] if the memory has biases."""
        return append_one(x) if self.network.bias else x


class FlatState(NamedTuple):
    """The state between tiles, (batch * heads, ...); weights as they differ from where forgetting returns to."""

    weights: Tensors
    momentum: Tensors  # empty: no momentum
    anchor: Tensors  # empty: the weights themselves
    gram: Tensor | None


class FlatTokens(NamedTuple):
    """Tokens on the grid, (batch * heads, slots, ...); ``live`` is None if every slot holds a token."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor
    alpha: Tensor | None
    eta: Tensor | None
    live: Tensor | None
    norm: Tensor | None  # (batch * heads, 2, width): the network's LayerNorm, not per token
    rest: Tensor | None  # (batch * heads, all weights of all layers): where forgetting returns to, not per token
    loss: Tensor | None  # (batch * heads, 1, 1 or out): the loss's parameter, not per token

    def slots(self, start: int, stop: int) -> FlatTokens:
        """Those of some slots."""
        parts = (None if x is None else x[:, start:stop] for x in self[:PER_TOKEN])
        return FlatTokens(*parts, *self[PER_TOKEN:])  # type: ignore[arg-type]


PER_TOKEN = 7  # so many fields of FlatTokens have a time dimension


class Tiling(NamedTuple):
    """Consecutive tiles: their size, and for each whether a boundary of the grid follows it (see ``Frame.ends``)."""

    tile: int
    ends: tuple[bool | Tensor | None, ...]


Loop = Callable[[FlatRule, Tiling, FlatState, FlatTokens], tuple[FlatState, Tensors]]


def split_rest(rest: Tensor | None, weights: Tensors) -> Tensors:
    """``FlatTokens.rest`` as one (n, out, in) tensor a layer; empty if there is none."""
    if rest is None:
        return ()
    parts = rest.split([w[0].numel() for w in weights], dim=1)
    return tuple(part.view(len(w), *w.shape[1:]) for part, w in zip(parts, weights, strict=True))


def run_flat(
    rule: Rule, tokens: Tokens, state: MemoryState, tile: int, loop: Loop, surprise: bool, whole: bool = True
) -> tuple[Tensor, MemoryState, Surprise | None]:
    """Runs a call in tiles of ``tile`` tokens: the loop returns the state after them and (y,) or (y, ||u||^2, l).

    ``whole``: the loop takes whole tiles only.
    """
    batch, heads, channels = *tokens.q.shape[:2], tokens.v.shape[-1]
    per_channel = any(g is not None and g.ndim == 4 for g in (tokens.theta, tokens.alpha, tokens.eta))
    if per_channel:
        rule, tokens = _spread_rule(rule, batch, heads, channels), _spread_tokens(tokens)
        state = _spread_state(state, channels)
    y, state, found = _run(rule, tokens, state, tile, loop, surprise, whole)
    if not per_channel:
        return y, state, found
    if found is not None:
        gradient, losses = (x.unflatten(1, (heads, channels)) for x in found)
        found = Surprise(gradient.square().sum(2).sqrt(), losses.sum(2))
    return y.squeeze(-1).unflatten(1, (heads, channels)).mT, _gather_state(state, heads, channels), found


def _run(
    rule: Rule, tokens: Tokens, state: MemoryState, tile: int, loop: Loop, surprise: bool, whole: bool
) -> tuple[Tensor, MemoryState, Surprise | None]:
    network = rule.network
    assert isinstance(network, MemoryMLP)
    batch, heads, time = tokens.q.shape[:3]
    dtype = state.weights[0].dtype
    frame = make_frame(time, tokens.mask, state.position, tile, rule.period, whole)

    def put(x: Tensor | None, dead: float = 0.0) -> Tensor | None:
        return None if x is None else frame.put(x.to(dtype), dead).flatten(0, 1)

    def flatten(group: Sequence[Tensor]) -> Tensors:
        return tuple(w.to(dtype).flatten(0, 1) for w in group)

    to = rule.retention.to
    # Without forgetting only the guard needs to know where it would return to.
    home = flatten(to) if to is not None and (tokens.alpha is not None or rule.max_norm is not None) else ()

    def away(group: Sequence[Tensor]) -> Tensors:
        flat = flatten(group)
        return tuple(w - r for w, r in zip(flat, home, strict=True)) if home else flat

    def back(group: Tensors) -> Tensors:
        flat = tuple(w + r for w, r in zip(group, home, strict=True)) if home else group
        return tuple(w.unflatten(0, (batch, heads)) for w in flat)

    norm, parameter, live = network.norm, rule.loss.parameter, frame.living(batch, state.weights[0])
    flat_tokens = FlatTokens(
        *(put(x) for x in tokens[:5]),  # type: ignore[arg-type, call-arg]
        put(tokens.eta, 1.0),
        None if live is None else live.repeat_interleave(heads, 0),
        None if norm is None else torch.stack([x.to(dtype) for x in norm], 1).repeat(batch, 1, 1),
        torch.cat([r.flatten(1) for r in home], dim=1) if home else None,
        None if parameter is None else _broadcast(parameter.to(dtype), batch, heads).flatten(0, 1),
    )
    anchored = rule.chunk_size is not None
    is_open = anchored and state.anchor is not state.weights
    flat_rule = FlatRule(
        network, rule.loss, rule.bounded, rule.max_norm, rule.first_order, anchored, rule.retention.first, surprise
    )
    flat = FlatState(
        away(state.weights),
        flatten(state.momentum) if tokens.eta is not None else (),
        away(state.anchor) if is_open else (),
        state.gram.flatten(0, 1) if flat_rule.crowding and is_open and state.gram is not None else None,
    )
    with torch.autocast(tokens.q.device.type, enabled=False):
        flat, outputs = loop(flat_rule, Tiling(frame.tile, frame.ends), flat, flat_tokens)
    weights = back(flat.weights)
    new_state = replace(
        state,
        weights=weights,
        momentum=tuple(w.unflatten(0, (batch, heads)) for w in flat.momentum) or state.momentum,
        anchor=back(flat.anchor) if flat.anchor else weights,
        position=frame.position,
        rule=rule.grid,
        gram=None if flat.gram is None else flat.gram.unflatten(0, (batch, heads)),
    )
    y, *found = (frame.take(x.unflatten(0, (batch, heads))) for x in outputs)
    return y.to(tokens.q.dtype), new_state, Surprise(torch.sqrt(found[0] + ROOT_TINY), found[1]) if found else None


def _broadcast(parameter: Tensor, batch: int, heads: int) -> Tensor:
    """What broadcasts against (batch, heads, time, out) and is the same at all times, as (batch, heads, 1, ...)."""
    parameter = parameter.view((1,) * (4 - parameter.ndim) + parameter.shape)
    return parameter.expand(batch, heads, 1, -1)


def _spread_rule(rule: Rule, batch: int, heads: int, channels: int) -> Rule:
    """A rule whose heads are a linear memory's output channels, with one output each."""
    to, parameter = rule.retention.to, rule.loss.parameter
    if to is not None:
        rule = replace(rule, retention=replace(rule.retention, to=_spread_weights(to)))
    if parameter is not None:
        spread = _broadcast(parameter, batch, heads).expand(-1, -1, 1, channels).flatten(1)
        rule = replace(rule, loss=rule.loss.with_parameter(spread[..., None, None]))
    return rule


def _spread_tokens(tokens: Tokens) -> Tokens:
    q, k, v, *gates, mask = tokens
    channels = v.shape[-1]

    def spread(gate: Tensor | None) -> Tensor | None:
        if gate is None:
            return None
        return gate.repeat_interleave(channels, 1) if gate.ndim == 3 else gate.mT.flatten(1, 2)

    q, k = (x.repeat_interleave(channels, 1) for x in (q, k))
    return Tokens(q, k, v.mT.flatten(1, 2).unsqueeze(-1), *map(spread, gates), mask)  # type: ignore[arg-type, call-arg]


def _spread_weights(group: Sequence[Tensor]) -> Tensors:
    return tuple(w.flatten(1, 2).unsqueeze(2) for w in group)


def _spread_state(state: MemoryState, channels: int) -> MemoryState:
    weights = _spread_weights(state.weights)
    return replace(
        state,
        weights=weights,
        momentum=_spread_weights(state.momentum),
        anchor=weights if state.anchor is state.weights else _spread_weights(state.anchor),
        gram=None if state.gram is None else state.gram.repeat_interleave(channels, 1),
    )


def _gather_state(state: MemoryState, heads: int, channels: int) -> MemoryState:
    def gather(group: Tensors) -> Tensors:
        return tuple(w.squeeze(2).unflatten(1, (heads, channels)) for w in group)

    weights = gather(state.weights)
    return replace(
        state,
        weights=weights,
        momentum=gather(state.momentum),
        anchor=weights if state.anchor is state.weights else gather(state.anchor),
        gram=None if state.gram is None else state.gram[:, ::channels],
    )
