"""What a memory computes, as data: the rule, and the tokens it is applied to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from titans.ops.losses import Loss, Squared
from titans.ops.network import MemoryMLP
from titans.ops.optimisers import Momentum, Optimiser
from titans.ops.retention import Forgetting

Network = Callable[[Sequence[Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """How a memory learns while it reads (docs/math.md).

    Attributes:
        network: ``network(weights, x) -> y``; any differentiable function in the definition, a :class:`MemoryMLP` in
            the engines that are fast.
        loss: what the memory descends on.
        retention: what forgetting returns to, and when.
        optimiser: how surprise becomes a step. The gate eta is its momentum; :class:`Descent` has none.
        chunk_size: gradients are taken at the weights of the start of a token's chunk; None: at the weights just
            before it, the sequential rule.
        bounded: divide each step by 1 + kappa, and by the square of how crowded its chunk is (docs/math.md, Bounds).
        max_norm: every ``guard_every`` tokens no row of M - ``retention.to``, nor of S, keeps a larger norm.
        guard_every: None: at the end of every chunk.
        first_order: outer gradients treat the weights at which an inner gradient is taken as constants.
    """

    network: Network = field(default_factory=MemoryMLP)
    loss: Loss = Squared()  # noqa: RUF009 (frozen)
    retention: Forgetting = Forgetting()  # noqa: RUF009 (frozen)
    optimiser: Optimiser = Momentum()  # noqa: RUF009 (frozen)
    chunk_size: int | None = None
    bounded: bool = False
    max_norm: float | None = None
    guard_every: int | None = None
    first_order: bool = False

    def __post_init__(self) -> None:
        chunk = self.chunk_size
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise ValueError(f"chunk_size is {chunk!r}; expected a whole number of at least 1")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm is {self.max_norm}; expected a positive number or None")
        if self.guard_every is not None and (self.guard_every < 1 or self.guard_every % (chunk or 1)):
            expected = "a whole number of at least 1" if chunk is None else f"a multiple of chunk_size, {chunk}"
            raise ValueError(f"guard_every is {self.guard_every}; expected {expected}")

    @property
    def period(self) -> int | None:
        """Tokens between two boundaries of the grid, where chunks start and rows are guarded; None: no grid."""
        if self.chunk_size is None and self.max_norm is None:
            return None
        return self.guard_every or self.chunk_size or 1

    @property
    def grid(self) -> str:
        """What two rules must have in common for a state inside a chunk of one to make sense to the other."""
        chunk = self.chunk_size or 1
        words = [f"chunk_size={chunk}", *(["bounded"] if self.bounded and chunk > 1 else [])]
        return ", ".join([*words, *([f"guard_every={self.period}"] if self.period not in (None, chunk) else [])])


class Tokens(NamedTuple):
    """What a memory reads: queries, keys and values (batch, heads, time, width), and their gates.

    theta, alpha and eta are (batch, heads, time), or, for linear memory, (batch, heads, time, out); None switches
    forgetting or momentum off. mask (batch, time) is False for tokens that are not there.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor
    alpha: Tensor | None = None
    eta: Tensor | None = None
    mask: Tensor | None = None
