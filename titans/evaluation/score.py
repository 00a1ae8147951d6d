"""Which answers of a task a model gets right, with its memory as it is or tampered with at the question."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from titans.evaluation.measure import CONTROLS, PIECE
from titans.layers import BlockState
from titans.layers.record import memories_of
from titans.models import TitansCache, TitansForCausalLM
from titans.tasks import Example

TOKENS_AT_ONCE = 16384  # per batch, so that many short sequences and few long ones take the same memory


@dataclass(frozen=True)
class Score:
    """One answer.

    Attributes:
        right: whether every one of its tokens was the likeliest.
        loss: the sum over its tokens, in nats.
        tokens: how many it has.
    """

    right: bool
    loss: float
    tokens: int


def score(
    model: PreTrainedModel,
    examples: Sequence[Example],
    control: str | None = None,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> list[list[Score]]:
    """The scores of the answers of each example.

    Args:
        model: ours, which reads piece by piece, or a causal language model of transformers, which reads all at once.
        control: a key of :data:`CONTROLS`; only for ours.
        tokens_at_once: how many tokens are read per call, at most.
    """
    if control is not None and control not in CONTROLS:
        raise ValueError(f"control is {control!r}; expected one of {', '.join(CONTROLS)}")
    if control is not None and not _has_memory(model):
        raise ValueError(f"control is {control!r} and the model has no memory; expected a model that has one")
    if control == "swap" and len(examples) < 2:
        raise ValueError("control is 'swap' and there is one sequence; expected at least two")
    check(model, examples)
    with reading(model):
        if control in ("reset", "swap"):
            return _score_tampered(model, examples, control)
        with _without_writes(model, control == "no-writes"):
            return _score_plain(model, examples, tokens_at_once)


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[None]:
    """The model reads without gradients and as it is used; afterwards it is as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def check(model: PreTrainedModel, examples: Sequence[Example]) -> None:
    """Raises a ``ValueError`` if the model cannot read the examples."""
    known = model.get_input_embeddings().num_embeddings
    largest = max((max(e.tokens) for e in examples), default=0)
    if largest >= known:
        raise ValueError(f"the task has the token {largest} and the model knows {known}; expected a larger vocabulary")
    limit = None if isinstance(model, TitansForCausalLM) else getattr(model.config, "max_position_embeddings", None)
    longest = max((len(e.tokens) for e in examples), default=0)
    if limit is not None and longest > limit:
        raise ValueError(f"a sequence has {longest:,} tokens; expected at most {limit:,}, the model's longest context")


def _has_memory(model: PreTrainedModel) -> bool:
    return bool(memories_of(model))


@contextmanager
def _without_writes(model: PreTrainedModel, off: bool) -> Iterator[None]:
    memories = memories_of(model) if off else []
    before = [memory.writes for memory in memories]
    for memory in memories:
        memory.writes = False
    try:
        yield
    finally:
        for memory, writes in zip(memories, before, strict=True):
            memory.writes = writes


def _score_plain(model: PreTrainedModel, examples: Sequence[Example], tokens_at_once: int) -> list[list[Score]]:
    scores: list[list[Score]] = [[] for _ in examples]
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].tokens))
    while order:
        longest = len(examples[order[-1]].tokens)
        count = max(1, tokens_at_once // max(1, min(longest, _piece(model, longest))))
        chosen, order = order[-count:], order[:-count]
        batch = [examples[index] for index in chosen]
        # padding at the end changes nothing before it
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, each in enumerate(batch):
            ids[row, : len(each.tokens)] = torch.tensor(each.tokens)
        places = sorted({place for each in batch for place in _places(each)})
        found = dict(zip(places, _log_probabilities(model, ids, places), strict=True))
        for row, index in enumerate(chosen):
            scores[index] = _judge(examples[index], {place: rows[row] for place, rows in found.items()})
    return scores


def _piece(model: PreTrainedModel, length: int) -> int:
    """Tokens per call: our models can go on from one call to the next."""
    return PIECE if isinstance(model, TitansForCausalLM) else length


def _places(each: Example) -> list[int]:
    """Positions whose prediction is judged."""
    return [answer.place - 1 + i for answer in each.answers for i in range(len(answer.wanted))]


def _judge(each: Example, predicted: dict[int, Tensor]) -> list[Score]:
    """The scores of the answers, from the log probabilities (vocabulary,) at each of their places."""
    scores = []
    for answer in each.answers:
        rows = torch.stack([predicted[answer.place - 1 + i] for i in range(len(answer.wanted))])
        wanted = torch.tensor(answer.wanted, device=rows.device)
        loss = float(F.nll_loss(rows, wanted, reduction="sum"))
        scores.append(Score(bool((rows.argmax(-1) == wanted).all()), loss, len(wanted)))
    return scores


def _log_probabilities(
    model: PreTrainedModel, ids: Tensor, places: Sequence[int], cache: Any = None, offset: int = 0
) -> list[Tensor]:
    """(batch, vocabulary) for each place; ``offset`` is the place of the first token of ``ids``."""
    goes_on = isinstance(model, TitansForCausalLM)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    found: list[Tensor] = []
    step = _piece(model, ids.shape[1])
    for start in range(0, ids.shape[1], step):
        part = ids[:, start : start + step].to(model.device)
        here = [p - offset - start for p in places if start <= p - offset < start + step]
        options: dict[str, Any] = {"use_cache": goes_on}
        if goes_on:
            options["past_key_values"] = cache
        if keeps:
            options["logits_to_keep"] = torch.tensor(here or [0], device=model.device)
        output = model(input_ids=part, **options)
        cache = output.past_key_values if goes_on else None
        logits = output.logits[:, : len(here)] if keeps else output.logits[:, here]
        found += list(logits.float().log_softmax(-1).unbind(1))
    return found


def _score_tampered(model: PreTrainedModel, examples: Sequence[Example], control: str) -> list[list[Score]]:
    """Each sequence by itself up to its question, and from there with a memory that it did not make."""
    assert isinstance(model, TitansForCausalLM)
    caches = []
    for each in examples:
        if not 0 < each.boundary < len(each.tokens):
            raise ValueError(f"control is {control!r} and a sequence has no separate question; expected another task")
        cache: Any = None
        for part in torch.tensor([each.tokens[: each.boundary]], device=model.device).split(PIECE, dim=1):
            cache = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        caches.append(cache)
    scores = []
    for index, each in enumerate(examples):
        given = caches[(index + 1) % len(caches)] if control == "swap" else None
        cache = _with_memory(model, caches[index], given)
        rest = torch.tensor([each.tokens[each.boundary :]])
        places = sorted(_places(each))
        found = dict(zip(places, _log_probabilities(model, rest, places, cache, each.boundary), strict=True))
        scores.append(_judge(each, {place: rows[0] for place, rows in found.items()}))
    return scores


def _with_memory(model: TitansForCausalLM, cache: TitansCache, other: TitansCache | None) -> TitansCache:
    """A copy of a cache with the memory of another, or with a fresh one; attention and convolutions stay its own."""
    made = cache.copy()
    blocks: Any = model.model.layers
    for index, (block, layer) in enumerate(zip(blocks, made.layers, strict=True)):
        state = layer.state
        assert state is not None
        if state.memory is None:
            continue
        if other is None:
            source: BlockState = block._restarted(state, torch.ones(1, dtype=torch.bool, device=model.device))
        else:
            source = other.layers[index].state
        assert source.memory is not None
        memory = replace(source.memory, conv=state.memory.conv)
        layer.state = replace(state, memory=memory, start=source.start, mean=source.mean)
    return made


def position_losses(model: PreTrainedModel, ids: Tensor, piece: int = PIECE) -> Tensor:
    """The loss of each token given those before it in its row, in nats.

    Args:
        model: ours, which reads piece by piece, or a causal language model of transformers, which reads all at once.
        ids: (batch, length); rows may be padded at the end.
        piece: tokens per call.

    Returns:
        (batch, length); NaN for the first token of a row, which has nothing before it.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; expected (batch, length) with a length of at least 2")
    if piece < 1:
        raise ValueError(f"piece is {piece}; expected at least 1")
    check(model, [Example(row[i : len(row) - 1 + i], ()) for row in ids.tolist() for i in (0, 1)])
    goes_on = isinstance(model, TitansForCausalLM)
    ids = ids.to(model.device)
    losses, cache = [], None
    with reading(model):
        step = piece if goes_on else ids.shape[1]
        for start in range(0, ids.shape[1] - 1, step):
            stop = min(start + step, ids.shape[1] - 1)
            options = {"past_key_values": cache} if goes_on else {}
            output = model(input_ids=ids[:, start:stop], use_cache=goes_on, **options)
            cache = output.past_key_values if goes_on else None
            logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
            wanted = ids[:, start + 1 : stop + 1]
            found = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            losses.append(found.view(wanted.shape))
    first = torch.full_like(losses[0][:, :1], math.nan)
    return torch.cat([first, *losses], dim=1)
