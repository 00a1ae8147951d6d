"""A memory on a server, with the methods of :class:`titans.text.Memory`; loads neither torch nor an encoder."""

from __future__ import annotations

import asyncio
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from titans.files import replacing
from titans.text.records import Event, Found, Hit, Record, Scope, StoreError
from titans.words import sentence

if TYPE_CHECKING:
    from titans.text.surprise import Surprise

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
PART = 1 << 16  # bytes of a file that are sent at a time
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10  # seconds before a request is made again: at first, and if the server says so
BUSY = (429, 503)
LOST = (httpx.NetworkError, httpx.RemoteProtocolError)  # it is not known whether the request was carried out
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
Outcome = httpx.Response | httpx.HTTPError
NAME = "Idempotency-Key"  # of a write, which is then carried out once
LINES = {"Content-Type": "application/x-ndjson"}
PROBLEM = "application/problem+json"
NAMES = {"memory": "text", "user_id": "user", "agent_id": "agent", "run_id": "session", "created_at": "created",
         "updated_at": "updated"}  # fmt: skip


class ServiceError(StoreError):
    """What the server said against a request, or why there was no answer, in one sentence.

    Attributes:
        status: of the answer; None if there was none.
    """

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and what its answer means.

    Attributes:
        parse: makes the result of the answer's JSON.
        repeatable: whether it may be made again if the connection was lost: then it changes nothing the second time.
        missing: the result if there is no such memory; by default that is an error.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Mapping[str, Any] | None = None
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    repeatable: bool = True
    missing: Callable[[], T] | None = None

    def request(self) -> dict[str, Any]:
        """What httpx is to send; names without a value are left out."""
        given = {"params": self.params, "json": self.body, "headers": self.headers}
        return {
            name: {key: value for key, value in values.items() if value is not None}
            for name, values in given.items()
            if values is not None
        }

    def then(self, change: Callable[[T], U]) -> Call[U]:
        """The same request, of whose result something is made."""
        return Call(
            self.method, self.path, lambda given: change(self.parse(given)), self.params, self.body, self.headers
        )

    def pause(self, outcome: Outcome, tried: int) -> float | None:
        """Seconds after which to make the request again; None: what came of it is final."""
        if isinstance(outcome, httpx.Response):
            said = outcome.headers.get("retry-after", "")
            busy = outcome.status_code in BUSY and said.isdecimal() and int(said) <= LONGEST_PAUSE
            return float(said) if busy else None
        named = self.headers is not None and NAME in self.headers
        again = (
            isinstance(outcome, NOT_SENT)
            or (self.repeatable and isinstance(outcome, LOST))
            or (named and isinstance(outcome, httpx.ReadTimeout))
        )
        return FIRST_PAUSE * 2**tried if again else None

    def result(self, outcome: Outcome) -> T:
        """What the answer says."""
        answer = checked(outcome, self.missing is not None)
        if self.missing is not None and answer.is_error:
            return self.missing()
        try:
            return self.parse(answer.json())
        except (ValueError, KeyError, TypeError) as error:
            raise ServiceError(
                f"{answer.url.host} did not answer as a memory server does; is the URL right?"
            ) from error


class Calls:
    """What can be asked of a server; without a user it is the key's or, without keys, "default"."""

    def add(
        self, text: str, *, user: str | None = None, agent: str | None = None, session: str | None = None,
        metadata: Mapping[str, Any] | None = None, role: str | None = None, request: str | None = None,
    ) -> Call[Record]:  # fmt: skip
        """Remembers a text; it is on the server's disk when this returns. For ``request`` see :meth:`add_many`.

        The server says when it was created; texts with times of their own are imported.
        """
        many = self.add_many(
            [text], user=user, agent=agent, session=session, metadata=metadata, role=role, request=request
        )
        return many.then(lambda records: records[0])

    def add_many(
        self, texts: Sequence[str], *, user: str | None = None, agent: str | None = None, session: str | None = None,
        metadata: Mapping[str, Any] | None = None, role: str | Sequence[str] | None = None,
        request: str | None = None,
    ) -> Call[list[Record]]:  # fmt: skip
        """Remembers texts of one scope, in their order: all of them or none.

        ``metadata`` applies to all of them, ``role`` to all or, as a list, to each. ``request`` names this call, so
        that it can be made again, by another process too, and still be carried out once; by default it gets a name for
        the case that the connection is lost or the server takes too long.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one text; expected a list of them")
        body: dict[str, Any] = {**_scope(user, agent, session), "metadata": metadata}
        if role is None:
            body["texts"] = list(texts)
        else:
            roles = [role] * len(texts) if isinstance(role, str) else list(role)
            if len(roles) != len(texts):
                raise ValueError(f"role has {len(roles)} entries; expected {len(texts)}, one per text")
            body["messages"] = [{"role": who, "content": text} for who, text in zip(roles, texts, strict=True)]
        headers = {NAME: uuid.uuid4().hex if request is None else request}
        return Call("POST", "/memories", _records, body=body, headers=headers)

    def search(
        self, query: str, *, user: str | None = None, agent: str | None = None, session: str | None = None,
        filters: Mapping[str, Any] | None = None, limit: int = 10, threshold: float | None = None,
    ) -> Call[Found]:  # fmt: skip
        """The records that match a question best."""
        body = {"query": query, **_scope(user, agent, session), "filters": filters, "limit": limit}
        return Call(
            "POST",
            "/search",
            lambda given: Found(
                [_hit(each) for each in given["results"]], given["below"], threshold, None, tuple(given["ignored"])
            ),
            body={**body, "threshold": threshold},
        )

    def get(self, id: str, *, user: str | None = None) -> Call[Record | None]:
        """A record of a user by its id; None if there is none."""
        return Call("GET", _path(id), _record, {"user_id": user}, missing=lambda: None)

    def records(
        self, *, user: str | None = None, agent: str | None = None, session: str | None = None,
        filters: Mapping[str, Any] | None = None, limit: int = 100,
    ) -> Call[list[Record]]:  # fmt: skip
        """The newest records of a user that match, newest first."""
        page = self.page(user=user, agent=agent, session=session, filters=filters, limit=limit)
        return page.then(lambda found: found[0])

    def page(
        self, *, user: str | None = None, agent: str | None = None, session: str | None = None,
        filters: Mapping[str, Any] | None = None, limit: int = 100, cursor: str | None = None,
    ) -> Call[tuple[list[Record], str | None]]:  # fmt: skip
        """As :meth:`records`, and where the next page begins: the ``cursor`` to ask with; None after the last."""
        text = None if filters is None else json.dumps(filters)
        params = {**_scope(user, agent, session), "filters": text, "limit": limit, "cursor": cursor}
        return Call("GET", "/memories", lambda given: (_records(given), given["next"]), params)

    def update(
        self, id: str, text: str | None = None, metadata: Mapping[str, Any] | None = None, *, user: str | None = None,
        keep_old: bool = False,
    ) -> Call[Record]:  # fmt: skip
        """Replaces a record's text or metadata; returns the record."""
        body = {"text": text, "metadata": metadata, "keep_old": keep_old}
        return Call("PUT", _path(id), _record, {"user_id": user}, body, repeatable=False)

    def delete(self, id: str, *, user: str | None = None) -> Call[int]:
        """Erases a record of a user for good; returns 1."""
        return Call("DELETE", _path(id), _number("deleted"), {"user_id": user}, repeatable=False)

    def delete_all(
        self, *, user: str | None = None, agent: str | None = None, session: str | None = None, below: bool = False
    ) -> Call[int]:
        """Erases every record of exactly this scope; with ``below``, of every scope that has the names given."""
        params = {**_scope(user, agent, session), "below": below}
        return Call("DELETE", "/memories", _number("deleted"), params, repeatable=False)

    def history(self, id: str, *, user: str | None = None) -> Call[list[Event]]:
        """What happened to a record and to the versions that it replaced, oldest first; empty for an unknown id."""
        return Call("GET", f"{_path(id)}/history", _events, {"user_id": user}, missing=lambda: [])

    def surprise(
        self, text: str, *, user: str | None = None, agent: str | None = None, session: str | None = None
    ) -> Call[Surprise]:
        """What is surprising about a text to exactly this scope, in parts; without writing it."""

        def parse(given: Any) -> Surprise:
            from titans.text.surprise import Surprise

            return Surprise(**given)

        return Call("POST", "/surprise", parse, body={"text": text, **_scope(user, agent, session)})

    def scopes(self, user: str | None = None) -> Call[list[tuple[Scope, int]]]:
        """Every scope that has records, or those of a user, with the number of its records."""
        return Call("GET", "/stats", _scopes, {"user_id": user})

    def stats(self, user: str | None = None) -> Call[dict[str, Any]]:
        """Figures of the store, or of one user in it."""
        return Call("GET", "/stats", dict, {"user_id": user})


CALLS = Calls()


def _sync(method: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[MemoryClient, P], T]:
    @functools.wraps(method)
    def call(self: MemoryClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(method(CALLS, *args, **kwargs))

    return call


def _async(
    method: Callable[Concatenate[Calls, P], Call[T]],
) -> Callable[Concatenate[AsyncMemoryClient, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def call(self: AsyncMemoryClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(method(CALLS, *args, **kwargs))

    return call


class MemoryClient:
    """A memory on a server; safe to share between threads.

    Its methods are those of :class:`titans.text.Memory` and return the same. What is wrong is a :class:`ServiceError`
    with one sentence.

    Args:
        url: of the server.
        key: of `titans serve keys add`; None: the server has no keys.
        timeout: seconds until the server has to answer; an import has as long as it takes.
        retries: how often a request is made again if the connection was lost, or the server is busy and says when to
            come back; of :meth:`add` and :meth:`add_many`, also if it did not answer in time. A write that is made
            again is still carried out once.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", key: str | None = None, *, timeout: float = 30.0, retries: int = 3
    ) -> None:
        self.retries = retries
        self._http = httpx.Client(**_options(url, key, timeout))

    def __enter__(self) -> MemoryClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Makes a request, again if it has to be, and returns its result."""
        tried = 0
        while True:
            try:
                outcome: Outcome = self._http.request(call.method, call.path, **call.request())
            except httpx.HTTPError as error:
                outcome = error
            seconds = call.pause(outcome, tried) if tried < self.retries else None
            if seconds is None:
                return call.result(outcome)
            time.sleep(seconds)
            tried += 1

    add = _sync(Calls.add)
    add_many = _sync(Calls.add_many)
    search = _sync(Calls.search)
    get = _sync(Calls.get)
    records = _sync(Calls.records)
    page = _sync(Calls.page)
    update = _sync(Calls.update)
    delete = _sync(Calls.delete)
    delete_all = _sync(Calls.delete_all)
    history = _sync(Calls.history)
    surprise = _sync(Calls.surprise)
    scopes = _sync(Calls.scopes)
    stats = _sync(Calls.stats)

    def export(self, path: str | Path, user: str | None = None) -> int:
        """Writes every record, or those of a user, to a file of JSON lines in their order; returns how many."""
        count = 0
        with (
            _sentences(),
            replacing(Path(path), private=True) as temporary,
            temporary.open("wb") as file,
            self._http.stream("POST", "/export", json=_scope(user)) as answer,
        ):
            if answer.is_error:
                answer.read()
            checked(answer)
            for part in answer.iter_bytes():
                count += part.count(b"\n")
                file.write(part)
        return count

    def import_(self, path: str | Path) -> int:
        """Adds the records of a file of JSON lines; returns how many, without those that were there already."""
        with _sentences(), Path(path).open("rb") as file:
            parts = iter(lambda: file.read(PART), b"")
            answer = self._http.post("/import", content=parts, headers=LINES, timeout=_patient(self._http.timeout))
        return Call("POST", "/import", _number("imported")).result(answer)


class AsyncMemoryClient:
    """:class:`MemoryClient` for asynchronous programs: takes the same, and its methods are to be awaited."""

    def __init__(
        self, url: str = "http://127.0.0.1:8000", key: str | None = None, *, timeout: float = 30.0, retries: int = 3
    ) -> None:
        self.retries = retries
        self._http = httpx.AsyncClient(**_options(url, key, timeout))

    async def __aenter__(self) -> AsyncMemoryClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Makes a request, again if it has to be, and returns its result."""
        tried = 0
        while True:
            try:
                outcome: Outcome = await self._http.request(call.method, call.path, **call.request())
            except httpx.HTTPError as error:
                outcome = error
            seconds = call.pause(outcome, tried) if tried < self.retries else None
            if seconds is None:
                return call.result(outcome)
            await asyncio.sleep(seconds)
            tried += 1

    add = _async(Calls.add)
    add_many = _async(Calls.add_many)
    search = _async(Calls.search)
    get = _async(Calls.get)
    records = _async(Calls.records)
    page = _async(Calls.page)
    update = _async(Calls.update)
    delete = _async(Calls.delete)
    delete_all = _async(Calls.delete_all)
    history = _async(Calls.history)
    surprise = _async(Calls.surprise)
    scopes = _async(Calls.scopes)
    stats = _async(Calls.stats)

    async def export(self, path: str | Path, user: str | None = None) -> int:
        """Writes every record, or those of a user, to a file of JSON lines in their order; returns how many."""
        count = 0
        with _sentences(), replacing(Path(path), private=True) as temporary, temporary.open("wb") as file:
            async with self._http.stream("POST", "/export", json=_scope(user)) as answer:
                if answer.is_error:
                    await answer.aread()
                checked(answer)
                async for part in answer.aiter_bytes():
                    count += part.count(b"\n")
                    file.write(part)
        return count

    async def import_(self, path: str | Path) -> int:
        """Adds the records of a file of JSON lines; returns how many, without those that were there already."""
        with _sentences(), Path(path).open("rb") as file:

            async def parts() -> AsyncIterator[bytes]:
                while part := await asyncio.to_thread(file.read, PART):
                    yield part

            answer = await self._http.post(
                "/import", content=parts(), headers=LINES, timeout=_patient(self._http.timeout)
            )
        return Call("POST", "/import", _number("imported")).result(answer)


def checked(outcome: Outcome, may_be_missing: bool = False) -> httpx.Response:
    """The answer, if it is not an error: else a :class:`ServiceError`."""
    if isinstance(outcome, httpx.HTTPError):
        raise _error_of(outcome)
    if not outcome.is_error:
        return outcome
    is_problem = outcome.headers.get("content-type") == PROBLEM
    if may_be_missing and is_problem and outcome.status_code == 404:
        return outcome
    detail = outcome.json()["detail"] if is_problem else f"the server answered {outcome.status_code}"
    raise ServiceError(detail, outcome.status_code)


def _error_of(error: httpx.HTTPError) -> ServiceError:
    if isinstance(error, NOT_SENT):
        return ServiceError(f"the server cannot be reached: {sentence(error)}")
    if isinstance(error, httpx.TimeoutException):
        return ServiceError("the server did not answer in time; it is not known whether it did what was asked")
    if isinstance(error, LOST):
        return ServiceError("the connection was lost; it is not known whether the server did what was asked")
    return ServiceError(f"the request cannot be sent: {sentence(error)}")


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise _error_of(error) from error


def _options(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"url is {url!r}; expected one such as http://127.0.0.1:8000")
    if key is not None and (not key.isascii() or not key.isprintable()):
        raise ValueError("key has characters that no key has; expected one of `titans serve keys add`")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return {"base_url": url, "headers": headers, "timeout": timeout}


def _patient(timeout: httpx.Timeout) -> httpx.Timeout:
    """The same, but for an answer that takes as long as it takes."""
    return httpx.Timeout(connect=timeout.connect, read=None, write=timeout.write, pool=timeout.pool)


def _path(id: str) -> str:
    return f"/memories/{quote(id, safe='')}"


def _scope(user: str | None = None, agent: str | None = None, session: str | None = None) -> dict[str, str | None]:
    return {"user_id": user, "agent_id": agent, "run_id": session}


def _number(name: str) -> Callable[[Any], int]:
    return lambda given: int(given[name])


def _record(given: Mapping[str, Any]) -> Record:
    known = {item.name for item in fields(Record)}
    made = {NAMES.get(name, name): value for name, value in given.items()}
    return Record(**{name: value for name, value in made.items() if name in known})


def _records(given: Mapping[str, Any]) -> list[Record]:
    return [_record(each) for each in given["results"]]


def _hit(given: Mapping[str, Any]) -> Hit:
    record = _record(given)
    age = (datetime.now(timezone.utc) - datetime.fromisoformat(record.created)).total_seconds()
    return Hit(
        record, given["score"], **given["parts"], surprise=record.surprise, age=age, replaced_by=given["replaced_by"]
    )


def _events(given: Mapping[str, Any]) -> list[Event]:
    return [
        Event(each["event"].lower(), each["id"], each["at"], each["version"], each["memory"], each["metadata"])
        for each in given["results"]
    ]


def _scopes(given: Mapping[str, Any]) -> list[tuple[Scope, int]]:
    return [(Scope(each["user_id"], each["agent_id"], each["run_id"]), each["records"]) for each in given["by_scope"]]
