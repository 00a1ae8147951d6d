"""A memory for a causal model that somebody else trained: a window of attention, and a memory of what left it."""

from titans.adapters.model import AdaptedCache, AdaptedModel, adapt
from titans.adapters.saving import load_adapter, load_backbone, save_adapter

__all__ = ["AdaptedCache", "AdaptedModel", "adapt", "load_adapter", "load_backbone", "save_adapter"]
