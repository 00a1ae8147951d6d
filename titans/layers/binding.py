"""Other ways for a memory to bind values to keys: what arXiv 2602.21204 changed to ask whether it is linear attention.

Each is a function around the rule: it changes the tokens or the state that the rule is given, and what comes back, so
that every engine runs it. They are for the sequential rule, and for reads that come with a write: a read without one
(``NeuralMemory.read``, the first of MAC's) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titans.ops import MemoryState, Rule, Tokens
from titans.ops.network import ACTIVATIONS, MemoryMLP

Run = Callable[[Rule, Tokens, MemoryState], Any]  # (y, state), and the surprise if the caller asked for it


def several_steps(count: int, run: Run, rule: Rule, tokens: Tokens, state: MemoryState) -> Any:
    """``count`` steps of Eq. 14 on every token, with forgetting in the first alone, read after the last.

    A token that comes ``count`` times and forgets the first time only does that. Momentum decays with each step, and
    the guard counts steps. The surprise is that of the first.
    """

    def repeat(x: Tensor) -> Tensor:
        return x.repeat_interleave(count, dim=2)

    q, k, v, theta = map(repeat, tokens[:4])
    alpha, eta, mask = tokens.alpha, tokens.eta, tokens.mask
    if alpha is not None:
        rest = torch.zeros_like(alpha).unsqueeze(3).expand(-1, -1, -1, count - 1)
        alpha = torch.cat([alpha.unsqueeze(3), rest], dim=3).flatten(2)
    mask = None if mask is None else mask.repeat_interleave(count, dim=1)
    repeated = Tokens(q, k, v, theta, alpha, None if eta is None else repeat(eta), mask)
    y, state, *surprise = run(rule, repeated, state)
    return y[:, :, count - 1 :: count], state, *(type(s)(*(part[:, :, ::count] for part in s)) for s in surprise)


def ascent(run: Run, rule: Rule, tokens: Tokens, state: MemoryState) -> Any:
    """Every step goes up the gradient: theta < 0.

    The bound on steps does not look at the sign: they are as long as before. But where descent multiplies a token's
    own error by 1 - 2 theta kappa / (1 + kappa), within [-1, 1], ascent multiplies it by 1 + 2 theta kappa /
    (1 + kappa), up to 3: only forgetting and the guard hold the weights.
    """
    return run(rule, tokens._replace(theta=-tokens.theta), state)


def key_queries(run: Run, rule: Rule, tokens: Tokens, state: MemoryState) -> Any:
    """A token reads with its key, M_t(k_t); the projection of queries is not used."""
    return run(rule, tokens._replace(q=tokens.k), state)


def last_layer(run: Run, rule: Rule, tokens: Tokens, state: MemoryState) -> Any:
    """Only the last layer of the memory learns while it reads; those before it stay as they were at the start.

    Given its inputs, the last layer is a linear memory: that is what runs, on what the other layers make of q and k.
    """
    if len(state.weights) == 1:
        return run(rule, tokens, state)
    first, network, to = state.weights[:-1], rule.network, rule.retention.to
    assert isinstance(network, MemoryMLP)

    def features(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return ACTIVATIONS[network.activation].value(replace(network, norm=None)(first, x.to(first[0].dtype)))

    y, after, *surprise = run(
        replace(rule, retention=replace(rule.retention, to=None if to is None else to[-1:])),
        tokens._replace(q=features(tokens.q), k=features(tokens.k)),
        replace(state, weights=state.weights[-1:], momentum=state.momentum[-1:], anchor=state.anchor[-1:]),
    )
    weights = (*first, *after.weights)
    after = replace(after, weights=weights, momentum=(*state.momentum[:-1], *after.momentum), anchor=weights)
    return y.to(tokens.q.dtype), after, *surprise


BINDINGS: dict[str, Callable[..., Any]] = {
    "two_steps": partial(several_steps, 2),
    "four_steps": partial(several_steps, 4),
    "ascent": ascent,
    "key_queries": key_queries,
    "last_layer": last_layer,
}


def bind(name: str | None, run: Run) -> Run:
    """``run`` with the binding of this name; None: as it is."""
    return run if name is None else partial(BINDINGS[name], run)
