"""Pure functions on tensors: the memory's definition, its fast forms, and the models that are special cases of it."""

from titans.ops.chunked import neural_memory_chunked
from titans.ops.exact import neural_memory_exact
from titans.ops.network import MemoryMLP
from titans.ops.recurrent import neural_memory_recurrent
from titans.ops.scan import linear_scan, linear_scan_sequential
from titans.ops.state import MemoryState, Surprise

__all__ = [
    "MemoryMLP",
    "MemoryState",
    "Surprise",
    "linear_scan",
    "linear_scan_sequential",
    "neural_memory_chunked",
    "neural_memory_exact",
    "neural_memory_recurrent",
]
