"""A store on a PostgreSQL server with pgvector, for memories that outgrow one machine.

Texts, vectors, words, memory states and the log are tables of one schema, and every write is one transaction over all
of them. Writers lock the scopes that they write to, and nothing else: many of them, on many machines, write to
different scopes at the same time.

What is erased is gone from the tables when the transaction ends. The server's files still have its bytes until
PostgreSQL uses their space again: in the tables and indexes, which :meth:`PostgresStore.compact` rewrites without
them, and in the write-ahead log, whose files are used again after some checkpoints. Backups, archives of that log and
replicas are the administrator's.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from titans.text.records import MAX_NUMBER, DamagedStore, Event, Record, Scope, StoreError, utc_now

try:
    import psycopg  # noqa: F401
except ImportError:
    raise StoreError("a store on a PostgreSQL server needs psycopg: pip install titan-memory[postgres]") from None

from titans.text.postgres_connection import Numbers, load_vectors
from titans.text.postgres_schema import TABLES, lock_key, quote
from titans.text.postgres_search import Finder, of_scopes, passing
from titans.text.sqlite import to_record
from titans.text.store import (
    PART,
    WORD,
    ScopeRow,
    Selection,
    State,
    Store,
    Tests,
    checksum,
    encode_body,
    follow,
    oldest_request,
    to_event,
    to_json,
)

ROW = (
    "r.id, r.text, u.name, s.agent, s.session, r.role, r.metadata::text, r.created, r.updated, r.surprise, r.version,"
    " r.uses, r.repeats, r.replaces, r.sum, r.seq"
    " FROM records r JOIN scopes s ON s.id = r.scope JOIN users u ON u.id = r.user_id"
)
SCOPE = "s.id, s.user_id, s.count, s.version FROM scopes s"
IN_ORDER = "ORDER BY u.name, s.agent, s.session"  # in which scopes are locked, so that nobody waits in a circle


class PostgresStore(Finder, Store):
    """A store in a schema of a PostgreSQL database.

    Args:
        url: ``postgresql://USER:PASSWORD@HOST/DATABASE``, as libpq understands it; ``schema=NAME`` among its
            parameters says where the tables are ("titans" by default).
        read_only: nothing is written, and the store must exist.
    """

    # The store as a whole

    def set_meta(self, key: str, value: str | None) -> None:
        """Sets a fact about the store; None removes it."""
        facts = self._current.facts
        facts.pop(key, None)
        if value is None:
            self._run("DELETE FROM meta WHERE key = %s", (key,))
        else:
            facts[key] = value
            self._run(
                "INSERT INTO meta VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
            )

    def count(self) -> int:
        """The number of records in the store."""
        return int(self._value("SELECT coalesce(sum(count), 0)::bigint FROM scopes"))

    def last_event(self) -> int:
        """A checksum over all records, since lines of the log are not committed in the order of their numbers."""
        return int(
            self._value(
                "SELECT coalesce(sum(hashtextextended(seq || ' ' || version || ' ' || text_sum, 0)), 0) FROM records"
            )
        )

    def size(self) -> int:
        """Bytes of the tables and their indexes."""
        with self.reading():
            tables = "unnest(%s::text[]) t(name)"
            return int(
                self._value(f"SELECT sum(pg_total_relation_size(t.name::regclass))::bigint FROM {tables}", [[*TABLES]])
            )

    def stats(self, user: str | None) -> dict[str, Any]:
        """Figures of the store, or of one user in it."""
        of_user = "WHERE u.name = %(user)s" if user is not None else ""
        row = self._one(
            "SELECT count(*), coalesce(sum(octet_length(r.text)), 0)::bigint, coalesce(avg(r.surprise), 0),"
            f" min(r.created), max(r.created) FROM records r JOIN users u ON u.id = r.user_id {of_user}",
            {"user": user},
        )
        figures = dict(zip(("records", "text_bytes", "mean_surprise", "oldest", "newest"), row, strict=True))
        figures["scopes"] = len(self.list_scopes(user))
        figures["states"] = self._value(
            f"SELECT count(*) FROM states t JOIN scopes s ON s.id = t.scope JOIN users u ON u.id = s.user_id {of_user}",
            {"user": user},
        )
        if user is None:
            figures["users"] = self._value("SELECT count(DISTINCT user_id) FROM scopes WHERE count > 0")
            figures["events"] = self._value("SELECT count(*) FROM events")
            figures["index_segments"] = len(self._index_names())
        return figures

    def check(self) -> list[str]:
        """What is wrong with the records, their vectors and their words, one sentence each; none if all is well."""
        with self.reading():
            return list(self._problems())

    def _problems(self) -> Iterator[str]:
        for row in self._scan(f"SELECT {ROW} ORDER BY r.seq"):
            if checksum(encode_body(to_record(row))) != row[-2]:
                yield f"record {row[0]} is not what was written"
        for seq, total, data in self._scan("SELECT seq, sum, vector FROM vectors"):
            if checksum(load_vectors([data])[0].tobytes()) != total:
                yield f"the vector of record number {seq} is not what was written"
        for scope, counted, found in self._all(
            "SELECT s.id, s.count, count(r.seq) FROM scopes s LEFT JOIN records r ON r.scope = s.id"
            " GROUP BY s.id HAVING s.count <> count(r.seq) OR s.words <> coalesce(sum(r.words), 0)"
        ):
            yield f"scope number {scope} has {found} records, or another number of words; expected {counted}"
        for table in ("vectors", "words"):
            stray = self._value(
                f"SELECT count(*) FROM {table} t WHERE NOT EXISTS"
                " (SELECT 1 FROM records r WHERE r.seq = t.seq AND r.scope = t.scope AND r.user_id = t.user_id)"
            )
            if stray:
                yield f"{table} has {stray} rows of records that are not there"
        missing = self._value("SELECT count(*) FROM records r WHERE NOT EXISTS (SELECT FROM vectors WHERE seq = r.seq)")
        if missing:
            yield f"{missing} records have no vector"

    def _scan(self, sql: str) -> Iterator[Any]:
        """The rows of a statement, a few at a time."""
        with self._current.connection.cursor(name="scan", binary=True) as cursor:
            cursor.itersize = PART
            cursor.execute(sql)
            yield from cursor

    # Scopes

    def _user_id(self, name: str) -> int | None:
        found: int | None = self._value("SELECT id FROM users WHERE name = %s", (name,))
        return found

    def find_scope(self, scope: Scope) -> ScopeRow | None:
        """The exact scope, if it has been written to."""
        return self._find_scope(scope, "")

    def _find_scope(self, scope: Scope, lock: str) -> ScopeRow | None:
        row = self._one(
            f"SELECT {SCOPE} JOIN users u ON u.id = s.user_id"
            f" WHERE u.name = %s AND s.agent = %s AND s.session = %s {lock}",
            scope.names,
        )
        return None if row is None else ScopeRow(*row)

    def make_scope(self, scope: Scope) -> ScopeRow:
        """The exact scope, new if need be; nobody else writes to it until the transaction ends.

        Several are made in the order of their names.
        """
        while True:
            found = self._find_scope(scope, "FOR UPDATE OF s")
            if found is not None:
                return found
            # So that nobody removes the user before the scope is there.
            user = self._value("SELECT id FROM users WHERE name = %s FOR KEY SHARE", (scope.user,))
            if user is None:
                self._run("INSERT INTO users (name) VALUES (%s) ON CONFLICT DO NOTHING", (scope.user,))
            else:
                self._run(
                    "INSERT INTO scopes (user_id, agent, session) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
                    (user, *scope.names[1:]),
                )

    def lock_scopes(self, seqs: Iterable[int]) -> dict[ScopeRow, list[int]]:
        """The scopes of some records, each with its own; records that are not there are left out."""
        numbers = sorted(map(int, seqs))
        rows = self._all(
            f"SELECT {SCOPE} JOIN users u ON u.id = s.user_id"
            f" WHERE s.id IN (SELECT scope FROM records WHERE seq = ANY(%s)) {IN_ORDER}"
            + (" FOR UPDATE OF s" if self._current.writing else ""),
            (numbers,),
        )
        # Only now: whoever held the lock may have removed some.
        members: dict[int, list[int]] = {}
        for seq, scope in self._all("SELECT seq, scope FROM records WHERE seq = ANY(%s) ORDER BY seq", (numbers,)):
            members.setdefault(scope, []).append(seq)
        return {ScopeRow(*row): members[row[0]] for row in rows if row[0] in members}

    def advance_scope(self, scope: int, more: int) -> None:
        """Moves a scope's version, and its count by ``more``."""
        self._run("UPDATE scopes SET count = count + %s, version = version + 1 WHERE id = %s", (more, scope))

    def remove_scope(self, scope: int) -> int:
        """Takes a scope with all its records, history and name out of the store; returns how many records it had."""
        user = self._value("SELECT user_id FROM scopes WHERE id = %s", (scope,))
        removed = self._run("DELETE FROM records WHERE scope = %s", (scope,)).rowcount
        for table in ("vectors", "words"):
            self._run(f"DELETE FROM {table} WHERE user_id = %s AND scope = %s", (user, scope))
        for table in ("states", "events"):
            self._run(f"DELETE FROM {table} WHERE scope = %s", (scope,))
        self._run("DELETE FROM scopes WHERE id = %s", (scope,))
        self._remove_user("id", user)
        self._log([("delete_all", scope, None, None, None, None)])
        return int(removed)

    def _remove_user(self, column: str, value: Any) -> None:
        """Removes a user without scopes, unless somebody is making one, who has locked the row."""
        gone = self._column(
            f"DELETE FROM users WHERE id IN (SELECT u.id FROM users u WHERE u.{column} = %s"
            " AND NOT EXISTS (SELECT 1 FROM scopes WHERE user_id = u.id) FOR UPDATE SKIP LOCKED) RETURNING id",
            (value,),
        )
        self._run("DELETE FROM requests WHERE user_id = ANY(%s)", (gone,))

    def list_scopes(self, user: str | None) -> list[tuple[Scope, int]]:
        """Every scope that has records, or those of a user, and how many records each has."""
        rows = self._all(
            "SELECT u.name, s.agent, s.session, s.count FROM scopes s JOIN users u ON u.id = s.user_id"
            " WHERE s.count > 0 AND (%(user)s::text IS NULL OR u.name = %(user)s) ORDER BY s.id",
            {"user": user},
        )
        return [(Scope(name, agent or None, session or None), count) for name, agent, session, count in rows]

    def matching_scopes(self, scope: Scope, below: bool) -> list[int]:
        """The numbers of the exact scope, or of all scopes ``below`` the names given; of those without records too."""
        if not self._current.writing:
            return [row[0] for row in self._matching_scopes(scope, below, "")]
        found = [row[0] for row in self._matching_scopes(scope, below, "FOR UPDATE OF s")]
        if not found:  # somebody who was making a scope while the last one was removed may have failed
            self._remove_user("name", scope.user)
        return found

    def _matching_scopes(self, scope: Scope, below: bool, lock: str) -> list[tuple[int, int, int, int]]:
        """(number, user, count, words) of scopes."""
        names = {"agent": scope.agent, "session": scope.session}
        if not below:
            names = {key: name or "" for key, name in names.items()}
        return self._all(
            "SELECT s.id, s.user_id, s.count, s.words FROM scopes s JOIN users u ON u.id = s.user_id"
            " WHERE u.name = %(user)s AND (%(agent)s::text IS NULL OR s.agent = %(agent)s)"
            f" AND (%(session)s::text IS NULL OR s.session = %(session)s) {IN_ORDER} {lock}",
            {"user": scope.user, **names},
        )

    def select(self, scope: Scope, tests: Tests, exact: bool = False) -> Selection | None:
        """The records of a user that match the names given and pass the tests; None if the names match none."""
        found = [row for row in self._matching_scopes(scope, not exact, "") if row[2]]
        if not found:
            return None
        everything = not exact and scope.agent is None and scope.session is None
        scopes, users, counts, words = zip(*found, strict=True)
        selection = Selection(users[0], None if everything else scopes, tests)
        self._once((selection.user, selection.scopes), lambda: (sum(counts), sum(words)))
        return selection

    def rows_of(self, selection: Selection, most: int) -> list[ScopeRow]:
        """The scopes with records that a selection covers, those written to last first, at most so many."""
        where, values = of_scopes(selection, "s.user_id", "s.id")
        rows = self._all(
            f"SELECT {SCOPE} WHERE {where} AND s.count > 0"
            " ORDER BY (SELECT max(seq) FROM records r WHERE r.scope = s.id) DESC LIMIT %(most)s",
            {**values, "most": most},
        )
        return [ScopeRow(*row) for row in rows]

    # Records

    def insert(
        self, records: Sequence[Record], scopes: Mapping[Scope, ScopeRow], vectors: np.ndarray, encoder: str
    ) -> list[int]:
        """Adds records with their vectors, words and lines of the log, in their order; returns their numbers."""
        if not records:
            return []
        seqs = self._column("SELECT nextval('numbers') FROM generate_series(1, %s)", (len(records),))
        rows, words = [], []
        lengths: Counter[int] = Counter()
        events: list[tuple[Any, ...]] = []
        for seq, record, found in zip(
            seqs, records, self._find_stems([record.text for record in records]), strict=True
        ):
            scope, body, length = scopes[record.scope], encode_body(record), len(WORD.findall(record.text))
            rows.append(
                (
                    seq, record.id, scope.user, scope.id, record.role, record.text, to_json(record.metadata),
                    record.created, record.updated, record.version, length, checksum(body), checksum(record.text),
                    record.surprise, record.uses, record.repeats, record.replaces,
                )
            )  # fmt: skip
            words += [(scope.user, stem, seq, scope.id, times, length) for stem, times in found.items()]
            lengths[scope.id] += length
            events.append(("add", scope.id, record.id, seq, record.version, body))
        self._copy(
            "records (seq, id, user_id, scope, role, text, metadata, created, updated, version, words, sum, text_sum,"
            " surprise, uses, repeats, replaces)",
            "int8 text int4 int4 text text text text text int8 int4 int8 int8 float8 int8 int8 text",
            rows,
        )
        self._copy(
            "vectors (seq, user_id, scope, encoder, sum, vector)", "int8 int4 int4 text int8 vector",
            (
                (seq, row[2], row[3], encoder, checksum(_to_bytes(vector)), vector)
                for seq, row, vector in zip(seqs, rows, vectors, strict=True)
            ),
        )  # fmt: skip
        self._copy_words(words)
        self._log(events)
        self._add_lengths(lengths)
        return seqs

    def _copy(self, target: str, types: str, rows: Iterable[Sequence[Any]]) -> None:
        """Adds rows to a table."""
        with (
            self._current.connection.cursor() as cursor,
            cursor.copy(f"COPY {target} FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(types.split())
            for row in rows:
                copy.write_row(row)

    def _copy_words(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self._copy("words (user_id, stem, seq, scope, times, length)", "int4 text int8 int4 int4 int4", rows)

    def _add_lengths(self, lengths: Mapping[int, int]) -> None:
        """Moves the number of words of scopes."""
        for scope, more in lengths.items():
            self._run("UPDATE scopes SET words = words + %s WHERE id = %s", (more, scope))

    def _log(self, lines: Iterable[tuple[str, int, str | None, int | None, int | None, str | None]]) -> None:
        """Adds (kind, scope, id, number, version, body) to the log."""
        at = utc_now()
        self._copy(
            "events (at, kind, scope, id, seq, version, body, sum)", "text text int4 text int8 int8 text int8",
            ((at, *line, None if line[-1] is None else checksum(line[-1])) for line in lines),
        )  # fmt: skip

    def find(self, id: str, user: str | None) -> tuple[int, Record] | None:
        """A record of a user (None: of any) by its id, and its sequence number."""
        row = self._one(
            f"SELECT {ROW} WHERE r.id = %(id)s AND (%(user)s::text IS NULL OR u.name = %(user)s)",
            {"id": id, "user": user},
        )
        return None if row is None else (row[-1], self._to_record(row))

    def _to_record(self, row: Any) -> Record:
        record = to_record(row)
        if checksum(encode_body(record)) != row[-2]:
            raise self._damaged(f"record {record.id} is not what was written")
        return record

    def _damaged(self, what: str) -> DamagedStore:
        return DamagedStore(f"{self.name} is damaged: {what}; restore it from a backup")

    def records(self, seqs: Iterable[int]) -> dict[int, Record]:
        """Records by their sequence numbers, in that order; those that are not there are left out."""
        numbers = [int(seq) for seq in seqs]
        if not numbers:
            return {}
        rows = {row[-1]: row for row in self._all(f"SELECT {ROW} WHERE r.seq = ANY(%s)", (Numbers(numbers),))}
        return {seq: self._to_record(rows[seq]) for seq in numbers if seq in rows}

    def newest(self, selection: Selection, many: int, before: int = MAX_NUMBER) -> dict[int, Record]:
        """The newest records of a selection by their numbers, which are below ``before``, newest first."""
        where, values = of_scopes(selection, "r.user_id", "r.scope")
        where += passing(selection.tests, values)
        rows = self._all(
            f"SELECT {ROW} WHERE {where} AND r.seq < %(before)s ORDER BY r.seq DESC LIMIT %(many)s",
            {**values, "before": before, "many": many},
        )
        return {row[-1]: self._to_record(row) for row in rows}

    def records_after(self, seq: int, user: str | None, many: int) -> dict[int, Record]:
        """The first records with higher numbers than ``seq``, of all or of a user, in their order."""
        of_user = "" if user is None else "AND r.user_id = (SELECT id FROM users WHERE name = %(user)s)"
        rows = self._all(
            f"SELECT {ROW} WHERE r.seq > %(seq)s {of_user} ORDER BY r.seq LIMIT %(many)s",
            {"seq": seq, "user": user, "many": many},
        )
        return {row[-1]: self._to_record(row) for row in rows}

    # Requests

    def find_request(self, user: int, key: str) -> tuple[str, list[tuple[str, int]]] | None:
        """The digest of a user's request, and each record of its answer: id and repeats; None: none within a day."""
        # Two of the same key may go to different scopes, whose locks do not keep them apart.
        self._run("SELECT pg_advisory_xact_lock(%s)", (lock_key(f"request {user} {key}", self.schema),))
        row = self._one(
            "SELECT digest, answer FROM requests WHERE user_id = %s AND key = %s AND at >= %s",
            (user, key, oldest_request()),
        )
        return None if row is None else (row[0], [(id, repeats) for id, repeats in json.loads(row[1])])

    def put_request(self, user: int, key: str, digest: str, answer: Sequence[tuple[str, int]]) -> None:
        """Notes the answer to a request, and forgets those that were made more than a day ago."""
        self._run(
            "DELETE FROM requests WHERE (user_id, key) IN"
            " (SELECT user_id, key FROM requests WHERE at < %s FOR UPDATE SKIP LOCKED)",
            (oldest_request(),),
        )
        self._run("INSERT INTO requests VALUES (%s, %s, %s, %s, %s)", (user, key, digest, to_json(answer), utc_now()))

    def texts(self) -> list[tuple[int, int, str]]:
        """(number, scope, text) of every record, in their order."""
        return self._all("SELECT seq, scope, text FROM records ORDER BY seq")

    def remove(self, seqs: Sequence[int], kind: str) -> None:
        """Takes records out of everything but their scopes' counts, and their texts out of the log."""
        rows = self._all(
            "SELECT seq, id, user_id, scope, text, version, replaces, words FROM records WHERE seq = ANY(%s)"
            " ORDER BY seq",
            ([int(seq) for seq in seqs],),
        )
        if not rows:
            return
        numbers, ids = [row[0] for row in rows], [row[1] for row in rows]
        self._remove_words((seq, user, text) for seq, _, user, _, text, *_ in rows)
        for table in ("records", "vectors"):
            self._run(f"DELETE FROM {table} WHERE seq = ANY(%s)", (numbers,))
        older = {id: replaces for _, id, *_, replaces, _ in rows}
        for id in ids:
            while older[id] in older:
                older[id] = older[older[id]]
        self._run(
            "UPDATE records r SET replaces = n.older FROM unnest(%s::text[], %s::text[]) n(id, older)"
            " WHERE r.replaces = n.id",
            (ids, [older[id] for id in ids]),
        )
        self._forget_log(ids)
        self._log((kind, scope, id, seq, version, None) for seq, id, _, scope, _, version, *_ in rows)
        lengths: Counter[int] = Counter()
        for _, _, _, scope, *_, words in rows:
            lengths[scope] -= words
        self._add_lengths(lengths)

    def _remove_words(self, rows: Iterable[tuple[int, int, str]]) -> None:
        """Takes (number, user, text) of records out of the index of words."""
        texts = list(rows)
        found = self._find_stems([text for _, _, text in texts])
        gone = [(user, stem, seq) for (seq, user, _), stems in zip(texts, found, strict=True) for stem in stems]
        self._run(
            "DELETE FROM words w USING unnest(%s::int4[], %s::text[], %s::int8[]) d(user_id, stem, seq)"
            " WHERE w.user_id = d.user_id AND w.stem = d.stem AND w.seq = d.seq",
            tuple([each[place] for each in gone] for place in range(3)),
        )

    def _forget_log(self, ids: Sequence[str]) -> None:
        """Takes records' texts and metadata out of the log; that something happened stays."""
        self._run("UPDATE events SET body = NULL, sum = NULL WHERE id = ANY(%s)", (list(ids),))

    def change(self, seq: int, record: Record, vector: np.ndarray | None, encoder: str, keep_old: bool) -> None:
        """Puts another text, with its vector, or other metadata in a record's place."""
        user, scope, text, words = self._one("SELECT user_id, scope, text, words FROM records WHERE seq = %s", (seq,))
        body, length = encode_body(record), len(WORD.findall(record.text))
        if vector is not None:
            self._remove_words([(seq, user, text)])
            self._copy_words(
                [(user, stem, seq, scope, times, length) for stem, times in self._find_stems([record.text])[0].items()]
            )
            self._add_lengths({scope: length - words})
            self._run(
                "UPDATE vectors SET encoder = %s, sum = %s, vector = %s WHERE seq = %s",
                (encoder, checksum(_to_bytes(vector)), vector, seq),
            )
        self._run(
            "UPDATE records SET text = %s, metadata = %s, updated = %s, version = %s, words = %s, sum = %s,"
            " text_sum = %s WHERE seq = %s",
            (
                record.text, to_json(record.metadata), record.updated, record.version, length, checksum(body),
                checksum(record.text), seq,
            ),
        )  # fmt: skip
        if not keep_old:
            self._forget_log([record.id])
        self._log([("update", scope, record.id, seq, record.version, body)])

    def history(self, id: str, user: str) -> list[Event]:
        """What happened to a record of a user, oldest first."""
        rows = self._all(
            "SELECT e.kind, e.id, e.at, e.version, e.body FROM events e JOIN scopes s ON s.id = e.scope"
            " JOIN users u ON u.id = s.user_id WHERE e.id = %s AND u.name = %s ORDER BY e.n",
            (id, user),
        )
        return [to_event(*row) for row in rows]

    def set_surprises(self, surprises: Iterable[tuple[int, float]]) -> None:
        """Sets the surprise of records, after the texts before them have changed."""
        values = list(surprises)
        self._run(
            "UPDATE records r SET surprise = n.surprise FROM unnest(%s::int8[], %s::float8[]) n(seq, surprise)"
            " WHERE r.seq = n.seq",
            ([seq for seq, _ in values], [value for _, value in values]),
        )

    def add_uses(self, uses: Mapping[int, int]) -> dict[int, int]:
        """Adds to how often records have been used; returns those that others are writing to: try again later.

        It does not wait for these others: they may be waiting for this transaction.
        """
        if not uses:
            return {}
        added = self._column(
            "WITH free AS (SELECT seq FROM records WHERE seq = ANY(%(seqs)s) FOR NO KEY UPDATE SKIP LOCKED)"
            " UPDATE records r SET uses = r.uses + n.more FROM free f"
            " JOIN unnest(%(seqs)s::int8[], %(more)s::int8[]) n(seq, more) ON n.seq = f.seq WHERE r.seq = f.seq"
            " RETURNING r.seq",
            {"seqs": list(uses), "more": list(uses.values())},
        )
        rest = list(set(uses) - set(added))
        there = self._column("SELECT seq FROM records WHERE seq = ANY(%s)", (rest,)) if rest else []
        return {seq: uses[seq] for seq in there}

    # Repeats and versions

    def seqs_by_text(self, scope: int, sums: Collection[int]) -> list[int]:
        """The records of a scope whose texts have one of these checksums, in their order."""
        return self._column(
            "SELECT seq FROM records WHERE scope = %s AND text_sum = ANY(%s) ORDER BY seq", (scope, list(sums))
        )

    def repeat(self, seq: int, at: str) -> None:
        """Counts one more time that a record was told, at a time, with a line in the log."""
        record = replace(self.records([seq])[seq], updated=at)
        scope = self._value(
            "UPDATE records SET repeats = repeats + 1, updated = %s, sum = %s WHERE seq = %s RETURNING scope",
            (at, checksum(encode_body(record)), seq),
        )
        self._log([("repeat", scope, record.id, seq, record.version, None)])

    def newest_versions(self, ids: Sequence[str]) -> dict[str, str]:
        """By id, for those of some records that were replaced, the id of the last of those that replaced them."""
        rows = self._all(
            "WITH RECURSIVE newer (replaces, id, seq) AS ("
            " SELECT replaces, id, seq FROM records WHERE replaces = ANY(%s)"
            " UNION SELECT r.replaces, r.id, r.seq FROM newer n JOIN records r ON r.replaces = n.id"
            ") SELECT replaces, id FROM newer ORDER BY seq",
            (list(ids),),
        )
        return follow(ids, dict(rows))

    def unlink(self, id: str) -> None:
        """Takes a record out of its versions: what replaced it replaces from then on what it had replaced."""
        older = "SELECT replaces FROM records WHERE id = %(id)s"
        self._run(f"UPDATE records SET replaces = ({older}) WHERE replaces = %(id)s", {"id": id})
        self._run("UPDATE records SET replaces = NULL WHERE id = %s", (id,))

    # Memory states

    def put_states(self, scope: int, states: Sequence[State]) -> None:
        """Keeps states of a scope's memory."""
        for state in states:
            self._run(
                "INSERT INTO states VALUES (%s, %s, %s, %s)"
                " ON CONFLICT (scope, count) DO UPDATE SET sum = excluded.sum, state = excluded.state",
                (scope, state.count, checksum(state.data), state.data),
            )

    def drop_states(self, scope: int, above: int) -> None:
        """Forgets a scope's memory states after more than so many texts."""
        self._run("DELETE FROM states WHERE scope = %s AND count > %s", (scope, above))

    def find_state(self, scope: int, most: int) -> bytes | None:
        """The latest memory state of a scope after at most so many texts; a damaged one is passed over."""
        while True:
            row = self._one(
                "SELECT count, sum, state FROM states WHERE scope = %s AND count <= %s ORDER BY count DESC LIMIT 1",
                (scope, most),
            )
            if row is None:
                return None
            if checksum(row[2]) == row[1]:
                return bytes(row[2])
            most = row[0] - 1

    def scope_seqs(self, scope: int, start: int = 0) -> list[int]:
        """The records of a scope in their order, from the one at ``start``."""
        return self._column("SELECT seq FROM records WHERE scope = %s ORDER BY seq OFFSET %s", (scope, start))

    # Vectors

    def vectors(self, seqs: Sequence[int], width: int) -> np.ndarray:
        """The vectors (n, width) of records, in the order asked for."""
        numbers = [int(seq) for seq in seqs]
        rows = self._all("SELECT seq, sum, vector FROM vectors WHERE seq = ANY(%s)", (Numbers(numbers),))
        places = {row[0]: place for place, row in enumerate(rows)}
        missing = next((seq for seq in numbers if seq not in places), None)
        if missing is not None:
            raise self._damaged(f"record number {missing} has no vector")
        if not rows:
            return np.empty((0, width), dtype=np.float32)
        if any(len(data) != 4 * (width + 1) for _, _, data in rows):
            raise self._damaged(f"a vector has another width than {width}")
        matrix = load_vectors([data for _, _, data in rows])
        for (seq, total, _), vector in zip(rows, matrix, strict=True):
            if zlib.crc32(vector) != total:
                raise self._damaged(f"the vector of record number {seq} is not what was written")
        return matrix[[places[seq] for seq in numbers]]

    def products(self, seqs: Sequence[int], vectors: np.ndarray) -> np.ndarray:
        """(n, m): the products of records' vectors with some vectors (m, width), which the server computes."""
        values = {f"vector{number}": vector for number, vector in enumerate(vectors)}
        columns = ", ".join(f"-(vector <#> %({name})s)" for name in values)
        numbers = [int(seq) for seq in seqs]
        rows = self._all(
            f"SELECT seq, {columns} FROM vectors WHERE seq = ANY(%(seqs)s)", {**values, "seqs": Numbers(numbers)}
        )
        found = {row[0]: row[1:] for row in rows}
        if len(found) < len(set(numbers)):
            raise self._damaged(f"{len(set(numbers)) - len(found)} records have no vector")
        return np.array([found[seq] for seq in numbers], dtype=np.float32).reshape(len(numbers), len(vectors))

    def replace_vectors(self, vectors: Iterable[tuple[int, np.ndarray]], encoder: str) -> None:
        """Other vectors for all records; the memory states and the vector index are dropped with the old ones.

        The indexes of large users are those of an encoder: rows with another one are in none, and after
        :meth:`finish_erasing` the old ones are gone.
        """
        self._log([("reindex", 0, None, None, None, None)])
        self._run("DELETE FROM states")
        self._run("UPDATE scopes SET version = version + 1")
        self._run("CREATE TEMPORARY TABLE new_vectors (seq int8, sum int8, vector vector) ON COMMIT DROP")
        self._copy(
            "new_vectors (seq, sum, vector)", "int8 int8 vector",
            ((seq, checksum(_to_bytes(vector)), vector) for seq, vector in vectors),
        )  # fmt: skip
        self._run(
            "UPDATE vectors v SET encoder = %(encoder)s, sum = n.sum, vector = n.vector FROM new_vectors n"
            " WHERE v.seq = n.seq AND (v.encoder <> %(encoder)s OR v.sum <> n.sum)",
            {"encoder": encoder},
        )

    # Erasing

    def weighed(self) -> list[tuple[int, float, int, str]]:
        """(number, surprise, uses and repeats, text) of every record, in their order."""
        return self._all("SELECT seq, surprise, uses + repeats, text FROM records ORDER BY seq")

    def begin_erasing(self) -> None:
        """Nothing more: what is erased goes with the transaction."""

    def finish_erasing(self) -> None:
        """Drops the vector indexes of users who are gone, and of an encoder that was replaced."""
        self._drop_indexes()

    def compact(self) -> None:
        """Rewrites all tables and indexes without the space of what was erased; everybody else waits meanwhile.

        After that the server's files hold nothing of it but the write-ahead log, whose files are used again after some
        checkpoints.
        """
        self.require_writable()
        with self._outside() as connection:
            for table in TABLES:
                connection.execute(f"VACUUM (FULL, ANALYZE) {table}")


def drop_store(url: str) -> None:
    """Drops a store with its schema, if there is one."""
    store = PostgresStore(url)
    with store._outside() as connection:
        connection.execute(f"DROP SCHEMA {quote(connection, store.schema)} CASCADE")
    store.close()


def _to_bytes(vector: np.ndarray) -> bytes:
    return vector.astype("<f4").tobytes()
