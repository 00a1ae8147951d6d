"""What an untrained memory can do: how much it holds, for how long, and what surprises it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.evaluation.score import reading
from titans.layers import NeuralMemory
from titans.layers.record import memories_of, record_memory
from titans.models import TitansForCausalLM
from titans.ops import MemoryMLP, MemoryState, neural_memory_exact
from titans.tasks.recall import Recall
from titans.words import require_whole

DEPTHS, WIDTHS = (1, 2, 3, 4), (16, 32, 64, 128)
THETAS = (0.05, 0.1, 0.25, 0.5, 1.0)
ETAS = (0.0, 0.9)
LIMIT = 1 << 14  # the most pairs that a search tries
COAST = 64  # tokens without a step after which no momentum is left: 0.9 ** 64 is 0.001
PAUSE = 32  # fillers between facts and what comes after them
KNOWN, FILLERS, NEW, AGAIN, CHANGED = "facts", "fillers", "new facts", "same again", "values swapped"
PARTS = (KNOWN, FILLERS, NEW, AGAIN, CHANGED)  # of the sequences that show what surprises


def capacity(
    depth: int,
    width: int,
    eta: float = 0.0,
    thetas: Sequence[float] = THETAS,
    passes: int = 1,
    seeds: int = 8,
    share: float = 0.9,
) -> dict[str, Any]:
    """How many pairs of random unit vectors an untrained memory holds.

    The pairs are written with the exact, bounded rule and nothing is forgotten; momentum runs out before the keys are
    read. A pair is held if what is read is nearer (cosine) to its own value than to that of any other. The capacity is
    the largest number of pairs of which at least ``share`` are held, as a mean over the seeds and with the best step,
    found by doubling and bisection.

    Args:
        eta: momentum; the steps are ``theta * (1 - eta)``, as in :class:`titans.NeuralMemory`.
        thetas: steps to try.
        passes: how often all pairs are written, in the same order.
        seeds: how many memories there are, each with its own start, keys and values.

    Returns:
        depth, width, eta, weights (numbers of the memory), capacity, and at that capacity theta, recall and recalls
        (one per seed).
    """
    _require_at_least_one(thetas=thetas)
    require_whole(passes=passes, seeds=seeds)
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; expected more than 0 and at most 1")
    memory = _fresh(depth, width, seeds, len(thetas))
    steps = torch.tensor(thetas).view(1, -1, 1)

    def try_pairs(count: int) -> tuple[float, dict[str, Any]]:
        keys, values = _unit_vectors(2, seeds, count, width)
        k, v = (x.expand(-1, len(thetas), -1, -1) for x in (keys, values))
        state = memory.write(memory.start, k.repeat(1, 1, passes, 1), v.repeat(1, 1, passes, 1), steps, 0.0, eta)
        said = F.normalize(memory.network(memory.settle(state, eta).weights, k), dim=-1)
        nearest = (said @ values.mT).argmax(-1)  # (seeds, steps, pairs)
        recall = (nearest == torch.arange(count)).double().mean(-1)
        best = int(recall.mean(0).argmax())
        found = {"theta": thetas[best], "recalls": recall[:, best].tolist()}
        return fmean(found["recalls"]), found

    with torch.no_grad():
        low, high, best = 1, 2, try_pairs(1)
        while high <= LIMIT and (tried := try_pairs(high))[0] >= share:
            low, high, best = high, 2 * high, tried
        while high - low > 1 and low < LIMIT:
            middle = (low + high) // 2
            if (tried := try_pairs(middle))[0] >= share:
                low, best = middle, tried
            else:
                high = middle
    weights = sum(weight[0, 0].numel() for weight in memory.start.weights)
    recall, found = best
    return {"depth": depth, "width": width, "eta": eta, "weights": weights, "capacity": low, "recall": recall, **found}


def decay_of_association(
    alphas: Sequence[float] = (0.0, 0.001, 0.01, 0.1),
    etas: Sequence[float] = ETAS,
    writes: Sequence[int] = (0, 1, 4, 16, 64, 256, 1024),
    depth: int = 2,
    width: int = 64,
    theta: float = 0.5,
    samples: int = 32,
) -> dict[str, Any]:
    """How much is left of an association after more writes of random pairs of unit vectors.

    Args:
        alphas: forgetting of every write, which returns the memory to its start.
        etas: momentum; the steps are ``theta * (1 - eta)``.
        writes: after how many more pairs the key is read.
        samples: how many memories there are, each with its own start and pairs.

    Returns:
        ``{"rows": [...]}``: alpha, eta, writes, and what M(k) says of the value v, which is of length 1: left, the
        mean of <M(k), v> (1 is all of it), cosine, the mean cosine, and lefts and cosines, one per sample.
    """
    _require_at_least_one(alphas=alphas, etas=etas, writes=writes)
    if min(writes) < 0:
        raise ValueError(f"writes has {min(writes)}; expected at least 0")
    require_whole(samples=samples)
    memory = _fresh(depth, width, samples, 1)
    keys, values = _unit_vectors(2, samples, 1 + max(writes), width)
    key, value = keys[:, :, :1], values[:, :, :1]
    step = torch.full((1, 1, 1), theta)
    rows = []
    for alpha in alphas:
        for eta in etas:
            state, done = memory.start, 0
            for count in sorted(set(writes)):
                with torch.no_grad():
                    k, v = keys[:, :, done : count + 1], values[:, :, done : count + 1]
                    state, done = memory.write(state, k, v, step, alpha, eta), count + 1
                    said = memory.network(state.weights, key)
                    lefts = (said * value).sum(-1).flatten().tolist()
                    cosines = F.cosine_similarity(said, value, dim=-1).flatten().tolist()
                means = {"left": fmean(lefts), "cosine": fmean(cosines)}
                lists = {"lefts": lefts, "cosines": cosines}
                rows.append({"alpha": alpha, "eta": eta, "writes": count, **means, **lists})
    return {"rows": rows}


def surprise_of_facts(
    model: TitansForCausalLM, task: Recall | None = None, distance: int = PAUSE, sequences: int = 64, seed: int = 0
) -> dict[str, Any]:
    """How much facts that are new, known or changed surprise the memories of a model.

    Every sequence has the pairs of the task, fillers, and then as many pairs, in three versions, each read from the
    beginning: other pairs; the same ones again; and the same keys with each other's values, so that all tokens are
    known and only their association is new.

    Args:
        task: whose pairs and fillers are read; None: :class:`titans.tasks.recall.Recall` with its defaults.
        distance: fillers before the facts that are judged.

    Returns:
        ``parts``, [name, number of tokens] of :data:`PARTS`, and ``layers``, for each layer and token of the parts the
        norm of the gradient, all heads together, as a mean over the sequences.
    """
    task = task or Recall()
    vocabulary = model.config.vocab_size
    if vocabulary < task.vocab_size:
        raise ValueError(f"the model has {vocabulary} tokens; expected at least {task.vocab_size}, those of the task")
    if not 2 <= task.pairs <= min(task.num_keys, task.num_values) // 2:
        raise ValueError(f"the task has {task.pairs} pairs; expected 2 to half the keys and values")
    if distance < 0 or sequences < 1:
        raise ValueError(f"distance is {distance} and sequences is {sequences}; expected at least 0 and at least 1")
    if not memories_of(model):
        raise ValueError("the model has no memory (use_memory is False); there is nothing to measure")
    rng = random.Random(f"facts {seed}")
    drawn = [draw_facts(rng, task, distance) for _ in range(sequences)]
    start, facts = 2 * task.pairs + distance, 2 * task.pairs
    layers: list[Tensor] = []
    with reading(model):
        for fact in (NEW, AGAIN, CHANGED):
            ids = torch.tensor([versions[fact] for versions in drawn], device=model.device)
            with record_memory(model) as records:
                model(ids, use_cache=False)
            norms = [torch.cat([each.gradient_norm for each in record.surprise], dim=-1) for record in records]
            read = torch.stack([norm[..., -start - facts :].float().square().sum(1).sqrt().mean(0) for norm in norms])
            layers.append(read if not layers else read[:, start:])
    lengths = (facts, distance, facts, facts, facts)
    parts = [[name, length] for name, length in zip(PARTS, lengths, strict=True)]
    return {"parts": parts, "layers": torch.cat(layers, dim=1).tolist()}


def draw_facts(rng: random.Random, task: Recall, distance: int) -> dict[str, list[int]]:
    """A sequence for :func:`surprise_of_facts` in its three versions, which differ in their last pairs."""
    keys = rng.sample(range(task.num_keys), 2 * task.pairs)
    values = rng.sample(range(task.num_keys, task.num_keys + task.num_values), 2 * task.pairs)
    known, given = keys[: task.pairs], values[: task.pairs]
    before = _join(known, given) + task.draw_fillers(rng, distance)
    facts = {
        NEW: _join(keys[task.pairs :], values[task.pairs :]),
        AGAIN: _join(known, given),
        CHANGED: _join(known, given[1:] + given[:1]),
    }
    return {name: before + tokens for name, tokens in facts.items()}


def _join(keys: Sequence[int], values: Sequence[int]) -> list[int]:
    return [token for pair in zip(keys, values, strict=True) for token in pair]


@torch.no_grad()
def bound(model: TitansForCausalLM) -> TitansForCausalLM:
    """The model, whose memories now take the token before each value as its key, as training teaches some."""
    for memory in memories_of(model):
        if memory.conv is None or len(memory.conv) < 2:
            raise ValueError("the model's memories have no convolution of two tokens; expected one that hands on a key")
        inner = memory.heads * memory.head_dim
        memory.conv[:, : 2 * inner] = 0
        memory.conv[-2, : 2 * inner] = 1  # queries and keys
    return model


def mean_surprise(found: Mapping[str, Any], name: str, layer: int = 0) -> float:
    """From what :func:`surprise_of_facts` found: the mean over the values of a part's facts, or over all fillers."""
    start = 0
    for part, count in found["parts"]:
        if part == name:
            values = found["layers"][layer][start : start + count]
            return fmean(values if part == FILLERS else values[1::2])
        start += count
    raise ValueError(f"name is {name!r}; expected a part of the sequences")


@dataclass(frozen=True)
class _Memory:
    """Untrained memories with one head, written with the exact, bounded rule."""

    network: MemoryMLP
    max_norm: float
    start: MemoryState

    def write(self, state: MemoryState, k: Tensor, v: Tensor, theta: Tensor, alpha: float, eta: float) -> MemoryState:
        """The state after pairs (seeds, copies, time, width), with steps ``theta * (1 - eta)``, theta (1, copies, 1).

        Forgetting returns to the start.
        """
        shape = k.shape[:3]
        return neural_memory_exact(
            k, k, v, (theta * (1 - eta)).expand(shape),
            k.new_full(shape, alpha) if alpha else None, k.new_full(shape, eta) if eta else None,
            state, network=self.network, rest=self.start.weights if alpha else None, bounded=True,
            max_norm=self.max_norm,
        )[1]  # fmt: skip

    def settle(self, state: MemoryState, eta: float) -> MemoryState:
        """The state once its momentum has run out, with no further step."""
        if not eta:
            return state
        first = state.weights[0]
        nothing = first.new_zeros(*first.shape[:2], COAST, first.shape[-1])
        return self.write(state, nothing, nothing, first.new_zeros(1, 1, 1), 0.0, eta)


def _fresh(depth: int, width: int, seeds: int, copies: int) -> _Memory:
    """Memories with (seeds, copies) starts; copies are equal."""
    starts = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for seed in range(seeds):
            torch.manual_seed(seed)
            memory = NeuralMemory(width, heads=1, depth=depth, conv_kernel=0)
            starts.append(memory.init_state(1).weights)
    weights = [torch.cat(layer).repeat(1, copies, 1, 1) for layer in zip(*starts, strict=True)]
    return _Memory(memory.network, memory.max_norm, MemoryState.create(weights))


def _unit_vectors(sets: int, samples: int, count: int, width: int) -> Tensor:
    """Random vectors of length 1, (sets, samples, 1, count, width)."""
    return F.normalize(torch.randn(sets, samples, 1, count, width, generator=torch.Generator().manual_seed(0)), dim=-1)


def _require_at_least_one(**lists: Sequence[float]) -> None:
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name} is empty; expected at least one number")
