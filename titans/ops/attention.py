"""Causal softmax attention: its definition with a dense mask, and ways to run it whose cost is linear in length."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops.once import once_differentiable

ROPE_BASE = 10_000.0
MIN_BLOCK = 32  # queries that share one set of keys, at least
GROUP = 1024  # queries of a call to the kernel: its buffers stay small enough to be used again
SEGMENT_BLOCK = 256  # queries of a segment that share one set of keys


def attention_dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the visible keys (Eq. 1, 2): the definition.

    Args:
        q: (batch, heads, queries, width).
        k, v: (batch, heads, keys, width).
        visible: bool, broadcastable to (batch, heads, queries, keys); a query that sees no key reads 0.

    Returns:
        (batch, heads, queries, width).
    """
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~visible, 0) @ v  # Eq. 2


def window_visible(
    time: int,
    window: int | None,
    prefix: int = 0,
    past: int = 0,
    past_length: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Who sees whom in a sliding window: the keys are [prefix | past | the tokens themselves].

    A token sees the whole prefix, itself, and the ``window - 1`` tokens before it (None: all of them).

    Returns:
        bool (time, prefix + past + time); with ``past_length`` (batch,), the number of real slots at the end of each
        row's past, (batch, 1, time, prefix + past + time).
    """
    if past_length is not None:
        device = past_length.device
    key = torch.arange(-past, time, device=device)
    query = torch.arange(time, device=device).unsqueeze(1)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    if past_length is not None:
        visible = visible & (key >= -past_length.view(-1, 1, 1, 1))
    return F.pad(visible, (prefix, 0), value=True)


def segment_visible(
    time: int,
    segment: int,
    prefix: int = 0,
    start: int | Tensor = 0,
    device: torch.device | str | None = None,
    history: bool = True,
) -> Tensor:
    """Who sees whom in a segment of MAC: the keys are [prefix | h, what the memory said | the segment's tokens].

    The token at place i sees the whole prefix, and of both h and the tokens those at places up to i: h_j was made from
    token j, so more would leak the future.

    Args:
        start: the place of the first query; (batch,) where the rows differ.
        history: False: there is no h.

    Returns:
        bool (time, prefix + 2 segment), or (batch, 1, time, prefix + 2 segment) where ``start`` is a tensor; without h:
        + segment.
    """
    place = torch.arange(time, device=start.device if isinstance(start, Tensor) else device).unsqueeze(1)
    place = place + (start.view(-1, 1, 1, 1) if isinstance(start, Tensor) else start)
    visible = torch.arange(segment, device=place.device) <= place
    visible = torch.cat([visible, visible], dim=-1) if history else visible
    return F.pad(visible, (prefix, 0), value=True)


def turning(width: int, device: torch.device | str | None = None) -> Tensor:
    """(width / 2,) bool, which pairs of channels carry the position: the first half. The others stay as they are, so
    that a key which has no position can be written in them alone and is seen alike from everywhere."""
    pairs = torch.arange(width // 2, device=device)
    return pairs < (len(pairs) + 1) // 2


def frequencies(width: int, device: torch.device | str | None = None) -> Tensor:
    """(width / 2,) float64, the angle that a pair of channels turns by per position; 0 where it stays as it is."""
    turns = turning(width, device)
    step = torch.arange(len(turns), dtype=torch.float64, device=device) / turns.sum()
    return torch.where(turns, ROPE_BASE**-step, 0)


def rotation(position: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles of each position, both (..., width / 2); see :func:`turning`.

    Angles are taken in float64: positions run to millions, where float32 no longer resolves a turn.
    """
    angle = position.unsqueeze(-1) * frequencies(width, position.device)
    dtype = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_by(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns the pairs (x_i, x_{i + width / 2}) of x (batch, heads, time, width) by angles from :func:`rotation`."""
    if cosine.ndim == 3:
        cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary position embedding of x (batch, heads, time, width) at ``position``, (time,) or (batch, time) int64."""
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, heads, time, an even width)")
    if position.shape not in (x.shape[2:3], (x.shape[0], x.shape[2])):
        raise ValueError(
            f"position has shape {tuple(position.shape)}; "
            f"expected (time,) = {(x.shape[2],)} or (batch, time) = {(x.shape[0], x.shape[2])}"
        )
    return rotate_by(x, *rotation(position, x.shape[-1], x.dtype))


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    past_length: Tensor | None = None,
) -> Tensor:
    """Attention in a sliding window with an always visible prefix, as :func:`window_visible` draws it.

    Blocks of queries attend to [prefix | the blocks before that the window reaches | their own block], all blocks at
    once as a larger batch: the cost is linear in time, and the only mask is that of one block.

    Args:
        q, k, v: (batch, heads, time, width).
        window: tokens that a token sees, itself included; None: all before it, at quadratic cost.
        prefix_k, prefix_v: (1 or batch, heads, n, width), seen by every token.
        past_k, past_v: (batch, heads, slots, width), the tokens just before, with at most ``window - 1`` slots.
        past_length: (batch,) int64, how many of each row's last slots are real; None: all.

    Returns:
        (batch, heads, time, width).
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected a whole number of at least 1, or None for no limit")
    _check_keys(q, k, v)
    if k.shape != q.shape:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected that of q, {tuple(q.shape)}")
    _check_extra("prefix", prefix_k, prefix_v, q, (1, q.shape[0]))
    _check_extra("past", past_k, past_v, q, (q.shape[0],))
    if past_k is not None and window is not None and past_k.shape[2] > window - 1:
        raise ValueError(f"past_k has {past_k.shape[2]} slots; expected at most window - 1 = {window - 1}")
    _check_count("past_length", past_length, q)

    time = q.shape[2]
    if window is None:
        return _window_once(q, k, v, window, prefix_k, prefix_v, past_k, past_v, past_length)
    block = max(-(-window // 2), MIN_BLOCK)
    reach = -(-(window - 1) // block)  # blocks before its own that a block sees
    head = max(1, reach) * block  # the first tokens, which may see the past
    if time <= head + block:
        return _window_steps(q, k, v, window, block, prefix_k, prefix_v, past_k, past_v, past_length)

    group = max(1, GROUP // block) * block
    tail = (time - head) % block
    middle = time - head - tail
    sizes = [head, *[group] * (middle // group), *([middle % group] if middle % group else []), tail]
    prefix = 0 if prefix_k is None else prefix_k.shape[2]
    visible = window_visible(block, window, prefix, reach * block, device=q.device)
    q_first, *q_groups, q_last = q.split(sizes, dim=2)
    k_first, *k_groups, k_last = _Cut.apply(k, prefix_k, window, block, reach, sizes)
    v_first, *v_groups, v_last = _Cut.apply(v, prefix_v, window, block, reach, sizes)
    parts = [_window_steps(q_first, k_first, v_first, window, block, prefix_k, prefix_v, past_k, past_v, past_length)]
    for queries, keys, values in zip(q_groups, k_groups, v_groups, strict=True):
        y = F.scaled_dot_product_attention(_blocks(queries, block).flatten(0, 1), keys, values, attn_mask=visible)
        parts.append(y.unflatten(0, (len(q), -1)).movedim(1, 2).flatten(2, 3))
    if tail:
        (past_k, k_last), (past_v, v_last) = (x.split([window - 1, tail], dim=2) for x in (k_last, v_last))
        parts.append(_window_once(q_last, k_last, v_last, window, prefix_k, prefix_v, past_k, past_v, None))
    return torch.cat(parts, dim=2)


def _window_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    block: int,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    past_length: Tensor | None,
) -> Tensor:
    """A few blocks one after the other: the tokens of those before are the past of the next."""
    time = q.shape[2]
    if time <= block:
        return _window_once(q, k, v, window, prefix_k, prefix_v, past_k, past_v, past_length)
    slots = 0 if past_k is None else past_k.shape[2]
    all_k, all_v = _join(None, past_k, k), _join(None, past_v, v)
    parts = []
    for begin in range(0, time, block):
        own, seen = slice(begin, begin + block), slice(max(0, slots + begin - window + 1), slots + begin)
        length = None if past_length is None else (past_length + begin).clamp(max=seen.stop - seen.start)
        parts.append(
            _window_once(
                q[:, :, own], k[:, :, own], v[:, :, own], window, prefix_k, prefix_v,
                all_k[:, :, seen], all_v[:, :, seen], length,
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2)


def _window_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    past_length: Tensor | None,
) -> Tensor:
    """All queries against all keys at once, with the mask of the pattern."""
    time = q.shape[2]
    prefix = 0 if prefix_k is None else prefix_k.shape[2]
    past = 0 if past_k is None else past_k.shape[2]
    if not prefix and not past and (window is None or time <= window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    visible = None  # a single token sees all that is kept
    if time > 1 or past_length is not None:
        visible = window_visible(time, window, prefix, past, past_length if past else None, q.device)
    return F.scaled_dot_product_attention(q, _join(prefix_k, past_k, k), _join(prefix_v, past_v, v), attn_mask=visible)


def _blocks(x: Tensor, block: int) -> Tensor:
    """(batch, heads, time, width) -> (batch, blocks, heads, block, width), a view."""
    return x.unflatten(2, (-1, block)).movedim(2, 1)


class _Cut(torch.autograd.Function):
    """Cuts keys or values into what each call to the kernel sees; ``sizes`` are the queries of the calls.

    The first cut is the first tokens alone. The last is the tokens that fill no block, behind the window - 1 tokens
    before them. Those between are (batch x blocks, heads, n + (reach + 1) block, width): for each block [prefix | the
    blocks before it | itself]. The cuts overlap, and left to autograd every one would have a gradient of full length.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, prefix: Tensor | None, window: int, block: int, reach: int, sizes: list[int]
    ) -> tuple[Tensor, ...]:
        ctx.shape, ctx.prefix = x.shape, None if prefix is None else prefix.shape
        overlap = window - 1 if sizes[-1] else 0
        ctx.overlap, ctx.block, ctx.sizes = overlap, block, sizes
        cuts = [x[:, :, : sizes[0]].clone()]
        at = sizes[0]
        for size in sizes[1:-1]:
            seen = _blocks(x[:, :, at - reach * block : at + size], block)
            count = size // block
            parts = [] if prefix is None else [prefix.unsqueeze(1).expand(len(x), count, -1, -1, -1)]
            parts += [seen[:, i : i + count] for i in range(reach + 1)]
            cuts.append(torch.cat(parts, dim=3).flatten(0, 1))
            at += size
        cuts.append(x[:, :, at - overlap :].clone())
        return tuple(cuts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        block, sizes = ctx.block, ctx.sizes
        first, *groups, last = grads
        to_x = first.new_empty(ctx.shape)
        to_prefix = None if ctx.prefix is None else first.new_zeros(ctx.prefix)
        to_x[:, :, : sizes[0]] = first
        at = sizes[0]
        for size, grad in zip(sizes[1:-1], groups, strict=True):
            grad = grad.unflatten(0, (ctx.shape[0], -1))
            if to_prefix is not None:
                grad, of_prefix = grad[:, :, :, ctx.prefix[2] :], grad[:, :, :, : ctx.prefix[2]]
                to_prefix += of_prefix.sum(1).sum_to_size(ctx.prefix)
            *of_before, of_own = grad.split(block, dim=3)
            _blocks(to_x[:, :, at : at + size], block).copy_(of_own)
            for back, part in enumerate(reversed(of_before), start=1):
                _blocks(to_x[:, :, at - back * block : at + size - back * block], block).add_(part)
            at += size
        overlap = ctx.overlap
        to_x[:, :, at:] = last[:, :, overlap:]
        to_x[:, :, at - overlap : at] += last[:, :, :overlap]
        return to_x, to_prefix, None, None, None, None


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h_k: Tensor | None,
    h_v: Tensor | None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    start: int | Tensor = 0,
) -> Tensor:
    """Attention inside one segment of MAC over [prefix | h | segment] (Eq. 22), as :func:`segment_visible` draws it.

    Args:
        q: (batch, heads, time, width): queries at consecutive places of the segment.
        k, v: (batch, heads, segment, width), by place; what stands at places after the last query is not seen.
        h_k, h_v: same shape: what the memory said at each place; None: it said nothing.
        prefix_k, prefix_v: (1 or batch, heads, n, width), seen by every token.
        start: the place of the first query; (batch,) int64 where the rows differ.

    Returns:
        (batch, heads, time, width).
    """
    _check_keys(q, k, v)
    _check_extra("h", h_k, h_v, q, (q.shape[0],))
    if h_k is not None and h_k.shape != k.shape:
        raise ValueError(f"h_k has shape {tuple(h_k.shape)}; expected that of k, {tuple(k.shape)}")
    _check_extra("prefix", prefix_k, prefix_v, q, (1, q.shape[0]))
    _check_count("start", start if isinstance(start, Tensor) else None, q)

    time, segment = q.shape[2], k.shape[2]
    prefix = 0 if prefix_k is None else prefix_k.shape[2]
    history = h_k is not None

    def attend(queries: Tensor, used: int, visible: Tensor | None) -> Tensor:
        keys = _join(prefix_k, None if h_k is None else h_k[:, :, :used], k[:, :, :used])
        values = _join(prefix_v, None if h_v is None else h_v[:, :, :used], v[:, :, :used])
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)

    if not isinstance(start, Tensor) and start + time == segment and time == 1:
        return attend(q, segment, None)  # the last place sees all
    if isinstance(start, Tensor) or start:
        return attend(q, segment, segment_visible(time, segment, prefix, start, q.device, history))
    parts = []  # no block of queries is shown the places after it
    for begin in range(0, max(1, time), SEGMENT_BLOCK):
        end = min(time, begin + SEGMENT_BLOCK)
        used = min(segment, end)
        visible = segment_visible(end, used, prefix, device=q.device, history=history)[begin:]
        parts.append(attend(q[:, :, begin:end], used, visible))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _join(prefix: Tensor | None, before: Tensor | None, own: Tensor) -> Tensor:
    parts = [] if prefix is None else [prefix.expand(own.shape[0], -1, -1, -1)]
    parts += [own] if before is None else [before, own]
    return torch.cat(parts, dim=2) if len(parts) > 1 else own


def _check_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, heads, time, width)")
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected batch, heads and width of q, {tuple(q.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected that of k, {tuple(k.shape)}")


def _check_extra(name: str, k: Tensor | None, v: Tensor | None, q: Tensor, batches: tuple[int, ...]) -> None:
    """Keys and values that stand before the tokens' own."""
    if (k is None) != (v is None):
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{name}_{given} is given and {name}_{missing} is None; expected both or neither")
    if k is None or v is None:
        return
    if k.ndim != 4 or k.shape[0] not in batches or k.shape[1] != q.shape[1] or k.shape[3] != q.shape[3]:
        batch = " or ".join(str(b) for b in dict.fromkeys(batches))
        raise ValueError(
            f"{name}_k has shape {tuple(k.shape)}; expected ({batch}, {q.shape[1]}, slots, {q.shape[3]}) to go with q"
        )
    if v.shape != k.shape:
        raise ValueError(f"{name}_v has shape {tuple(v.shape)}; expected that of {name}_k, {tuple(k.shape)}")


def _check_count(name: str, count: Tensor | None, q: Tensor) -> None:
    if count is not None and (count.shape != q.shape[:1] or count.is_floating_point()):
        raise ValueError(
            f"{name} has shape {tuple(count.shape)} and dtype {count.dtype}; "
            f"expected (batch,) = ({q.shape[0]},) whole numbers"
        )
