"""Rows that hold several documents end to end: each document is read as a sequence of its own.

The documents of a call become the rows of a few batches, each of documents of about one length, and what is computed
for them goes back to where their tokens stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from titans.layers.blocks import BlockState

LEAST = 0.75  # length of a batch's shortest document, as a share of its longest


@dataclass(frozen=True)
class Batch:
    """Documents of about one length, one after the other.

    Attributes:
        live: (documents, slots) bool, False where a slot holds no token; None: all slots hold one.
        rows: (documents,), the row of the call that a document stands in.
        fresh: (documents,) bool, False where the row goes on with what it read before the call.
        goes_on: whether any document does.
        last: which documents are the last of their row.
        shape: how many documents there are, and slots for each.
    """

    live: Tensor | None
    rows: Tensor
    fresh: Tensor
    goes_on: bool
    last: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a call go when its documents are read side by side.

    Attributes:
        batches: the documents.
        source: (slots,), which token of the call a slot of the batches holds, all rows counted through.
        slot: (batch, time), where a token went.
        present: (batch, time) bool, False for padding; None: there is none.
        order: (batch,), which of all last documents is that of a row.
    """

    batches: tuple[Batch, ...]
    source: Tensor
    slot: Tensor
    present: Tensor | None
    order: Tensor

    def put(self, x: Tensor) -> Tensor:
        """(batch, time, dim) to (1, slots, dim); slots without a token hold anything."""
        return x.flatten(0, 1).index_select(0, self.source).unsqueeze(0)

    def take(self, x: Tensor) -> Tensor:
        """(1, slots, dim) to (batch, time, dim); padding reads 0."""
        y = x.squeeze(0).index_select(0, self.slot.flatten()).unflatten(0, self.slot.shape)
        return y if self.present is None else y.masked_fill(~self.present.unsqueeze(-1), 0)

    def split(self, x: Tensor) -> Iterator[Tensor]:
        """What :meth:`put` laid out for each batch, (documents, slots, dim)."""
        parts = x.squeeze(0).split([batch.shape[0] * batch.shape[1] for batch in self.batches])
        return (part.unflatten(0, batch.shape) for part, batch in zip(parts, self.batches, strict=True))


def pack(restart: Tensor, mask: Tensor | None) -> Packing:
    """The documents of a call.

    Args:
        restart: (batch, time) bool, True where a token begins a document; on padding, the next token of the row does.
        mask: (batch, time) bool, False for padding; None: there is none.
    """
    (count, time), device = restart.shape, restart.device
    # one number for each document: its row, and how many of the row's documents began before
    names = torch.arange(count, device=device).unsqueeze(1) * (time + 1) + restart.cumsum(1)
    if mask is None:
        tokens, found = torch.arange(count * time, device=device), names.flatten()
    else:
        tokens = mask.flatten().nonzero().squeeze(1)
        found = names.flatten()[tokens]
    documents, sizes = torch.unique_consecutive(found, return_counts=True)
    firsts = sizes.cumsum(0) - sizes
    # a row whose last document has no token here has a state all the same
    ends = names[:, -1]
    empty = ends[~torch.isin(ends, documents)]
    documents = torch.cat([documents, empty])
    sizes, firsts = (F.pad(x, (0, len(empty))) for x in (sizes, firsts))
    sizes, by_size = sizes.sort(descending=True, stable=True)
    documents, firsts = documents[by_size], firsts[by_size]
    rows, fresh = documents // (time + 1), documents % (time + 1) > 0
    last = documents == ends[rows]

    tokens = F.pad(tokens, (0, 1))
    slot = torch.zeros(count * time, dtype=torch.int64, device=device)
    batches, sources, used = [], [], 0
    for start, stop in _cuts(sizes.tolist()):
        part = slice(start, stop)
        shape = (stop - start, max(1, int(sizes[start])))
        places = torch.arange(shape[1], device=device)
        live = places < sizes[part].unsqueeze(1)
        source = tokens[(firsts[part].unsqueeze(1) + places).clamp(max=len(tokens) - 1)].flatten()
        flat = live.flatten()
        slot[source[flat]] = used + flat.nonzero().squeeze(1)
        goes_on = not bool(fresh[part].all())
        ended = last[part].nonzero().squeeze(1)
        batches.append(Batch(None if bool(live.all()) else live, rows[part], fresh[part], goes_on, ended, shape))
        sources.append(source)
        used += shape[0] * shape[1]
    return Packing(tuple(batches), torch.cat(sources), slot.view(count, time), mask, rows[last].argsort())


def _cuts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cuts falling lengths into those of batches; empty documents go with the last of them."""
    start = 0
    for index, size in enumerate(sizes):
        if 0 < size < LEAST * sizes[start]:
            yield start, index
            start = index
    yield start, len(sizes)


Forward = Callable[..., "tuple[Tensor, BlockState]"]


def packed(forward: Forward) -> Forward:
    """``forward`` of a block, which also takes a :class:`Packing` as ``restart``: x is then as it was put."""

    @wraps(forward)
    def run(
        block: Any,
        x: Tensor,
        state: BlockState | None = None,
        mask: Tensor | None = None,
        restart: Tensor | Packing | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        if not isinstance(restart, Packing):
            return forward(block, x, state, mask, restart, tokens)
        outputs, ends = [], []
        all_tokens = [None] * len(restart.batches) if tokens is None else restart.split(tokens)
        for batch, part, own in zip(restart.batches, restart.split(x), all_tokens, strict=True):
            before = None if state is None or not batch.goes_on else state.reorder(batch.rows)
            y, after = forward(block, part, before, batch.live, None if before is None else batch.fresh, own)
            outputs.append(y.flatten(0, 1))
            if len(batch.last):
                ends.append(after.reorder(batch.last))
        return torch.cat(outputs).unsqueeze(0), type(ends[0]).concatenate(ends).reorder(restart.order)

    return run
