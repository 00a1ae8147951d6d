"""The neural memory of a scope: a small network that takes one step of gradient descent per text."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.files import write_json
from titans.ops import MemoryMLP, MemoryState, neural_memory_chunked
from titans.ops.state import read_tensors, write_tensors

FORMAT, VERSION = "titans.NeuralTextMemory", "2"
CONFIG_FILE, WEIGHTS_FILE, FIGURES_FILE = "config.json", "memory.safetensors", "figures.json"
GRID = 2.0**20  # starting weights are multiples of its inverse, so that every machine makes the same
MAX_NORM = 10.0  # no row of what was learned, nor of the momentum, is longer than this at the end of a chunk


@dataclass(frozen=True)
class NeuralConfig:
    """The shape and the rule of a text memory.

    Args:
        width: of the encoder's vectors.
        dim: of the memory; 0: as wide as the encoder's vectors.
        depth: layers of the memory network, with SiLU between them.
        bias: the memory network has biases.
        theta, eta, alpha: step, momentum and forgetting, each in [0, 1]; with ``data_dependent``, where they start.
        data_dependent: step, momentum and forgetting are learned functions of the text.
        chunk_size: texts per chunk, which take their gradients at the chunk's first weights; part of the model.
        bounded: divide each step by how far it moves the answer and by how crowded its chunk is, so that the memory
            stays finite whatever is written to it; off is the rule as the paper writes it.
        first_order: training treats the weights at which the memory takes its gradient as constants.
        seed: of the starting weights.
    """

    width: int = 384
    dim: int = 0
    depth: int = 1
    bias: bool = False
    theta: float = 0.03
    eta: float = 0.9
    alpha: float = 0.002
    data_dependent: bool = False
    chunk_size: int = 16
    bounded: bool = True
    first_order: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = {"int": (int,), "float": (int, float), "bool": (bool,)}
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if not isinstance(value, kinds[kind]) or (kind != "bool" and isinstance(value, bool)):
                raise ValueError(f"{field.name} is {value!r}; expected a value of type {kind}")
        for name, least in {"width": 1, "dim": 0, "depth": 1, "chunk_size": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least {least}")
        for name in ("theta", "eta", "alpha"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; expected a number in [0, 1]")
            if self.data_dependent and not 0 < value < 1:
                raise ValueError(f"{name} is {value}; expected a number between 0 and 1 for gates to start from")
        object.__setattr__(self, "dim", self.dim or self.width)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON takes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> NeuralConfig:
        """The inverse of :meth:`to_dict`."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no field of a text memory; expected {', '.join(sorted(known))}")
        return cls(**given)


@dataclass(frozen=True)
class ScopeMemory:
    """What is kept of a scope's texts, in their order.

    Attributes:
        sealed: the memory after all whole chunks, batch 1 and one head.
        open: (m, width), the vectors of the texts since; fewer than a chunk.
        count: texts in all.
    """

    sealed: MemoryState
    open: Tensor
    count: int


class NeuralTextMemory(nn.Module):
    """Projections and the learned start of a text memory; the memories themselves are values.

    A scope's memory is a pure function of the ordered list of its texts' vectors. Texts 0 to 15 are its first chunk,
    and so on. All reads and gradients of a chunk are taken at the chunk's first weights:
    ``neural_memory_recurrent(chunk_size=16)`` is the definition. Every chunk is computed by itself and in one shape,
    so not one bit of a memory depends on whether its texts came one by one or all at once.
    """

    def __init__(self, config: NeuralConfig = NeuralConfig()) -> None:  # noqa: B008 (frozen)
        super().__init__()
        self.config = config
        dim = config.dim
        self.to_dim = nn.Linear(config.width, dim, bias=False)  # W_proj
        self.to_key = nn.Linear(dim, dim, bias=False)  # W_K
        self.to_value = nn.Linear(dim, dim, bias=False)  # W_V
        self.to_query = nn.Linear(dim, dim, bias=False)  # W_Q
        self.to_gates = nn.Linear(dim, 3) if config.data_dependent else None
        self.initial = nn.ParameterList(
            torch.empty(out, inside + int(config.bias)) for inside, out in pairwise([dim] * (config.depth + 1))
        )  # M_0
        self.network = MemoryMLP(bias=config.bias)
        self.reset_parameters()

    @classmethod
    def default(cls, width: int = 384) -> NeuralTextMemory:
        """The untrained memory for an encoder of this width; the same on every machine."""
        return cls(NeuralConfig(width=width)).requires_grad_(False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Projections that preserve the encoder's vectors, and a memory that answers 0."""
        dim, width = self.config.dim, self.config.width
        generator = torch.Generator().manual_seed(self.config.seed)
        self.to_dim.weight.copy_(torch.eye(dim) if dim == width else _orthogonal(dim, width, generator))
        for linear in (self.to_key, self.to_value, self.to_query):
            linear.weight.copy_(torch.eye(dim))
        for index, weight in enumerate(self.initial):
            last = index + 1 == self.config.depth
            weight.copy_(torch.zeros_like(weight) if last else _uniform(weight.shape, generator))
        if self.to_gates is not None:
            start = (self.config.theta, self.config.eta, self.config.alpha)
            nn.init.zeros_(self.to_gates.weight)
            self.to_gates.bias.copy_(torch.tensor([math.log(value / (1 - value)) for value in start]))

    def project(self, vectors: Tensor) -> Tensor:
        """The encoder's vectors (..., width) as unit vectors (..., dim)."""
        return _unit(self.to_dim(vectors))

    @property
    def in_encoder_space(self) -> bool:
        """Whether a unit vector of the encoder is its own projection, as it is by default."""
        weight = self.to_dim.weight
        return weight.shape[0] == weight.shape[1] and torch.equal(weight, torch.eye(len(weight)))

    def create(self, batch: int = 1) -> MemoryState:
        """The learned start M_0 for ``batch`` scopes, part of the graph."""
        return MemoryState.create([weight.expand(batch, 1, -1, -1) for weight in self.initial])

    def empty(self) -> ScopeMemory:
        """The memory of a scope without texts."""
        none = self.to_dim.weight.new_zeros(0, self.config.width)
        with torch.no_grad():
            return ScopeMemory(self.create().map(torch.clone), none, 0)

    @torch.no_grad()
    def write(self, memory: ScopeMemory, vectors: Tensor | np.ndarray) -> tuple[ScopeMemory, Tensor]:
        """Writes texts to a memory, in their order.

        Args:
            memory: the memory before; it is not changed.
            vectors: (n, width), of the texts.

        Returns:
            the new memory, and how surprising each text was (n,): ||M(k) - v||^2 at the memory after all texts before.
        """
        texts = self._check(vectors)
        size, known = self.config.chunk_size, len(memory.open)
        waiting = torch.cat([memory.open, texts])
        sealed, surprises = memory.sealed, []
        for chunk in waiting.split(size):
            # Always the shape of a whole chunk: another shape may round differently. The padding comes after the texts
            # and has no influence on them.
            padded = F.pad(chunk, (0, 0, 0, size - len(chunk)))
            state, surprise = self.write_chunk(sealed, padded[None])
            surprises.append(surprise[0, : len(chunk)])
            if len(chunk) == size:
                sealed, waiting = state, waiting[size:]
        new = torch.cat([*surprises, texts.new_zeros(0)])[known:]
        return ScopeMemory(sealed, waiting.clone(), memory.count + len(texts)), new

    @torch.no_grad()
    def current(self, memory: ScopeMemory) -> MemoryState:
        """The memory after all its texts, those of the open chunk included."""
        if not len(memory.open):
            return memory.sealed
        return self.write_chunk(memory.sealed, memory.open[None])[0]

    def answer(self, state: MemoryState, x: Tensor) -> Tensor:
        """M(W_Q x), (batch, n, dim) -> (batch, n, dim)."""
        query = _unit(self.to_query(x)).unsqueeze(1)
        result: Tensor = self.network(state.weights, query).squeeze(1)
        return result

    def unexpected(self, states: Sequence[MemoryState], vectors: Tensor) -> Tensor:
        """What memories leave of questions: z = x, then z - M(W_Q z) for each of them, of length 1.

        Key and value are of the same text, so a memory has learned what its texts have in common: the names of the
        speakers, what they always talk about. What is left of a question without that is what tells one text from the
        others. With M the ridge regression of the texts X on themselves the rest is (X^T X + lambda)^-1 x up to a
        factor: the question, whitened by the scope's own texts.

        Args:
            states: of the scopes that are searched, the last written first. A linear memory that learns without
                momentum and forgetting has I - M = (I - M_1)(I - M_2) if it wrote all texts of M_1 and then those of
                M_2: read in this order, the memories of several scopes do what one memory of all their texts would.
            vectors: (n, width) of the questions, or (batch, n, width) for states of as many scopes each.

        Returns:
            (n, dim) or (batch, n, dim), with gradients.
        """
        z = self.project(vectors).reshape(-1, vectors.shape[-2], self.config.dim)
        for state in states:
            z = _unit(z - self.answer(state, z))
        return z.reshape(*vectors.shape[:-1], -1)

    def associate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unit keys and values of projected texts, (..., dim) each."""
        return _unit(self.to_key(x)), _unit(self.to_value(x))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """theta, alpha, eta (batch, 1, n) for projected texts (batch, n, dim)."""
        if self.to_gates is not None:
            theta, eta, alpha = torch.sigmoid(self.to_gates(x)).unsqueeze(1).unbind(-1)
            return theta, alpha, eta
        config = self.config
        shape = (x.shape[0], 1, x.shape[1])
        theta, alpha, eta = (x.new_full(shape, value) for value in (config.theta, config.alpha, config.eta))
        return theta, alpha, eta

    def write_chunk(self, state: MemoryState, vectors: Tensor) -> tuple[MemoryState, Tensor]:
        """Writes at most a chunk to several scopes at once, with gradients.

        Args:
            state: the memory at the chunk's start.
            vectors: (batch, n, width), n no more than ``chunk_size``.

        Returns:
            the memory after the texts, and how surprising each was (batch, n).
        """
        size = self.config.chunk_size
        if vectors.shape[1] > size:
            raise ValueError(f"vectors has {vectors.shape[1]} texts; expected no more than a chunk of {size}")
        x = self.project(vectors)
        k, v = self.associate(x)
        theta, alpha, eta = self.gates(x)
        # The query of text t is the key of text t + 1: its answer is what the memory knows when that text comes.
        following = torch.cat([k[:, 1:], k[:, -1:]], dim=1)
        rest = [weight.expand(len(vectors), 1, -1, -1) for weight in self.initial]
        answers, new = neural_memory_chunked(
            following.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), theta, alpha, eta, state, size,
            network=self.network, rest=rest, bounded=self.config.bounded, max_norm=MAX_NORM,
            first_order=self.config.first_order, check_values=False,
        )[:2]  # fmt: skip
        first = self.network(state.weights, k[:, :1].unsqueeze(1))
        found = torch.cat([first, answers[:, :, :-1]], dim=2).squeeze(1)
        return MemoryState.create(new.weights, new.momentum), (found - v).square().sum(-1)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any setting or weight: the version of what is written with it."""
        digest = hashlib.sha256(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().float().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def pack(self, memory: ScopeMemory) -> bytes:
        """A scope's memory as bytes, every bit of it."""
        from safetensors.torch import save

        tensors = {"open": memory.open, "count": torch.tensor(memory.count)}
        for name, group in (("weights", memory.sealed.weights), ("momentum", memory.sealed.momentum)):
            tensors |= {f"{name}.{index}": tensor for index, tensor in enumerate(group)}
        return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})

    def unpack(self, data: bytes) -> ScopeMemory:
        """The inverse of :meth:`pack`; a ``ValueError`` for bytes that hold no memory of this shape."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(f"the bytes hold no scope's memory: {error}") from error
        width, depth = self.config.width, self.config.depth
        count = int(tensors["count"]) if "count" in tensors and tensors["count"].ndim == 0 else -1
        shapes = {"open": (count % self.config.chunk_size, width), "count": ()}
        for group in ("weights", "momentum"):
            shapes |= {f"{group}.{i}": (1, 1, *weight.shape) for i, weight in enumerate(self.initial)}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if count < 0 or found != shapes:
            wrong = next((name for name in shapes if found.get(name) != shapes[name]), "count")
            raise ValueError(
                f"the bytes hold a memory with {wrong} of shape {found.get(wrong)}; expected {shapes[wrong]}"
            )
        device = self.to_dim.weight.device
        weights, momentum = (
            [tensors[f"{group}.{i}"].to(device) for i in range(depth)] for group in ("weights", "momentum")
        )
        sealed = MemoryState.create(weights, momentum)
        return ScopeMemory(sealed, tensors["open"].to(device), count)

    def save(self, folder: str | Path, figures: Mapping[str, Any] | None = None, overwrite: bool = False) -> None:
        """Writes config, weights and ``figures`` to a folder, under a temporary name first.

        A folder that is not empty is refused, unless it holds a memory and ``overwrite`` is given.
        """
        target = Path(folder)
        check_folder(target, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        old = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old")
        temporary.mkdir()
        try:
            for name, content in ((CONFIG_FILE, self.config.to_dict()), (FIGURES_FILE, figures)):
                if content is not None:
                    write_json(temporary / name, content)
            write_tensors(temporary / WEIGHTS_FILE, self.state_dict(), {"format": FORMAT, "version": VERSION})
            if target.exists():
                target.rename(old)
            temporary.rename(target)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path) -> NeuralTextMemory:
        """A memory written by :meth:`save`; a ``ValueError`` says what is wrong with any other folder."""
        source = Path(folder)
        file = source / CONFIG_FILE
        if not file.is_file():
            raise ValueError(f"{file} is not there; expected a folder written by `titans text train`")
        tensors, _ = read_tensors(source / WEIGHTS_FILE, "cpu", FORMAT, VERSION, "text memory")
        try:
            given = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"{file} holds {type(given).__name__}; expected the fields of a text memory")
        memory = cls(NeuralConfig.from_dict(given))
        expected = {name: tuple(tensor.shape) for name, tensor in memory.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            wrong = next(name for name in {**expected, **found} if found.get(name) != expected.get(name))
            raise ValueError(
                f"{source} has {wrong} of shape {found.get(wrong)}; its config expects {expected.get(wrong)}"
            )
        memory.load_state_dict(tensors)
        return memory.requires_grad_(False)

    def _check(self, given: Tensor | np.ndarray) -> Tensor:
        """The vectors as the memory takes them: on its device, in its dtype."""
        vectors = torch.as_tensor(given).to(self.to_dim.weight)
        if vectors.ndim != 2 or vectors.shape[1] != self.config.width:
            raise ValueError(f"vectors has shape {tuple(vectors.shape)}; expected (n, {self.config.width})")
        if not bool(torch.isfinite(vectors).all()):
            raise ValueError("vectors has values that are NaN or infinite; expected finite ones")
        return vectors


def add_previous(projected: Tensor, share: float) -> Tensor:
    """Adds to each text (..., n, dim) a share of the one before it: a question in a dialogue is part of its answer."""
    return torch.cat([projected[..., :1, :], projected[..., 1:, :] + share * projected[..., :-1, :]], dim=-2)


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raises a ``ValueError`` if a memory may not be saved there."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder to write a text memory to")
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder} has other files in it; expected a new or empty folder")
    if not overwrite:
        raise ValueError(f"{folder} has a text memory in it; expected a new folder, or --overwrite to replace it")


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _uniform(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Values whose product with a unit vector has variance 1 / inputs; uniform, which has the same bits everywhere."""
    bound = math.sqrt(3 / shape[-1])
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    return torch.round(drawn * bound * GRID) / GRID


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """(rows, columns) with orthonormal rows, or columns if there are fewer of them."""
    drawn = torch.rand(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64) * 2 - 1
    basis, triangle = torch.linalg.qr(drawn)
    basis = basis * torch.sign(torch.diagonal(triangle))
    return torch.round((basis if rows >= columns else basis.mT) * GRID) / GRID
