"""Random tokens, other random tokens, and the first ones again: what a memory of what follows what can say."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from titans.tasks.base import Answer, Example, Group, Task
from titans.tasks.recall import draw_in_split, require_lengths

LEAD = 2  # tokens of the repetition that are given


@dataclass(frozen=True)
class Copy(Task):
    """A stretch of random tokens of any vocabulary that comes back at the end, each token of it asked for.

    What a token is followed by has to be remembered from a single time, so this teaches a model that starts from
    nothing what trained language models can do already, from many answers in every sequence.

    Attributes:
        lengths: of the sequences of a test.
        tokens: of the stretch.
    """

    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    tokens: int = 32

    name: ClassVar[str] = "copy"
    title: ClassVar[str] = "Copying a stretch of random tokens"
    source: ClassVar[str] = "a stretch that returns, as in arXiv 2209.11895, other tokens between"
    axes: ClassVar[tuple[str, ...]] = ("length",)

    def __post_init__(self) -> None:
        if self.tokens <= LEAD:
            raise ValueError(f"tokens is {self.tokens}; expected at least {LEAD + 1}")
        require_lengths("lengths", self.lengths, 2 * self.tokens)

    @property
    def chance(self) -> float:
        """Nothing is known of the vocabulary: a guess is hardly ever right."""
        return 0.0

    def groups(self) -> list[dict[str, Any]]:
        """A length each."""
        return [{"length": length} for length in self.lengths]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """A stretch of any length up to half of the sequence."""
        return {"length": length, "tokens": rng.randint(LEAD + 1, max(LEAD + 1, length // 2))}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of the group's length."""
        length, count, vocabulary = group["length"], group.get("tokens", self.tokens), len(tokenizer)
        if length < 2 * count:
            raise ValueError(f"length is {length}; expected at least {2 * count}, twice the stretch")
        stretch = draw_in_split(lambda: rng.choices(range(vocabulary), k=count), split, vocabulary**count)
        between = rng.choices(range(vocabulary), k=length - 2 * count)
        boundary = length - count
        answers = [Answer(boundary + place, (stretch[place],)) for place in range(LEAD, count)]
        return Example([*stretch, *between, *stretch], answers, boundary)
