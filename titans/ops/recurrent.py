"""The definition: one token after another, the gradient from autograd, for any memory network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from titans.ops.inputs import check_inputs, check_position
from titans.ops.network import MemoryMLP
from titans.ops.state import MemoryState, Surprise

TINY = 1e-15  # added to squared norms before they are divided by: its own square still fits into float32
ROOT_TINY = 1e-30  # added under the surprise's square root, so that it has a slope at 0
Network = Callable[[Sequence[Tensor], Tensor], Tensor]


def neural_memory_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    state: MemoryState,
    chunk_size: int = 1,
    *,
    network: Network = MemoryMLP(),  # noqa: B008 (frozen)
    loss: str = "squared",
    mask: Tensor | None = None,
    rest: Sequence[Tensor] | None = None,
    bounded: bool = False,
    max_norm: float | None = None,
    guard_every: int | None = None,
    decay_first: bool = False,
    first_order: bool = False,
    return_surprise: bool = False,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
    """Reads and writes a memory token by token (Eq. 8 to 15, Algorithm 1). Slow, obvious, and right by construction.

    Args:
        q, k, v: queries, keys, values, (batch, heads, time, width).
        theta, alpha, eta: step, forgetting and momentum in [0, 1], (batch, heads, time); for linear memory also
            (batch, heads, time, out), one gate per output channel. ``alpha=None``: nothing is forgotten;
            ``eta=None``: no momentum, and ``state.momentum`` passes through untouched.
        state: where the memory stands; it is not changed.
        chunk_size: the gradient is taken at the weights of the start of the token's chunk; 1 is the sequential rule.
        network: ``network(weights, x) -> y``; any differentiable function.
        loss: ``"squared"``, ||M(k) - v||^2, or ``"dot"``, -<M(k), v>.
        mask: (batch, time) bool; a token that is False is skipped as if it were not there, and reads 0.
        rest: weights that forgetting returns to, (batch, heads, out, in) a layer: M_t = (1 - alpha_t)(M_{t-1} - rest) +
            rest + S_t. None: zero, Eq. 13 as written.
        bounded: divide each step by 1 + kappa, and by the square of how crowded its chunk is (docs/math.md, Bounds).
        max_norm: every ``guard_every`` tokens (default: ``chunk_size``) no row of M - rest, nor
            of S, keeps a larger norm.
        decay_first: take the gradient at (1 - alpha_t) times the weights, as Gated DeltaNet does.
        first_order: the outer gradient treats the weights at which the inner gradient is taken as constants.
        return_surprise: also return each token's gradient norm and loss.
        check_values: refuse NaN, infinities and gates outside [0, 1].

    Returns:
        y (batch, heads, time, out) with y_t = M_t(q_t), the new state, and the surprise if asked for.
    """
    check_inputs(
        q, k, v, theta, alpha, eta, state,
        chunk_size=chunk_size, network=network, loss=loss, mask=mask, rest=rest, max_norm=max_norm,
        check_values=check_values,
    )  # fmt: skip
    period = chunk_size if guard_every is None else guard_every
    if period < 1 or period % chunk_size:
        raise ValueError(f"guard_every is {period}; expected a multiple of chunk_size, {chunk_size}")
    check_position(state, period)
    out_dtype, dtype = q.dtype, state.weights[0].dtype
    q, k, v, theta = (x.to(dtype) for x in (q, k, v, theta))

    home = tuple(torch.zeros_like(w) for w in state.weights) if rest is None else tuple(r.to(dtype) for r in rest)
    weights, momentum, anchor, position = state.weights, state.momentum, state.anchor, state.position
    gram = state.gram if state.gram is not None else k.new_zeros(*k.shape[:2], k.shape[-1], k.shape[-1])
    present = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
    q, k, v = (torch.where(present[:, None, :, None], x, 0) for x in (q, k, v))

    def token_loss(weights: Sequence[Tensor], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        y = network(weights, key)
        losses = (y - value).square().sum((-2, -1)) if loss == "squared" else -(y * value).sum((-2, -1))
        return losses.sum(), losses  # sequences and heads are independent: the sum's gradient is each one's own

    outputs, norms, losses = [], [], []
    for t in range(q.shape[2]):
        key, value, query = (x[:, :, t : t + 1] for x in (k, v, q))
        here = present[:, t].view(-1, 1, 1, 1)
        theta_t = _gate(theta[:, :, t])
        keep = 1 - _gate(alpha[:, :, t].to(dtype)) if alpha is not None else torch.ones_like(theta_t)
        eta_t = _gate(eta[:, :, t].to(dtype)) if eta is not None else None

        starts = (position % chunk_size == 0).view(-1, 1, 1, 1)
        anchor = tuple(torch.where(starts, w, a) for w, a in zip(weights, anchor, strict=True))
        at = _forget(anchor, home, keep) if decay_first else anchor
        if first_order:
            at = tuple(a.detach() for a in at)
        u, loss_t = torch.func.grad(token_loss, has_aux=True)(at, key, value)  # Eq. 8, 12
        squared_norm = sum(x.square().sum((-2, -1)) for x in u)

        if bounded:
            error = 2 * (network(at, key) - value) if loss == "squared" else value
            kappa = squared_norm / (error.square().sum((-2, -1)) + TINY)
            inverse = 1 / (key.square().sum(-1, keepdim=True) + TINY)
            gram = torch.where(starts, 0, gram)
            crowd = 1 + (key @ gram @ key.mT * inverse)[..., 0]  # 1 + sum of cos^2 with the chunk's keys before it
            gram = torch.where(here, gram + key.mT @ key * inverse, gram)
            theta_t = theta_t / ((1 + kappa).unsqueeze(-1).unsqueeze(-1) * crowd.square().unsqueeze(-1))

        if eta_t is None:
            update = tuple(-theta_t * x for x in u)
        else:
            update = tuple(eta_t * s - theta_t * x for s, x in zip(momentum, u, strict=True))  # Eq. 14
            momentum = _where(here, update, momentum)
        moved = tuple(w + s for w, s in zip(_forget(weights, home, keep), update, strict=True))  # Eq. 13
        weights = _where(here, moved, weights)
        outputs.append(torch.where(here, network(weights, query), 0))  # Eq. 15
        norms.append(torch.where(present[:, t, None], squared_norm, 0))
        losses.append(torch.where(present[:, t, None], loss_t, 0))

        position = (position + present[:, t]) % period
        ends = (position == 0).view(-1, 1, 1, 1) & here
        if max_norm is not None:
            clipped = tuple(r + clip_rows(w - r, max_norm) for w, r in zip(weights, home, strict=True))
            weights = _where(ends, clipped, weights)
            if eta is not None:
                momentum = _where(ends, tuple(clip_rows(s, max_norm) for s in momentum), momentum)

    if outputs:
        starts = (position % chunk_size == 0).view(-1, 1, 1, 1)
        anchor = _where(starts, weights, anchor)
        gram = torch.where(starts, 0, gram)
    y = torch.cat(outputs, dim=2).to(out_dtype) if outputs else torch.empty_like(v)
    kept_gram = gram if bounded and chunk_size > 1 else state.gram
    new_state = MemoryState(weights, momentum, anchor, position, kept_gram, state.conv)
    if not return_surprise:
        return y, new_state
    if not norms:
        empty = v.new_zeros(q.shape[:3])
        return y, new_state, Surprise(empty, empty)
    return y, new_state, Surprise(torch.sqrt(torch.stack(norms, dim=-1) + ROOT_TINY), torch.stack(losses, dim=-1))


def clip_rows(weight: Tensor, max_norm: float) -> Tensor:
    """Scales down the rows of (..., out, in) whose norm is larger than ``max_norm``."""
    norm = torch.linalg.vector_norm(weight, dim=-1, keepdim=True)
    return weight * (max_norm / norm.clamp(min=max_norm))


def _forget(weights: Sequence[Tensor], home: Sequence[Tensor], keep: Tensor) -> tuple[Tensor, ...]:
    return tuple(keep * (w - r) + r for w, r in zip(weights, home, strict=True))


def _gate(gate: Tensor) -> Tensor:
    """(batch, heads) or (batch, heads, out) -> broadcastable against a weight (batch, heads, out, in)."""
    return gate.unsqueeze(-1).unsqueeze(-1) if gate.ndim == 2 else gate.unsqueeze(-1)


def _where(condition: Tensor, yes: Sequence[Tensor], no: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.where(condition, a, b) for a, b in zip(yes, no, strict=True))
