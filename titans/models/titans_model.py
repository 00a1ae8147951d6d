"""Lets the Auto classes of transformers load a saved Titans model; a copy of this file lies in its folder."""

try:
    from titans.models import (
        TitansConfig,
        TitansForCausalLM,
        TitansForPrediction,
        TitansForSequenceClassification,
        TitansModel,
        TitansPredictionConfig,
    )
except ImportError as error:
    raise ImportError(
        f"a Titans model needs the package titan-memory ({error}); install it with: pip install 'titan-memory[models]'"
    ) from error

__all__ = [
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForPrediction",
    "TitansForSequenceClassification",
    "TitansModel",
    "TitansPredictionConfig",
]
