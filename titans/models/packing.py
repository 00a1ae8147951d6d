"""Where documents begin inside the rows of a call, however the caller says it; and which arguments a call may have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.words import nearest

# how transformers' and TRL's collators say where documents begin, and we
DOCUMENTS = ("restart", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
# what a loss takes
LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")
# what callers of language models pass to all of them
HARMLESS = ("cache_position", "output_attentions", "token_type_ids")


def check_names(owner: Any, given: Mapping[str, Any], *known: str) -> None:
    """Refuses keyword arguments besides ``known`` and those that every model is given."""
    for name in given:
        if name not in (*known, *HARMLESS):
            named = [*inspect.signature(type(owner).forward).parameters][1:-1]
            raise TypeError(f"{type(owner).__name__}.forward has no argument {name}: {nearest(name, [*named, *known])}")
    if given.get("output_attentions"):
        raise ValueError("output_attentions is True; expected False, as no attention weights are kept")


def restarts_of(
    shape: tuple[int, int],
    mask: Tensor | None,
    restart: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
) -> Tensor | None:
    """Which sequences of a call start anew, (batch,) bool, or where documents begin inside of them, (batch, time) bool.

    The first token of a row begins a document only if ``restart`` says so: the others know nothing of the calls before.

    Args:
        shape: (batch, time) of the call.
        mask: (batch, time), or longer, in which case its end counts; 0 for padding, and otherwise 1 or, as some
            trainers pack, the number of each token's document.
        restart: (batch,) or (batch, time) bool.
        position_ids: (batch, time) or (1, time); a document goes on where they go on by one, and begins at 0.
        seq_idx: (batch, time), the number of each token's document.
        cu_seq_lens_q, cu_seq_lens_k: where the documents of the only row begin, and the end of the last.
    """
    if restart is not None and (tuple(restart.shape) not in (shape[:1], shape) or restart.dtype != torch.bool):
        raise ValueError(
            f"restart has shape {tuple(restart.shape)} and dtype {restart.dtype}; "
            f"expected {shape[:1]} or {shape}, and bool"
        )
    mask = None if mask is None else mask[:, mask.shape[1] - shape[1] :]
    numbers = None if mask is None or _is_plain(mask) else mask
    if shape[1] < 2:
        return restart if restart is None or restart.ndim == 1 else restart.any(1)
    real = None if mask is None else mask.to(torch.bool)
    told = {}  # where a token begins a document that is not the first of its row
    if numbers is not None:
        told["attention_mask"] = _changes(numbers, real)
    if restart is not None and restart.ndim == 2:
        told["restart"] = _changes(restart.cumsum(1), real)
    if position_ids is not None:
        told["position_ids"] = _of_positions(position_ids, shape, real)
    if seq_idx is not None:
        if tuple(seq_idx.shape) != shape:
            raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}; expected {shape}")
        told["seq_idx"] = _changes(seq_idx, real)
    for name, ends in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if ends is not None:
            told[name] = _of_ends(name, ends, shape)
    if not told:
        return restart
    (first, starts), *others = told.items()
    for name, other in others:
        if not torch.equal(starts, other):
            raise ValueError(f"{first} and {name} have documents begin at different tokens; expected the same")
    if restart is not None and restart.ndim == 2:
        return restart | starts if bool(restart[:, 1:].any()) else restart[:, 0]
    if not bool(starts.any()):
        return restart
    if restart is not None:
        starts[:, 0] = restart
    return starts


def on_tokens(starts: Tensor, real: Tensor) -> Tensor:
    """``starts`` (batch, time) where padding may move: a document that begins with padding begins after it."""
    numbers = starts.cumsum(1)
    before, follows = _before(numbers, real)
    return real & (numbers > before * follows)


def _is_plain(mask: Tensor) -> bool:
    """Whether a mask has nothing but 0 and 1; it is refused if it has no numbers of documents either."""
    if mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all()):
        return True
    wrong = mask[(mask < 0) | (mask != mask.to(torch.int64))]
    if wrong.numel():
        raise ValueError(
            f"attention_mask has {wrong[0].item()}; expected 0 for padding, and 1 or a document's number for tokens"
        )
    return False


def _of_positions(positions: Tensor, shape: tuple[int, int], real: Tensor | None) -> Tensor:
    if tuple(positions.shape) not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids has shape {tuple(positions.shape)}; expected {shape}")
    positions = positions.expand(shape)
    before, follows = _before(positions, real)
    starts = follows & (positions == 0)
    wrong = follows & ~starts & (positions != before + 1)
    if bool(wrong.any()):
        now, then = int(positions[wrong][0]), int(before[wrong][0])
        raise ValueError(f"position_ids has {now} after {then}; expected {then + 1}, or 0 where a document begins")
    return starts


def _changes(numbers: Tensor, real: Tensor | None) -> Tensor:
    before, follows = _before(numbers, real)
    return follows & (numbers != before)


def _of_ends(name: str, ends: Tensor, shape: tuple[int, int]) -> Tensor:
    if shape[0] != 1:
        raise ValueError(f"{name} is given and the batch has {shape[0]} rows; expected one")
    places = ends.tolist() if ends.ndim == 1 else []
    if len(places) < 2 or places[0] != 0 or places[-1] != shape[1] or places != sorted(places):
        raise ValueError(f"{name} is {ends.tolist()}; expected rising numbers from 0 to {shape[1]}, the row's length")
    starts = torch.zeros(shape, dtype=torch.bool, device=ends.device)
    starts[0, [place for place in places if 0 < place < shape[1]]] = True
    return starts


def _before(values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The value of the token before each one, padding left out, and whether there is one: both (batch, time)."""
    if real is None:
        real = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    places = torch.arange(values.shape[1], device=values.device)
    last = F.pad(torch.where(real, places, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    return values.gather(1, last.clamp(min=0)), real & (last >= 0)
