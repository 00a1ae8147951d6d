"""The tables of a store in PostgreSQL: how they are made, recognised, and brought up to date."""

from __future__ import annotations

import hashlib
from typing import Any

import psycopg
from psycopg import sql

from titans.text.records import StoreError, new_id, utc_now
from titans.text.store import FORMAT
from titans.words import sentence

OLDEST_PGVECTOR = (0, 5)  # has HNSW
# A scope's row is locked by whoever writes to it, and no other row is shared by two writers. Postings have all that
# BM25 needs in their index, which then need not look at the table.
REQUESTS = """
CREATE TABLE requests (
    user_id integer NOT NULL, key text COLLATE "C" NOT NULL, digest text NOT NULL, answer text NOT NULL,
    at text NOT NULL, PRIMARY KEY (user_id, key)
);
CREATE INDEX requests_by_time ON requests (at);
"""
SCHEMA = f"""
CREATE TABLE meta (key text PRIMARY KEY, value text);
CREATE TABLE users (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE);
CREATE TABLE scopes (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, user_id integer NOT NULL, agent text COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL, count bigint NOT NULL DEFAULT 0, words bigint NOT NULL DEFAULT 0,
    version bigint NOT NULL DEFAULT 0, UNIQUE (user_id, agent, session)
) WITH (fillfactor = 50);
CREATE SEQUENCE numbers;
CREATE TABLE records (
    seq bigint PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE, user_id integer NOT NULL, scope integer NOT NULL,
    role text, text text NOT NULL, metadata json NOT NULL, created text NOT NULL, updated text NOT NULL,
    version bigint NOT NULL, words integer NOT NULL, sum bigint NOT NULL, text_sum bigint NOT NULL,
    surprise double precision NOT NULL, uses bigint NOT NULL, repeats bigint NOT NULL, replaces text COLLATE "C"
) WITH (fillfactor = 90);
CREATE INDEX records_of_user ON records (user_id, seq);
CREATE INDEX records_of_scope ON records (scope, seq);
CREATE INDEX records_by_text ON records (scope, text_sum);
CREATE INDEX records_by_replaced ON records (replaces) WHERE replaces IS NOT NULL;
CREATE TABLE vectors (
    seq bigint PRIMARY KEY, user_id integer NOT NULL, scope integer NOT NULL, encoder text NOT NULL,
    sum bigint NOT NULL, vector vector NOT NULL
);
CREATE INDEX vectors_of_scope ON vectors (user_id, scope);
CREATE TABLE words (
    user_id integer NOT NULL, stem text COLLATE "C" NOT NULL, seq bigint NOT NULL, scope integer NOT NULL,
    times integer NOT NULL, length integer NOT NULL, PRIMARY KEY (user_id, stem, seq) INCLUDE (scope, times, length)
);
CREATE TABLE states (
    scope integer NOT NULL, count bigint NOT NULL, sum bigint NOT NULL, state bytea NOT NULL,
    PRIMARY KEY (scope, count)
);
ALTER TABLE states ALTER state SET STORAGE EXTERNAL;
CREATE TABLE events (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at text NOT NULL, kind text NOT NULL, id text COLLATE "C",
    seq bigint, scope integer NOT NULL, version bigint, body text, sum bigint
);
CREATE INDEX events_of_record ON events (id, n);
CREATE INDEX events_of_scope ON events (scope, n);
{REQUESTS}"""
# PostgreSQL keeps samples of columns for its planner; an erased text or name must not stay among them.
UNSAMPLED = {
    "users": ("name",), "scopes": ("agent", "session"), "records": ("role", "text"),
    "vectors": ("vector",), "words": ("stem",), "states": ("state",), "events": ("body",),
}  # fmt: skip
FIRST = ("meta", "users", "scopes", "records", "vectors", "words", "states", "events")  # tables of the oldest format
TABLES = (*FIRST, "requests")
UPGRADES = {2: REQUESTS}  # from each older format to the next; the first one here is 2


def lock_key(purpose: str, schema: str = "") -> int:
    """The number of an advisory lock."""
    return int.from_bytes(hashlib.sha256(f"titans {purpose} {schema}".encode()).digest()[:8], "big", signed=True)


def prepare(connection: Any, schema: str, name: str) -> None:
    """Makes the tables of a new store and brings an older one up to date, in one transaction.

    Raises a :class:`StoreError` if the schema is another program's, or if a newer version made it.
    """
    if find_format(connection, schema, name) == FORMAT:
        return
    with connection.transaction():
        # In the whole database: the extension is made once for all schemas.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (lock_key("make"),))
        where = quote(connection, _require_extension(connection, name))
        format = find_format(connection, schema, name)
        quoted = quote(connection, schema)
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
        connection.execute(f"SET LOCAL search_path = {quoted}, {where}")
        if format is None:
            connection.execute(SCHEMA)
            for table, columns in UNSAMPLED.items():
                steps = ", ".join(f"ALTER {column} SET STATISTICS 0" for column in columns)
                connection.execute(f"ALTER TABLE {table} {steps}")
            connection.execute(
                "INSERT INTO meta VALUES ('format', %s), ('store', %s), ('made', %s)",
                (str(FORMAT), new_id(), utc_now()),
            )
        else:
            for older in range(format, FORMAT):
                connection.execute(UPGRADES[older])
            connection.execute("UPDATE meta SET value = %s WHERE key = 'format'", (str(FORMAT),))


def find_format(connection: Any, schema: str, name: str) -> int | None:
    """The format of the store in a schema, None if there is nothing; raises if it is none of ours, or a newer one."""
    tables = [
        row[0]
        for row in connection.execute(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relkind IN ('r', 'v', 'm', 'p', 'f')",
            (schema,),
        )
    ]
    if not tables:
        return None
    if not set(FIRST) <= set(tables):
        raise StoreError(f"the schema {schema!r} of {name} has tables, but is not a memory store; choose another one")
    row = connection.execute(f"SELECT value FROM {quote(connection, schema)}.meta WHERE key = 'format'").fetchone()
    if row is None:
        raise StoreError(f"the schema {schema!r} of {name} has tables, but is not a memory store; choose another one")
    format = int(row[0])
    if format > FORMAT:
        raise StoreError(
            f"{name} has format {format} and was made by a newer version of titans; expected {FORMAT} at most"
        )
    return format


def find_extension(connection: Any) -> tuple[str, str] | None:
    """The schema and the version of pgvector, if the database has it."""
    row: tuple[str, str] | None = connection.execute(
        "SELECT n.nspname, e.extversion FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
        " WHERE e.extname = 'vector'"
    ).fetchone()
    return row


def _require_extension(connection: Any, name: str) -> str:
    """Makes pgvector known to the database, if it is not; returns the schema that it is in."""
    try:
        if find_extension(connection) is None:
            # Not in the store's own schema, which may be dropped while others need the extension.
            connection.execute("CREATE EXTENSION vector SCHEMA public")
    except psycopg.Error as error:
        raise StoreError(
            f"{name} lacks the extension pgvector, and it cannot be added ({sentence(error)}); "
            "have it installed on the server and run `CREATE EXTENSION vector` as its administrator"
        ) from error
    found = find_extension(connection)
    assert found is not None
    schema, version = found
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PGVECTOR:
        raise StoreError(f"{name} has pgvector {version}; expected {'.'.join(map(str, OLDEST_PGVECTOR))} or newer")
    return schema


def quote(connection: Any, name: str) -> str:
    """A name as SQL has it."""
    quoted: str = sql.Identifier(name).as_string(connection)
    return quoted
