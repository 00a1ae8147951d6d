"""The paper's four architectures as residual blocks: memory alone, as context, as a gate, as a layer.

Every block is called as ``x, state = block(x, state, mask, restart, tokens)`` with x (batch, time, dim), the state of
the call before (None: the sequence starts), mask (batch, time) bool, False for padding, which stands after a row's
tokens, and restart (batch,) bool, True for rows that start a new sequence here, whatever their state says; or rows that
hold several documents are given as a :class:`titans.layers.packing.Packing` has put them, with it as restart. tokens is
x as it was before the first block, for blocks with a ``token_skip``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.layers.attention import SegmentAttention, SegmentState, SegmentTokens, WindowAttention, WindowState
from titans.layers.memory import NeuralMemory
from titans.layers.norm import RMSNorm
from titans.layers.packing import packed
from titans.ops.state import MemoryState, concatenate_or_zero

EPS = 1e-6
FFNS = ("swiglu", "plain")
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda y, m: y * torch.sigmoid(m),
    "silu": lambda y, m: y * F.silu(m),
    "multiply": lambda y, m: y * m,
    "sum": lambda y, m: y + m,
    "memory": lambda y, m: m * torch.sigmoid(y),
}


@dataclass(frozen=True)
class BlockState:
    """Where a block stands in each sequence of a batch.

    Attributes:
        memory: the memory's state.
        attention: the window, or the open segment.
        start: MAC: the memory's weights at the start of the open segment, which it is read with.
        conv: MAC: the last inputs of the convolution over the stream that only reads.
        mean: MAC, of a memory with a cache: at the start of the open segment, the mean of what was written since the
            memory last kept its weights, (batch, dim).
    """

    memory: MemoryState | None = None
    attention: WindowState | SegmentState | None = None
    start: tuple[Tensor, ...] = ()
    conv: Tensor | None = None
    mean: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """How many sequences the state holds."""
        part = self.memory or self.attention
        assert part is not None
        return part.batch_size

    def map(self, function: Callable[[Tensor], Tensor]) -> BlockState:
        """A state with ``function`` applied to every tensor."""
        return BlockState(
            None if self.memory is None else self.memory.map(function),
            None if self.attention is None else self.attention.map(function),
            tuple(function(w) for w in self.start),
            None if self.conv is None else function(self.conv),
            None if self.mean is None else function(self.mean),
        )

    def detach(self) -> BlockState:
        """The same values, cut off from the graph: where truncated backpropagation through time ends."""
        return self.map(Tensor.detach)

    @classmethod
    def concatenate(cls, states: Sequence[BlockState]) -> BlockState:
        """The sequences of several states, in order."""
        memories = [s.memory for s in states if s.memory is not None]
        attentions: list[Any] = [s.attention for s in states if s.attention is not None]
        return cls(
            MemoryState.concatenate(memories) if memories else None,
            type(attentions[0]).concatenate(attentions) if attentions else None,
            tuple(torch.cat(parts) for parts in zip(*(s.start for s in states), strict=True)),
            concatenate_or_zero([s.conv for s in states], [s.batch_size for s in states]),
            concatenate_or_zero([s.mean for s in states], [s.batch_size for s in states]),
        )

    def reorder(self, indices: Tensor) -> BlockState:
        """Picks sequences by index, with repetition: what beam search needs."""
        return self.map(lambda x: x.index_select(0, indices.to(x.device)))


class SwiGLU(nn.Module):
    """The gated feed-forward layer: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FeedForward(nn.Module):
    """The plain feed-forward layer: `down(gelu(up(x)))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Gate(nn.Module):
    """y ⊗ m: both normalised with learnable weights, then combined (section 4.2 of the paper).

    The norm of y has a shift that starts at 1: a product with y alone, whose signs change from token to token, would
    let little through of what the memory says until y has learned to stand still.
    """

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        if kind not in GATES:
            raise ValueError(f"gate is {kind!r}; expected one of {', '.join(GATES)}")
        self.kind = kind
        self.y_norm = RMSNorm(dim, eps=EPS)
        self.shift = nn.Parameter(torch.empty(dim))
        self.m_norm = RMSNorm(dim, eps=1e-2)  # what an empty memory says is close to zero, and stays there
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The shift; the norms have their own."""
        nn.init.ones_(self.shift)

    def forward(self, y: Tensor, m: Tensor) -> Tensor:
        return GATES[self.kind](self.y_norm(y) + self.shift, self.m_norm(m))


class Block(nn.Module):
    """What the blocks share: ready-made parts, persistent tokens, and the feed-forward layer.

    Args:
        dim: width of the stream; the parts must have the same.
        memory: the neural memory; None: a block without it.
        attention: the attention; None: a block without it.
        persistent: learnable tokens before every sequence (Eq. 19).
        gate: how attention and memory are combined, one of ``GATES``.
        ffn: ``"swiglu"`` or ``"plain"``.
        ffn_multiplier: hidden width of the feed-forward layer, as a multiple of ``dim``.
        token_skip: whether the memory sees the tokens themselves beside the stream, in which what blocks have added
            soon outweighs them.
    """

    def __init__(
        self,
        dim: int,
        memory: NeuralMemory | None,
        attention: WindowAttention | SegmentAttention | None,
        *,
        persistent: int = 0,
        gate: str | None = None,
        ffn: str = "swiglu",
        ffn_multiplier: float = 2.0,
        token_skip: bool = False,
    ) -> None:
        super().__init__()
        if memory is None and attention is None:
            raise ValueError("the block has neither memory nor attention; expected at least one of them")
        for name, part in (("memory", memory), ("attention", attention)):
            if part is not None and part.dim != dim:
                raise ValueError(f"{name}.dim is {part.dim}, the block's dim is {dim}: they must be equal")
        if persistent < 0:
            raise ValueError(f"persistent is {persistent}; expected a number of tokens, or 0 for none")
        if ffn not in FFNS:
            raise ValueError(f"ffn is {ffn!r}; expected one of {', '.join(FFNS)}")
        hidden = round(ffn_multiplier * dim)
        if hidden < 1:
            raise ValueError(f"ffn_multiplier x dim must be at least 1, got {ffn_multiplier} x {dim}")
        self.memory_norm = None if memory is None else RMSNorm(dim, eps=EPS)
        self.memory = memory
        self.attention_norm = None if attention is None else RMSNorm(dim, eps=EPS)
        self.attention = attention
        self.persistent = nn.Parameter(torch.empty(persistent, dim)) if persistent else None
        both = memory is not None and attention is not None
        self.gate = Gate(dim, gate) if both and gate is not None else None
        self.ffn_norm = RMSNorm(dim, eps=EPS)
        self.ffn = SwiGLU(dim, hidden) if ffn == "swiglu" else FeedForward(dim, hidden)
        self.token_skip = nn.Parameter(torch.empty(dim)) if token_skip and memory is not None else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of the block's own: its parts have theirs."""
        if self.persistent is not None:
            nn.init.normal_(self.persistent, std=0.02)
        if self.token_skip is not None:
            nn.init.ones_(self.token_skip)

    def _with_tokens(self, normed: Tensor, tokens: Tensor | None) -> Tensor:
        """What the memory sees of the stream: its norm, and the tokens themselves if there is a ``token_skip``."""
        if self.token_skip is None:
            return normed
        if tokens is None:
            raise ValueError(
                "tokens is None and the block has a token_skip; expected x as it was before the first block"
            )
        return normed + self.token_skip.to(normed.dtype) * tokens

    def _prefix(self, norm: RMSNorm | None) -> Tensor | None:
        """The persistent tokens as a part sees them, (tokens, dim)."""
        return None if self.persistent is None or norm is None else norm(self.persistent)

    def _remember(
        self, x: Tensor, prefix: Tensor | None, state: MemoryState | None, mask: Tensor | None
    ) -> tuple[Tensor, MemoryState]:
        """The memory over [persistent | x] (Eq. 26, 29): the persistent tokens come once, when a sequence starts."""
        assert self.memory is not None
        if state is not None or prefix is None:
            y, state = self.memory(x, state, mask)
            return y, state
        count = len(prefix)
        x = torch.cat([prefix.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
        y, state = self.memory(x, None, None if mask is None else F.pad(mask, (count, 0), value=True))
        return y[:, count:], state

    def _memory_prefix(self) -> Tensor | None:
        """The persistent tokens that the memory reads first."""
        return self._prefix(self.attention_norm if self.memory_norm is None else self.memory_norm)

    def _restarted(self, state: BlockState | None, rows: Tensor | None) -> BlockState | None:
        """``state`` with the sequences where ``rows`` is True back at their start, learned parts in the graph.

        Every parameter takes part, whichever rows start: processes that train together need the same of each other.
        """
        if state is None or rows is None:
            return state
        memory, start = state.memory, state.start
        if self.memory is not None and memory is not None:
            fresh, prefix = self.memory.init_state(1), self._memory_prefix()
            if prefix is not None:
                _, fresh = self.memory(prefix.unsqueeze(0), None)
            fresh = fresh.map(lambda x: x.expand(len(rows), *x.shape[1:]))
            memory = fresh.where(rows, memory)
            if start:
                pairs = zip(fresh.weights, start, strict=True)
                start = tuple(torch.where(rows.view(-1, 1, 1, 1), new, old) for new, old in pairs)
        attention = None if state.attention is None else state.attention.reset(rows)
        conv = None if state.conv is None else state.conv.masked_fill(rows.view(-1, 1, 1), 0)
        mean = None if state.mean is None else state.mean.masked_fill(rows.view(-1, 1), 0)
        return BlockState(memory, attention, start, conv, mean)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.ffn_norm(x))


class LMMBlock(Block):
    """The memory as a sequence layer of its own.

        x = x + memory([persistent | norm(x)])
        x = x + ffn(norm(x))

    The memory comes ready made, so that the block takes any of its rules, depths and gates.
    """

    def __init__(
        self,
        dim: int,
        memory: NeuralMemory,
        ffn_multiplier: float = 2.0,
        *,
        persistent: int = 0,
        ffn: str = "swiglu",
        token_skip: bool = False,
    ) -> None:
        super().__init__(
            dim, memory, None, persistent=persistent, ffn=ffn, ffn_multiplier=ffn_multiplier, token_skip=token_skip
        )

    @packed
    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        mask: Tensor | None = None,
        restart: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """The stream and the state after it; see the module's first lines."""
        state = self._restarted(state, restart) or BlockState()
        assert self.memory_norm is not None
        seen = self._with_tokens(self.memory_norm(x), tokens)
        y, memory = self._remember(seen, self._prefix(self.memory_norm), state.memory, mask)
        return self._feed_forward(x + y), BlockState(memory)


class _Stretch(NamedTuple):
    """What MAC needs of the stream alone, so that it can be had for many segments at once."""

    x: Tensor
    attended: SegmentTokens
    queries: Tensor | None  # of the memory, its output gate, and what is compared with its cached segments
    gate: Tensor | None
    fit: Tensor | None
    tokens: Tensor | None  # of a block with a token_skip

    def split(self, sizes: list[int]) -> Iterator[_Stretch]:
        """Stretches of ``sizes`` tokens."""
        parts = (self.x, self.queries, self.gate, self.fit, self.tokens)
        cut = [[None] * len(sizes) if x is None else x.split(sizes, dim=-2) for x in parts]
        for x, queries, gate, fit, tokens, attended in zip(*cut, self.attended.split(sizes), strict=True):
            yield _Stretch(x, attended, queries, gate, fit, tokens)


class MACBlock(Block):
    """Memory as a context (Eq. 21 to 25, Algorithm 3), segment by segment.

        h = M*(norm(x))                                  M* is the memory at the segment's start
        y = x + attention([persistent | h | norm(x)])    token i sees h_j and x_j for j <= i
        M_t <- norm(y_t)                                 the attention's output is written
        x = y + y ⊗ M_t(norm(y))                         token t reads after its own write, not the segment's
        x = x + ffn(norm(x))

    Without memory: attention inside segments. Without attention: the LMM block.

    A memory with a cache reads what it has kept in both places, beside M* and beside M_t. Its ``cache_segment_size`` is
    a multiple of the segment, so that nothing new is kept inside one.
    """

    def __init__(
        self,
        dim: int,
        memory: NeuralMemory | None,
        attention: SegmentAttention | None,
        *,
        persistent: int = 0,
        gate: str = "memory",
        ffn: str = "swiglu",
        ffn_multiplier: float = 2.0,
        token_skip: bool = False,
    ) -> None:
        persistent = persistent if attention is not None else 0
        kept = None if memory is None or memory.caching is None else memory.caching.segment_size
        if kept is not None and attention is not None and kept % attention.segment_size:
            expected = f"a multiple of the attention's segment, {attention.segment_size}"
            raise ValueError(f"cache_segment_size is {kept}; expected {expected}")
        super().__init__(
            dim, memory, attention, persistent=persistent, gate=gate, ffn=ffn, ffn_multiplier=ffn_multiplier,
            token_skip=token_skip,
        )  # fmt: skip

    @packed
    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        mask: Tensor | None = None,
        restart: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """The stream and the state after it; see the module's first lines."""
        state = self._restarted(state, restart)
        if self.attention is None:
            assert self.memory_norm is not None
            seen = self._with_tokens(self.memory_norm(x), tokens)
            y, memory = self._remember(seen, None, state.memory if state else None, mask)
            return self._feed_forward(x + y), BlockState(memory)

        assert isinstance(self.attention, SegmentAttention)
        state = state or self._start(len(x))
        assert isinstance(state.attention, SegmentState)
        if 0 in x.shape[:2]:
            return self._feed_forward(x), state
        opened = state.attention
        used = opened.length
        if mask is None and not isinstance(used, Tensor):  # all sequences stand at the same place
            sizes = [stop - start for start, stop in _cuts(used, x.shape[1], self.attention.segment_size)]
            stretch, state = self._prepare(x, tokens, state, None)
            ys, ms = [], []
            for part in stretch.split(sizes):
                y, m, state = self._segment(part, state, None)
                ys.append(y)
                ms.append(m)
            return self._feed_forward(self._combine(ys, ms, tokens)), state

        # each row has its own cuts: pieces are gathered, their dead ends pointing at one more token
        time = x.shape[1]
        counts = [time] * len(x) if mask is None else mask.sum(1).tolist()
        places = zip(opened.lengths.tolist(), counts, strict=True)
        cuts = [list(_cuts(*row, self.attention.segment_size)) for row in places]
        padded = out = F.pad(x, (0, 0, 0, 1))
        padded_tokens = None if tokens is None or self.token_skip is None else F.pad(tokens, (0, 0, 0, 1))
        for number in range(max(map(len, cuts), default=0)):
            piece = [row[number] if number < len(row) else (time, time) for row in cuts]
            first, last = torch.tensor(piece, device=x.device).unsqueeze(-1).unbind(1)
            index = first + torch.arange(int((last - first).max()), device=x.device)
            live = index < last
            index = torch.where(live, index, time).unsqueeze(-1).expand(-1, -1, x.shape[2])
            own = None if padded_tokens is None else padded_tokens.gather(1, index)
            stretch, state = self._prepare(padded.gather(1, index), own, state, live)
            y, m, state = self._segment(stretch, state, live)
            out = out.scatter(1, index, self._combine([y], [m], own))
        return self._feed_forward(out[:, :time]), state

    def _memory_prefix(self) -> None:
        """None: the persistent tokens stand before the segments."""

    def _start(self, batch_size: int) -> BlockState:
        assert isinstance(self.attention, SegmentAttention)
        attention = self.attention.init_state(batch_size, history=self.memory is not None)
        if self.memory is None:
            return BlockState(None, attention)
        memory = self.memory.init_state(batch_size)
        mean = None if memory.cached is None else memory.cached.mean
        return BlockState(memory, attention, tuple(w.clone() for w in memory.weights), mean=mean)

    def _prepare(
        self, x: Tensor, tokens: Tensor | None, state: BlockState, mask: Tensor | None
    ) -> tuple[_Stretch, BlockState]:
        """What :meth:`_segment` needs of x, of any length without a mask, and the state with ``conv`` gone on."""
        assert isinstance(self.attention, SegmentAttention) and self.attention_norm is not None
        assert isinstance(state.attention, SegmentState)
        normed, queries, gate, fit = self.attention_norm(x), None, None, None
        attended = self.attention.prepare(normed, state.attention, self._prefix(self.attention_norm))
        tokens = None if self.token_skip is None else tokens
        if self.memory is not None:
            seen = self._with_tokens(normed, tokens)
            queries, conv = self.memory.queries(seen, state.conv, mask)
            gate, fit = self.memory.output_gate(seen), self.memory.fit_queries(seen)
            state = replace(state, conv=conv)
        return _Stretch(x, attended, queries, gate, fit, tokens), state

    def _segment(
        self, stretch: _Stretch, state: BlockState, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, BlockState]:
        """Tokens that lie inside one segment of each row: y, what the memory network says to it, and the new state."""
        assert isinstance(self.attention, SegmentAttention) and isinstance(state.attention, SegmentState)
        h = m = None
        if self.memory is not None:
            assert stretch.queries is not None and stretch.gate is not None
            assert state.memory is not None
            said = self.memory.recall(stretch.queries, state.start)
            said = self.memory.recall_cached(said, stretch.queries, stretch.fit, state.memory.cached, state.mean)
            h = self.memory.output(said, stretch.gate)  # Eq. 21
        y, attention = self.attention.attend(stretch.attended, h, state.attention, mask)  # Eq. 22, 23
        y = stretch.x + y
        memory, start, mean = state.memory, state.start, state.mean
        if self.memory is not None:
            assert self.memory_norm is not None and memory is not None
            seen = self._with_tokens(self.memory_norm(y), stretch.tokens)
            m, memory = self.memory.write(seen, memory, mask)  # Eq. 24
        size, length = self.attention.segment_size, attention.length
        if not isinstance(length, Tensor):
            if length == size:
                attention = attention.reset()
                start = () if memory is None else memory.weights
                mean = None if memory is None or memory.cached is None else memory.cached.mean
        elif bool((ended := length == size).any()):
            attention = attention.reset(ended)
            if memory is not None:
                rows = ended.view(-1, 1, 1, 1)
                start = tuple(torch.where(rows, w, s) for w, s in zip(memory.weights, start, strict=True))
                if memory.cached is not None and mean is not None:
                    mean = torch.where(ended.unsqueeze(-1), memory.cached.mean, mean)
        return y, m, BlockState(memory, attention, start, state.conv, mean)

    def _combine(self, ys: list[Tensor], ms: list[Tensor | None], tokens: Tensor | None) -> Tensor:
        """What :meth:`_segment` gave for one stretch after another, gated (Eq. 25)."""
        y = torch.cat(ys, dim=1)
        if self.memory is None:
            return y
        assert self.gate is not None and self.memory_norm is not None
        m = torch.cat([m for m in ms if m is not None], dim=2)
        seen = self._with_tokens(self.memory_norm(y), tokens)
        return y + self.gate(y, self.memory.output(m, self.memory.output_gate(seen)))


class MAGBlock(Block):
    """Memory as a gate (Eq. 26 to 28): a sliding window and the memory side by side.

        y = attention([persistent | norm(x)])            in a window; every token sees the persistent ones
        m = memory([persistent | norm(x)])
        x = x + y ⊗ m
        x = x + ffn(norm(x))

    Without either: x = x + the other.
    """

    def __init__(
        self,
        dim: int,
        memory: NeuralMemory | None,
        attention: WindowAttention | None,
        *,
        persistent: int = 0,
        gate: str = "sigmoid",
        ffn: str = "swiglu",
        ffn_multiplier: float = 2.0,
        token_skip: bool = False,
    ) -> None:
        super().__init__(
            dim, memory, attention, persistent=persistent, gate=gate, ffn=ffn, ffn_multiplier=ffn_multiplier,
            token_skip=token_skip,
        )  # fmt: skip
        if memory is not None and attention is not None:
            self.memory_norm = None  # both see the same

    @packed
    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        mask: Tensor | None = None,
        restart: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """The stream and the state after it; see the module's first lines."""
        state = self._restarted(state, restart) or BlockState()
        norm = self.attention_norm if self.attention_norm is not None else self.memory_norm
        assert norm is not None
        normed, prefix = norm(x), self._prefix(norm)
        parts = []
        if self.attention is not None:
            y, attention = self.attention(normed, state.attention, prefix, mask)  # Eq. 27
            parts, state = [y], replace(state, attention=attention)
        if self.memory is not None:
            m, memory = self._remember(self._with_tokens(normed, tokens), prefix, state.memory, mask)
            parts, state = [*parts, m], replace(state, memory=memory)
        return self._feed_forward(x + (parts[0] if self.gate is None else self.gate(*parts))), state  # Eq. 28


class MALBlock(Block):
    """Memory as a layer (Eq. 29 to 31): first the memory, then a sliding window over what it says.

        x = x + memory([persistent | norm(x)])
        x = x + attention([persistent | norm(x)])
        x = x + ffn(norm(x))

    Without either: only the other's line.
    """

    def __init__(
        self,
        dim: int,
        memory: NeuralMemory | None,
        attention: WindowAttention | None,
        *,
        persistent: int = 0,
        ffn: str = "swiglu",
        ffn_multiplier: float = 2.0,
        token_skip: bool = False,
    ) -> None:
        super().__init__(
            dim, memory, attention, persistent=persistent, ffn=ffn, ffn_multiplier=ffn_multiplier, token_skip=token_skip
        )

    @packed
    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        mask: Tensor | None = None,
        restart: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """The stream and the state after it; see the module's first lines."""
        state = self._restarted(state, restart) or BlockState()
        if self.memory_norm is not None:
            seen = self._with_tokens(self.memory_norm(x), tokens)
            m, memory = self._remember(seen, self._prefix(self.memory_norm), state.memory, mask)
            x, state = x + m, replace(state, memory=memory)  # Eq. 30
        if self.attention is not None and self.attention_norm is not None:
            prefix = self._prefix(self.attention_norm)
            y, attention = self.attention(self.attention_norm(x), state.attention, prefix, mask)  # Eq. 31
            x, state = x + y, replace(state, attention=attention)
        return self._feed_forward(x), state


def _cuts(used: int, time: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts ``time`` tokens, which come after ``used`` of an open segment, at the ends of segments of ``size``."""
    start = 0
    while start < time:
        stop = min(time, start + size - used)
        yield start, stop
        start, used = stop, 0
