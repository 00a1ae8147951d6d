"""The definition: one token after another, the gradient from autograd, for any rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titans.ops.rule import Rule, Tokens
from titans.ops.state import MemoryState, Surprise, aligned

TINY = 1e-15  # added to squared norms before they are divided by: its own square still fits into float32
ROOT_TINY = 1e-30  # added under the surprise's square root, so that it has a slope at 0


def run_definition(rule: Rule, tokens: Tokens, state: MemoryState) -> tuple[Tensor, MemoryState, Surprise]:
    """Reads and writes token by token (Eq. 8 to 15, Algorithm 1). Slow, obvious, and right by construction."""
    dtype = state.weights[0].dtype
    q, k, v, theta = (x.to(dtype) for x in tokens[:4])
    alpha, eta = (None if x is None else x.to(dtype) for x in (tokens.alpha, tokens.eta))
    network, loss, chunk_size, period = rule.network, rule.loss, rule.chunk_size or 1, rule.period or 1
    retention = rule.retention
    if retention.to is not None:
        retention = replace(retention, to=tuple(r.to(dtype) for r in retention.to))
    weights, momentum, anchor, position = state.weights, state.momentum, state.anchor, state.positions
    gram = state.gram if state.gram is not None else k.new_zeros(*k.shape[:2], k.shape[-1], k.shape[-1])
    present = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if tokens.mask is None else tokens.mask
    q, k, v = (torch.where(present[:, None, :, None], x, 0) for x in (q, k, v))

    def token_loss(weights: Sequence[Tensor], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        losses = loss.value(network(weights, key), value).sum(-1)
        return losses.sum(), losses  # sequences and heads are independent: the sum's gradient is each one's own

    def output_loss(y: Tensor, value: Tensor) -> Tensor:
        return loss.value(y, value).sum()

    outputs, norms, losses = [], [], []
    for t in range(q.shape[2]):
        key, value, query = (x[:, :, t : t + 1] for x in (k, v, q))
        here = present[:, t].view(-1, 1, 1, 1)
        theta_t = _gate(theta[:, :, t])
        share = torch.ones_like(theta_t) if alpha is None else 1 - _gate(alpha[:, :, t])
        eta_t = None if eta is None else _gate(eta[:, :, t])

        starts = (position % chunk_size == 0).view(-1, 1, 1, 1)
        anchor = _where(starts, weights, anchor)
        at = retention.keep(anchor, share) if retention.first else anchor
        if rule.first_order:
            at = tuple(a.detach() for a in at)
        u, loss_t = torch.func.grad(token_loss, has_aux=True)(at, key, value)  # Eq. 8, 12
        squared_norm = sum(x.square().sum((-2, -1)) for x in u)

        if rule.bounded:
            error = torch.func.grad(output_loss)(network(at, key), value)
            kappa = squared_norm / (error.square().sum((-2, -1)) + TINY)
            inverse = 1 / (key.square().sum(-1, keepdim=True) + TINY)
            gram = torch.where(starts, 0, gram)
            crowd = 1 + (key @ gram @ key.mT * inverse)[..., 0]  # 1 + sum of cos^2 with the chunk's keys before it
            gram = torch.where(here, gram + key.mT @ key * inverse, gram)
            theta_t = theta_t / ((1 + kappa).unsqueeze(-1).unsqueeze(-1) * crowd.square().unsqueeze(-1))

        step, new_momentum = rule.optimiser.step(momentum, u, theta_t, eta_t)  # Eq. 14
        momentum = _where(here, new_momentum, momentum)
        moved = tuple(w + s for w, s in zip(retention.keep(weights, share), step, strict=True))  # Eq. 13
        weights = _where(here, moved, weights)
        outputs.append(torch.where(here, network(weights, query), 0))  # Eq. 15
        norms.append(torch.where(present[:, t, None], squared_norm, 0))
        losses.append(torch.where(present[:, t, None], loss_t, 0))

        position = (position + present[:, t]) % period
        ends = (position == 0).view(-1, 1, 1, 1) & here
        if rule.max_norm is not None:
            weights = _where(ends, _guard(weights, retention.to, rule.max_norm), weights)
            if eta is not None:
                momentum = _where(ends, _guard(momentum, None, rule.max_norm), momentum)

    starts = (position % chunk_size == 0).view(-1, 1, 1, 1)
    new_state = replace(
        state,
        weights=weights,
        momentum=momentum,
        anchor=_where(starts, weights, anchor),
        position=aligned(position),
        rule=rule.grid,
        gram=torch.where(starts, 0, gram) if rule.bounded and chunk_size > 1 else state.gram,
    )
    surprise = Surprise(torch.sqrt(torch.stack(norms, dim=-1) + ROOT_TINY), torch.stack(losses, dim=-1))
    return torch.cat(outputs, dim=2).to(tokens.q.dtype), new_state, surprise


def clip_rows(weight: Tensor, max_norm: float) -> Tensor:
    """Scales down the rows of (..., out, in) whose norm is larger than ``max_norm``."""
    norm = torch.linalg.vector_norm(weight, dim=-1, keepdim=True)
    return weight * (max_norm / norm.clamp(min=max_norm))


def _guard(weights: Sequence[Tensor], home: Sequence[Tensor] | None, max_norm: float) -> tuple[Tensor, ...]:
    if home is None:
        return tuple(clip_rows(w, max_norm) for w in weights)
    return tuple(r + clip_rows(w - r, max_norm) for w, r in zip(weights, home, strict=True))


def _gate(gate: Tensor) -> Tensor:
    """(batch, heads) or (batch, heads, out) -> broadcastable against a weight (batch, heads, out, in)."""
    return gate.unsqueeze(-1).unsqueeze(-1) if gate.ndim == 2 else gate.unsqueeze(-1)


def _where(condition: Tensor, yes: Sequence[Tensor], no: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.where(condition, a, b) for a, b in zip(yes, no, strict=True))
