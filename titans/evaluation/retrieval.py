"""Search instead of memory: of a long text only the sentences that BM25 ranks best for the question are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from titans.bm25 import bm25, content_words
from titans.tasks import Answer, Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHOICES = (1, 2, 4, 8, 16, 32)  # how many sentences are read
_WORD = re.compile(r"\w+")


def rank_sentences(each: Example, tokenizer: Any) -> list[int]:
    """The sentences of an example that have a word of its question, by their numbers, best first."""
    tokens, ends = list(each.tokens), [*each.sentences[1:], each.boundary]
    spans = [tokens[start:end] for start, end in zip(each.sentences, ends, strict=True)]
    words = [_WORD.findall(text.lower()) for text in tokenizer.batch_decode(spans)]
    question = tokenizer.decode(tokens[each.boundary : each.answers[0].place])
    counts = np.array(list(map(len, words)))
    postings = []
    for word in dict.fromkeys(content_words(_WORD.findall(question.lower()))):
        times = np.array([own.count(word) for own in words])
        found = np.flatnonzero(times)
        postings.append(np.stack([found, times[found], counts[found]]))
    ranked, _ = bm25(postings, len(words), int(counts.sum()))
    return [int(number) for number in ranked]


def keep_sentences(each: Example, numbers: Sequence[int]) -> Example:
    """The example with these of its sentences, in the order of the text, between its instruction and its question."""
    ends = [*each.sentences[1:], each.boundary]
    kept = sorted(numbers)
    tokens = list(each.tokens[: each.sentences[0]])
    for number in kept:
        tokens += each.tokens[each.sentences[number] : ends[number]]
    boundary = len(tokens)
    tokens += each.tokens[each.boundary :]
    answers = [Answer(answer.place - each.boundary + boundary, answer.wanted) for answer in each.answers]
    return Example(tokens, answers, boundary)


def choose_count(model: PreTrainedModel, examples: Sequence[Example], tokenizer: Any) -> int:
    """How many sentences the model answers best with; the fewest of those."""
    from titans.evaluation.score import score

    ranked = [rank_sentences(each, tokenizer) for each in examples]

    def share(count: int) -> float:
        cut = [keep_sentences(each, order[:count]) for each, order in zip(examples, ranked, strict=True)]
        return fmean(answer.right for answers in score(model, cut) for answer in answers)

    return max(CHOICES, key=share)
