"""One token through a memory, or through all layers of a model, as one compiled call (step.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from titans.ops.native.library import call, empty

KINDS = ("sequence", "gated", "context")  # LMM and MAL, MAG, MAC
_POINTERS = ctypes.POINTER(ctypes.c_void_p)


class Norm(ctypes.Structure):
    """An RMSNorm."""

    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double)]


class Memory(ctypes.Structure):
    """A memory and its state, as in step.c."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("dim", "heads", "width", "depth", "reach", "activation", "bias")),
        *((name, ctypes.c_int) for name in ("residual", "squared", "bounded", "chunk", "period", "position")),
        *((name, ctypes.c_int) for name in ("gates", "theta_row", "alpha_row", "eta_row")),
        *((name, ctypes.c_double) for name in ("max_norm", "limit", "unit_eps", "value_eps", "theta", "cutoff")),
        ("eta_max", ctypes.c_double),
        *((name, ctypes.POINTER(ctypes.c_int)) for name in ("outs", "ins")),
        *((name, Norm) for name in ("before", "after")),
        ("skip", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("to_qkv", "kernel", "to_gates", "gate_bias", "alpha", "to_gate")),
        ("to_out", ctypes.c_void_p),
        *((name, _POINTERS) for name in ("rest", "weights", "momentum", "anchor")),
        *((name, ctypes.c_void_p) for name in ("gram", "conv")),
    ]  # fmt: skip


class Attention(ctypes.Structure):
    """An attention and its ring of keys and values, as in step.c."""

    _fields_ = [
        ("length", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("dim", "heads", "width", "prefix", "slots", "turns")),
        ("frequency", ctypes.c_void_p),
        *((name, Norm) for name in ("before", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("to_q", "to_kv", "to_out", "prefix_k", "prefix_v")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "h_k", "h_v")),
    ]  # fmt: skip


class FeedForward(ctypes.Structure):
    """A feed-forward layer, as in step.c."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("dim", "hidden")),
        ("before", Norm),
        *((name, ctypes.c_void_p) for name in ("gate", "up", "down")),
    ]  # fmt: skip


class Block(ctypes.Structure):
    """A layer of a model, as in step.c."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("kind", "gate")),
        ("memory", ctypes.POINTER(Memory)),
        ("attention", ctypes.POINTER(Attention)),
        ("ffn", ctypes.POINTER(FeedForward)),
        *((name, Norm) for name in ("y_norm", "m_norm")),
        ("shift", ctypes.c_void_p),
        ("start", _POINTERS),
        ("conv", ctypes.c_void_p),
    ]  # fmt: skip


def step_blocks(blocks: Sequence[Block], x: Tensor) -> Tensor:
    """x (batch, dim), a token of every sequence, after the blocks, whose states change in place: all or none."""
    y = x.clone(memory_format=torch.contiguous_format)
    pointers = (ctypes.POINTER(Block) * len(blocks))(*map(ctypes.pointer, blocks))
    call("titans_step_blocks", x.dtype, pointers, len(blocks), len(x), torch.get_num_threads(), y)
    return y


def step_memory(memory: Memory, x: Tensor) -> Tensor:
    """What a memory says to x (batch, dim) once it has written it, in place."""
    y = empty(x)
    call("titans_step_memory", x.dtype, ctypes.byref(memory), len(x), torch.get_num_threads(), x, y)
    return y


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., in) times weight (out, in), for few rows: PyTorch's product is made for many."""
    y = x.new_empty(*x.shape[:-1], len(weight))
    sizes = (x.numel() // x.shape[-1], *weight.shape, torch.get_num_threads())
    call("titans_linear", x.dtype, *sizes, weight, x, y)
    return y
