"""How a memory turns surprise into a step: each inner optimiser is the line of the rule that it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Descent:
    """Gradient descent: a step is -theta u (Eq. 8)."""

    def step(
        self, momentum: Sequence[Tensor], gradient: Sequence[Tensor], theta: Tensor, eta: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """What is added to the weights, and the new momentum, from the momentum S and the gradient u a layer."""
        return tuple(-theta * u for u in gradient), tuple(momentum)


@dataclass(frozen=True)
class Momentum:
    """Descent with momentum: the step is S = eta S - theta u (Eq. 14)."""

    def step(
        self, momentum: Sequence[Tensor], gradient: Sequence[Tensor], theta: Tensor, eta: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """As for :class:`Descent`."""
        assert eta is not None
        new = tuple(eta * s - theta * u for s, u in zip(momentum, gradient, strict=True))
        return new, new


@dataclass(frozen=True)
class NewtonSchulz:
    """Momentum S = eta S - u, of which theta times its nearest orthogonal matrix is the step, as in Muon.

    Args:
        iterations: of Newton and Schulz's quintic, which brings all singular values near 1.
    """

    iterations: int = 5

    def step(
        self, momentum: Sequence[Tensor], gradient: Sequence[Tensor], theta: Tensor, eta: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """As for :class:`Descent`."""
        assert eta is not None
        new = tuple(eta * s - u for s, u in zip(momentum, gradient, strict=True))
        return tuple(theta * orthogonalise(s, self.iterations) for s in new), new


Optimiser = Descent | Momentum | NewtonSchulz
OPTIMISERS = {"momentum": Momentum, "newton_schulz": NewtonSchulz}


def orthogonalise(x: Tensor, iterations: int) -> Tensor:
    """Nearly U V^T of x = U D V^T, (..., out, in), by products of matrices alone."""
    a, b, c = 3.4445, -4.775, 2.0315  # Muon's: steep at 0, and between 0.7 and 1.2 after five iterations
    x = x * torch.rsqrt(x.square().sum((-2, -1), keepdim=True) + 1e-15)
    for _ in range(iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x
