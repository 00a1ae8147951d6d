"""The neural long-term memory as a module: projections, gates, the memory rule, and the way back out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.layers.binding import BINDINGS, bind
from titans.layers.caching import Caching, read_cached, run_segments
from titans.layers.linear import call_wide, first_outputs, floating_dtype, is_plain
from titans.ops import (
    Descent,
    Forgetting,
    Huber,
    MemoryMLP,
    MemoryState,
    Options,
    Rule,
    Surprise,
    Tokens,
    explain,
    run_memory,
)
from titans.ops.engines import ENGINES
from titans.ops.exact import GUARD_EVERY
from titans.ops.frame import make_frame
from titans.ops.inputs import check_finite
from titans.ops.losses import LOSSES
from titans.ops.native.library import is_transformed
from titans.ops.optimisers import OPTIMISERS
from titans.ops.project import UNIT_EPS, gate_output, last_inputs, project_heads
from titans.ops.state import CachedSegments

MODES = ("chunked", "exact", "recurrent")
GATE_SOURCES = ("token", "constant")
HOMES = ("start", "zero")
CONV_STARTS = ("token", "mean")
BLOCK = 2048  # tokens that are read at a time when no graph is needed
ETA_MAX = 0.95  # a step never coasts more than twenty times its length, whatever later tokens ask for
NORM_EPS = 1e-2  # a smaller one blows up the first reads of a memory that is still near zero
SLOWEST, FASTEST = 0.0025, 0.3  # what heads forget per token at the start; local ones lie between, by equal ratios
# gates that a cutoff closes and that may have a price; without a step, momentum only carries on what was begun
CLOSING = ("theta", "alpha")
FIT_SCALE = 3.0  # at the start u is so many times the token: enough to prefer a segment to the others
INPUT_LIMIT = 1e6  # a bounded memory reads larger inputs as this


class Start(nn.ParameterList):
    """M_0, one (heads, out, in) weight a layer. It is called, so that an adapter on its weights is heard."""

    __call__ = nn.Module.__call__  # which nn.ParameterList forbids

    def forward(self, _: None = None) -> tuple[Tensor, ...]:
        """The weights; adapters pass an input on."""
        return tuple(self)


class NeuralMemory(nn.Module):
    """A sequence layer whose hidden state is a small network that learns while it reads.

    Args:
        dim: width of the input and of the output.
        heads: independent memories, each on its share of the width; 1 is one full-width memory.
        head_dim: width of a head; default ``dim / heads``.
        depth: layers of each memory; 1 is a linear (matrix) memory.
        expansion: hidden width of the memory over ``head_dim``.
        mode: where a token's gradient is taken. ``"exact"``: at the weights just before it (the sequential rule);
            ``"chunked"``: at the start of its chunk (the paper's parallel rule); ``"recurrent"``: the definition of
            either, token by token, for checking.
        chunk_size: in chunked and recurrent mode a part of the model (default 64; 1 is the sequential rule), in exact
            mode a tile size that changes only the speed (default 64 for linear memory, 8 for deep).
        sweeps: fixed-point sweeps of the exact mode for deep memory.
        activation, bias, residual: of the memory network, see :class:`titans.ops.MemoryMLP`.
        layer_norm: a LayerNorm on the memory network's output, before the residual; learned, but not by the memory.
        loss: what the memory descends on: ``"squared"``, ||M(k) - v||^2, ``"dot"``, -<M(k), v>, or ``"huber"``, squared
            up to a threshold that is learned per head, linear beyond it.
        optimiser: how surprise becomes a step: ``"momentum"``, or ``"newton_schulz"``, in recurrent mode alone: its
            nearest orthogonal matrix.
        decay_first: take the gradient at the weights after forgetting, as Gated DeltaNet does; not in chunked mode.
        unit_keys: scale queries and keys to length 1.
        conv_kernel: width of the causal convolutions on q, k and v; 0: none.
        conv_start: what the convolutions pass on at first: ``"token"``, the present token; ``"mean"``, the last
            ``conv_kernel`` tokens with equal weights, so that words of one sentence are bound to each other in whatever
            order they stand. Keys of local heads start as ``local_heads`` says. Training may change either.
        local_heads: how many heads start with keys that mix the last tokens and with fast forgetting, which suits
            text; the others start as ``conv_start`` says and with slow forgetting, which suits looking things up.
            Training may change either. None: all but one.
        momentum, forgetting: switch either off.
        forget_to: ``"start"``: what is forgotten returns to the learned start M_0, where the memory can learn again;
            ``"zero"``: Eq. 13 as written, with which a deep memory that has forgotten everything has no gradient.
        gates: ``"token"``: step, forgetting and momentum depend on the token; ``"constant"``: learned per head.
        theta_max: the largest step; the step is theta_max * sigmoid(.) * (1 - eta).
        gate_cutoff: step and forgetting close below it: a gate is max(0, (sigmoid - cutoff) / (1 - cutoff)), so that
            most of a long text can leave no trace at all. 0: every token writes and forgets a little.
        fixed_theta: the step of every token, instead of a gate.
        fixed_alpha: the forgetting of every token, one number per head, instead of a gate.
        bounded: steps and weights that stay bounded for any finite input (docs/math.md, Bounds).
        max_norm: with ``bounded``, the largest norm that a row of a memory weight may keep.
        writes: False switches the memory off: nothing is written or forgotten, it stays at its learned start.
        cache_segment_size: keep the weights at the end of every so many tokens, and read them beside the memory as it
            stands (docs/math.md, Memory caching); None: nothing is kept.
        cache_top_k: of the kept, each token reads only the so many that it fits best; None: all.
        cache_average: read the average of the kept weights as one memory, not the average of what each of them says.
        cache_max_states: the most that are kept; beyond it, neighbours are merged. None: memory grows with the text.
        binding: for experiments: a name of :data:`titans.layers.binding.BINDINGS`, another way to bind values to keys
            than the paper's.
        first_order: cheaper outer gradients that treat the weights of the inner gradient as constants.
        checkpoint_every: chunks between two states that the backward pass keeps; default: as memory allows.
        check_values: refuse NaN and infinities in the input with an error that says where.
        engine: what runs the rule, ``"native"``, ``"dual"`` or ``"definition"``; default: the fastest that takes it.
            ``print(memory)`` says which.

    Attributes:
        observer: called with the tokens, the new state and the surprise of every call, see
            :func:`titans.layers.record.record_memory`; None: nobody listens.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        depth: int = 2,
        chunk_size: int | None = None,
        mode: str = "exact",
        *,
        head_dim: int | None = None,
        expansion: float = 1.0,
        sweeps: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        residual: bool = False,
        layer_norm: bool = False,
        loss: str = "squared",
        optimiser: str = "momentum",
        decay_first: bool = False,
        unit_keys: bool = True,
        conv_kernel: int = 4,
        conv_start: str = "token",
        local_heads: int | None = None,
        momentum: bool = True,
        forgetting: bool = True,
        forget_to: str = "start",
        gates: str = "token",
        theta_max: float = 1.0,
        gate_cutoff: float = 0.0,
        fixed_theta: float | None = None,
        fixed_alpha: Sequence[float] | None = None,
        bounded: bool = True,
        max_norm: float = 10.0,
        writes: bool = True,
        cache_segment_size: int | None = None,
        cache_top_k: int | None = None,
        cache_average: bool = False,
        cache_max_states: int | None = None,
        binding: str | None = None,
        first_order: bool = False,
        checkpoint_every: int | None = None,
        check_values: bool = True,
        engine: str | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("dim", dim), ("heads", heads), ("depth", depth)):
            if number < 1:
                raise ValueError(f"{name} is {number}; expected a whole number of at least 1")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
        if gates not in GATE_SOURCES:
            raise ValueError(f"gates is {gates!r}; expected one of {', '.join(GATE_SOURCES)}")
        if forget_to not in HOMES:
            raise ValueError(f"forget_to is {forget_to!r}; expected one of {', '.join(HOMES)}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim is {dim} and heads is {heads}; expected heads to divide dim, or give head_dim")
            head_dim = dim // heads
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; expected a whole number of at least 1")
        if head_dim < 1:
            raise ValueError(f"head_dim is {head_dim}; expected a whole number of at least 1")
        if sweeps is not None and sweeps < 0:
            raise ValueError(f"sweeps is {sweeps}; expected a whole number of at least 0")
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; expected a positive number")
        if checkpoint_every is not None and checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {checkpoint_every}; expected a whole number of at least 1")
        if conv_kernel < 0:
            raise ValueError(f"conv_kernel is {conv_kernel}; expected 0 (none) or the kernel's width")
        if conv_start not in CONV_STARTS:
            raise ValueError(f"conv_start is {conv_start!r}; expected one of {', '.join(CONV_STARTS)}")
        if local_heads is not None and not 0 <= local_heads <= heads:
            raise ValueError(f"local_heads is {local_heads}; expected a whole number from 0 to heads, {heads}, or None")
        if not 0 < theta_max <= 1:
            raise ValueError(f"theta_max is {theta_max}; expected a number in (0, 1]")
        if not 0 <= gate_cutoff < 1:
            raise ValueError(f"gate_cutoff is {gate_cutoff}; expected a number in [0, 1)")
        cache = {"cache_segment_size": cache_segment_size, "cache_top_k": cache_top_k,
                 "cache_max_states": cache_max_states}  # fmt: skip
        for name, count in cache.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}; expected a whole number of at least 1, or None")
            if count is not None and cache_segment_size is None:
                raise ValueError(f"{name} is {count} and cache_segment_size is None; expected a size with it")
        if cache_average and cache_segment_size is None:
            raise ValueError("cache_average is True and cache_segment_size is None; expected a size with it")
        if binding is not None and binding not in BINDINGS:
            raise ValueError(f"binding is {binding!r}; expected one of {', '.join(BINDINGS)}, or None")
        if binding is not None and (mode != "exact" or residual or cache_segment_size is not None):
            raise ValueError(f"binding is {binding!r}; expected it in exact mode, without residual and cache")
        if loss not in LOSSES:
            raise ValueError(f"loss is {loss!r}; expected one of {', '.join(LOSSES)}")
        if optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser is {optimiser!r}; expected one of {', '.join(OPTIMISERS)}")
        if optimiser != "momentum" and not (mode == "recurrent" and momentum):
            raise ValueError(f"optimiser is {optimiser!r}; expected it with momentum and the mode recurrent")
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"engine is {engine!r}; expected one of {', '.join(ENGINES)}")
        if mode == "recurrent" and engine not in (None, "definition"):
            raise ValueError(f"engine is {engine!r} and mode is 'recurrent'; expected the engine definition")
        if decay_first and mode == "chunked":
            raise ValueError("decay_first is for the modes exact and recurrent; mode is 'chunked'")
        if fixed_theta is not None and not 0 < fixed_theta <= 1:
            raise ValueError(f"fixed_theta is {fixed_theta}; expected a number in (0, 1], or None")
        if fixed_alpha is not None:
            if not forgetting:
                raise ValueError("fixed_alpha is given and forgetting is False; expected one of the two")
            if len(fixed_alpha) != heads or not all(0 <= a <= 1 for a in fixed_alpha):
                raise ValueError(
                    f"fixed_alpha is {list(fixed_alpha)}; expected {heads} numbers in [0, 1], one per head"
                )

        self.dim, self.heads, self.head_dim, self.depth = dim, heads, head_dim, depth
        self.mode = mode
        self.chunk_size = chunk_size or (64 if mode != "exact" or depth == 1 else 8)
        self.sweeps = sweeps
        self._network = MemoryMLP(activation=activation, bias=bias, residual=residual)
        self.loss, self.optimiser, self.decay_first, self.unit_keys = loss, optimiser, decay_first, unit_keys
        self.conv_kernel, self.conv_start = conv_kernel, conv_start
        self.local_heads = heads - 1 if local_heads is None else local_heads
        self.momentum, self.forgetting, self.gates = momentum, forgetting, gates
        self.forget_to = forget_to
        self.theta_max, self.gate_cutoff, self.fixed_theta = theta_max, gate_cutoff, fixed_theta
        self.fixed_alpha = None if fixed_alpha is None else tuple(fixed_alpha)
        self.bounded, self.max_norm = bounded, max_norm
        self.writes = writes
        self.caching = None
        if cache_segment_size is not None:
            self.caching = Caching(cache_segment_size, cache_top_k, cache_average, cache_max_states)
        self.binding = binding
        self.first_order, self.checkpoint_every, self.check_values = first_order, checkpoint_every, check_values
        self.engine = "definition" if mode == "recurrent" else engine
        self.observer: Callable[[Tokens, MemoryState, Surprise], None] | None = None
        self.prices: Mapping[str, Tensor] = {}  # see priced

        inner = heads * head_dim
        self.to_qkv = nn.Linear(dim, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.empty(conv_kernel, 3 * inner)) if conv_kernel else None
        learned = {"theta": fixed_theta is None, "alpha": forgetting and fixed_alpha is None, "eta": momentum}
        self.gate_names = tuple(name for name, is_learned in learned.items() if is_learned)
        count = len(self.gate_names)
        self.to_gates = nn.Linear(dim, count * heads) if gates == "token" and count else None
        self.gate_bias = nn.Parameter(torch.empty(count, heads)) if gates == "constant" and count else None
        hidden = max(1, round(expansion * head_dim))
        widths = [head_dim, *[hidden] * (depth - 1), head_dim]
        self.initial = Start(torch.empty(heads, out, inside + int(bias)) for inside, out in pairwise(widths))
        self.gain = nn.Parameter(torch.empty(heads, head_dim)) if layer_norm else None
        self.shift = nn.Parameter(torch.empty(heads, head_dim)) if layer_norm else None
        self.log_threshold = nn.Parameter(torch.empty(heads)) if loss == "huber" else None
        self.norm = nn.RMSNorm(head_dim, eps=NORM_EPS)
        self.to_gate = nn.Linear(dim, inner, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)
        self.to_fit = None if self.caching is None else nn.Parameter(torch.empty(dim, dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initialisation of docs/log.md: queries start as keys, the memory as zero, the first heads local."""
        inner = self.heads * self.head_dim
        for linear in (self.to_qkv, self.to_gate, self.to_out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        if self.to_fit is not None:
            nn.init.eye_(self.to_fit).mul_(FIT_SCALE)  # no random number: the others start as without a cache
        self.to_qkv.weight[:inner] = self.to_qkv.weight[inner : 2 * inner]
        if self.conv is not None:
            nn.init.normal_(self.conv, std=0.1)
            reach = self.conv_kernel**-0.5
            if self.conv_start == "mean":
                self.conv.add_(reach)
            else:
                self.conv[-1] += 1.0
            nn.init.uniform_(self.conv[:, inner : inner + self.local_heads * self.head_dim], -reach, reach)
            self.conv[:, :inner] = self.conv[:, inner : 2 * inner]
        local, alpha = self.local_heads, torch.full((self.heads,), SLOWEST)
        alpha[:local] = torch.logspace(math.log10(FASTEST), math.log10(SLOWEST), local + 1)[:local]
        first = {
            "theta": torch.full((self.heads,), 0.5),
            "alpha": alpha,
            "eta": torch.full((self.heads,), 0.5 / ETA_MAX),
        }
        for name in CLOSING:  # so that the gates start as without a cutoff
            first[name] = self.gate_cutoff + (1 - self.gate_cutoff) * first[name]
        bias = [torch.logit(first[name]) for name in self.gate_names]
        if self.to_gates is not None:
            nn.init.normal_(self.to_gates.weight, std=0.1 * self.dim**-0.5)
            self.to_gates.bias.copy_(torch.cat(bias))
        if self.gate_bias is not None:
            self.gate_bias.copy_(torch.stack(bias))
        for index, weight in enumerate(self.initial):
            if index + 1 == self.depth and self.gain is None:
                nn.init.zeros_(weight)
            elif index + 1 == self.depth:  # a norm of zero has no direction to learn from
                nn.init.normal_(weight)
            else:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        nn.init.ones_(self.norm.weight)
        if self.gain is not None and self.shift is not None:
            nn.init.ones_(self.gain)
            nn.init.zeros_(self.shift)
        if self.log_threshold is not None:  # an error of length 1 that all channels share
            self.log_threshold.fill_(-0.5 * math.log(self.head_dim))

    @property
    def network(self) -> MemoryMLP:
        """The memory network, without its weights."""
        if self.gain is None or self.shift is None:
            return self._network
        return replace(self._network, norm=(self.gain, self.shift))

    def rule(self, state: MemoryState) -> Rule:
        """What the memory does with its tokens, going on from a state of its own."""
        dtype = state.weights[0].dtype
        to = None
        if self.forgetting and self.forget_to == "start":
            to = tuple(w.to(dtype).expand(state.batch_size, -1, -1, -1) for w in self.initial(None))
        sequential = self.mode == "exact" or (self.mode == "recurrent" and self.chunk_size == 1)
        return Rule(
            network=self.network,
            loss=LOSSES[self.loss]()
            if self.log_threshold is None
            else Huber(self.log_threshold.to(dtype).exp().view(-1, 1, 1)),
            retention=Forgetting(to, self.decay_first),
            optimiser=OPTIMISERS[self.optimiser]() if self.momentum and self.writes else Descent(),
            chunk_size=None if self.mode == "exact" else self.chunk_size,
            bounded=self.bounded,
            max_norm=self.max_norm if self.bounded else None,
            guard_every=GUARD_EVERY if sequential and self.bounded else None,
            first_order=self.first_order,
        )

    def init_state(self, batch_size: int) -> MemoryState:
        """The learned start M_0 for ``batch_size`` sequences, float32 or wider, part of the graph."""
        if batch_size < 0:
            raise ValueError(f"batch_size is {batch_size}; expected a whole number of at least 0")
        start = self.initial(None)
        dtype = torch.promote_types(start[0].dtype, torch.float32)
        weights = [w.to(dtype).expand(batch_size, -1, -1, -1) for w in start]
        # without momentum a single zero stands for all of it
        none = None if self.momentum else [w.new_zeros(()).expand(w.shape) for w in weights]
        state = MemoryState.create(weights, none)
        cached = None if self.caching is None else CachedSegments.create(weights, self.dim)
        state = replace(state, rule=self.rule(state).grid, cached=cached)
        if self.conv is None:
            return state
        return replace(state, conv=(self.conv.new_zeros(batch_size, *self._conv_shape),))

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        mask: Tensor | None = None,
        return_surprise: bool = False,
    ) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
        """Reads and writes a stretch of a sequence; call again with the returned state to go on.

        Args:
            x: (batch, time, dim).
            state: where the memory stands; None: at its learned start. It is not changed.
            mask: (batch, time) bool; False for padding, which is skipped wherever it stands.

        Returns:
            y (batch, time, dim), the new state, and the surprise (batch, heads, time) if asked for.
        """
        state = self._check(x, state, mask)
        if x.shape[0] == 0 or x.shape[1] == 0:
            empty = x.new_zeros(x.shape[0], self.heads, x.shape[1])
            y = torch.empty_like(x)
            return (y, state, Surprise(empty, empty)) if return_surprise else (y, state)

        if mask is None and not torch.is_grad_enabled() and x.shape[1] > BLOCK:
            return self._stream(x, state, return_surprise)
        y, *rest = self._write(x, state, mask, return_surprise)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0)
        return self.output(y, self.output_gate(x)), *rest

    def write(self, x: Tensor, state: MemoryState, mask: Tensor | None = None) -> tuple[Tensor, MemoryState]:
        """:meth:`forward` of at least one token without :meth:`output`: M_t(q_t) (batch, heads, time, head_dim), 0 at
        padding, and the new state."""
        y, state, *_ = self._write(x, self._check(x, state, mask), mask, return_surprise=False)
        return y, state

    def _write(
        self, x: Tensor, state: MemoryState, mask: Tensor | None, return_surprise: bool
    ) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
        frame = None
        if mask is not None and not bool(mask.all()):
            frame = make_frame(x.shape[1], mask, 0, x.shape[1], None)
            x = frame.put(x.unsqueeze(1)).squeeze(1)
            mask = frame.live if frame.live is not None else x.new_ones(x.shape[:2], dtype=torch.bool)
        else:
            mask = None

        x = self._limit(x)
        q, k, v, conv = self._project(x, state.conv, mask)
        tokens = Tokens(q, k, v, *self._gate(x), mask)
        result = self._run(tokens, replace(state, conv=conv), return_surprise, x)
        if frame is None:
            return result
        y, state, *surprise = result
        return frame.take(y), state, *(Surprise(*map(frame.take, s)) for s in surprise)  # type: ignore[return-value]

    def _stream(
        self, x: Tensor, state: MemoryState, return_surprise: bool
    ) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
        """A long stretch without a graph, in blocks that stay in the cache: any split gives the same."""
        outputs, surprises = [], []
        start = 0
        position = state.position if isinstance(state.position, int) else int(state.position[0])
        size = BLOCK - position % BLOCK  # ends on the chunk grid
        while start < x.shape[1]:
            y, state, *surprise = self.forward(x[:, start : start + size], state, None, return_surprise)
            outputs.append(y)
            surprises += surprise
            start, size = start + size, BLOCK
        if not return_surprise:
            return torch.cat(outputs, dim=1), state
        return torch.cat(outputs, dim=1), state, Surprise(*(torch.cat(s, dim=2) for s in zip(*surprises, strict=True)))

    @torch.no_grad()
    def step(self, x: Tensor, state: MemoryState | None = None) -> tuple[Tensor, MemoryState]:
        """What :meth:`forward` gives for one token of every sequence, x (batch, 1, dim), faster and without a graph."""
        from titans.layers.step import open_memory  # which knows this class

        state = self._check(x, state, None)
        if x.shape[1] != 1:
            raise ValueError(f"x has {x.shape[1]} tokens; expected 1")
        step = open_memory(self, state, x)
        if step is None:
            y, state, *_ = self.forward(x, state)
            return y, state
        return step(x[:, 0]).unsqueeze(1), step.state()

    def read(self, x: Tensor, state: MemoryState | None = None) -> Tensor:
        """M*(q): what the memory as it stands says to each token of x (batch, time, dim); changes nothing."""
        state = self._check(x, state, None)
        if x.shape[0] == 0 or x.shape[1] == 0:
            return torch.empty_like(x)
        past = state.conv[0][..., : self.heads * self.head_dim] if self.conv_kernel else None
        return self.read_stream(x, state.weights, past, cached=state.cached)[0]

    def read_stream(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        past: Tensor | None,
        mask: Tensor | None = None,
        cached: CachedSegments | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """M*(q) along a stream that is only read, with convolution inputs of its own.

        Args:
            x: (batch, time, dim).
            weights: M*, one (batch, heads, out, in) tensor a layer.
            past: (batch, kernel - 1, heads * head_dim), the queries' last convolution inputs; None: the stream starts.
            mask: (batch, time) bool; False for padding, which must stand after a row's tokens.
            cached: what is read beside M*, by a memory with a cache.

        Returns:
            y (batch, time, dim), and ``past`` to go on from; None without convolution.
        """
        q, past = self.queries(x, past, mask)
        y = self.recall(q, weights)
        if cached is not None:
            y = self.recall_cached(y, q, self.fit_queries(x), cached, cached.mean)
        return self.output(y, self.output_gate(x)), past

    def queries(self, x: Tensor, past: Tensor | None, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The queries (batch, heads, time, head_dim) of :meth:`read_stream`, whatever the weights, and its ``past``."""
        projected = first_outputs(self.to_qkv, self._limit(x), self.heads * self.head_dim)
        kernel = before = None
        if self.conv is not None:
            kernel = self.conv[:, : projected.shape[-1]].to(projected.dtype)
            shape = (len(x), self.conv_kernel - 1, projected.shape[-1])
            before = projected.new_zeros(shape) if past is None else past.to(projected.dtype)
            past = last_inputs(before, projected, mask).clone()  # a view would keep all of them alive
        (q,) = project_heads(projected, before, kernel, self.heads, self._lengths[:1]).unbind(0)
        return q, past

    def recall(self, q: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """M*(q), of the shape of q (batch, heads, time, head_dim)."""
        with torch.autocast(q.device.type, enabled=False):
            return self.network(weights, q.to(weights[0].dtype)).to(q.dtype)

    def fit_queries(self, x: Tensor) -> Tensor | None:
        """u (batch, time, dim), float32 or wider: what tells how well a token fits a segment; None without a cache."""
        if self.to_fit is None:
            return None
        dtype = torch.promote_types(self.to_fit.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(self._limit(x).to(dtype), self.to_fit.to(dtype))

    def recall_cached(
        self, y: Tensor, q: Tensor, u: Tensor | None, cached: CachedSegments | None, mean: Tensor | None
    ) -> Tensor:
        """:meth:`recall` y of q and what the kept memories say, weighed: as y without a cache.

        Args:
            u: :meth:`fit_queries` of the tokens.
            mean: (batch, dim), of the inputs of the open segment, which the memory of :meth:`recall` stands for.
        """
        if self.caching is None or u is None or cached is None or mean is None:
            return y
        return read_cached(self.caching, self.network, cached, y, q, u, mean.unsqueeze(1))

    def output_gate(self, x: Tensor) -> Tensor:
        """The gate of :meth:`output` before its SiLU, (batch, time, heads * head_dim)."""
        gate: Tensor = self.to_gate(self._limit(x))
        return gate

    def output(self, y: Tensor, gate: Tensor) -> Tensor:
        """What the memory network said, y (batch, heads, time, head_dim), through norm, gate and projection: (batch,
        time, dim)."""
        if is_plain(self.norm, nn.RMSNorm):
            gated = gate_output(y.to(gate.dtype), self.norm.weight.to(gate.dtype), gate, NORM_EPS)
        else:
            normed = self.norm(y.to(floating_dtype(self.norm, gate.dtype))).to(gate.dtype)
            gated = normed.transpose(1, 2).flatten(2) * F.silu(gate)
        out: Tensor = self.to_out(gated)
        return out

    def _check(self, x: Tensor, state: MemoryState | None, mask: Tensor | None) -> MemoryState:
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, time, {self.dim})")
        if is_transformed(x, *self.norm.parameters()):
            raise ValueError(
                "x or the weights come from a transform of torch.func (vmap, grad, jvp), which a memory cannot take; "
                "expected a batch, and torch.autograd"
            )
        if not x.is_floating_point():
            raise ValueError(f"x has dtype {x.dtype}; expected a floating dtype")
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; "
                f"expected (batch, time) = {tuple(x.shape[:2])} and bool"
            )
        if self.check_values and x.numel():
            check_finite("x", x)
        if state is None:
            return self.init_state(x.shape[0])
        expected = [(x.shape[0], *w.shape) for w in self.initial(None)]
        found = [tuple(w.shape) for w in state.weights]
        if found != expected:
            raise ValueError(f"state has weights of shape {found}; expected {expected}")
        conv = [(x.shape[0], *self._conv_shape)] if self.conv_kernel else []
        if [tuple(c.shape) for c in state.conv] != conv:
            raise ValueError(
                f"state has convolution inputs of shape {[tuple(c.shape) for c in state.conv]}; expected {conv}"
            )
        if (state.cached is None) != (self.caching is None):
            found_cache, expected_cache = ("none", "some") if state.cached is None else ("cached segments", "none")
            raise ValueError(f"state.cached is {found_cache}; expected {expected_cache} of this memory")
        return state

    @property
    def _conv_shape(self) -> tuple[int, int]:
        """The inputs that the convolutions keep of a sequence."""
        return self.conv_kernel - 1, 3 * self.heads * self.head_dim

    def _project(
        self, x: Tensor, past: tuple[Tensor, ...], mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """q, k, v (batch, heads, time, head_dim), q and k of length 1, and the convolutions' new state."""
        qkv = self.to_qkv(x)
        kernel = before = None
        conv: tuple[Tensor, ...] = ()
        if self.conv is not None:
            kernel, before = self.conv.to(qkv.dtype), past[0].to(qkv.dtype)
            conv = (last_inputs(before, qkv, mask).clone(),)  # a view would keep all of qkv alive
        q, k, v = project_heads(qkv, before, kernel, self.heads, self._lengths).unbind(0)
        return q, k, v, conv

    @property
    def _lengths(self) -> tuple[float | None, float | None, float | None]:
        """How queries, keys and values are normalised: what is added to their squared lengths, None for not at all.

        A bounded memory's values lie in the unit ball: its output is normalised, so their direction is what counts.
        """
        unit = UNIT_EPS if self.unit_keys else None
        return unit, unit, 1.0 if self.bounded else None

    def _gate(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """theta, alpha, eta (batch, heads, time), float32 or wider; None for what is switched off."""
        dtype = torch.promote_types(floating_dtype(self.norm, x.dtype), torch.float32)
        raw = None
        if self.to_gates is not None:
            raw = call_wide(self.to_gates, x, dtype)
            raw = raw.unflatten(-1, (len(self.gate_names), self.heads)).permute(2, 0, 3, 1)
        elif self.gate_bias is not None:
            raw = self.gate_bias.to(dtype)[:, None, :, None].expand(-1, x.shape[0], -1, x.shape[1])
        gate = {} if raw is None else dict(zip(self.gate_names, torch.sigmoid(raw).unbind(0), strict=True))
        if self.gate_cutoff:
            for name in CLOSING:
                if name in gate:
                    gate[name] = _Closing.apply(gate[name], self.gate_cutoff)
        shape = (x.shape[0], self.heads, x.shape[1])
        eta = ETA_MAX * gate["eta"] if self.momentum else None
        if torch.is_grad_enabled():
            gate |= {name: _Priced.apply(gate[name], price) for name, price in self.prices.items() if name in gate}
        if self.fixed_theta is None:
            theta = self.theta_max * gate["theta"]
        else:
            theta = torch.full(shape, self.fixed_theta, dtype=dtype, device=x.device)
        if eta is not None:
            theta = theta * (1 - eta)
        alpha = gate.get("alpha")
        if self.fixed_alpha is not None:
            alpha = torch.tensor(self.fixed_alpha, dtype=dtype, device=x.device)[:, None].expand(shape)
        if not self.writes:  # nothing written and nothing forgotten: M_0, whatever the tokens are
            theta, alpha, eta = theta * 0, None, None
        return theta, alpha, eta

    @property
    def _options(self) -> Options:
        tile = self.chunk_size if self.mode == "exact" else None
        return Options(self.observer is not None, tile, self.sweeps, None, None, self.checkpoint_every)

    def _run(
        self, tokens: Tokens, state: MemoryState, return_surprise: bool, x: Tensor
    ) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
        options = self._options._replace(surprise=return_surprise or self.observer is not None)

        run_rule = bind(self.binding, partial(run_memory, engine=self.engine, options=options, check_values=False))

        def run(tokens: Tokens, state: MemoryState) -> Any:
            return run_rule(self.rule(state), tokens, state)

        if self.caching is None:
            y, after, *surprise = run(tokens, state)
        else:
            u = self.fit_queries(x)
            assert u is not None
            y, after, *surprise = run_segments(run, self.caching, self.network, tokens, state, x, u)
        if self.observer is not None:
            self.observer(tokens, after, *surprise)
        return (y, after, *surprise) if return_surprise else (y, after)

    def _limit(self, x: Tensor) -> Tensor:
        if not self.bounded:
            return x
        limit = min(INPUT_LIMIT, torch.finfo(x.dtype).max)
        return F.hardtanh(x, -limit, limit)  # a clamp whose gradient is one operation

    def explain(self) -> str:
        """Which engine runs the rule, and why: one line."""
        state = self.init_state(0)
        return explain(self.rule(state), state, self.engine, self._options)

    def extra_repr(self) -> str:
        """The settings a reader of ``print(model)`` wants to see."""
        settings = {
            "dim": self.dim,
            "heads": self.heads,
            "depth": self.depth,
            "mode": self.mode,
            "chunk": self.chunk_size,
        }
        return ", ".join(f"{name}={value}" for name, value in settings.items()) + f", engine={self.explain()}"


@contextmanager
def priced(memories: Sequence[NeuralMemory], prices: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, writing and forgetting cost something in the gradients of these memories.

    Args:
        prices: what theta or alpha at 1 costs, in units of the outer loss; scalars.
    """
    unknown = [name for name in prices if name not in CLOSING]
    if unknown:
        raise ValueError(f"prices has {unknown[0]}; expected some of {', '.join(CLOSING)}")
    try:
        for memory in memories:
            memory.prices = prices
        yield
    finally:
        for memory in memories:
            memory.prices = {}


class _Closing(torch.autograd.Function):
    """max(0, (gate - cutoff) / (1 - cutoff)), with a gradient where it is closed too, if that would open it.

    So that a gate that closed too early can open again: the slope of a maximum alone would leave it closed for good.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, cutoff: float) -> Tensor:
        ctx.save_for_backward(gate <= cutoff)
        ctx.cutoff = cutoff
        return ((gate - cutoff) / (1 - cutoff)).clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (closed,) = ctx.saved_tensors
        return torch.where(closed, grad.clamp(max=0), grad) / (1 - ctx.cutoff), None


class _Priced(torch.autograd.Function):
    """A gate as it is, in a graph where every unit of it adds ``price`` to what is minimised.

    So that a price can be put on writing and forgetting wherever a model calls its memory, recomputed or not.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, price: Tensor) -> Tensor:
        ctx.save_for_backward(price)
        return gate.view_as(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (price,) = ctx.saved_tensors
        return grad + price, None
