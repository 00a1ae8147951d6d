"""The store: texts, vectors, words, memory states and the log of what happened, in one SQLite file.

Every write is one transaction over all of them, and is on the disk when it returns. What is erased is overwritten: in
the tables (``secure_delete``), in the index of words (rewritten without it), and in the write-ahead log (truncated).
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from titans.bm25 import bm25
from titans.text.database import PATIENCE, Database
from titans.text.index import LocalIndex, Segment, UserRow
from titans.text.ranking import MOST_POSTINGS, count_words, rarest
from titans.text.records import MAX_NUMBER, Event, Record, Scope, StoreError, new_id, utc_now
from titans.text.store import (
    OPERATORS,
    WORD,
    Matches,
    ScopeRow,
    Selection,
    State,
    Stemmer,
    Store,
    Tests,
    checksum,
    encode_body,
    follow,
    mark_word,
    oldest_request,
    to_event,
    to_json,
)
from titans.words import sentence

ROW = (
    "r.id, r.text, u.name, s.agent, s.session, r.role, r.metadata, r.created, r.updated, r.surprise, r.version, r.uses,"
    " r.repeats, r.replaces, r.sum, r.seq FROM records r JOIN scopes s ON s.id = r.scope JOIN users u ON u.id = r.user"
)
SCOPE = "s.id, s.user, s.count, s.version FROM scopes s"
IN_STATEMENT = 500  # numbers of records that one statement asks for


class SqliteStore(Database, Store):
    """A store in one SQLite file, with files of a vector index beside it.

    Attributes:
        index_folder: where the files of the vector index are.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        super().__init__(path, read_only)
        self.index_folder = self.file.with_name(self.file.name + "-index")
        self.index = LocalIndex(self)
        self._stemmer = Stemmer()
        self._matched: tuple[Selection, np.ndarray] | None = None  # the last selection with tests, and what passes them
        if not self.read_only:
            self.finish_erasing()

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

    def user_row(self, user: int) -> UserRow:
        """A user by number; one that is not there has no records, and an epoch that no user has."""
        row = self._one("SELECT id, count, epoch FROM users WHERE id = ?", (user,))
        return UserRow(user, 0, -1) if row is None else UserRow(*row)

    def _user_id(self, name: str) -> int | None:
        found: int | None = self._value("SELECT id FROM users WHERE name = ?", (name,))
        return found

    def find_scope(self, scope: Scope) -> ScopeRow | None:
        """The exact scope, if it has been written to."""
        row = self._one(
            f"SELECT {SCOPE} JOIN users u ON u.id = s.user WHERE u.name = ? AND s.agent = ? AND s.session = ?",
            scope.names,
        )
        return None if row is None else ScopeRow(*row)

    def make_scope(self, scope: Scope) -> ScopeRow:
        """The exact scope, new if need be; nobody else writes while this transaction lasts."""
        self._run("INSERT OR IGNORE INTO users (name, count, epoch) VALUES (?, 0, 0)", (scope.user,))
        self._run(
            "INSERT OR IGNORE INTO scopes (user, agent, session, count, version) VALUES (?, ?, ?, 0, 0)",
            (self._user_id(scope.user), *scope.names[1:]),
        )
        made = self.find_scope(scope)
        assert made is not None
        return made

    def matching_scopes(self, scope: Scope, below: bool) -> list[int]:
        """The numbers of the exact scope, or of all scopes ``below`` the names given; of those without records too."""
        names = {"agent": scope.agent, "session": scope.session}
        if not below:
            names = {key: name or "" for key, name in names.items()}
        return self._column(
            "SELECT s.id FROM scopes s JOIN users u ON u.id = s.user WHERE u.name = :user"
            " AND (:agent IS NULL OR s.agent = :agent) AND (:session IS NULL OR s.session = :session) ORDER BY s.id",
            {"user": scope.user, **names},
        )

    def select(self, scope: Scope, tests: Tests, exact: bool = False) -> Selection | None:
        """The records of a user that match the names given and pass the tests; None if the names match none."""
        user = self._user_id(scope.user)
        if user is None:
            return None
        if not exact and scope.agent is None and scope.session is None:
            return Selection(user, None, tests) if self.user_row(user).count else None
        scopes = [
            number
            for number in self.matching_scopes(scope, below=not exact)
            if self._value("SELECT count FROM scopes WHERE id = ?", (number,))
        ]
        return Selection(user, tuple(scopes), tests) if scopes else None

    def rows_of(self, selection: Selection, most: int) -> list[ScopeRow]:
        """The scopes with records that a selection covers, those written to last first, at most so many."""
        inside = "" if selection.scopes is None else f" AND s.id IN ({', '.join(map(str, selection.scopes))})"
        rows = self._all(
            f"SELECT {SCOPE} WHERE s.user = ? AND s.count > 0{inside}"
            " ORDER BY (SELECT max(seq) FROM records r WHERE r.scope = s.id) DESC LIMIT ?",
            (selection.user, most),
        )
        return [ScopeRow(*row) for row in rows]

    def list_scopes(self, user: str | None) -> list[tuple[Scope, int]]:
        """Every scope that has records, or those of a user, and how many records each has."""
        rows = self._all(
            "SELECT u.name, s.agent, s.session, s.count FROM scopes s JOIN users u ON u.id = s.user"
            " WHERE s.count > 0 AND (?1 IS NULL OR u.name = ?1) ORDER BY s.id",
            (user,),
        )
        return [(Scope(name, agent or None, session or None), count) for name, agent, session, count in rows]

    def insert(
        self, records: Sequence[Record], scopes: Mapping[Scope, ScopeRow], vectors: np.ndarray, encoder: str
    ) -> list[int]:
        """Adds records with their vectors, words and lines of the log, in their order; returns their numbers."""
        seqs = []
        for record, vector in zip(records, vectors, strict=True):
            scope, body = scopes[record.scope], encode_body(record)
            cursor = self._run(
                "INSERT INTO records (id, user, scope, role, text, metadata, created, updated, version, words, sum,"
                " surprise, uses, repeats, replaces, text_sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.id, scope.user, scope.id, record.role, record.text, to_json(record.metadata), record.created,
                    record.updated, record.version, len(WORD.findall(record.text)), checksum(body), record.surprise,
                    record.uses, record.repeats, record.replaces, checksum(record.text),
                ),
            )  # fmt: skip
            seq = int(cursor.lastrowid or 0)
            self._put_vectors([(seq, vector)], encoder)
            self._add_words(scope.user, seq, record.text)
            self._run("UPDATE users SET count = count + 1 WHERE id = ?", (scope.user,))
            self.log("add", scope.id, record.id, seq, record.version, body)
            seqs.append(seq)
        return seqs

    def log(
        self, kind: str, scope: int, id: str | None = None, seq: int | None = None, version: int | None = None,
        body: str | None = None,
    ) -> None:  # fmt: skip
        """Adds a line to the log."""
        self._run(
            "INSERT INTO events (at, kind, id, seq, scope, version, body, sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (utc_now(), kind, id, seq, scope, version, body, None if body is None else checksum(body)),
        )

    def advance_scope(self, scope: int, more: int) -> None:
        """Moves a scope's version, and its count by ``more``."""
        self._run("UPDATE scopes SET count = count + ?, version = version + 1 WHERE id = ?", (more, scope))

    def put_states(self, scope: int, states: Sequence[State]) -> None:
        """Keeps states of a scope's memory."""
        self._connection.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)",
            [(scope, state.count, checksum(state.data), state.data) for state in states],
        )

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
        rows = self._by_seq("SELECT vector, sum, seq FROM vectors WHERE seq", seqs)
        return _to_matrix([rows.get(seq) for seq in seqs], width)

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
        rows = self._all(
            "SELECT DISTINCT seq FROM events WHERE n > ? AND kind NOT IN ('add', 'repeat') LIMIT ?", (n, most)
        )
        return None if any(seq is None for (seq,) in rows) else [seq for (seq,) in rows]

    def matching(self, selection: Selection) -> np.ndarray | None:
        """The records of a selection's user whose metadata pass its tests, in their order; None without tests."""
        if not selection.tests:
            return None
        if self._matched is None or self._matched[0] is not selection:
            sql = "SELECT seq FROM records r WHERE user = ?"
            values: list[Any] = [selection.user]
            for key, tests in selection.tests.items():
                for name, value in tests.items():
                    wanted = list(value) if name == "in" else [value]
                    tested = " OR ".join(_test("eq" if name == "in" else name, item) for item in wanted) or "0"
                    sql += f" AND EXISTS (SELECT 1 FROM json_each(r.metadata) j WHERE j.key = ? AND ({tested}))"
                    values += [key, *wanted]
            self._matched = (selection, np.array(self._column(sql + " ORDER BY seq", values), dtype=np.int64))
        return self._matched[1]

    def nearest(self, selection: Selection, vectors: np.ndarray, many: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each vector of (n, width), the numbers of the nearest records and their cosines, best first."""
        return self.index.nearest(selection, vectors, many)

    def build_index(self, user: str) -> None:
        """Writes files of the vector index for a user's records once enough of them are in no file."""
        with self.reading():
            number = self._user_id(user)
        if number is not None:
            self.index.build(number)

    def neighbours(self, seqs: Sequence[int]) -> list[tuple[int | None, int | None]]:
        """For each record, those directly before and after it in its scope."""
        rows = self._by_seq(
            "SELECT (SELECT max(seq) FROM records b WHERE b.scope = r.scope AND b.seq < r.seq),"
            " (SELECT min(seq) FROM records a WHERE a.scope = r.scope AND a.seq > r.seq), r.seq"
            " FROM records r WHERE r.seq",
            seqs,
        )
        return [rows.get(seq, (None, None))[:2] for seq in seqs]

    def find_words(self, selection: Selection, words: Sequence[str], many: int, most: int = MOST_POSTINGS) -> Matches:
        """The best records by BM25 over the selection: no other record changes a score."""
        stems = dict(zip(words, self._stemmer.stems(words), strict=True))
        marked = {stem: mark_word(selection.user, stem) for stem in stems.values() if stem}
        frequencies = {
            stem: int(self._value("SELECT doc FROM word_counts WHERE term = ?", (term,)) or 0)
            for stem, term in marked.items()
        }
        chosen = rarest(frequencies, most)
        known = self.index.catalogue(selection.user, vectors=False)
        allowed = self.index.allowed(known, selection)
        lengths = known.lengths if allowed is None else known.lengths[allowed]
        postings = [count_words(self._postings(marked[stem]), known.seqs, known.lengths, allowed) for stem in chosen]
        seqs, scores = bm25(postings, len(lengths), int(lengths.sum()))
        return Matches(
            dict(zip(seqs[:many].tolist(), scores[:many].tolist(), strict=True)),
            tuple(word for word, stem in stems.items() if frequencies.get(stem) and stem not in chosen),
        )

    def _postings(self, term: str) -> np.ndarray:
        """The records that contain a marked stem, once per occurrence."""
        found = self._value("SELECT group_concat(doc) FROM word_places WHERE term = ?", (term,))
        return np.fromstring(found, dtype=np.int64, sep=",") if found else np.empty(0, dtype=np.int64)

    def find(self, id: str, user: str | None) -> tuple[int, Record] | None:
        """A record of a user (None: of any) by its id, and its sequence number."""
        row = self._one(f"SELECT {ROW} WHERE r.id = ?1 AND (?2 IS NULL OR u.name = ?2)", (id, user))
        return None if row is None else (row[-1], self._to_record(row))

    def records(self, seqs: Iterable[int]) -> dict[int, Record]:
        """Records by their sequence numbers; those that are not there are left out."""
        wanted = [int(seq) for seq in seqs]
        rows = self._by_seq(f"SELECT {ROW} WHERE r.seq", wanted)
        return {seq: self._to_record(rows[seq]) for seq in wanted if seq in rows}

    def _by_seq(self, sql: str, seqs: Sequence[int]) -> dict[int, Any]:
        """Rows by the sequence number at their end, which the statement also ends with; a few hundred at a time."""
        found: dict[int, Any] = {}
        for start in range(0, len(seqs), IN_STATEMENT):
            numbers = ", ".join(str(int(seq)) for seq in seqs[start : start + IN_STATEMENT])
            found |= {row[-1]: row for row in self._run(f"{sql} IN ({numbers})")}
        return found

    def newest(self, selection: Selection, many: int, before: int = MAX_NUMBER) -> dict[int, Record]:
        """The newest records of a selection by their numbers, which are below ``before``, newest first."""
        known = self.index.catalogue(selection.user, vectors=False)
        allowed = self.index.allowed(known, selection)
        seqs = known.seqs if allowed is None else known.seqs[allowed]
        return self.records(seqs[: np.searchsorted(seqs, before)][::-1][:many])

    def records_after(self, seq: int, user: str | None, many: int) -> dict[int, Record]:
        """The first records with higher numbers than ``seq``, of all or of a user, in their order."""
        of_user = "" if user is None else " AND r.user = (SELECT id FROM users WHERE name = :user)"
        rows = self._all(
            f"SELECT {ROW} WHERE r.seq > :seq{of_user} ORDER BY r.seq LIMIT :many",
            {"seq": seq, "user": user, "many": many},
        )
        return {row[-1]: self._to_record(row) for row in rows}

    def find_request(self, user: int, key: str) -> tuple[str, list[tuple[str, int]]] | None:
        """The digest of a user's request, and each record of its answer: id and repeats; None: none within a day."""
        row = self._one(
            "SELECT digest, answer FROM requests WHERE user = ? AND key = ? AND at >= ?", (user, key, oldest_request())
        )
        return None if row is None else (row[0], [(id, repeats) for id, repeats in json.loads(row[1])])

    def put_request(self, user: int, key: str, digest: str, answer: Sequence[tuple[str, int]]) -> None:
        """Notes the answer to a request, and forgets those that were made more than a day ago."""
        self._run("DELETE FROM requests WHERE at < ?", (oldest_request(),))
        self._run("INSERT INTO requests VALUES (?, ?, ?, ?, ?)", (user, key, digest, json.dumps(answer), utc_now()))

    def texts(self) -> list[tuple[int, int, str]]:
        """(number, scope, text) of every record, in their order."""
        return self._all("SELECT seq, scope, text FROM records ORDER BY seq")

    def last_event(self) -> int:
        """The number of the log's last line."""
        return int(self._value("SELECT coalesce(max(n), 0) FROM events"))

    def _to_record(self, row: Any) -> Record:
        record = to_record(row)
        if checksum(encode_body(record)) != row[-2]:
            raise sqlite3.DatabaseError(f"database disk image is malformed: record {record.id} is not what was written")
        return record

    def history(self, id: str, user: str) -> list[Event]:
        """What happened to a record of a user, oldest first."""
        rows = self._all(
            "SELECT e.kind, e.id, e.at, e.version, e.body FROM events e JOIN scopes s ON s.id = e.scope"
            " JOIN users u ON u.id = s.user WHERE e.id = ? AND u.name = ? ORDER BY e.n",
            (id, user),
        )
        return [to_event(*row) for row in rows]

    def seqs_by_text(self, scope: int, sums: Collection[int]) -> list[int]:
        """The records of a scope whose texts have one of these checksums, in their order."""
        return self._column(
            "SELECT seq FROM records WHERE scope = ? AND text_sum IN (SELECT value FROM json_each(?)) ORDER BY seq",
            (scope, json.dumps(list(sums))),
        )

    def repeat(self, seq: int, at: str) -> None:
        """Counts one more time that a record was told, at a time, with a line in the log."""
        record = replace(self.records([seq])[seq], updated=at)
        self._run(
            "UPDATE records SET repeats = repeats + 1, updated = ?, sum = ? WHERE seq = ?",
            (at, checksum(encode_body(record)), seq),
        )
        scope = self._value("SELECT scope FROM records WHERE seq = ?", (seq,))
        self.log("repeat", scope, record.id, seq, record.version)

    def newest_versions(self, ids: Sequence[str]) -> dict[str, str]:
        """By id, for those of some records that were replaced, the id of the last of those that replaced them."""
        rows = self._all(
            "WITH RECURSIVE newer (replaces, id, seq) AS ("
            " SELECT replaces, id, seq FROM records WHERE replaces IN (SELECT value FROM json_each(?))"
            " UNION SELECT r.replaces, r.id, r.seq FROM newer n JOIN records r ON r.replaces = n.id"
            ") SELECT replaces, id FROM newer ORDER BY seq",
            (json.dumps(list(ids)),),
        )
        return follow(ids, dict(rows))

    def unlink(self, id: str) -> None:
        """Takes a record out of its versions: what replaced it replaces from then on what it had replaced."""
        older = "SELECT replaces FROM records WHERE id = ?1"
        self._run(f"UPDATE records SET replaces = ({older}) WHERE replaces = ?1", (id,))
        self._run("UPDATE records SET replaces = NULL WHERE id = ?", (id,))

    def remove(self, seqs: Sequence[int], kind: str) -> None:
        """Takes records out of everything but their scopes' counts, and their texts out of the log."""
        for seq in seqs:
            id, user, scope, text, version = self._one(
                "SELECT id, user, scope, text, version FROM records WHERE seq = ?", (seq,)
            )
            self.unlink(id)
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
            self._put_vectors([(seq, vector)], encoder)
        self._run(
            "UPDATE records SET text = ?, metadata = ?, updated = ?, version = ?, words = ?, sum = ?, text_sum = ?"
            " WHERE seq = ?",
            (
                record.text, to_json(record.metadata), record.updated, record.version, len(WORD.findall(record.text)),
                checksum(body), checksum(record.text), seq,
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
        self.remove(seqs, "delete")
        for table in ("states", "events"):
            self._run(f"DELETE FROM {table} WHERE scope = ?", (scope,))
        self._run("DELETE FROM scopes WHERE id = ?", (scope,))
        for table, column in (("requests", "user"), ("users", "id")):
            self._run(
                f"DELETE FROM {table} WHERE {column} = ?1 AND NOT EXISTS (SELECT 1 FROM scopes WHERE user = ?1)",
                (user,),
            )
        self.log("delete_all", scope)
        return len(seqs)

    def begin_erasing(self) -> None:
        """The last step of a transaction that erases: the index of words is rewritten without what was taken out."""
        self._run("INSERT INTO words (words) VALUES ('optimize')")
        self.set_meta("erasing", new_id())

    def finish_erasing(self) -> None:
        """After that transaction: empties the write-ahead log and drops files of the index that are not valid."""
        with self.lock, self._as_sentences():
            try:
                self._finish_erasing()
            except OSError as error:
                raise StoreError(f"{error.filename} cannot be deleted: {error.strerror}") from error

    def _finish_erasing(self) -> None:
        # Whoever dies between the two steps leaves the mark, and the next to open the store goes on.
        mark = self.get_meta("erasing")
        if mark is None:
            return
        with self._inside_transaction("BEGIN IMMEDIATE"):
            self._drop_strays()
        deadline = time.monotonic() + PATIENCE
        while self._value("PRAGMA wal_checkpoint(TRUNCATE)"):
            if time.monotonic() > deadline:
                return  # a reader holds the log; the mark stays
            time.sleep(0.05)
        if self._value("SELECT count(*) FROM building"):
            return  # in a file that another process may leave behind; the mark stays
        with self._inside_transaction("BEGIN IMMEDIATE"):
            if self.get_meta("erasing") == mark:  # not that of another who has not got so far yet
                self.set_meta("erasing", None)

    def compact(self) -> None:
        """Rewrites the file without the space of what was erased."""
        self.require_writable()
        with self.lock, self._as_sentences():
            self._run("VACUUM")
            self._run("PRAGMA wal_checkpoint(TRUNCATE)")

    def _drop_strays(self) -> None:
        """Deletes files of the index that are neither valid nor being built; called while nobody else can write."""
        if not self.index_folder.is_dir():
            return
        for file, pid in self._all("SELECT file, pid FROM building"):
            if not _is_running(pid):
                self._run("DELETE FROM building WHERE file = ?", (file,))
        known = self._column("SELECT file FROM segments UNION SELECT file FROM building")
        for path in self.index_folder.iterdir():
            if not any(file in path.name for file in known):  # a file is first written under a longer name
                path.unlink(missing_ok=True)

    def begin_building(self, file: str) -> None:
        """Notes that this process is making a file of the index, which nobody deletes meanwhile."""
        self._run("INSERT INTO building VALUES (?, ?)", (file, os.getpid()))

    def end_building(self, file: str, user: int, epoch: int, segment: Segment | None) -> bool:
        """Makes a file of the index valid, if it could be made.

        Unless something that it holds may have been erased meanwhile, or another file covers the same records.
        """
        known = self._run("DELETE FROM building WHERE file = ?", (file,)).rowcount
        if segment is None or not known or self.user_row(user).epoch != epoch:
            return False
        if any(segment.low <= other.high and other.low <= segment.high for other in self.segments(user)):
            return False
        self._run(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)",
            (file, user, segment.low, segment.high, segment.count, segment.sum),
        )
        return True

    def drop_segment(self, file: str) -> None:
        """Takes a file of the index that cannot be read out of use; its records are written to another one."""
        self._run("DELETE FROM segments WHERE file = ?", (file,))

    def segments(self, user: int) -> list[Segment]:
        """The valid files of the index for a user."""
        rows = self._all("SELECT file, low, high, count, sum FROM segments WHERE user = ? ORDER BY low", (user,))
        return [Segment(*row) for row in rows]

    def set_surprises(self, surprises: Iterable[tuple[int, float]]) -> None:
        """Sets the surprise of records, after the texts before them have changed."""
        self._connection.executemany(
            "UPDATE records SET surprise = ? WHERE seq = ?", [(value, seq) for seq, value in surprises]
        )

    def add_uses(self, uses: Mapping[int, int]) -> dict[int, int]:
        """Adds to how often records have been used; nothing is left for later."""
        self._connection.executemany(
            "UPDATE records SET uses = uses + ? WHERE seq = ?", [(more, seq) for seq, more in uses.items()]
        )
        return {}

    def weighed(self) -> list[tuple[int, float, int, str]]:
        """(number, surprise, uses and repeats, text) of every record, in their order."""
        return self._all("SELECT seq, surprise, uses + repeats, text FROM records ORDER BY seq")

    def lock_scopes(self, seqs: Iterable[int]) -> dict[ScopeRow, list[int]]:
        """The scopes of some records, each with its own; records that are not there are left out."""
        found: dict[ScopeRow, list[int]] = {}
        for seq in sorted(seqs):
            row = self._one(f"SELECT {SCOPE} JOIN records r ON r.scope = s.id WHERE r.seq = ?", (seq,))
            if row is not None:
                found.setdefault(ScopeRow(*row), []).append(seq)
        return found

    def replace_vectors(self, vectors: Iterable[tuple[int, np.ndarray]], encoder: str) -> None:
        """Other vectors for all records; the memory states and the index are dropped with the old ones."""
        self.log("reindex", 0)
        self._run("DELETE FROM states")
        self._run("DELETE FROM segments")
        self._run("UPDATE users SET epoch = epoch + 1")
        self._run("UPDATE scopes SET version = version + 1")
        self._put_vectors(vectors, encoder)

    def _put_vectors(self, vectors: Iterable[tuple[int, np.ndarray]], encoder: str) -> None:
        rows = ((seq, vector.astype("<f4").tobytes()) for seq, vector in vectors)
        self._connection.executemany(
            "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?, ?)",
            ((seq, encoder, checksum(data), data) for seq, data in rows),
        )

    def size(self) -> int:
        """Bytes of the file, its log and the files of the vector index."""
        files = [self.file, *self.file.parent.glob(self.file.name + "-*")]
        files += list(self.index_folder.glob("*")) if self.index_folder.is_dir() else []
        return sum(file.stat().st_size for file in files if file.is_file())

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
        with self.reading() if self.read_only else self.writing():
            return list(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from (verdict for verdict in self._column("PRAGMA quick_check") if verdict != "ok")
        for row in self._run(f"SELECT {ROW} ORDER BY r.seq"):
            if checksum(encode_body(to_record(row))) != row[-2]:
                yield f"record {row[0]} is not what was written"
        for seq, total, data in self._run("SELECT seq, sum, vector FROM vectors"):
            if checksum(data) != total:
                yield f"the vector of record number {seq} is not what was written"
        count = self.count()
        for table in ("records", "vectors"):
            found = self._value(f"SELECT count(*) FROM {table}")
            if found != count:
                yield f"{table} has {found} rows; expected {count}"
        if not self.read_only:
            try:
                self._run("INSERT INTO words (words) VALUES ('integrity-check')")
            except sqlite3.DatabaseError as error:
                yield f"the index of words: {sentence(error)}"


def _to_matrix(rows: Sequence[Any], width: int) -> np.ndarray:
    """The vectors (n, width) of rows that begin with a vector and its checksum."""
    for row in rows:
        whole = row is not None and isinstance(row[0], bytes) and len(row[0]) == 4 * width
        if not whole or zlib.crc32(row[0]) != row[1]:
            raise sqlite3.DatabaseError("database disk image is malformed: a vector is not what was written")
    data = bytearray().join(row[0] for row in rows)  # not bytes, which torch cannot write to
    return np.frombuffer(data, dtype=np.float32).reshape(len(rows), width)


def to_record(row: Sequence[Any]) -> Record:
    """The record of a row of the tables."""
    return Record(
        id=row[0], text=row[1], user=row[2], agent=row[3] or None, session=row[4] or None, role=row[5],
        metadata=json.loads(row[6]), created=row[7], updated=row[8], surprise=row[9], version=row[10], uses=row[11],
        repeats=row[12], replaces=row[13],
    )  # fmt: skip


def _marked(user: int, text: str) -> str:
    """The words of a text, each marked with its user."""
    return " ".join(mark_word(user, word) for word in WORD.findall(text))


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # where os.kill would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _test(comparison: str, value: Any) -> str:
    """SQL that compares a value of the metadata; values of another type are unequal, and true is not 1."""
    types = "'true','false'" if isinstance(value, bool) else "'text'" if isinstance(value, str) else "'integer','real'"
    joined = f"j.type NOT IN ({types}) OR" if comparison == "ne" else f"j.type IN ({types}) AND"
    return f"({joined} j.value {OPERATORS[comparison]} ?)"
