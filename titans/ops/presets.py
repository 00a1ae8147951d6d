"""The memory op as other models: each function maps a model's own quantities to the op's gates and loss.

One convention holds for all: q and k are (batch, heads, time, width), v is (batch, heads, time, out); token t
is written before it is read; a state comes out and goes in again, so a sequence may be split anywhere as long
as ``chunk_size`` stays the same. Scaling, rotations, feature maps and normalisations of q and k are the
caller's. A linear memory starts empty where state is None. ``check_values=False`` leaves out the checks of
ranges and finiteness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titans.ops.functions import neural_memory_chunked, neural_memory_exact
from titans.ops.network import MemoryMLP, append_one
from titans.ops.state import MemoryState


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: MemoryState | None = None,
    chunk_size: int = 64,
    *,
    normalise: bool = False,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """Linear attention (arXiv 2006.16236), Eq. 3 to 5: M_t = M_{t-1} + v_t k_t^T, y_t = M_t q_t.

    A step of 1 on the dot-product loss, nothing forgotten. q and k come through the feature map already.
    ``normalise`` divides y_t by sum_{j<=t} q_t.k_j (Eq. 3), which a positive feature map keeps from 0; the
    sum is kept as one more output row of the memory, so the state's weight is (batch, heads, out + 1, width).
    """
    values = append_one(v) if normalise else v
    y, state = _additive(q, k, values, None, state, chunk_size, mask, check_values)
    if not normalise:
        return y, state
    sums, total = y[..., :-1], y[..., -1:]
    if mask is not None:  # a masked token reads 0 / 0
        total = total.masked_fill(~mask[:, None, :, None], 1)
    return sums / total, state


def retnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    state: MemoryState | None = None,
    chunk_size: int = 64,
    *,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """Retention (arXiv 2307.08621): M_t = gamma M_{t-1} + v_t k_t^T, y_t = M_t q_t; gamma (heads,) in [0, 1].

    Linear attention with a fixed forgetting alpha = 1 - gamma per head.
    """
    if gamma.shape != q.shape[1:2]:
        raise ValueError(f"gamma has shape {tuple(gamma.shape)}; expected (heads,) = {tuple(q.shape[1:2])}")
    decay = gamma[:, None].expand(q.shape[:3])
    if check_values:
        _check_range("gamma", gamma, 1)
    return _additive(q, k, v, decay, state, chunk_size, mask, check_values)


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: MemoryState | None = None,
    chunk_size: int = 64,
    *,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """Gated linear attention (arXiv 2312.06635) with a scalar decay: M_t = decay_t M_{t-1} + v_t k_t^T.

    decay (batch, heads, time) in [0, 1], so alpha = 1 - decay. Mamba2's SSD (arXiv 2405.21060) is the same
    with q = C, k = B, v = dt x and decay = exp(dt A).
    """
    if check_values:
        _check_range("decay", decay, 1)
    return _additive(q, k, v, decay, state, chunk_size, mask, check_values)


def delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: MemoryState | None = None,
    chunk_size: int = 64,
    *,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """DeltaNet (arXiv 2406.06484), Eq. 34: M_t = M_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

    The squared loss has gradient 2 (M k - v) k^T, so theta = beta / 2; beta (batch, heads, time) in [0, 2].
    """
    return _delta(q, k, v, beta, None, state, chunk_size, mask, check_values)


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    state: MemoryState | None = None,
    chunk_size: int = 64,
    *,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """Gated DeltaNet (arXiv 2412.06464): M_t = decay_t M_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

    beta (batch, heads, time) in [0, 2], decay (batch, heads, time) in [0, 1]. The error is that of the memory
    after the decay, v - decay_t M_{t-1} k, where Eq. 13 and 14 take it before.
    """
    if check_values:
        _check_range("decay", decay, 1)
    return _delta(q, k, v, beta, decay, state, chunk_size, mask, check_values)


def longhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: MemoryState | None = None,
    chunk_size: int = 64,
    *,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """Longhorn (arXiv 2407.14207), Eq. 35: M_t = argmin_M ||M - M_{t-1}||^2 + beta_t ||M k_t - v_t||^2.

    That implicit step is the delta rule with delta_t = beta_t / (1 + beta_t ||k_t||^2). beta (batch, heads,
    time), or (batch, heads, time, out) for one per channel, is not negative, and such that delta is at most
    2: beta in [0, 2] always is, and any beta is where ||k||^2 >= 1/2. This is the exact solution; the
    published layer keeps only the diagonal of k k^T.
    """
    delta = beta / (1 + beta * k.square().sum(-1, keepdim=beta.ndim == 4))
    if check_values:
        _check_range("beta", beta, float("inf"))
        _check_range("beta / (1 + beta ||k||^2)", delta, 2)
    return _delta(q, k, v, delta, None, state, chunk_size, mask, check_values)


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    state: MemoryState,
    norm: tuple[Tensor, Tensor],
    chunk_size: int = 16,
    *,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """TTT-Linear (arXiv 2407.04620): descent on ||f(k_t) - v_t||^2 with f(x) = x + LayerNorm(W x + b).

    lr (batch, heads, time) in [0, 1] is each token's step; ``chunk_size`` is the mini-batch, at whose start
    the gradients are taken, and part of the model. norm is LayerNorm's (weight, bias), each (heads, width),
    learnt in the outer loop. The state has one weight [W, b], (batch, heads, width, width + 1).
    These are the paper's equations; its public code also halves the loss and averages within a mini-batch.
    """
    return _ttt(1, q, k, v, lr, state, norm, chunk_size, mask, check_values)


def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    state: MemoryState,
    norm: tuple[Tensor, Tensor],
    chunk_size: int = 16,
    *,
    mask: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState]:
    """TTT-MLP (arXiv 2407.04620): TTT-Linear with f(x) = x + LayerNorm(W2 gelu(W1 x + b1) + b2).

    gelu is the tanh approximation. The state has the weights [W1, b1] and [W2, b2], (batch, heads, hidden,
    width + 1) and (batch, heads, width, hidden + 1); the paper's hidden is 4 width.
    """
    return _ttt(2, q, k, v, lr, state, norm, chunk_size, mask, check_values)


def _additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: MemoryState | None,
    chunk_size: int,
    mask: Tensor | None,
    check_values: bool,
) -> tuple[Tensor, MemoryState]:
    """M_t = decay_t M_{t-1} + v_t k_t^T; the dot loss's gradient, -v k^T, is the same at any anchor."""
    result = neural_memory_chunked(
        q, k, v, q.new_ones(q.shape[:3]), _forgetting(decay), None, _or_empty(state, k, v), chunk_size,
        loss="dot", mask=mask, check_values=check_values,
    )  # fmt: skip
    return result[0], result[1]


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    state: MemoryState | None,
    chunk_size: int,
    mask: Tensor | None,
    check_values: bool,
) -> tuple[Tensor, MemoryState]:
    if check_values:
        _check_range("beta", beta, 2)
    result = neural_memory_exact(
        q, k, v, beta / 2, _forgetting(decay), None, _or_empty(state, k, v), chunk_size,
        decay_first=decay is not None, mask=mask, check_values=check_values,
    )  # fmt: skip
    return result[0], result[1]


def _ttt(
    depth: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    state: MemoryState,
    norm: tuple[Tensor, Tensor],
    chunk_size: int,
    mask: Tensor | None,
    check_values: bool,
) -> tuple[Tensor, MemoryState]:
    if len(state.weights) != depth:
        raise ValueError(f"state has {len(state.weights)} layers; expected {depth}")
    for name, parameter in zip(("weight", "bias"), norm, strict=True):
        if parameter.shape != (q.shape[1], q.shape[3]):
            raise ValueError(
                f"the {name} of norm has shape {tuple(parameter.shape)}; "
                f"expected (heads, width) = {(q.shape[1], q.shape[3])}"
            )
    if check_values:
        _check_range("lr", lr, 1)
    network = MemoryMLP("gelu_tanh", bias=True, residual=True, norm=norm)
    result = neural_memory_chunked(
        q, k, v, lr, None, None, state, chunk_size, network=network, mask=mask, check_values=check_values
    )
    return result[0], result[1]


def _forgetting(decay: Tensor | None) -> Tensor | None:
    return None if decay is None else 1 - decay


def _or_empty(state: MemoryState | None, k: Tensor, v: Tensor) -> MemoryState:
    """The state given, or a linear memory of zeros."""
    return state or MemoryState.create([k.new_zeros(*k.shape[:2], v.shape[-1], k.shape[-1])])


def _check_range(name: str, x: Tensor, high: float) -> None:
    if x.numel():
        lowest, highest = (float(value) for value in torch.aminmax(x.detach()))
        if not (lowest >= 0 and highest <= high):
            expected = f"in [0, {high:g}]" if high < float("inf") else "not to be negative"
            raise ValueError(f"{name} has values from {lowest:.4g} to {highest:.4g}; expected them {expected}")
