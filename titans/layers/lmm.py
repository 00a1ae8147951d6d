"""The LMM block: the neural memory as a sequence layer of its own, without attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from titans.layers.memory import NeuralMemory
from titans.ops.state import MemoryState


class SwiGLU(nn.Module):
    """The gated feed-forward layer: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LMMBlock(nn.Module):
    """A pre-norm residual block: memory, then feed-forward.

        x = x + memory(norm(x))
        x = x + ffn(norm(x))

    The memory comes ready made, so that the block takes any of its rules, depths and gates.

    Args:
        dim: width of the stream; the memory must have the same.
        memory: the sequence layer.
        ffn_multiplier: hidden width of the feed-forward layer, as a multiple of `dim`.
    """

    def __init__(self, dim: int, memory: NeuralMemory, ffn_multiplier: float = 2.0) -> None:
        super().__init__()
        if memory.dim != dim:
            raise ValueError(f"memory.dim is {memory.dim}, the block's dim is {dim}: they must be equal")
        hidden = round(ffn_multiplier * dim)
        if hidden < 1:
            raise ValueError(f"ffn_multiplier x dim must be at least 1, got {ffn_multiplier} x {dim}")
        self.memory_norm = nn.RMSNorm(dim)
        self.memory = memory
        self.ffn_norm = nn.RMSNorm(dim)
        self.ffn = SwiGLU(dim, hidden)

    def forward(
        self, x: Tensor, state: MemoryState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """Read `x` (batch, time, dim), going on from `state`; `mask` (batch, time) is true for real tokens.

        Returns the new stream, of the shape of `x`, and the state to go on from.
        """
        y, state = self.memory(self.memory_norm(x), state=state, mask=mask)
        x = x + y
        return x + self.ffn(self.ffn_norm(x)), state
