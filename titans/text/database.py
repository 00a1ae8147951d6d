"""The file of a store: opening it, what to do if it is damaged, and transactions of threads and processes."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titans.text.records import (
    BusyStore,
    DamagedStore,
    FullStore,
    ReadOnlyStore,
    StoreError,
    new_id,
    utc_now,
)
from titans.text.store import FORMAT, TOKENIZER, checksum
from titans.words import sentence

APPLICATION = 0x5469746D  # marks the file as a memory store
MAGIC = b"SQLite format 3\0"
FILE_NAME = "memory.sqlite3"
FILE_ENDINGS = (".sqlite3", ".sqlite", ".db")
PAGE = 8192  # five vectors of 384 numbers fill a page; two would leave a quarter of 4096 bytes empty
PATIENCE = 60.0  # seconds to wait for another process
CHECKED_AT_OPEN = 64 << 20  # bytes up to which the whole file is checked when it is opened
STATES = """CREATE TABLE states (
    scope INTEGER NOT NULL, count INTEGER NOT NULL, sum INTEGER NOT NULL, state BLOB NOT NULL,
    PRIMARY KEY (scope, count)
)"""
VERSIONS = """CREATE INDEX records_by_text ON records (scope, text_sum);
CREATE INDEX records_by_replaced ON records (replaces) WHERE replaces IS NOT NULL;
CREATE TABLE building (file TEXT PRIMARY KEY, pid INTEGER NOT NULL);
"""
REQUESTS = """CREATE TABLE requests (
    user INTEGER NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, answer TEXT NOT NULL, at TEXT NOT NULL,
    PRIMARY KEY (user, key)
) WITHOUT ROWID;
CREATE INDEX requests_by_time ON requests (at);
"""
UPGRADES = {  # from each older format to the next
    1: f"""
ALTER TABLE records ADD COLUMN repeats INTEGER NOT NULL DEFAULT 0;
ALTER TABLE records ADD COLUMN replaces TEXT;
ALTER TABLE records ADD COLUMN text_sum INTEGER NOT NULL DEFAULT 0;
UPDATE records SET text_sum = checksum(text);
DROP TABLE states;
{STATES};
{VERSIONS}""",
    2: REQUESTS,
}
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
    surprise REAL NOT NULL, uses INTEGER NOT NULL, repeats INTEGER NOT NULL DEFAULT 0, replaces TEXT,
    text_sum INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX records_of_user ON records (user, seq);
CREATE INDEX records_of_scope ON records (scope, seq);
CREATE TABLE vectors (
    seq INTEGER PRIMARY KEY, encoder TEXT NOT NULL, sum INTEGER NOT NULL, vector BLOB NOT NULL
);
{STATES};
{VERSIONS}{REQUESTS}CREATE TABLE events (
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
KINDS = {"is full": FullStore, "readonly": ReadOnlyStore}  # of errors, by words in them
Values = Sequence[Any] | Mapping[str, Any]  # of the placeholders of a statement

_INHERITED: list[sqlite3.Connection] = []  # of a parent process: closing one here could disturb it there


def locate(path: str | Path) -> Path:
    """The database file of a store, which is given by its folder or by the file itself."""
    path = Path(path)
    return path if path.is_file() or path.suffix in FILE_ENDINGS else path / FILE_NAME


def can_write(store: str | Path) -> bool:
    """Whether the file of a store, and the folder in which SQLite keeps its log of writes, may be written."""
    file = locate(store).resolve()
    effective = os.access in os.supports_effective_ids
    return all(os.access(path, os.W_OK, effective_ids=effective) for path in (file, file.parent))


def belongs(path: str | Path, store: str | Path) -> bool:
    """Whether a path is the database file of a store, or one of the files that go with it, by whatever links."""
    file, path = locate(store).resolve(), Path(path).resolve()
    return any(
        each.parent == file.parent and (each.name == file.name or each.name.startswith(f"{file.name}-"))
        for each in (path, *path.parents)
    )


class Database:
    """An open database file; safe to share between threads, and between processes by opening the same path.

    Attributes:
        file: the database.
        name: its path.
        read_only: nothing is written.
        damage: a sentence if the file is damaged, which makes it read-only.
        lock: held by the thread that uses the connection.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.file = locate(path)
        self.name = str(self.file)
        self.read_only = read_only
        self.damage: str | None = None
        self.lock = threading.RLock()
        self._inside = self._closed = False
        if not self.file.is_file():
            if self.read_only:
                raise StoreError(f"there is no memory store at {self.file}")
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise StoreError(f"{self.file.parent} cannot be made: {error.strerror}") from error
            try:
                self.file.touch(mode=0o600)  # SQLite gives its other files the same mode
            except OSError as error:
                raise StoreError(f"{self.file} cannot be written: {error.strerror}") from error
        elif self.file.stat().st_size:
            with self.file.open("rb") as stream:
                if stream.read(len(MAGIC)) != MAGIC:
                    raise StoreError(
                        f"{self.file} is not a memory store, or its first bytes are damaged; "
                        f"`titans memory recover {self.file} --out NEW` tries to read it"
                    )
        with self._as_sentences():
            self._connection = self._connect()
        self._process = os.getpid()

    def _make_private(self) -> None:
        """Nobody but the owner may look at the files, nor into the folder if it holds nothing else."""
        files = [self.file, *self.file.parent.glob(self.file.name + "-*")]
        own = self.file.name == FILE_NAME and {*self.file.parent.iterdir()} <= {*files}
        for path in [*files, self.file.parent] if own else files:
            with suppress(OSError):  # not the owner
                path.chmod(0o700 if path.is_dir() else 0o600)

    def _connect(self) -> sqlite3.Connection:
        # Where nothing may be written there may be no log of writes to look at: the file is then read as it stands.
        modes = ("ro", "ro&immutable=1") if self.read_only else ("rwc",)
        for mode in modes:
            connection = _connect(self.file, mode)
            try:
                if not self.read_only:
                    self._prepare(connection)
                elif self.damage:  # a file that is too short is refused otherwise
                    connection.execute("PRAGMA writable_schema = ON")
                self._check(connection)
                return connection
            except StoreError:
                connection.close()
                raise
            except sqlite3.DatabaseError as error:
                connection.close()
                if _is_damage(error) and not self.damage:
                    self._note_damage(error)
                    return self._connect()
                if mode == modes[-1]:
                    raise
                self._refuse_unread_log(error)
        raise AssertionError("the last mode returns or raises")

    def _refuse_unread_log(self, error: sqlite3.Error) -> None:
        file = self.file.resolve()
        log = file.with_name(file.name + "-wal")
        if not self.damage and log.is_file() and log.stat().st_size:
            raise StoreError(
                f"{log} holds writes that cannot be read where nothing can be written ({sentence(error)}); "
                "copy the store to a place that can be written"
            ) from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Makes the tables of a new store; identifies an old one before anything is done to it."""
        if not _is_empty(connection):
            self._identify(connection)
        self._make_private()
        connection.execute(f"PRAGMA page_size = {PAGE}")
        _until_unlocked(lambda: connection.execute("PRAGMA journal_mode = WAL"))
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.create_function("checksum", 1, checksum, deterministic=True)
        with _transaction(connection, "BEGIN IMMEDIATE"):
            if _is_empty(connection):
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                _execute_all(connection, SCHEMA)
                connection.execute("INSERT INTO meta VALUES ('store', ?), ('made', ?)", (new_id(), utc_now()))
            else:
                for format in range(_format(connection), FORMAT):
                    _execute_all(connection, UPGRADES[format])
            if _format(connection) != FORMAT:
                connection.execute(f"PRAGMA user_version = {FORMAT}")

    def _identify(self, connection: sqlite3.Connection) -> None:
        """Raises if the file is another program's or a newer version's."""
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
            raise StoreError(f"{self.file} is a database, but not a memory store")
        format = _format(connection)
        if not 1 <= format <= FORMAT:
            raise StoreError(
                f"{self.file} has format {format} and was made by a newer version of titans; expected {FORMAT} at most"
            )

    def _check(self, connection: sqlite3.Connection) -> None:
        """Raises if the file is not ours, or if it is small enough to be checked and damaged."""
        self._identify(connection)
        if _format(connection) < FORMAT:
            raise StoreError(
                f"{self.file} has format {_format(connection)} of an older version of titans; expected {FORMAT}, so "
                "open it once for writing, which upgrades it"
            )
        connection.execute("SELECT value FROM meta WHERE key = 'store'").fetchone()
        if not self.damage and self.file.stat().st_size <= CHECKED_AT_OPEN:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict}")

    def _note_damage(self, error: sqlite3.Error) -> None:
        self.read_only = True
        self.damage = (
            f"{self.file} is damaged ({sentence(error)}) and can only be read; "
            f"`titans memory recover {self.file} --out NEW` salvages what can be read into a new store"
        )

    @contextmanager
    def _as_sentences(self) -> Iterator[None]:
        """Turns what SQLite raises into a :class:`StoreError` with one sentence."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._note_damage(error)
                raise DamagedStore(str(self.damage)) from error
            if "locked" in str(error) or "busy" in str(error):
                raise BusyStore(
                    f"{self.file} is busy: other processes have been writing for {PATIENCE:.0f} seconds"
                ) from error
            verb = "read" if self.read_only else "written"
            kind = next((kind for words, kind in KINDS.items() if words in str(error)), StoreError)
            raise kind(f"{self.file} cannot be {verb}: {sentence(error)}") from error

    @contextmanager
    def writing(self, alone: bool = False) -> Iterator[None]:
        """One transaction: all of it is on the disk at the end, or nothing of it if anything is raised.

        Nobody else writes meanwhile, whether ``alone`` is asked for or not.
        """
        with self.lock:
            self._reconnect_after_fork()
            self.require_writable()
            with self._inside_transaction("BEGIN IMMEDIATE"):
                yield

    def require_writable(self) -> None:
        """Raises a :class:`StoreError` if nothing can be written."""
        if self.damage:
            raise DamagedStore(self.damage)
        if self.read_only:
            raise ReadOnlyStore(f"{self.file} was opened to read only")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One view of the store, whatever others write meanwhile."""
        with self.lock:
            self._reconnect_after_fork()
            if self._inside:
                yield
                return
            with self._inside_transaction("BEGIN"):
                yield

    @contextmanager
    def _inside_transaction(self, begin: str) -> Iterator[None]:
        with self._as_sentences(), _transaction(self._connection, begin):
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def _reconnect_after_fork(self) -> None:
        """Gives a forked process a connection of its own: one must not be carried over."""
        if self._closed:
            raise StoreError(f"{self.file} is closed")
        if self._process != os.getpid():
            self._process = os.getpid()
            _INHERITED.append(self._connection)
            with self._as_sentences():
                self._connection = self._connect()

    def close(self) -> None:
        """Closes the file; the store cannot be used any more."""
        with self.lock:
            self._closed = True
            self._connection.close()

    def _run(self, sql: str, values: Values = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, values)

    def _all(self, sql: str, values: Values = ()) -> list[Any]:
        return self._run(sql, values).fetchall()

    def _column(self, sql: str, values: Values = ()) -> list[Any]:
        return [row[0] for row in self._run(sql, values)]

    def _one(self, sql: str, values: Values = ()) -> Any:
        return self._run(sql, values).fetchone()

    def _value(self, sql: str, values: Values = ()) -> Any:
        row = self._one(sql, values)
        return None if row is None else row[0]


def _connect(file: Path, mode: str) -> sqlite3.Connection:
    # As a URI, so that the mode can be said; names with ? or # must be quoted.
    uri = f"{file.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _execute_all(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";\n"):
        connection.execute(statement)


def _format(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _until_unlocked(action: Callable[[], object]) -> None:
    """Repeats a step that SQLite refuses at once, instead of waiting, while another process takes it."""
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
