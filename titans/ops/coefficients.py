"""Products of gates between any two tokens of a tile: products, never ratios, so 0 and 1 are ordinary values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class _GateProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.shape[-1]
        below = torch.ones(size, size, dtype=torch.bool, device=x.device).tril(-1)
        products = torch.where(below, x.unsqueeze(-1), 1).cumprod(-2).tril_()
        ctx.save_for_backward(products)
        return products

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # x_i is a factor of [t, j] for j < i <= t, and the other factors are [t, i] and [i-1, j]
        (products,) = ctx.saved_tensors
        later = products[..., 1:].mT @ grad
        gradient = torch.zeros_like(products[..., 0])
        gradient[..., 1:] = (later * products[..., :-1, :]).sum(-1)
        return gradient


def gate_products(x: Tensor) -> Tensor:
    """(..., b) -> (..., b, b): entry [t, j] is the product of x_i for j < i <= t; 1 at t = j, 0 above."""
    result: Tensor = _GateProducts.apply(x)
    return result


class Coefficients(NamedTuple):
    """How much of what is left at each token of a tile; None stands for what the rule does not have.

    With P = Da De: ``M_t = beta_t M_0 + c_t S_0 - sum_j P[t,j] theta_j u_j``,
    ``S_t = m_t S_0 - sum_j De[t,j] theta_j u_j``.
    """

    products: Tensor  # P, (..., b, b)
    beta: Tensor | None  # (..., b); None: ones
    c: Tensor | None  # (..., b); None: no momentum
    m: Tensor | None  # (..., b)
    momentum_row: Tensor | None  # De at the tile's last token, (..., b)

    def at(self, index: int | slice) -> Coefficients:
        """Those of one tile, or of some, from (n, tiles, ...)."""
        first, *rest = (None if x is None else x[:, index] for x in self)
        assert first is not None
        return Coefficients(first, *rest)


def tile_coefficients(theta: Tensor, alpha: Tensor | None, eta: Tensor | None, live: Tensor | None) -> Coefficients:
    """Coefficients of tiles (..., b). ``live`` (..., b) is 0 where a slot holds no token, None if all do."""
    size = theta.shape[-1]
    beta = None
    if alpha is None:
        memory = torch.ones(size, size, dtype=theta.dtype, device=theta.device).tril().expand(*theta.shape, size)
    else:
        keep = 1 - alpha
        memory = gate_products(keep)
        beta = memory[..., 0] * keep[..., :1]
    if eta is None:
        return Coefficients(memory, beta, None, None, None)
    momentum = gate_products(eta)
    m = momentum[..., 0] * eta[..., :1]
    enters = momentum if live is None else momentum * live.unsqueeze(-1)  # a dead slot adds no S to M
    products = memory @ enters
    c = (memory @ (m if live is None else m * live).unsqueeze(-1)).squeeze(-1)
    return Coefficients(products, beta, c, m, momentum[..., -1, :])
