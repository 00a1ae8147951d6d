"""Tasks of plain tokens that ask for values by their keys: plainly, many at once, rewritten, or ever later."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from titans.tasks.base import Answer, Example, Group, Task, WrongLengthError, require_lengths

SHARES = 10  # one in this many sequences is for validation, one for the test, the rest for training
FEWEST = 1000  # with fewer sequences than this, too few would be left for a split, so all splits share them
FILLS = ("zeros", "random")
BETWEEN = ("fillers", "pairs")
Drawn = TypeVar("Drawn")


def in_split(content: object, split: str) -> bool:
    """Whether the rule puts a sequence with this content into ``split``: a hash decides, the same on every machine."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=4).digest()
    return ("validation", "test", *["train"] * (SHARES - 2))[int.from_bytes(digest, "big") % SHARES] == split


def draw_in_split(draw: Callable[[], Drawn], split: str, possible: int) -> Drawn:
    """Draws until the rule puts what was drawn into ``split``; any draw will do if few are ``possible``."""
    while True:
        drawn = draw()
        if possible < FEWEST or in_split(drawn, split):
            return drawn


@dataclass(frozen=True)
class PairTask(Task):
    """What the tasks with keys, values and fillers share; the vocabulary has them in this order.

    Attributes:
        pairs: how many keys a sequence has, each with its value.
        num_keys, num_values, num_fillers: sizes of the three parts of the vocabulary.
    """

    pairs: int = 8
    num_keys: int = 64
    num_values: int = 64
    num_fillers: int = 64

    def __post_init__(self) -> None:
        for name in ("pairs", "num_keys", "num_values", "num_fillers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.pairs > self.num_keys:
            raise ValueError(f"pairs is {self.pairs}; expected at most num_keys, {self.num_keys}")

    @property
    def vocab_size(self) -> int:
        """Keys, values and fillers."""
        return self.num_keys + self.num_values + self.num_fillers

    @property
    def chance(self) -> float:
        """A guess among all values."""
        return 1 / self.num_values

    def draw_pairs(self, rng: random.Random, count: int, split: str) -> dict[int, int]:
        """Values by their keys, ``count`` of them; no set of pairs belongs to two splits."""

        def draw() -> list[tuple[int, int]]:
            return sorted((key, self.draw_value(rng)) for key in rng.sample(range(self.num_keys), count))

        pairs = draw_in_split(draw, split, math.comb(self.num_keys, count) * self.num_values**count)
        rng.shuffle(pairs)
        return dict(pairs)

    def draw_value(self, rng: random.Random) -> int:
        """Any value."""
        return self.num_keys + rng.randrange(self.num_values)

    def draw_fillers(self, rng: random.Random, count: int) -> list[int]:
        """``count`` fillers."""
        return rng.choices(range(self.num_keys + self.num_values, self.vocab_size), k=count)


def ask_at_the_end(rng: random.Random, tokens: list[int], values: dict[int, int], start: int) -> Example:
    """Puts every key of ``values``, in any order, in place of one of the last fillers, twice as many as keys.

    Args:
        tokens: of the sequence, changed in place.
        start: the first token that may be replaced.
    """
    boundary = max(start, len(tokens) - 2 * len(values))
    places = sorted(rng.sample(range(boundary, len(tokens)), len(values)))
    answers = []
    for place, key in zip(places, rng.sample(list(values), len(values)), strict=True):
        tokens[place] = key
        answers.append(Answer(place + 1, (values[key],)))
    return Example(tokens, answers, boundary)


@dataclass(frozen=True)
class Recall(PairTask):
    """Pairs at the start, fillers, and the keys again at the end, each asking for its value.

    One sequence with two pairs::

        k1 v1 k2 v2 filler ... filler k2 filler k1 filler
                                      v2        v1

    Attributes:
        lengths: of the sequences of a test.
        vary: train with any number of pairs, up to ``pairs``.
        depths: which share of the fillers before the questions stands before the pairs, an axis of the test; training
            takes any depth. Empty: the pairs stand at the start.
    """

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    vary: bool = False
    depths: tuple[float, ...] = ()

    name: ClassVar[str] = "recall"
    title: ClassVar[str] = "Associative recall"
    source: ClassVar[str] = (
        "multi-query associative recall of Zoology (arXiv 2312.04927), with the questions at the end and fillers of "
        "their own between"
    )
    axes: ClassVar[tuple[str, ...]] = ("length",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_lengths("lengths", self.lengths, 3 * self.pairs)
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths is {self.depths}; expected numbers from 0 to 1, or none")
        if self.depths:
            object.__setattr__(self, "axes", ("length", "depth"))

    def groups(self) -> list[dict[str, Any]]:
        """One per length, and per depth if there are any."""
        if not self.depths:
            return [{"length": length} for length in self.lengths]
        return [{"length": length, "depth": depth} for length in self.lengths for depth in self.depths]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """The whole length, all pairs or, if they vary, any number that fits, and any depth if there are some."""
        pairs = rng.randint(1, max(1, min(self.pairs, length // 3))) if self.vary else self.pairs
        return {"length": length, "pairs": pairs} | ({"depth": rng.random()} if self.depths else {})

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence with the group's length and, if it says so, its number of pairs and their depth."""
        length, pairs, depth = group["length"], group.get("pairs", self.pairs), group.get("depth", 0.0)
        if length < 3 * pairs:
            raise WrongLengthError(f"length is {length}; expected at least {3 * pairs}, 3 for each pair")
        if not 0 <= depth <= 1:
            raise ValueError(f"depth is {depth}; expected 0 to 1")
        values = self.draw_pairs(rng, pairs, split)
        told = [token for pair in values.items() for token in pair]
        fillers = self.draw_fillers(rng, length - 2 * pairs)
        before = round(depth * max(0, length - 4 * pairs))  # the questions are among the last 2 x pairs
        return ask_at_the_end(rng, fillers[:before] + told + fillers[before:], values, 2 * pairs)


@dataclass(frozen=True)
class Reassigned(PairTask):
    """Recall of keys some of which get another value later on; the latest counts.

    The pairs stand at the start, the new values (each after its key) anywhere between them and the questions. All keys
    are asked for; judged are those that were rewritten as often as the group says.

    Attributes:
        length: of the sequences of a test.
        share: of the keys that are rewritten.
        times: how often a rewritten key is rewritten, at most.
    """

    length: int = 128
    share: float = 0.5
    times: int = 3

    name: ClassVar[str] = "reassigned"
    title: ClassVar[str] = "Recall of rewritten keys"
    source: ClassVar[str] = "recall, with new values for keys that had one; the latest value counts"
    axes: ClassVar[tuple[str, ...]] = ("rewrites",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1 or not 0 < self._rewritten(self.pairs) < self.pairs:
            raise ValueError(
                f"share is {self.share} of {self.pairs} pairs; expected it to leave some rewritten and some not"
            )
        if not 1 <= self.times < self.num_values:
            raise ValueError(f"times is {self.times}; expected 1 to {self.num_values - 1}, fewer than values")
        if self.length < self._shortest(self.pairs):
            raise ValueError(f"length is {self.length}; expected at least {self._shortest(self.pairs)}")

    def groups(self) -> list[dict[str, Any]]:
        """One per number of rewrites, from none on."""
        return [{"length": self.length, "rewrites": rewrites} for rewrites in range(self.times + 1)]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Any number of pairs that fits, rewritten any number of times."""
        fitting = [pairs for pairs in range(1, self.pairs + 1) if self._shortest(pairs) <= length]
        return {"length": length, "pairs": rng.choice(fitting or [1]), "rewrites": None}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence that judges keys rewritten ``rewrites`` times; None: all, however often."""
        length, rewrites, pairs = group["length"], group["rewrites"], group.get("pairs", self.pairs)
        if length < self._shortest(pairs):
            raise WrongLengthError(f"length is {length}; expected at least {self._shortest(pairs)} with pairs {pairs}")
        if rewrites is not None and not 0 <= rewrites <= self.times:
            raise ValueError(f"rewrites is {rewrites}; expected 0 to {self.times}")
        values = self.draw_pairs(rng, pairs, split)
        times = dict.fromkeys(values, 0)
        for key in rng.sample(list(values), self._rewritten(pairs)):
            times[key] = rewrites or rng.randint(1, self.times)
        tokens = [token for pair in values.items() for token in pair]
        tokens += self.draw_fillers(rng, length - 2 * pairs)

        order = [key for key, count in times.items() for _ in range(count)]
        rng.shuffle(order)
        asking = min(2 * pairs, length - 2 * pairs - 2 * len(order))
        room = length - asking - 2 * pairs - len(order)  # places for new values, if each took a single token
        used = {key: [value] for key, value in values.items()}
        for number, place in enumerate(sorted(rng.sample(range(room), len(order)))):
            key, start = order[number], 2 * pairs + place + number
            value = self.draw_value(rng)
            while value in used[key]:  # an outdated answer is never right by chance
                value = self.draw_value(rng)
            used[key].append(value)
            tokens[start : start + 2] = key, value

        latest = {key: told[-1] for key, told in used.items()}
        example = ask_at_the_end(rng, tokens, latest, length - asking)
        judged = [a for a in example.answers if rewrites in (None, times[tokens[a.place - 1]])]
        return Example(example.tokens, judged, example.boundary)

    def _rewritten(self, pairs: int) -> int:
        return round(self.share * pairs)

    def _shortest(self, pairs: int) -> int:
        """Tokens of the pairs, of all their rewrites and of the questions."""
        return 3 * pairs + 2 * self.times * self._rewritten(pairs)


@dataclass(frozen=True)
class Retention(PairTask):
    """Pairs, then other tokens, then the keys: how much is left of what was written once?

    Attributes:
        distances: tokens between the pairs and the first question.
        between: what they are: ``"fillers"``, or ``"pairs"`` of other keys, which are written as well.
    """

    distances: tuple[int, ...] = (0, 64, 256, 1024, 4096, 16384)
    between: str = "fillers"

    name: ClassVar[str] = "retention"
    title: ClassVar[str] = "Retention of associations"
    source: ClassVar[str] = "recall, asked after ever more tokens of fillers or of other pairs"
    axes: ClassVar[tuple[str, ...]] = ("distance",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_lengths("distances", self.distances, 0)
        if self.between not in BETWEEN:
            raise ValueError(f"between is {self.between!r}; expected one of {', '.join(BETWEEN)}")
        if self.between == "pairs" and self.pairs == self.num_keys:
            raise ValueError(
                f"pairs is {self.pairs}; expected less than num_keys, {self.num_keys}, as others come between"
            )

    def groups(self) -> list[dict[str, Any]]:
        """One per distance."""
        return [{"distance": distance} for distance in self.distances]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Any distance that fits."""
        if length < 4 * self.pairs:
            raise WrongLengthError(f"length is {length}; expected at least {4 * self.pairs}, 4 for each pair")
        return {"distance": rng.randint(0, length - 4 * self.pairs)}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of the pairs, the distance, and each key with a filler after it."""
        distance = group["distance"]
        if distance < 0:
            raise ValueError(f"distance is {distance}; expected at least 0")
        values = self.draw_pairs(rng, self.pairs, split)
        tokens = [token for pair in values.items() for token in pair]
        if self.between == "pairs":
            others = [key for key in range(self.num_keys) if key not in values]
            for key in rng.choices(others, k=distance // 2):
                tokens += key, self.draw_value(rng)
        tokens += self.draw_fillers(rng, 2 * self.pairs + distance - len(tokens))
        boundary = len(tokens)
        answers = []
        for key in rng.sample(list(values), self.pairs):
            tokens += key, *self.draw_fillers(rng, 1)
            answers.append(Answer(len(tokens) - 1, (values[key],)))
        return Example(tokens, answers, boundary)


@dataclass(frozen=True)
class MQAR(Task):
    """Many pairs from a large vocabulary, each asked for once, more often sooner than later.

    Token 0 stands between the questions, the first half of the vocabulary is keys, the second values. After the pairs
    there are as many slots of two tokens as fit; a key is asked for at slot i with a probability that falls as
    ``i ** (power - 1)``.

    Attributes:
        cells: (length, pairs) of the sequences of a test.
        vocabulary: number of tokens.
        power: of the power law of the gaps; 1: all slots are equally likely.
        fill: what stands between the questions: ``"zeros"``, or ``"random"`` tokens other than the sequence's keys.
    """

    cells: tuple[tuple[int, int], ...] = ((64, 4), (128, 8), (256, 16), (512, 64), (1024, 128))
    vocabulary: int = 8192
    power: float = 0.01
    fill: str = "zeros"

    name: ClassVar[str] = "mqar"
    title: ClassVar[str] = "Multi-query associative recall"
    source: ClassVar[str] = (
        "Zoology (arXiv 2312.04927), with splits that are disjoint by a rule, and no key among the random tokens"
    )
    axes: ClassVar[tuple[str, ...]] = ("pairs",)

    def __post_init__(self) -> None:
        if not self.cells:
            raise ValueError("cells is empty; expected at least one (length, pairs)")
        for length, pairs in self.cells:
            if not 1 <= pairs <= length // 4:
                raise ValueError(f"cells has {pairs} pairs at length {length}; expected 1 to {length // 4}")
        counts = [pairs for _, pairs in self.cells]
        if len(set(counts)) < len(counts):
            raise ValueError(f"cells has the numbers of pairs {counts}; expected each once, as an axis of the table")
        if self.vocabulary // 2 <= max(counts):
            raise ValueError(f"vocabulary is {self.vocabulary}; expected at least {2 * max(counts) + 2}")
        if not 0 < self.power <= 1:
            raise ValueError(f"power is {self.power}; expected more than 0 and at most 1")
        if self.fill not in FILLS:
            raise ValueError(f"fill is {self.fill!r}; expected one of {', '.join(FILLS)}")

    @property
    def vocab_size(self) -> int:
        """Token 0, keys and values."""
        return self.vocabulary

    @property
    def chance(self) -> float:
        """A guess among all values."""
        return 1 / len(self._values)

    @property
    def _values(self) -> range:
        return range(self.vocabulary // 2, self.vocabulary)

    def groups(self) -> list[dict[str, Any]]:
        """One per number of pairs, with its length."""
        return [{"length": length, "pairs": pairs} for length, pairs in self.cells]

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """Any number of pairs that fits, no more than in a test; few are as likely as many."""
        most = min(length // 4, max(pairs for _, pairs in self.cells))
        return {"length": length, "pairs": round(max(1, most) ** rng.random())}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence with the group's length and number of pairs."""
        length, pairs = group["length"], group["pairs"]
        if length < 4 * pairs:
            raise WrongLengthError(f"length is {length}; expected at least {4 * pairs}, 4 for each pair")
        keys = range(1, self.vocabulary // 2)
        if pairs > len(keys):
            raise ValueError(f"pairs is {pairs}; expected at most {len(keys)}, the number of keys")

        def draw() -> list[tuple[int, int]]:
            return list(zip(sorted(rng.sample(keys, pairs)), rng.sample(self._values, pairs), strict=True))

        drawn = draw_in_split(draw, split, math.comb(len(keys), pairs) * math.perm(len(self._values), pairs))
        rng.shuffle(drawn)
        tokens = [token for pair in drawn for token in pair]
        if self.fill == "zeros":
            tokens += [0] * (length - 2 * pairs)
        else:
            asked = dict(drawn)
            others = [token for token in range(self.vocabulary) if token not in asked]
            tokens += rng.choices(others, k=length - 2 * pairs)
        # exponential clocks with these rates, in the order they ring: weighted drawing without replacement
        rings = [(rng.expovariate((slot + 1) ** (self.power - 1)), slot) for slot in range(length // 2 - pairs)]
        answers = []
        for (key, value), (_, slot) in zip(drawn, sorted(rings), strict=False):
            place = 2 * pairs + 2 * slot
            tokens[place] = key
            answers.append(Answer(place + 1, (value,)))
        return Example(tokens, sorted(answers, key=lambda answer: answer.place), 2 * pairs)
