"""``TitansCache``: the state of every layer of a model, which generation carries and a file can hold."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from titans.layers import BlockState, SegmentState, WindowState
from titans.layers.blocks import Block
from titans.layers.step import BlockStep, is_intercepted, open_step, step_blocks
from titans.models.configuration import TitansConfig
from titans.ops import MemoryState
from titans.ops.state import CachedSegments, aligned, read_tensors, write_tensors

FORMAT = "titans.TitansCache"
VERSION = "2"
TYPES = {cls.__name__: cls for cls in (BlockState, MemoryState, CachedSegments, WindowState, SegmentState)}


class TitansCacheLayer(CacheLayerMixin):
    """One layer's state, as generation expects it: an object that changes.

    While tokens come one at a time it is in the buffers of a :class:`titans.layers.step.BlockStep`, until somebody asks
    for it.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, state: BlockState | None = None) -> None:
        super().__init__()
        self._state = state
        self._step: BlockStep | None = None

    @property
    def state(self) -> BlockState | None:
        """A value, which nothing changes; None before the first token."""
        if self._step is not None:
            self._state, self._step = self._step.state(), None
        return self._state

    @state.setter
    def state(self, state: BlockState | None) -> None:
        self._state, self._step = state, None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_state": self.state, "_step": None}

    @property
    def batch_size(self) -> int:
        """How many sequences there are; -1 before the first token."""
        if self._step is not None:
            return self._step.batch_size
        return -1 if self._state is None else self._state.batch_size

    def step(self, block: Block, x: Tensor) -> BlockStep | None:
        """The state in buffers that the next token x of ``block`` may change; None: it has to go the long way."""
        if self._step is None or not self._step.fits(block, x):
            step = open_step(block, self.state, x)
            self._state, self._step = (self._state, None) if step is None else (None, step)
        return self._step

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first call makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """A state is replaced as a whole, see :meth:`TitansCache.replace`."""
        raise NotImplementedError("a TitansCache is not updated with keys and values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask covers the past."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen are counted by the cache, not by its layers."""
        return 0

    def get_max_length(self) -> int:
        """There is no longest sequence."""
        return -1

    def reset(self) -> None:
        """Back to the start of a sequence."""
        self.state = None

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.state = None if self.state is None else self.state.map(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Picks sequences by index: what beam search needs."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Picks sequences by index."""
        self.reorder_cache(indices)


class TitansCache(Cache):
    """What a Titans model knows of the sequences it has read: give it to the next call to go on.

    A call changes the cache it is given, once it has succeeded; keep a :meth:`copy` to go back to.

    Args:
        config: of the model.
    """

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(layers=[TitansCacheLayer() for _ in range(config.num_hidden_layers)])
        self.fingerprint: dict[str, Any] = config.fingerprint()
        self._fits: TitansConfig | None = config
        self.seen = 0

    @property
    def states(self) -> list[BlockState | None]:
        """The state of each layer; None before the first token."""
        return [layer.state for layer in self.layers]

    def replace(self, states: Sequence[BlockState], tokens: int) -> None:
        """Takes the states after a call of ``tokens`` tokens, padding counted."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.state = state.map(_own)
        self.seen += tokens

    def step(self, blocks: Iterable[Any], x: Tensor) -> Tensor | None:
        """The next token of every sequence, x (batch, dim), after the blocks, without a graph; None: the cache has not
        changed, and the token has to be read the long way."""
        if x.device.type != "cpu" or is_intercepted():
            return None
        steps = []
        for layer, block in zip(self.layers, blocks, strict=True):
            step = layer.step(block, x)
            if step is None:
                return None
            steps.append(step)
        y = step_blocks(steps, x)
        self.seen += 1
        return y

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the model was called with so far, padding counted."""
        return self.seen

    def reset(self) -> None:
        """Back to the start of a sequence."""
        super().reset()
        self.seen = 0

    def copy(self) -> TitansCache:
        """Another cache with the same states, graph included: a call replaces states and never changes one."""
        other = copy.copy(self)
        other.layers = [TitansCacheLayer(layer.state) for layer in self.layers]
        return other

    def repeat(self, repeats: int) -> TitansCache:
        """Another cache with every sequence so many times in a row: for continuations of a prefix that is read once."""
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}; expected a whole number of at least 1")
        other = self.copy()
        other.batch_repeat_interleave(repeats)
        return other

    @classmethod
    def concatenate(cls, caches: Sequence[TitansCache]) -> TitansCache:
        """The sequences of several caches of one model, in order; each must have read something."""
        joined = caches[0].copy()
        for index, layer in enumerate(joined.layers):
            layer.state = BlockState.concatenate([cache.layers[index].state for cache in caches])
        joined.seen = max(cache.seen for cache in caches)
        return joined

    def __deepcopy__(self, memo: dict[int, Any]) -> TitansCache:
        return self.copy()

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: what a memory has read is part of it."""
        raise NotImplementedError("a memory cannot take tokens back; keep a copy() of the cache from before them")

    truncate = crop  # the same by another name

    def detach(self) -> TitansCache:
        """Cuts the states off from the graph, in place: where truncated backpropagation through time ends."""
        for layer in self.layers:
            layer._map(Tensor.detach)
        return self

    @property
    def batch_size(self) -> int:
        """How many sequences the cache holds; -1 before the first token."""
        return self.layers[0].batch_size if self.layers else -1

    @property
    def nbytes(self) -> int:
        """What the states weigh, shared tensors counted once."""
        tensors = {x.data_ptr(): x for _, x in _leaves("", self.states) if isinstance(x, Tensor)}
        return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors.values())

    def check(self, config: TitansConfig, batch_size: int) -> None:
        """Raises a ``ValueError`` if the cache does not fit a model and a batch."""
        if self._fits is not config:
            theirs = config.fingerprint()
            # A file of an earlier version lacks the fields that came later: its model had their defaults.
            mine = {name: getattr(type(config), name, None) for name in theirs} | self.fingerprint
            different = [name for name in theirs if mine[name] != theirs[name]]
            if different:
                name = different[0]
                raise ValueError(
                    f"the cache comes from a model with {name}={mine[name]!r}; this one has {name}={theirs[name]!r}"
                )
            self._fits = config
        if self.batch_size not in (-1, batch_size):
            raise ValueError(
                f"the cache holds {self.batch_size} sequences and the batch has {batch_size}; expected the same"
            )

    def pack(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The states as named tensors, and the words that :meth:`unpack` needs beside them: what a file can hold."""
        words = {
            "config": json.dumps(self.fingerprint),
            "seen": str(self.seen),
            "types": json.dumps(dict(_types("", self.states))),
        }
        batch_size = self.batch_size

        def each(x: Tensor | int) -> Tensor:
            return x if isinstance(x, Tensor) else torch.full((batch_size,), x)

        return {path: each(x) for path, x in _leaves("", self.states)}, words

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> TitansCache:
        """The inverse of :meth:`pack`; a ``ValueError``, ``KeyError`` or ``TypeError`` where something is missing."""
        types = json.loads(words["types"])
        cache = cls.__new__(cls)
        cache.fingerprint = json.loads(words["config"])
        count = cache.fingerprint["num_hidden_layers"]
        Cache.__init__(cache, layers=[TitansCacheLayer(_build(str(i), types, tensors)) for i in range(count)])
        cache.seen = int(words["seen"])
        cache._fits = None
        return cache

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache as one safetensors file, under a temporary name first."""
        tensors, words = self.pack()
        metadata = {"format": FORMAT, "version": VERSION, **words}
        write_tensors(path, tensors, metadata | {"digest": digest(tensors, metadata)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> TitansCache:
        """Reads a cache written by :meth:`save`; a ``ValueError`` says what is wrong with any other file."""
        tensors, metadata = read_tensors(path, device, FORMAT, VERSION, "cache")
        if metadata.pop("digest", None) != digest(tensors, metadata):
            raise ValueError(f"{path} is damaged: its contents are not what was saved")
        try:
            return cls.unpack(tensors, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from error


def _own(x: Tensor) -> Tensor:
    """x, or a copy of it where it is a view that would keep more alive."""
    if torch.compiler.is_compiling():
        return x.clone()  # no storage can be asked yet
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        names = [f.name for f in fields(value)]
        if isinstance(value, MemoryState) and value.anchor is value.weights:
            names.remove("anchor")
        yield from ((name, getattr(value, name)) for name in names)
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), item) for index, item in enumerate(value))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Tensor | int]]:
    """Every tensor of nested states, and every number that all sequences share, by its path."""
    if isinstance(value, (Tensor, int)):
        yield path, value
    for name, part in _parts(value):
        yield from _leaves(f"{path}.{name}" if path else name, part)


def _types(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """What is not a tensor: the class of each state, the length of each tuple, a word after a colon."""
    if is_dataclass(value):
        yield path, type(value).__name__
    elif isinstance(value, str):
        yield path, f":{value}"
    elif isinstance(value, tuple):
        yield path, str(len(value))
    for name, part in _parts(value):
        yield from _types(f"{path}.{name}" if path else name, part)


def _build(path: str, types: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`_leaves` and :func:`_types` together."""
    kind = types.get(path)
    if kind is None:
        return tensors.get(path)
    if kind.startswith(":"):
        return kind[1:]
    if kind not in TYPES:
        return tuple(_build(f"{path}.{index}", types, tensors) for index in range(int(kind)))
    parts = {f.name: _build(f"{path}.{f.name}", types, tensors) for f in fields(TYPES[kind])}
    if kind == "MemoryState" and parts["anchor"] is None:
        parts["anchor"] = parts["weights"]
    for name in parts.keys() & {"length", "position"}:
        parts[name] = aligned(parts[name])
    return TYPES[kind](**parts)


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """What tells a file with these contents from any other."""
    found = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        found.update(x.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
