"""Modules with state: the neural memory, attention, and the blocks built on them."""

from titans.layers.attention import SegmentAttention, SegmentState, WindowAttention, WindowState
from titans.layers.blocks import BlockState, LMMBlock, MACBlock, MAGBlock, MALBlock
from titans.layers.memory import NeuralMemory

__all__ = [
    "BlockState",
    "LMMBlock",
    "MACBlock",
    "MAGBlock",
    "MALBlock",
    "NeuralMemory",
    "SegmentAttention",
    "SegmentState",
    "WindowAttention",
    "WindowState",
]
