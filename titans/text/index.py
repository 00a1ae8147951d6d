"""Nearest vectors: exact search in memory, and for large users files of usearch that can always be made again."""

from __future__ import annotations

import itertools
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titans.files import write_atomically
from titans.text.records import StoreError
from titans.text.store import Selection

if TYPE_CHECKING:
    from titans.text.sqlite import SqliteStore

EXACT = 20_000  # records of a user that are searched one by one; beyond that there are files
SEGMENT = 10_000  # records of a file
PATCHED = 1_000  # changes that are followed one by one; after more, everything is read again
LEAST = 1_000  # fewer than this are never worth a file
KEPT = 300_000  # records whose sequence numbers are kept in memory, over all users
WIDER = 4  # factor by which more is asked of a file when not all of its records may be found
EXPANSION = 64  # candidates that usearch follows
ONE_THREAD = 2_000  # vectors that one thread adds: of small graphs that several threads made, one in sixty found less


def nearest_exact(matrix: np.ndarray, vector: np.ndarray, many: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of (n, width) with the highest product with a vector, and the products, best first."""
    return highest(matrix @ vector, many)


def highest(scores: np.ndarray, many: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of the highest of some scores, and these, best first; among equals the later one."""
    many = min(many, len(scores))
    if many < len(scores):
        rows = np.argpartition(-scores, many - 1)[:many] if many else np.empty(0, dtype=np.int64)
    else:
        rows = np.arange(len(scores))
    rows = rows[np.lexsort((-rows, -scores[rows]))]
    return rows, scores[rows]


def _best(parts: Sequence[tuple[np.ndarray, np.ndarray]], many: int) -> tuple[np.ndarray, np.ndarray]:
    """The best of several lists of records and their products."""
    seqs, scores = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.lexsort((-seqs, -scores))[:many]
    return seqs[order], scores[order]


@dataclass(frozen=True)
class UserRow:
    """A user of the store; the epoch moves when something of the user's is erased."""

    id: int
    count: int
    epoch: int


@dataclass(frozen=True)
class Segment:
    """A file of the index, the range of records of a user that it covers, how many, and the checksum of its bytes."""

    file: str
    low: int
    high: int
    count: int
    sum: int


@dataclass
class Catalogue:
    """What a process keeps in memory about a user's records, in their order.

    Attributes:
        seqs, scopes, lengths: (n,), for each record its sequence number, its scope and its number of words.
        open_seqs, open_vectors: (m,) and (m, width), the records that no file of the index covers.
        files: the open files of the index by name; None for one that is missing or damaged.
        epoch, event: of the user, and the last line of the log, when the records were read.
        state: which records and files the open vectors belong to.
    """

    user: int
    epoch: int
    event: int
    seqs: np.ndarray
    scopes: np.ndarray
    lengths: np.ndarray
    open_seqs: np.ndarray
    open_vectors: np.ndarray
    files: dict[str, tuple[Segment, Any] | None] = field(default_factory=dict)
    state: tuple[Any, ...] = ()


class LocalIndex:
    """The vector index of a store on this machine: exact for small users, files of usearch for large ones."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self._users: OrderedDict[int, Catalogue] = OrderedDict()

    def catalogue(self, number: int, vectors: bool = True) -> Catalogue:
        """A user's records as they are in the store now; called while the store is being read."""
        user = self.store.user_row(number)
        known = self._users.get(user.id)
        if known is None or (known.epoch != user.epoch and not self._patch(known, user)):
            none = np.empty(0, dtype=np.int64)
            matrix = np.empty((0, int(self.store.get_meta("width") or 0)), dtype=np.float32)
            known = Catalogue(user.id, user.epoch, self.store.last_event(), none, none, none, none, matrix)
            self._users[user.id] = known
        self._users.move_to_end(user.id)
        last = int(known.seqs[-1]) if len(known.seqs) else 0
        new = self.store.rows_after(user.id, last)
        if len(new):
            known.seqs, known.scopes, known.lengths = (
                np.concatenate([old, column])
                for old, column in zip((known.seqs, known.scopes, known.lengths), new.T, strict=True)
            )
        if vectors:
            self._refresh(known)
        while len(self._users) > 1 and sum(len(other.seqs) for other in self._users.values()) > KEPT:
            self._users.popitem(last=False)
        return known

    def allowed(self, known: Catalogue, selection: Selection) -> np.ndarray | None:
        """(n,) bool: which of a user's records are selected; None if all are."""
        matching = self.store.matching(selection)
        if selection.scopes is None and matching is None:
            return None
        mask = np.ones(len(known.seqs), dtype=bool)
        if selection.scopes is not None:
            mask &= np.isin(known.scopes, selection.scopes)
        if matching is not None:
            mask &= np.isin(known.seqs, matching)
        return None if mask.all() else mask

    def _patch(self, known: Catalogue, user: UserRow) -> bool:
        """Follows what was erased or replaced since; False if that is too much, and everything must be read again."""
        changed = self.store.changes_after(known.event, PATCHED + 1)
        if changed is None or len(changed) > PATCHED:
            return False
        stay = ~np.isin(known.seqs, changed)
        last = int(known.seqs[-1]) if len(known.seqs) else 0
        again = self.store.rows_at(user.id, [seq for seq in changed if seq <= last])  # later ones come with all others
        columns = (known.seqs[stay], known.scopes[stay], known.lengths[stay])
        joined = [np.concatenate([old, new]) for old, new in zip(columns, again.T, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        known.seqs, known.scopes, known.lengths = (column[order] for column in joined)
        stay = ~np.isin(known.open_seqs, changed)
        known.open_seqs, known.open_vectors = known.open_seqs[stay], known.open_vectors[stay]
        known.epoch, known.event, known.state = user.epoch, self.store.last_event(), ()
        return True

    def _refresh(self, known: Catalogue) -> None:
        """Opens new files of the index, and loads the vectors that none of them covers."""
        segments = {segment.file: segment for segment in self.store.segments(known.user)}
        state = (len(known.seqs), *segments)
        if known.state == state:
            return
        known.files = {name: known.files[name] for name in known.files if name in segments}
        uncovered = np.ones(len(known.seqs), dtype=bool)
        for name, segment in segments.items():
            if name not in known.files:
                opened = _open_file(self.store.index_folder / name, segment.sum)
                known.files[name] = None if opened is None else (segment, opened)
            if known.files[name] is None:
                continue
            low, high = np.searchsorted(known.seqs, [segment.low, segment.high + 1])
            uncovered[low:high] = False
        known.state = state
        wanted = known.seqs[uncovered]
        seqs, vectors = known.open_seqs, known.open_vectors
        kept = np.isin(seqs, wanted)
        if not kept.all():
            seqs, vectors = seqs[kept], vectors[kept]
        missing = wanted[~np.isin(wanted, seqs)]
        if len(missing):
            later = not len(seqs) or missing[0] > seqs[-1]
            width = known.open_vectors.shape[1]
            found, matrix = self.store.vectors_between(known.user, int(missing[0]), int(missing[-1]), width)
            new = np.isin(found, missing)
            seqs, vectors = np.concatenate([seqs, found[new]]), np.concatenate([vectors, matrix[new]])
            if not later:
                order = np.argsort(seqs, kind="stable")
                seqs, vectors = seqs[order], vectors[order]
        known.open_seqs, known.open_vectors = seqs, vectors

    def nearest(self, selection: Selection, vectors: np.ndarray, many: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each vector of (n, width), the numbers of the nearest records and their cosines, best first."""
        known = self.catalogue(selection.user)
        allowed = self.allowed(known, selection)
        seqs, matrix = known.open_seqs, known.open_vectors
        if allowed is not None:
            inside = among(seqs, known.seqs[allowed])
            seqs, matrix = seqs[inside], matrix[inside]
        parts = [[(seqs[rows], scores)] for rows, scores in (highest(each, many) for each in vectors @ matrix.T)]
        for segment, opened in filter(None, known.files.values()):
            low, high = np.searchsorted(known.seqs, [segment.low, segment.high + 1])
            may = None if allowed is None or allowed[low:high].all() else known.seqs[low:high][allowed[low:high]]
            for part, found in zip(parts, _search_file(opened, vectors, may, int(high - low), many), strict=True):
                part.append(found)
        return [_best(part, many) for part in parts]

    def build(self, user: int) -> None:
        """Writes files for a user's records once enough of them are in no file that can be read."""
        with self.store.reading():
            row = self.store.user_row(user)
            covered = self.store.segments(user)
            if row.count < EXACT and not covered:
                return
            lost = [segment for segment in covered if self._is_lost(user, segment)]
            if not lost and row.count - sum(each.count for each in covered) < (SEGMENT if covered else EXACT):
                return
        if lost:
            with self.store.writing():
                for segment in lost:
                    self.store.drop_segment(segment.file)
        with self.store.reading():
            known = self.catalogue(user)
            epoch, seqs, vectors = known.epoch, known.open_seqs, known.open_vectors
            runs = _runs(seqs, self.store.segments(user), lost)
        for low, high in runs:
            self._build_file(user, epoch, seqs[low:high], vectors[low:high])

    def _is_lost(self, user: int, segment: Segment) -> bool:
        """Whether a file is missing, or was found damaged when it was opened."""
        known = self._users.get(user)
        opened = known is None or known.files.get(segment.file, True)
        return opened is None or not (self.store.index_folder / segment.file).is_file()

    def _build_file(self, user: int, epoch: int, seqs: np.ndarray, vectors: np.ndarray) -> None:
        name = f"{uuid.uuid4().hex}.usearch"
        path = self.store.index_folder / name
        with self.store.writing():
            self.store.begin_building(name)
        segment = None
        try:
            data = _make_file(seqs, vectors)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, data, private=True)
            segment = Segment(name, int(seqs[0]), int(seqs[-1]), len(seqs), zlib.crc32(data))
        finally:
            with self.store.writing():
                valid = self.store.end_building(name, user, epoch, segment)
            if not valid:
                path.unlink(missing_ok=True)


def among(seqs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which of the numbers are among those known, which are sorted."""
    if not len(known):
        return np.zeros(len(seqs), dtype=bool)
    rows = np.minimum(np.searchsorted(known, seqs), len(known) - 1)
    return known[rows] == seqs


def _runs(seqs: np.ndarray, covered: Sequence[Segment], lost: Sequence[Segment]) -> list[tuple[int, int]]:
    """Ranges of the open records to write to files; none overlaps another file's range.

    Files that were lost are made again. At the end, which will grow, only whole files are made. The holes that erasing
    has left are filled once they have as many records as are searched one by one.
    """
    again = {int(np.searchsorted(seqs, segment.low)) for segment in lost}
    ends = [each.high + 1 for each in lost]
    edges = np.searchsorted(seqs, [*(segment.low for segment in (*covered, *lost)), *ends])
    edges = np.unique(np.concatenate([[0], edges, [len(seqs)]])).astype(int)
    tail = int(np.searchsorted(seqs, max((segment.high for segment in (*covered, *lost)), default=0), side="right"))
    ranges = []
    for low, high in itertools.pairwise(edges.tolist()):
        least = SEGMENT if low >= tail else LEAST
        if low < tail < EXACT and low not in again:
            continue
        pieces = [(start, min(start + SEGMENT, high)) for start in range(low, high, SEGMENT)]
        ranges += [(start, end) for start, end in pieces if end - start >= least]
    return ranges


def _usearch() -> Any:
    try:
        from usearch.index import Index
    except ImportError:
        raise StoreError(
            f"more than {EXACT:,} records of a user need usearch: pip install titan-memory[text]"
        ) from None
    return Index


def _make_file(seqs: np.ndarray, vectors: np.ndarray) -> bytes:
    """The bytes of an index of vectors (n, width), whose keys are sequence numbers."""
    index = _usearch()(ndim=vectors.shape[1], metric="cos", dtype="f16", expansion_add=128)
    index.add(seqs.astype(np.uint64), vectors, threads=1 if len(seqs) <= ONE_THREAD else 0)
    return bytes(index.save())


def _open_file(path: Path, sum: int) -> Any:
    """The index in a file, or None if it cannot be read: its records are then searched one by one."""
    try:
        if zlib.crc32(path.read_bytes()) != sum:  # a damaged file could lead usearch anywhere
            return None
        index = _usearch().restore(str(path), view=True)
    except (OSError, RuntimeError, ValueError):
        return None
    if index is not None:
        index.expansion_search = EXPANSION
    return index


def _search_file(
    index: Any, vectors: np.ndarray, may: np.ndarray | None, size: int, many: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each vector the nearest records of a file, best first; ``may``: those that may be found, None if all may."""
    if may is None:
        found = index.search(vectors, min(many, size))
        if len(vectors) == 1:  # usearch takes it for one question instead of several
            return [(found.keys.astype(np.int64), 1 - found.distances)]
        rows = zip(found.keys, found.distances, found.counts, strict=True)
        return [(keys[:count].astype(np.int64), 1 - far[:count]) for keys, far, count in rows]
    if WIDER * len(may) < size:
        matrix = np.asarray(index.get(may.astype(np.uint64)), dtype=np.float32).reshape(len(may), vectors.shape[1])
        return [(may[rows], scores) for rows, scores in (highest(each, many) for each in vectors @ matrix.T)]
    return [_search_among(index, vector, may, size, many) for vector in vectors]


def _search_among(
    index: Any, vector: np.ndarray, may: np.ndarray, size: int, many: int
) -> tuple[np.ndarray, np.ndarray]:
    asked = many
    while True:
        found = index.search(vector, min(asked, size))
        seqs, scores = found.keys.astype(np.int64), 1 - found.distances
        inside = np.isin(seqs, may)
        if int(inside.sum()) >= min(many, len(may)) or asked >= size:
            return seqs[inside][:many], scores[inside][:many]
        asked *= WIDER
