"""A needle in a haystack: a sentence with a value, somewhere in a long text, and a question for it at the end."""

from __future__ import annotations

import random
import uuid
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from titans.tasks.background import HaystackTask, Sentences, Writer, draw_of_split, writer_for
from titans.tasks.base import Example, Group, LongTextTask, WrongLengthError, append_question

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INSTRUCTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards."
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
STATEMENT = " The special magic {kind} for {key} mentioned in the provided text is"
QUESTION = "\nWhat is the special magic {kind} for {key} mentioned in the provided text?" + STATEMENT
MOST_NEEDLES = 64
TRIES = 1000  # how often to draw for needles that differ
VALUES = ("uuid", "word", "name", "sentence")  # of NeedleWord
FEWEST_DIGITS = 2  # so that every split has some numbers

# fmt: off
ADJECTIVES = (
    "amber", "ancient", "bitter", "blue", "bold", "brave", "bright", "brisk", "broad", "bronze", "calm", "careful",
    "cheerful", "clean", "clear", "clever", "cold", "cosy", "crisp", "curious", "curly", "daring", "dark", "deep",
    "distant", "dusty", "eager", "early", "earnest", "elegant", "faint", "fair", "famous", "fast", "fierce", "fine",
    "foggy", "fond", "fresh", "frosty", "gentle", "giant", "glad", "golden", "grand", "grave", "green", "grey", "happy",
    "hasty", "heavy", "hidden", "hollow", "honest", "humble", "icy", "idle", "jolly", "keen", "kind", "large", "late",
    "lazy", "light", "little", "lively", "lonely", "loud", "lucky", "mellow", "merry", "mighty", "mild", "misty",
    "modest", "narrow", "neat", "noble", "odd", "orange", "pale", "patient", "plain", "polite", "proud", "purple",
    "quaint", "quick", "quiet", "rapid", "rare", "red", "rough", "round", "royal", "rusty", "sharp", "shiny", "shy",
    "silent",
)
NOUNS = (
    "acorn", "anchor", "apple", "arrow", "badger", "barrel", "basket", "beacon", "beetle", "bell", "blanket", "boat",
    "bottle", "bridge", "broom", "bucket", "button", "candle", "canyon", "carpet", "castle", "cedar", "chair", "cherry",
    "cloud", "coin", "comet", "compass", "copper", "coral", "cradle", "crane", "cricket", "crown", "daisy", "desert",
    "donkey", "door", "dragon", "drum", "eagle", "ember", "engine", "falcon", "feather", "fern", "fiddle", "flame",
    "flute", "forest", "fountain", "gate", "glacier", "glove", "goat", "hammer", "harbour", "hat", "hazel", "helmet",
    "hill", "honey", "island", "jacket", "kettle", "key", "ladder", "lantern", "leaf", "lemon", "lizard", "magnet",
    "maple", "marble", "meadow", "mirror", "moon", "mountain", "needle", "nest", "oak", "ocean", "otter", "owl",
    "paddle", "parrot", "pebble", "pencil", "pepper", "piano", "pillow", "planet", "pond", "puzzle", "rabbit", "raven",
    "river", "robin", "saddle", "sail",
)
FIRST_NAMES = (
    "Ada", "Agnes", "Albert", "Alma", "Anton", "Bela", "Bruno", "Clara", "Conrad", "Dora", "Edgar", "Edith", "Elias",
    "Emil", "Esther", "Felix", "Flora", "Greta", "Gustav", "Hanna", "Hugo", "Ida", "Igor", "Irene", "Jonas", "Judith",
    "Karl", "Lena", "Leo", "Lydia", "Marta", "Max", "Nadia", "Nora", "Oscar", "Paula", "Ralph", "Rosa", "Sofia",
    "Viktor",
)
LAST_NAMES = (
    "Abbott", "Archer", "Ashdown", "Barlow", "Birch", "Brandt", "Calder", "Carver", "Dahl", "Draper", "Ekman", "Farrow",
    "Finch", "Foster", "Garner", "Hale", "Hartman", "Holm", "Ivers", "Keller", "Kimura", "Lang", "Lindqvist", "Marsh",
    "Mercer", "Moreau", "Nash", "Novak", "Okafor", "Perez", "Quill", "Rossi", "Sander", "Silva", "Thorn", "Ueda",
    "Vance", "Weaver", "Yates", "Zeller",
)
DEEDS = (
    "carries", "dreams of", "follows", "forgets", "guards", "hears", "hides behind", "laughs at", "paints", "remembers",
    "repairs", "sings to", "sits on", "sleeps under", "sells", "watches",
)
# fmt: on


class _Hidden(NamedTuple):
    """A needle, as tokens."""

    sentence: list[int]
    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Needle(LongTextTask):
    """What the three needle tasks share.

    The haystack fills the sequence to exactly its length, so its last sentence may be cut. Train, validation and test
    have different values, and no number, uuid or word of theirs occurs in the haystack.

    Attributes:
        needles: how many there are, each asked for by a key of its own; all but the first stand anywhere. A training
            sequence has one to that many.
    """

    glue: ClassVar[str] = " "  # what stands before a sentence of the haystack
    needles: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.needles, int) or not 1 <= self.needles <= MOST_NEEDLES:
            raise ValueError(f"needles is {self.needles}; expected a whole number from 1 to {MOST_NEEDLES}")

    @property
    def kind(self) -> str:
        """What a value is called: number, word or uuid."""
        return "number"

    @abstractmethod
    def any_value(self, rng: random.Random) -> str:
        """A value of any split."""

    @abstractmethod
    def read_haystack(self, writer: Writer, split: str) -> tuple[Sentences, bool]:
        """The text of a split, and whether it may be repeated."""

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """That length, at any depth, with up to ``needles`` needles, or as many as fit."""
        group = super().training_group(rng, length)
        return group if self.needles == 1 else group | {"at_most": rng.randint(1, self.needles)}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of ``group["length"]`` tokens whose first needle stands after ``group["depth"]`` of the hay."""
        length, depth = group["length"], group["depth"]
        writer = writer_for(tokenizer)
        haystack, repeat = self.read_haystack(writer, split)
        line = "" if self.glue == "\n" else "\n"  # the haystack begins on a line of its own
        start = writer.begin(INSTRUCTION.format(kind=self.kind) + line)
        needles = self._needles(rng, writer, split, haystack.codes, group.get("at_most", self.needles))
        while len(needles) > 1 and "at_most" in group and _length(start, needles) > length:
            needles.pop()
        least = _length(start, needles)
        if length < least:
            raise WrongLengthError(f"length is {length}; expected at least {least}")
        hay, places = haystack.take(rng, length - least + 1, repeat, "haystack")
        depths = [depth, *(rng.random() for _ in needles[1:])]
        spots = [int(places[np.abs(places - each * len(hay)).argmin()]) for each in depths]
        context, done = list(start), 0
        for spot, needle in sorted(zip(spots, needles, strict=True), key=lambda pair: pair[0]):
            context += [*hay[done:spot].tolist(), *needle.sentence]
            done = spot
        tokens = context + hay[done:].tolist()
        boundary = len(tokens)
        answers = [append_question(tokens, needle.question, needle.answer) for needle in needles]
        return Example(tokens, answers, boundary)

    def _needles(self, rng: random.Random, writer: Writer, split: str, codes: str, many: int) -> list[_Hidden]:
        """Needles with different keys and values, in the order of their questions."""
        needles: dict[str, _Hidden] = {}
        values: set[str] = set()
        for _ in range(TRIES + many):
            value = self._value(rng, split, codes)
            key = _key(rng, value)
            if value in values or key in needles:
                continue
            words = {"kind": self.kind, "key": key, "value": value}
            sentence = writer.write(self.glue + NEEDLE.format(**words))
            question = "." + STATEMENT if needles else QUESTION
            needles[key] = _Hidden(sentence, *writer.ask(question.format(**words), f" {value}"))
            values.add(value)
            if len(needles) == many:
                return list(needles.values())
        raise ValueError(f"needles is {many}; expected fewer, as {split} lacks that many different {self.kind}s")

    def _value(self, rng: random.Random, split: str, codes: str) -> str:
        value = draw_of_split(lambda: self.any_value(rng), split, codes)
        if value is None:
            raise ValueError(f"the haystack has every {self.kind} of {split}; expected one that is only in the needle")
        return value


@dataclass(frozen=True)
class _Number(Needle):
    """A number is hidden.

    Attributes:
        digits: of the number.
    """

    digits: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_digits(self.digits)

    @property
    def chance(self) -> float:
        """A guess among all numbers with that many digits."""
        return share_of_numbers(self.digits)

    def any_value(self, rng: random.Random) -> str:
        """A number."""
        return draw_number(rng, self.digits)


@dataclass(frozen=True)
class NeedleNoise(_Number):
    """A number in one line, repeated over and over."""

    name: ClassVar[str] = "needle-noise"
    title: ClassVar[str] = "Number in repeated noise (S-NIAH-PK)"
    source: ClassVar[str] = (
        "RULER (arXiv 2404.06654), niah_single_1, with keys of our own words and at depths of choice"
    )
    glue: ClassVar[str] = "\n"

    def read_haystack(self, writer: Writer, split: str) -> tuple[Sentences, bool]:
        """The line, which may be repeated."""
        return Sentences.join([writer.write(self.glue + NOISE)]), True


@dataclass(frozen=True)
class _InEssays(HaystackTask, Needle):
    """A value in essays, which begin at a sentence drawn at random.

    Attributes:
        repeat: start over where the text ends, as our own always does; if not, it must be long enough.
    """

    repeat: bool = False

    def read_haystack(self, writer: Writer, split: str) -> tuple[Sentences, bool]:
        """The essays."""
        return self.read_split(writer, split), self.repeat or self.haystack is None


@dataclass(frozen=True)
class NeedleEssay(_Number, _InEssays):
    """A number in essays."""

    name: ClassVar[str] = "needle-essay"
    title: ClassVar[str] = "Number in essays (S-NIAH-N)"
    source: ClassVar[str] = (
        "RULER (arXiv 2404.06654), niah_single_2, with keys of our own words and at depths of choice"
    )


@dataclass(frozen=True)
class NeedleWord(_InEssays):
    """A uuid, a word, a name or a sentence in essays.

    Attributes:
        value: uuid; word: an adjective and a noun with a hyphen; name: a first and a last name; sentence: one of seven
            words or so.
    """

    name: ClassVar[str] = "needle-word"
    title: ClassVar[str] = "Uuid, word, name or sentence in essays (S-NIAH-W)"
    source: ClassVar[str] = (
        "RULER (arXiv 2404.06654), niah_single_3, with keys of our own words and at depths of choice"
    )
    value: str = "uuid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value not in VALUES:
            raise ValueError(f"value is {self.value!r}; expected one of {', '.join(VALUES)}")

    @property
    def kind(self) -> str:
        """What ``value`` says."""
        return self.value

    @property
    def chance(self) -> float:
        """A guess among all uuids of version 4, or all words, names or sentences."""
        words = len(ADJECTIVES) * len(NOUNS)
        return {
            "uuid": 2.0**-122,
            "word": 1 / words,
            "name": 1 / (len(FIRST_NAMES) * len(LAST_NAMES)),
            "sentence": 1 / (words**2 * len(DEEDS)),
        }[self.value]

    def any_value(self, rng: random.Random) -> str:
        """A value of the kind."""
        if self.value == "uuid":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if self.value == "name":
            return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
        if self.value == "sentence":
            who, what = draw_name(rng).replace("-", " "), draw_name(rng).replace("-", " ")
            return f"the {who} {rng.choice(DEEDS)} the {what}"
        return draw_name(rng)


def check_digits(digits: int) -> None:
    """Raises a ``ValueError`` if there are too few numbers with that many digits to divide among the splits."""
    if digits < FEWEST_DIGITS:
        raise ValueError(f"digits is {digits}; expected at least {FEWEST_DIGITS}")


def draw_number(rng: random.Random, digits: int) -> str:
    """A number with that many digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def share_of_numbers(digits: int) -> float:
    """What share of all numbers with that many digits one number is."""
    return 1 / (9 * 10 ** (digits - 1))  # the first digit is not 0


def draw_name(rng: random.Random) -> str:
    """An adjective and a noun."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _length(start: list[int], needles: list[_Hidden]) -> int:
    """The fewest tokens that a sequence can have: with one token of the haystack."""
    return len(start) + sum(len(part) for needle in needles for part in needle) + 1


def _key(rng: random.Random, value: str) -> str:
    """A name that does not contain the value."""
    key = draw_name(rng)
    while value in key:
        key = draw_name(rng)
    return key
