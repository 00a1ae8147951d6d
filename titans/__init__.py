"""Titans: a sequence memory that learns while it reads."""

from titans.layers import NeuralMemory
from titans.ops import MemoryState

__version__ = "0.1.0"
__all__ = ["MemoryState", "NeuralMemory", "__version__"]
