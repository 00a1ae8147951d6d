"""The memory inside your own nn.Module: a one-layer model learns to look things up in what it has just read.

Each sequence begins with four keys and their values, goes on with noise, and ends with the keys: which values were
theirs? The model is trained on 32 tokens and asked after up to 1,024. With the memory's writes switched off it guesses.

    python examples/own_module.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans import MemoryState, NeuralMemory

PAIRS, KINDS = 4, 16  # tokens 0 to 15 are keys, the next 16 values, the last 16 noise


class Lookup(nn.Module):
    """Embedding, one memory with a residual connection, and a head: the memory is a layer like any other."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(3 * KINDS, dim)
        self.norm = nn.LayerNorm(dim)
        self.memory = NeuralMemory(dim, heads=2, depth=1)
        self.head = nn.Linear(dim, 3 * KINDS)

    def forward(self, ids: Tensor, state: MemoryState | None = None) -> tuple[Tensor, MemoryState]:
        """Logits (batch, time, vocabulary), and the state to go on from."""
        x = self.embed(ids)
        y, state = self.memory(self.norm(x), state)
        return self.head(x + y), state


def draw(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences (batch, length), and the values (batch, PAIRS) that their last tokens ask for."""
    ids = torch.randint(2 * KINDS, 3 * KINDS, (batch, length))
    keys = torch.rand(batch, KINDS).argsort(dim=1)[:, :PAIRS]
    values = torch.randint(KINDS, 2 * KINDS, (batch, PAIRS))
    ids[:, : 2 * PAIRS] = torch.stack([keys, values], dim=2).flatten(1)
    ids[:, -PAIRS:] = keys
    return ids, values


torch.manual_seed(0)
model = Lookup()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
for _ in range(150):
    ids, values = draw(batch=32, length=32)
    loss = F.cross_entropy(model(ids)[0][:, -PAIRS:].flatten(0, 1), values.flatten())
    optimizer.zero_grad()
    loss.backward()  # through every inner step
    optimizer.step()
for writes, length in ((True, 32), (True, 128), (True, 512), (True, 1024), (False, 32), (False, 1024)):
    model.memory.writes = writes
    ids, values = draw(batch=64, length=length)
    with torch.no_grad():
        right = (model(ids)[0][:, -PAIRS:].argmax(dim=-1) == values).float().mean()
    print(f"memory {'on' if writes else 'off'}, {length} tokens: {right:.0%} recalled")
