"""Titans: a sequence memory that learns while it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans.layers import NeuralMemory
    from titans.ops import MemoryState

__version__ = "0.1.0"
__all__ = ["MemoryState", "NeuralMemory", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads torch only when a name that needs it is asked for, so that ``titans --help`` answers at once."""
    if name == "NeuralMemory":
        from titans.layers import NeuralMemory

        return NeuralMemory
    if name == "MemoryState":
        from titans.ops import MemoryState

        return MemoryState
    raise AttributeError(f"module 'titans' has no attribute {name!r}")
