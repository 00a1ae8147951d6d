"""Which answers of a task a model gets right, with its memory as it is or tampered with at the question."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from titans.evaluation.measure import PIECE
from titans.layers import BlockState
from titans.layers.record import memories_of
from titans.models import TitansCache, TitansForCausalLM
from titans.tasks import Answer, Example

TOKENS_AT_ONCE = 4096  # per call: enough for large products, and what is computed stays in the processor's cache
TAMPERED = ("no-writes", "reset", "swap")  # controls of the memory
ROWS = 25  # sequences that are read side by side; more are not faster
STEP = 64  # tokens of a call are a multiple of this, so that memories and windows are not cut in the middle
Control = str | None
Predicted = dict[int, Tensor]  # the log probabilities (vocabulary,) at each place of a sequence that is judged


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
    control: Control = None,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> list[list[Score]]:
    """The scores of the answers of each example; see :func:`score_each`."""
    return score_each(model, examples, [control], tokens_at_once)[control]


def score_each(
    model: PreTrainedModel,
    examples: Sequence[Example],
    controls: Sequence[Control],
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> dict[Control, list[list[Score]]]:
    """The scores of the answers of each example, by control.

    A text is read once for the memory as it is, reset and swapped: they differ from the question on.

    Args:
        model: ours or another with a state of fixed size, which read piece by piece in memory that does not grow with
            the text, or any causal language model of transformers, which reads all at once.
        controls: some of :data:`TAMPERED`, only for models with a memory; None: the memory is left alone.
        tokens_at_once: how many tokens are read per call, about.
    """
    for control in controls:
        if control is not None and control not in TAMPERED:
            raise ValueError(f"control is {control!r}; expected one of {', '.join(TAMPERED)}")
        if control is not None and not memories_of(model):
            raise ValueError(f"control is {control!r} and the model has no memory; expected a model that has one")
        if control == "swap" and len(examples) < 2:
            raise ValueError("control is 'swap' and there is one sequence; expected at least two")
        if control in ("reset", "swap") and not all(0 < e.boundary < len(e.tokens) for e in examples):
            raise ValueError(f"control is {control!r} and a sequence has no separate question; expected another task")
    check(model, examples)
    examples = [_seen(model, each) for each in examples]
    scores: dict[Control, list[list[Score]]] = {control: [[] for _ in examples] for control in controls}
    with reading(model):
        for indices in _batches(model, examples, tokens_at_once, "swap" in controls):
            batch = [examples[index] for index in indices]
            for control, predicted in _answer(model, batch, controls, tokens_at_once).items():
                for index, each, found in zip(indices, batch, predicted, strict=True):
                    scores[control][index] = _judge(each, found)
    return scores


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
    largest = max((int(np.max(e.tokens)) for e in examples if len(e.tokens)), default=0)
    if largest >= known:
        raise ValueError(f"the task has the token {largest} and the model knows {known}; expected a larger vocabulary")
    limit = None if isinstance(model, TitansForCausalLM) else getattr(model.config, "max_position_embeddings", None)
    longest = max((len(e.tokens) for e in examples), default=0)
    if limit is not None and longest > limit:
        raise ValueError(f"a sequence has {longest:,} tokens; expected at most {limit:,}, the model's longest context")


def _seen(model: PreTrainedModel, each: Example) -> Example:
    """As much of a sequence as its answers can depend on: for a model of windows alone, only the end."""
    config: Any = model.config
    if not isinstance(model, TitansForCausalLM) or config.use_memory or config.variant == "mac" or not each.answers:
        return each
    cut = min(_places(each)) - config.num_hidden_layers * (config.window_size - 1)
    if cut <= 0:
        return each
    answers = [Answer(answer.place - cut, answer.wanted) for answer in each.answers]
    return Example(each.tokens[cut:], answers, max(0, each.boundary - cut))


def _batches(
    model: PreTrainedModel, examples: Sequence[Example], tokens_at_once: int, pairs: bool
) -> Iterator[Sequence[int]]:
    """The numbers of examples that are read together, longest first; ``pairs``: never one alone."""
    order = sorted(range(len(examples)), key=lambda index: -len(examples[index].tokens))
    while order:
        count = rows_at_once(model, len(examples[order[0]].tokens), tokens_at_once)
        count = max(count, 2) if pairs else count
        if pairs and len(order) - count == 1:
            count += 1
        yield order[:count]
        order = order[count:]


def rows_at_once(model: PreTrainedModel, length: int, tokens_at_once: int = TOKENS_AT_ONCE) -> int:
    """How many sequences of a length are read together."""
    if _carrier(model) is not None and length > _unit(model):
        return max(1, min(ROWS, tokens_at_once // _unit(model)), tokens_at_once // length)
    return max(1, tokens_at_once // max(1, length))


def _unit(model: PreTrainedModel) -> int:
    """The fewest tokens per call that leave no segment of MAC open."""
    return model.config.segment_size if getattr(model.config, "variant", None) == "mac" else STEP


def _carrier(model: PreTrainedModel) -> str | None:
    """The argument with which a model goes on from one call to the next, at a fixed cost; None: it cannot."""
    if isinstance(model, TitansForCausalLM):
        return "past_key_values"
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else None


@contextmanager
def _without_writes(model: PreTrainedModel) -> Iterator[None]:
    memories = memories_of(model)
    before = [memory.writes for memory in memories]
    for memory in memories:
        memory.writes = False
    try:
        yield
    finally:
        for memory, writes in zip(memories, before, strict=True):
            memory.writes = writes


def _places(each: Example) -> list[int]:
    """Positions whose prediction is judged."""
    return [answer.place - 1 + i for answer in each.answers for i in range(len(answer.wanted))]


def _judge(each: Example, predicted: Predicted) -> list[Score]:
    """The scores of the answers, from what was predicted at each of their places."""
    scores = []
    for answer in each.answers:
        rows = torch.stack([predicted[answer.place - 1 + i] for i in range(len(answer.wanted))])
        wanted = torch.tensor(answer.wanted, device=rows.device)
        loss = float(F.nll_loss(rows, wanted, reduction="sum"))
        scores.append(Score(bool((rows.argmax(-1) == wanted).all()), loss, len(wanted)))
    return scores


def _answer(
    model: PreTrainedModel, batch: Sequence[Example], controls: Sequence[Control], tokens_at_once: int
) -> dict[Control, list[Predicted]]:
    """What is predicted at the places of each example, by control."""
    rows = [torch.as_tensor(np.asarray(each.tokens, dtype=np.int32)) for each in batch]
    places = [_places(each) for each in batch]
    found: dict[Control, list[Predicted]] = {}
    if "no-writes" in controls:
        with _without_writes(model):
            found["no-writes"] = _predict(model, rows, places, tokens_at_once)[0]
    asked = [control for control in controls if control != "no-writes"]
    if asked == [None]:
        found[None] = _predict(model, rows, places, tokens_at_once)[0]
    elif asked:
        assert isinstance(model, TitansForCausalLM)
        cuts = [each.boundary for each in batch]
        texts = [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
        inside = [[p for p in own if p < cut] for own, cut in zip(places, cuts, strict=True)]
        before, cache = _predict(model, texts, inside, tokens_at_once, goes_on=True)
        questions = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
        behind = [[p - cut for p in own if p >= cut] for own, cut in zip(places, cuts, strict=True)]
        for control in asked:
            own = _with_memory(model, cache, control)
            after, _ = _predict(model, questions, behind, tokens_at_once, own)
            found[control] = [
                first | {cut + p: row for p, row in then.items()}
                for first, then, cut in zip(before, after, cuts, strict=True)
            ]
    return found


def _predict(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    places: Sequence[Sequence[int]],
    tokens_at_once: int,
    cache: Any = None,
    goes_on: bool = False,
) -> tuple[list[Predicted], Any]:
    """What each row of tokens predicts at its places, and the state after all of them if the reading goes on."""
    carrier = _carrier(model)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    longest, shortest = max(map(len, rows)), min(map(len, rows))
    unit = _unit(model)
    step = max(1, longest) if carrier is None else max(1, tokens_at_once // len(rows) // unit) * unit
    found: list[Predicted] = [{} for _ in rows]
    for start in range(0, longest, step):
        stop = min(start + step, longest)
        part = pad_sequence([row[start:stop] for row in rows], batch_first=True).to(model.device)
        here = sorted({p - start for own in places for p in own if start <= p < stop})
        options: dict[str, Any] = {"use_cache": carrier is not None}
        if carrier is not None:
            options[carrier] = cache
        if keeps:
            options["logits_to_keep"] = torch.tensor(here or [0], device=model.device)
        if goes_on and stop > shortest:  # behind the end of a row nothing may be written
            ends = torch.tensor([len(row) for row in rows]).unsqueeze(1)
            options["attention_mask"] = (torch.arange(start, stop) < ends).to(model.device)
        output = model(input_ids=part, **options)
        cache = None if carrier is None else output[carrier]
        logits = output.logits[:, : len(here)] if keeps else output.logits[:, here]
        for own, row, each in zip(places, logits.float().log_softmax(-1), found, strict=True):
            each.update({start + p: row[i] for i, p in enumerate(here) if start + p in own})
    return found, cache


def _with_memory(model: TitansForCausalLM, cache: TitansCache, control: Control) -> TitansCache:
    """A copy of a cache with fresh memories, or each sequence with the memory of the next; attention and convolutions
    stay its own, and so does everything without a control."""
    made = cache.copy()
    if control is None:
        return made
    blocks: Any = model.model.layers
    for block, layer in zip(blocks, made.layers, strict=True):
        state = layer.state
        assert state is not None
        if state.memory is None:
            continue
        rows = torch.arange(state.batch_size, device=model.device)
        if control == "reset":
            source: BlockState = block._restarted(state, torch.ones_like(rows, dtype=torch.bool))
        else:
            source = state.reorder(rows.roll(-1))
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
