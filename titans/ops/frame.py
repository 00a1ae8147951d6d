"""Lays the tokens of a call onto the chunk grid: masked tokens dropped, each sequence at its own position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Frame:
    """Where each token of a call goes.

    A frame has ``slots`` slots, in tiles of ``tile`` of them; the last tile may be shorter. A slot that
    holds no token is dead: it changes nothing.

    Attributes:
        left: dead slots before the first token, if that is the same for every sequence.
        live: (batch, slots) bool, whether a slot holds a token; None like ``source``.
        source: (batch, slots), which token a slot holds; None if tokens only have to be shifted by ``left``.
        slot: (batch, time), where a token went; None like ``source``.
        present: the mask of the call, None like ``source``.
        ends: for each tile, whether a sequence stands at a boundary of the grid after it: True (all do), None (none
            does) or a (batch,) bool tensor.
        position: the position after the call, one number or one per sequence.
    """

    tile: int
    slots: int
    time: int
    left: int
    live: Tensor | None
    source: Tensor | None
    slot: Tensor | None
    present: Tensor | None
    ends: tuple[bool | Tensor | None, ...]
    position: int | Tensor

    def living(self, batch: int, like: Tensor) -> Tensor | None:
        """(batch, slots), 1 where a slot holds a token and 0 elsewhere, of the kind of ``like``; None: all do."""
        if self.live is not None:
            return self.live.to(like.dtype)
        right = self.slots - self.left - self.time
        if not self.left and not right:
            return None
        return F.pad(like.new_ones(batch, self.time), (self.left, right))

    def put(self, x: Tensor, dead: float | None = None) -> Tensor:
        """(batch, heads, time, ...) -> (batch, heads, slots, ...); dead slots hold ``dead``, or anything."""
        if self.source is None:
            right = self.slots - self.left - self.time
            if not self.left and not right:
                return x
            pad = (0,) * (2 * (x.ndim - 3)) + (self.left, right)
            return F.pad(x, pad, value=0.0 if dead is None else dead)
        index = self.source.view(len(self.source), 1, self.slots, *(1,) * (x.ndim - 3))
        x = x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))
        if dead is None or self.live is None:
            return x
        return torch.where(self.live.view(len(self.live), 1, self.slots, *(1,) * (x.ndim - 3)), x, dead)

    def take(self, y: Tensor) -> Tensor:
        """(batch, heads, slots, ...) -> (batch, heads, time, ...); masked tokens read 0."""
        if self.slot is None or self.present is None:
            return y[:, :, self.left : self.left + self.time]
        index = self.slot.view(len(self.slot), 1, self.time, *(1,) * (y.ndim - 3))
        y = y.gather(2, index.expand(-1, y.shape[1], -1, *y.shape[3:]))
        return torch.where(self.present.view(len(self.slot), 1, self.time, *(1,) * (y.ndim - 3)), y, 0)


def make_frame(
    time: int, mask: Tensor | None, position: int | Tensor, tile: int, period: int | None, whole: bool = True
) -> Frame:
    """A frame for ``time`` >= 1 tokens.

    Args:
        mask: (batch, time) bool, False for tokens to drop, or None.
        position: tokens since the last boundary of the grid: one number, or (batch,).
        tile: slots of a tile; if there is a period, a divisor of it.
        period: a boundary comes every ``period`` tokens; None: there are none, and positions do not matter.
        whole: the last tile has as many slots as the others, not only as many as are used.
    """
    if mask is not None and bool(mask.all()):
        mask = None
    # what is the same for all sequences is one number on the host, and one row stands for all of them
    starts = [position] if isinstance(position, int) else position.tolist()
    if mask is not None:
        starts = starts * len(mask) if isinstance(position, int) else starts
        device = mask.device
    elif isinstance(position, Tensor):
        device = position.device
    if period is None:
        starts = [0] * len(starts)
    counts = [time] * len(starts) if mask is None else mask.sum(1).tolist()
    totals = [start + count for start, count in zip(starts, counts, strict=True)]

    crosses = period is not None and max(totals) > period
    offsets = starts if crosses else [0] * len(starts)  # a call inside one chunk needs no grid
    used = max(offset + count for offset, count in zip(offsets, counts, strict=True))
    tile = min(tile, used) if not crosses and used else tile
    tiles = max(1, -(-used // tile))
    slots = tiles * tile if whole else max(1, used)

    shift = [start - offset for start, offset in zip(starts, offsets, strict=True)]
    ends: list[bool | Tensor | None] = []
    for index in range(tiles):
        # the boundary this tile reaches, if any, counted in each sequence's own tokens
        at = [min(shift[r] + (index + 1) * tile, totals[r]) if not crosses else (index + 1) * tile
              for r in range(len(starts))]  # fmt: skip
        fresh = [shift[r] + index * tile < totals[r] for r in range(len(starts))]
        flags = [
            period is not None and fresh[r] and at[r] % period == 0 and totals[r] >= at[r] for r in range(len(starts))
        ]
        if all(flags):
            ends.append(True)
        else:
            ends.append(torch.tensor(flags, device=device) if any(flags) else None)
    if period is not None:
        after = [total % period for total in totals]
        position = after[0] if len(set(after)) == 1 else torch.tensor(after, device=device)

    if mask is None and len(set(offsets)) == 1:
        return Frame(tile, slots, time, offsets[0], None, None, None, None, tuple(ends), position)

    present = mask if mask is not None else torch.ones(len(starts), time, dtype=torch.bool, device=device)
    offset = torch.tensor(offsets, device=device).unsqueeze(1)
    count = torch.tensor(counts, device=device).unsqueeze(1)
    order = torch.argsort((~present).to(torch.int8), dim=1, stable=True)
    rank = torch.arange(slots, device=device) - offset
    source = order.gather(1, rank.clamp(0, time - 1))
    live = (rank >= 0) & (rank < count)
    slot = (present.cumsum(1) - 1).clamp(min=0) + offset
    return Frame(tile, slots, time, 0, live, source, slot, present, tuple(ends), position)
