"""Who calls, and whose memories they may read and write: keys that are bound to a user or an agent."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.datastructures import State

from titans.service.problems import Problem
from titans.text.records import Scope, StoreError, check_name, utc_now
from titans.words import sentence

PREFIX = "tm"  # of every key, by which scanners of sources know one
Right = Literal["read", "write"]


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: of the key; "" if there are no keys.
        user: whose memories they are bound to; None: any user's.
        agent: that they are bound to; None: any.
        rights: "read", "write" or both.
    """

    name: str = ""
    user: str | None = None
    agent: str | None = None
    rights: frozenset[str] = frozenset(("read", "write"))

    def require(self, right: Right) -> Caller:
        """Itself, if it may do that."""
        if right not in self.rights:
            raise Problem(403, f"this key may not {right}")
        return self


@dataclass(frozen=True)
class Key:
    """A key as it is kept: everything but the key itself."""

    id: str
    name: str
    user: str | None
    agent: str | None
    rights: tuple[str, ...]
    created: str
    revoked: str | None


class Keys:
    """The keys of a server in a file, which several processes may read and change.

    Of a key only a salted hash is kept. A key has 256 random bits, which nobody finds by trying: one round of SHA-256
    is enough.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self.known = False  # that there is a key, which stays so

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                if self._connection is None:
                    self._connection = self._connect()
                with self._connection:
                    yield self._connection
        except (OSError, sqlite3.DatabaseError) as error:
            raise StoreError(f"the keys in {self.file} cannot be used: {sentence(error)}") from error

    def _connect(self) -> sqlite3.Connection:
        if not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.file.touch(mode=0o600)
        connection = sqlite3.connect(self.file, timeout=10, check_same_thread=False)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, user TEXT, agent TEXT,"
            " rights TEXT NOT NULL, created TEXT NOT NULL, revoked TEXT, salt BLOB NOT NULL, hash BLOB NOT NULL)"
        )
        return connection

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def add(
        self, name: str, user: str | None = None, agent: str | None = None, rights: tuple[str, ...] = ("read", "write")
    ) -> str:
        """Makes a key and returns it; nobody can see it again."""
        check_name(name, "name")
        for what, value in (("user", user), ("agent", agent)):
            if value is not None:
                check_name(value, what)
        if not rights or not set(rights) <= {"read", "write"}:
            raise ValueError(f"rights is {', '.join(rights) or 'empty'}; expected read, write or both")
        id, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_bytes(16)
        row = (id, name, user, agent, " ".join(sorted(set(rights))), utc_now(), None, salt, _hash(salt, secret))
        with self._open() as connection:
            if connection.execute("SELECT 1 FROM keys WHERE name = ?", (name,)).fetchone():
                raise ValueError(f"name is {name!r}, which another key has; expected a new name")
            connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return f"{PREFIX}_{id}_{secret}"

    def list(self) -> list[Key]:
        """All keys, the revoked ones too, in the order in which they were made."""
        if not self.file.exists():
            return []
        with self._open() as connection:
            rows = connection.execute(
                "SELECT id, name, user, agent, rights, created, revoked FROM keys ORDER BY created"
            ).fetchall()
        return [
            Key(id, name, user, agent, tuple(rights.split()), *times) for id, name, user, agent, rights, *times in rows
        ]

    def revoke(self, name: str) -> None:
        """Ends a key, given by its name or its id, at once and for good."""
        with self._open() as connection:
            done = connection.execute(
                "UPDATE keys SET revoked = ?1 WHERE (name = ?2 OR id = ?2) AND revoked IS NULL", (utc_now(), name)
            )
            if not done.rowcount:
                raise ValueError(f"there is no key {name!r} to revoke")

    def exist(self) -> bool:
        """Whether a key was ever made: after the last is revoked, nobody may call, not everybody."""
        if not self.known and self.file.exists():
            with self._open() as connection:
                self.known = connection.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None
        return self.known

    def find(self, key: str) -> Caller | None:
        """Who has a key; None if it is none, or a revoked one."""
        prefix, _, rest = key.partition("_")
        id, _, secret = rest.partition("_")
        if prefix != PREFIX or not key.isascii():  # what is no key is not looked up
            return None
        with self._open() as connection:
            row = connection.execute(
                "SELECT name, user, agent, rights, salt, hash FROM keys WHERE id = ? AND revoked IS NULL", (id,)
            ).fetchone()
        if row is None or not hmac.compare_digest(_hash(row[4], secret), row[5]):
            return None
        return Caller(row[0], row[1], row[2], frozenset(row[3].split()))


async def have_keys(keys: Keys) -> bool:
    """Whether a key was ever made; asks the file in a thread, since another process may have locked it."""
    return keys.known or (keys.file.exists() and await run_sync(keys.exist))


async def identify(state: State, headers: Mapping[str, str]) -> Caller:
    """Who sent a request with these headers: ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``.

    Without any keys on the server it is anybody, since only programs of this machine reach it. Every request counts
    against the rate of its key.

    Args:
        state: of the application.
        headers: by their names in lower case.
    """
    caller = await _find_caller(state.keys, headers)
    state.rates.spend(caller.name)
    return caller


async def _find_caller(keys: Keys, headers: Mapping[str, str]) -> Caller:
    if not await have_keys(keys):
        return Caller()
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not given:
        raise _unknown("the key is missing; expected Authorization: Bearer KEY or X-API-Key: KEY")
    found = await run_sync(keys.find, given)
    if found is None:
        raise _unknown("the key is unknown or was revoked")
    return found


def _unknown(sentence: str) -> Problem:
    return Problem(401, sentence, {"WWW-Authenticate": "Bearer"})


def bounds_of(caller: Caller, user_id: str | None, agent_id: str | None) -> tuple[str | None, str | None]:
    """The user and the agent that a request is about, within what the caller is bound to; None: any."""
    return _within("user_id", user_id, caller.user), _within("agent_id", agent_id, caller.agent)


def scope_of(
    caller: Caller, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
) -> Scope:
    """The scope that a request names, within what the caller is bound to.

    Who has no key is the user "default" unless the request says otherwise; a key that is bound to no user must say.
    """
    user, agent = bounds_of(caller, user_id, agent_id)
    if user is None and caller.name:
        raise Problem(422, "user_id is missing; this key is bound to no user")
    return Scope("default" if user is None else user, agent, run_id)


def scope_of_headers(caller: Caller, headers: Mapping[str, str]) -> Scope:
    """The scope that ``X-Memory-User``, ``X-Memory-Agent`` and ``X-Memory-Session`` name, within the same bounds."""
    names = [_decode(headers.get(f"x-memory-{what}")) for what in ("user", "agent", "session")]
    if names[0] is None and caller.name and caller.user is None:
        raise Problem(400, "X-Memory-User is missing; this key is bound to no user")
    return scope_of(caller, *names)


def _decode(value: str | None) -> str | None:
    """A header as the client meant it: programs send UTF-8, which is read as Latin-1."""
    if value is None:
        return None
    with suppress(UnicodeDecodeError):
        return value.encode("latin-1").decode()
    return value


def _within(name: str, given: str | None, bound: str | None) -> str | None:
    if bound is None:
        return given
    if given not in (None, bound):
        raise Problem(403, f"this key is bound to another {name}")
    return bound


def _hash(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode()).digest()


# Only for the description of the interface: identify() looks at the headers itself.
DESCRIBED = (
    Depends(HTTPBearer(auto_error=False, scheme_name="bearer", description="A key of `titans serve keys add`.")),
    Depends(APIKeyHeader(name="X-API-Key", auto_error=False, scheme_name="header", description="The same key.")),
)


async def reader(request: Request) -> Caller:
    """The caller of a route that reads."""
    return (await identify(request.app.state, request.headers)).require("read")


async def writer(request: Request) -> Caller:
    """The caller of a route that writes."""
    return (await identify(request.app.state, request.headers)).require("write")


Reader = Annotated[Caller, Depends(reader)]
Writer = Annotated[Caller, Depends(writer)]
