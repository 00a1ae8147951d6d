"""The memory of an adapter: it reads the states of some layers of a model, and writes into the state of a later one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from titans.layers import NeuralMemory

LARGEST = 10.0  # standardised states beyond it are cut: the first tokens of a text have some that are thousands


class TapMemory(NeuralMemory):
    """A :class:`titans.NeuralMemory` whose output is a product with how far it is open, without norm.

    A memory that knows nothing of a query says almost nothing, and that should stay so.

    Args:
        taps: how many states of the model a token has.
        hidden_size: of the model.
        heads, head_dim, settings: of :class:`titans.NeuralMemory`.

    Attributes:
        mean, scale: (taps, hidden_size), by which states are standardised.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, taps: int, hidden_size: int, heads: int = 1, head_dim: int | None = None, **settings: Any
    ) -> None:
        if heads < 1 or (head_dim is None and hidden_size % heads):
            raise ValueError(f"heads is {heads}; expected a number that divides {hidden_size}, the width of the model")
        head_dim = hidden_size // heads if head_dim is None else head_dim
        super().__init__(taps * hidden_size, heads, head_dim=head_dim, **settings)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.to_gate = nn.Linear(self.dim, heads)
        self.to_out = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.register_buffer("mean", torch.zeros(taps, hidden_size))
        self.register_buffer("scale", torch.ones(taps, hidden_size))
        nn.init.zeros_(self.to_gate.weight)
        nn.init.zeros_(self.to_gate.bias)
        nn.init.zeros_(self.to_out.weight)  # until it has been calibrated or trained, it says nothing

    def standardise(self, states: Tensor) -> Tensor:
        """(batch, time, taps, hidden_size) as the input (batch, time, dim) of the memory."""
        x = ((states.to(self.mean.dtype) - self.mean) * self.scale).clamp(-LARGEST, LARGEST)
        return x.flatten(-2)

    def output(self, y: Tensor, gate: Tensor) -> Tensor:
        """What the network said, y (batch, heads, time, head_dim), as far as it is open: (batch, time, hidden_size)."""
        opened = y.to(gate.dtype).transpose(1, 2) * torch.sigmoid(gate).unsqueeze(-1)
        out: Tensor = self.to_out(opened.flatten(2))
        return out
