"""Listens to the memories of a model while it reads: gates, surprise and states of every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from titans.layers.memory import NeuralMemory
from titans.ops import MemoryState, Surprise, Tokens

GATE_NAMES = ("theta", "alpha", "eta")


@dataclass
class MemoryRecord:
    """What a memory did while :func:`record_memory` listened, one item a call; tensors are (batch, heads, time)."""

    gates: list[dict[str, Tensor]] = field(default_factory=list)
    surprise: list[Surprise] = field(default_factory=list)
    state: MemoryState | None = None  # after the last call

    def clear(self) -> None:
        """Forgets the calls; the state stays."""
        self.gates.clear()
        self.surprise.clear()


def memories_of(model: nn.Module) -> list[NeuralMemory]:
    """The memories of a model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, NeuralMemory)]


@contextmanager
def record_memory(model: nn.Module) -> Iterator[list[MemoryRecord]]:
    """While the context is open, every memory of ``model`` tells what it does; its outputs stay the same."""
    memories = memories_of(model)
    records = [MemoryRecord() for _ in memories]

    def listen(memory: NeuralMemory, record: MemoryRecord) -> None:
        def observe(tokens: Tokens, state: MemoryState, surprise: Surprise) -> None:
            gates = ((name, getattr(tokens, name)) for name in GATE_NAMES)
            record.gates.append({name: gate.detach() for name, gate in gates if gate is not None})
            record.surprise.append(Surprise(*(part.detach() for part in surprise)))
            record.state = state

        memory.observer = observe

    try:
        for memory, record in zip(memories, records, strict=True):
            listen(memory, record)
        yield records
    finally:
        for memory in memories:
            memory.observer = None


@torch.no_grad()
def summarise(memory: NeuralMemory, record: MemoryRecord) -> dict[str, float]:
    """What a memory did in one recorded pass, as means over tokens, heads and sequences.

    theta, alpha, eta: the gates it has; surprise: the norm of the gradient of each token; norm: of the memory's
    weights at the end, all layers and heads together; moved: the same of their distance from the learned start.
    """
    if record.state is None:
        return {}
    means = {
        name: float(torch.cat([gates[name] for gates in record.gates], dim=-1).float().mean())
        for name in record.gates[0]
    }
    surprise = torch.cat([part.gradient_norm for part in record.surprise], dim=-1).float()
    means["surprise"] = float(surprise.square().sum(1).sqrt().mean())
    weights = [w.detach().float() for w in record.state.weights]
    # sharded or not
    starts = [getattr(w, "full_tensor", lambda w=w: w)().detach().float() for w in memory.initial(None)]
    means["norm"] = float(_norms(weights).mean())
    means["moved"] = float(_norms([w - start for w, start in zip(weights, starts, strict=True)]).mean())
    return means


def _norms(weights: list[Tensor]) -> Tensor:
    return torch.stack([w.flatten(1).square().sum(1) for w in weights]).sum(0).sqrt()
