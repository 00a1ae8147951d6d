"""What every store does: records with their log, scopes, vectors, words and memory states, in one transaction each."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np

from titans.text.ranking import MOST_POSTINGS
from titans.text.records import MAX_NUMBER, Event, Record, Scope

FORMAT = 3  # of the tables, in every engine
# A word is a run of letters and digits; scripts that are written without spaces go character by character.
WORD = re.compile("[぀-ヿ㐀-䶿一-鿿가-힯]|(?:(?![぀-ヿ㐀-䶿一-鿿가-힯])[^\\W_])+")
TOKENIZER = "porter unicode61 remove_diacritics 2 tokenchars '_'"
MARK = "0_"  # of words that are stemmed for any user
PART = 1_000  # records that are fetched at a time
REQUESTS_KEPT = timedelta(days=1)
OPERATORS = {"eq": "=", "ne": "<>", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}  # of filters, in SQL
Tests = Mapping[str, Mapping[str, Any]]  # of metadata, as check_filters returns them


@dataclass(frozen=True)
class ScopeRow:
    """A scope of the store; the version moves with every write to it."""

    id: int
    user: int
    count: int
    version: int


@dataclass(frozen=True)
class State:
    """A scope's memory after so many texts, as bytes."""

    count: int
    data: bytes


@dataclass(frozen=True, eq=False)
class Selection:
    """The records of one user that are searched; good for one transaction.

    Attributes:
        user: the number of the user.
        scopes: numbers of the scopes; None: all of the user's.
        tests: of the metadata; empty: none.
    """

    user: int
    scopes: tuple[int, ...] | None = None
    tests: Tests | None = None


@dataclass(frozen=True)
class Matches:
    """What the words of a question found: BM25 by record, best first, and the words that were too common to look up."""

    scores: dict[int, float]
    ignored: tuple[str, ...] = ()


class Store(ABC):
    """An open store; safe to share between threads, and between processes that open the same one.

    Records have sequence numbers, which grow in the order of writing within a scope. All methods are called inside
    :meth:`writing` or :meth:`reading`, except those that say otherwise.

    Attributes:
        name: of the store in messages; never holds a password.
        read_only: nothing is written.
        damage: a sentence if the store is damaged, which makes it read-only.
        lock: guards what a process keeps in memory of the store.
    """

    name: str
    read_only: bool
    damage: str | None = None
    lock: threading.RLock

    # Transactions

    @abstractmethod
    def writing(self, alone: bool = False) -> AbstractContextManager[None]:
        """One transaction: all of it is durable at the end, or nothing of it is there if anything is raised.

        With ``alone``, nobody else writes to the store until it ends; without, nobody to the scopes that are locked.
        """

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """One view of the store, whatever others write meanwhile; may be nested in itself or in :meth:`writing`."""

    @abstractmethod
    def require_writable(self) -> None:
        """Raises a :class:`StoreError` if nothing can be written; called anywhere."""

    @abstractmethod
    def close(self) -> None:
        """Closes the store; called outside of transactions."""

    # The store as a whole

    @abstractmethod
    def get_meta(self, key: str) -> str | None:
        """A fact about the store itself."""

    @abstractmethod
    def set_meta(self, key: str, value: str | None) -> None:
        """Sets a fact about the store; None removes it."""

    @abstractmethod
    def count(self) -> int:
        """The number of records in the store."""

    @abstractmethod
    def last_event(self) -> int:
        """A number that is another one after records were added, changed or removed."""

    @abstractmethod
    def stats(self, user: str | None) -> dict[str, Any]:
        """Figures of the store, or of one user in it."""

    @abstractmethod
    def size(self) -> int:
        """Bytes that the store takes; called outside of transactions."""

    @abstractmethod
    def check(self) -> list[str]:
        """What is wrong with the store, one sentence each; none if all is well. Opens its own transaction."""

    # Scopes

    @abstractmethod
    def find_scope(self, scope: Scope) -> ScopeRow | None:
        """The exact scope, if it has been written to."""

    @abstractmethod
    def make_scope(self, scope: Scope) -> ScopeRow:
        """The exact scope, new if need be; nobody else writes to it until the transaction ends."""

    @abstractmethod
    def lock_scopes(self, seqs: Iterable[int]) -> dict[ScopeRow, list[int]]:
        """The scopes of some records, each with its own of them; records that are not there are left out.

        Inside :meth:`writing`, nobody else writes to these scopes until the transaction ends.
        """

    @abstractmethod
    def advance_scope(self, scope: int, more: int) -> None:
        """Moves a scope's version, and its count by ``more``."""

    @abstractmethod
    def remove_scope(self, scope: int) -> int:
        """Takes a scope with all its records, history and name out of the store; returns how many records it had."""

    @abstractmethod
    def list_scopes(self, user: str | None) -> list[tuple[Scope, int]]:
        """Every scope that has records, or those of a user, and how many records each has."""

    @abstractmethod
    def select(self, scope: Scope, tests: Tests, exact: bool = False) -> Selection | None:
        """The records of a user that match the names given and pass the tests; None if the names match none.

        An agent or session that is not given matches any; with ``exact`` it matches only records without one.
        """

    @abstractmethod
    def rows_of(self, selection: Selection, most: int) -> list[ScopeRow]:
        """The scopes with records that a selection covers, those written to last first, at most so many."""

    @abstractmethod
    def matching_scopes(self, scope: Scope, below: bool) -> list[int]:
        """The numbers of the exact scope, or of all scopes ``below`` the names given; of those without records too.

        Inside :meth:`writing`, nobody else writes to these scopes until the transaction ends.
        """

    # Records

    @abstractmethod
    def insert(
        self, records: Sequence[Record], scopes: Mapping[Scope, ScopeRow], vectors: np.ndarray, encoder: str
    ) -> list[int]:
        """Adds records with their vectors, words and lines of the log, in their order; returns their numbers."""

    @abstractmethod
    def find(self, id: str, user: str | None) -> tuple[int, Record] | None:
        """A record of a user (None: of any) by its id, and its sequence number."""

    @abstractmethod
    def records(self, seqs: Iterable[int]) -> dict[int, Record]:
        """Records by their sequence numbers, in that order; those that are not there are left out."""

    @abstractmethod
    def newest(self, selection: Selection, many: int, before: int = MAX_NUMBER) -> dict[int, Record]:
        """The newest records of a selection by their numbers, which are below ``before``, newest first."""

    def list_records(self, user: str | None) -> Iterator[Record]:
        """All records, or those of a user, in their order, a few at a time."""
        last = 0
        while part := self.records_after(last, user, PART):
            yield from part.values()
            last = max(part)

    @abstractmethod
    def records_after(self, seq: int, user: str | None, many: int) -> dict[int, Record]:
        """The first records with higher numbers than ``seq``, of all or of a user, in their order."""

    @abstractmethod
    def texts(self) -> list[tuple[int, int, str]]:
        """(number, scope, text) of every record, in their order."""

    @abstractmethod
    def remove(self, seqs: Sequence[int], kind: str) -> None:
        """Takes records out of everything but their scopes' counts, and their texts out of the log.

        What replaced one of them replaces from then on what that one had replaced.
        """

    @abstractmethod
    def change(self, seq: int, record: Record, vector: np.ndarray | None, encoder: str, keep_old: bool) -> None:
        """Puts another text, with its vector, or other metadata in a record's place."""

    @abstractmethod
    def history(self, id: str, user: str) -> list[Event]:
        """What happened to a record of a user, oldest first."""

    @abstractmethod
    def set_surprises(self, surprises: Iterable[tuple[int, float]]) -> None:
        """Sets the surprise of records, after the texts before them have changed."""

    @abstractmethod
    def add_uses(self, uses: Mapping[int, int]) -> dict[int, int]:
        """Adds to how often records have been used; returns those that others are writing to: try again later."""

    # Repeats and versions

    def find_same(self, scope: int, records: Sequence[Record]) -> dict[int, int]:
        """By position in ``records``, the number of a scope's first record with the same text, role and metadata."""
        told = self.records(self.seqs_by_text(scope, {checksum(record.text) for record in records}))
        known = {record.said: seq for seq, record in reversed(told.items())}
        return {place: known[record.said] for place, record in enumerate(records) if record.said in known}

    @abstractmethod
    def seqs_by_text(self, scope: int, sums: Collection[int]) -> list[int]:
        """The records of a scope whose texts have one of these checksums, in their order."""

    @abstractmethod
    def repeat(self, seq: int, at: str) -> None:
        """Counts one more time that a record was told, at a time, with a line in the log."""

    @abstractmethod
    def newest_versions(self, ids: Sequence[str]) -> dict[str, str]:
        """By id, for those of some records that were replaced, the id of the last of those that replaced them."""

    @abstractmethod
    def unlink(self, id: str) -> None:
        """Takes a record out of its versions: what replaced it replaces from then on what it had replaced."""

    # Requests: what was written for each, so that one that is sent again is not written again

    @abstractmethod
    def find_request(self, user: int, key: str) -> tuple[str, list[tuple[str, int]]] | None:
        """The digest of a user's request, and each record of its answer: id and repeats; None: none within a day.

        Inside :meth:`writing`, nobody else begins the same request until the transaction ends.
        """

    @abstractmethod
    def put_request(self, user: int, key: str, digest: str, answer: Sequence[tuple[str, int]]) -> None:
        """Notes the answer to a request, and forgets those that were made more than a day ago."""

    # Memory states

    @abstractmethod
    def put_states(self, scope: int, states: Sequence[State]) -> None:
        """Keeps states of a scope's memory."""

    @abstractmethod
    def drop_states(self, scope: int, above: int) -> None:
        """Forgets a scope's memory states after more than so many texts."""

    @abstractmethod
    def find_state(self, scope: int, most: int) -> bytes | None:
        """The latest memory state of a scope after at most so many texts; a damaged one is passed over."""

    @abstractmethod
    def scope_seqs(self, scope: int, start: int = 0) -> list[int]:
        """The records of a scope in their order, from the one at ``start``."""

    # Vectors and words

    @abstractmethod
    def vectors(self, seqs: Sequence[int], width: int) -> np.ndarray:
        """The vectors (n, width) of records, in the order asked for."""

    def products(self, seqs: Sequence[int], vectors: np.ndarray) -> np.ndarray:
        """(n, m): the products of records' vectors with some vectors (m, width), in the order asked for."""
        found: np.ndarray = self.vectors(seqs, vectors.shape[1]) @ vectors.T
        return found

    @abstractmethod
    def replace_vectors(self, vectors: Iterable[tuple[int, np.ndarray]], encoder: str) -> None:
        """Other vectors for all records; the memory states and the vector index are dropped with the old ones."""

    @abstractmethod
    def nearest(self, selection: Selection, vectors: np.ndarray, many: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each vector of (n, width), the numbers of the nearest records and their cosines, best first.

        The vectors have length 1. Large users are searched by an index that may miss a few.
        """

    @abstractmethod
    def neighbours(self, seqs: Sequence[int]) -> list[tuple[int | None, int | None]]:
        """For each record, those directly before and after it in its scope."""

    @abstractmethod
    def find_words(self, selection: Selection, words: Sequence[str], many: int, most: int = MOST_POSTINGS) -> Matches:
        """The best records by BM25 over the selection: no other record changes a score.

        Words are looked up from the rarest on, while they are in no more than ``most`` records in all.
        """

    @abstractmethod
    def build_index(self, user: str) -> None:
        """Brings the vector index of a user up to date; called outside of transactions, after a write."""

    # Erasing

    @abstractmethod
    def weighed(self) -> list[tuple[int, float, int, str]]:
        """(number, surprise, uses and repeats, text) of every record, in their order: what eviction chooses from."""

    @abstractmethod
    def begin_erasing(self) -> None:
        """The last step of a transaction that erases."""

    @abstractmethod
    def finish_erasing(self) -> None:
        """After that transaction, outside of it: nothing of what was erased is left where the engine can reach it."""

    @abstractmethod
    def compact(self) -> None:
        """Rewrites the tables without the space of what was erased; called outside of transactions, takes a while."""


class Stemmer:
    """Words as the index of words knows them; both engines use SQLite's stemmer, so that they find the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._tables.execute(f"""CREATE VIRTUAL TABLE words USING fts5 (body, content='', tokenize="{TOKENIZER}")""")
        self._tables.execute("CREATE VIRTUAL TABLE found USING fts5vocab (words, instance)")

    def stems(self, words: Sequence[str]) -> list[str]:
        """The stem of each word, in their order; "" for one that has none."""
        found = [""] * len(words)
        with self._lock:
            # Marked as they are in SQLite's index of words: the mark changes a few stems.
            marked = ((place, mark_word(0, word)) for place, word in enumerate(words))
            self._tables.executemany("INSERT INTO words (rowid, body) VALUES (?, ?)", marked)
            for place, stem in self._tables.execute("SELECT doc, term FROM found"):
                if stem.startswith(MARK):
                    found[place] = stem.removeprefix(MARK)
            self._tables.execute("INSERT INTO words (words) VALUES ('delete-all')")
        return found

    def close(self) -> None:
        """Frees the tables."""
        self._tables.close()


def follow(ids: Iterable[str], following: dict[str, str]) -> dict[str, str]:
    """By id, for those that something follows, where following leads in the end; each step is taken once."""
    ends: dict[str, str] = {}
    for id in ids:
        path, last = [], id
        while last in following:
            path.append(last)
            last = following.pop(last)
        ends |= dict.fromkeys(path, ends.get(last, last))
    return {id: ends[id] for id in ids if id in ends}


def oldest_request() -> str:
    """The time before which requests are forgotten."""
    return (datetime.now(timezone.utc) - REQUESTS_KEPT).isoformat(timespec="microseconds")


def mark_word(user: int, word: str) -> str:
    """A word or stem with its user: nobody's words are counted among another's."""
    return f"{user}_{word}"


def encode_body(record: Record) -> str:
    """What makes a record, as one JSON text: what the log keeps, and what checksums are of."""
    return to_json(
        {
            "id": record.id, "text": record.text, "user": record.user, "agent": record.agent,
            "session": record.session, "role": record.role, "metadata": record.metadata, "created": record.created,
            "updated": record.updated, "version": record.version,
        }
    )  # fmt: skip


def to_json(value: Any) -> str:
    """As it is kept in tables."""
    return json.dumps(value, ensure_ascii=False)


def checksum(data: str | bytes) -> int:
    """CRC-32 of a text or of bytes."""
    return zlib.crc32(data.encode("utf-8") if isinstance(data, str) else data)


def to_event(kind: str, id: str, at: str, version: int, body: str | None) -> Event:
    """A line of the log, as a record's history shows it."""
    fields = json.loads(body) if body else {}
    return Event(kind, id, at, version, fields.get("text"), fields.get("metadata"))
