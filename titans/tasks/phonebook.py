"""A phone book: names with numbers, and the numbers asked for in another order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from titans.tasks.background import draw_of_split, writer_for
from titans.tasks.base import (
    Example,
    Group,
    Task,
    WrongLengthError,
    append_question,
    check_longest,
    require_at_most,
    require_lengths,
)
from titans.tasks.needle import ADJECTIVES, NOUNS, check_digits, draw_name, draw_number, share_of_numbers

NAMES = len(ADJECTIVES) * len(NOUNS)


@dataclass(frozen=True)
class Phonebook(Task):
    """Lines with a name and a number, then the same names again, each asking for its number.

    It has many answers in few tokens, so a model that starts from nothing can learn from it to look things up, before
    it is asked for a single number in a long text.

    Attributes:
        entries: how many lines the books of a test have.
        digits: of a number.
        longest: the longest training sequences that it draws; longer ones are left to the tasks beside it. None: of
            any length.
    """

    entries: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    digits: int = 7
    longest: int | None = None

    name: ClassVar[str] = "phonebook"
    title: ClassVar[str] = "Looking up numbers in a phone book"
    source: ClassVar[str] = "arXiv 2402.01032, with words for names and every entry asked for"
    axes: ClassVar[tuple[str, ...]] = ("entries",)

    def __post_init__(self) -> None:
        check_digits(self.digits)
        check_longest(self.longest)
        require_lengths("entries", self.entries, 1)
        if max(self.entries) > NAMES:
            raise ValueError(f"entries is {self.entries}; expected at most {NAMES:,} each, as there are names")

    @property
    def chance(self) -> float:
        """A guess among all numbers with that many digits."""
        return share_of_numbers(self.digits)

    def groups(self) -> list[dict[str, Any]]:
        """One per size of the book."""
        return [{"entries": entries} for entries in self.entries]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """A book of any size that fits into the length."""
        require_at_most(self.longest, length, self.name)
        return {"length": length, "share": rng.random()}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A book with the group's entries, or with a share of those that fit into the group's length."""
        writer = writer_for(tokenizer)
        room = group.get("length", float("inf")) - len(writer.opening)
        wanted = group.get("entries", NAMES)
        names: set[str] = set()
        lines: list[tuple[list[int], list[int]]] = []
        while len(lines) < wanted:
            name, number = draw_name(rng), self._number(rng, split)
            if name in names:
                continue
            line = writer.ask(f"\n{name}:", f" {number}")
            room -= 2 * sum(map(len, line))
            if room < 0:
                break
            names.add(name)
            lines.append(line)
        if not lines:
            raise WrongLengthError(f"length is {group['length']}; expected room for one name and number, twice")
        if "share" in group:
            lines = lines[: 1 + int(group["share"] * len(lines))]
        tokens = [*writer.opening, *(token for name, number in lines for token in (*name, *number))]
        boundary = len(tokens)
        answers = [append_question(tokens, name, number) for name, number in rng.sample(lines, len(lines))]
        return Example(tokens, answers, boundary)

    def _number(self, rng: random.Random, split: str) -> str:
        number = draw_of_split(lambda: draw_number(rng, self.digits), split)
        if number is None:
            raise ValueError(f"digits is {self.digits}; expected enough for a number of {split}")
        return number
