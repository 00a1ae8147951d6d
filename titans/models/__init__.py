"""Hugging Face models: the four Titans variants, the presets, and the baselines they are compared with."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans.models.baselines import NAMES, SIZES, build, config_for, count_parameters, state_bytes
    from titans.models.cache import TitansCache
    from titans.models.classification import TitansForSequenceClassification
    from titans.models.configuration import TitansConfig, TitansPredictionConfig
    from titans.models.modeling import TitansForCausalLM, TitansModel
    from titans.models.offload import load_whole_blocks
    from titans.models.prediction import TitansForPrediction
    from titans.models.presets import PRESETS
    from titans.models.pretrained import TitansPreTrainedModel

_HOME = {
    "NAMES": "baselines",
    "SIZES": "baselines",
    "build": "baselines",
    "config_for": "baselines",
    "count_parameters": "baselines",
    "state_bytes": "baselines",
    "load_whole_blocks": "offload",
    "TitansCache": "cache",
    "TitansConfig": "configuration",
    "TitansPredictionConfig": "configuration",
    "TitansForCausalLM": "modeling",
    "TitansForSequenceClassification": "classification",
    "TitansModel": "modeling",
    "TitansPreTrainedModel": "pretrained",
    "TitansForPrediction": "prediction",
    "PRESETS": "presets",
}
__all__ = [
    "NAMES",
    "PRESETS",
    "SIZES",
    "TitansCache",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForPrediction",
    "TitansForSequenceClassification",
    "TitansModel",
    "TitansPreTrainedModel",
    "TitansPredictionConfig",
    "build",
    "config_for",
    "count_parameters",
    "load_whole_blocks",
    "state_bytes",
]


def __getattr__(name: str) -> Any:
    """Loads a part when it is asked for: a config needs no model."""
    if name in _HOME:
        return getattr(import_module(f"titans.models.{_HOME[name]}"), name)
    raise AttributeError(f"module 'titans.models' has no attribute {name!r}")
