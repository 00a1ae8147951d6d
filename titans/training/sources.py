"""Documents from text files, JSONL, Parquet and hub datasets, read in parts that fit in memory.

A source is planned first: it is divided into parts, whose bounds depend on the source and on :class:`Reading` alone.
Any part can then be read on its own. A document that is longer than a block comes as several pieces.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from titans.files import may_be_on_hub, not_there
from titans.models.tokenizer import quiet_logger

MIN_BYTES = 64
SHARD_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20  # on longer texts, the Rust tokenizer is slower per byte, and it takes 100 bytes per token
TEXT_SUFFIXES = (".txt", ".md", ".text")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
FOLDER_SUFFIXES = (
    *TEXT_SUFFIXES, *JSONL_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES + JSONL_SUFFIXES), *PARQUET_SUFFIXES,
)  # fmt: skip
HUB = "hf://"
ROWS = 64  # rows of a Parquet file or a dataset that are in memory at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SKIPPED = -1  # the size of a piece that stands for a bad line


@dataclass(frozen=True)
class Reading:
    """How sources become documents.

    Attributes:
        separator: what stands between the documents of a text file; None: a file is one document.
        text_column: the column of JSONL, Parquet and hub datasets that holds the text.
        split: the split of hub datasets whose name does not say another.
        name: the configuration of hub datasets.
        shard_bytes: about how many bytes of text are planned as one piece of work.
        skip_bad: leave out, and count, the lines of JSONL that hold no document; otherwise they are errors.
    """

    separator: str | None = None
    text_column: str = "text"
    split: str = "train"
    name: str | None = None
    shard_bytes: int = SHARD_BYTES
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if self.separator == "":
            raise ValueError("separator is empty; expected the text that stands between two documents.")
        if self.shard_bytes < MIN_BYTES:
            raise ValueError(f"shard_bytes is {self.shard_bytes}; expected at least {MIN_BYTES}.")

    @property
    def block(self) -> int:
        """Bytes of text that are tokenised at once; longer documents are cut."""
        return min(self.shard_bytes, BLOCK_BYTES)

    @property
    def window(self) -> int:
        """Bytes behind a block in which a good place for a cut is looked for."""
        return max(MIN_BYTES, self.block // 16)


class Piece(NamedTuple):
    """A document, or a part of one: its text, how many bytes that has, and whether the document ends with it."""

    text: str
    size: int
    ends: bool


class Part(NamedTuple):
    """A stretch of a source: bytes of a file, row groups of Parquet, or rows, with its size in bytes.

    A document that is open at ``stop`` ends there if ``ends``; otherwise the next part goes on with it.
    """

    source: Source
    start: int
    stop: int
    size: int
    ends: bool = True


class Source(Protocol):
    """Something that holds documents."""

    def key(self) -> object:
        """Which source it is."""

    def identity(self) -> list[Any]:
        """What changes when the source does, as JSON can hold it."""

    def plan(self, reading: Reading) -> Iterator[Part]:
        """The parts, in order."""

    def read(self, part: Part, reading: Reading) -> Iterator[Piece]:
        """The documents of a part, in order."""


def find_sources(
    names: Sequence[str], reading: Reading, without: Iterable[Source] = (), folder: Path | None = None
) -> list[Source]:
    """The files and datasets that the names stand for, each once, in the order of the names and sorted in folders.

    Args:
        names: files, folders (searched for ``FOLDER_SUFFIXES``; hidden names are left out), or hub datasets as
            ``hf://owner/name`` or ``owner/name``, with ``:split`` behind it for another split.
        without: sources to leave out.
        folder: a folder that is not searched.
    """
    found = {source.key(): source for name in names for source in _find(name, reading, folder)}
    for source in without:
        found.pop(source.key(), None)
    return list(found.values())


def plan_shards(sources: Iterable[Source], reading: Reading) -> list[list[Part]]:
    """The parts of all sources in order, small ones together, in shards of about ``shard_bytes``."""
    shards: list[list[Part]] = []
    size = 0
    for source in sources:
        for part in source.plan(reading):
            if not shards or size + part.size > reading.shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(part)
            size += part.size
    return shards


def read_shard(shard: Iterable[Part], reading: Reading) -> Iterator[Piece]:
    """The documents of a shard, in order."""
    for part in shard:
        yield from part.source.read(part, reading)


def sample_texts(found: Iterable[Source], reading: Reading, max_bytes: int) -> Iterator[str]:
    """The texts of the sources, or if they are longer, ``max_bytes`` of them from all over the sources."""
    reading = replace(reading, shard_bytes=BLOCK_BYTES)
    shards = plan_shards(found, reading)
    quota = left = max_bytes
    if sum(part.size for shard in shards for part in shard) > max_bytes:
        count = max(1, min(len(shards), max_bytes // BLOCK_BYTES))
        shards = [shards[i * len(shards) // count] for i in range(count)]
        quota = -(-max_bytes // count)
    for shard in shards:
        own = min(quota, left)
        left -= own
        for piece in read_shard(shard, reading):
            if own <= 0:
                break
            yield piece.text if piece.size <= own else piece.text.encode()[:own].decode(errors="ignore")
            own -= piece.size
        left += max(0, own)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """While open, an error of reading or writing names the path; by itself, Python does so only when opening."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def find_cut(window: bytes) -> int:
    """Where to cut a text that is too long, in bytes from the start of ``window``; four bytes at each end are context.

    The best place is in front of a single space: byte-level BPE that cuts words in GPT-2's or GPT-4's way then gives
    the two parts the tokens that it gives them together. The next best, for texts without spaces, is behind a single
    line break, where the same is true; then in front of the last of several white characters, which only GPT-2's way
    leaves as it is; and if there is nothing of the kind, between any two characters.
    """
    text = window.decode("utf-8", "surrogateescape")
    places = (pattern.search(text, 4, len(text) - 4) for pattern in _CUTS)
    cut = next((found.start() for found in places if found), 4)
    return len(text[:cut].encode("utf-8", "surrogateescape"))


_CUTS = (re.compile(r"(?<=\S) (?=\S)"), re.compile(r"(?<=\S\n)(?=\S)"), re.compile(r"(?=\s\S)"))


@dataclass(frozen=True)
class _File:
    """A file of any kind."""

    path: Path

    def key(self) -> object:
        return self.path.resolve()

    def identity(self) -> list[Any]:
        state = self.path.stat()
        return [str(self.path.resolve()), state.st_size, state.st_mtime_ns]

    @property
    def packed(self) -> bool:
        """Whether it has to be unpacked, and can only be read from its start."""
        return self.path.suffix.lower() == ".gz"

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The bytes of its text."""
        try:
            with naming(self.path):
                if self.packed:
                    with gzip.open(self.path) as packed:
                        yield cast(BinaryIO, packed)
                else:
                    with self.path.open("rb") as file:
                        yield file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                f"{self.path} cannot be unpacked; expected a whole gzip file, and got: {error}."
            ) from error

    def decode(self, data: bytes, offset: int) -> str:
        """Bytes that begin at ``offset`` of the file as text."""
        bad = data.find(b"\0")
        if bad < 0:
            try:
                return data.decode()
            except UnicodeDecodeError as error:
                bad = error.start
        raise ValueError(
            f"{self.path} is not text: byte {offset + bad:,}{' when unpacked' if self.packed else ''} is "
            f"0x{data[bad]:02x}; expected UTF-8 without NUL bytes."
        )

    def start(self, file: BinaryIO) -> int:
        """Where the text begins: behind a byte order mark, if there is one."""
        begin = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
        file.seek(begin)
        return begin

    def stretches(self, reading: Reading, bound: Callable[[BinaryIO, int], int]) -> Iterator[tuple[int, int, int]]:
        """The starts, stops and sizes of parts; ``bound`` finds where one may end, at or behind a place in the file."""
        size = self.path.stat().st_size
        if self.packed:
            yield 0, sys.maxsize, size
            return
        with self.path.open("rb") as file:
            start, stop = self.start(file), -1
            while stop < size:
                place = start + reading.shard_bytes
                stop = size if place + reading.window >= size else bound(file, place)
                yield start, stop, stop - start
                start = stop


class TextFile(_File):
    """A text file, perhaps packed by gzip: one document, or several with a separator between them."""

    def plan(self, reading: Reading) -> Iterator[Part]:
        if reading.separator is not None:
            separator = reading.separator.encode()
            for bounds in self.stretches(reading, lambda file, place: _next_document(file, place, separator)):
                yield Part(self, *bounds)
        else:
            end = self.path.stat().st_size
            for bounds in self.stretches(reading, lambda file, place: _next_cut(file, place, reading.window)):
                yield Part(self, *bounds, ends=bounds[1] >= end)

    def read(self, part: Part, reading: Reading) -> Iterator[Piece]:
        with self.open() as file:
            offset = file.seek(part.start) or self.start(file)
            pieces = _cut_stream(lambda count: file.read(min(count, part.stop - file.tell())), reading, part.ends)
            for begin, data, ends in pieces:
                yield Piece(self.decode(data, offset + begin), len(data), ends)


class JsonLines(_File):
    """A JSONL file, perhaps packed by gzip: each line is an object with a document in its text column."""

    def plan(self, reading: Reading) -> Iterator[Part]:
        for bounds in self.stretches(reading, _next_line):
            yield Part(self, *bounds)

    def read(self, part: Part, reading: Reading) -> Iterator[Piece]:
        with self.open() as file:
            offset = file.seek(part.start) or self.start(file)
            for line in file:
                if offset >= part.stop:
                    break
                if line.strip():
                    yield from self._document(line, offset, reading)
                offset += len(line)

    def _document(self, line: bytes, offset: int, reading: Reading) -> Iterator[Piece]:
        try:
            text, data = self._text(line, offset, reading.text_column)
        except ValueError as error:
            if not reading.skip_bad:
                raise self._with_line(error, offset) from None
            yield Piece("", SKIPPED, True)
        else:
            yield from _pieces(text, data, reading)

    def _text(self, line: bytes, offset: int, column: str) -> tuple[str, bytes]:
        """The document of a line, as text and as bytes."""
        decoded = self.decode(line, offset)
        try:
            row = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            wrong = getattr(error, "msg", error)
            raise _BadLine(f"is not JSON ({wrong}); expected an object with a '{column}'") from None
        if not isinstance(row, dict):
            raise _BadLine(f"is a {type(row).__name__} in JSON; expected an object with a '{column}'")
        if column not in row:
            raise _BadLine(_missing_column(column, list(row)))
        text = row[column] or ""
        if not isinstance(row[column], str | None):
            raise _BadLine(f"has a '{column}' that is a {type(row[column]).__name__}; expected a text")
        try:
            return text, text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            raise _BadLine(f"has half a character, {half}, in its '{column}'; expected text") from None

    def _with_line(self, error: ValueError, offset: int) -> ValueError:
        """Says which line it is, which is counted only now."""
        if not isinstance(error, _BadLine):
            return error
        number = 1
        with self.open() as file:
            while offset > 0 and (data := file.read(min(offset, 1 << 20))):
                number += data.count(b"\n")
                offset -= len(data)
        return ValueError(f"{self.path}, line {number:,} {error}; --skip-bad leaves such lines out.")


class _BadLine(ValueError):
    """What is wrong with a line."""


class ParquetFile(_File):
    """A Parquet file: each row is a document."""

    def plan(self, reading: Reading) -> Iterator[Part]:
        column = reading.text_column
        with self._opened() as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise ValueError(f"{self.path} {_missing_column(column, schema.names)}.")
            _check_type(schema.field(column).type, f"{self.path} has a column '{column}'")
            position = file.schema.names.index(column)
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).column(position).total_uncompressed_size
                yield Part(self, group, group + 1, size)

    def read(self, part: Part, reading: Reading) -> Iterator[Piece]:
        with self._opened() as file:
            groups = list(range(part.start, part.stop))
            for batch in file.iter_batches(ROWS, groups, columns=[reading.text_column], use_threads=False):
                yield from _rows(batch.column(0), str(self.path), reading)

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        try:
            with pq.ParquetFile(self.path) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            wrong = str(error).splitlines()[0].rstrip(".")
            raise ValueError(f"{self.path} is damaged; expected a whole Parquet file ({wrong}).") from error


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset of the hub: each row is a document."""

    name: str
    config: str | None
    split: str
    rows: Any = field(repr=False, compare=False)  # a datasets.Dataset

    def key(self) -> object:
        return self.name, self.config, self.split

    def identity(self) -> list[Any]:
        files = self.rows.cache_files
        # datasets keeps each version of a dataset in a folder that is named after it
        version = Path(files[0]["filename"]).parent.name if files else self.rows._fingerprint
        return [HUB + self.name, self.config, self.split, len(self.rows), version]

    def plan(self, reading: Reading) -> Iterator[Part]:
        size = -(-self.rows.data.nbytes // max(1, len(self.rows)))  # of a row
        step = max(1, reading.shard_bytes // max(1, size))
        for start in range(0, len(self.rows), step):
            stop = min(start + step, len(self.rows))
            yield Part(self, start, stop, size * (stop - start))

    def read(self, part: Part, reading: Reading) -> Iterator[Piece]:
        for start in range(part.start, part.stop, ROWS):
            table = self.rows[start : min(start + ROWS, part.stop)]
            yield from _rows(table.column(reading.text_column), HUB + self.name, reading)


def load_hub_dataset(name: str, reading: Reading) -> HubDataset:
    """A dataset by its name on the hub, ``owner/name`` or ``owner/name:split``; it is downloaded to datasets' cache."""
    import datasets

    name, _, split = name.removeprefix(HUB).partition(":")
    split = split or reading.split
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with quiet_logger("huggingface_hub"):
            rows = datasets.load_dataset(name, reading.name, split=split)
    except Exception as error:  # whatever the part that downloads, reads or builds it raises
        wrong = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(f"{HUB}{name} cannot be loaded from the hub, nor is it a local path: {wrong}.") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()
    column = reading.text_column
    if column not in rows.column_names:
        raise ValueError(f"{HUB}{name} {_missing_column(column, rows.column_names)}.")
    rows = rows.select_columns([column]).with_format("arrow")
    _check_type(rows.data.schema.field(column).type, f"{HUB}{name} has a column '{column}'")
    return HubDataset(name, reading.name, split, rows)


def _find(name: str, reading: Reading, without: Path | None) -> list[Source]:
    if name.startswith(HUB):
        return [load_hub_dataset(name, reading)]
    path = Path(name).expanduser()
    if name and path.is_dir():
        files = [_file(file) for file in _walk(path, without)]
        if not files:
            raise ValueError(f"{name} holds nothing to read; expected files that end in {', '.join(FOLDER_SUFFIXES)}.")
        return files
    if name and path.is_file():
        return [_file(path)]
    if name and path.exists():
        raise ValueError(f"{name} is neither a file nor a folder; expected one of them.")
    if not may_be_on_hub(name, r"[\w.-]+/[\w.-]+(:[^/]+)?") or name.lower().endswith(FOLDER_SUFFIXES):
        raise ValueError(f"{not_there(name or repr(name))}; expected a file, a folder, or hf://OWNER/NAME on the hub.")
    return [load_hub_dataset(name, reading)]


def _walk(folder: Path, without: Path | None) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if without is not None and Path(parent).resolve() == without.resolve():
            folders.clear()
            continue
        for name in sorted(files):
            if name.lower().endswith(FOLDER_SUFFIXES) and not name.startswith("."):
                yield Path(parent, name)


def _file(path: Path) -> Source:
    name = path.name.lower()
    if name.endswith(PARQUET_SUFFIXES):
        return ParquetFile(path)
    return JsonLines(path) if name.removesuffix(".gz").endswith((*JSONL_SUFFIXES, ".json")) else TextFile(path)


def _next_line(file: BinaryIO, place: int) -> int:
    """The first start of a line at or behind ``place``."""
    file.seek(place - 1)
    while (part := file.readline(1 << 20)) and not part.endswith(b"\n"):
        pass
    return file.tell()


def _next_cut(file: BinaryIO, place: int, window: int) -> int:
    file.seek(place - 4)
    return place - 4 + find_cut(file.read(window + 4))


def _next_document(file: BinaryIO, place: int, separator: bytes) -> int:
    """The end of the first separator behind ``place`` that a search from the start of the file finds as well.

    It does if no other one begins in it from the left: "\\n\\n" in "\\n\\n\\n" may be the first two or the last two.
    """
    begin = max(0, place - len(separator))
    file.seek(begin)
    data = b""
    last = -len(separator)
    while chunk := file.read(1 << 20):
        data += chunk
        at = data.find(separator)
        while at >= 0:
            if begin + at >= place and at - last >= len(separator):
                return begin + at + len(separator)
            last = at
            at = data.find(separator, at + 1)
        drop = max(0, len(data) - len(separator) + 1)
        data, begin, last = data[drop:], begin + drop, last - drop
    return file.tell()


def _cut_stream(read: Callable[[int], bytes], reading: Reading, ends: bool = True) -> Iterator[tuple[int, bytes, bool]]:
    """Documents of a stream, or pieces of long ones: where each begins, its bytes, and whether its document ends.

    Args:
        read: the next bytes, so many at most; none at the end.
        ends: whether the last document ends with the stream.
    """
    separator = (reading.separator or "").encode()
    enough = reading.block + reading.window + len(separator)
    buffer, begin, number = b"", 0, 0
    while True:
        while len(buffer) < enough and (data := read(enough - len(buffer))):
            buffer += data
        last = len(buffer) < enough
        if separator:
            *documents, buffer = buffer.split(separator)
            for document in documents:
                yield begin, document, True
                begin += len(document) + len(separator)
                number += 1
        if last:
            break
        if len(buffer) >= enough:
            cut = reading.block - 4 + find_cut(buffer[reading.block - 4 : reading.block + reading.window])
            yield begin, buffer[:cut], False
            buffer, begin = buffer[cut:], begin + cut
    if buffer or not number:
        yield begin, buffer, ends


def _pieces(text: str, data: bytes, reading: Reading) -> Iterator[Piece]:
    """A document that is in memory, as text and as bytes: one piece, or several."""
    if len(data) < reading.block + reading.window:
        yield Piece(text, len(data), True)
        return
    whole = Reading(shard_bytes=reading.shard_bytes)
    for _, part, ends in _cut_stream(io.BytesIO(data).read, whole):
        yield Piece(part.decode(), len(part), ends)


def _rows(column: Any, name: str, reading: Reading) -> Iterator[Piece]:
    """The documents of an Arrow column."""
    try:
        texts = column.to_pylist()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} has a '{reading.text_column}' that is not UTF-8: {error}.") from error
    for text in texts:
        yield from _pieces(text or "", (text or "").encode(), reading)


def _missing_column(column: str, columns: Sequence[str]) -> str:
    near = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(map(repr, columns)) or 'none'}"
    return f"has no column '{column}' ({hint}); expected the one that --text-column names"


def _check_type(kind: pa.DataType, whose: str) -> None:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise ValueError(f"{whose} of {kind}; expected one of strings.")
