"""Tokenised shards on disk, and how they are joined to the splits of a prepared set.

A shard is an Arrow stream with a row for each piece of a document. It is written whole or not at all, so that work that
was stopped goes on with the shards that are not there yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from titans.files import replacing
from titans.models.tokenizer import Encode
from titans.training.sources import BLOCK_BYTES, SKIPPED, Piece, naming

SHARD_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("ends", pa.bool_()), ("blank", pa.bool_()), ("size", pa.int64())]
)
MAX_PIECES = 4096  # per batch
MAX_DOCUMENT = 1 << 30  # bytes of text in a row, whose tokens Arrow counts with 31 bits
MAX_IN_MEMORY = 1 << 24  # tokens of a document that is put together in memory
MIN_DOCUMENTS = 20  # with fewer, a part of the tokens is validation instead of a part of the documents

Ids = NDArray[np.int32]
Write = Callable[[pa.RecordBatch], None]


def write_shard(
    path: Path, pieces: Iterable[Piece], encode: Encode, eos: int, on_batch: Callable[[int, int], None]
) -> None:
    """Tokenises the pieces and writes them to ``path``.

    Args:
        encode: turns texts into ids.
        eos: the token that is put behind the last piece of every document.
        on_batch: is told how many documents and tokens a batch had; what it raises stops the work.
    """
    with arrow_stream(path, SHARD_SCHEMA) as write:
        for batch in _batches(pieces):
            record = _record(batch, encode([piece.text for piece in batch]), eos)
            write(record)
            on_batch(sum(piece.ends for piece in batch), len(record.column(0).values))


@contextmanager
def arrow_stream(path: Path, schema: pa.Schema) -> Iterator[Write]:
    """Writes batches to a file that appears under its name when it is complete."""
    with (
        naming(path),
        replacing(path) as temporary,
        temporary.open("wb") as file,
        pa.ipc.new_stream(file, schema) as writer,
    ):
        yield writer.write_batch


class Group(NamedTuple):
    """Documents that follow each other in the shards.

    Attributes:
        values: their tokens, in one array or several.
        lengths: the tokens per document.
        blank: which documents are nothing but white space.
        size: the bytes of text per document.
    """

    values: list[Ids]
    lengths: NDArray[np.int64]
    blank: NDArray[np.bool_]
    size: NDArray[np.int64]


def read_groups(paths: Sequence[Path], eos: int, max_document: int = MAX_DOCUMENT) -> Iterator[Group]:
    """The documents of shards in order; those that cross the ends of batches and shards are joined.

    The tokens stay on disk, mapped. A document of more than ``max_document`` bytes goes on as another one.
    """
    held = _Held()
    for path in paths:
        for batch in _read_batches(path):
            offsets, values = batch.offsets, batch.values
            begin, stops = 0, np.flatnonzero(batch.ends) + 1  # rows behind the end of a document
            if held.values and len(stops):
                begin, stops = int(stops[0]), stops[1:]
                held.add(batch, 0, begin)
                yield held.group()
                held = _Held()
            if len(stops):
                starts = np.concatenate([[begin], stops[:-1]])
                yield Group(
                    [values[offsets[begin] : offsets[stops[-1]]]],
                    offsets[stops] - offsets[starts],
                    np.logical_and.reduceat(batch.blank[: stops[-1]], starts),
                    np.add.reduceat(batch.size[: stops[-1]], starts),
                )
                begin = int(stops[-1])
            held.add(batch, begin, len(batch.ends))
            if held.size > max_document:
                held.end(eos)
                yield held.group()
                held = _Held()


class Totals(NamedTuple):
    """Of the documents that are not blank: tokens of each, bytes of all; how many are blank; how many were skipped."""

    lengths: NDArray[np.int64]
    size: int
    blank: int
    skipped: int


def measure(groups: Iterable[Group]) -> Totals:
    """Counts what there is."""
    lengths, size, blank, skipped = [np.zeros(0, dtype=np.int64)], 0, 0, 0
    for group in groups:
        bad = group.size == SKIPPED
        lengths.append(group.lengths[~group.blank])
        size += int(group.size[~group.blank].sum())
        blank += int((group.blank & ~bad).sum())
        skipped += int(bad.sum())
    return Totals(np.concatenate(lengths), size, blank, skipped)


class Choice(NamedTuple):
    """Which documents are validation; and of the first of them, how many tokens stay in the train split."""

    validation: NDArray[np.bool_]
    kept: int = 0


def choose_validation(lengths: NDArray[np.int64], fraction: float, seed: int) -> Choice:
    """A part of the documents, or, if there are fewer than ``MIN_DOCUMENTS``, the last part of their tokens.

    Documents are chosen by a hash of their number and the seed: which ones does not depend on what they are.
    """
    count = len(lengths)
    validation = np.zeros(count, dtype=bool)
    if count >= MIN_DOCUMENTS:
        wanted = min(count - 1, max(1, round(fraction * count)))
        validation[np.argpartition(_hashes(count, seed), wanted)[:wanted]] = True
        return Choice(validation)
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    start = total - max(1, round(fraction * total))
    first = int(np.searchsorted(ends, start, side="right"))
    kept = start - int(ends[first] - lengths[first])
    kept = max(0, min(kept, int(lengths[first]) - 2))  # what is cut off is more than the end of a document
    if first == 0 and kept == 0:
        raise ValueError(
            f"the sources have {total:,} tokens, too few to take {fraction:g} of them as validation; expected more."
        )
    validation[first:] = True
    return Choice(validation, kept)


def divide(lengths: NDArray[np.int64], choice: Choice) -> dict[str, NDArray[np.int64]]:
    """Tokens of each document of the two splits; a document that is cut gets an end where it is cut."""
    train, validation = lengths[~choice.validation], lengths[choice.validation]
    if choice.kept:
        train = np.append(train, choice.kept + 1)
        validation = np.concatenate([validation[:1] - choice.kept, validation[1:]])
    return {"train": train, "validation": validation}


def write_splits(
    groups: Iterable[Group], choice: Choice, eos: int, train: Write, validation: Write, scratch: Path
) -> None:
    """Writes the documents that are not blank to the one split or the other; ``scratch`` is a file to work with."""
    index = 0
    cut = int(np.argmax(choice.validation)) if choice.kept else -1
    for group in groups:
        rows = _documents(group, scratch)
        held_out = choice.validation[index : index + len(rows)]
        at = cut - index
        index += len(rows)
        if 0 <= at < len(rows):
            tokens = rows.slice(at, 1).flatten().to_numpy()
            head = _join([tokens[: choice.kept], np.array([eos], dtype=np.int32)], scratch)
            tail = tokens[choice.kept :]
            _write(train, rows.slice(0, at), _rows(head, [len(head)]))
            _write(validation, _rows(tail, [len(tail)]), rows.slice(at + 1))
        else:
            _write(train, _filter(rows, ~held_out))
            _write(validation, _filter(rows, held_out))


def write_documents(groups: Iterable[Group], write: Write, scratch: Path) -> None:
    """Writes the documents that are not blank to one split."""
    for group in groups:
        _write(write, _documents(group, scratch))


@contextmanager
def split_writer(folder: Path, split: str, fingerprint: str) -> Iterator[Write]:
    """Writes a split as :func:`datasets.load_from_disk` reads it; ``fingerprint`` is that of the set."""
    from datasets import Dataset, Features, Sequence, Value, are_progress_bars_disabled
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    features = Features({"input_ids": Sequence(Value("int32"))})
    name = "data-00000-of-00001.arrow"
    folder.mkdir(parents=True)
    with arrow_stream(folder / name, features.arrow_schema) as write:
        yield write
    shown = not are_progress_bars_disabled()
    disable_progress_bar()
    try:
        with naming(folder):
            Dataset.from_dict({"input_ids": []}, features=features).save_to_disk(folder)
            path = folder / "state.json"
            state = json.loads(path.read_text()) | {"_data_files": [{"filename": name}], "_split": split}
            # datasets caches what is made of a set under its fingerprint: another set needs another one
            path.write_text(json.dumps(state | {"_fingerprint": f"{fingerprint}-{split}"}, indent=2, sort_keys=True))
    finally:
        if shown:
            enable_progress_bar()


class _Batch(NamedTuple):
    """A batch of a shard as arrays: a row is a piece, ``values[offsets[row]:offsets[row + 1]]`` are its tokens."""

    values: Ids
    offsets: NDArray[np.int64]
    ends: NDArray[np.bool_]
    blank: NDArray[np.bool_]
    size: NDArray[np.int64]


class _Held:
    """The document that is not yet at its end."""

    def __init__(self) -> None:
        self.values: list[Ids] = []
        self.blank, self.size = True, 0

    def add(self, batch: _Batch, begin: int, stop: int) -> None:
        if stop > begin:
            self.values.append(batch.values[batch.offsets[begin] : batch.offsets[stop]])
            self.blank = self.blank and bool(batch.blank[begin:stop].all())
            self.size += int(batch.size[begin:stop].sum())

    def end(self, eos: int) -> None:
        self.values.append(np.array([eos], dtype=np.int32))

    def group(self) -> Group:
        length = sum(map(len, self.values))
        return Group(self.values, np.array([length]), np.array([self.blank]), np.array([self.size]))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """As many pieces as are tokenised at once."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and (size + piece.size > BLOCK_BYTES or len(batch) == MAX_PIECES):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.size
    if batch:
        yield batch


def _record(pieces: Sequence[Piece], ids: Sequence[Ids], eos: int) -> pa.RecordBatch:
    end, nothing = np.array([eos], dtype=np.int32), np.zeros(0, dtype=np.int32)
    values = [part for piece, own in zip(pieces, ids, strict=True) for part in (own, end if piece.ends else nothing)]
    lengths = [len(own) + piece.ends for piece, own in zip(pieces, ids, strict=True)]
    return pa.record_batch(
        [
            _rows(np.concatenate(values), lengths),
            pa.array([piece.ends for piece in pieces]),
            pa.array([not piece.text or piece.text.isspace() for piece in pieces]),
            pa.array([piece.size for piece in pieces], type=pa.int64()),
        ],
        schema=SHARD_SCHEMA,
    )


def _rows(values: Ids, lengths: Sequence[int] | NDArray[np.int64]) -> pa.ListArray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, type=pa.int32()))


def _documents(group: Group, scratch: Path) -> pa.ListArray:
    """A row for each document that is not blank."""
    return _filter(_rows(_join(group.values, scratch), group.lengths), ~group.blank)


def _filter(rows: pa.ListArray, wanted: NDArray[np.bool_]) -> pa.ListArray:
    """The rows that are wanted; not a copy if they all are, as a row may be very long."""
    return rows if wanted.all() else rows.filter(pa.array(wanted))


def _write(write: Write, *rows: pa.ListArray) -> None:
    for some in rows:
        if len(some):
            write(pa.record_batch([some], names=["input_ids"]))


def _read_batches(path: Path) -> Iterator[_Batch]:
    with pa.memory_map(str(path)) as file:
        for batch in pa.ipc.open_stream(file):
            ids, *others = batch.columns
            ends, blank, size = (column.to_numpy(zero_copy_only=False) for column in others)
            yield _Batch(ids.values.to_numpy(), ids.offsets.to_numpy().astype(np.int64), ends, blank, size)


def _join(parts: Sequence[Ids], scratch: Path) -> Ids:
    """One array of several; of very many tokens, one that is on disk and mapped."""
    if len(parts) == 1:
        return parts[0]
    if sum(map(len, parts)) <= MAX_IN_MEMORY:
        return np.concatenate(parts)
    with naming(scratch):
        try:
            with scratch.open("wb") as file:
                for part in parts:
                    file.write(np.ascontiguousarray(part).data)
            return np.memmap(scratch, dtype=np.int32, mode="r")
        finally:
            scratch.unlink(missing_ok=True)


def _hashes(count: int, seed: int) -> NDArray[np.uint64]:
    """Of the numbers from 0 on, by splitmix64."""
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(seed % (1 << 64)) * np.uint64(0xD1342543DE82EF95)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
