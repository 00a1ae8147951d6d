"""Modules with state: the neural memory and the blocks built on it."""

from titans.layers.memory import NeuralMemory

__all__ = ["NeuralMemory"]
