"""Word problems of groups: read elements, and say after each one what all so far multiply to."""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any, ClassVar

from titans.tasks.base import Answer, Example, Group, Task, WrongLengthError, require_lengths
from titans.tasks.recall import draw_in_split

Table = tuple[tuple[int, ...], ...]  # table[a][b]: the number of a, then b


@cache
def cyclic_group(order: int) -> Table:
    """Addition of the numbers below ``order``."""
    return tuple(tuple((a + b) % order for b in range(order)) for a in range(order))


@cache
def symmetric_group(size: int) -> Table:
    """All ways to reorder ``size`` things, one after the other, numbered as :func:`itertools.permutations` does."""
    elements = list(permutations(range(size)))
    numbers = {element: number for number, element in enumerate(elements)}
    return tuple(tuple(numbers[tuple(a[i] for i in b)] for b in elements) for a in elements)


@dataclass(frozen=True)
class Tracking(Task):
    """What the word problems share. A token is an element of the group, as input and as answer.

    A rule splits the sequences of every length of which there are at least a thousand; shorter ones are in all splits.

    Attributes:
        lengths: of the sequences of a test; training takes lengths up to its own, which should be shorter.
        last: judge only the final product, not those on the way.
    """

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    last: bool = False

    axes: ClassVar[tuple[str, ...]] = ("length",)

    def __post_init__(self) -> None:
        require_lengths("lengths", self.lengths, 1)

    @property
    @abstractmethod
    def table(self) -> Table:
        """The group's multiplication table; element 0 is the one that changes nothing."""

    @property
    def vocab_size(self) -> int:
        """The elements of the group."""
        return len(self.table)

    @property
    def chance(self) -> float:
        """A guess among all elements."""
        return 1 / len(self.table)

    def groups(self) -> list[dict[str, Any]]:
        """One per length."""
        return [{"length": length} for length in self.lengths]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Any length up to ``length``, as what is short is learned first."""
        return {"length": rng.randint(1, length)}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of the group's length."""
        length, table = group["length"], self.table
        if length < 1:
            raise WrongLengthError(f"length is {length}; expected at least 1")
        tokens = draw_in_split(lambda: rng.choices(range(len(table)), k=length), split, len(table) ** length)
        answers = []
        product = 0
        for place, element in enumerate(tokens, 1):
            product = table[product][element]
            answers.append(Answer(place, (product,)))
        return Example(tokens, answers[-1:], length - 1) if self.last else Example(tokens, answers)


@dataclass(frozen=True)
class Parity(Tracking):
    """Is the number of ones so far odd?"""

    name: ClassVar[str] = "parity"
    title: ClassVar[str] = "Parity"
    source: ClassVar[str] = "Unlocking State-Tracking in Linear RNNs (arXiv 2411.12537), asked at every token"

    @property
    def table(self) -> Table:
        """Addition modulo 2."""
        return cyclic_group(2)


@dataclass(frozen=True)
class ModularAddition(Tracking):
    """The sum so far, modulo a number.

    Attributes:
        modulus: that number.
    """

    modulus: int = 5

    name: ClassVar[str] = "modular-addition"
    title: ClassVar[str] = "Modular addition"
    source: ClassVar[str] = "the word problem of a cyclic group, as in The Illusion of State (arXiv 2404.08819)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modulus < 2:
            raise ValueError(f"modulus is {self.modulus}; expected at least 2")

    @property
    def table(self) -> Table:
        """Addition modulo the modulus."""
        return cyclic_group(self.modulus)


@dataclass(frozen=True)
class S3(Tracking):
    """The order of three things after many reorderings: the smallest group where order matters."""

    name: ClassVar[str] = "s3"
    title: ClassVar[str] = "Permutations of three"
    source: ClassVar[str] = "the word problem of S3 (arXiv 2411.12537)"

    @property
    def table(self) -> Table:
        """Composition of 6 permutations."""
        return symmetric_group(3)


@dataclass(frozen=True)
class S5(Tracking):
    """The order of five things after many reorderings: thought to need more than a few parallel layers."""

    name: ClassVar[str] = "s5"
    title: ClassVar[str] = "Permutations of five"
    source: ClassVar[str] = "the word problem of S5, The Illusion of State (arXiv 2404.08819)"

    @property
    def table(self) -> Table:
        """Composition of 120 permutations."""
        return symmetric_group(5)
