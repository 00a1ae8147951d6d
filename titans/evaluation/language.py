"""How well a model predicts text: the loss per token, by position in the text, and bits per byte."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from titans.evaluation.measure import (
    PIECE,
    Cell,
    Cells,
    Evaluation,
    changed_settings,
    default_settings,
    refuse_controls,
)
from titans.models.text import encode_blocks, opening, read_text
from titans.report.statistics import bootstrap
from titans.tasks import Group
from titans.tasks.background import text_files
from titans.words import require_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXTS = {
    "streamed": "each text from beginning to end with one memory",
    "sliding": "windows that may overlap, each with a fresh memory; a token is judged in the first that has it",
}
BUCKET = 64  # positions in the first bucket; each later one ends at twice as many
PARTS = 256  # values that are kept per bucket, at most
PLAIN = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
PREPARED = "prepared.json"  # what `titans prepare` leaves in a folder


class Window(NamedTuple):
    """Tokens that a model reads with one memory, and which of them is the first to be judged."""

    ids: Sequence[int]
    judged: int


@dataclass(frozen=True)
class Perplexity:
    """The loss of a model on text, overall and along the text.

    A text begins with the special tokens that the tokenizer begins texts with, which are not judged. Without any, its
    first token is not judged, because it has nothing before it. Tokens that end texts are left out.

    Attributes:
        data: text files, folders with .txt files, or a folder that `titans prepare` wrote.
        context: a key of :data:`CONTEXTS`.
        length: streamed: tokens to read of each text, at most; None: all. Sliding: tokens of a window.
        stride: sliding: distance between the starts of two windows; None: the length of a window.
        split: of prepared data; None: validation, or test, or train, whichever is there.
        limit: how many of the first tokens of the data to use; None: all.
        batch_size: texts or windows that are read side by side.
    """

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "Loss along the text"
    reads_text: ClassVar[bool] = True
    data: str | Sequence[str] | None = None
    context: str = "streamed"
    length: int | None = None
    stride: int | None = None
    split: str | None = None
    limit: int | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.data is None:
            raise ValueError("perplexity needs text; expected the setting data, a file or a prepared folder")
        names = [self.data] if isinstance(self.data, str) else self.data
        if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"data is {self.data!r}; expected the name of a file or folder, or several of them")
        if self.split is not None and not isinstance(self.split, str):
            raise ValueError(f"split is {self.split!r}; expected the name of one")
        if self.context not in list(CONTEXTS):
            raise ValueError(f"context is {self.context!r}; expected one of {', '.join(CONTEXTS)}")
        given = {name: getattr(self, name) for name in ("length", "stride", "limit")}
        require_whole(batch_size=self.batch_size, **{name: value for name, value in given.items() if value is not None})
        if self.context == "sliding" and self.length is None:
            raise ValueError("length is None and context is 'sliding'; expected the tokens of a window")
        if self.context != "sliding" and self.stride is not None:
            raise ValueError(f"stride is {self.stride} and context is {self.context!r}; expected context 'sliding'")
        if self.stride is not None and self.length is not None and self.stride > self.length:
            raise ValueError(
                f"stride is {self.stride}; expected at most length, {self.length}, so that no token is left out"
            )

    def describe(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "title": self.title,
            "source": "the text that is given",
            "metric": "loss",
            "unit": "nats per token",
            "better": "lower",
            "chance": None,
            "axes": ["position"],
            "counted": "tokens",
            "settings": changed_settings(self),
        }

    def defaults(self) -> dict[str, Any]:
        """Those of its fields."""
        return default_settings(self)

    def groups(self) -> list[dict[str, Any]]:
        """All positions at once."""
        return [{}]

    def check(self, evaluation: Evaluation, tokenizer: Any) -> None:
        """Refuses controls, and text that does not exist."""
        refuse_controls(self.name, evaluation)
        self.read(tokenizer)

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        group: Group,
        evaluation: Evaluation,
        controls: Sequence[str | None],
        before: Cells,
    ) -> Iterable[Cells]:
        """One cell per bucket of positions, each with the figures of the whole text."""
        found = self.run(model, tokenizer)
        whole = {key: found[key] for key in ("loss", "perplexity", "bits_per_byte", "tokens")}
        return [{None: [cell | {"whole": whole} for cell in found["cells"]]}]

    def run(self, model: PreTrainedModel, tokenizer: Any, piece: int = PIECE) -> dict[str, Any]:
        """Every figure of the loss.

        Args:
            piece: tokens per call, for our models.

        Returns:
            loss, perplexity, bits_per_byte, tokens and bytes that were judged, texts, split, and cells: for each
            bucket of positions the mean loss of the tokens that are predicted after ``position`` others at most, and
            more than half as many but for the first bucket; its values are those of up to 256 parts of the data, in
            order.
        """
        import torch  # here, so that the measures can be listed without it

        from titans.evaluation.score import position_losses

        start = opening(tokenizer)
        split, texts = self.read(tokenizer)
        total = _Total()

        def read_windows() -> Iterator[Window]:
            left = sys.maxsize if self.limit is None else self.limit
            longest = sys.maxsize if self.context == "sliding" or self.length is None else self.length + 1
            for text in texts:
                ids = [*start, *islice(text, min(left, longest - len(start)))]
                left -= len(ids) - len(start)
                judged = max(1, len(start))
                if len(ids) > judged:
                    total.texts += 1
                    total.bytes += len(tokenizer.decode(ids[judged:], **PLAIN).encode())
                    length = self.length if self.context == "sliding" and self.length is not None else len(ids)
                    yield from windows(ids, judged, length, self.stride or length)
                if not left:
                    return

        rest = read_windows()
        while batch := list(islice(rest, self.batch_size)):
            ids = torch.zeros(len(batch), max(len(each.ids) for each in batch), dtype=torch.int64)
            for row, each in enumerate(batch):
                ids[row, : len(each.ids)] = torch.tensor(each.ids)
            for losses, each in zip(position_losses(model, ids, piece).cpu().double().numpy(), batch, strict=True):
                total.add(losses[: len(each.ids)], each.judged)
        if not total.tokens:
            raise ValueError(f"{self.data} has nothing to predict; expected text of at least 2 tokens")
        return total.result() | {"split": split}

    def read(self, tokenizer: Any) -> tuple[str | None, Iterator[Iterable[int]]]:
        """The split that is read, None for files, and the tokens of each text, without special ones at its ends."""
        names = [self.data] if isinstance(self.data, str) else list(self.data or ())
        if len(names) == 1 and (Path(names[0]) / PREPARED).is_file():
            return _prepared(names[0], tokenizer, self.split)
        if self.split is not None:
            raise ValueError(
                f"split is {self.split!r}; expected data that `titans prepare` wrote, as text files have no splits"
            )
        files = [file for name in names for file in text_files(name)]
        return None, (_read(file, tokenizer) for file in files)


def windows(ids: Sequence[int], judged: int, length: int, stride: int) -> Iterator[Window]:
    """Windows that read ``length`` tokens and predict as many, so that each token but the first is judged once."""
    begin = 0
    while True:
        part = ids[begin : begin + length + 1]
        yield Window(part, judged)
        done = begin + len(part)
        if done == len(ids):
            return
        begin += stride
        judged = done - begin


def _read(file: Path, tokenizer: Any) -> Iterator[int]:
    with file.open("rb") as source:
        yield from chain.from_iterable(encode_blocks(tokenizer, read_text(source, str(file))))


def _prepared(folder: str, tokenizer: Any, split: str | None) -> tuple[str, Iterator[Iterable[int]]]:
    from titans.models.tokenizer import load_tokenizer
    from titans.tasks.prepared import TokenStore, load_prepared

    prepared = load_prepared(folder)
    if load_tokenizer(str(prepared.tokenizer_folder)).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"data is {folder!r}; expected data that was prepared with the tokenizer of the model")
    chosen = split or next((name for name in ("validation", "test") if name in prepared.splits), "train")
    store = TokenStore(prepared.open(chosen))

    def texts() -> Iterator[Iterable[int]]:
        for begin, end in zip(store.starts[:-1].tolist(), store.starts[1:].tolist(), strict=True):
            ids = store.read(begin, end).tolist()
            yield ids[:-1] if ids and ids[-1] == prepared.eos_token_id else ids

    return chosen, texts()


class _Total:
    """Sums of losses and how many there are, per bucket and window."""

    def __init__(self) -> None:
        self.texts = self.tokens = self.bytes = 0
        self.loss = 0.0
        self.buckets: dict[int, list[tuple[float, int]]] = {}

    def add(self, losses: np.ndarray[Any, np.dtype[np.float64]], judged: int) -> None:
        """Adds the losses of a window, (length,), from the first that is judged on."""
        begin, end = 0, BUCKET
        while begin + 1 < len(losses):
            part = losses[max(begin + 1, judged) : end + 1]
            if len(part):
                self.buckets.setdefault(end, []).append((float(part.sum()), len(part)))
            begin, end = end, 2 * end
        self.loss += float(losses[judged:].sum())
        self.tokens += len(losses) - judged

    def result(self) -> dict[str, Any]:
        loss = self.loss / self.tokens
        finite = math.isfinite(loss)
        return {
            "loss": loss if finite else None,
            "perplexity": math.exp(min(loss, 700.0)) if finite else None,  # more overflows
            "bits_per_byte": self.loss / math.log(2) / self.bytes if finite and self.bytes else None,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "texts": self.texts,
            "cells": [self._cell(end) for end in sorted(self.buckets)],
        }

    def _cell(self, end: int) -> dict[str, Any]:
        sums, counts = np.array(self.buckets[end]).T
        parts = min(PARTS, len(sums))
        values = [
            float(a.sum() / b.sum())
            for a, b in zip(np.array_split(sums, parts), np.array_split(counts, parts), strict=True)
        ]
        value = float(sums.sum() / counts.sum())
        finite = math.isfinite(value)
        # windows differ in length, so the mean of their means is another number
        ends = bootstrap(values) if finite else (None, None)
        low, high = (None if each is None else value + each - fmean(values) for each in ends)
        return {
            "group": {"position": end},
            "value": value if finite else None,
            "low": low,
            "high": high,
            "count": int(counts.sum()),
            "values": [round(each, 6) if math.isfinite(each) else None for each in values],
        }
