"""The memory's state: a value that goes into every call and comes out of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titans.files import replacing

FORMAT = "titans.MemoryState"
VERSION = "1"
CACHED = ("means", "spans", "total", "length")  # tensors of cached segments in a file, besides the weights


class Surprise(NamedTuple):
    """How surprising each token was, both (batch, heads, time)."""

    gradient_norm: Tensor  # ||grad_M l||, before the token was written
    loss: Tensor  # l(M; k, v)


@dataclass(frozen=True)
class CachedSegments:
    """What a memory keeps of the segments it has read, oldest first; made by :mod:`titans.layers.caching`.

    Attributes:
        weights: M at the end of each kept segment, one (batch, kept, heads, out, in) tensor a layer.
        means: (batch, kept, dim), the mean of each segment's inputs.
        spans: (batch, kept) int64, how many segments each stands for; 0: an empty place, which comes after the others.
        total: (batch, dim), the sum of the open segment's inputs.
        length: tokens of the open segment: a number if that is the same for all sequences, else (batch,) int64.
    """

    weights: tuple[Tensor, ...]
    means: Tensor
    spans: Tensor
    total: Tensor
    length: int | Tensor = 0

    @classmethod
    def create(cls, weights: Sequence[Tensor], dim: int) -> CachedSegments:
        """Nothing kept, before the first token of a memory with these weights and inputs of width ``dim``."""
        first = weights[0]
        batch = len(first)
        kept = tuple(w.new_zeros(batch, 0, *w.shape[1:]) for w in weights)
        spans = torch.zeros(batch, 0, dtype=torch.int64, device=first.device)
        return cls(kept, first.new_zeros(batch, 0, dim), spans, first.new_zeros(batch, dim))

    @property
    def lengths(self) -> Tensor:
        """``length`` of each sequence, (batch,) int64."""
        if isinstance(self.length, Tensor):
            return self.length
        return torch.full((len(self.total),), self.length, device=self.total.device)

    @property
    def mean(self) -> Tensor:
        """(batch, dim), the mean of the open segment's inputs; 0 where there are none."""
        return self.total / self.lengths.clamp(min=1).unsqueeze(-1)

    def map(self, function: Callable[[Tensor], Tensor]) -> CachedSegments:
        """The same with ``function`` applied to every tensor, a ``length`` of each sequence included."""
        return CachedSegments(
            weights=tuple(function(w) for w in self.weights),
            means=function(self.means),
            spans=function(self.spans),
            total=function(self.total),
            length=self.length if isinstance(self.length, int) else function(self.length),
        )

    def narrow(self, kept: int) -> CachedSegments:
        """The same with the first ``kept`` places alone."""
        weights = tuple(w[:, :kept] for w in self.weights)
        return replace(self, weights=weights, means=self.means[:, :kept], spans=self.spans[:, :kept])

    def widen(self, kept: int) -> CachedSegments:
        """The same with ``kept`` places, the new ones empty."""

        def fill(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(len(x), kept - x.shape[1], *x.shape[2:])], dim=1)

        if kept == self.spans.shape[1]:
            return self
        weights = tuple(map(fill, self.weights))
        return replace(self, weights=weights, means=fill(self.means), spans=fill(self.spans))

    def where(self, rows: Tensor, other: CachedSegments) -> CachedSegments:
        """These in the sequences where ``rows`` (batch,) bool is True, and ``other`` in the rest."""

        def choose(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(rows.view(-1, *(1,) * (mine.ndim - 1)), mine, theirs.to(mine.dtype))

        kept = max(self.spans.shape[1], other.spans.shape[1])
        mine, theirs = self.widen(kept), other.widen(kept)
        same = isinstance(self.length, int) and isinstance(other.length, int) and self.length == other.length
        return CachedSegments(
            weights=tuple(choose(a, b) for a, b in zip(mine.weights, theirs.weights, strict=True)),
            means=choose(mine.means, theirs.means),
            spans=choose(mine.spans, theirs.spans),
            total=choose(mine.total, theirs.total),
            length=self.length if same else choose(mine.lengths, theirs.lengths),
        )

    @classmethod
    def concatenate(cls, states: Sequence[CachedSegments]) -> CachedSegments:
        """The sequences of several states, in order."""
        kept = max(s.spans.shape[1] for s in states)
        wide = [s.widen(kept) for s in states]
        return cls(
            weights=tuple(torch.cat(parts) for parts in zip(*(s.weights for s in wide), strict=True)),
            means=torch.cat([s.means for s in wide]),
            spans=torch.cat([s.spans for s in wide]),
            total=torch.cat([s.total for s in wide]),
            length=aligned(torch.cat([s.lengths for s in wide])),
        )


@dataclass(frozen=True)
class MemoryState:
    """Weights and momentum of a memory, and where in its open chunk each sequence stands.

    Attributes:
        weights: M, one (batch, heads, out, in) tensor a layer.
        momentum: S, same shapes.
        anchor: the weights at the start of the open chunk, where its gradients are taken.
        position: how many tokens of the open chunk have been seen: a number if that is the same for all sequences, else
            (batch,) int64.
        gram: (batch, heads, width, width), sum of the outer products of the open chunk's unit keys, or None: what the
            bounded chunked rule needs to know of the tokens before (see ``docs/math.md``, Bounds).
        conv: the last inputs of ``NeuralMemory``'s convolutions, (batch, kernel - 1, channels) each; empty for the ops.
        rule: what chunks the rule has that left the state (``Rule.grid``), None for any: inside a chunk a state makes
            sense to the same rule only.
        cached: earlier weights that ``NeuralMemory`` reads beside M; None: a memory without a cache, and the ops.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    position: int | Tensor = 0
    gram: Tensor | None = None
    conv: tuple[Tensor, ...] = ()
    rule: str | None = None
    cached: CachedSegments | None = None

    @classmethod
    def create(cls, weights: Sequence[Tensor], momentum: Sequence[Tensor] | None = None) -> MemoryState:
        """A state at the start of a chunk, from one (batch, heads, out, in) tensor a layer."""
        weights = tuple(weights)
        if not weights:
            raise ValueError("weights is empty; expected one (batch, heads, out, in) tensor a layer")
        for index, weight in enumerate(weights):
            if weight.ndim != 4:
                raise ValueError(f"weights[{index}] has shape {tuple(weight.shape)}; expected (batch, heads, out, in)")
            if weight.shape[:2] != weights[0].shape[:2]:
                raise ValueError(
                    f"weights[{index}] has batch and heads {tuple(weight.shape[:2])}, "
                    f"weights[0] has {tuple(weights[0].shape[:2])}; expected the same"
                )
        momentum = tuple(torch.zeros_like(w) for w in weights) if momentum is None else tuple(momentum)
        if [m.shape for m in momentum] != [w.shape for w in weights]:
            raise ValueError(
                f"momentum has shapes {[tuple(m.shape) for m in momentum]}; "
                f"expected those of the weights, {[tuple(w.shape) for w in weights]}"
            )
        return cls(weights, momentum, weights)

    @property
    def batch_size(self) -> int:
        """How many sequences the state holds."""
        return self.weights[0].shape[0]

    @property
    def positions(self) -> Tensor:
        """``position`` of each sequence, (batch,) int64."""
        if isinstance(self.position, Tensor):
            return self.position
        return torch.full((self.batch_size,), self.position, device=self.weights[0].device)

    def map(self, function: Callable[[Tensor], Tensor]) -> MemoryState:
        """A state with ``function`` applied to every tensor, a ``position`` of each sequence included."""
        weights = tuple(function(w) for w in self.weights)
        anchor = weights if self.anchor is self.weights else tuple(function(w) for w in self.anchor)
        return MemoryState(
            weights=weights,
            momentum=tuple(function(w) for w in self.momentum),
            anchor=anchor,
            position=self.position if isinstance(self.position, int) else function(self.position),
            gram=None if self.gram is None else function(self.gram),
            conv=tuple(function(c) for c in self.conv),
            rule=self.rule,
            cached=None if self.cached is None else self.cached.map(function),
        )

    def detach(self) -> MemoryState:
        """A copy, cut off from the graph: where truncated backpropagation through time ends."""
        return self.map(lambda x: x.detach() if _is_one_number(x) else x.detach().clone())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MemoryState:
        """The state on another device or in another floating dtype."""
        return self.map(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None))

    def reorder(self, indices: Tensor) -> MemoryState:
        """Picks sequences by index, with repetition: what beam search needs."""
        if indices.ndim != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices has shape {tuple(indices.shape)} and dtype {indices.dtype}; "
                "expected a vector of int64 sequence numbers"
            )
        return self.map(lambda x: x.index_select(0, indices.to(x.device)))

    def where(self, rows: Tensor, other: MemoryState) -> MemoryState:
        """This state in the sequences where ``rows`` (batch,) bool is True, and ``other`` in the rest."""

        def choose(mine: Tensor, theirs: Tensor) -> Tensor:
            if _is_one_number(mine) and _is_one_number(theirs):
                return theirs
            return torch.where(rows.view(-1, *(1,) * (mine.ndim - 1)), mine, theirs.to(mine.dtype))

        def each(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(choose(a, b) for a, b in zip(mine, theirs, strict=True))

        weights = each(self.weights, other.weights)
        same = self.position if isinstance(self.position, int) and isinstance(other.position, int) else None
        whole = self.anchor is self.weights and other.anchor is other.weights
        gram, gram_other = self.gram, other.gram
        if gram is None and gram_other is not None:
            gram = torch.zeros_like(gram_other)
        if gram is not None and gram_other is None:
            gram_other = torch.zeros_like(gram)
        return MemoryState(
            weights=weights,
            momentum=each(self.momentum, other.momentum),
            anchor=weights if whole else each(self.anchor, other.anchor),
            position=same if same is not None and same == other.position else choose(self.positions, other.positions),
            gram=None if gram is None or gram_other is None else choose(gram, gram_other),
            conv=each(self.conv, other.conv),
            rule=self.rule or other.rule,
            cached=None if self.cached is None or other.cached is None else self.cached.where(rows, other.cached),
        )

    @classmethod
    def concatenate(cls, states: Sequence[MemoryState]) -> MemoryState:
        """The sequences of several states, in order."""

        def join(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
            return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

        weights = join([s.weights for s in states])
        whole = all(s.anchor is s.weights for s in states)
        cached = [s.cached for s in states if s.cached is not None]
        return cls(
            weights=weights,
            momentum=join([s.momentum for s in states]),
            anchor=weights if whole else join([s.anchor for s in states]),
            position=aligned(torch.cat([s.positions for s in states])),
            gram=concatenate_or_zero([s.gram for s in states], [s.batch_size for s in states]),
            conv=join([s.conv for s in states]),
            rule=next((s.rule for s in states if s.rule is not None), None),
            cached=CachedSegments.concatenate(cached) if cached else None,
        )

    def norms(self) -> dict[str, Tensor]:
        """Frobenius norms of weights and momentum, each (layers, batch, heads)."""
        return {
            "weights": torch.stack([torch.linalg.matrix_norm(w.float()) for w in self.weights]),
            "momentum": torch.stack([torch.linalg.matrix_norm(w.float()) for w in self.momentum]),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state as one safetensors file, under a temporary name first."""
        tensors = {"position": self.positions}
        groups = {"weights": self.weights, "momentum": self.momentum, "conv": self.conv}
        if self.anchor is not self.weights:
            groups["anchor"] = self.anchor
        if self.cached is not None:
            groups["cached.weights"] = self.cached.weights
            cached = replace(self.cached, length=self.cached.lengths)
            tensors |= {f"cached.{name}": getattr(cached, name) for name in CACHED}
        for name, group in groups.items():
            tensors |= {f"{name}.{index}": tensor for index, tensor in enumerate(group)}
        if self.gram is not None:
            tensors["gram"] = self.gram
        rule = {} if self.rule is None else {"rule": self.rule}
        write_tensors(path, tensors, {"format": FORMAT, "version": VERSION, **rule})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> MemoryState:
        """Reads a state written by :meth:`save`; a ``ValueError`` says what is wrong with any other file."""
        target = Path(path)
        tensors, words = read_tensors(target, device, FORMAT, VERSION, "memory state")

        def group(name: str) -> tuple[Tensor, ...]:
            count = sum(key.startswith(f"{name}.") for key in tensors)
            missing = [i for i in range(count) if f"{name}.{i}" not in tensors]
            if missing:
                raise ValueError(f"{target} is incomplete: {name}.{missing[0]} is missing")
            return tuple(tensors[f"{name}.{i}"] for i in range(count))

        try:
            state = cls.create(group("weights"), group("momentum"))
            anchor = group("anchor")
            if anchor and [a.shape for a in anchor] != [w.shape for w in state.weights]:
                raise ValueError("anchor and weights have different shapes")
            position = tensors.get("position")
            if position is None or position.shape != (state.batch_size,) or position.dtype != torch.int64:
                raise ValueError("position is missing or has the wrong shape")
            if bool((position < 0).any()):
                raise ValueError("position is negative")
            gram, conv = tensors.get("gram"), group("conv")
            if gram is not None and gram.shape[:2] != state.weights[0].shape[:2]:
                raise ValueError("gram and weights have different batch or heads")
            if any(len(c) != state.batch_size for c in conv):
                raise ValueError("conv and weights have different batch sizes")
            cached = _cached({name: tensors.get(f"cached.{name}") for name in CACHED}, group("cached.weights"), state)
        except ValueError as error:
            raise ValueError(f"{target} holds a damaged memory state: {error}") from error
        return replace(
            state,
            anchor=anchor or state.weights,
            position=aligned(position),
            gram=gram,
            conv=conv,
            rule=words.get("rule"),
            cached=cached,
        )


def _cached(
    found: Mapping[str, Tensor | None], weights: tuple[Tensor, ...], state: MemoryState
) -> CachedSegments | None:
    """The cached segments of a file with the other fields of ``state``; None: it has none."""
    means, spans, total, length = (found[name] for name in CACHED)
    if means is None and spans is None and total is None and length is None and not weights:
        return None
    if means is None or spans is None or total is None or length is None or spans.ndim != 2:
        raise ValueError("a part of the cached segments is missing")
    batch, kept = spans.shape
    if [w.shape for w in weights] != [(batch, kept, *w.shape[1:]) for w in state.weights]:
        raise ValueError("cached and present weights have different shapes")
    shapes = [tuple(x.shape) for x in (means, total, length)]
    if batch != state.batch_size or shapes != [(batch, kept, total.shape[-1]), (batch, total.shape[-1]), (batch,)]:
        raise ValueError("the parts of the cached segments have different shapes")
    return CachedSegments(weights, means, spans, total, aligned(length))


def aligned(positions: Tensor) -> int | Tensor:
    """One number for all sequences where they agree; the host waits for the device to find out."""
    found = set(positions.tolist()) or {0}
    return found.pop() if len(found) == 1 else positions


def _is_one_number(x: Tensor) -> bool:
    """Whether one number stands for all of a tensor, as zero does for the momentum of a memory without."""
    return x.numel() > 0 and not any(x.stride())


def concatenate_or_zero(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Tensors of these batch sizes, one after the other, zeros where there is none; None if there is none at all."""
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([some.new_zeros(size, *some.shape[1:]) if part is None else part for part, size in pairs])


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes tensors and words about them as one safetensors file, under a temporary name first."""
    from safetensors.torch import save_file

    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} does not exist; expected a folder to write {target.name} into")
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(target) as temporary:
        save_file(owned, temporary, metadata=metadata)


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str, form: str, version: str, what: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The inverse of :func:`write_tensors`, for files whose metadata has this ``format`` and ``version``."""
    from safetensors import SafetensorError, safe_open

    target = Path(path)
    if not target.is_file():
        writer = f"{form.removeprefix('titans.')}.save"
        raise FileNotFoundError(f"{target} does not exist; expected a file written by {writer}")
    try:
        with safe_open(target, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{target} cannot be read as a {what}: {error}") from error
    if metadata.get("format") != form:
        raise ValueError(f"{target} is not a {what} (its format is {metadata.get('format')!r})")
    if metadata.get("version") != version:
        raise ValueError(f"{target} has {what} version {metadata.get('version')!r}; this release reads {version!r}")
    return tensors, metadata
