"""What a memory descends on: each loss with its value and its gradient at the memory's output.

The definition needs ``value`` alone. The dual form needs the rest. A loss that the compiled loops do not know is
declined by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """A loss l(y, v) of the memory's output y and the value v, both (..., out).

    Attributes:
        scale: a factor of the gradient that the dual form moves into the step.
        affine: whether the gradient is an affine function of y, so that the exact rule's last layer can be solved.
    """

    scale: ClassVar[int] = 1
    affine: ClassVar[bool] = False

    @property
    def parameter(self) -> Tensor | None:
        """What is learned of the loss itself, a tensor that broadcasts against y; None: nothing."""
        return None

    def with_parameter(self, parameter: Tensor | None) -> Loss:
        """The same loss with another parameter."""
        return self

    def value(self, y: Tensor, v: Tensor) -> Tensor:
        """l, without the last dimension."""
        raise NotImplementedError

    def gradient(self, y: Tensor, v: Tensor) -> Tensor:
        """The gradient of l at y, divided by ``scale``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Squared(Loss):
    """||y - v||^2 (Eq. 12)."""

    scale: ClassVar[int] = 2
    affine: ClassVar[bool] = True

    def value(self, y: Tensor, v: Tensor) -> Tensor:
        """The squared length of the error."""
        return (y - v).square().sum(-1)

    def gradient(self, y: Tensor, v: Tensor) -> Tensor:
        """The error."""
        return y - v


@dataclass(frozen=True)
class Dot(Loss):
    """-<y, v>, whose gradient does not depend on y: linear attention's loss."""

    affine: ClassVar[bool] = True

    def value(self, y: Tensor, v: Tensor) -> Tensor:
        """Minus the inner product."""
        return -(y * v).sum(-1)

    def gradient(self, y: Tensor, v: Tensor) -> Tensor:
        """Minus the value."""
        return -v


@dataclass(frozen=True)
class Huber(Loss):
    """Squared for errors up to a threshold, linear beyond it, channel by channel: an outlier pulls no harder than that.

    Args:
        threshold: a positive number, or a tensor that broadcasts against (batch, heads, time, out) and may be learned.
    """

    threshold: float | Tensor = 1.0
    scale: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, Tensor) and not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}; expected a positive number or a tensor of them")

    @property
    def parameter(self) -> Tensor | None:
        """The threshold, if it is a tensor."""
        return self.threshold if isinstance(self.threshold, Tensor) else None

    def with_parameter(self, parameter: Tensor | None) -> Loss:
        """The same loss with another threshold."""
        return self if parameter is None else replace(self, threshold=parameter)

    def value(self, y: Tensor, v: Tensor) -> Tensor:
        """e^2 up to the threshold d, 2 d |e| - d^2 beyond."""
        size, d = (y - v).abs(), self.threshold
        return torch.where(size <= d, size.square(), 2 * d * size - d * d).sum(-1)

    def gradient(self, y: Tensor, v: Tensor) -> Tensor:
        """The error, cut off at the threshold."""
        d = self.threshold
        return (y - v).clamp(-d, d)  # type: ignore[arg-type]


LOSSES: dict[str, type[Loss]] = {"squared": Squared, "dot": Dot, "huber": Huber}


def find_loss(loss: str | Loss) -> Loss:
    """The loss of this name, or the loss itself."""
    if isinstance(loss, Loss):
        return loss
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}; expected one of {', '.join(LOSSES)}")
    return LOSSES[loss]()
