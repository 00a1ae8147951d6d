"""Titans: a sequence memory that learns while it reads."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from titans._register import register_when_transformers_is_loaded

if TYPE_CHECKING:
    from titans.layers import NeuralMemory
    from titans.models import (
        TitansCache,
        TitansConfig,
        TitansForCausalLM,
        TitansForPrediction,
        TitansModel,
        TitansPredictionConfig,
    )
    from titans.ops import MemoryState

__version__ = "0.1.0"
_HOME = {
    "adapt": "titans.adapters",
    "MemoryState": "titans.ops",
    "NeuralMemory": "titans.layers",
    "TitansCache": "titans.models",
    "TitansConfig": "titans.models",
    "TitansForCausalLM": "titans.models",
    "TitansForSequenceClassification": "titans.models",
    "TitansForPrediction": "titans.models",
    "TitansModel": "titans.models",
    "TitansPredictionConfig": "titans.models",
}
__all__ = [
    "MemoryState",
    "NeuralMemory",
    "TitansCache",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForPrediction",
    "TitansForSequenceClassification",
    "TitansModel",
    "TitansPredictionConfig",
    "__version__",
    "adapt",
]

register_when_transformers_is_loaded()


def __getattr__(name: str) -> Any:
    """Loads torch only when a name that needs it is asked for, so that ``titans --help`` answers at once."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'titans' has no attribute {name!r}")
