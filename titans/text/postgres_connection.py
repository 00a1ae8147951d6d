"""Connections to a PostgreSQL server: opening them, transactions of threads, and what to say if it is away."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
import psycopg
from psycopg import errors, pq
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.types import TypeInfo

from titans.text.location import hide_password
from titans.text.postgres_schema import find_extension, find_format, lock_key, prepare, quote
from titans.text.records import BusyStore, FullStore, ReadOnlyStore, StoreError
from titans.text.store import FORMAT
from titans.words import sentence

SCHEMA = "titans"  # unless the URL names one
CONNECTIONS = 8  # of a process; further threads wait
PATIENCE = 60  # seconds to wait for others who are writing
CANDIDATES = 100  # that HNSW follows
AWAY = "57P"  # how codes of errors begin that a server sends when it shuts down or has crashed
# Of libpq: a server that does not answer, or a network that is gone, is noticed within seconds.
OPTIONS = {
    "application_name": "titans", "client_encoding": "utf8", "connect_timeout": 5, "keepalives_idle": 5,
    "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 15_000,
}  # fmt: skip
# The server, too, notices within seconds that a client is gone, whose locks others wait for; and what is acknowledged
# is on its disk, even if it usually does not wait for that.
SETTINGS = """
SELECT set_config('tcp_keepalives_idle', '5', false), set_config('tcp_keepalives_interval', '2', false),
    set_config('tcp_keepalives_count', '3', false),
    CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END
"""
READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
KINDS = {errors.DiskFull: FullStore, errors.ReadOnlySqlTransaction: ReadOnlyStore}  # of errors, by their cause
T = TypeVar("T")
Values = Sequence[Any] | Mapping[str, Any]  # of the placeholders of a statement

_INHERITED: list[Any] = []  # connections of a parent process: closing one here could disturb it there


class VectorDumper(Dumper):
    """Sends an array as pgvector's ``vector``, in its binary form."""

    format = pq.Format.BINARY

    def dump(self, obj: np.ndarray) -> bytes:
        """Two bytes for the width, two that are zero, and the numbers."""
        return len(obj).to_bytes(2, "big") + b"\0\0" + obj.astype(">f4").tobytes()


class Numbers:
    """Whole numbers that are sent as an array: much quicker than as a list."""

    def __init__(self, values: Iterable[int]) -> None:
        self.values = np.fromiter(values, dtype=np.int64)


class NumbersDumper(Dumper):
    """Sends numbers as ``int8[]``, in its binary form."""

    format = pq.Format.BINARY
    oid = 1016

    def dump(self, obj: Numbers) -> bytes:
        """One dimension, no nulls, the type of the elements, how many, the first index; then each with its length."""
        made = np.empty(len(obj.values), dtype=[("length", ">i4"), ("value", ">i8")])
        made["length"], made["value"] = 8, obj.values
        return struct.pack(">5i", 1, 0, 20, len(made), 1) + made.tobytes()


def load_vectors(data: Sequence[bytes]) -> np.ndarray:
    """(n, width): vectors of one width from their binary form."""
    rows = np.frombuffer(b"".join(data), dtype=">f4").reshape(len(data), -1)
    return rows[:, 1:].astype(np.float32)  # without the width


@dataclass
class Transaction:
    """What a thread is in the middle of.

    Attributes:
        process: the one it belongs to; a forked process has none of its parent's.
        facts: about the store; they change only while nobody else writes.
        known: what has been asked once of a view of the store.
    """

    connection: Any
    cursor: Any
    process: int
    writing: bool
    facts: dict[str, str]
    known: dict[Any, Any] = field(default_factory=dict)


class Server:
    """The schema of a store on a server; safe to share between threads, and after a fork.

    Attributes:
        name: the URL without its password.
        schema: where the tables are.
        read_only: nothing is written.
        lock: guards what a process keeps in memory of the store.
    """

    def __init__(self, url: str, read_only: bool = False) -> None:
        self.name = hide_password(url)
        self.read_only = read_only
        self.lock = threading.RLock()
        url, self.schema = split_url(url)
        if not 1 <= len(self.schema.encode("utf-8")) <= 63:
            raise StoreError(f"schema is {self.schema!r}; expected a name of 1 to 63 bytes")
        try:
            self._parameters = OPTIONS | conninfo_to_dict(url)
        except psycopg.Error:  # which may quote the password
            raise StoreError(
                f"{self.name} is no URL of a PostgreSQL database; expected postgresql://USER:PASSWORD@HOST/DATABASE"
            ) from None
        self._closed = False
        self._begin_process()
        with self._as_sentences():
            connection = self._connect(new=True)
            self._free.append(connection)

    def _begin_process(self) -> None:
        self._process = os.getpid()
        self._free: list[Any] = []
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self._thread = threading.local()
        self._threads = ThreadPoolExecutor(CONNECTIONS // 2)

    def _connect(self, new: bool = False) -> Any:
        """A new connection; with ``new``, the store is looked at, and made if it is not there."""
        connection = psycopg.connect(**self._parameters, autocommit=True)
        try:
            if new and self.read_only:
                self._require_store(connection)
            elif new:
                prepare(connection, self.schema, self.name)
            connection.execute(SETTINGS)
            found = find_extension(connection)
            if found is None:
                raise StoreError(f"{self.name} lacks the extension pgvector")
            kind = TypeInfo.fetch(connection, f"{quote(connection, found[0])}.vector")
            kind.register(connection)
            connection.adapters.register_dumper(Numbers, NumbersDumper)
            connection.adapters.register_dumper(np.ndarray, type("Vector", (VectorDumper,), {"oid": kind.oid}))
            self._search_path = f"{quote(connection, self.schema)}, {quote(connection, found[0])}"
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_store(self, connection: Any) -> None:
        format = find_format(connection, self.schema, self.name)
        if format is None:
            raise StoreError(f"there is no memory store at {self.name}")
        if format < FORMAT:
            raise StoreError(f"{self.name} has format {format}; open it once to write, which brings it to {FORMAT}")

    @contextmanager
    def _as_sentences(self) -> Iterator[None]:
        """Turns what psycopg raises into a :class:`StoreError` with one sentence."""
        try:
            yield
        except errors.LockNotAvailable as error:
            raise BusyStore(f"{self.name} is busy: others have been writing for {PATIENCE} seconds") from error
        except psycopg.Error as error:
            said, kind = sentence(error), StoreError
            if error.sqlstate is None and "FATAL:" in said:
                said = f"refuses: {said.rpartition('FATAL:')[2].strip()}"
            elif isinstance(error, psycopg.OperationalError) and (error.sqlstate or AWAY).startswith(AWAY):
                said, kind = f"does not answer: {said}", BusyStore
            else:
                said = f"cannot be {'read' if self.read_only else 'written'}: {said}"
                kind = next((kind for cause, kind in KINDS.items() if isinstance(error, cause)), StoreError)
            raise kind(f"{self.name} {said}") from error

    @contextmanager
    def writing(self, alone: bool = False) -> Iterator[None]:
        """One transaction: all of it is on the server's disk at the end, or nothing of it if anything is raised."""
        self.require_writable()
        lock = "pg_advisory_xact_lock" + ("" if alone else "_shared")
        begin = (
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;"
            f"SET LOCAL lock_timeout = {1000 * PATIENCE};"
            f"SELECT {lock}({lock_key('write', self.schema)})"
        )
        with self._transaction(begin, writing=True):
            yield

    def require_writable(self) -> None:
        """Raises a :class:`StoreError` if nothing can be written."""
        if self.read_only:
            raise ReadOnlyStore(f"{self.name} was opened to read only")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One view of the store, whatever others write meanwhile."""
        if self._inside() is not None:
            yield
            return
        with self._transaction(READ, writing=False):
            yield

    def _beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begins some reading in another thread, by another connection with the same view of the store.

        Returns:
            what waits for its result; where no connection is free, the work is done only then.
        """
        if self._current.writing:  # nobody else can see what is not committed
            return work
        snapshot = self._value("SELECT pg_export_snapshot()")

        def read() -> T:
            with self._transaction(f"{READ};SET TRANSACTION SNAPSHOT '{snapshot}'", writing=False, patience=0):
                return work()

        begun = self._threads.submit(read)

        def wait() -> T:
            try:
                return begun.result()
            except StoreError:
                return work()

        return wait

    @contextmanager
    def _transaction(self, begin: str, writing: bool, patience: float = PATIENCE) -> Iterator[None]:
        assert self._inside() is None, "a transaction is not begun in another one"
        with self._as_sentences(), self._place(patience):
            connection, facts = self._begin(begin)
            self._thread.transaction = Transaction(connection, connection.cursor(), self._process, writing, facts)
            try:
                yield
                # The server would answer a COMMIT after a failure that somebody caught with a silent ROLLBACK.
                if connection.info.transaction_status != pq.TransactionStatus.INTRANS:
                    raise StoreError(f"nothing was written to {self.name}: a step of the transaction had failed")
                connection.execute("COMMIT")
            except BaseException:
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise
            finally:
                self._thread.transaction = None
                self._put_back(connection)

    def _begin(self, begin: str) -> tuple[Any, dict[str, str]]:
        """A connection on which a transaction has begun, and the facts about the store.

        A connection that was lost while nobody used it is replaced.
        """
        while True:
            with self.lock:
                kept = self._free.pop() if self._free else None
            connection = kept or self._connect()
            try:
                cursor = connection.execute(
                    f"{begin};SET LOCAL search_path = {self._search_path};"
                    f"SET LOCAL hnsw.ef_search = {CANDIDATES};SELECT key, value FROM meta"
                )
                while cursor.nextset():
                    pass
                return connection, dict(cursor.fetchall())
            except BaseException as error:
                lost = connection.closed
                connection.close()
                if kept is None or not lost or not isinstance(error, psycopg.OperationalError):
                    raise

    def _put_back(self, connection: Any) -> None:
        if self._closed or connection.info.transaction_status != pq.TransactionStatus.IDLE:
            connection.close()
        else:
            with self.lock:
                self._free.append(connection)

    @contextmanager
    def _place(self, patience: float = PATIENCE) -> Iterator[None]:
        """Waits until this process may use one more connection."""
        self._reset_after_fork()
        if self._closed:
            raise StoreError(f"{self.name} is closed")
        places = self._places
        if not places.acquire(timeout=patience):
            raise BusyStore(f"{self.name} is busy: all {CONNECTIONS} connections of this process are in use")
        try:
            yield
        finally:
            places.release()

    def _reset_after_fork(self) -> None:
        """Gives a forked process connections of its own: one must not be carried over."""
        if self._process != os.getpid():
            _INHERITED.extend([self._thread, *self._free])
            self._begin_process()

    @contextmanager
    def _outside(self) -> Iterator[Any]:
        """A connection of its own, for what cannot be done in a transaction."""
        with self._as_sentences(), self._place():
            connection = self._connect()
            try:
                connection.execute(f"SET search_path = {self._search_path}")
                yield connection
            finally:
                connection.close()

    def close(self) -> None:
        """Closes the connections; the store cannot be used any more."""
        with self.lock:
            self._closed = True
            if self._process == os.getpid():
                self._threads.shutdown(wait=False)
                for connection in self._free:
                    connection.close()

    def _inside(self) -> Transaction | None:
        """The transaction that this thread is in."""
        found: Transaction | None = getattr(self._thread, "transaction", None)
        return found if found is not None and found.process == os.getpid() else None

    def _once(self, key: Any, ask: Callable[[], Any]) -> Any:
        """The answer to a question, which is asked once while the store is being read: its view does not change."""
        inside = self._current
        if inside.writing:
            return ask()
        if key not in inside.known:
            inside.known[key] = ask()
        return inside.known[key]

    @property
    def _current(self) -> Transaction:
        inside = self._inside()
        assert inside is not None, "called inside of a transaction"
        return inside

    def _run(self, sql: str, values: Values | None = None) -> Any:
        # Without values, so that statements of several parts and percent signs pass.
        return self._current.cursor.execute(sql, values, binary=bool(values))

    def _all(self, sql: str, values: Values | None = None) -> list[Any]:
        rows: list[Any] = self._run(sql, values).fetchall()
        return rows

    def _column(self, sql: str, values: Values | None = None) -> list[Any]:
        return [row[0] for row in self._run(sql, values)]

    def _one(self, sql: str, values: Values | None = None) -> Any:
        return self._run(sql, values).fetchone()

    def _value(self, sql: str, values: Values | None = None) -> Any:
        row = self._one(sql, values)
        return None if row is None else row[0]


def split_url(url: str) -> tuple[str, str]:
    """A URL without its parameter ``schema``, which is ours, and the schema."""
    head, mark, query = url.rpartition("?")
    parts = query.split("&") if mark else []
    named = [part.removeprefix("schema=") for part in parts if part.startswith("schema=")]
    if not named:
        return url, SCHEMA
    rest = "&".join(part for part in parts if not part.startswith("schema="))
    return head + ("?" + rest if rest else ""), unquote(named[-1])
