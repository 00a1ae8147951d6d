"""Decoding: a layer that reads one token at a time over a state of its own, which changes in place.

A state elsewhere in this package is a value. Here it is copied once, into buffers that the compiled loop changes with
every token (``step.c``), and given back as a value by ``state()``, after which the buffers are not used any more.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from titans.layers.attention import SegmentAttention, SegmentState, WindowAttention, WindowState
from titans.layers.blocks import (
    GATES,
    Block,
    BlockState,
    FeedForward,
    Gate,
    LMMBlock,
    MACBlock,
    MAGBlock,
    MALBlock,
    SwiGLU,
)
from titans.layers.linear import are_all_touched, is_plain, is_touched
from titans.layers.memory import ETA_MAX, INPUT_LIMIT, NeuralMemory, Start
from titans.layers.norm import RMSNorm
from titans.ops.attention import frequencies
from titans.ops.losses import Dot, Squared
from titans.ops.native import step as native
from titans.ops.native.library import (
    ACTIVATION_CODES,
    ORDINARY,
    address,
    addresses,
    can_run_native,
    integers,
    is_traced,
)
from titans.ops.state import MemoryState

BLOCKS = (LMMBlock, MACBlock, MAGBlock, MALBlock)
PARTS = (
    NeuralMemory, WindowAttention, SegmentAttention, Gate, SwiGLU, FeedForward, RMSNorm,
    nn.RMSNorm, nn.Linear, Start,
)  # fmt: skip
FEW_ROWS = 8  # tokens up to which a matrix is read row by row
CHECKPOINTING = "transformers.modeling_layers"


class MemoryStep:
    """A memory that takes one token of every sequence per call.

    Args:
        memory: one that :func:`open_memory` takes.
        state: where it stands, with all sequences at the same position; it is not changed.
        before: a norm of the inputs.
        skip: (dim,), the weight of the tokens themselves beside them.
    """

    def __init__(
        self,
        memory: NeuralMemory,
        state: MemoryState,
        before: nn.RMSNorm | None = None,
        skip: Tensor | None = None,
    ) -> None:
        rule, writes = memory.rule(state), memory.writes
        network, chunk = memory.network, rule.chunk_size or 1
        self._given = replace(state, rule=rule.grid)
        self._weights, self._conv = [_copy(w) for w in state.weights], [_copy(c) for c in state.conv]
        self._momentum = [_copy(s) for s in state.momentum] if memory.momentum and writes else []
        self._anchor = [_copy(w) for w in state.anchor] if chunk > 1 else []
        self._gram = None
        if chunk > 1 and rule.bounded:
            shape = (state.batch_size, memory.heads, memory.head_dim, memory.head_dim)
            self._gram = self._weights[0].new_zeros(shape) if state.gram is None else _copy(state.gram)
        alphas = memory.fixed_alpha if writes else None
        self._alpha = None if alphas is None else torch.tensor(alphas, dtype=self._weights[0].dtype)
        rows = {name: row for row, name in enumerate(memory.gate_names)} if writes else {}
        step = memory.theta_max if memory.fixed_theta is None else memory.fixed_theta
        unit, _, values = (-1.0 if eps is None else eps for eps in memory._lengths)
        gates = memory.to_gates
        rest = list(memory.initial) if rule.retention.to is not None else []
        self.described = native.Memory(
            dim=memory.dim, heads=memory.heads, width=memory.head_dim, depth=memory.depth,
            reach=max(0, memory.conv_kernel - 1), activation=ACTIVATION_CODES[network.activation],
            bias=network.bias, residual=network.residual, squared=isinstance(rule.loss, Squared),
            bounded=rule.bounded, chunk=chunk, period=rule.period or 0, position=state.position,
            gates=len(memory.gate_names), theta_row=rows.get("theta", -1), alpha_row=rows.get("alpha", -1),
            eta_row=rows.get("eta", -1), max_norm=rule.max_norm or 0, limit=INPUT_LIMIT if rule.bounded else 0,
            unit_eps=unit, value_eps=values, theta=step if writes else 0,
            cutoff=memory.gate_cutoff, eta_max=ETA_MAX,
            outs=integers([w.shape[2] for w in self._weights]), ins=integers([w.shape[3] for w in self._weights]),
            before=_norm(before), after=_norm(memory.norm), skip=address(skip), to_qkv=address(memory.to_qkv.weight),
            kernel=address(memory.conv), to_gates=address(None if gates is None else gates.weight),
            gate_bias=address(memory.gate_bias if gates is None else gates.bias), alpha=address(self._alpha),
            to_gate=address(memory.to_gate.weight), to_out=address(memory.to_out.weight), rest=addresses(rest),
            weights=addresses(self._weights), momentum=addresses(self._momentum), anchor=addresses(self._anchor),
            gram=address(self._gram), conv=address(self._conv[0] if self._conv else None),
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """y (batch, dim) of x (batch, dim)."""
        return native.step_memory(self.described, x)

    def state(self) -> MemoryState:
        """Where the memory stands."""
        position, given = self.described.position, self._given
        weights = tuple(self._weights)
        is_open = bool(self._anchor) and position > 0
        return replace(
            given,
            weights=weights,
            momentum=tuple(self._momentum) or given.momentum,
            anchor=tuple(self._anchor) if is_open else weights,
            position=position,
            gram=self._gram if is_open else None,
            conv=tuple(self._conv),
        )


class AttentionStep:
    """An attention that takes one token of every sequence per call, its keys and values in a ring."""

    def __init__(
        self,
        attention: WindowAttention | SegmentAttention,
        state: WindowState | SegmentState,
        before: nn.RMSNorm | None,
        persistent: Tensor | None,
    ) -> None:
        assert isinstance(state.length, int)
        self._length = state.length
        self._slots = _ring_size(attention)
        self._given = state
        named = {name: getattr(state, name, None) for name in ("k", "v", "h_k", "h_v")}
        self._kept = {name: self._spread(x) for name, x in named.items() if x is not None}
        normed = None if persistent is None or before is None else before(persistent)
        self._prefix = [None if x is None else _copy(x) for x in attention._prefix(normed)]
        self._frequency = frequencies(attention.head_dim)
        self.described = native.Attention(
            dim=attention.dim, heads=attention.heads, width=attention.head_dim, slots=self._slots, length=state.length,
            prefix=0 if normed is None else len(normed), turns=int((self._frequency > 0).sum()),
            frequency=address(self._frequency), before=_norm(before), q_norm=_norm(attention.q_norm),
            k_norm=_norm(attention.k_norm), to_q=address(attention.to_q.weight), to_kv=address(attention.to_kv.weight),
            to_out=address(attention.to_out.weight), prefix_k=address(self._prefix[0]),
            prefix_v=address(self._prefix[1]), **{name: address(x) for name, x in self._kept.items()},
        )  # fmt: skip

    def _places(self, count: int, length: int) -> Tensor:
        """The slots of the last ``count`` of ``length`` tokens."""
        return torch.arange(length - count, length) % self._slots

    def _spread(self, x: Tensor) -> Tensor:
        batch, heads, slots, width = x.shape
        count = min(slots, self._length)
        ring = x.new_zeros(batch, heads, self._slots, width)
        right = isinstance(self._given, WindowState)
        ring[:, :, self._places(count, self._length)] = x[:, :, slots - count :] if right else x[:, :, :count]
        return ring

    def state(self) -> WindowState | SegmentState:
        """What the next tokens may still see."""
        length = self.described.length
        count = min(length, self._slots - 1) if isinstance(self._given, WindowState) else length
        places = self._places(count, length)
        kept: dict[str, Any] = {name: x[:, :, places] for name, x in self._kept.items()}
        return replace(self._given, length=length, **kept)


class BlockStep:
    """A block of a model that takes one token of every sequence per call, see :func:`step_blocks`.

    Args:
        block: one that :func:`open_step` takes.
        state: where it stands; it is not changed.
    """

    def __init__(self, block: Block, state: BlockState) -> None:
        self.block = block
        self.batch_size, self._dtype = state.batch_size, block.ffn_norm.weight.dtype
        self._signature = _signature(block)
        self._conv = None
        self._start: list[Tensor] = []
        memory, attention = block.memory, block.attention
        before = block.attention_norm if block.memory_norm is None else block.memory_norm
        self._memory = None
        if memory is not None and state.memory is not None:
            self._memory = MemoryStep(memory, state.memory, before, block.token_skip)
        self._attention = None
        if attention is not None and state.attention is not None:
            self._attention = AttentionStep(attention, state.attention, block.attention_norm, block.persistent)
        kind = "gated" if isinstance(block, MAGBlock) else "sequence"
        if isinstance(block, MACBlock) and attention is not None:
            kind = "context"
            self._start = [_copy(w) for w in state.start]
            if memory is not None and memory.conv is not None:
                shape = (self.batch_size, memory.conv_kernel - 1, memory.heads * memory.head_dim)
                self._conv = memory.conv.new_zeros(shape) if state.conv is None else _copy(state.conv)
        ffn = block.ffn
        self._ffn = native.FeedForward(
            dim=ffn.down.out_features, hidden=ffn.down.in_features, before=_norm(block.ffn_norm),
            gate=address(ffn.gate.weight if isinstance(ffn, SwiGLU) else None), up=address(ffn.up.weight),
            down=address(ffn.down.weight),
        )  # fmt: skip
        gate = block.gate
        self.described = native.Block(
            kind=native.KINDS.index(kind), gate=-1 if gate is None else list(GATES).index(gate.kind),
            memory=_pointer(self._memory), attention=_pointer(self._attention), ffn=ctypes.pointer(self._ffn),
            y_norm=_norm(None if gate is None else gate.y_norm), m_norm=_norm(None if gate is None else gate.m_norm),
            shift=address(None if gate is None else gate.shift),
            start=addresses(self._start), conv=address(self._conv),
        )  # fmt: skip

    def fits(self, block: Block, x: Tensor) -> bool:
        """Whether the block is the one that this was made of, with the same parameters, and can read x (batch, dim)."""
        ours = block is self.block and x.dtype == self._dtype and len(x) == self.batch_size
        return ours and _signature(block) == self._signature

    def state(self) -> BlockState:
        """Where the block stands."""
        return BlockState(
            None if self._memory is None else self._memory.state(),
            None if self._attention is None else self._attention.state(),
            tuple(self._start),
            self._conv,
        )


def open_step(block: Block, state: BlockState | None, x: Tensor) -> BlockStep | None:
    """A step of a block that is to read x (batch, dim) in ``state``; None: the compiled loop does not take it."""
    return BlockStep(block, state) if state is not None and _takes_block(block, state, x) else None


def open_memory(memory: NeuralMemory, state: MemoryState, x: Tensor) -> MemoryStep | None:
    """The same of a memory alone."""
    ordinary = all(map(_is_ordinary, _walk(memory)))
    return MemoryStep(memory, state) if ordinary and _takes_memory(memory, state, x) else None


def step_blocks(steps: Sequence[BlockStep], x: Tensor) -> Tensor:
    """x (batch, dim), a token of every sequence, after all blocks of a model: all of them have taken it, or an error
    was raised and none has. x is also what blocks with a ``token_skip`` see."""
    return native.step_blocks([step.described for step in steps], x)


def is_intercepted() -> bool:
    """Whether somebody watches or changes what PyTorch does, so that it has to be asked."""
    return is_traced() or torch.is_autocast_enabled("cpu") or are_all_touched()


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """``module(x)``, faster for few rows without a graph."""
    few = not is_traced() and not torch.is_grad_enabled() and 0 < x.numel() <= FEW_ROWS * x.shape[-1]
    if few and is_plain(module) and module.bias is None and _can_step([module.weight], x):
        return native.linear(x, module.weight)
    y: Tensor = module(x)
    return y


def _takes_block(block: Block, state: BlockState, x: Tensor) -> bool:
    kind = next((kind for kind in BLOCKS if isinstance(block, kind)), Block)
    names = [name for name in (*vars(kind), *vars(Block)) if not name.startswith("__")]
    own = kind is not Block and all(_written(getattr(type(block), name)) is getattr(kind, name) for name in names)
    first, *others = _walk(block)
    if not own or _is_touched(first) or not all(map(_is_ordinary, others)):
        return False
    memory, attention = block.memory, block.attention
    if (memory is None) != (state.memory is None) or (attention is None) != (state.attention is None):
        return False
    if memory is not None and state.memory is not None and not _takes_memory(memory, state.memory, x):
        return False
    tensors = [x, *state.start, *([] if state.conv is None else [state.conv])]
    if attention is not None and state.attention is not None:
        size, length, k = _ring_size(attention), state.attention.length, state.attention.k
        if not isinstance(length, int) or size < 1:
            return False
        if k.shape[2] < (length if isinstance(attention, SegmentAttention) else min(length, size - 1)):
            return False
        tensors += [k, state.attention.v]
    return _can_step([*block.parameters()], *tensors)


def _written(function: Any) -> Any:
    """A method as its class has it: from 5.23 on, transformers puts its gradient checkpointing around ``forward``."""
    while getattr(function, "__globals__", {}).get("__name__") == CHECKPOINTING:
        function = function.__wrapped__
    return function


def _takes_memory(memory: NeuralMemory, state: MemoryState, x: Tensor) -> bool:
    rule = memory.rule(state)
    return (
        (memory.engine or os.environ.get("TITANS_ENGINE") or "native") == "native"
        and type(rule.loss) in (Squared, Dot)
        and not rule.retention.first
        and memory.sweeps is None
        and memory.gain is None
        and memory.caching is None
        and memory.binding is None
        and state.batch_size > 0
        and isinstance(state.position, int)
        and state.position < (rule.period or 1)
        and state.rule in (None, rule.grid)
        and _can_step([*memory.parameters()], x, *state.weights, *state.momentum, *state.conv)
    )


def _can_step(parameters: Sequence[Tensor], *others: Tensor) -> bool:
    """Whether the compiled loops can read these: parameters as they are, others are copied."""
    return (
        not is_intercepted()
        and can_run_native(*parameters, *others)
        and all(parameter.is_contiguous() for parameter in parameters)
    )


def _walk(module: nn.Module) -> list[nn.Module]:
    """The module and all below it; as ``modules()``, but quicker."""
    found = [module]
    for each in found:  # which grows on the way
        found.extend(child for child in each._modules.values() if child is not None)
    return found


def _is_touched(module: nn.Module) -> bool:
    """Whether somebody wants to hear what goes through the module."""
    return is_touched(module) or module.__dict__.get("observer") is not None


def _is_ordinary(module: nn.Module) -> bool:
    return type(module) in PARTS and not _is_touched(module)


def _signature(block: nn.Module) -> list[Any]:
    """What changes when a module, a hook, or a parameter's place or value does."""
    modules = _walk(block)
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    touched = any(map(_is_touched, modules))
    # Keys and values of persistent tokens are kept, and a fused optimiser or a merged adapter counts no version.
    kept: list[Tensor] = []
    attention, persistent = block._modules.get("attention"), block._parameters.get("persistent")
    if attention is not None and persistent is not None and not touched:
        sources = block._modules["attention_norm"], *map(attention._modules.get, ("to_kv", "k_norm"))
        weights = [persistent, *(p for source in sources if source is not None for p in source._parameters.values())]
        kept = [p for p in weights if p is not None and type(p) in ORDINARY]
    return [
        touched,
        list(map(id, modules)),
        list(map(Tensor.data_ptr, parameters)),
        list(map(Tensor.stride, parameters)),
        [0 if p.is_inference() else p._version for p in parameters],
        [float(x.sum()) for x in kept],
    ]


def _ring_size(attention: WindowAttention | SegmentAttention) -> int:
    """How many tokens it looks at, itself included; 0: without end."""
    return attention.segment_size if isinstance(attention, SegmentAttention) else attention.window or 0


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _norm(module: nn.RMSNorm | None) -> native.Norm:
    return native.Norm() if module is None else native.Norm(address(module.weight), module.eps)


def _pointer(step: MemoryStep | AttentionStep | None) -> Any:
    return None if step is None else ctypes.pointer(step.described)
