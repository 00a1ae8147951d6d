"""The sequential rule in parallel: every token's gradient is taken at the weights just before it, tile by tile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops.dual import Carry, Keys, Rule, Tile, finish_keys, output_error
from titans.ops.fold import call_dual
from titans.ops.network import ACTIVATIONS, MemoryMLP
from titans.ops.recurrent import TINY
from titans.ops.state import MemoryState, Surprise

GUARD_EVERY = 64
DEFAULT_SWEEPS = 4


def neural_memory_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    state: MemoryState,
    chunk_size: int = 16,
    *,
    sweeps: int | None = None,
    tolerance: float | None = None,
    network: MemoryMLP = MemoryMLP(),  # noqa: B008 (frozen)
    loss: str = "squared",
    mask: Tensor | None = None,
    bounded: bool = False,
    max_norm: float | None = None,
    guard_every: int = GUARD_EVERY,
    decay_first: bool = False,
    first_order: bool = False,
    return_surprise: bool = False,
    checkpoint_every: int = 8,
    check_values: bool = True,
    residuals: list[Tensor] | None = None,
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
    """What ``neural_memory_recurrent`` with ``chunk_size=1`` gives, many times faster (Eq. 13, 14 to the letter).

    The arguments are those of :func:`titans.ops.neural_memory_recurrent`, and:
        chunk_size: a tile size: it changes nothing but the speed (and, for deep memory, how close a given number of
            sweeps comes).
        sweeps: fixed-point sweeps for deep memory (default 4); as many as a tile has tokens are exact. Linear memory
            is solved and needs none.
        tolerance: instead of a fixed number, sweep until the largest relative change falls below this, at most
            ``chunk_size`` times. The residual sees the whole tile, so the future then decides how often the past is
            refined: not for a model that must be causal to the last bit.
        guard_every: with ``max_norm``, how many tokens lie between two checks.
        checkpoint_every: the backward pass keeps the state at every so many tiles and recomputes what lies between.
        residuals: a list that receives each tile's last relative change, a scalar tensor; empty for linear memory.
    """
    if sweeps is not None and sweeps < 0:
        raise ValueError(f"sweeps is {sweeps}; expected a whole number of at least 0")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}; expected a positive number")
    if max_norm is not None and isinstance(chunk_size, int) and chunk_size > 0:
        chunk_size = max(d for d in range(1, min(chunk_size, guard_every) + 1) if guard_every % d == 0)
    return call_dual(
        partial(_key_pass, sweeps=DEFAULT_SWEEPS if sweeps is None else sweeps, tolerance=tolerance,
                residuals=residuals),
        q, k, v, theta, alpha, eta, state,
        tile=chunk_size, period=None if max_norm is None else guard_every, network=network, loss=loss, mask=mask,
        bounded=bounded, crowding=False, max_norm=max_norm, anchored=False, decay_first=decay_first,
        first_order=first_order, return_surprise=return_surprise, checkpoint_every=checkpoint_every,
        check_values=check_values,
    )  # fmt: skip


class _Past(NamedTuple):
    """How much of the tile's first weights and of each earlier token is left in M_{t-1}."""

    beta: Tensor | None  # (n, b, 1)
    c: Tensor | None  # (n, b, 1)
    products: Tensor  # (n, b, b), strictly lower triangular


def _past(rule: Rule, tile: Tile) -> _Past:
    row = tile.coefficients
    products = F.pad(row.products[:, :-1].tril(), (0, 0, 1, 0))
    beta = c = None
    if row.beta is not None:
        beta = F.pad(row.beta[:, :-1], (1, 0), value=1.0).unsqueeze(-1)
    if row.c is not None:
        c = F.pad(row.c[:, :-1], (1, 0)).unsqueeze(-1)
    if rule.decay_first and tile.keep is not None:
        keep = tile.keep.unsqueeze(-1)
        products = products * keep
        beta = keep if beta is None else beta * keep
        c = None if c is None else c * keep
    return _Past(beta, c, products)


def _apply(
    past: _Past, x: Tensor, w: Tensor, s: Tensor | None, applied: Tensor, left: Tensor, right: Tensor
) -> Tensor:
    """Each row of x times its own past weight: beta x w + c x s - ((x left^T) . applied) right."""
    z = _apply_start(past, x, w, s)
    return torch.baddbmm(z, torch.bmm(x, left.mT) * applied, right, alpha=-1)


def _apply_start(past: _Past, x: Tensor, w: Tensor, s: Tensor | None) -> Tensor:
    """The share of :func:`_apply` that comes from the tile's first state."""
    z = torch.bmm(x, w)
    if past.beta is not None:
        z = z * past.beta
    if past.c is not None and s is not None:
        z = torch.addcmul(z, torch.bmm(x, s), past.c)
    return z


def _key_pass(
    rule: Rule,
    carry: Carry,
    tile: Tile,
    *,
    sweeps: int,
    tolerance: float | None,
    residuals: list[Tensor] | None,
) -> Keys:
    past = _past(rule, tile)
    solved = len(carry.weights) == 1 and tile.norm is None
    if solved and rule.bounded:
        # the network is linear, so kappa = ||h||^2 whatever the error: the step is known before the error is
        kappa = rule.inputs(tile.k).square().sum(-1)
        tile = tile._replace(step=tile.step / (1 + kappa))
        rule = replace(rule, bounded=False)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not rule.first_order):
        keys = _sweep(rule, carry, tile, past, None)
        if not solved:
            keys = _refine(rule, carry, tile, past, keys, sweeps, tolerance, residuals)
    return _first_order(rule, carry, tile, past, keys) if rule.first_order else keys


def _refine(
    rule: Rule,
    carry: Carry,
    tile: Tile,
    past: _Past,
    keys: Keys,
    sweeps: int,
    tolerance: float | None,
    residuals: list[Tensor] | None,
) -> Keys:
    """Sweeps a fixed number of times, or until a sweep changes little."""
    change = None
    for _ in range(sweeps if tolerance is None else tile.k.shape[1]):
        old, keys = keys, _sweep(rule, carry, tile, past, keys)
        if tolerance is not None or residuals is not None:
            change = _change(old, keys)
        if tolerance is not None and change is not None and bool(change <= tolerance):
            break
    if residuals is not None and change is not None:
        residuals.append(change)
    return keys


def _change(old: Keys, new: Keys) -> Tensor:
    """The largest relative change of any layer's deltas."""
    changes = [
        (b - a).detach().abs().amax() / b.detach().abs().amax().clamp(min=TINY)
        for a, b in zip(old.deltas, new.deltas, strict=True)
    ]
    return torch.stack(changes).amax()


def _sweep(rule: Rule, carry: Carry, tile: Tile, past: _Past, guess: Keys | None) -> Keys:
    """Forward and backpropagate every key through its own past weights, as far as the guess knows them.

    Without a guess, the weights are those of the tile's start, decayed and drifted. The last layer is solved: its
    deltas are those of a token-by-token pass, given its inputs.
    """
    activate, derivative = ACTIVATIONS[rule.network.activation]
    depth = len(carry.weights)
    step = tile.step if guess is None else guess.step
    applied = past.products * step.unsqueeze(-2)
    inputs, pre = [], []
    x = tile.k
    for layer in range(depth):
        x = rule.inputs(x)
        inputs.append(x)
        s = carry.momentum[layer].mT if carry.momentum else None
        z = _apply_start(past, x, carry.weights[layer].mT, s)
        if layer + 1 == depth:
            break
        if guess is not None:
            z = torch.baddbmm(z, torch.bmm(x, x.mT) * applied, guess.deltas[layer], alpha=-1)
        pre.append(z)
        x = activate(z)

    if not rule.squared and tile.norm is None:
        output = output_error(rule, z, tile)
        if rule.surprise:
            full = torch.baddbmm(z, torch.bmm(x, x.mT) * applied, output.delta, alpha=-1)
            output = output_error(rule, full, tile)
    elif tile.norm is None:
        # (I + applied . x x^T) delta = the error that the tile's first state alone would make
        system = torch.bmm(x, x.mT) * applied
        output = output_error(rule, z, tile)
        delta = torch.linalg.solve_triangular(system, output.delta, upper=False, unitriangular=True)
        output = output._replace(error=delta, delta=delta, loss=delta.square().sum(-1) if rule.surprise else None)
    else:
        if guess is not None:
            z = torch.baddbmm(z, torch.bmm(x, x.mT) * applied, guess.deltas[-1], alpha=-1)
        output = output_error(rule, z, tile)

    deltas = [output.delta]
    for layer in range(depth - 1, 0, -1):
        delta, width = deltas[-1], pre[layer - 1].shape[-1]
        w = carry.weights[layer][..., :width]
        s = carry.momentum[layer][..., :width] if carry.momentum else None
        back = _apply(past, delta, w, s, applied, delta, inputs[layer][..., :width])
        deltas.append(back * derivative(pre[layer - 1]))
    return finish_keys(rule, tile, tuple(inputs), tuple(reversed(deltas)), output)


def _first_order(rule: Rule, carry: Carry, tile: Tile, past: _Past, keys: Keys) -> Keys:
    """The same values, differentiable through each token's own key, value and step only: its past is a constant."""
    activate, derivative = ACTIVATIONS[rule.network.activation]
    past = _Past(*(None if x is None else x.detach() for x in past))  # type: ignore[arg-type]
    applied = past.products * keys.step.detach().unsqueeze(-2)
    weights = [w.detach() for w in carry.weights]
    momentum = [s.detach() for s in carry.momentum]
    inputs, pre = [], []
    x = tile.k
    for layer, w in enumerate(weights):
        x = rule.inputs(x)
        inputs.append(x)
        s = momentum[layer].mT if momentum else None
        z = _apply(past, x, w.mT, s, applied, keys.inputs[layer].detach(), keys.deltas[layer].detach())
        if layer + 1 < len(weights):
            pre.append(z)
            x = activate(z)
    output = output_error(rule, z, tile)
    deltas = [output.delta]
    for layer in range(len(weights) - 1, 0, -1):
        width = pre[layer - 1].shape[-1]
        s = momentum[layer][..., :width] if momentum else None
        left, right = keys.deltas[layer].detach(), keys.inputs[layer][..., :width].detach()
        back = _apply(past, deltas[-1], weights[layer][..., :width], s, applied, left, right)
        deltas.append(back * derivative(pre[layer - 1]))
    return finish_keys(rule, tile, tuple(inputs), tuple(reversed(deltas)), output)
