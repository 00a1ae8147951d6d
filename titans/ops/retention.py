"""What a memory keeps: where forgetting returns to, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Forgetting:
    """M <- (1 - alpha)(M - to) + to.

    Args:
        to: weights that forgetting returns to, (batch, heads, out, in) a layer; None: zero, Eq. 13 as written.
        first: forget before the gradient is taken, as Gated DeltaNet does, instead of after.
    """

    to: Sequence[Tensor] | None = None
    first: bool = False

    def keep(self, weights: Sequence[Tensor], share: Tensor) -> tuple[Tensor, ...]:
        """The weights of which ``share``, 1 - alpha, is kept."""
        if self.to is None:
            return tuple(share * w for w in weights)
        return tuple(share * (w - r) + r for w, r in zip(weights, self.to, strict=True))
