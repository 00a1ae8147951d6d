"""Reads what is left of a damaged store, row by row: from its records and, where they fail, from its log."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from titans.text.database import MAGIC, PAGE, locate
from titans.text.encoder import Progress, TextEncoder
from titans.text.memory import Memory
from titans.text.neural import NeuralTextMemory
from titans.text.records import Record, StoreError
from titans.text.sqlite import to_record
from titans.text.store import encode_body

# The same in all stores: size of a page, write-ahead log for reading and writing, no reserved bytes, three constants.
HEADER = MAGIC + PAGE.to_bytes(2, "big") + bytes([2, 2, 0, 64, 32, 32])
FIELDS = "seq, id, scope, role, text, metadata, created, updated, surprise, version, uses, sum"


class Salvage(NamedTuple):
    """What was read from a damaged store."""

    records: list[Record]  # in their order
    lost: int | None  # how many more there were; None if the store cannot say


def salvage(path: str | Path) -> Salvage:
    """Reads what is left of a damaged store; the store itself is not touched."""
    file = locate(path)
    if not file.is_file():
        raise StoreError(f"there is no memory store at {file}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.sqlite3"
        shutil.copyfile(file, copy)
        log = file.with_name(file.name + "-wal")
        if log.is_file():
            shutil.copyfile(log, copy.with_name(copy.name + "-wal"))
        _mend_header(copy)
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            # Lets SQLite read a file that is shorter than its header says.
            connection.execute("PRAGMA writable_schema = ON")
            found = _read(connection)
            # Compiled and not run: whether there is a table of records, however damaged its pages are.
            if not found.records and _try(connection, f"EXPLAIN SELECT {FIELDS} FROM records") is None:
                raise StoreError(f"{file} is not a memory store, or nothing can be read from it")
            return found
        except sqlite3.DatabaseError as error:
            raise StoreError(f"nothing can be read from {file}: {error}") from error
        finally:
            connection.close()


def recover(
    path: str | Path,
    out: str | Path,
    encoder: TextEncoder | str | Path | None = None,
    neural: NeuralTextMemory | str | Path | None = None,
    progress: Progress | None = None,
) -> Salvage:
    """Writes what is left of a damaged store to a new one, in its order; vectors and memories are made again."""
    target = locate(out)
    if target.exists():
        raise StoreError(f"{target} is there already; expected the name of a new store")
    found = salvage(path)
    with Memory(out, encoder, neural) as memory:
        memory.restore(found.records, progress)
    return found


def _mend_header(file: Path) -> None:
    with file.open("r+b") as stream:
        if stream.read(len(HEADER)) != HEADER:
            stream.seek(0)
            stream.write(HEADER)


def _read(connection: sqlite3.Connection) -> Salvage:
    scopes = {row[0]: row[1:] for row in _rows(connection, "scopes", "id", "id, user, agent, session")}
    users = {row[0]: row[1] for row in _rows(connection, "users", "id", "id, name")}
    logged, gone = _read_log(connection)
    found: dict[int, Record] = {}
    for row in _rows(connection, "records", "seq", FIELDS):
        record = _to_record(row, scopes, users)
        if record is not None:
            more = _try(connection, "SELECT repeats, replaces FROM records WHERE seq = ?", row[0])  # not in format 1
            found[row[0]] = record if more is None else replace(record, repeats=more[0], replaces=more[1])
    for seq, record in logged.items():
        if seq not in found and seq not in gone:
            found[seq] = record
    expected = _try(connection, "SELECT sum(count) FROM users")
    known = None if not expected or not isinstance(expected[0], int) else max(0, expected[0] - len(found))
    unique = {record.id: record for _, record in sorted(found.items())}
    return Salvage(list(unique.values()), known)


def _read_log(connection: sqlite3.Connection) -> tuple[dict[int, Record], set[int]]:
    """The last text of every record by its sequence number, and the numbers that were erased."""
    logged: dict[int, Record] = {}
    gone: set[int] = set()
    for _, seq, kind, body, total in _rows(connection, "events", "n", "n, seq, kind, body, sum"):
        if kind in ("delete", "evict"):
            gone.add(seq)
        elif isinstance(body, str) and zlib.crc32(body.encode("utf-8", "replace")) == total:
            logged[seq] = Record.from_dict(json.loads(body))
    return logged, gone


def _to_record(row: Sequence[Any], scopes: dict[int, Any], users: dict[int, str]) -> Record | None:
    """The record of a row, if its checksum holds."""
    _, id, scope, role, text, metadata, created, updated, surprise, version, uses, total = row
    try:
        user, agent, session = scopes[scope]
        record = to_record(
            (id, text, users[user], agent, session, role, metadata, created, updated, surprise, version, uses, 0, None)
        )
        return record if zlib.crc32(encode_body(record).encode("utf-8")) == total else None
    except (KeyError, ValueError, TypeError):
        return None


def _rows(connection: sqlite3.Connection, table: str, key: str, fields: str) -> Iterator[Sequence[Any]]:
    """The rows of a table, one at a time; those that cannot be read are skipped."""
    last = _try(connection, "SELECT seq FROM sqlite_sequence WHERE name = ?", table)
    if last is None or not isinstance(last[0], int):
        last = _try(connection, f"SELECT max({key}) FROM {table}")
    for number in range(1, (last[0] or 0) + 1 if last and isinstance(last[0], (int, type(None))) else 1):
        row = _try(connection, f"SELECT {fields} FROM {table} WHERE {key} = ?", number)
        if row is not None:
            yield row


def _try(connection: sqlite3.Connection, sql: str, *values: Any) -> Any:
    try:
        return connection.execute(sql, values).fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError):
        return None
