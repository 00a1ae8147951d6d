"""A name in the text of books, asked for at the end by the words that stand before it; nothing is inserted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from titans.tasks.background import HaystackTask, Sentences, writer_for
from titans.tasks.base import Example, Group, WrongLengthError, append_question

QUESTION = '\nQuestion: In the text above, which name follows the words "{words}"?\nAnswer:'
FEWEST, MOST = 6, 15  # words that are quoted
SHORTEST = 3  # letters of a name
TRIES = 5000  # sentences to look at
NEAR = 0.05  # of what is read: how far from its depth a sentence may stand where the book begins or ends
TITLES = (
    "Aunt", "Captain", "Colonel", "Count", "Doctor", "Dr", "Lady", "Lord", "Madam", "Madame", "Master", "Miss",
    "Monsieur", "Mr", "Mrs", "Ms", "Professor", "Sir", "St", "Uncle",
)  # fmt: skip
DATES = (  # which the words before them nearly give away
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
_AFTER = ",.;:!?)"  # what may follow a name
_MARKS = '"“”„«»'  # a quotation inside a quotation would be hard to read


class Quote(NamedTuple):
    """Words of a sentence, and the name that follows them."""

    words: str
    name: str


@dataclass(frozen=True)
class BookQuote(HaystackTask):
    """A name that a book has once.

    The text is as it is in the book. A sentence at the depth asked for has a name that occurs nowhere else in what is
    read, and which no book of the haystack has as a word in small letters; the question quotes the words before it. The
    text fills the sequence to exactly its length, so its last sentence may be cut.
    """

    name: ClassVar[str] = "book-quote"
    title: ClassVar[str] = "Name after a quotation from a book"
    source: ClassVar[str] = "ours"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.haystack is None:
            raise ValueError("haystack is None; expected a file, or a folder with .txt files: the text of books")

    @property
    def chance(self) -> float:
        """Any name may follow."""
        return 0.0

    def training_group(self, rng: random.Random, length: int) -> dict[str, Any]:
        """That length, at any depth: another one where the text has no such name at the first."""
        return super().training_group(rng, length) | {"any_depth": True}

    def draw(self, rng: random.Random, group: Group, split: str, tokenizer: Any) -> Example:
        """A sequence of ``group["length"]`` tokens that asks for a name after ``group["depth"]`` of the text."""
        length, depth, any_depth = group["length"], group["depth"], group.get("any_depth", False)
        writer = writer_for(tokenizer)
        text = self.read_split(writer, split)
        common = writer.read(self.haystack).small_words
        least = None
        tries = TRIES * (1 + any_depth) if len(text.starts) else 0
        for attempt in range(tries):
            if attempt >= TRIES:
                depth = rng.random()
            number = rng.randrange(len(text.starts))
            quotes = [quote for quote in find_quotes(text.texts[number]) if quote.name.lower() not in common]
            if not quotes:
                continue
            quote = rng.choice(quotes)
            asked = QUESTION.format(words=quote.words)
            question, answer = writer.ask(asked, f" {quote.name}")
            size = length - len(writer.opening) - len(question) - len(answer)
            needed = length - size + text.size_of(number)
            least = needed if least is None else min(least, needed)
            first = _first_sentence(text, number, size, depth)
            if first is None:
                continue
            begin = int(text.starts[first])
            last = int(np.searchsorted(text.starts, begin + size))
            if not _is_clear(quote, " ".join(text.texts[first:last]), asked):
                continue
            tokens = [*writer.opening, *text.tokens[begin : begin + size].tolist()]
            boundary = len(tokens)
            sentences = (text.starts[first:last] - begin + len(writer.opening)).tolist()
            answers = [append_question(tokens, question, answer)]
            return Example(tokens, answers, boundary, sentences, [number - first])
        if least is not None and length < least:
            raise WrongLengthError(f"length is {length}; expected at least {least}")
        if len(text.tokens) < length:
            raise ValueError(f"haystack has {len(text.tokens):,} tokens for {split}; expected at least {length:,}")
        where = "any depth" if any_depth else f"depth {depth:.2f}"
        raise ValueError(
            f"haystack has no name after {FEWEST} words or more that stands once in {length:,} tokens of {split}, at "
            f"{where}; expected the text of books, or another length or depth"
        )


def find_quotes(sentence: str) -> list[Quote]:
    """The names in a sentence that have enough words before them, with those words."""
    words, found, begin = sentence.split(), [], 0
    for place, word in enumerate(words):
        if any(mark in word for mark in _MARKS):
            begin = place + 1
        elif place - begin >= FEWEST and _is_name(word) and _goes_on(words[place - 1]):
            found.append(Quote(" ".join(words[max(begin, place - MOST) : place]), word.rstrip(_AFTER)))
    return found


def _is_name(word: str) -> bool:
    name = word.rstrip(_AFTER)
    return len(name) >= SHORTEST and name.isalpha() and name.istitle() and name not in (*TITLES, *DATES)


def _goes_on(word: str) -> bool:
    """Whether the word after this one would be written small if it were not a name."""
    return word.removesuffix(",").isalpha() or word.removesuffix(".") in TITLES


def _first_sentence(text: Sentences, number: int, size: int, depth: float) -> int | None:
    """With which sentence ``size`` tokens begin if another is to stand at a depth of them; None: they cannot."""
    start, last = int(text.starts[number]), len(text.tokens) - size
    room = size - text.size_of(number)
    wanted = start - depth * room
    low, high = (int(place) for place in np.searchsorted(text.starts, [start - room, min(start, last) + 1]))
    if room < 0 or low >= high or not -NEAR * size <= wanted <= last + NEAR * size:
        return None
    return low + int(np.abs(text.starts[low:high] - wanted).argmin())


def _is_clear(quote: Quote, text: str, question: str) -> bool:
    """Whether the name stands once in all that is read, and its words once before the question."""
    return f"{text} {question}".lower().count(quote.name.lower()) == 1 and text.count(quote.words) == 1
