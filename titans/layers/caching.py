"""Memory caching: the memory's weights at the end of each segment are kept, and later tokens read them too.

After *Memory Caching* (arXiv 2602.24281); the equations are in docs/math.md. What is written does not change, only what
is read: a token asks the memory as it stands and the kept ones, and weighs the answers by how well it fits the mean of
what each of them was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titans.ops import MemoryMLP, MemoryState, Tokens
from titans.ops.frame import make_frame
from titans.ops.project import UNIT_EPS
from titans.ops.state import CachedSegments, Surprise

Run = Callable[[Tokens, MemoryState], Any]  # (y, state), and the surprise if the caller asked for it


class Caching(NamedTuple):
    """How a memory keeps and reads earlier weights.

    Attributes:
        segment_size: tokens of a segment.
        top_k: how many of the kept a token reads, those that it fits best; None: all.
        average: the kept weights are averaged and read as one memory, instead of their answers.
        max_states: the most that are kept; beyond it neighbours are merged. None: all are kept.
    """

    segment_size: int
    top_k: int | None = None
    average: bool = False
    max_states: int | None = None


def run_segments(
    run: Run, caching: Caching, network: MemoryMLP, tokens: Tokens, state: MemoryState, x: Tensor, u: Tensor
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
    """Runs a memory over tokens, segment by segment, and reads the kept segments along with it.

    Args:
        run: the memory without a cache.
        x: (batch, time, dim), the tokens' inputs, whose means stand for the segments.
        u: (batch, time, dim), what is compared with the means.

    Returns:
        What ``run`` returns for all tokens.
    """
    cached, size = state.cached, caching.segment_size
    assert cached is not None
    state = replace(state, cached=None)
    frame = make_frame(x.shape[1], tokens.mask, cached.length, size, size)
    edges = [0, *range(frame.tile - frame.left, x.shape[1], frame.tile), x.shape[1]]
    mask = None
    if frame.live is not None:  # each row has its own cuts
        x, u = (frame.put(each.unsqueeze(1)).squeeze(1) for each in (x, u))
        tokens = _map(tokens, frame.put)
        edges, mask = [*range(0, frame.slots + 1, frame.tile)], frame.live
    outputs, surprises = [], []
    for (start, stop), ended in zip(pairwise(edges), frame.ends, strict=True):
        live = None if mask is None else mask[:, start:stop]
        part = _map(tokens, itemgetter((slice(None), slice(None), slice(start, stop))))
        y, state, *surprise = run(part._replace(mask=live), state)
        means, total, length = _go_on(x[:, start:stop].to(cached.total.dtype), live, cached)
        outputs.append(read_cached(caching, network, cached, y, part.q, u[:, start:stop], means))
        surprises += surprise
        cached = replace(cached, total=total, length=length)
        if ended is not None:
            cached = keep(cached, state.weights, ended, caching.max_states)
    y = torch.cat(outputs, dim=2)
    state = replace(state, cached=replace(cached, length=frame.position))
    if frame.live is not None:
        y = frame.take(y)
    if not surprises:
        return y, state
    found = Surprise(*(torch.cat(parts, dim=2) for parts in zip(*surprises, strict=True)))
    return y, state, found if frame.live is None else Surprise(*map(frame.take, found))


def _map(tokens: Tokens, function: Callable[[Tensor], Tensor]) -> Tokens:
    """``function`` of all but the mask, which is left out."""
    parts = (None if each is None else function(each) for each in tokens._replace(mask=None))
    return Tokens(*parts)  # type: ignore[arg-type]


def _go_on(x: Tensor, live: Tensor | None, cached: CachedSegments) -> tuple[Tensor, Tensor, int | Tensor]:
    """The mean of the open segment before each token of x (batch, time, dim), and its sum and length after them all."""
    if live is None:
        seen: int | Tensor = cached.length + x.shape[1]
        counts = cached.length if isinstance(cached.length, int) else cached.length.unsqueeze(-1)
        counts = counts + torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
    else:
        x = x.masked_fill(~live.unsqueeze(-1), 0)
        counts = cached.lengths.unsqueeze(-1) + live.cumsum(1) - live.long()
        seen = cached.lengths + live.sum(1)
    total = cached.total.unsqueeze(1)
    sums = torch.cat([total, total + x.cumsum(1)], dim=1)
    means = sums[:, :-1] / counts.clamp(min=1).unsqueeze(-1)
    return means, sums[:, -1].clone(), seen  # a view would keep all sums alive


def read_cached(
    caching: Caching, network: MemoryMLP, cached: CachedSegments, y: Tensor, q: Tensor, u: Tensor, mean: Tensor
) -> Tensor:
    """What the memory says together with the kept ones: sum_i gamma_i M^(i)(q), of the shape of y.

    Args:
        y: (batch, heads, time, width), what it says as it stands.
        q: its queries, of the same shape.
        u: (batch, time, dim), what is compared with the means.
        mean: (batch, time or 1, dim), of the open segment's tokens before each of these.
    """
    weights, kept = cached.weights, cached.spans.shape[1]
    if not kept:
        return y
    dtype, lowest = weights[0].dtype, torch.finfo(weights[0].dtype).min  # not infinity: a row may have kept nothing
    with torch.autocast(q.device.type, enabled=False):
        u = u.to(dtype)
        now = (u * _unit(mean.to(dtype))).sum(-1, keepdim=True)
        fits = (u @ _unit(cached.means).mT).masked_fill(cached.spans.unsqueeze(1) == 0, lowest)
        if caching.top_k is not None and caching.top_k < kept:
            best = fits.topk(caching.top_k, dim=-1)
            if u.shape[1] == 1:  # the others need not even be read
                rows = torch.arange(len(u), device=u.device).unsqueeze(-1)
                fits, weights = best.values, tuple(w[rows, best.indices[:, 0]] for w in weights)
            else:
                fits = torch.full_like(fits, lowest).scatter(-1, best.indices, best.values)
        gamma = torch.softmax(torch.cat([now, fits], dim=-1), dim=-1)
        first = gamma[..., :1].unsqueeze(1)
        if caching.average:
            shares = torch.softmax(fits, dim=-1)
            said = network(weights, q.to(dtype), lambda h, w: _mix(h.unsqueeze(1) @ w.mT, shares))
            return (first * y + (1 - first) * said).to(y.dtype)
        said = network(weights, q.to(dtype).unsqueeze(1))
        return (first * y + _mix(said, gamma[..., 1:])).to(y.dtype)


def _unit(means: Tensor) -> Tensor:
    """Each of length 1; one of length 0, of an empty segment, stays."""
    return means * (means.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _mix(y: Tensor, shares: Tensor) -> Tensor:
    """(batch, kept, heads, time, width) and (batch, time, kept): the sum over the kept."""
    return torch.einsum("bkhtw,btk->bhtw", y, shares)


def keep(
    cached: CachedSegments, weights: tuple[Tensor, ...], ended: bool | Tensor, max_states: int | None
) -> CachedSegments:
    """Keeps the weights of the sequences whose segment has ended, True for all or (batch,) bool; a new one opens."""
    spans = cached.spans.tolist()
    if isinstance(ended, bool) and all(row == spans[0] for row in spans):
        return _keep(cached, weights, max_states)
    ends = [True] * len(spans) if isinstance(ended, bool) else ended.tolist()
    rows = []
    for row, is_ended in enumerate(ends):
        own = cached.map(itemgetter(slice(row, row + 1))).narrow(sum(span > 0 for span in spans[row]))
        rows.append(_keep(own, [w[row : row + 1] for w in weights], max_states) if is_ended else own)
    return CachedSegments.concatenate(rows)


def _keep(cached: CachedSegments, weights: Sequence[Tensor], max_states: int | None) -> CachedSegments:
    """:func:`keep` for sequences that all end a segment and have merged alike."""
    spans = [*cached.spans[0].tolist(), 1]
    pairs = [a + b for a, b in pairwise(spans)]
    first = pairs.index(min(pairs)) if max_states is not None and len(spans) > max_states else None

    def add(old: Tensor, new: Tensor) -> Tensor:
        places = [*old.unbind(1), new]
        if first is not None:  # the two neighbours that span the least, the oldest such pair, become one
            share = spans[first] / pairs[first]
            places[first : first + 2] = [share * places[first] + (1 - share) * places[first + 1]]
        return torch.stack(places, dim=1)

    kept = tuple(add(old, new) for old, new in zip(cached.weights, weights, strict=True))
    means = add(cached.means, cached.mean)
    if first is not None:
        spans[first : first + 2] = [pairs[first]]
    return CachedSegments(
        weights=kept,
        means=means,
        spans=cached.spans.new_tensor(spans).expand(len(means), -1).clone(),
        total=torch.zeros_like(cached.total),
    )
