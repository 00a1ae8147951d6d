"""Causal attention that streams: a sliding window with a prefix (MAG, MAL), and one segment with its memory (MAC)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.layers.linear import floating_dtype
from titans.layers.norm import RMSNorm
from titans.ops.attention import rotate_by, rotation, segment_attention, turning, window_attention
from titans.ops.state import aligned

PIECE = 2048  # tokens of a long sequence that are worked on at a time, so that they stay in the cache
PIECE_WINDOWS = 4  # windows in a piece, at least

Self = TypeVar("Self", bound="_State")


@dataclass(frozen=True)
class _State:
    """What both kinds of attention state can do; ``length`` is a number where all sequences agree, and every other
    field is a tensor whose first dimension is the batch."""

    right_aligned: ClassVar[bool]  # whether a sequence's tokens stand in its last slots or in its first
    length: int | Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def concatenate(cls: type[Self], states: Sequence[Self]) -> Self:
        """The sequences of several states, in order."""
        slots = max(s.k.shape[2] for s in states)

        def join(name: str) -> Any:
            if name == "length":
                return aligned(torch.cat([s.lengths for s in states]))
            tensors = [getattr(s, name) for s in states]
            if tensors[0] is None:
                return None
            missing = [slots - x.shape[2] for x in tensors]
            pads = [(0, 0, n, 0) if cls.right_aligned else (0, 0, 0, n) for n in missing]
            return torch.cat([F.pad(x, pad) for x, pad in zip(tensors, pads, strict=True)])

        return cls(**{f.name: join(f.name) for f in fields(cls)})

    @property
    def batch_size(self) -> int:
        """How many sequences the state holds."""
        return self.k.shape[0]

    @property
    def lengths(self) -> Tensor:
        """(batch,) int64, ``length`` of every sequence."""
        if isinstance(self.length, Tensor):
            return self.length
        return torch.full((self.batch_size,), self.length, device=self.k.device)

    def map(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """A state with ``function`` applied to every tensor, ``length`` included where it is one."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(x) for name, x in values.items() if isinstance(x, Tensor)})

    def detach(self: Self) -> Self:
        """The same values, cut off from the graph."""
        return self.map(Tensor.detach)

    def to(self: Self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The state on another device or in another floating dtype."""
        return self.map(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None))

    def reorder(self: Self, indices: Tensor) -> Self:
        """Picks sequences by index, with repetition: what beam search needs."""
        if indices.ndim != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices has shape {tuple(indices.shape)} and dtype {indices.dtype}; "
                "expected a vector of int64 sequence numbers"
            )
        return self.map(lambda x: x.index_select(0, indices.to(x.device)))


@dataclass(frozen=True)
class WindowState(_State):
    """The keys and values that the next tokens may still see.

    Attributes:
        length: tokens seen by every sequence; (batch,) int64 where they differ.
        k, v: (batch, heads, slots, head_dim), right-aligned: each row's last ``min(length, slots)`` slots are its last
            tokens, the others are zero. There are as many slots as tokens so far (padding counted), up to window - 1.
    """

    right_aligned: ClassVar[bool] = True

    @classmethod
    def create(
        cls,
        batch_size: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> WindowState:
        """The state before the first token."""
        empty = torch.zeros(batch_size, heads, 0, head_dim, dtype=dtype, device=device)
        return cls(0, empty, empty)

    def reset(self, rows: Tensor) -> WindowState:
        """Forgets the sequences where ``rows`` (batch,) bool is True."""
        kept = replace(self, length=self.lengths).map(lambda x: x.masked_fill(rows.view(-1, *(1,) * (x.ndim - 1)), 0))
        return replace(kept, length=aligned(kept.lengths))


@dataclass(frozen=True)
class SegmentState(_State):
    """The open segment of each sequence.

    Attributes:
        length: places of the open segment that are used, by every sequence; (batch,) int64 where they differ.
        k, v: (batch, heads, slots, head_dim), by place; only the first ``length`` places of a row mean anything.
        h_k, h_v: the same of what the memory said at each place; None: attention without memory.
    """

    right_aligned: ClassVar[bool] = False
    h_k: Tensor | None
    h_v: Tensor | None

    @classmethod
    def create(
        cls,
        batch_size: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        history: bool = True,
    ) -> SegmentState:
        """An empty segment; ``history`` False: for attention without memory."""
        empty = torch.zeros(batch_size, heads, 0, head_dim, dtype=dtype, device=device)
        h = empty if history else None
        return cls(0, empty, empty, h, h)

    def reset(self, rows: Tensor | None = None) -> SegmentState:
        """Empties the segment of the rows where ``rows`` (batch,) bool is True, None: of all of them; their next token
        opens a new one."""
        if rows is None:
            return replace(self.map(lambda x: x[:, :, :0] if x.ndim == 4 else x), length=0)
        if rows.shape != (self.batch_size,) or rows.dtype != torch.bool:
            raise ValueError(
                f"rows has shape {tuple(rows.shape)} and dtype {rows.dtype}; "
                f"expected (batch,) = ({self.batch_size},) and bool"
            )
        length = self.lengths.masked_fill(rows.to(self.k.device), 0)
        used = max(length.tolist(), default=0)
        kept = replace(self, length=0).map(lambda x: x[:, :, :used])
        return replace(kept, length=aligned(length))


class _Attention(nn.Module):
    """Projections into heads and back out, shared by both kinds of attention."""

    def __init__(self, dim: int, heads: int, head_dim: int | None, qk_norm: bool) -> None:
        super().__init__()
        for name, number in (("dim", dim), ("heads", heads)):
            if number < 1:
                raise ValueError(f"{name} is {number}; expected a whole number of at least 1")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim is {dim} and heads is {heads}; expected heads to divide dim, or give head_dim")
            head_dim = dim // heads
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; expected an even number, for the rotary position embedding")
        self.dim, self.heads, self.head_dim = dim, heads, head_dim
        inner = heads * head_dim
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=1e-6) if qk_norm else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Projections that keep the size of what they project."""
        for linear in (self.to_q, self.to_kv, self.to_out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)

    def _placement(self) -> tuple[torch.dtype, torch.device | None]:
        """dtype and device of a new state."""
        device = next((p.device for p in self.parameters()), None)
        return floating_dtype(self, torch.get_default_dtype()), device

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)

    def _queries(self, x: Tensor) -> Tensor:
        q = self._split(self.to_q(x))
        return q if self.q_norm is None else self.q_norm(q.to(self.q_norm.weight.dtype)).to(q.dtype)

    def _keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (..., heads, time, head_dim) of x (..., time, dim)."""
        k, v = (self._split(part) for part in self.to_kv(x).chunk(2, dim=-1))
        return k if self.k_norm is None else self.k_norm(k.to(self.k_norm.weight.dtype)).to(k.dtype), v

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (batch, heads, time, head_dim) of x (batch, time, dim), before their positions."""
        return self._queries(x), *self._keys_values(x)

    def _prefix(self, prefix: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if prefix is None:
            return None, None
        if prefix.ndim != 2 or prefix.shape[1] != self.dim:
            raise ValueError(f"prefix has shape {tuple(prefix.shape)}; expected (tokens, {self.dim})")
        k, v = self._keys_values(prefix.unsqueeze(0))
        return k.masked_fill(turning(self.head_dim, k.device).repeat(2), 0), v  # seen alike from every position

    def _merge(self, y: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.to_out(y.transpose(1, 2).flatten(2))
        return out if mask is None else _hide(out, mask)

    def _check(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask, or None if it hides nothing."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, time, {self.dim})")
        if mask is None:
            return None
        if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; "
                f"expected (batch, time) = {tuple(x.shape[:2])} and bool"
            )
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError("mask has a token after padding; expected each row's padding after all of its tokens")
        return None if bool(mask.all()) else mask

    def _check_state(self, length: int | Tensor, buffers: dict[str, Tensor], batch: int, limit: int | None) -> None:
        slots = next(iter(buffers.values())).shape[-2]
        for name, x in buffers.items():
            if tuple(x.shape) != (batch, self.heads, slots, self.head_dim):
                expected = f"({batch}, {self.heads}, slots, {self.head_dim})"
                raise ValueError(f"state has {name} of shape {tuple(x.shape)}; expected {expected}")
        if isinstance(length, Tensor) and tuple(length.shape) != (batch,):
            raise ValueError(f"state has length of shape {tuple(length.shape)}; expected ({batch},)")
        if limit is not None and slots > limit:
            raise ValueError(f"state holds {slots} tokens of each sequence; expected at most {limit}")


class WindowAttention(_Attention):
    """Attention in a sliding window, with rotary positions and learnable tokens that are always visible.

    Args:
        dim: width of the input and of the output.
        heads: attention heads.
        window: tokens that a token sees, itself included; None: all before it (the state then grows without end).
        head_dim: width of a head, even; default ``dim / heads``.
        qk_norm: RMSNorm on each head's queries and keys.
    """

    def __init__(
        self, dim: int, heads: int, window: int | None, head_dim: int | None = None, *, qk_norm: bool = True
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; expected a whole number of at least 1, or None for no limit")
        super().__init__(dim, heads, head_dim, qk_norm)
        self.window = window

    def init_state(self, batch_size: int) -> WindowState:
        """The state before the first token."""
        return WindowState.create(batch_size, self.heads, self.head_dim, *self._placement())

    def forward(
        self, x: Tensor, state: WindowState | None = None, prefix: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, WindowState]:
        """Attends over a stretch of a sequence; call again with the returned state to go on.

        Args:
            x: (batch, time, dim).
            state: what went before; None: nothing. It is not changed.
            prefix: (tokens, dim), seen by every token, at no position.
            mask: (batch, time) bool; False for padding, which must stand after a row's tokens.

        Returns:
            y (batch, time, dim), 0 at padding, and the new state.
        """
        mask = self._check(x, mask)
        if state is None:
            state = WindowState.create(x.shape[0], self.heads, self.head_dim, x.dtype, x.device)
        else:
            limit = None if self.window is None else self.window - 1
            self._check_state(state.length, {"k": state.k, "v": state.v}, x.shape[0], limit)
        if x.shape[0] == 0 or x.shape[1] == 0:
            return torch.zeros_like(x), state
        if self.window is not None and x.shape[1] > max(PIECE, PIECE_WINDOWS * self.window):
            return self._in_pieces(x, state, prefix, mask, max(PIECE, PIECE_WINDOWS * self.window))
        if mask is not None:
            x = _hide(x, mask)

        q, k, v = self.project(x)
        turn = rotation(_positions(state, x.shape[1]), self.head_dim, q.dtype)
        q, k = rotate_by(q, *turn), rotate_by(k, *turn)
        slots, past_length = state.k.shape[2], None
        past_k, past_v = state.k.to(k.dtype), state.v.to(v.dtype)
        if isinstance(state.length, Tensor):
            past_length = state.length.clamp(max=slots)
        elif state.length < slots:
            past_k, past_v = (past[:, :, slots - state.length :] for past in (past_k, past_v))
            slots = state.length
        prefix_k, prefix_v = self._prefix(prefix)
        y = window_attention(q, k, v, self.window, prefix_k, prefix_v, past_k, past_v, past_length)
        keep = slots + x.shape[1] if self.window is None else min(slots + x.shape[1], self.window - 1)
        if mask is None:
            length: int | Tensor = state.length + x.shape[1]
            kept = [_last(past, new, keep) for past, new in ((past_k, k), (past_v, v))]
        else:
            count = mask.sum(1)
            lengths = state.lengths + count
            kept = [_last_of_each(past, new, keep, count, lengths) for past, new in ((past_k, k), (past_v, v))]
            length = aligned(lengths)
        return self._merge(y, mask), WindowState(length, *kept)

    def _in_pieces(
        self, x: Tensor, state: WindowState, prefix: Tensor | None, mask: Tensor | None, size: int
    ) -> tuple[Tensor, WindowState]:
        """A long sequence as several calls, which give the same."""
        pieces = x.split(size, dim=1)
        masks = [None] * len(pieces) if mask is None else mask.split(size, dim=1)
        outputs = []
        for piece, live in zip(pieces, masks, strict=True):
            y, state = self.forward(piece, state, prefix, live)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state


class SegmentTokens(NamedTuple):
    """What attention in segments needs of the tokens alone, so that it can be had for many segments at once.

    Attributes:
        q, k, v: (batch, heads, time, head_dim), turned by their places in their segments.
        cosine, sine: of those turns, see :func:`titans.ops.attention.rotation`.
        prefix_k, prefix_v: keys and values of the prefix, None without one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cosine: Tensor
    sine: Tensor
    prefix_k: Tensor | None
    prefix_v: Tensor | None

    def split(self, sizes: list[int]) -> list[SegmentTokens]:
        """Stretches of ``sizes`` tokens."""
        cut = (x.split(sizes, dim=-2) for x in (self.q, self.k, self.v, self.cosine, self.sine))
        return [self._replace(q=q, k=k, v=v, cosine=c, sine=s) for q, k, v, c, s in zip(*cut, strict=True)]


class SegmentAttention(_Attention):
    """Attention inside a segment of MAC, over [prefix | what the memory said | the segment].

    Positions are places in the segment; what the memory said about a token stands at the token's place.

    Args:
        dim: width of the input and of the output.
        heads: attention heads.
        segment_size: tokens of a segment.
        head_dim: width of a head, even; default ``dim / heads``.
        qk_norm: RMSNorm on each head's queries and keys.
    """

    def __init__(
        self, dim: int, heads: int, segment_size: int, head_dim: int | None = None, *, qk_norm: bool = True
    ) -> None:
        if segment_size < 1:
            raise ValueError(f"segment_size is {segment_size}; expected a whole number of at least 1")
        super().__init__(dim, heads, head_dim, qk_norm)
        self.segment_size = segment_size

    def init_state(self, batch_size: int, history: bool = True) -> SegmentState:
        """An empty segment; ``history`` False: for attention without memory."""
        return SegmentState.create(batch_size, self.heads, self.head_dim, *self._placement(), history)

    def forward(
        self,
        x: Tensor,
        h: Tensor | None,
        state: SegmentState | None = None,
        prefix: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, SegmentState]:
        """Attends over tokens that lie in one segment; the caller cuts at its end and resets the rows that ended.

        Args:
            x: (batch, time, dim).
            h: (batch, time, dim), what the memory said to each token; None: attention without memory.
            state: the open segment; None: a new one. It is not changed.
            prefix: (tokens, dim), seen by every token, at no position.
            mask: (batch, time) bool; False for padding, which must stand after a row's tokens.

        Returns:
            y (batch, time, dim), 0 at padding, and the new state.
        """
        mask = self._check(x, mask)
        if h is not None and h.shape != x.shape:
            raise ValueError(f"h has shape {tuple(h.shape)}; expected that of x, {tuple(x.shape)}")
        if state is None:
            state = SegmentState.create(x.shape[0], self.heads, self.head_dim, x.dtype, x.device, h is not None)
        if x.shape[0] == 0 or x.shape[1] == 0:
            return torch.zeros_like(x), state
        x = x if mask is None else _hide(x, mask)
        return self.attend(self.prepare(x, state, prefix), h, state, mask)

    def prepare(self, x: Tensor, state: SegmentState, prefix: Tensor | None) -> SegmentTokens:
        """What :meth:`attend` needs of x (batch, time, dim) and the prefix; x may go on behind the segment's end."""
        named = {"k": state.k, "v": state.v, "h_k": state.h_k, "h_v": state.h_v}
        buffers = {name: buffer for name, buffer in named.items() if buffer is not None}
        self._check_state(state.length, buffers, x.shape[0], self.segment_size)
        q, k, v = self.project(x)
        cosine, sine = rotation(_positions(state, x.shape[1]) % self.segment_size, self.head_dim, q.dtype)
        q, k = rotate_by(q, cosine, sine), rotate_by(k, cosine, sine)
        return SegmentTokens(q, k, v, cosine, sine, *self._prefix(prefix))

    def attend(
        self, tokens: SegmentTokens, h: Tensor | None, state: SegmentState, mask: Tensor | None = None
    ) -> tuple[Tensor, SegmentState]:
        """The rest of :meth:`forward`, for tokens that lie in one segment."""
        if (h is None) != (state.h_k is None):
            found, expected = ("h", "one without, as h is None") if h is None else ("no h", "one with h")
            raise ValueError(f"state was made with {found}; expected {expected}")
        q, k, v, *turn, prefix_k, prefix_v = tokens
        length: int | Tensor = state.length + q.shape[2]
        if mask is not None:
            length = aligned(state.lengths + mask.sum(1))
            h = None if h is None else _hide(h, mask)
        longest = int(length.max()) if isinstance(length, Tensor) else length
        if longest > self.segment_size:
            raise ValueError(
                f"the segment would hold {longest} tokens; expected at most segment_size = {self.segment_size}: "
                "cut the call at the segment's end and reset the state"
            )
        start = state.length
        slots = state.k.shape[2] if isinstance(start, Tensor) else start

        def write(old: Tensor, new: Tensor) -> Tensor:
            """The buffer with the new tokens at their places."""
            if slots:
                new = torch.cat([old[:, :, :slots].to(new.dtype), new], dim=2)
            elif longest < self.segment_size:
                new = new.clone()  # the segment stays open: a view would keep all segments of the call alive
            if isinstance(start, Tensor):
                place = torch.arange(new.shape[2], device=new.device)
                behind = start.unsqueeze(1)
                source = torch.where(place < behind, place, place - behind + slots).clamp(max=new.shape[2] - 1)
                new = new.gather(2, source[:, None, :, None].expand_as(new))
            return new[:, :, :longest]

        k, v = write(state.k, k), write(state.v, v)
        h_k = h_v = None
        if h is not None and state.h_k is not None and state.h_v is not None:
            h_k, h_v = self._keys_values(h)
            h_k, h_v = write(state.h_k, rotate_by(h_k, *turn)), write(state.h_v, h_v)
        y = segment_attention(q, k, v, h_k, h_v, prefix_k, prefix_v, start)
        return self._merge(y, mask), SegmentState(length, k, v, h_k, h_v)


def _positions(state: _State, time: int) -> Tensor:
    """Where the new tokens stand: (time,), or (batch, time) where the rows differ."""
    if isinstance(state.length, Tensor):
        return state.length.unsqueeze(1) + torch.arange(time, device=state.length.device)
    return torch.arange(state.length, state.length + time, device=state.k.device)


def _hide(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask.unsqueeze(-1), 0)


def _last(past: Tensor, new: Tensor, keep: int) -> Tensor:
    """The last ``keep`` slots of [past | new], as a copy: a view would keep all of them alive."""
    missing = keep - new.shape[2]
    if missing > 0:
        return torch.cat([past[:, :, past.shape[2] - missing :], new], dim=2)
    return new[:, :, new.shape[2] - keep :].clone(memory_format=torch.contiguous_format)


def _last_of_each(past: Tensor, new: Tensor, keep: int, count: Tensor, length: Tensor) -> Tensor:
    """The same if only the first ``count`` of each row's new tokens are real; slots beyond ``length`` hold 0."""
    slot = torch.arange(keep, device=count.device) - keep  # counted from the row's end
    source = slot + past.shape[2] + count.unsqueeze(1)
    joined = torch.cat([past, new], dim=2)
    index = source.clamp(min=0)[:, None, :, None].expand(-1, joined.shape[1], -1, joined.shape[3])
    real = (slot >= -length.unsqueeze(1))[:, None, :, None]
    return torch.where(real, joined.gather(2, index), 0)
