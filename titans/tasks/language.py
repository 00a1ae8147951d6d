"""Text that people wrote, whose end can be predicted by a reader of all of it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from titans.models.text import encode, opening, read_text
from titans.tasks.base import Answer, Example, Group, Task


@dataclass(frozen=True)
class Lambada(Task):
    """The last word of a passage, which its last sentence alone does not give away.

    Attributes:
        data: a JSONL file, each line with ``context`` and ``continuation``, or a ``text`` whose last word is asked for.
        limit: how many of its first lines to use; None: all.
    """

    name: ClassVar[str] = "lambada"
    title: ClassVar[str] = "Last word of a passage (LAMBADA)"
    source: ClassVar[str] = "LAMBADA (arXiv 1606.06031)"
    axes: ClassVar[tuple[str, ...]] = ("set",)
    data: str = ""
    limit: int | None = None

    def __post_init__(self) -> None:
        if not Path(self.data).expanduser().is_file():
            raise ValueError(f"data is {self.data!r}; expected a JSONL file with the passages of LAMBADA")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; expected at least 1, or None for all")

    @property
    def chance(self) -> float:
        """Any word may follow."""
        return 0.0

    def groups(self) -> list[dict[str, Any]]:
        """One cell."""
        return [{"set": self.name}]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Raises an error, as there is none."""
        raise ValueError("lambada has no sequences to train on; expected another task")

    def count(self, group: Group) -> int:
        """The passages of the file, up to the limit."""
        found = len(read_passages(self.data))
        return found if self.limit is None else min(found, self.limit)

    def take(self, number: int, group: Group, tokenizer: Any) -> Example:
        """A passage by its line, tokenised as a whole; the answer is its last word, with the space before it."""
        if tokenizer is None:
            raise ValueError("tokenizer is None; expected one, because the task is text")
        if not 0 <= number < self.count(group):
            raise ValueError(f"number is {number}; expected one from 0 to {self.count(group) - 1}")
        context, word = read_passages(self.data)[number]
        tokens, place = join_tokens(tokenizer, context, word)
        return Example(tokens, (Answer(place, tuple(tokens[place:])),))

    def more_figures(self, losses: Sequence[float]) -> dict[str, float]:
        """The perplexity per word, as in the papers, and not per token."""
        return {"perplexity": math.exp(min(fmean(losses), 700.0))}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """Any passage."""
        if split != "test":
            raise ValueError(f"split is {split!r}; expected test, as the passages are not to be trained on")
        return self.take(rng.randrange(self.count(group)), group, tokenizer)


def join_tokens(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], int]:
    """The tokens of two texts as those of one, and how many of them stand before the second.

    White space at the end of the first belongs to the second, and so does a token that reaches across. Where nothing is
    left of the first, the token that begins or ends texts stands before the second.
    """
    start = opening(tokenizer)
    before = start + encode(tokenizer, context.rstrip())
    tokens = start + encode(tokenizer, context + continuation)
    place = next((i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), len(before))
    if not place:
        named = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        start = [number for number in named if number is not None][:1]
        tokens, place = start + tokens, len(start)
    if not 0 < place < len(tokens):
        raise ValueError(
            f"the texts {context[-40:]!r} and {continuation[:40]!r} have {place} and {len(tokens) - place} tokens; "
            "expected at least 1 each"
        )
    return tokens, place


def read_passages(path: str) -> Sequence[tuple[str, str]]:
    """Each passage of a file up to its last word, and the word with the space before it."""
    place = Path(path).expanduser()
    return _passages(place, place.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _passages(path: Path, changed: int) -> list[tuple[str, str]]:
    found = []
    for number, row in enumerate(read_rows(path), start=1):
        if {"context", "continuation"} <= row.keys():
            context, word = str(row["context"]).rstrip(), f" {str(row['continuation']).strip()}"
        elif "text" in row:
            text = str(row["text"]).rstrip()
            context = text[: -len((text.split() or [text])[-1])].rstrip()
            word = text[len(context) :]
        else:
            raise ValueError(f"{path} has {', '.join(row)} in row {number}; expected text, or context and continuation")
        if not context or not word.strip():
            raise ValueError(f"{path} has less than two words in row {number}; expected a passage and its last word")
        found.append((context, word))
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, or of a JSON file with a list; a ``ValueError`` says where it has anything else."""
    with path.open("rb") as source:
        text = "".join(read_text(source, str(path)))
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix == ".json" and text.lstrip().startswith("["):
        lines = [(1, text)]
    rows: list[dict[str, Any]] = []
    for number, line in lines:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON in line {number}: {error}") from None
        rows += value if isinstance(value, list) else [value]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path} has a {type(row).__name__} as row {number}; expected an object with fields")
    if not rows:
        raise ValueError(f"{path} is empty; expected one object per line")
    return rows
