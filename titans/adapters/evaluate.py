"""What an adapted model remembers, with its memory as it is, reset, swapped and off, beside full attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from titans.adapters.fit import LANGUAGE, draw
from titans.adapters.model import HEAD, AdaptedCache, AdaptedModel
from titans.adapters.states import window_of
from titans.report.progress import Progress, silent
from titans.tasks import Example, Group, Task

MODES = ("memory", "reset", "swapped", "window", "full")


@torch.no_grad()
def ask(
    model: AdaptedModel,
    tokenizer: Any,
    task: Task,
    group: Group,
    samples: int,
    modes: Sequence[str] = MODES,
    split: str = "test",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, list[bool]]:
    """Asks questions and writes the answers, always with the likeliest token: which were right, word for word, by mode.

    Args:
        modes: ``memory``; ``reset``: the memory is emptied before the question; ``swapped``: it is another text's;
            ``window``: it is off; ``full``: off, with attention over all of the text.
    """
    found: dict[str, list[bool]] = {mode: [] for mode in modes}
    other = None
    for number in range(samples):
        progress(number, samples, task.name)
        example = task.draw(
            random.Random(f"{seed} {task.name} {sorted(group.items())} {number}"), group, split, tokenizer
        )
        if not example.boundary:
            raise ValueError(f"{task.name} asks without a text before the question; expected a task with one")
        if "full" in modes:
            with window_of(model, model.widest):
                cache = _read(model, example, use_memory=False)
                found["full"].append(_answers(model, cache, example, use_memory=False))
        others = [mode for mode in modes if mode != "full"]
        if not others:
            continue
        before = _read(model, example, use_memory=others != ["window"])
        for mode in others:
            cache = before.copy()
            if mode == "window" and any(where != HEAD for where in model.inject):  # which changed later states
                cache = _read(model, example, use_memory=False)
            if mode == "reset":
                cache.memories = [None] * len(cache.memories)
            elif mode == "swapped":
                if other is None:  # of a text that is not asked about
                    another = task.draw(random.Random(f"{seed} {task.name} other"), group, split, tokenizer)
                    other = _read(model, another, use_memory=True).memories
                cache.memories = list(other)
            found[mode].append(_answers(model, cache, example, use_memory=mode != "window"))
        other = before.memories
    progress(samples, samples, task.name)
    return found


def _read(model: AdaptedModel, example: Example, use_memory: bool) -> AdaptedCache:
    """The cache after the text, before the question."""
    begun = _ids(model, example.tokens[: example.boundary])
    cache: AdaptedCache = model(begun, use_memory=use_memory, logits_to_keep=1).past_key_values
    return cache


def _answers(model: AdaptedModel, cache: AdaptedCache, example: Example, use_memory: bool) -> bool:
    """Whether what the model writes after the first question is its answer, token for token."""
    answer = example.answers[0]
    given = _ids(model, example.tokens[example.boundary : answer.place])
    for wanted in answer.wanted:
        output = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1, use_memory=use_memory)
        written = int(output.logits[0, -1].argmax())
        if written != wanted:
            return False
        given = _ids(model, [written])
    return True


@torch.no_grad()
def language(
    model: AdaptedModel,
    tokenizer: Any,
    texts: str | None,
    length: int,
    samples: int,
    split: str = "test",
    seed: int = 0,
    modes: Sequence[str] = ("memory", "window", "full"),
    progress: Progress = silent,
) -> dict[str, list[float]]:
    """Nats per token beyond the window, of each text, by mode."""
    losses: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(samples):
        progress(number, samples, LANGUAGE)
        ids, _ = draw(LANGUAGE, {}, texts, tokenizer, length, split, f"{seed} {number}")
        tokens = _ids(model, ids)
        begin = min(model.window, length // 2)
        for mode in modes:
            with window_of(model, model.widest if mode == "full" else model.window):
                logits = model(tokens, use_memory=mode == "memory", logits_to_keep=length - begin).logits[0]
            losses[mode].append(float(F.cross_entropy(logits[:-1].float(), tokens[0, begin + 1 :])))
    progress(samples, samples, LANGUAGE)
    return losses


def _ids(model: AdaptedModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)], device=model.device)
