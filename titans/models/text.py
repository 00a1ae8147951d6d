"""Text to tokens and back, a piece at a time, so that neither a book nor an answer is ever needed whole."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

PROMPT = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
DOCUMENT = PROMPT | {"split_special_tokens": True}
BLOCK = 1 << 12  # bytes of a file that are read at once: few enough to see how far the reading is
MARGIN = 256  # characters on either side of a cut that a tokenizer is shown, longer than any token
TRIES, PATIENCE = 8, 16  # places for a cut that are tried, and blocks to wait for a good one
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode an unfinished character to, once for each of its bytes
LONGEST = 3  # bytes of a character that is not finished
WINDOW, OVERLAP = 32, 8  # tokens that are decoded together, and how many of them go on to the next window


class Source(Protocol):
    """What bytes come from: a file opened for reading."""

    def read(self, size: int, /) -> bytes | None:
        """At most ``size`` bytes; none at the end."""


def read_text(source: Source, name: str, block: int = BLOCK) -> Iterator[str]:
    """The text of a file in UTF-8, block by block; a ``ValueError`` where it turns out not to be text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    while True:
        data = source.read(block) or b""
        done += len(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = done - len(error.object) + error.start
            raise ValueError(f"{name} is not text: it is not UTF-8 at byte {place:,}") from None
        if "\0" in text:
            raise ValueError(f"{name} is not text: it has a zero byte")
        if text:
            yield text
        if not data:
            return


def encode_blocks(tokenizer: Any, blocks: Iterable[str], margin: int = MARGIN) -> Iterator[list[int]]:
    """The tokens of a text that comes in blocks: those of the whole text, however it was cut.

    The end of what has come is held back, because what follows may change its tokens; the end of what was given out is
    shown to the tokenizer again, because it may change the tokens of what follows. That they come out the same with no
    more than that to go by is tried out before each cut. There are no special tokens: a document that spells one out,
    such as ``<|endoftext|>``, is text, as it is where data is prepared for training.
    """
    if not tokenizer.is_fast:  # such a one does not tell where its tokens are
        yield tokenizer("".join(blocks), **DOCUMENT)["input_ids"]
        return
    text, lead = "", 0  # text[:lead] has been given out
    for block in blocks:
        text += block
        if len(text) < lead + 2 * margin:
            continue
        ids, spans = _encode(tokenizer, text, lead)
        cuts = _cuts(text, spans, len(text) - margin)
        hurry = len(text) > lead + PATIENCE * max(margin, len(block))
        for cut in cuts[:1] if hurry else cuts:
            place = spans[cut][0]
            kept = max((begin for begin, _ in spans[:cut] if begin <= place - margin), default=0)
            if hurry or _encode(tokenizer, text[kept:], place - kept)[0] == ids[cut:]:
                yield ids[:cut]
                text, lead = text[kept:], place - kept
                break
    if len(text) > lead:
        yield _encode(tokenizer, text, lead)[0]


def _encode(tokenizer: Any, text: str, lead: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of ``text[lead:]``, and where in ``text`` each begins and ends."""
    encoded = tokenizer(text, **DOCUMENT, return_offsets_mapping=True)
    ids, spans = encoded["input_ids"], [tuple(span) for span in encoded["offset_mapping"]]
    first = next((i for i, span in enumerate(spans) if span[1] > lead), len(spans))
    if first < len(spans) and spans[first][0] < lead:  # a token reaches across the cut, which cannot be undone
        ids, spans = _encode(tokenizer, text[lead:], 0)
        return ids, [(begin + lead, end + lead) for begin, end in spans]
    return ids[first:], spans[first:]


def _cuts(text: str, spans: Sequence[tuple[int, int]], limit: int) -> list[int]:
    """Before which tokens to try to cut: the last before ``limit`` that begin a word, then the last at all."""
    words: list[int] = []
    others: list[int] = []
    for index in range(len(spans) - 1, 0, -1):
        place = spans[index][0]
        if place > limit or spans[index - 1][1] > place:  # a character's later bytes stand where its first one does
            continue
        (words if text[place].isspace() and not text[place - 1].isspace() else others).append(index)
        if len(words) == TRIES:
            break
    return words + others[:TRIES]


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt; special ones only where it spells them out."""
    ids: list[int] = tokenizer(text, **PROMPT)["input_ids"] if text else []
    return ids


def opening(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text."""
    ids, plain = tokenizer("a", verbose=False)["input_ids"], encode(tokenizer, "a")
    return next((ids[:i] for i in range(len(ids)) if ids[i : i + len(plain)] == plain), [])


class TextStream:
    """Tokens in, text out as soon as it is certain: characters when they are complete, and nothing of a stop text.

    Args:
        stops: texts that end the stream; they and what follows them are not given out.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError("a stop text is empty; expected at least one character")
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.stopped = False
        self._ids: list[int] = []  # the last tokens
        self._shown = 0  # how many characters of their text have gone into _held
        self._held = ""  # what may be the beginning of a stop text

    def put(self, token: int) -> str:
        """The text that ``token`` completes."""
        self._ids.append(token)
        text = self._decode()
        self._take(text, max(len(text.rstrip(UNKNOWN)), len(text) - LONGEST))
        if self._shown == len(text) and len(self._ids) > WINDOW:
            self._ids = self._ids[-OVERLAP:]
            self._shown = len(self._decode())
        return self._release()

    def end(self) -> str:
        """What was held back in case more would come."""
        text = self._decode()
        self._take(text, len(text))
        out, self._held = self._release() + self._held, ""
        return out

    def _decode(self) -> str:
        text: str = self.tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _take(self, text: str, end: int) -> None:
        if not self.stopped:
            self._held += text[self._shown : end]
        self._shown = max(self._shown, end)

    def _release(self) -> str:
        places = [place for place in map(self._held.find, self.stops) if place >= 0]
        if places:
            out, self._held, self.stopped = self._held[: min(places)], "", True
            return out
        keep = max((_overlap(self._held, stop) for stop in self.stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
