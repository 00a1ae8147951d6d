"""Search in PostgreSQL: nearest vectors by comparison or by HNSW, words by BM25, and tests of metadata."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
from psycopg import sql as compose

from titans.bm25 import bm25
from titans.text.index import nearest_exact
from titans.text.postgres_connection import CANDIDATES, Numbers, Server, load_vectors
from titans.text.postgres_schema import lock_key
from titans.text.ranking import MOST_POSTINGS, rarest
from titans.text.store import OPERATORS, WORD, Matches, Selection, Stemmer, Tests, checksum

EXACT = 5_000  # records that are compared one by one; users with more get an index
WIDEST = 2_000  # numbers of a vector that HNSW can index
MOST_CANDIDATES = 1_000  # that HNSW can follow
WIDER = 2  # factor by which more is asked of the index when not all that it finds is selected
FETCHED = 20_000  # vectors that are fetched to compare many with them at once
TOGETHER = 4  # vectors from which on that is quicker
STEMS_KEPT = 100_000
REST = 600.0  # seconds after an index could not be built until it is tried again
INDEX = r"^vectors_\d+_[0-9a-f]{8}$"  # names of the indexes: the user and a checksum of the encoder


@dataclass(frozen=True)
class Rows:
    """Some rows of ``vectors``: their condition, its values, and how many there are."""

    where: str
    values: Mapping[str, Any]
    count: int


@dataclass(frozen=True)
class Index:
    """The vector index of a large user: what is indexed, the condition of its rows, and how many there are."""

    expression: str
    where: str
    count: int


class Finder(Server):
    """Finds records; what it needs to know of them is in their tables."""

    def __init__(self, url: str, read_only: bool = False) -> None:
        super().__init__(url, read_only)
        self._rest_until = 0.0

    def _begin_process(self) -> None:
        super()._begin_process()
        self._stemmer = Stemmer()
        self._stems: dict[str, str] = {}
        self._indexes: set[str] = set()  # of which it is known that they can be used

    def get_meta(self, key: str) -> str | None:
        """A fact about the store itself."""
        return self._current.facts.get(key)

    # Vectors

    def nearest(self, selection: Selection, vectors: np.ndarray, many: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each vector of (n, width), the numbers of the nearest records and their cosines, best first.

        Up to ``EXACT`` records are compared one by one, and more if there is no index, or it finds too few of them.
        """
        rows = self._select_vectors(selection)
        if not rows.count:
            return [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))] * len(vectors)
        index = self._find_index(selection.user, vectors.shape[1]) if rows.count > EXACT else None
        if index is not None:
            asked = many if rows.count == index.count else math.ceil(WIDER * many * index.count / rows.count)
            if asked <= MOST_CANDIDATES:
                return self._ask_all(index, asked, rows, vectors, many)
        if len(vectors) > TOGETHER and rows.count <= FETCHED:
            return self._compare_here(rows, vectors, many)
        return [self._compare(rows, vector, many) for vector in vectors]

    def _select_vectors(self, selection: Selection) -> Rows:
        if selection.tests:
            seqs = self._matching(selection)[0]
            return Rows("seq = ANY(%(seqs)s)", {"seqs": Numbers(seqs)}, len(seqs))
        return Rows(*of_scopes(selection, "user_id", "scope"), self._totals(selection)[0])

    def _compare(self, rows: Rows, vector: np.ndarray, many: int) -> tuple[np.ndarray, np.ndarray]:
        """The nearest of some records, which the server compares one by one."""
        found = self._all(
            f"SELECT seq, -(vector <#> %(vector)s) FROM vectors WHERE {rows.where}"
            " ORDER BY vector <#> %(vector)s, seq DESC LIMIT %(many)s",
            {**rows.values, "vector": vector, "many": many},
        )
        return _to_arrays(found)

    def _compare_here(self, rows: Rows, vectors: np.ndarray, many: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same for many vectors, which are compared in this process."""
        found = self._all(f"SELECT seq, vector FROM vectors WHERE {rows.where} ORDER BY seq", rows.values)
        seqs = np.array([row[0] for row in found], dtype=np.int64)
        matrix = load_vectors([row[1] for row in found])
        best = [nearest_exact(matrix, vector, many) for vector in vectors]
        return [(seqs[places], cosines) for places, cosines in best]

    def _ask_all(
        self, index: Index, asked: int, rows: Rows, vectors: np.ndarray, many: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each vector what :meth:`_ask` finds; the server looks for two at a time."""

        def ask(some: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
            return [self._ask(index, asked, rows, vector, many) for vector in some]

        if len(vectors) == 1:
            return ask(vectors)
        half = (len(vectors) + 1) // 2
        others = self._beside(lambda: ask(vectors[half:]))
        return ask(vectors[:half]) + others()

    def _ask(
        self, index: Index, asked: int, rows: Rows, vector: np.ndarray, many: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The nearest of some records among the ``asked`` that an index finds."""
        if asked > CANDIDATES:
            self._run(f"SET LOCAL hnsw.ef_search = {asked}")
        found = self._all(
            f"SELECT seq, -distance FROM (SELECT seq, user_id, scope, {index.expression} <#> %(vector)s AS distance"
            f" FROM vectors WHERE {index.where} ORDER BY {index.expression} <#> %(vector)s LIMIT {asked}) near"
            f" WHERE {rows.where} ORDER BY distance, seq DESC LIMIT %(many)s",
            {**rows.values, "vector": vector, "many": many},
        )
        if asked > CANDIDATES:
            self._run(f"SET LOCAL hnsw.ef_search = {CANDIDATES}")
        return _to_arrays(found) if len(found) >= min(many, rows.count) else self._compare(rows, vector, many)

    def neighbours(self, seqs: Sequence[int]) -> list[tuple[int | None, int | None]]:
        """For each record, those directly before and after it in its scope."""
        numbers = [int(seq) for seq in seqs]
        rows = self._all(
            "SELECT r.seq, (SELECT max(b.seq) FROM records b WHERE b.scope = r.scope AND b.seq < r.seq),"
            " (SELECT min(a.seq) FROM records a WHERE a.scope = r.scope AND a.seq > r.seq)"
            " FROM records r WHERE r.seq = ANY(%s)",
            (Numbers(numbers),),
        )
        found = {seq: (before, after) for seq, before, after in rows}
        return [found.get(seq, (None, None)) for seq in numbers]

    # Words

    def find_words(self, selection: Selection, words: Sequence[str], many: int, most: int = MOST_POSTINGS) -> Matches:
        """The best records by BM25 over the selection: no other record changes a score."""
        stems = self._stem(words)
        frequencies = self._frequencies(selection.user, sorted({*stems.values()} - {""}), most)
        chosen = rarest(frequencies, most)
        where, values = of_scopes(selection, "user_id", "scope")
        rows = self._all(
            f"SELECT stem, {_sent('seq')}, {_sent('times')}, {_sent('length')} FROM words"
            f" WHERE {where} AND stem = ANY(%(stems)s) GROUP BY stem",
            {**values, "stems": chosen},
        )
        postings = {stem: np.stack([*map(_to_numbers, columns)]) for stem, *columns in rows}
        if selection.tests:
            seqs, _, lengths = self._matching(selection)
            count, total = len(seqs), int(lengths.sum())
            postings = {stem: posting[:, np.isin(posting[0], seqs)] for stem, posting in postings.items()}
        else:
            count, total = self._totals(selection)
        seqs, scores = bm25([postings[stem] for stem in chosen if stem in postings], count, total)
        return Matches(
            dict(zip(seqs[:many].tolist(), scores[:many].tolist(), strict=True)),
            tuple(word for word, stem in stems.items() if frequencies.get(stem) and stem not in chosen),
        )

    def _frequencies(self, user: int, stems: Sequence[str], most: int) -> dict[str, int]:
        """How many records of a user have each word; counted no further than needed to choose among the words."""
        found: dict[str, int] = {}
        for limit in (most + 1, None):  # beyond that only if all of them are as common
            found = dict(
                self._all(
                    "SELECT q.stem, (SELECT count(*) FROM (SELECT 1 FROM words w WHERE w.user_id = %(user)s"
                    " AND w.stem = q.stem LIMIT %(limit)s) n) FROM unnest(%(stems)s::text[]) q(stem)",
                    {"user": user, "stems": list(stems), "limit": limit},
                )
            )
            if any(0 < count <= most for count in found.values()):
                break
        return found

    def _find_stems(self, texts: Sequence[str]) -> list[Counter[str]]:
        """The stems of each text and how often it has them."""
        words = [WORD.findall(text) for text in texts]
        known = self._stem({word for found in words for word in found})
        stems = [Counter(map(known.__getitem__, found)) for found in words]
        for each in stems:
            each.pop("", None)
        return stems

    def _stem(self, words: Collection[str]) -> dict[str, str]:
        """The stem of each word."""
        with self.lock:
            new = [word for word in dict.fromkeys(words) if word not in self._stems]
            if len(self._stems) + len(new) > STEMS_KEPT:
                self._stems, new = {}, list(dict.fromkeys(words))
            self._stems.update(zip(new, self._stemmer.stems(new) if new else (), strict=True))
            return {word: self._stems[word] for word in words}

    # Selections

    def _totals(self, selection: Selection) -> tuple[int, int]:
        """How many records the scopes of a selection have, and how many words these."""
        where, values = of_scopes(selection, "user_id", "id")
        sql = f"SELECT coalesce(sum(count), 0)::int8, coalesce(sum(words), 0)::int8 FROM scopes WHERE {where}"
        found: tuple[int, int] = self._once((selection.user, selection.scopes), lambda: self._one(sql, values))
        return found

    def _matching(self, selection: Selection) -> np.ndarray:
        """(3, n): numbers, scopes and lengths of the records of a selection that pass its tests, in any order."""
        known = self._current.known
        last: tuple[Selection, np.ndarray] | None = known.get("matching")
        if last is None or not _covers(last[0], selection):
            where, values = of_scopes(selection, "r.user_id", "r.scope")
            where += passing(selection.tests, values)
            columns = self._one(
                f"SELECT {_sent('seq')}, {_sent('scope')}, {_sent('words')} FROM records r WHERE {where}", values
            )
            last = known["matching"] = (selection, np.stack([*map(_to_numbers, columns)]))
        rows = last[1]
        return rows if selection.scopes is None else rows[:, np.isin(rows[1], selection.scopes)]

    # The vector indexes of large users, which PostgreSQL keeps up to date. Those of another encoder have other rows.

    def _describe_index(self, user: int) -> tuple[str, str, int]:
        """The name that a user's index has or would have, the condition of its rows, and their width."""
        encoder = self.get_meta("encoder") or ""
        where = f"user_id = {user} AND encoder = {compose.Literal(encoder).as_string(None)}"
        return f"vectors_{user}_{checksum(encoder):08x}", where, int(self.get_meta("width") or 0)

    def _find_index(self, user: int, width: int) -> Index | None:
        name, where, _ = self._describe_index(user)
        if name not in self._indexes:  # if it has been dropped since, the server compares one by one
            if not self._can_use(name):
                return None
            self._indexes.add(name)
        return Index(_indexed(width), where, self._totals(Selection(user))[0])

    def _can_use(self, name: str) -> bool:
        """Whether there is an index of that name, and it was finished."""
        return bool(self._value("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", (name,)))

    def _index_names(self) -> list[str]:
        """The vector indexes that there are, of those not finished too."""
        return self._column(
            "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
            " WHERE i.indrelid = 'vectors'::regclass AND c.relname ~ %s",
            (INDEX,),
        )

    def build_index(self, user: str) -> None:
        """Makes the vector index of a user who has grown large."""
        if time.monotonic() < self._rest_until:
            return
        with self.reading():
            number = self._value("SELECT id FROM users WHERE name = %s", (user,))
            if number is None or self._totals(Selection(number))[0] <= EXACT:
                return
            name, where, width = self._describe_index(number)
            if width > WIDEST or self._can_use(name):
                return
        with self._outside() as connection:
            key = lock_key("index", self.schema)
            if not connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone()[0]:
                return  # another process is building one
            try:
                connection.execute("SET lock_timeout = '30s'")
                connection.execute("SET maintenance_work_mem = '256MB'")
                connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")  # what a killed process left
                connection.execute(
                    f"CREATE INDEX CONCURRENTLY {name} ON vectors USING hnsw ({_indexed(width)} vector_ip_ops)"
                    f" WHERE {where}"
                )
            except psycopg.Error:
                self._rest_until = time.monotonic() + REST
                raise

    def _drop_indexes(self) -> None:
        """Drops the vector indexes of users who are gone, and of another encoder."""
        with self.reading():
            names = self._index_names()
            known = self._column(
                "SELECT id FROM users WHERE id = ANY(%s)", ([int(name.split("_")[1]) for name in names],)
            )
            valid = {self._describe_index(user)[0] for user in known}
        gone = [name for name in names if name not in valid]
        if gone:
            with self._outside() as connection:
                for name in gone:
                    connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")


def of_scopes(selection: Selection, user: str, scope: str) -> tuple[str, dict[str, Any]]:
    """The condition that a selection's user and scopes put on two columns, and its values."""
    where = f"{user} = %(user)s"
    values: dict[str, Any] = {"user": selection.user}
    if selection.scopes is None:
        return where, values
    return f"{where} AND {scope} = ANY(%(scopes)s)", {**values, "scopes": Numbers(selection.scopes)}


def passing(tests: Tests | None, values: dict[str, Any]) -> str:
    """The conditions that tests put on the metadata of ``records r``; their values are added to ``values``."""
    conditions = ""
    for place, (key, comparisons) in enumerate((tests or {}).items()):
        values[f"key{place}"] = key
        for name, value in comparisons.items():
            options = []
            for number, wanted in enumerate(value if name == "in" else [value]):
                label = f"value{place}_{name}_{number}"
                is_number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
                values[label] = Decimal(repr(wanted)) if is_number else wanted
                options.append(_test(f"%(key{place})s", "eq" if name == "in" else name, f"%({label})s", values[label]))
            conditions += f" AND ({' OR '.join(options) or 'false'})"
    return conditions


def _test(key: str, comparison: str, label: str, value: bool | str | Decimal) -> str:
    """SQL that compares a value of the metadata; values of another type are unequal, and true is not 1."""
    types = {bool: ("boolean", "::boolean"), str: ("string", ' COLLATE "C"'), Decimal: ("number", "::numeric")}
    kind, cast = types[type(value)]
    otherwise = f"json_typeof(r.metadata -> {key}) IS NOT NULL" if comparison == "ne" else "false"
    return (
        f"CASE json_typeof(r.metadata -> {key}) WHEN '{kind}'"
        f" THEN (r.metadata ->> {key}){cast} {OPERATORS[comparison]} {label} ELSE {otherwise} END"
    )


def _covers(one: Selection, other: Selection) -> bool:
    """Whether what is known of one selection tells that of another."""
    scopes = one.scopes is None or (other.scopes is not None and {*other.scopes} <= {*one.scopes})
    return one.user == other.user and one.tests is other.tests and scopes


def _indexed(width: int) -> str:
    """What is indexed: an index needs to know the width of its vectors, which the table does not."""
    return f"(vector::vector({width}))"


def _sent(column: str) -> str:
    """SQL that sends all whole numbers of a column as bytes, in any order: much quicker than one by one."""
    return f"string_agg(int8send({column}), ''::bytea)"


def _to_numbers(data: bytes | None) -> np.ndarray:
    return np.frombuffer(data or b"", dtype=">i8").astype(np.int64)


def _to_arrays(rows: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([row[0] for row in rows], dtype=np.int64), np.array([row[1] for row in rows], dtype=np.float32)
