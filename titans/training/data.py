"""Which tokens a training row holds; for prepared data, that depends on its number alone, not on workers or processes.

Rows are numbered through the whole run. Optimiser step s takes the rows from s x R to (s + 1) x R - 1, where R is the
number of sequences in a batch; however they are dealt out to processes and accumulation steps, a step sees the same.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from titans.tasks import IGNORED, Example, Task, WrongLengthError, example
from titans.tasks.prepared import TokenStore

Row = dict[str, Tensor]


class PackedRows(Dataset[Row]):
    """Windows of ``length`` tokens over all documents end to end, in a new order every epoch.

    The windows of an epoch do not overlap and begin at a random place, so that epochs cut the text differently. Where
    documents are separate, ``restart`` of a row, (length,) bool, says which tokens begin one, and the last token of a
    document has no target.

    Args:
        store: the tokens.
        length: tokens per row.
        rows: how many the whole run takes; None: one pass from the first token on, in order, as for validation.
        seed: decides the order.
        separate: whether documents are to be read as if each were alone.
    """

    def __init__(self, store: TokenStore, length: int, rows: int | None, seed: int = 0, separate: bool = False) -> None:
        if store.tokens < length + 1:
            raise ValueError(
                f"the data has {store.tokens:,} tokens; expected more than length = {length:,}, or a smaller length"
            )
        self.store, self.length, self.seed, self.separate = store, length, seed, separate
        self.per_epoch = max(1, (store.tokens - 1) // length - (rows is not None))
        self.in_order = rows is None
        self.rows = self.per_epoch if rows is None else rows
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._shift = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        epoch, number = divmod(index, self.per_epoch)
        if self.in_order:
            return self._row_at(number * self.length)
        if epoch != self._epoch:
            random = np.random.default_rng((self.seed, epoch))
            slack = self.store.tokens - 1 - self.per_epoch * self.length
            self._shift = int(random.integers(min(slack, self.length) + 1))
            self._order, self._epoch = random.permutation(self.per_epoch), epoch
        return self._row_at(self._shift + int(self._order[number]) * self.length)

    def _row_at(self, start: int) -> Row:
        stop = start + self.length + 1
        row = _row(self.store.read(start, stop), self.length)
        if not self.separate:
            return row
        first, last = np.searchsorted(self.store.starts, [start, stop])
        return _separated(row, self.store.starts[first:last] - start)


class CarriedRows(Dataset[Row]):
    """Documents read from their start to their end by a number of lanes, each going on where it stopped.

    Row number s x lanes + l is what lane l reads at step s: the next ``length`` tokens of its documents, end to end.
    The last token of a document is only a target. The lane that has read least takes the next document of the epoch's
    order. ``restart`` of a row, (length,) bool, says which tokens begin a document.

    Args:
        store: the tokens.
        length: tokens per row.
        lanes: rows that are read side by side: the sequences of a batch.
        steps: how many the run has; None: one pass in order, as for validation.
        seed: decides the order.
    """

    def __init__(self, store: TokenStore, length: int, lanes: int, steps: int | None, seed: int = 0) -> None:
        if store.tokens < 2:
            raise ValueError(f"the data has {store.tokens:,} tokens; expected at least 2")
        self.store, self.length, self.lanes = store, length, lanes
        self.sizes = np.maximum(0, np.diff(store.starts) - 1)  # the last token of a document has no target
        if not self.sizes.any():
            raise ValueError("no document of the data has 2 tokens; expected something to predict")
        # of each lane: its documents, and how many tokens it has read before each of them, and after the last
        self.documents, self.places = self._schedule(None if steps is None else steps * length, seed)
        self.steps = -(-max(int(places[-1]) for places in self.places) // length) if steps is None else steps

    def _schedule(self, most: int | None, seed: int) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        order = iter(range(self.store.documents)) if most is None else self._endless(seed)
        documents: list[list[int]] = [[] for _ in range(self.lanes)]
        places = [[0] for _ in range(self.lanes)]
        free = [(0, lane) for lane in range(self.lanes)]  # how much each lane has read, the least on top
        for document in order:
            read, lane = free[0]
            if most is not None and read >= most:
                break
            if self.sizes[document]:
                documents[lane].append(document)
                places[lane].append(read + int(self.sizes[document]))
                heapq.heapreplace(free, (places[lane][-1], lane))
        return [np.array(each, dtype=np.int64) for each in documents], [np.array(each) for each in places]

    def _endless(self, seed: int) -> Iterator[int]:
        epoch = 0
        while True:
            yield from np.random.default_rng((seed, epoch)).permutation(self.store.documents).tolist()
            epoch += 1

    @property
    def filled(self) -> float:
        """The share of positions that hold tokens to train on."""
        most = self.steps * self.length
        return sum(min(int(places[-1]), most) for places in self.places) / (most * self.lanes)

    def __len__(self) -> int:
        return self.steps * self.lanes

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        step, lane = divmod(index, self.lanes)
        begin, end = step * self.length, (step + 1) * self.length
        documents, places = self.documents[lane], self.places[lane]
        inputs = np.zeros(self.length, dtype=np.int64)
        targets = np.full(self.length, IGNORED, dtype=np.int64)
        restart = np.zeros(self.length, dtype=np.bool_)
        first = int(np.searchsorted(places, begin, side="right")) - 1
        last = min(len(documents), int(np.searchsorted(places, end)))
        for number in range(first, last):
            start, stop = max(begin, int(places[number])), min(end, int(places[number + 1]))
            offset = int(self.store.starts[documents[number]] - places[number])
            tokens = self.store.read(offset + start, offset + stop + 1)
            part = slice(start - begin, stop - begin)
            inputs[part], targets[part] = tokens[:-1], tokens[1:]
            restart[start - begin] = start == places[number]
        arrays = {"input_ids": inputs, "labels": targets, "restart": restart}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class StreamedRows(IterableDataset[Row]):
    """Rows of ``length`` tokens from documents that are tokenised as they come, packed end to end, pass after pass.

    Which rows come depends on the number of workers, each of which has shards of its own.

    Args:
        texts: an iterable dataset of ``datasets`` with a text column, which deals its shards out to workers itself.
        tokenizer: with an end-of-text token, which is put behind every document.
        length: tokens per row.
        column: the column that holds the text.
        separate: as for :class:`PackedRows`.
    """

    def __init__(self, texts: Any, tokenizer: Any, length: int, column: str = "text", separate: bool = False) -> None:
        self.texts, self.tokenizer, self.length, self.column = texts, tokenizer, length, column
        self.separate = separate
        # a text that spells out a special token stays text
        self.options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}

    def __iter__(self) -> Iterator[Row]:
        held: list[int] = []
        begun: list[int] = []  # where documents begin in what is held
        for text in self._endless():
            begun.append(len(held))
            held += self.tokenizer(text, **self.options)["input_ids"]
            held.append(self.tokenizer.eos_token_id)
            start = 0
            while len(held) - start > self.length:
                row = _row(np.array(held[start : start + self.length + 1]), self.length)
                yield _separated(row, np.array(begun, dtype=np.int64) - start) if self.separate else row
                start += self.length
            del held[:start]
            begun = [place - start for place in begun if place >= start]

    def _endless(self) -> Iterator[str]:
        number = 0
        while True:
            if hasattr(self.texts, "set_epoch"):
                self.texts.set_epoch(number)  # another order each time
            count = 0
            for document in self.texts:
                if document[self.column]:
                    count += 1
                    yield document[self.column]
            if not count:
                return
            number += 1


class TaskRows(Dataset[Row]):
    """Sequences that tasks draw: a row is ``length`` tokens as one sequence, or as several shorter ones.

    Args:
        tasks: for each sequence, one is chosen at random among those that have one of the length.
        tokenizer: for tasks of text.
        length: tokens per row.
        split: the split of the tasks.
        seed: decides a row, together with the split and its number.
        count: how many rows there are.
        size: gives the length of a row's sequences by its number; None: ``length``.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer: Any,
        length: int,
        split: str,
        seed: int,
        count: int,
        size: Callable[[int], int] | None = None,
    ) -> None:
        self.tasks, self.tokenizer, self.length = tuple(tasks), tokenizer, length
        self.split, self.seed, self.count, self.size = split, seed, count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        """``input_ids`` and ``labels``, (sequences, tokens); what follows the end of a sequence has no label."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        size = self.length if self.size is None else self.size(index)
        several = self.length // size
        inputs = np.zeros((several, size), dtype=np.int64)
        labels = np.full((several, size), IGNORED, dtype=np.int64)
        for place in range(several):
            number = index * self.length + place  # no two sequences of a run have the same one
            drawn = self._draw(number, size)
            inputs[place, : len(drawn.tokens)] = drawn.tokens
            labels[place, : len(drawn.tokens)] = drawn.labels()
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

    def _draw(self, number: int, size: int) -> Example:
        """A sequence of the first task, in random order, that has one of at most ``size`` tokens."""
        order = random.Random(f"{self.seed} {number}").sample(self.tasks, len(self.tasks))
        for task in order[:-1]:
            try:
                return example(task, self.split, self.seed, number, size, self.tokenizer)
            except WrongLengthError:
                pass
        return example(order[-1], self.split, self.seed, number, size, self.tokenizer)


def _row(tokens: NDArray[np.int64], length: int) -> Row:
    """Inputs and their targets, the tokens that follow, from up to length + 1 tokens."""
    inputs = np.zeros(length, dtype=np.int64)
    targets = np.full(length, IGNORED, dtype=np.int64)
    count = max(0, len(tokens) - 1)
    inputs[:count], targets[:count] = tokens[:-1], tokens[1:]
    if count < length and count:
        inputs[count:] = tokens[-1]
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(targets)}


def _separated(row: Row, starts: NDArray[np.int64]) -> Row:
    """A row in which a document begins at each of ``starts``, wherever these are: no token's target is of another."""
    length = len(row["input_ids"])
    restart = torch.zeros(length, dtype=torch.bool)
    restart[torch.from_numpy(starts[(starts >= 0) & (starts < length)])] = True
    row["labels"][torch.from_numpy(starts[(starts > 0) & (starts <= length)] - 1)] = IGNORED
    return row | {"restart": restart}


def collate(rows: Sequence[Row]) -> Row:
    """A batch of rows, or of the sequences in them."""
    join = {name: torch.cat if value.ndim > 1 else torch.stack for name, value in rows[0].items()}
    return {name: join[name]([row[name] for row in rows]) for name in rows[0]}
