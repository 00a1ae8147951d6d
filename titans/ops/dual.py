"""The dual form: reads and writes a tile of tokens without ever storing a per-token gradient or weight.

What the chunked and the exact rule share. They differ in one thing, the *key pass*: where each token's gradient is
taken. It gives, for every layer, the tokens' inputs h and backpropagated errors delta; everything after that is the
same (docs/math.md, The dual form).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops.coefficients import Coefficients, tile_coefficients
from titans.ops.flat import PER_TOKEN, FlatRule, FlatState, FlatTokens, Tensors, Tiling, split_rest
from titans.ops.network import ACTIVATIONS, LAYER_NORM_EPS, layer_norm_vjp
from titans.ops.once import once_differentiable
from titans.ops.recurrent import TINY, clip_rows

GRAPH_NUMBERS = 1 << 25  # a tile's graph holds about 20 tensors a layer; between two checkpoints so many numbers
CACHED_NUMBERS = 1 << 17  # tiles are read together while their tensors stay this small


class Tile(NamedTuple):
    """One tile's share of the tokens and coefficients, as a key pass sees it."""

    k: Tensor
    v: Tensor
    step: Tensor  # theta, with the factor 2 of the squared loss and the crowding already in it
    prepared: Tensors  # this tile's share of what the key pass prepared
    norm: Tensor | None
    rest: Tensors  # one weight per layer, or empty
    loss: Tensor | None  # the loss's parameter


class Keys(NamedTuple):
    """What a key pass found: u_i = scale * delta_i h_i^T per layer, and the step each token takes."""

    inputs: Tensors  # h per layer, (n, b, in)
    deltas: Tensors  # (n, b, out)
    step: Tensor  # (n, b)
    gradient: Tensor | None  # ||u||^2 / scale^2, (n, b)
    loss: Tensor | None  # (n, b)


class KeyPass(Protocol):
    """Finds where each token's gradient points; the one thing in which the chunked and the exact rule differ."""

    def prepare(self, rule: FlatRule, tile: int, tokens: FlatTokens, coefficients: Coefficients) -> Tensors:
        """What can be computed for all tiles at once; each tensor (n, tiles, ...)."""
        ...

    def __call__(self, rule: FlatRule, state: FlatState, tile: Tile) -> Keys:
        """The key pass of one tile."""
        ...


class Output(NamedTuple):
    """A token's output at its key, as far as the loss goes; without the squared loss's factor 2."""

    error: Tensor  # gradient of the loss at M's output, (n, b, out)
    delta: Tensor  # the same at the last layer's output, below norm and residual
    loss: Tensor | None  # (n, b), if the surprise is asked for


def network_output(rule: FlatRule, z: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
    """What M makes of its last layer's output z for the input x: norm and residual."""
    if norm is not None:
        z = F.layer_norm(z, z.shape[-1:], eps=LAYER_NORM_EPS) * norm[:, :1] + norm[:, 1:]
    return z + x if rule.network.residual else z


def finite(x: Tensor) -> Tensor:
    """x with numbers in place of NaN and infinities, which zero times would bring from a later token to an earlier one.

    The other half of it is ``tril``: it cuts off what a product of zeros would keep.
    """
    return torch.nan_to_num(x, nan=0.0)


def output_error(rule: FlatRule, z: Tensor, tile: Tile) -> Output:
    """From the last layer's output at the keys to the loss and its gradients."""
    y, loss = network_output(rule, z, tile.k, tile.norm), rule.loss.with_parameter(tile.loss)
    error = loss.gradient(y, tile.v)
    delta = error if tile.norm is None else layer_norm_vjp(z, tile.norm[:, :1], error)
    return Output(error, delta, loss.value(y, tile.v) if rule.surprise else None)


def finish_keys(rule: FlatRule, tile: Tile, inputs: Tensors, deltas: Tensors, output: Output) -> Keys:
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


def run_tiles(
    rule: FlatRule, key_pass: KeyPass, tiling: Tiling, state: FlatState, tokens: FlatTokens
) -> tuple[FlatState, Tensors]:
    """Runs consecutive tiles: the key passes and writes one after another, then all their reads at once.

    Returns the state after them and (y,) or (y, ||u||^2, l) for every slot.
    """
    n, slots, _ = tokens.k.shape
    tile, ends = tiling
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
    rest = split_rest(tokens.rest, state.weights)
    prepared = key_pass.prepare(rule, tile, tokens, coefficients)

    widest = max(max(w.shape[-2:]) for w in state.weights)
    at_once = max(1, CACHED_NUMBERS // (n * tile * max(widest, tile)))
    outputs: list[Tensor] = []
    found: list[Keys] = []
    starts: list[FlatState] = []
    for index in range(tiles):
        row = coefficients.at(index)
        tile_step = step[:, index]
        if crowd is not None and state.gram is not None:
            before = (torch.bmm(k[:, index], state.gram) * k[:, index]).sum(-1) * inverse[:, index]
            tile_step = tile_step * (crowd[:, index] / (crowd[:, index] + before)).square()
        mine = tuple(x[:, index] for x in prepared)
        part = Tile(k[:, index], v[:, index], tile_step, mine, tokens.norm, rest, tokens.loss)
        keys = key_pass(rule, state, part)
        starts.append(state)
        found.append(keys)
        state = _advance(rule, state, keys, row, ends[index])
        if crowd is not None and ends[index] is not True:
            state = _add_gram(state, starts[-1].gram, k[:, index], inverse[:, index], ends[index])
        if len(starts) == at_once or index + 1 == tiles:
            done = slice(index + 1 - len(starts), index + 1)
            these = coefficients.at(done)
            outputs.append(_read(rule, q[:, done], starts, found[done], these, tokens.norm, rest))
            starts = []

    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    if not rule.surprise:
        return state, (y,)
    gradient = torch.stack([x.gradient for x in found if x.gradient is not None], dim=1).reshape(n, slots)
    loss = torch.stack([x.loss for x in found if x.loss is not None], dim=1).reshape(n, slots)
    return state, (y, rule.scale**2 * gradient, loss)


def _crowd(k: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """How crowded it is at each token of a tile: 1 + the sum of cos^2 with the keys before it; and 1 / ||k||^2.

    k is (n, tiles, b, width), both results are (n, tiles, b); a dead slot's 1 / ||k||^2 counts as 0.
    """
    gram = k @ k.mT
    inverse = 1 / (gram.diagonal(dim1=-2, dim2=-1) + TINY)
    if live is not None:
        inverse = inverse * live
    return 1 + (gram.square().tril(-1) @ inverse.unsqueeze(-1)).squeeze(-1) * inverse, inverse


def _add_gram(
    state: FlatState, gram: Tensor | None, k: Tensor, inverse: Tensor, end: bool | Tensor | None
) -> FlatState:
    """Keeps the sum of the open chunk's k k^T / ||k||^2 for the tokens that come with later calls."""
    scaled = (k * inverse.unsqueeze(-1)).mT
    gram = torch.bmm(scaled, k) if gram is None else torch.baddbmm(gram, scaled, k)
    if isinstance(end, Tensor):
        gram = torch.where(_per_row(end, len(gram)), 0, gram)
    return state._replace(gram=gram)


def _per_row(flags: Tensor, n: int) -> Tensor:
    """(batch,) -> (batch * heads, 1, 1)."""
    return flags.repeat_interleave(n // len(flags)).view(-1, 1, 1)


def _advance(
    rule: FlatRule,
    state: FlatState,
    keys: Keys,
    row: Coefficients,
    end: bool | Tensor | None,
) -> FlatState:
    """The state after a tile: W' = beta_b W + c_b S - (P[b] theta . delta)^T h, S' likewise."""
    memory_step = (row.products[:, -1] * keys.step).unsqueeze(-1)
    weights, momentum = [], []
    for index, (h, delta) in enumerate(zip(keys.inputs, keys.deltas, strict=True)):
        w = state.weights[index]
        kept = w if row.beta is None else row.beta[:, -1, None, None] * w
        if row.momentum_row is None or row.c is None or row.m is None:
            weights.append(torch.baddbmm(kept, (memory_step * delta).mT, h, alpha=-1))
            continue
        s = state.momentum[index]
        kept = torch.addcmul(kept, row.c[:, -1, None, None], s)
        momentum_step = (row.momentum_row * keys.step).unsqueeze(-1)
        weights.append(torch.baddbmm(kept, (memory_step * delta).mT, h, alpha=-1))
        momentum.append(torch.baddbmm(row.m[:, -1, None, None] * s, (momentum_step * delta).mT, h, alpha=-1))
    new_weights, new_momentum = tuple(weights), tuple(momentum)

    if end is None:
        anchor = (state.anchor or state.weights) if rule.anchored else ()
        return FlatState(new_weights, new_momentum, anchor, None)
    clipped, clipped_momentum = new_weights, new_momentum
    if rule.max_norm is not None and _too_long(new_weights + new_momentum, rule.max_norm):
        clipped = tuple(clip_rows(x, rule.max_norm) for x in new_weights)
        clipped_momentum = tuple(clip_rows(x, rule.max_norm) for x in new_momentum)
    if end is True:
        return FlatState(clipped, clipped_momentum, (), None)
    assert isinstance(end, Tensor)
    done = _per_row(end, len(new_weights[0]))
    new_weights = tuple(torch.where(done, a, b) for a, b in zip(clipped, new_weights, strict=True))
    new_momentum = tuple(torch.where(done, a, b) for a, b in zip(clipped_momentum, new_momentum, strict=True))
    old_anchor = (state.anchor or state.weights) if rule.anchored else ()
    anchor = tuple(torch.where(done, a, b) for a, b in zip(new_weights, old_anchor, strict=False))
    return FlatState(new_weights, new_momentum, anchor, None)


def _too_long(weights: Tensors, max_norm: float) -> bool:
    """Whether a row may be longer than ``max_norm``. Off the CPU always yes: asking would cost more than clipping."""
    if weights[0].device.type != "cpu" or torch.compiler.is_compiling():
        return True
    bounds = (float(w.detach().abs().amax()) * w.shape[-1] ** 0.5 for w in weights if w.numel())
    return not all(bound <= max_norm for bound in bounds)  # NaN counts as too long


def _read(
    rule: FlatRule,
    q: Tensor,
    starts: list[FlatState],
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
        z = torch.baddbmm(z, (torch.bmm(x, h.mT) * applied).tril(), finite(delta), alpha=-1)
        x = activate(z) if layer + 1 < depth else z
    y = network_output(rule, x, q0, None if norm is None else norm.repeat_interleave(tiles, 0))
    return y.reshape(n, tiles * tile, -1)


def _flatten(
    state: FlatState, tokens: FlatTokens
) -> tuple[list[Tensor], Callable[[list[Tensor]], tuple[FlatState, FlatTokens]]]:
    """All tensors of a state and its tokens as one list, and the way back."""
    counts = (len(state.weights), len(state.momentum), len(state.anchor))
    optional = (state.gram, *tokens)
    there = [x is not None for x in optional]
    tensors = [*state.weights, *state.momentum, *state.anchor, *(x for x in optional if x is not None)]

    def rebuild(values: list[Tensor]) -> tuple[FlatState, FlatTokens]:
        rest = iter(values)
        weights, momentum, anchor = (tuple(next(rest) for _ in range(count)) for count in counts)
        gram, *fields = (next(rest) if is_there else None for is_there in there)
        return FlatState(weights, momentum, anchor, gram), FlatTokens(*fields)  # type: ignore[arg-type]

    return tensors, rebuild


def join_outputs(parts: list[Tensors]) -> Tensors:
    """Consecutive stretches of outputs as one."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(group, dim=1) for group in zip(*parts, strict=True))


class _Checkpointed(torch.autograd.Function):
    """Runs all groups without a graph, keeps the state at each group's start, and recomputes group by group."""

    @staticmethod
    def forward(ctx: Any, groups: list[Any], rebuild: Any, finish: dict[str, Any], *tensors: Tensor) -> Tensors:
        state, tokens = rebuild(list(tensors))
        states, outputs = [], []
        for run, start, stop in groups:
            states.append(state)
            state, out = run(state, tokens.slots(start, stop))
            outputs.append(out)
        ctx.groups, ctx.rebuild, ctx.states = groups, rebuild, states
        ctx.save_for_backward(*tensors)
        flat, ctx.final = _flatten_state(state)
        finish["state"] = ctx.final
        finish["outputs"] = len(outputs[0])
        return *join_outputs(outputs), *flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        _, tokens = ctx.rebuild(tensors)
        count = len(tensors)
        outputs = len(grads) - ctx.final.size
        state_grads = list(grads[outputs:])
        first = ctx.states[0]
        n_state = len(_flatten_state(first)[0])
        token_grads: list[Tensor | None] = [None] * (count - n_state)
        needs = ctx.needs_input_grad[3 + n_state :]
        wanted = [x for x in tokens if x is not None]
        shared = [index >= PER_TOKEN for index, x in enumerate(tokens) if x is not None]
        for index in reversed(range(len(ctx.groups))):
            run, start, stop = ctx.groups[index]
            with torch.enable_grad():
                flat, _ = _flatten_state(ctx.states[index])
                flat = [x.detach().requires_grad_() for x in flat]
                leaves = [
                    (x if whole else x[:, start:stop]).detach().requires_grad_(need)
                    for x, need, whole in zip(wanted, needs, shared, strict=True)
                ]
                _, rebuild_group = _flatten(ctx.states[index], tokens)
                state, part = rebuild_group([*flat, *leaves])
                new_state, out = run(state, part)
                new_flat, _ = _flatten_state(new_state)
                results = [*out, *new_flat]
                cotangents = [g[:, start:stop] for g in grads[:outputs]] + state_grads
                pairs = [(r, g) for r, g in zip(results, cotangents, strict=True) if r.requires_grad]
                inputs = [x for x in (*flat, *leaves) if x.requires_grad]
                gradients = torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
            by_input = {id(x): g for x, g in zip(inputs, gradients, strict=True)}
            state_grads = [torch.zeros_like(x) if by_input[id(x)] is None else by_input[id(x)] for x in flat]
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
        return None, None, None, *state_grads, *token_grads


class _StateSpec(NamedTuple):
    counts: tuple[int, int, int]
    gram: bool

    @property
    def size(self) -> int:
        return sum(self.counts) + self.gram

    def build(self, flat: Tensors) -> FlatState:
        a, b, c = self.counts
        gram = flat[a + b + c] if self.gram else None
        return FlatState(flat[:a], flat[a : a + b], flat[a + b : a + b + c], gram)


def _flatten_state(state: FlatState) -> tuple[list[Tensor], _StateSpec]:
    flat = [*state.weights, *state.momentum, *state.anchor]
    spec = _StateSpec((len(state.weights), len(state.momentum), len(state.anchor)), state.gram is not None)
    return (flat if state.gram is None else [*flat, state.gram]), spec


def run_checkpointed(
    rule: FlatRule,
    tiling: Tiling,
    state: FlatState,
    tokens: FlatTokens,
    *,
    key_pass: KeyPass,
    checkpoint_every: int | None,
) -> tuple[FlatState, Tensors]:
    """:func:`run_tiles`, whose backward pass keeps the state at some tiles and recomputes what lies between."""
    tile, ends = tiling

    def group(start: int, stop: int) -> tuple[Any, int, int]:
        def run(state: FlatState, part: FlatTokens) -> tuple[FlatState, Tensors]:
            with torch.autocast(part.q.device.type, enabled=False):
                return run_tiles(rule, key_pass, Tiling(tile, ends[start:stop]), state, part)

        return run, start * tile, stop * tile

    if checkpoint_every is None:
        widest = max(tile, *(max(w.shape[-2:]) for w in state.weights))
        checkpoint_every = GRAPH_NUMBERS // (20 * len(state.weights) * len(tokens.k) * tile * widest)
    every = max(1, checkpoint_every)
    groups = [group(i, min(i + every, len(ends))) for i in range(0, len(ends), every)]
    tensors, rebuild = _flatten(state, tokens)
    if len(groups) > 1 and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        finish: dict[str, Any] = {}
        results = _Checkpointed.apply(groups, rebuild, finish, *tensors)
        return finish["state"].build(results[finish["outputs"] :]), results[: finish["outputs"]]
    parts = []
    for run, start, stop in groups:
        state, out = run(state, tokens.slots(start, stop))
        parts.append(out)
    return state, join_outputs(parts)
