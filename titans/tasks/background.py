"""Text to hide facts in, from files or our own: cut into sentences, and tokenised once per tokenizer."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from titans.models.text import opening, read_text
from titans.tasks.base import LongTextTask

LEAD = "."  # put before a piece while it is encoded, as most sentences end with it
KEPT = 1 << 13  # how many pieces keep their tokens
TRIES = 1000  # how often to draw for a split
WHOLE = (0.0, 1.0)
PARTS = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
_END = re.compile(
    r"([.!?](?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)"  # not after titles and initials
    r"[\"')\]”’]?) "
)
_WORD = re.compile(r"\w+")
_CODE = re.compile(r"[\d-]")

OWN = """
The river bends twice before it reaches the mill, and each bend has a name that only the old people use. Rain had been
falling since early morning. Nobody in the village could say who planted the long row of chestnuts, but everybody had
an opinion about who should trim them. A good rope is made of many weak threads. The baker opened her shop before it
was light, and by noon the shelves were bare. When the wind comes from the east, the bells of the next valley can be
heard quite clearly. Copper turns green if it is left out in the weather for long enough. The ferry was late again!
There was a map on the wall, so faded that the coast could no longer be told from the sea. Children learn the names of
birds more easily than their parents do. Is it better to mend a boat or to build a new one? The carpenter thought about
that for a whole winter, and then he bought a cart. Snow lay on the hills until the end of spring. Most letters that
are kept are kept by accident. A narrow path leads from the harbour up to the lighthouse, and goats walk on it as if it
were theirs. The glass was thin and rang like a bell. Some years the apricots are small and sweet, and some years there
are none. She had learned to count in three languages and to whistle in one. The train stopped in an open field for no
reason that anybody could see. Old maps show a lake where the market is held today. Bees do not care about fences. The
clockmaker had a habit of listening to people as though they were slightly too fast. After the storm the beach was
covered with wood, and whoever came first took the best of it. What do the fishermen talk about when they are out of
sight of land? Salt was once worth a long journey. The library keeps its rarest books in a room without windows. He
drew the same bridge every day for a month, and no two of the drawings were alike. Clouds gather over the ridge in the
afternoon and are gone by dusk. The cook tasted the soup, said nothing, and added an onion. A candle burns faster in a
draught. The owner of the inn remembers every guest who left without paying, and none of those who paid. Moss grows
thickest where the wall is never dry. Two brothers once argued over a ladder for eleven years. The orchestra tuned its
instruments while the last of the audience came in. Iron is patient, the smith used to say, but coal is not. In autumn
the smell of smoke lies over the whole plain. The tailor measured twice, cut once, and sighed all the same. Foxes cross
the frozen pond at night and leave a line of small prints. Every lamp in the street was lit except the one at the
corner. The teacher asked for silence and got a murmur instead. Paper was scarce, so the poem was written on the back of
a bill. Far away a dog barked, and then everything was still.
"""


@dataclass(frozen=True)
class Sentences:
    """The tokens of a text and where its sentences begin.

    Attributes:
        tokens: of the whole text, (tokens,).
        starts: the place of each sentence's first token, (sentences,).
        codes: its words with digits or hyphens, any of which might be drawn as a value by chance.
        texts: the sentences themselves, as far as they are known.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    codes: str = ""
    texts: Sequence[str] = ()

    @classmethod
    def join(
        cls, sentences: Sequence[Sequence[int] | NDArray[np.int32]], codes: str = "", texts: Sequence[str] = ()
    ) -> Sentences:
        """One text from the tokens of its sentences."""
        ends = np.cumsum([0, *map(len, sentences)])
        tokens = np.concatenate([np.asarray(sentence, np.int32) for sentence in sentences])
        return cls(tokens, ends[:-1], codes, texts)

    def part(self, begin: float, end: float) -> Sentences:
        """The sentences from one share of the tokens to another; parts side by side share no sentence."""
        first, last = np.searchsorted(self.starts, [begin * len(self.tokens), end * len(self.tokens)])
        ends = np.append(self.starts, len(self.tokens))
        tokens, starts = self.tokens[ends[first] : ends[last]], self.starts[first:last] - ends[first]
        return Sentences(tokens, starts, self.codes, self.texts[first:last])

    @cached_property
    def small_words(self) -> frozenset[str]:
        """The words that its sentences have in small letters."""
        return frozenset(word for text in self.texts for word in _WORD.findall(text) if word.islower())

    def size_of(self, number: int) -> int:
        """The tokens of a sentence."""
        end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.tokens)
        return int(end - self.starts[number])

    def take(
        self, rng: random.Random, size: int, repeat: bool, name: str
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """A passage that begins at a random sentence and ends after ``size`` tokens, in mid-sentence if need be.

        Args:
            repeat: start over at the end of the text; if not, a text that is too short raises a ``ValueError``.
            name: what that error calls the text.

        Returns:
            the tokens, (size,), and the places between their sentences, the first of all 0 and the last ``size``.
        """
        total = len(self.tokens)
        choices = len(self.starts) if repeat else int(np.searchsorted(self.starts, total - size, "right"))
        if not choices:
            raise ValueError(f"{name} has {total:,} tokens; expected at least {size:,}")
        begin = int(self.starts[rng.randrange(choices)])
        tokens, starts = self.tokens, self.starts
        if begin + size > total:
            times = -(-(begin + size) // total)
            tokens = np.tile(tokens, times)
            starts = (starts + total * np.arange(times)[:, None]).ravel()
        first, last = np.searchsorted(starts, [begin, begin + size])
        return tokens[begin : begin + size], np.append(starts[first:last] - begin, size)


class Writer:
    """Turns text into tokens as they are in the middle of a longer text, for one tokenizer; keeps what comes again.

    Attributes:
        opening: the special tokens that stand before a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        from titans.models.tokenizer import make_encoder  # slow to import, but done by whoever has a tokenizer

        self.opening = opening(tokenizer)
        self._encode = make_encoder(tokenizer)
        self._kept: dict[tuple[str, str], list[int]] = {}
        self._read: dict[tuple[str | None, tuple[float, float]], Sentences] = {}

    def begin(self, text: str) -> list[int]:
        """The special tokens that stand before a text, and those of its beginning."""
        return self.opening + self._keep("", text)

    def write(self, text: str) -> list[int]:
        """The tokens of a piece of text that follows a sentence; the list must not be changed."""
        return self._keep(LEAD, text)

    def ask(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """The tokens of a question and its answer, where possible as the tokenizer cuts the two together."""
        asked, both = self.write(question), self.write(question + answer)
        return asked, both[len(asked) :] if both[: len(asked)] == asked else self.write(answer)

    def read(self, path: str | None, part: tuple[float, float] = WHOLE) -> Sentences:
        """The text of a file, of a folder's .txt files in the order of their names, or our own; read once.

        Args:
            part: from which share of the text to which.
        """
        if (path, part) not in self._read:
            if part == WHOLE:
                text = OWN if path is None else " ".join(_text(file) for file in text_files(path))
                sentences = split_sentences(text)
                if not sentences:
                    raise ValueError(f"{path} is empty; expected text")
                pieces = self._pieces([" " + sentence for sentence in sentences])
                codes = " ".join(filter(_CODE.search, set(text.split())))
                self._read[path, part] = Sentences.join(pieces, codes, sentences)
            else:
                self._read[path, part] = self.read(path).part(*part)
        return self._read[path, part]

    def _keep(self, lead: str, text: str) -> list[int]:
        if (lead, text) not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[lead, text] = self._pieces([text], lead)[0].tolist()
        return self._kept[lead, text]

    def _pieces(self, texts: Sequence[str], lead: str = LEAD) -> list[NDArray[np.int32]]:
        before = self._encode([lead])[0]
        pieces = self._encode([lead + text for text in texts])
        for index, piece in enumerate(pieces):
            if np.array_equal(piece[: len(before)], before):
                pieces[index] = piece[len(before) :]
            else:  # this tokenizer has a token for the lead and what follows it
                pieces[index] = self._encode([texts[index]])[0]
        return pieces


@dataclass(frozen=True)
class HaystackTask(LongTextTask):
    """What tasks share whose long text is read from files.

    Attributes:
        haystack: a file, or a folder whose .txt files are read in the order of their names: the first eight tenths
            for train, one for validation and the last for test; None: a text of our own, for all.
        divide: give each split a part of its own; if not, every split has all of it, for models that were not trained
            on the task.
    """

    haystack: str | None = None
    divide: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.haystack is not None:
            text_files(self.haystack)

    def read_split(self, writer: Writer, split: str) -> Sentences:
        """The text of a split."""
        return writer.read(self.haystack, PARTS[split] if self.divide and self.haystack is not None else WHOLE)


_WRITERS: WeakKeyDictionary[Any, Writer] = WeakKeyDictionary()


def writer_for(tokenizer: Any) -> Writer:
    """The writer of a tokenizer, the same one for as long as the tokenizer lives."""
    if tokenizer is None:
        raise ValueError("tokenizer is None; expected one, because the task is text")
    if tokenizer not in _WRITERS:
        _WRITERS[tokenizer] = Writer(tokenizer)
    return _WRITERS[tokenizer]


def text_files(path: str) -> list[Path]:
    """A file itself, or the .txt files of a folder by name; a ``ValueError`` if there is none."""
    place = Path(path).expanduser()
    files = [place] if place.is_file() else sorted(place.glob("*.txt"))
    if not files:
        raise ValueError(f"{path} has no text; expected a file or a folder with .txt files")
    return files


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, with single spaces for all white space."""
    return [sentence for sentence in _END.sub(r"\1\n", " ".join(text.split())).split("\n") if sentence]


def draw_of_split(draw: Callable[[], str], split: str, barred: str = "") -> str | None:
    """The first draw that belongs to a split and does not occur in ``barred``; None if there seems to be none."""
    for _ in range(TRIES):
        drawn = draw()
        if split_of(drawn) == split and drawn not in barred:
            return drawn
    return None


def split_of(text: str) -> str:
    """The split of a text, always the same one: a tenth each for test and validation, the rest for train."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(text.encode()) % 10, "train")


def _text(file: Path) -> str:
    with file.open("rb") as source:
        return "".join(read_text(source, str(file)))
