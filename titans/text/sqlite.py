"""The store: texts, vectors, words, memory states and the log of what happened, in one SQLite file.

Every write is one transaction over all of them, and is on the disk when it returns. What is erased is overwritten: in
the tables (``secure_delete``), in the index of words (rewritten without it), and in the write-ahead log (truncated).
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titans.text.database import PATIENCE, TOKENIZER, Database
from titans.text.records import Event, Record, Scope, utc_now
from titans.words import sentence

# A word is a run of letters and digits; scripts that are written without spaces go character by character.
WORD = re.compile("[぀-ヿ㐀-䶿一-鿿가-힯]|(?:(?![぀-ヿ㐀-䶿一-鿿가-힯])[^\\W_])+")
ROW = (
    "r.id, r.text, u.name, s.agent, s.session, r.role, r.metadata, r.created, r.updated, r.surprise, r.version, r.uses,"
    " r.sum, r.seq FROM records r JOIN scopes s ON s.id = r.scope JOIN users u ON u.id = r.user"
)
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


class SqliteStore(Database):
    """An open store; safe to share between threads, and between processes by opening the same path.

    All methods are called inside :meth:`writing` or :meth:`reading`, but for :meth:`finish_erasing` and :meth:`close`.

    Attributes:
        index_folder: where the files of the vector index are.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        super().__init__(path, read_only)
        self.index_folder = self.file.with_name(self.file.name + "-index")
        self._stemmer = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._stemmer.execute(f"""CREATE VIRTUAL TABLE words USING fts5 (body, content='', tokenize="{TOKENIZER}")""")
        self._stemmer.execute("CREATE VIRTUAL TABLE found USING fts5vocab (words, row)")
        if not self.read_only:
            self._finish_erasing()

    def close(self) -> None:
        """Closes the file; the store cannot be used any more."""
        super().close()
        self._stemmer.close()

    def get_meta(self, key: str) -> str | None:
        """A fact about the store itself."""
        value: str | None = self._value("SELECT value FROM meta WHERE key = ?", (key,))
        return value

    def set_meta(self, key: str, value: str | None) -> None:
        """Sets a fact about the store; None removes it."""
        if value is None:
            self._run("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def count(self) -> int:
        """The number of records in the store."""
        return int(self._value("SELECT coalesce(sum(count), 0) FROM users"))

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

    def make_scope(self, scope: Scope) -> ScopeRow:
        """The exact scope, new if need be."""
        self._run("INSERT OR IGNORE INTO users (name, count, epoch) VALUES (?, 0, 0)", (scope.user,))
        user = self.find_user(scope.user)
        assert user is not None
        self._run(
            "INSERT OR IGNORE INTO scopes (user, agent, session, count, version) VALUES (?, ?, ?, 0, 0)",
            (user.id, scope.agent or "", scope.session or ""),
        )
        made = self.find_scope(scope)
        assert made is not None
        return made

    def matching_scopes(self, user: int, agent: str | None, session: str | None, empty: bool = False) -> list[int]:
        """The numbers of a user's scopes that have records, or ``empty`` ones too, and match the names given."""
        return self._column(
            "SELECT id FROM scopes WHERE user = :user AND (count > 0 OR :empty)"
            " AND (:agent IS NULL OR agent = :agent) AND (:session IS NULL OR session = :session)",
            {"user": user, "agent": agent, "session": session, "empty": empty},
        )

    def list_scopes(self, user: str | None) -> list[tuple[Scope, int]]:
        """Every scope that has records, or those of a user, and how many records each has."""
        rows = self._all(
            "SELECT u.name, s.agent, s.session, s.count FROM scopes s JOIN users u ON u.id = s.user"
            " WHERE s.count > 0 AND (?1 IS NULL OR u.name = ?1) ORDER BY s.id",
            (user,),
        )
        return [(Scope(name, agent or None, session or None), count) for name, agent, session, count in rows]

    def insert(self, record: Record, scope: ScopeRow, vector: np.ndarray, encoder: str) -> int:
        """Adds a record with its vector, its words and its line of the log; returns its sequence number."""
        body = encode_body(record)
        cursor = self._run(
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
        self._add_words(scope.user, seq, record.text)
        self._run("UPDATE users SET count = count + 1 WHERE id = ?", (scope.user,))
        self.log("add", scope.id, record.id, seq, record.version, body)
        return seq

    def log(
        self, kind: str, scope: int, id: str | None = None, seq: int | None = None, version: int | None = None,
        body: str | None = None,
    ) -> None:  # fmt: skip
        """Adds a line to the log."""
        self._run(
            "INSERT INTO events (at, kind, id, seq, scope, version, body, sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (utc_now(), kind, id, seq, scope, version, body, None if body is None else _sum(body)),
        )

    def advance_scope(self, scope: int, more: int) -> None:
        """Moves a scope's version, and its count by ``more``."""
        self._run("UPDATE scopes SET count = count + ?, version = version + 1 WHERE id = ?", (more, scope))

    def put_states(self, scope: int, states: Sequence[State]) -> None:
        """Keeps states of a scope's memory: the latest, and of the older ones those that are marked."""
        if not states:
            return
        self._connection.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)",
            [(scope, state.count, state.kept, zlib.crc32(state.data), state.data) for state in states],
        )
        latest = max(state.count for state in states)
        self._run("DELETE FROM states WHERE scope = ? AND count < ? AND NOT kept", (scope, latest))

    def drop_states(self, scope: int, above: int) -> None:
        """Forgets a scope's memory states after more than so many texts."""
        self._run("DELETE FROM states WHERE scope = ? AND count > ?", (scope, above))

    def find_state(self, scope: int, most: int) -> bytes | None:
        """The latest memory state of a scope after at most so many texts; a damaged one is passed over."""
        rows = self._run(
            "SELECT sum, state FROM states WHERE scope = ? AND count <= ? ORDER BY count DESC", (scope, most)
        )
        try:
            return next((bytes(state) for sum, state in rows if zlib.crc32(state) == sum), None)
        finally:
            rows.close()

    def scope_seqs(self, scope: int, start: int = 0) -> list[int]:
        """The records of a scope in their order, from the one at ``start``."""
        return self._column("SELECT seq FROM records WHERE scope = ? ORDER BY seq LIMIT -1 OFFSET ?", (scope, start))

    def vectors(self, seqs: Sequence[int], width: int) -> np.ndarray:
        """The vectors (n, width) of records, in the order asked for."""
        sql = "SELECT vector, sum FROM vectors WHERE seq = ?"
        return _to_matrix([self._one(sql, (seq,)) for seq in seqs], width)

    def vectors_between(self, user: int, low: int, high: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The records of a user from ``low`` to ``high`` and their vectors (n, width), in their order."""
        rows = self._all(
            "SELECT v.vector, v.sum, r.seq FROM records r JOIN vectors v ON v.seq = r.seq"
            " WHERE r.user = ? AND r.seq BETWEEN ? AND ? ORDER BY r.seq",
            (user, low, high),
        )
        return np.array([row[2] for row in rows], dtype=np.int64), _to_matrix(rows, width)

    def rows_after(self, user: int, seq: int) -> np.ndarray:
        """(n, 3) int64: number, scope and count of words of a user's records after a number, in their order."""
        rows = self._all("SELECT seq, scope, words FROM records WHERE user = ? AND seq > ? ORDER BY seq", (user, seq))
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def rows_at(self, user: int, seqs: Iterable[int]) -> np.ndarray:
        """The same for some of a user's records; those that are not there are left out."""
        found = [
            self._one("SELECT seq, scope, words FROM records WHERE user = ? AND seq = ?", (user, seq)) for seq in seqs
        ]
        return np.array([row for row in found if row is not None], dtype=np.int64).reshape(-1, 3)

    def changes_after(self, n: int, most: int) -> list[int] | None:
        """The records that were changed or erased after a line of the log, at most so many.

        None if the log does not name them: whole scopes were removed, or all vectors made again.
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
        return np.array(self._column(sql + " ORDER BY seq", values), dtype=np.int64)

    def stems(self, user: int, words: Iterable[str]) -> list[str]:
        """The words as the index of words knows them for a user, each once."""
        with self.lock:
            self._stemmer.execute("INSERT INTO words (rowid, body) VALUES (1, ?)", (_marked(user, " ".join(words)),))
            found = [row[0] for row in self._stemmer.execute("SELECT term FROM found").fetchall()]
            self._stemmer.execute("INSERT INTO words (words) VALUES ('delete-all')")
        return [stem for stem in found if stem.startswith(f"{user}_")]

    def frequency(self, stem: str) -> int:
        """How many records contain a word of a user."""
        return int(self._value("SELECT doc FROM word_counts WHERE term = ?", (stem,)) or 0)

    def postings(self, stem: str) -> np.ndarray:
        """The records that contain a word of a user, once per occurrence."""
        found = self._value("SELECT group_concat(doc) FROM word_places WHERE term = ?", (stem,))
        return np.fromstring(found, dtype=np.int64, sep=",") if found else np.empty(0, dtype=np.int64)

    def find(self, id: str) -> tuple[int, Record] | None:
        """A record by its id, and its sequence number."""
        row = self._one(f"SELECT {ROW} WHERE r.id = ?", (id,))
        return None if row is None else (row[-1], self._to_record(row))

    def records(self, seqs: Iterable[int]) -> dict[int, Record]:
        """Records by their sequence numbers; those that are not there are left out."""
        found = {}
        for seq in seqs:
            row = self._one(f"SELECT {ROW} WHERE r.seq = ?", (int(seq),))
            if row is not None:
                found[int(seq)] = self._to_record(row)
        return found

    def list_records(self, user: str | None) -> list[Record]:
        """All records, or those of a user, in their order."""
        rows = self._run(f"SELECT {ROW} WHERE ?1 IS NULL OR u.name = ?1 ORDER BY r.seq", (user,))
        return [self._to_record(row) for row in rows]

    def texts(self) -> list[tuple[int, int, str]]:
        """(number, scope, text) of every record, in their order."""
        return self._all("SELECT seq, scope, text FROM records ORDER BY seq")

    def last_event(self) -> int:
        """The number of the log's last line."""
        return int(self._value("SELECT coalesce(max(n), 0) FROM events"))

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

    def remove(self, seq: int, kind: str) -> None:
        """Takes a record out of everything but the scope's count, and its texts out of the log."""
        id, user, scope, text, version = self._one(
            "SELECT id, user, scope, text, version FROM records WHERE seq = ?", (seq,)
        )
        self._remove_words(user, seq, text)
        for table in ("records", "vectors"):
            self._run(f"DELETE FROM {table} WHERE seq = ?", (seq,))
        self._run("UPDATE users SET count = count - 1 WHERE id = ?", (user,))
        self._forget_log(id)
        self.log(kind, scope, id, seq, version)

    def change(self, seq: int, record: Record, vector: np.ndarray | None, encoder: str, keep_old: bool) -> None:
        """Puts another text, with its vector, or other metadata in a record's place."""
        user, scope, text = self._one("SELECT user, scope, text FROM records WHERE seq = ?", (seq,))
        body = encode_body(record)
        if vector is not None:
            self._remove_words(user, seq, text)
            self._add_words(user, seq, record.text)
            self._put_vectors([(seq, vector.tobytes())], encoder)
        self._run(
            "UPDATE records SET text = ?, metadata = ?, updated = ?, version = ?, words = ?, sum = ? WHERE seq = ?",
            (
                record.text, _json(record.metadata), record.updated, record.version, len(WORD.findall(record.text)),
                _sum(body), seq,
            ),
        )  # fmt: skip
        if not keep_old:
            self._forget_log(record.id)
        self.log("update", scope, record.id, seq, record.version, body)

    def _add_words(self, user: int, seq: int, text: str) -> None:
        self._run("INSERT INTO words (rowid, body) VALUES (?, ?)", (seq, _marked(user, text)))

    def _remove_words(self, user: int, seq: int, text: str) -> None:
        """Takes a text out of the index of words, and out of use the files of the vector index that cover it."""
        self._run("INSERT INTO words (words, rowid, body) VALUES ('delete', ?, ?)", (seq, _marked(user, text)))
        self._run("UPDATE users SET epoch = epoch + 1 WHERE id = ?", (user,))
        self._run("DELETE FROM segments WHERE user = ? AND ? BETWEEN low AND high", (user, seq))

    def _forget_log(self, id: str) -> None:
        """Takes a record's texts and metadata out of the log; that something happened stays."""
        self._run("UPDATE events SET body = NULL, sum = NULL WHERE id = ?", (id,))

    def remove_scope(self, scope: int) -> int:
        """Takes a scope with all its records, its history and its name out of the store; returns how many there were.

        What stays is a line in the log that a scope was removed.
        """
        user = self._value("SELECT user FROM scopes WHERE id = ?", (scope,))
        seqs = self.scope_seqs(scope)
        for seq in seqs:
            self.remove(seq, "delete")
        for table in ("states", "events"):
            self._run(f"DELETE FROM {table} WHERE scope = ?", (scope,))
        self._run("DELETE FROM scopes WHERE id = ?", (scope,))
        self._run("DELETE FROM users WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM scopes WHERE user = ?1)", (user,))
        self.log("delete_all", scope)
        return len(seqs)

    def begin_erasing(self) -> None:
        """The last step of a transaction that erases: the index of words is rewritten without what was taken out."""
        self._run("INSERT INTO words (words) VALUES ('optimize')")
        self.set_meta("erasing", "yes")

    def finish_erasing(self) -> None:
        """After that transaction: empties the write-ahead log and drops files of the index that are not valid."""
        with self.lock, self._as_sentences():
            self._finish_erasing()

    def _finish_erasing(self) -> None:
        # Whoever dies between the two steps leaves the mark, and the next to open the store goes on.
        if self.get_meta("erasing") is None:
            return
        self._drop_strays()
        deadline = time.monotonic() + PATIENCE
        while self._value("PRAGMA wal_checkpoint(TRUNCATE)"):
            if time.monotonic() > deadline:
                return  # a reader holds the log; the mark stays
            time.sleep(0.05)
        self._run("BEGIN IMMEDIATE")
        self.set_meta("erasing", None)
        self._run("COMMIT")

    def _drop_strays(self) -> None:
        """Deletes files of the index that the store does not know."""
        if self.index_folder.is_dir():
            known = set(self._column("SELECT file FROM segments"))
            for file in self.index_folder.iterdir():
                if file.name not in known:
                    file.unlink(missing_ok=True)

    def segments(self, user: int) -> list[Segment]:
        """The valid files of the index for a user."""
        rows = self._all("SELECT file, low, high, count, sum FROM segments WHERE user = ? ORDER BY low", (user,))
        return [Segment(*row) for row in rows]

    def add_segment(self, user: int, segment: Segment) -> None:
        """Makes a file of the index valid."""
        self._run(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)",
            (segment.file, user, segment.low, segment.high, segment.count, segment.sum),
        )

    def set_surprises(self, surprises: Iterable[tuple[int, float]]) -> None:
        """Sets the surprise of records, after the texts before them have changed."""
        self._connection.executemany(
            "UPDATE records SET surprise = ? WHERE seq = ?", [(value, seq) for seq, value in surprises]
        )

    def add_uses(self, uses: Mapping[int, int]) -> None:
        """Adds to how often records have been used."""
        self._connection.executemany(
            "UPDATE records SET uses = uses + ? WHERE seq = ?", [(more, seq) for seq, more in uses.items()]
        )

    def weighed(self) -> list[tuple[int, float, int, int]]:
        """(number, surprise, uses, bytes) of every record: what eviction chooses from."""
        return self._all("SELECT seq, surprise, uses, length(CAST(text AS BLOB)) FROM records ORDER BY seq")

    def scopes_holding(self, seqs: Iterable[int]) -> dict[ScopeRow, list[int]]:
        """The scopes of some records, each with its own; records that are not there are left out."""
        found: dict[ScopeRow, list[int]] = {}
        for seq in sorted(seqs):
            row = self._one(
                "SELECT s.id, s.user, s.count, s.version FROM records r JOIN scopes s ON s.id = r.scope"
                " WHERE r.seq = ?",
                (seq,),
            )
            if row is not None:
                found.setdefault(ScopeRow(*row), []).append(seq)
        return found

    def replace_vectors(self, vectors: Iterable[tuple[int, bytes]], encoder: str) -> None:
        """Other vectors for all records; the memory states and the index are dropped with the old ones."""
        self.log("reindex", 0)
        self._run("DELETE FROM states")
        self._run("DELETE FROM segments")
        self._run("UPDATE users SET epoch = epoch + 1")
        self._run("UPDATE scopes SET version = version + 1")
        self._put_vectors(vectors, encoder)

    def _put_vectors(self, vectors: Iterable[tuple[int, bytes]], encoder: str) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?, ?)",
            ((seq, encoder, zlib.crc32(data), data) for seq, data in vectors),
        )

    def events_after(self, n: int) -> list[tuple[int, str, int | None, int]]:
        """(line, kind, record, scope) of the log after a line."""
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
        figures["states"] = self._value(
            "SELECT count(*) FROM states t JOIN scopes s ON s.id = t.scope JOIN users u ON u.id = s.user"
            " WHERE ?1 IS NULL OR u.name = ?1",
            (user,),
        )
        if user is None:
            figures["users"] = self._value("SELECT count(*) FROM users WHERE count > 0")
            figures["events"] = self._value("SELECT count(*) FROM events")
            figures["index_segments"] = self._value("SELECT count(*) FROM segments")
        return figures

    def check(self) -> list[str]:
        """What is wrong with the file and with its records, one sentence each; none if all is well."""
        problems = [verdict for verdict in self._column("PRAGMA quick_check") if verdict != "ok"]
        for row in self._run(f"SELECT {ROW} ORDER BY r.seq"):
            if _sum(encode_body(to_record(row))) != row[-2]:
                problems.append(f"record {row[0]} is not what was written")
        for seq, total, data in self._run("SELECT seq, sum, vector FROM vectors"):
            if zlib.crc32(data) != total:
                problems.append(f"the vector of record number {seq} is not what was written")
        count = self.count()
        for table in ("records", "vectors"):
            found = self._value(f"SELECT count(*) FROM {table}")
            if found != count:
                problems.append(f"{table} has {found} rows; expected {count}")
        if self.read_only:
            return problems
        try:
            self._run("INSERT INTO words (words) VALUES ('integrity-check')")
        except sqlite3.DatabaseError as error:
            problems.append(f"the index of words: {sentence(error)}")
        return problems


def _to_matrix(rows: Sequence[Any], width: int) -> np.ndarray:
    """The vectors (n, width) of rows that begin with a vector and its checksum."""
    for row in rows:
        whole = row is not None and isinstance(row[0], bytes) and len(row[0]) == 4 * width
        if not whole or zlib.crc32(row[0]) != row[1]:
            raise sqlite3.DatabaseError("database disk image is malformed: a vector is not what was written")
    data = bytearray().join(row[0] for row in rows)  # not bytes, which torch cannot write to
    return np.frombuffer(data, dtype=np.float32).reshape(len(rows), width)


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
