"""Pure functions on tensors: the memory's definition, its fast forms, and the models that are special cases of it."""

from titans.ops.engines import Options, explain, run_memory
from titans.ops.functions import neural_memory_chunked, neural_memory_exact, neural_memory_recurrent
from titans.ops.losses import Dot, Huber, Loss, Squared
from titans.ops.network import MemoryMLP
from titans.ops.optimisers import Descent, Momentum, NewtonSchulz
from titans.ops.retention import Forgetting
from titans.ops.rule import Rule, Tokens
from titans.ops.scan import linear_scan, linear_scan_sequential
from titans.ops.state import MemoryState, Surprise

__all__ = [
    "Descent",
    "Dot",
    "Forgetting",
    "Huber",
    "Loss",
    "MemoryMLP",
    "MemoryState",
    "Momentum",
    "NewtonSchulz",
    "Options",
    "Rule",
    "Squared",
    "Surprise",
    "Tokens",
    "explain",
    "linear_scan",
    "linear_scan_sequential",
    "neural_memory_chunked",
    "neural_memory_exact",
    "neural_memory_recurrent",
    "run_memory",
]
