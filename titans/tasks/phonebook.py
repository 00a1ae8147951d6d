"""A phone book: names with numbers or words, and each value asked for in another order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from titans.tasks.background import TRIES, draw_of_split, writer_for
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

VALUES = ("number", "word")
NAMES = len(ADJECTIVES) * len(NOUNS)


@dataclass(frozen=True)
class Phonebook(Task):
    """Lines with a name and a value, then the same names again, each asking for its value.

    It has many answers in few tokens, so a model that starts from nothing can learn from it to look things up, before
    it is asked for a single value in a long text.

    Attributes:
        entries: how many lines the books of a test have.
        digits: of a number.
        values: what stands behind a name, number or word; of several, every book draws one.
        longest: the longest training sequences that it draws; longer ones are left to the tasks beside it. None: of
            any length.
    """

    entries: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    digits: int = 7
    values: tuple[str, ...] = ("number",)
    longest: int | None = None

    name: ClassVar[str] = "phonebook"
    title: ClassVar[str] = "Looking up numbers or words in a phone book"
    source: ClassVar[str] = "arXiv 2402.01032, with words for names and every entry asked for"
    axes: ClassVar[tuple[str, ...]] = ("entries",)

    def __post_init__(self) -> None:
        check_digits(self.digits)
        check_longest(self.longest)
        require_lengths("entries", self.entries, 1)
        if not self.values or not set(self.values) <= set(VALUES):
            raise ValueError(f"values is {self.values}; expected one or more of {', '.join(VALUES)}")
        if max(self.entries) > NAMES:
            raise ValueError(f"entries is {self.entries}; expected at most {NAMES:,} each, as there are names")

    @property
    def chance(self) -> float:
        """A guess among all numbers with that many digits, or all words; the mean over the kinds of books."""
        shares = {"number": share_of_numbers(self.digits), "word": 1 / NAMES}
        return sum(shares[kind] for kind in self.values) / len(self.values)

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
        kind = self.values[0] if len(self.values) == 1 else rng.choice(self.values)
        tries = TRIES  # for a first line that fits, where some do and some do not
        while len(lines) < wanted:
            name, value = draw_name(rng), self._value(rng, kind, split)
            if name in names or name == value:
                continue
            line = writer.ask(f"\n{name}:", f" {value}")
            needed = 2 * sum(map(len, line))
            if needed > room:
                tries -= 1
                if lines or not tries:
                    break
                continue
            room -= needed
            names.add(name)
            lines.append(line)
        if not lines:
            raise WrongLengthError(f"length is {group['length']}; expected room for one name and {kind}, twice")
        if "share" in group:
            lines = lines[: 1 + int(group["share"] * len(lines))]
        tokens = [*writer.opening, *(token for line in lines for part in line for token in part)]
        boundary = len(tokens)
        answers = [append_question(tokens, name, value) for name, value in rng.sample(lines, len(lines))]
        return Example(tokens, answers, boundary)

    def _value(self, rng: random.Random, kind: str, split: str) -> str:
        value = draw_of_split(lambda: draw_number(rng, self.digits) if kind == "number" else draw_name(rng), split)
        if value is None:
            raise ValueError(f"digits is {self.digits}; expected enough for a number of {split}")
        return value
