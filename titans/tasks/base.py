"""What a task is: sequences that ask something, drawn by number, and the tokens that would be right."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

IGNORED = -100  # the label where nothing is asked
SPLITS = ("train", "validation", "test")
Group = Mapping[str, Any]  # what the sequences of one table cell share: {"length": 4096, "depth": 0.5}


class WrongLengthError(ValueError):
    """A task has no sequence of that length."""


@dataclass(frozen=True)
class Answer:
    """What should follow a part of a sequence.

    Attributes:
        place: how many tokens are read before the answer is asked for.
        wanted: the tokens of the answer; each is predicted after the right ones before it.
    """

    place: int
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """One sequence and what it asks.

    A greedy model gives exactly this answer if and only if each of its tokens is the likeliest after those before it,
    so an answer is judged without generating.

    Attributes:
        tokens: the sequence, answers included.
        answers: what is judged.
        boundary: how many tokens stand before the question: where a control cuts or swaps the memory.
        sentences: where the sentences of the text before the question begin, if the task says so; what stands before
            the first of them is the instruction.
        needed: which of them, counted from 0, the answer follows from, where that is known.
    """

    tokens: Sequence[int]
    answers: Sequence[Answer]
    boundary: int = 0
    sentences: Sequence[int] = ()
    needed: Sequence[int] = ()

    def labels(self) -> list[int]:
        """The token wanted after each token of the sequence; ``IGNORED`` where nothing is asked."""
        labels = [IGNORED] * len(self.tokens)
        for answer in self.answers:
            labels[answer.place - 1 : answer.place - 1 + len(answer.wanted)] = answer.wanted
        return labels


class Task(ABC):
    """Something a model is asked, as a frozen dataclass whose fields are the task's settings.

    A task draws its sequences from a random source that it is given, so split, seed and number decide each one.

    Attributes:
        name: as the command line knows it.
        title: a few words for people.
        source: where it is defined, such as a paper, and what was changed.
        axes: the keys of its groups; the first is the x axis of a plot, two make a heat map.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    metric: ClassVar[str] = "accuracy"

    @property
    def vocab_size(self) -> int | None:
        """How many tokens a task of plain tokens uses; None: it is text, for any tokenizer."""
        return None

    @property
    @abstractmethod
    def chance(self) -> float:
        """The share of answers that a guess gets right."""

    @abstractmethod
    def groups(self) -> list[dict[str, Any]]:
        """The cells of its table, in order."""

    @abstractmethod
    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of a group; a ``ValueError`` says why there is none, a ``WrongLengthError`` blames its length."""

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """What a training sequence of at most ``length`` tokens is about."""
        return {"length": length}

    def count(self, group: Group) -> int | None:
        """How many sequences a group has; None: as many as one asks for."""
        return None

    def take(self, number: int, group: Group, tokenizer: Any) -> Example:
        """A sequence by its number, for groups with a fixed number of them."""
        raise NotImplementedError

    def more_figures(self, losses: Sequence[float]) -> dict[str, float]:
        """What is reported of a cell besides the share of right answers, from the loss of each answer in nats."""
        return {}

    def settings(self) -> dict[str, Any]:
        """The fields, for a report."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class LongTextTask(Task):
    """What tasks share that ask for something at some depth of a long text.

    Attributes:
        lengths: of the sequences, in tokens.
        depths: which share of the text stands before what is asked for.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "depth")
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        require_lengths("lengths", self.lengths, 1)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths is {self.depths}; expected one or more numbers from 0 to 1")

    def groups(self) -> list[dict[str, Any]]:
        """One per length and depth."""
        return [{"length": length, "depth": depth} for length in self.lengths for depth in self.depths]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """That length, at any depth."""
        return {"length": length, "depth": rng.random()}


def example(task: Task, split: str, seed: int, number: int, group: Group | int, tokenizer: Any = None) -> Example:
    """The sequence of a task for a split, seed and number; no two splits share a stream.

    Args:
        group: of the sequence; a whole number n: a training sequence of at most n tokens.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
    rng = random.Random(f"{task.name} {split} {seed} {number} {group}")
    chosen = task.training_group(rng, group) if isinstance(group, int) else group
    if task.count(chosen) is not None:
        return task.take(number, chosen, tokenizer)
    return task.draw(rng, chosen, split, tokenizer)


def append_question(tokens: list[int], question: Sequence[int], answer: Sequence[int]) -> Answer:
    """Appends a question and what should follow it to a sequence; returns what should follow, and where."""
    tokens += question
    asked = Answer(len(tokens), tuple(answer))
    tokens += answer
    return asked


def check_longest(longest: int | None) -> None:
    """Raises a ``ValueError`` unless ``longest`` is None or a whole number of at least 1."""
    if longest is not None and (not isinstance(longest, int) or isinstance(longest, bool) or longest < 1):
        raise ValueError(f"longest is {longest!r}; expected a whole number of at least 1, or none")


def require_at_most(longest: int | None, length: int, name: str) -> None:
    """Raises a ``WrongLengthError`` for a longer sequence, which is thereby left to the tasks beside this one."""
    if longest is not None and length > longest:
        raise WrongLengthError(f"length is {length}; expected at most {longest}, the longest of {name}")


def require_lengths(name: str, lengths: Sequence[int], least: int) -> None:
    """Raises a ``ValueError`` unless ``lengths`` are one or more whole numbers of at least ``least``."""
    if not lengths or not all(isinstance(length, int) and length >= least for length in lengths):
        raise ValueError(f"{name} is {lengths}; expected one or more whole numbers of at least {least}")
