"""The sequential rule in parallel: every token's gradient is taken at the weights just before it, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops.coefficients import Coefficients
from titans.ops.dual import Keys, Output, Tile, finish_keys, finite, output_error
from titans.ops.flat import FlatRule, FlatState, FlatTokens, Tensors
from titans.ops.network import ACTIVATIONS
from titans.ops.once import once_differentiable
from titans.ops.recurrent import TINY

GUARD_EVERY = 64
LARGEST = 1e10  # numbers of a sweep stay below this


class _Past(NamedTuple):
    """How much of the tile's first weights and of each earlier token is left in M_{t-1}."""

    products: Tensor  # (n, b, b), strictly lower triangular
    key_products: Tensor  # the same times k_t . k_i
    beta: Tensor | None  # (n, b, 1)
    c: Tensor | None  # (n, b, 1)


class _Weights(NamedTuple):
    """A layer's weight and momentum side by side, ready to be multiplied by rows."""

    forward: Tensor  # (n, in, blocks of out): the weight, its momentum, its rest
    backward: Tensor  # (n, out, blocks of hidden), without the bias
    out: int
    hidden: int


@dataclass(frozen=True)
class ExactKeys:
    """The exact rule's key pass: every key goes through its own past weights.

    Linear memory is one triangular solve. Deep memory takes fixed-point sweeps, each with its last layer solved.
    """

    sweeps: int | None
    tolerance: float | None
    residuals: list[Tensor] | None

    def prepare(self, rule: FlatRule, tile: int, tokens: FlatTokens, coefficients: Coefficients) -> Tensors:
        """The coefficients of M_{t-1} instead of M_t, and the products of keys."""
        products = F.pad(coefficients.products[..., :-1, :], (0, 0, 1, 0))
        rows = []
        if coefficients.beta is not None:
            rows.append(F.pad(coefficients.beta[..., :-1], (1, 0), value=1.0).unsqueeze(-1))
        if coefficients.c is not None:
            rows.append(F.pad(coefficients.c[..., :-1], (1, 0)).unsqueeze(-1))
        if rule.decay_first and tokens.alpha is not None:
            decay = (1 - tokens.alpha).unflatten(1, (-1, tile)).unsqueeze(-1)
            products, rows = products * decay, [row * decay for row in rows]
        x = rule.inputs(tokens.k).unflatten(1, (-1, tile))
        return products, ((x @ x.mT) * products).tril(-1), *rows

    def __call__(self, rule: FlatRule, state: FlatState, tile: Tile) -> Keys:
        """Gradients of all tokens of a tile, each at the weights just before it."""
        products, key_products, *rows = tile.prepared
        c = rows.pop() if state.momentum else None
        past = _Past(products, key_products, rows[0] if rows else None, c)
        if len(state.weights) == 1 and _solvable(rule, tile):
            if rule.bounded:
                # kappa = ||h||^2 whatever the error: the step is known before the error is
                kappa = rule.inputs(tile.k).square().sum(-1)
                tile = tile._replace(step=tile.step / (1 + kappa))
                rule = replace(rule, bounded=False)
            if not rule.first_order:
                return _sweep(rule, _side_by_side(rule, state, tile.rest), tile, past, None)
            with torch.no_grad():
                keys = _sweep(rule, _side_by_side(rule, state, tile.rest), tile, past, None)
            return _first_order(rule, state, tile, past, keys)

        if rule.first_order:
            with torch.no_grad():
                weights = _side_by_side(rule, state, tile.rest)
                keys = _sweep(rule, weights, tile, past, self._solve(rule, weights, tile, past))
            return _first_order(rule, state, tile, past, keys)
        weights = _side_by_side(rule, state, tile.rest)
        return _sweep(rule, weights, tile, past, _implicit(self._solve, rule, weights, tile, past))

    def _solve(self, rule: FlatRule, weights: list[_Weights], tile: Tile, past: _Past) -> Tensors:
        """The fixed point that a sweep leaves as it is: all layers' deltas but a solved last one's, and the step."""
        size = tile.k.shape[1]
        limit = size - 1 if self.sweeps is None or self.tolerance is not None else min(self.sweeps, size - 1)
        guess = None
        change = None
        for _ in range(limit):
            new = _guess(rule, tile, _sweep(rule, weights, tile, past, guess))
            if guess is not None and (self.tolerance is not None or self.residuals is not None):
                change = _change(guess, new)
            guess = new
            if self.tolerance is not None and change is not None and bool(change <= self.tolerance):
                break
        if guess is None:
            guess = _guess(rule, tile, _sweep(rule, weights, tile, past, None))
        if self.residuals is not None and change is not None:
            self.residuals.append(change)
        return guess


def _solvable(rule: FlatRule, tile: Tile) -> bool:
    """Whether the last layer's errors are those of a linear memory, given its inputs: one triangular system."""
    return tile.norm is None and rule.loss.affine


def _guess(rule: FlatRule, tile: Tile, keys: Keys) -> Tensors:
    return *(keys.deltas[:-1] if _solvable(rule, tile) else keys.deltas), finite(keys.step)


def _change(old: Tensors, new: Tensors) -> Tensor:
    """The largest relative change of any layer's deltas or of the steps."""
    changes = [(b - a).abs().amax() / b.abs().amax().clamp(min=TINY) for a, b in zip(old, new, strict=True)]
    return torch.stack(changes).amax()


def _side_by_side(rule: FlatRule, state: FlatState, rest: Tensors) -> list[_Weights]:
    layers = []
    for index, w in enumerate(state.weights):
        hidden = w.shape[2] - int(rule.network.bias)
        both = [w, *state.momentum[index : index + 1], *rest[index : index + 1]]
        forward = torch.cat([x.mT for x in both], dim=2)
        backward = torch.cat([x[..., :hidden] for x in both], dim=2) if index else forward
        layers.append(_Weights(forward, backward, w.shape[1], hidden))
    return layers


def _blend(past: _Past, both: Tensor, width: int) -> Tensor:
    """beta x W + c x S + x R from x [W, S, R], row by row; S and R may be missing."""
    z, *others = both.split(width, dim=-1)
    if past.beta is not None:
        z = z * past.beta
    if past.c is not None:
        z = torch.addcmul(z, others.pop(0), past.c)
    return z + others[0] if others else z


def _sweep(rule: FlatRule, weights: list[_Weights], tile: Tile, past: _Past, guess: Tensors | None) -> Keys:
    """Forward and backpropagate every key through its own past weights, as far as the guess knows them.

    W_{t-1} x_t = beta_{t-1} W x_t + c_{t-1} S x_t - sum_{i<t} P[t-1,i] theta_i (h_i . x_t) delta_i, and its transpose
    likewise with h and delta exchanged. Without a guess the hidden layers' sums are left out. The last layer is solved:
    given its inputs, its deltas are those of a token-by-token pass.
    """
    activation = ACTIVATIONS[rule.network.activation]
    depth = len(weights)
    inputs, slopes = [], []
    x = tile.k
    for layer in range(depth - 1):
        x = rule.inputs(x)
        inputs.append(x)
        z = _blend(past, torch.bmm(x, weights[layer].forward), weights[layer].out)
        if guess is not None:
            products = past.key_products if layer == 0 else torch.bmm(x, x.mT) * past.products
            z = torch.baddbmm(z, products * guess[-1].unsqueeze(1), guess[layer], alpha=-1)
        z = _tame(z)
        x, slope = activation.with_derivative(z)
        slopes.append(slope)
    x = rule.inputs(x)
    inputs.append(x)
    z = _blend(past, torch.bmm(x, weights[-1].forward), weights[-1].out)

    squares = torch.bmm(x, x.mT)
    if guess is not None:
        step = guess[-1]
    elif rule.bounded:
        step = tile.step / (1 + squares.diagonal(dim1=1, dim2=2))
    else:
        step = tile.step
    applied = past.products * step.unsqueeze(1)
    output = _last_layer(rule, tile, z, squares * applied, guess, deep=depth > 1)

    deltas = [output.delta]
    for layer in range(depth - 1, 0, -1):
        delta, hidden = deltas[-1], weights[layer].hidden
        back = _blend(past, torch.bmm(delta, weights[layer].backward), hidden)
        back = torch.baddbmm(back, torch.bmm(delta, delta.mT) * applied, inputs[layer][..., :hidden], alpha=-1)
        deltas.append(_tame(back) * slopes[layer - 1])
    return finish_keys(rule, tile, tuple(inputs), tuple(reversed(deltas)), output)


def _tame(x: Tensor) -> Tensor:
    """A sweep may overflow on tokens it has not reached yet: zero times infinity must not spoil those before."""
    return torch.nan_to_num(x, nan=0.0, posinf=LARGEST, neginf=-LARGEST).clamp(-LARGEST, LARGEST)


def _last_layer(rule: FlatRule, tile: Tile, z: Tensor, system: Tensor, guess: Tensors | None, deep: bool) -> Output:
    """The loss and its gradients, given what the tile's first state says (z) and how tokens act on later ones."""
    output = output_error(rule, z, tile)
    if not _solvable(rule, tile):  # swept like the other layers
        if guess is not None:
            output = output_error(rule, torch.baddbmm(z, system.tril(-1), guess[-2], alpha=-1), tile)
        return output._replace(delta=_let_in(_tame(output.delta), tile))
    if not rule.squared:
        if rule.surprise:
            output = output_error(rule, torch.baddbmm(z, system.tril(-1), output.delta, alpha=-1), tile)
        return output._replace(delta=_let_in(_tame(output.delta), tile)) if deep else output
    # (I + system) delta = the error that the tile's first state alone would make
    delta = torch.linalg.solve_triangular(system, output.delta, upper=False, unitriangular=True)
    if deep:
        delta = _let_in(_tame(delta), tile)
    return Output(delta, delta, delta.square().sum(-1) if rule.surprise else None)


def _let_in(delta: Tensor, tile: Tile) -> Tensor:
    """A NaN that the caller let in stays one."""
    given = torch.isnan(tile.k).any(-1, keepdim=True) | torch.isnan(tile.v).any(-1, keepdim=True)
    return delta.masked_fill(given, float("nan"))


def _implicit(
    solve: Callable[[FlatRule, list[_Weights], Tile, _Past], Tensors],
    rule: FlatRule,
    weights: list[_Weights],
    tile: Tile,
    past: _Past,
) -> Tensors:
    """The fixed point, with its derivative from the implicit function theorem instead of the sweeps' graph."""
    tensors: list[Tensor] = [w.forward for w in weights] + [w.backward for w in weights[1:]]
    optional = [tile.k, tile.v, tile.step, tile.norm, tile.loss, *past]
    there = [x is not None for x in optional]
    tensors += [x for x in optional if x is not None]

    def rebuild(values: Sequence[Tensor]) -> tuple[list[_Weights], Tile, _Past]:
        rest = iter(values)
        forward = [next(rest) for _ in weights]
        backward = [forward[0], *(next(rest) for _ in weights[1:])]
        layers = [w._replace(forward=f, backward=b) for w, f, b in zip(weights, forward, backward, strict=True)]
        k, v, step, norm, loss, *coefficients = (next(rest) if is_there else None for is_there in there)
        return layers, Tile(k, v, step, (), norm, (), loss), _Past(*coefficients)  # type: ignore[arg-type]

    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return solve(rule, weights, tile, past)
    result: Tensors = _FixedPoint.apply(solve, rule, rebuild, *tensors)
    return result


class _FixedPoint(torch.autograd.Function):
    """y = f(y, p): the gradient solves lambda = g + (df/dy)^T lambda, which is triangular too: sweeps solve it."""

    @staticmethod
    def forward(ctx: Any, solve: Any, rule: FlatRule, rebuild: Any, *tensors: Tensor) -> Tensors:
        result: Tensors = solve(rule, *rebuild(tensors))
        ctx.rule, ctx.rebuild, ctx.count = rule, rebuild, len(result)
        ctx.save_for_backward(*result, *tensors)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: gradient checkpointing unpacks them once
        point, tensors = saved[: ctx.count], saved[ctx.count :]
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(need) for x, need in zip(tensors, ctx.needs_input_grad[3:], strict=True)
            ]
            y = [x.detach().requires_grad_() for x in point]
            weights, tile, past = ctx.rebuild(leaves)
            f = _guess(ctx.rule, tile, _sweep(replace(ctx.rule, surprise=False), weights, tile, past, tuple(y)))
        at = [i for i, x in enumerate(f) if x.requires_grad]  # a step that nothing moves has no gradient
        moving, adjoint = [f[i] for i in at], list(grads)
        for _ in range(tile.k.shape[1] - 1):
            pulled = torch.autograd.grad(moving, y, [adjoint[i] for i in at], retain_graph=True, materialize_grads=True)
            new = [g + p for g, p in zip(grads, pulled, strict=True)]
            change = _change(tuple(adjoint), tuple(new))
            adjoint = new
            if bool(change <= torch.finfo(change.dtype).eps ** 0.75):
                break
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(moving, wanted, [adjoint[i] for i in at], allow_unused=True))
        return None, None, None, *(next(found) if x.requires_grad else None for x in leaves)


def _first_order(rule: FlatRule, state: FlatState, tile: Tile, past: _Past, keys: Keys) -> Keys:
    """The same values, differentiable through each token's own key, value and step only: its past is a constant."""
    activation = ACTIVATIONS[rule.network.activation]
    past = _Past(*(None if x is None else x.detach() for x in past))  # type: ignore[arg-type]
    applied = past.products * keys.step.detach().unsqueeze(1)
    constant = FlatState(tuple(w.detach() for w in state.weights), tuple(s.detach() for s in state.momentum), (), None)
    weights = _side_by_side(rule, constant, tuple(r.detach() for r in tile.rest))
    inputs, slopes = [], []
    x = tile.k
    for layer, weight in enumerate(weights):
        x = rule.inputs(x)
        inputs.append(x)
        z = _blend(past, torch.bmm(x, weight.forward), weight.out)
        by = (torch.bmm(x, keys.inputs[layer].detach().mT) * applied).tril(-1)
        z = torch.baddbmm(z, by, finite(keys.deltas[layer].detach()), alpha=-1)
        if layer + 1 < len(weights):
            x, slope = activation.with_derivative(z)
            slopes.append(slope)
    output = output_error(rule, z, tile)
    deltas = [output.delta]
    for layer in range(len(weights) - 1, 0, -1):
        hidden = weights[layer].hidden
        back = _blend(past, torch.bmm(deltas[-1], weights[layer].backward), hidden)
        by = (torch.bmm(deltas[-1], keys.deltas[layer].detach().mT) * applied).tril(-1)
        back = torch.baddbmm(back, by, keys.inputs[layer][..., :hidden].detach(), alpha=-1)
        deltas.append(back * slopes[layer - 1])
    return finish_keys(rule, tile, tuple(inputs), tuple(reversed(deltas)), output)
