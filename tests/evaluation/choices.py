"""Multiple choice as lm-eval judges it, without lm-eval: what its scores are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from titans.evaluation.score import score
from titans.tasks import Answer, Example
from titans.tasks.commonsense import CHOICES
from titans.tasks.language import join_tokens


def choice_scores(model: PreTrainedModel, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of rows with a query, choices and gold, or with context_options, a continuation and gold.

    Returns:
        loglikelihoods, those of the choices of each row; acc, the share of rows whose likeliest choice is right;
        acc_norm, the same by likelihood per character, None where the choices are contexts; and values, 0 or 1 per row.
    """
    pairs = [_pairs(row) for row in rows]
    found = iter(log_likelihoods(model, tokenizer, [pair for row in pairs for pair in row]))
    likelihoods = [[next(found) for _ in row] for row in pairs]
    values = [float(_best(scores) == row["gold"]) for scores, row in zip(likelihoods, rows, strict=True)]
    norm = None
    if all(row.keys() >= CHOICES for row in rows):
        each = [
            [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
            for scores, row in zip(likelihoods, rows, strict=True)
        ]
        norm = fmean(_best(scores) == row["gold"] for scores, row in zip(each, rows, strict=True))
    return {"loglikelihoods": likelihoods, "acc": fmean(values), "acc_norm": norm, "values": values}


def log_likelihoods(model: PreTrainedModel, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Of each second text after the first one, in nats."""
    examples = []
    for context, continuation in pairs:
        tokens, place = join_tokens(tokenizer, context, continuation)
        examples.append(Example(tokens, (Answer(place, tuple(tokens[place:])),)))
    return [-answer.loss for (answer,) in score(model, examples)]


def _pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    if row.keys() >= CHOICES:
        return [(row["query"], f" {choice}") for choice in row["choices"]]
    return [(context, f" {row['continuation']}") for context in row["context_options"]]


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
