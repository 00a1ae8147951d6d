"""The dual form: reads and writes a tile of tokens without ever storing a per-token gradient or weight.

What the chunked and the exact rule share. They differ in one thing, the *key pass*: where each token's gradient is
taken. It gives, for every layer, the tokens' inputs h and backpropagated errors delta; everything after that is the
same (docs/math.md, The dual form).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans.ops.coefficients import Coefficients, tile_coefficients
from titans.ops.frame import Frame
from titans.ops.network import ACTIVATIONS, LAYER_NORM_EPS, MemoryMLP, append_one, layer_norm_vjp
from titans.ops.recurrent import ROOT_TINY, TINY, clip_rows
from titans.ops.state import MemoryState, Surprise

Tensors = tuple[Tensor, ...]
GRAPH_NUMBERS = 1 << 25  # a tile's graph holds about 20 tensors a layer; between two checkpoints so many numbers
CACHED_NUMBERS = 1 << 17  # tiles are read together while their tensors stay this small


@dataclass(frozen=True)
class Rule:
    """What stays the same for a whole call."""

    network: MemoryMLP
    squared: bool
    bounded: bool
    crowding: bool  # also divide a bounded step by how crowded its chunk is
    max_norm: float | None
    first_order: bool
    anchored: bool  # the chunked rule: gradients are taken at the weights of the chunk's start
    decay_first: bool
    surprise: bool

    @property
    def scale(self) -> int:
        """The factor that the loss puts before its gradient: it goes into the step, not into the deltas."""
        return 2 if self.squared else 1

    def inputs(self, x: Tensor) -> Tensor:
        """What a weight multiplies: x, or [x, 1] if the memory has biases."""
        return append_one(x) if self.network.bias else x


class Carry(NamedTuple):
    """The state between tiles, batch and heads folded into one dimension; weights as they differ from the rest."""

    weights: Tensors
    momentum: Tensors  # empty: no momentum
    anchor: Tensors  # empty: the weights themselves
    gram: Tensor | None


class Tokens(NamedTuple):
    """Framed inputs, (batch * heads, slots, ...); ``live`` is None if every slot holds a token."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor
    alpha: Tensor | None
    eta: Tensor | None
    live: Tensor | None
    norm: Tensor | None  # (batch * heads, 2, width): the network's LayerNorm, not per token
    rest: Tensor | None  # (batch * heads, all weights of all layers): where forgetting returns to, not per token

    def slots(self, start: int, stop: int) -> Tokens:
        """Those of some slots."""
        parts = (None if x is None else x[:, start:stop] for x in self[:PER_TOKEN])
        return Tokens(*parts, norm=self.norm, rest=self.rest)  # type: ignore[arg-type, misc]


PER_TOKEN = 7  # so many fields of Tokens have a time dimension


class Stretch(NamedTuple):
    """Consecutive tiles: their size, and for each whether a boundary of the grid follows it (see ``Frame.ends``)."""

    tile: int
    ends: tuple[bool | Tensor | None, ...]


class Tile(NamedTuple):
    """One tile's share of the tokens and coefficients, as a key pass sees it."""

    k: Tensor
    v: Tensor
    step: Tensor  # theta, with the factor 2 of the squared loss and the crowding already in it
    prepared: Tensors  # this tile's share of what the key pass prepared
    norm: Tensor | None
    rest: Tensors  # one weight per layer, or empty


class Keys(NamedTuple):
    """What a key pass found: u_i = scale * delta_i h_i^T per layer, and the step each token takes."""

    inputs: Tensors  # h per layer, (n, b, in)
    deltas: Tensors  # (n, b, out)
    step: Tensor  # (n, b)
    gradient: Tensor | None  # ||u||^2 / scale^2, (n, b)
    loss: Tensor | None  # (n, b)


class KeyPass(Protocol):
    """Finds where each token's gradient points; the one thing in which the chunked and the exact rule differ."""

    def shortcut(self, rule: Rule, stretch: Stretch, carry: Carry, tokens: Tokens) -> tuple[Carry, Tensors] | None:
        """All of :func:`run_tiles` done in another way, with gradients; None if there is no such way."""
        ...

    def prepare(
        self, rule: Rule, stretch: Stretch, carry: Carry, tokens: Tokens, coefficients: Coefficients
    ) -> Tensors:
        """What can be computed for all tiles of a stretch at once; each tensor (n, tiles, ...)."""
        ...

    def __call__(self, rule: Rule, carry: Carry, tile: Tile) -> Keys:
        """The key pass of one tile."""
        ...


class Output(NamedTuple):
    """A token's output at its key, as far as the loss goes; without the squared loss's factor 2."""

    error: Tensor  # gradient of the loss at M's output, (n, b, out)
    delta: Tensor  # the same at the last layer's output, below norm and residual
    loss: Tensor | None  # (n, b), if the surprise is asked for


def network_output(rule: Rule, z: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
    """What M makes of its last layer's output z for the input x: norm and residual."""
    if norm is not None:
        z = F.layer_norm(z, z.shape[-1:], eps=LAYER_NORM_EPS) * norm[:, :1] + norm[:, 1:]
    return z + x if rule.network.residual else z


def output_error(rule: Rule, z: Tensor, tile: Tile) -> Output:
    """From the last layer's output at the keys to the loss and its gradients."""
    loss = None
    if rule.squared:
        error = network_output(rule, z, tile.k, tile.norm) - tile.v
        if rule.surprise:
            loss = error.square().sum(-1)
    else:
        error = -tile.v
        if rule.surprise:
            loss = (network_output(rule, z, tile.k, tile.norm) * error).sum(-1)
    delta = error if tile.norm is None else layer_norm_vjp(z, tile.norm[:, :1], error)
    return Output(error, delta, loss)


def finish_keys(rule: Rule, tile: Tile, inputs: Tensors, deltas: Tensors, output: Output) -> Keys:
    """Adds the normalised step and the surprise, ||u_i||^2 = sum over layers of ||delta_i||^2 ||h_i||^2."""
    if not rule.bounded and not rule.surprise:
        return Keys(inputs, deltas, tile.step, None, None)
    error = output.error.square().sum(-1)
    hidden = zip(inputs[:-1], deltas[:-1], strict=True)
    below = sum(delta.square().sum(-1) * h.square().sum(-1) for h, delta in hidden)
    last = inputs[-1].square().sum(-1)
    if tile.norm is None:
        kappa = last + below / (error + TINY)
    else:
        kappa = (below + last * output.delta.square().sum(-1)) / (error + TINY)
    step = tile.step / (1 + kappa) if rule.bounded else tile.step
    return Keys(inputs, deltas, step, kappa * error, output.loss)


def run_tiles(rule: Rule, key_pass: KeyPass, stretch: Stretch, carry: Carry, tokens: Tokens) -> tuple[Carry, Tensors]:
    """Runs consecutive tiles: the key passes and writes one after another, then all their reads at once.

    Returns the carry after them and (y,) or (y, ||u||^2, l) for every slot.
    """
    n, slots, _ = tokens.k.shape
    tile, ends = stretch
    tiles = slots // tile

    def split(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(n, tiles, tile, *x.shape[2:])

    q, k, v, theta, alpha, eta, live = (split(x) for x in tokens[:PER_TOKEN])
    assert q is not None and k is not None and v is not None and theta is not None
    coefficients = tile_coefficients(theta, alpha, eta, live)
    step = rule.scale * theta
    crowd = None
    if rule.crowding:
        crowd, inverse = _crowd(k, live)
        step = step / crowd.square()
    rest = split_rest(tokens.rest, carry.weights)
    prepared = key_pass.prepare(rule, stretch, carry, tokens, coefficients)

    widest = max(max(w.shape[-2:]) for w in carry.weights)
    at_once = max(1, CACHED_NUMBERS // (n * tile * max(widest, tile)))
    outputs: list[Tensor] = []
    found: list[Keys] = []
    starts: list[Carry] = []
    for index in range(tiles):
        row = coefficients.at(index)
        tile_step = step[:, index]
        if crowd is not None and carry.gram is not None:
            before = (torch.bmm(k[:, index], carry.gram) * k[:, index]).sum(-1) * inverse[:, index]
            tile_step = tile_step * (crowd[:, index] / (crowd[:, index] + before)).square()
        part = Tile(k[:, index], v[:, index], tile_step, tuple(x[:, index] for x in prepared), tokens.norm, rest)
        keys = key_pass(rule, carry, part)
        starts.append(carry)
        found.append(keys)
        carry = _advance(rule, carry, keys, row, ends[index])
        if crowd is not None and ends[index] is not True:
            carry = _add_gram(carry, starts[-1].gram, k[:, index], inverse[:, index], ends[index])
        if len(starts) == at_once or index + 1 == tiles:
            done = slice(index + 1 - len(starts), index + 1)
            these = coefficients.at(done)
            outputs.append(_read(rule, q[:, done], starts, found[done], these, tokens.norm, rest))
            starts = []

    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    if not rule.surprise:
        return carry, (y,)
    gradient = torch.stack([x.gradient for x in found if x.gradient is not None], dim=1).reshape(n, slots)
    loss = torch.stack([x.loss for x in found if x.loss is not None], dim=1).reshape(n, slots)
    return carry, (y, rule.scale**2 * gradient, loss)


def _crowd(k: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """How crowded it is at each token of a tile: 1 + the sum of cos^2 with the keys before it; and 1 / ||k||^2.

    k is (n, tiles, b, width), both results are (n, tiles, b); a dead slot's 1 / ||k||^2 counts as 0.
    """
    gram = k @ k.mT
    inverse = 1 / (gram.diagonal(dim1=-2, dim2=-1) + TINY)
    if live is not None:
        inverse = inverse * live
    return 1 + (gram.square().tril(-1) @ inverse.unsqueeze(-1)).squeeze(-1) * inverse, inverse


def _add_gram(carry: Carry, gram: Tensor | None, k: Tensor, inverse: Tensor, end: bool | Tensor | None) -> Carry:
    """Keeps the sum of the open chunk's k k^T / ||k||^2 for the tokens that come with later calls."""
    scaled = (k * inverse.unsqueeze(-1)).mT
    gram = torch.bmm(scaled, k) if gram is None else torch.baddbmm(gram, scaled, k)
    if isinstance(end, Tensor):
        gram = torch.where(_per_row(end, len(gram)), 0, gram)
    return carry._replace(gram=gram)


def _per_row(flags: Tensor, n: int) -> Tensor:
    """(batch,) -> (batch * heads, 1, 1)."""
    return flags.repeat_interleave(n // len(flags)).view(-1, 1, 1)


def _advance(
    rule: Rule,
    carry: Carry,
    keys: Keys,
    row: Coefficients,
    end: bool | Tensor | None,
) -> Carry:
    """The state after a tile: W' = beta_b W + c_b S - (P[b] theta . delta)^T h, S' likewise."""
    memory_step = (row.products[:, -1] * keys.step).unsqueeze(-1)
    weights, momentum = [], []
    for index, (h, delta) in enumerate(zip(keys.inputs, keys.deltas, strict=True)):
        w = carry.weights[index]
        kept = w if row.beta is None else row.beta[:, -1, None, None] * w
        if row.momentum_row is None or row.c is None or row.m is None:
            weights.append(torch.baddbmm(kept, (memory_step * delta).mT, h, alpha=-1))
            continue
        s = carry.momentum[index]
        kept = torch.addcmul(kept, row.c[:, -1, None, None], s)
        momentum_step = (row.momentum_row * keys.step).unsqueeze(-1)
        weights.append(torch.baddbmm(kept, (memory_step * delta).mT, h, alpha=-1))
        momentum.append(torch.baddbmm(row.m[:, -1, None, None] * s, (momentum_step * delta).mT, h, alpha=-1))
    new_weights, new_momentum = tuple(weights), tuple(momentum)

    if end is None:
        anchor = (carry.anchor or carry.weights) if rule.anchored else ()
        return Carry(new_weights, new_momentum, anchor, None)
    clipped, clipped_momentum = new_weights, new_momentum
    if rule.max_norm is not None and _too_long(new_weights + new_momentum, rule.max_norm):
        clipped = tuple(clip_rows(x, rule.max_norm) for x in new_weights)
        clipped_momentum = tuple(clip_rows(x, rule.max_norm) for x in new_momentum)
    if end is True:
        return Carry(clipped, clipped_momentum, (), None)
    assert isinstance(end, Tensor)
    done = _per_row(end, len(new_weights[0]))
    new_weights = tuple(torch.where(done, a, b) for a, b in zip(clipped, new_weights, strict=True))
    new_momentum = tuple(torch.where(done, a, b) for a, b in zip(clipped_momentum, new_momentum, strict=True))
    old_anchor = (carry.anchor or carry.weights) if rule.anchored else ()
    anchor = tuple(torch.where(done, a, b) for a, b in zip(new_weights, old_anchor, strict=False))
    return Carry(new_weights, new_momentum, anchor, None)


def _too_long(weights: Tensors, max_norm: float) -> bool:
    """Whether a row may be longer than ``max_norm``. Off the CPU always yes: asking would cost more than clipping."""
    if weights[0].device.type != "cpu":
        return True
    bounds = (float(w.detach().abs().amax()) * w.shape[-1] ** 0.5 for w in weights if w.numel())
    return not all(bound <= max_norm for bound in bounds)  # NaN counts as too long


def _read(
    rule: Rule,
    q: Tensor,
    starts: list[Carry],
    found: list[Keys],
    coefficients: Coefficients,
    norm: Tensor | None,
    rest: Tensors,
) -> Tensor:
    """y_t = M_t(q_t) for all tiles at once (Eq. 15): each layer applies the token's own weights in their dual form."""
    n, tiles, tile, _ = q.shape
    activate = ACTIVATIONS[rule.network.activation].value

    def stack(parts: list[Tensor]) -> Tensor:
        if tiles == 1:
            return parts[0]
        return torch.stack(parts, dim=1).reshape(n * tiles, *parts[0].shape[1:])

    def flat(x: Tensor) -> Tensor:
        return x.squeeze(1) if tiles == 1 else x.reshape(n * tiles, *x.shape[2:])

    applied = flat(coefficients.products) * stack([keys.step for keys in found]).unsqueeze(-2)
    beta = None if coefficients.beta is None else flat(coefficients.beta).unsqueeze(-1)
    c = None if coefficients.c is None else flat(coefficients.c).unsqueeze(-1)
    x = q0 = flat(q)
    depth = len(found[0].deltas)
    for layer in range(depth):
        x = rule.inputs(x)
        z = torch.bmm(x, stack([start.weights[layer] for start in starts]).mT)
        if beta is not None:
            z = z * beta
        if c is not None:
            z = torch.addcmul(z, torch.bmm(x, stack([start.momentum[layer] for start in starts]).mT), c)
        if rest:
            z = z + torch.bmm(x.reshape(n, tiles * tile, -1), rest[layer].mT).reshape(z.shape)
        h = stack([keys.inputs[layer] for keys in found])
        delta = stack([keys.deltas[layer] for keys in found])
        z = torch.baddbmm(z, torch.bmm(x, h.mT) * applied, delta, alpha=-1)
        x = activate(z) if layer + 1 < depth else z
    y = network_output(rule, x, q0, None if norm is None else norm.repeat_interleave(tiles, 0))
    return y.reshape(n, tiles * tile, -1)


def _flatten(carry: Carry, tokens: Tokens) -> tuple[list[Tensor], Callable[[list[Tensor]], tuple[Carry, Tokens]]]:
    """All tensors of a carry and its tokens as one list, and the way back."""
    counts = (len(carry.weights), len(carry.momentum), len(carry.anchor))
    optional = (carry.gram, *tokens)
    there = [x is not None for x in optional]
    tensors = [*carry.weights, *carry.momentum, *carry.anchor, *(x for x in optional if x is not None)]

    def rebuild(values: list[Tensor]) -> tuple[Carry, Tokens]:
        rest = iter(values)
        weights, momentum, anchor = (tuple(next(rest) for _ in range(count)) for count in counts)
        gram, *fields = (next(rest) if is_there else None for is_there in there)
        return Carry(weights, momentum, anchor, gram), Tokens(*fields)  # type: ignore[arg-type]

    return tensors, rebuild


def split_rest(rest: Tensor | None, weights: Tensors) -> Tensors:
    """``Tokens.rest`` as one (n, out, in) tensor a layer; empty if there is none."""
    if rest is None:
        return ()
    parts = rest.split([w[0].numel() for w in weights], dim=1)
    return tuple(part.view(len(w), *w.shape[1:]) for part, w in zip(parts, weights, strict=True))


def join_outputs(parts: list[Tensors]) -> Tensors:
    """Consecutive stretches of outputs as one."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(group, dim=1) for group in zip(*parts, strict=True))


class _Checkpointed(torch.autograd.Function):
    """Runs all groups without a graph, keeps the state at each group's start, and recomputes group by group."""

    @staticmethod
    def forward(ctx: Any, groups: list[Any], rebuild: Any, finish: dict[str, Any], *tensors: Tensor) -> Tensors:
        carry, tokens = rebuild(list(tensors))
        carries, outputs = [], []
        for run, start, stop in groups:
            carries.append(carry)
            carry, out = run(carry, tokens.slots(start, stop))
            outputs.append(out)
        ctx.groups, ctx.rebuild, ctx.carries = groups, rebuild, carries
        ctx.save_for_backward(*tensors)
        flat, ctx.final = _flatten_carry(carry)
        finish["carry"] = ctx.final
        finish["outputs"] = len(outputs[0])
        return *join_outputs(outputs), *flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        _, tokens = ctx.rebuild(tensors)
        count = len(tensors)
        outputs = len(grads) - ctx.final.size
        carry_grads = list(grads[outputs:])
        first = ctx.carries[0]
        n_carry = len(_flatten_carry(first)[0])
        token_grads: list[Tensor | None] = [None] * (count - n_carry)
        needs = ctx.needs_input_grad[3 + n_carry :]
        wanted = [x for x in tokens if x is not None]
        shared = [index >= PER_TOKEN for index, x in enumerate(tokens) if x is not None]
        for index in reversed(range(len(ctx.groups))):
            run, start, stop = ctx.groups[index]
            with torch.enable_grad():
                flat, _ = _flatten_carry(ctx.carries[index])
                flat = [x.detach().requires_grad_() for x in flat]
                leaves = [
                    (x if whole else x[:, start:stop]).detach().requires_grad_(need)
                    for x, need, whole in zip(wanted, needs, shared, strict=True)
                ]
                _, rebuild_group = _flatten(ctx.carries[index], tokens)
                carry, part = rebuild_group([*flat, *leaves])
                new_carry, out = run(carry, part)
                new_flat, _ = _flatten_carry(new_carry)
                results = [*out, *new_flat]
                cotangents = [g[:, start:stop] for g in grads[:outputs]] + carry_grads
                pairs = [(r, g) for r, g in zip(results, cotangents, strict=True) if r.requires_grad]
                inputs = [x for x in (*flat, *leaves) if x.requires_grad]
                gradients = torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
            by_input = {id(x): g for x, g in zip(inputs, gradients, strict=True)}
            carry_grads = [torch.zeros_like(x) if by_input[id(x)] is None else by_input[id(x)] for x in flat]
            for i, leaf in enumerate(leaves):
                gradient = by_input.get(id(leaf))
                if gradient is None:
                    continue
                if token_grads[i] is None:
                    token_grads[i] = torch.zeros_like(wanted[i])
                total = token_grads[i]
                assert total is not None
                if shared[i]:
                    total += gradient
                else:
                    total[:, start:stop] = gradient
        return None, None, None, *carry_grads, *token_grads


class _CarrySpec(NamedTuple):
    counts: tuple[int, int, int]
    gram: bool

    @property
    def size(self) -> int:
        return sum(self.counts) + self.gram

    def build(self, flat: Tensors) -> Carry:
        a, b, c = self.counts
        gram = flat[a + b + c] if self.gram else None
        return Carry(flat[:a], flat[a : a + b], flat[a + b : a + b + c], gram)


def _flatten_carry(carry: Carry) -> tuple[list[Tensor], _CarrySpec]:
    flat = [*carry.weights, *carry.momentum, *carry.anchor]
    spec = _CarrySpec((len(carry.weights), len(carry.momentum), len(carry.anchor)), carry.gram is not None)
    return (flat if carry.gram is None else [*flat, carry.gram]), spec


def run_dual(
    rule: Rule,
    key_pass: KeyPass,
    frame: Frame,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    state: MemoryState,
    rest: Sequence[Tensor] | None,
    checkpoint_every: int | None,
) -> tuple[Tensor, MemoryState, Surprise | None]:
    """Runs a whole call (batch, heads, time, width) through the dual form.

    The backward pass keeps the state at every ``checkpoint_every``-th tile and recomputes what lies between.
    """
    batch, heads = q.shape[:2]
    out_dtype, dtype = q.dtype, state.weights[0].dtype

    def fold(x: Tensor, dead: float | None = None) -> Tensor:
        return frame.put(x.to(dtype), dead).flatten(0, 1)

    live = None
    if frame.live is not None:
        live = frame.live.to(dtype).repeat_interleave(heads, 0)
    norm = rule.network.norm
    tokens = Tokens(
        fold(q, 0.0),
        fold(k, 0.0),
        fold(v, 0.0),
        fold(theta, 0.0),
        None if alpha is None else fold(alpha, 0.0),
        None if eta is None else fold(eta, 1.0),
        live,
        None if norm is None else torch.stack([x.to(dtype) for x in norm], 1).repeat(batch, 1, 1),
        None,
    )

    def join(group: Tensors) -> Tensors:
        return tuple(w.flatten(0, 1) for w in group)

    home = join(tuple(r.to(dtype) for r in rest)) if rest is not None and alpha is not None else ()

    def away(group: Tensors) -> Tensors:
        return tuple(w - r for w, r in zip(group, home, strict=True)) if home else group

    def back(group: Tensors) -> Tensors:
        return tuple(w + r for w, r in zip(group, home, strict=True)) if home else group

    if home:
        tokens = tokens._replace(rest=torch.cat([r.flatten(1) for r in home], dim=1))
    open_chunk = rule.anchored and state.anchor is not state.weights
    carry = Carry(
        away(join(state.weights)),
        join(state.momentum) if eta is not None else (),
        away(join(state.anchor)) if open_chunk else (),
        state.gram.flatten(0, 1) if rule.crowding and open_chunk and state.gram is not None else None,
    )

    def group(start: int, stop: int) -> tuple[Any, int, int]:
        def run(carry: Carry, part: Tokens) -> tuple[Carry, Tensors]:
            with torch.autocast(part.q.device.type, enabled=False):
                return run_tiles(rule, key_pass, Stretch(frame.tile, frame.ends[start:stop]), carry, part)

        return run, start * frame.tile, stop * frame.tile

    if checkpoint_every is None:
        widest = max(frame.tile, *(max(w.shape[-2:]) for w in carry.weights))
        checkpoint_every = GRAPH_NUMBERS // (20 * len(carry.weights) * batch * heads * frame.tile * widest)
    every = max(1, checkpoint_every)
    groups = [group(i, min(i + every, frame.tiles)) for i in range(0, frame.tiles, every)]
    tensors, rebuild = _flatten(carry, tokens)
    with torch.autocast(q.device.type, enabled=False):
        whole = key_pass.shortcut(rule, Stretch(frame.tile, frame.ends), carry, tokens)
    if whole is not None:
        carry, outputs = whole
    elif len(groups) > 1 and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        finish: dict[str, Any] = {}
        results = _Checkpointed.apply(groups, rebuild, finish, *tensors)
        outputs = results[: finish["outputs"]]
        carry = finish["carry"].build(results[finish["outputs"] :])
    else:
        parts = []
        for run, start, stop in groups:
            carry, out = run(carry, tokens.slots(start, stop))
            parts.append(out)
        outputs = join_outputs(parts)

    def part(group: Tensors) -> Tensors:
        return tuple(w.unflatten(0, (batch, heads)) for w in group)

    weights = part(back(carry.weights))
    new_state = replace(
        state,
        weights=weights,
        momentum=part(carry.momentum) if eta is not None else state.momentum,
        anchor=part(back(carry.anchor)) if carry.anchor else weights,
        position=frame.position,
        gram=None if carry.gram is None else carry.gram.unflatten(0, (batch, heads)),
    )
    y = frame.take(outputs[0].unflatten(0, (batch, heads))).to(out_dtype)
    surprise = None
    if rule.surprise:
        gradient, loss = (frame.take(x.unflatten(0, (batch, heads))) for x in outputs[1:])
        surprise = Surprise(torch.sqrt(gradient + ROOT_TINY), loss)
    return y, new_state, surprise
