"""The store: texts, vectors, words, memory states and the log of what happened, in one SQLite file.

Every write is one transaction over all of them, and is on the disk when it returns. What is erased is overwritten: in
the tables (``secure_delete``), in the index of words (rewritten without it), and in the write-ahead log (truncated).
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titans.text.records import DamagedStore, Event, Record, Scope, StoreError, new_id, utc_now

FORMAT = 1
APPLICATION = 0x5469746D  # marks the file as a memory store
FILE_NAME = "memory.sqlite3"
FILE_ENDINGS = (".sqlite3", ".sqlite", ".db")
PAGE = 8192  # five vectors of 384 numbers fill a page; two would leave a quarter of 4096 bytes empty
PATIENCE = 60.0  # seconds to wait for another process
CHECKED_AT_OPEN = 64 << 20  # bytes up to which the whole file is checked when it is opened
TOKENIZER = "porter unicode61 remove_diacritics 2 tokenchars '_'"
# A word is a run of letters and digits; scripts that are written without spaces go character by character.
WORD = re.compile("[぀-ヿ㐀-䶿一-鿿가-힯]|(?:(?![぀-ヿ㐀-䶿一-鿿가-힯])[^\\W_])+")

SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE users (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, count INTEGER NOT NULL, epoch INTEGER NOT NULL
);
CREATE TABLE scopes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, user INTEGER NOT NULL, agent TEXT NOT NULL, session TEXT NOT NULL,
    count INTEGER NOT NULL, version INTEGER NOT NULL, UNIQUE (user, agent, session)
);
CREATE TABLE records (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, user INTEGER NOT NULL, scope INTEGER NOT NULL,
    role TEXT, text TEXT NOT NULL, metadata TEXT NOT NULL, created TEXT NOT NULL, updated TEXT NOT NULL,
    version INTEGER NOT NULL, words INTEGER NOT NULL, sum INTEGER NOT NULL,
    surprise REAL NOT NULL, uses INTEGER NOT NULL
);
CREATE INDEX records_of_user ON records (user, seq);
CREATE INDEX records_of_scope ON records (scope, seq);
CREATE TABLE vectors (
    seq INTEGER PRIMARY KEY, encoder TEXT NOT NULL, sum INTEGER NOT NULL, vector BLOB NOT NULL
);
CREATE TABLE states (
    scope INTEGER NOT NULL, count INTEGER NOT NULL, kept INTEGER NOT NULL, sum INTEGER NOT NULL, state BLOB NOT NULL,
    PRIMARY KEY (scope, count)
);
CREATE TABLE events (
    n INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, kind TEXT NOT NULL, id TEXT, seq INTEGER,
    scope INTEGER NOT NULL, version INTEGER, body TEXT, sum INTEGER
);
CREATE INDEX events_of_record ON events (id, n);
CREATE INDEX events_of_scope ON events (scope, n);
CREATE TABLE segments (
    file TEXT PRIMARY KEY, user INTEGER NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL, count INTEGER NOT NULL,
    sum INTEGER NOT NULL
);
CREATE VIRTUAL TABLE words USING fts5 (body, content='', tokenize="{TOKENIZER}");
CREATE VIRTUAL TABLE word_counts USING fts5vocab (words, row);
CREATE VIRTUAL TABLE word_places USING fts5vocab (words, instance);
"""
ROW = (
    "r.id, r.text, u.name, s.agent, s.session, r.role, r.metadata, r.created, r.updated, r.surprise, r.version, r.uses,"
    " r.sum, r.seq FROM records r JOIN scopes s ON s.id = r.scope JOIN users u ON u.id = r.user"
)
_INHERITED: list[sqlite3.Connection] = []  # of a parent process: closing one here could disturb it there
_BAD_VECTOR = "database disk image is malformed: a vector is not what was written"
OPERATORS = {"eq": "=", "ne": "<>", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


@dataclass(frozen=True)
class UserRow:
    """A user of the store; the epoch moves when something of the user's is erased."""

    id: int
    count: int
    epoch: int


@dataclass(frozen=True)
class ScopeRow:
    """A scope of the store; the version moves with every write to it."""

    id: int
    user: int
    count: int
    version: int


@dataclass(frozen=True)
class Segment:
    """A file of the index, the range of records of a user that it covers, how many, and the checksum of its bytes."""

    file: str
    low: int
    high: int
    count: int
    sum: int


@dataclass(frozen=True)
class State:
    """A scope's memory after so many texts, as bytes; those to be kept stay when there is a later one."""

    count: int
    data: bytes
    kept: bool


def locate(path: str | Path) -> Path:
    """The database file of a store, which is given by its folder or by the file itself."""
    path = Path(path)
    return path if path.is_file() or path.suffix in FILE_ENDINGS else path / FILE_NAME


class SqliteStore:
    """An open store; safe to share between threads, and between processes by opening the same path.

    All methods below :meth:`writing` and :meth:`reading` are called inside one of the two.

    Attributes:
        file: the database.
        index_folder: where the files of the vector index lie.
        read_only: nothing is written.
        damage: a sentence if the file is damaged, which makes it read-only.
        lock: held by the thread that uses the connection.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.file = locate(path)
        self.index_folder = self.file.with_name(self.file.name + "-index")
        self.read_only = read_only
        self.damage: str | None = None
        self.lock = threading.RLock()
        self._inside = self._closed = False
        self._stemmer = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._stemmer.execute(f"""CREATE VIRTUAL TABLE words USING fts5 (body, content='', tokenize="{TOKENIZER}")""")
        self._stemmer.execute("CREATE VIRTUAL TABLE found USING fts5vocab (words, row)")
        self._open()

    def _open(self) -> None:
        if not self.file.is_file():
            if self.read_only:
                raise StoreError(f"there is no memory store at {self.file}")
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"{self.file.parent} cannot be made: {error.strerror}") from error
        elif self.file.stat().st_size:
            with self.file.open("rb") as stream:
                if stream.read(16) != b"SQLite format 3\0":
                    raise StoreError(
                        f"{self.file} is not a memory store, or its first bytes are damaged; "
                        f"`titans memory recover {self.file} --out NEW` tries to read it"
                    )
        with self._sentences():
            self._connection = self._connect()
        self._process = os.getpid()
        if not self.read_only:
            self._finish_erasing()

    def _connect(self) -> sqlite3.Connection:
        if self.read_only:
            return self._connect_to_read()
        connection = _connect(self.file, "rwc")
        try:
            self._prepare(connection)
        except sqlite3.DatabaseError as error:
            connection.close()
            if not _is_damage(error):
                raise
            self._note_damage(error)
            return self._connect_to_read()
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Makes the tables of a new store; checks those of an old one before anything is done to them."""
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._identify(connection)
        connection.execute(f"PRAGMA page_size = {PAGE}")
        _until_unlocked(lambda: connection.execute("PRAGMA journal_mode = WAL"))
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                for statement in SCHEMA.split(";\n"):
                    connection.execute(statement)
                connection.execute("INSERT INTO meta VALUES ('store', ?), ('made', ?)", (new_id(), utc_now()))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._check(connection)

    def _connect_to_read(self) -> sqlite3.Connection:
        last: sqlite3.Error | None = None
        # Where nothing may be written there may be no log of writes to look at: the file is then read as it stands.
        for mode in ("ro", "ro&immutable=1"):
            connection = _connect(self.file, mode)
            try:
                if self.damage:  # a file that is too short is refused otherwise
                    connection.execute("PRAGMA writable_schema = ON")
                self._check(connection)
                return connection
            except sqlite3.DatabaseError as error:
                connection.close()
                if _is_damage(error) and not self.damage:
                    self._note_damage(error)
                    return self._connect_to_read()
                last = error
            except StoreError:
                connection.close()
                raise
        assert last is not None
        raise last

    def _identify(self, connection: sqlite3.Connection) -> None:
        """Raises if the file is another program's or a newer version's."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION:
            raise StoreError(f"{self.file} is a database, but not a memory store")
        format = connection.execute("PRAGMA user_version").fetchone()[0]
        if not 1 <= format <= FORMAT:
            raise StoreError(
                f"{self.file} has format {format} and was made by a newer version of titans; expected {FORMAT} at most"
            )

    def _check(self, connection: sqlite3.Connection) -> None:
        """Raises if the file is not ours, or damaged where it is seen at once."""
        self._identify(connection)
        connection.execute("SELECT value FROM meta WHERE key = 'store'").fetchone()
        if not self.damage and self.file.stat().st_size <= CHECKED_AT_OPEN:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict}")

    def _note_damage(self, error: sqlite3.Error) -> None:
        self.read_only = True
        self.damage = (
            f"{self.file} is damaged ({_words(error)}) and can only be read; "
            f"`titans memory recover {self.file} --out NEW` salvages what can be read into a new store"
        )

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """What SQLite says, as one sentence."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._note_damage(error)
                raise DamagedStore(str(self.damage)) from error
            if "locked" in str(error) or "busy" in str(error):
                words = f"{self.file} is busy: other processes have been writing for {PATIENCE:.0f} seconds"
                raise StoreError(words) from error
            verb = "read" if self.read_only else "written"
            raise StoreError(f"{self.file} cannot be {verb}: {_words(error)}") from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all of it is on the disk at the end, or nothing of it if anything is raised."""
        with self.lock:
            self._same_process()
            if self.damage:
                raise DamagedStore(self.damage)
            if self.read_only:
                raise StoreError(f"{self.file} was opened to read only")
            with self._sentences(), self._transaction("BEGIN IMMEDIATE"):
                yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One view of the store, whatever others write meanwhile."""
        with self.lock:
            self._same_process()
            if self._inside:
                yield
                return
            with self._sentences(), self._transaction("BEGIN"):
                yield

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self._connection.execute(begin)
        self._inside = True
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._inside = False

    def _same_process(self) -> None:
        """A connection must not be carried into a forked process: that one gets its own."""
        if self._closed:
            raise StoreError(f"{self.file} is closed")
        if self._process != os.getpid():
            self._process = os.getpid()
            _INHERITED.append(self._connection)
            with self._sentences():
                self._connection = self._connect()

    def close(self) -> None:
        """Closes the file; the store cannot be used any more."""
        with self.lock:
            self._closed = True
            self._connection.close()
            self._stemmer.close()

    def _all(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def _one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self._connection.execute(sql, values).fetchone()

    def get_meta(self, key: str) -> str | None:
        """A fact about the store itself."""
        row = self._one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str | None) -> None:
        """Sets a fact about the store; None takes it away."""
        if value is None:
            self._connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def count(self) -> int:
        """Records in all."""
        return int(self._one("SELECT coalesce(sum(count), 0) FROM users")[0])

    def find_user(self, name: str) -> UserRow | None:
        """The user, if there is one of that name."""
        row = self._one("SELECT id, count, epoch FROM users WHERE name = ?", (name,))
        return None if row is None else UserRow(*row)

    def find_scope(self, scope: Scope) -> ScopeRow | None:
        """The exact scope, if it has been written to."""
        row = self._one(
            "SELECT s.id, s.user, s.count, s.version FROM scopes s JOIN users u ON u.id = s.user"
            " WHERE u.name = ? AND s.agent = ? AND s.session = ?",
            (scope.user, scope.agent or "", scope.session or ""),
        )
        return None if row is None else ScopeRow(*row)

    def scope_row(self, scope: int) -> ScopeRow | None:
        """The scope with a number."""
        row = self._one("SELECT id, user, count, version FROM scopes WHERE id = ?", (scope,))
        return None if row is None else ScopeRow(*row)

    def make_scope(self, scope: Scope) -> ScopeRow:
        """The exact scope, new if need be."""
        self._connection.execute("INSERT OR IGNORE INTO users (name, count, epoch) VALUES (?, 0, 0)", (scope.user,))
        user = self.find_user(scope.user)
        assert user is not None
        self._connection.execute(
            "INSERT OR IGNORE INTO scopes (user, agent, session, count, version) VALUES (?, ?, ?, 0, 0)",
            (user.id, scope.agent or "", scope.session or ""),
        )
        made = self.find_scope(scope)
        assert made is not None
        return made

    def matching_scopes(self, user: int, agent: str | None, session: str | None, empty: bool = False) -> list[int]:
        """The numbers of a user's scopes that have records, or ``empty`` ones too, and match the names given."""
        return [
            row[0]
            for row in self._all(
                "SELECT id FROM scopes WHERE user = :user AND (count > 0 OR :empty)"
                " AND (:agent IS NULL OR agent = :agent) AND (:session IS NULL OR session = :session)",
                {"user": user, "agent": agent, "session": session, "empty": empty},
            )
        ]

    def list_scopes(self, user: str | None) -> list[tuple[Scope, int]]:
        """Every scope that has records, and how many."""
        rows = self._all(
            "SELECT u.name, s.agent, s.session, s.count FROM scopes s JOIN users u ON u.id = s.user"
            " WHERE s.count > 0 AND (?1 IS NULL OR u.name = ?1) ORDER BY s.id",
            (user,),
        )
        return [(Scope(name, agent or None, session or None), count) for name, agent, session, count in rows]

    def insert(self, record: Record, scope: ScopeRow, vector: np.ndarray, encoder: str) -> int:
        """Adds a record with its vector, its words and its line of the log; returns its place in the order."""
        body = encode_body(record)
        cursor = self._connection.execute(
            "INSERT INTO records (id, user, scope, role, text, metadata, created, updated, version, words, sum,"
            " surprise, uses) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                record.id, scope.user, scope.id, record.role, record.text, _json(record.metadata), record.created,
                record.updated, record.version, len(WORD.findall(record.text)), _sum(body), record.surprise,
                record.uses,
            ),
        )  # fmt: skip
        seq = int(cursor.lastrowid or 0)
        self._put_vectors([(seq, vector.tobytes())], encoder)
        self._connection.execute(
            "INSERT INTO words (rowid, body) VALUES (?, ?)", (seq, _marked(scope.user, record.text))
        )
        self._connection.execute("UPDATE users SET count = count + 1 WHERE id = ?", (scope.user,))
        self.log("add", scope.id, record.id, seq, record.version, body)
        return seq

    def log(
        self, kind: str, scope: int, id: str | None = None, seq: int | None = None, version: int | None = None,
        body: str | None = None,
    ) -> None:  # fmt: skip
        """Adds a line to the log."""
        self._connection.execute(
            "INSERT INTO events (at, kind, id, seq, scope, version, body, sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (utc_now(), kind, id, seq, scope, version, body, None if body is None else _sum(body)),
        )

    def advance_scope(self, scope: int, more: int) -> None:
        """Moves a scope's version, and its count by ``more``."""
        self._connection.execute(
            "UPDATE scopes SET count = count + ?, version = version + 1 WHERE id = ?", (more, scope)
        )

    def put_states(self, scope: int, states: Sequence[State]) -> None:
        """Keeps a scope's memory at some places: the latest, and of the older ones those that are marked."""
        if not states:
            return
        self._connection.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)",
            [(scope, state.count, state.kept, zlib.crc32(state.data), state.data) for state in states],
        )
        latest = max(state.count for state in states)
        self._connection.execute("DELETE FROM states WHERE scope = ? AND count < ? AND NOT kept", (scope, latest))

    def drop_states(self, scope: int, above: int) -> None:
        """Forgets a scope's memory states after more than so many texts."""
        self._connection.execute("DELETE FROM states WHERE scope = ? AND count > ?", (scope, above))

    def find_state(self, scope: int, most: int) -> bytes | None:
        """The latest memory state of a scope after at most so many texts; a damaged one is passed over."""
        rows = self._connection.execute(
            "SELECT sum, state FROM states WHERE scope = ? AND count <= ? ORDER BY count DESC", (scope, most)
        )
        try:
            return next((bytes(state) for sum, state in rows if zlib.crc32(state) == sum), None)
        finally:
            rows.close()

    def scope_seqs(self, scope: int, start: int = 0) -> list[int]:
        """The records of a scope in their order, from the one at ``start``."""
        rows = self._all("SELECT seq FROM records WHERE scope = ? ORDER BY seq LIMIT -1 OFFSET ?", (scope, start))
        return [row[0] for row in rows]

    def vectors(self, seqs: Sequence[int], width: int) -> np.ndarray:
        """The vectors (n, width) of records, in the order asked for."""
        found = np.empty((len(seqs), width), dtype=np.float32)
        for index, seq in enumerate(seqs):
            row = self._one("SELECT vector, sum FROM vectors WHERE seq = ?", (seq,))
            found[index] = self._to_vector(row, width)
        return found

    def vectors_between(self, user: int, low: int, high: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The records of a user from ``low`` to ``high`` and their vectors (n, width), in their order."""
        rows = self._all(
            "SELECT v.vector, v.sum, r.seq FROM records r JOIN vectors v ON v.seq = r.seq"
            " WHERE r.user = ? AND r.seq BETWEEN ? AND ? ORDER BY r.seq",
            (user, low, high),
        )
        if any(len(vector) != 4 * width or zlib.crc32(vector) != total for vector, total, _ in rows):
            raise sqlite3.DatabaseError(_BAD_VECTOR)
        matrix = np.frombuffer(b"".join(row[0] for row in rows), dtype=np.float32).reshape(len(rows), width)
        return np.array([row[2] for row in rows], dtype=np.int64), matrix

    def _to_vector(self, row: Any, width: int) -> np.ndarray:
        whole = row is not None and isinstance(row[0], bytes) and len(row[0]) == 4 * width
        if not whole or zlib.crc32(row[0]) != row[1]:
            raise sqlite3.DatabaseError(_BAD_VECTOR)
        return np.frombuffer(row[0], dtype=np.float32)

    def rows_after(self, user: int, seq: int) -> np.ndarray:
        """(n, 3) int64: place, scope and number of words of a user's records after a place, in their order."""
        rows = self._all("SELECT seq, scope, words FROM records WHERE user = ? AND seq > ? ORDER BY seq", (user, seq))
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def rows_at(self, user: int, seqs: Iterable[int]) -> np.ndarray:
        """The same for a user's records at some places; those that are not there are left out."""
        found = [
            self._one("SELECT seq, scope, words FROM records WHERE user = ? AND seq = ?", (user, seq)) for seq in seqs
        ]
        return np.array([row for row in found if row is not None], dtype=np.int64).reshape(-1, 3)

    def changes_after(self, n: int, most: int) -> list[int] | None:
        """The places that were changed or erased after a line of the log, at most so many.

        None if it says no places: whole scopes were removed, or all vectors made again.
        """
        rows = self._all("SELECT DISTINCT seq FROM events WHERE n > ? AND kind <> 'add' LIMIT ?", (n, most))
        return None if any(seq is None for (seq,) in rows) else [seq for (seq,) in rows]

    def matching(self, user: int, filters: Mapping[str, Mapping[str, Any]]) -> np.ndarray:
        """The records of a user whose metadata pass the filters, in their order."""
        sql = "SELECT seq FROM records r WHERE user = ?"
        values: list[Any] = [user]
        for key, tests in filters.items():
            for name, value in tests.items():
                wanted = list(value) if name == "in" else [value]
                tested = " OR ".join(_test("eq" if name == "in" else name, item) for item in wanted) or "0"
                sql += f" AND EXISTS (SELECT 1 FROM json_each(r.metadata) j WHERE j.key = ? AND ({tested}))"
                values += [key, *wanted]
        return np.array([row[0] for row in self._all(sql + " ORDER BY seq", values)], dtype=np.int64)

    def stems(self, user: int, words: Iterable[str]) -> list[str]:
        """The words as the index of words knows them for a user, each once."""
        with self.lock:
            self._stemmer.execute("INSERT INTO words (rowid, body) VALUES (1, ?)", (_marked(user, " ".join(words)),))
            found = [row[0] for row in self._stemmer.execute("SELECT term FROM found").fetchall()]
            self._stemmer.execute("INSERT INTO words (words) VALUES ('delete-all')")
        return [stem for stem in found if stem.startswith(f"{user}_")]

    def frequency(self, stem: str) -> int:
        """In how many records a word of a user stands."""
        row = self._one("SELECT doc FROM word_counts WHERE term = ?", (stem,))
        return 0 if row is None else int(row[0])

    def places(self, stem: str) -> np.ndarray:
        """The records in which a word of a user stands, each as often as it stands there."""
        found = self._one("SELECT group_concat(doc) FROM word_places WHERE term = ?", (stem,))[0]
        return np.fromstring(found, dtype=np.int64, sep=",") if found else np.empty(0, dtype=np.int64)

    def find(self, id: str) -> tuple[int, Record] | None:
        """A record by its id, and its place."""
        row = self._one(f"SELECT {ROW} WHERE r.id = ?", (id,))
        return None if row is None else (row[-1], self._to_record(row))

    def records(self, seqs: Iterable[int]) -> dict[int, Record]:
        """Records by their places; those that are not there are left out."""
        found = {}
        for seq in seqs:
            row = self._one(f"SELECT {ROW} WHERE r.seq = ?", (int(seq),))
            if row is not None:
                found[int(seq)] = self._to_record(row)
        return found

    def list_records(self, user: str | None, after: int, limit: int) -> list[tuple[int, Record]]:
        """Records after a place, in their order."""
        rows = self._all(
            f"SELECT {ROW} WHERE r.seq > ?1 AND (?2 IS NULL OR u.name = ?2) ORDER BY r.seq LIMIT ?3",
            (after, user, limit),
        )
        return [(row[-1], self._to_record(row)) for row in rows]

    def texts_after(self, seq: int, limit: int) -> list[tuple[int, int, str]]:
        """(place, scope, text) of records after a place, in their order."""
        return self._all("SELECT seq, scope, text FROM records WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit))

    def last_event(self) -> int:
        """The number of the log's last line."""
        return int(self._one("SELECT coalesce(max(n), 0) FROM events")[0])

    def _to_record(self, row: Any) -> Record:
        record = to_record(row)
        if _sum(encode_body(record)) != row[-2]:
            raise sqlite3.DatabaseError(f"database disk image is malformed: record {record.id} is not what was written")
        return record

    def history(self, id: str, user: str | None) -> list[Event]:
        """What happened to a record, oldest first."""
        rows = self._all(
            "SELECT e.kind, e.id, e.at, e.version, e.body FROM events e JOIN scopes s ON s.id = e.scope"
            " JOIN users u ON u.id = s.user WHERE e.id = ?1 AND (?2 IS NULL OR u.name = ?2) ORDER BY e.n",
            (id, user),
        )
        events = []
        for kind, id, at, version, body in rows:
            fields = json.loads(body) if body else {}
            events.append(Event(kind, id, at, version, fields.get("text"), fields.get("metadata")))
        return events

    def replay(self, scope: int) -> list[tuple[int, str]]:
        """The places and texts of a scope as the log tells them, in their order: the records made a second time."""
        texts: dict[int, str] = {}
        for seq, kind, body in self._all("SELECT seq, kind, body FROM events WHERE scope = ? ORDER BY n", (scope,)):
            if kind in ("delete", "evict"):
                texts.pop(seq, None)
            elif body is not None:
                texts[seq] = json.loads(body)["text"]
        return sorted(texts.items())

    def remove(self, seq: int, kind: str) -> None:
        """Takes a record out of everything but the scope's count, and its texts out of the log."""
        id, user, scope, text, version = self._one(
            "SELECT id, user, scope, text, version FROM records WHERE seq = ?", (seq,)
        )
        self._unindex(user, seq, text)
        for table in ("records", "vectors"):
            self._connection.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,))
        self._connection.execute("UPDATE users SET count = count - 1 WHERE id = ?", (user,))
        self.forget_log(id)
        self.log(kind, scope, id, seq, version)

    def change(self, seq: int, record: Record, vector: np.ndarray | None, encoder: str, keep_old: bool) -> None:
        """Puts another text, with its vector, or other metadata in a record's place."""
        user, scope, text = self._one("SELECT user, scope, text FROM records WHERE seq = ?", (seq,))
        body = encode_body(record)
        if vector is not None:
            self._unindex(user, seq, text)
            self._connection.execute("INSERT INTO words (rowid, body) VALUES (?, ?)", (seq, _marked(user, record.text)))
            self._put_vectors([(seq, vector.tobytes())], encoder)
        self._connection.execute(
            "UPDATE records SET text = ?, metadata = ?, updated = ?, version = ?, words = ?, sum = ? WHERE seq = ?",
            (
                record.text, _json(record.metadata), record.updated, record.version, len(WORD.findall(record.text)),
                _sum(body), seq,
            ),
        )  # fmt: skip
        if not keep_old:
            self.forget_log(record.id)
        self.log("update", scope, record.id, seq, record.version, body)

    def _unindex(self, user: int, seq: int, text: str) -> None:
        self._connection.execute(
            "INSERT INTO words (words, rowid, body) VALUES ('delete', ?, ?)", (seq, _marked(user, text))
        )
        self._connection.execute("UPDATE users SET epoch = epoch + 1 WHERE id = ?", (user,))
        self._connection.execute("DELETE FROM segments WHERE user = ? AND ? BETWEEN low AND high", (user, seq))

    def forget_log(self, id: str) -> None:
        """Takes a record's texts and metadata out of the log; that something happened stays."""
        self._connection.execute("UPDATE events SET body = NULL, sum = NULL WHERE id = ?", (id,))

    def remove_scope(self, scope: int) -> int:
        """Takes a scope with all its records, its history and its name out of the store; returns how many there were.

        What stays is a line in the log that a scope was removed.
        """
        row = self.scope_row(scope)
        assert row is not None
        seqs = self.scope_seqs(scope)
        for seq in seqs:
            self.remove(seq, "delete")
        for table in ("states", "events"):
            self._connection.execute(f"DELETE FROM {table} WHERE scope = ?", (scope,))
        self._connection.execute("DELETE FROM scopes WHERE id = ?", (scope,))
        self._connection.execute(
            "DELETE FROM users WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM scopes WHERE user = ?1)", (row.user,)
        )
        self.log("delete_all", scope)
        return len(seqs)

    def begin_erasing(self) -> None:
        """The last step of a transaction that erases: the index of words is rewritten without what was taken out."""
        self._connection.execute("INSERT INTO words (words) VALUES ('optimize')")
        self.set_meta("erasing", "yes")

    def finish_erasing(self) -> None:
        """After that transaction: empties the write-ahead log and drops files of the index that are not valid."""
        with self.lock, self._sentences():
            self._finish_erasing()

    def _finish_erasing(self) -> None:
        # Whoever dies between the two steps leaves the mark, and the next to open the store goes on.
        if self._one("SELECT 1 FROM meta WHERE key = 'erasing'") is None:
            return
        self.drop_strays()
        deadline = time.monotonic() + PATIENCE
        while self._one("PRAGMA wal_checkpoint(TRUNCATE)")[0]:
            if time.monotonic() > deadline:
                return  # a reader holds the log; the mark stays
            time.sleep(0.05)
        self._connection.execute("BEGIN IMMEDIATE")
        self.set_meta("erasing", None)
        self._connection.execute("COMMIT")

    def drop_strays(self) -> None:
        """Deletes files of the index that the store does not know."""
        if self.index_folder.is_dir():
            known = {row[0] for row in self._all("SELECT file FROM segments")}
            for file in self.index_folder.iterdir():
                if file.name not in known:
                    file.unlink(missing_ok=True)

    def segments(self, user: int) -> list[Segment]:
        """The valid files of the index for a user."""
        rows = self._all("SELECT file, low, high, count, sum FROM segments WHERE user = ? ORDER BY low", (user,))
        return [Segment(*row) for row in rows]

    def add_segment(self, user: int, segment: Segment) -> None:
        """Makes a file of the index valid."""
        self._connection.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)",
            (segment.file, user, segment.low, segment.high, segment.count, segment.sum),
        )

    def set_surprises(self, surprises: Iterable[tuple[int, float]]) -> None:
        """Sets the surprise of records, after the texts before them have changed."""
        self._connection.executemany(
            "UPDATE records SET surprise = ? WHERE seq = ?", [(value, seq) for seq, value in surprises]
        )

    def add_uses(self, uses: Mapping[int, int]) -> None:
        """Adds to how often records have been found."""
        self._connection.executemany(
            "UPDATE records SET uses = uses + ? WHERE seq = ?", [(more, seq) for seq, more in uses.items()]
        )

    def weighed(self) -> list[tuple[int, float, int, int]]:
        """(place, surprise, uses, bytes) of every record: what there is to choose from when room is needed."""
        return self._all("SELECT seq, surprise, uses, length(CAST(text AS BLOB)) FROM records ORDER BY seq")

    def scopes_holding(self, seqs: Iterable[int]) -> dict[int, list[int]]:
        """Places by the number of their scope; those that are not there are left out."""
        found: dict[int, list[int]] = {}
        for seq in sorted(seqs):
            row = self._one("SELECT scope FROM records WHERE seq = ?", (seq,))
            if row is not None:
                found.setdefault(row[0], []).append(seq)
        return found

    def replace_vectors(self, vectors: Iterable[tuple[int, bytes]], encoder: str) -> None:
        """Other vectors for all records; the memory states and the index are dropped with the old ones."""
        self.log("reindex", 0)
        self._connection.execute("DELETE FROM states")
        self._connection.execute("DELETE FROM segments")
        self._connection.execute("UPDATE users SET epoch = epoch + 1")
        self._connection.execute("UPDATE scopes SET version = version + 1")
        self._put_vectors(vectors, encoder)

    def _put_vectors(self, vectors: Iterable[tuple[int, bytes]], encoder: str) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?, ?)",
            ((seq, encoder, zlib.crc32(data), data) for seq, data in vectors),
        )

    def events_after(self, n: int) -> list[tuple[int, str, int | None, int]]:
        """(number, kind, place, scope) of the log's lines after a number."""
        return self._all("SELECT n, kind, seq, scope FROM events WHERE n > ? ORDER BY n", (n,))

    def stats(self, user: str | None) -> dict[str, Any]:
        """Figures of the store, or of one user in it."""
        row = self._one(
            "SELECT count(*), coalesce(sum(length(CAST(r.text AS BLOB))), 0), coalesce(avg(r.surprise), 0),"
            " min(r.created), max(r.created) FROM records r JOIN users u ON u.id = r.user"
            " WHERE ?1 IS NULL OR u.name = ?1",
            (user,),
        )
        figures = dict(zip(("records", "text_bytes", "mean_surprise", "oldest", "newest"), row, strict=True))
        figures["scopes"] = len(self.list_scopes(user))
        figures["states"] = self._one(
            "SELECT count(*) FROM states t JOIN scopes s ON s.id = t.scope JOIN users u ON u.id = s.user"
            " WHERE ?1 IS NULL OR u.name = ?1",
            (user,),
        )[0]
        if user is None:
            figures["users"] = self._one("SELECT count(*) FROM users WHERE count > 0")[0]
            figures["events"] = self._one("SELECT count(*) FROM events")[0]
            figures["index_segments"] = self._one("SELECT count(*) FROM segments")[0]
        return figures

    def check(self) -> list[str]:
        """What is wrong with the file and with its records, one sentence each; none if all is well."""
        problems = [row[0] for row in self._all("PRAGMA quick_check") if row[0] != "ok"]
        for row in self._connection.execute(f"SELECT {ROW} ORDER BY r.seq"):
            if _sum(encode_body(to_record(row))) != row[-2]:
                problems.append(f"record {row[0]} is not what was written")
        for seq, total, data in self._connection.execute("SELECT seq, sum, vector FROM vectors"):
            if zlib.crc32(data) != total:
                problems.append(f"the vector of record number {seq} is not what was written")
        count = self.count()
        for table in ("records", "vectors"):
            found = self._one(f"SELECT count(*) FROM {table}")[0]
            if found != count:
                problems.append(f"{table} has {found} rows; expected {count}")
        if self.read_only:
            return problems
        try:
            self._connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
        except sqlite3.DatabaseError as error:
            problems.append(f"the index of words: {_words(error)}")
        return problems


def encode_body(record: Record) -> str:
    """What makes a record, as one JSON text: what the log keeps, and what checksums are of."""
    return json.dumps(
        {
            "id": record.id, "text": record.text, "user": record.user, "agent": record.agent,
            "session": record.session, "role": record.role, "metadata": record.metadata, "created": record.created,
            "updated": record.updated, "version": record.version,
        },
        ensure_ascii=False,
    )  # fmt: skip


def to_record(row: Sequence[Any]) -> Record:
    """The record of a row of the tables."""
    return Record(
        id=row[0], text=row[1], user=row[2], agent=row[3] or None, session=row[4] or None, role=row[5],
        metadata=json.loads(row[6]), created=row[7], updated=row[8], surprise=row[9], version=row[10], uses=row[11],
    )  # fmt: skip


def _connect(file: Path, mode: str) -> sqlite3.Connection:
    # As a URI, so that the mode can be said; names with ? or # must be quoted.
    uri = f"{file.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def _until_unlocked(action: Any) -> None:
    """Some steps are refused at once when another process takes them in the same moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _is_damage(error: sqlite3.Error) -> bool:
    words = str(error)
    return any(part in words for part in ("malformed", "not a database", "no such table", "no such column", "corrupt"))


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _sum(body: str) -> int:
    return zlib.crc32(body.encode("utf-8"))


def _marked(user: int, text: str) -> str:
    """The words of a text, each marked with its user: nobody's words are counted among another's."""
    return " ".join(f"{user}_{word}" for word in WORD.findall(text))


def _test(comparison: str, value: Any) -> str:
    """SQL that compares a value of the metadata; values of another type are unequal, and true is not 1."""
    types = "'true','false'" if isinstance(value, bool) else "'text'" if isinstance(value, str) else "'integer','real'"
    joined = f"j.type NOT IN ({types}) OR" if comparison == "ne" else f"j.type IN ({types}) AND"
    return f"({joined} j.value {OPERATORS[comparison]} ?)"
