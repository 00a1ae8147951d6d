"""The REST interface, in the shape that clients of mem0 know."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO, Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import State

from titans.service import metrics, models
from titans.service.access import DESCRIBED, Caller, Reader, Writer, bounds_of, identify, scope_of
from titans.service.limits import too_large
from titans.service.problems import Problem, documented
from titans.service.settings import Limits
from titans.text.memory import Memory
from titans.text.records import MAX_NAME, Record, UnknownRecord, parse_records

LINES = "application/x-ndjson"
LINE = '{"id": "9f1c2d3e", "text": "Ada plays the piano.", "user": "ada"}'  # an example; an export has more fields
IN_MEMORY = 1 << 20  # bytes of an import that are not put on the disk
LONGEST_LINE = 4 << 20  # bytes of a line of an import: a text, its metadata, and how JSON writes them
AT_A_TIME = 500  # records of an export that are read together


async def _memory(request: Request) -> Memory:
    memory: Memory = request.app.state.memory
    return memory


def _text(description: str, media_type: str, example: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string"}, "example": f"{example}\n"}}
    return {"description": description, "content": content}


Open = Annotated[Memory, Depends(_memory)]
Id = Annotated[models.Name, Path(description="Id of a memory.", examples=[models.ID])]
RequestName = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MAX_NAME,
        description="A name of this write: within a day, the same request with the same name writes nothing again.",
        examples=["7c9e6679-7425-40de-944b-e07fc1f90ae7"],
    ),
]
router = APIRouter(tags=["memories"], dependencies=DESCRIBED)
public = APIRouter(tags=["server"])


@router.post("/memories", status_code=201, response_model=models.WrittenList, responses=documented(
    400, 401, 403, 409, 415, 422, 507
))  # fmt: skip
def add(
    body: models.NewMemories, request: Request, memory: Open, caller: Writer, idempotency_key: RequestName = None
) -> dict[str, Any]:
    """Remember a text, several texts, or the messages of a chat: all of them or none."""
    scope = scope_of(caller, body.user_id, body.agent_id, body.run_id)
    texts, roles = zip(*body.said, strict=True)
    check_sizes(request.app.state.settings.limits, texts)
    records = memory.add_many(texts, **asdict(scope), metadata=body.metadata, role=roles, request=idempotency_key)
    request.app.state.metrics.count("titans_texts_written_total", len(records))
    results = models.written_of(records)
    return {"results": results if "read" in caller.rights else [models.as_sent(each) for each in results]}


@router.get("/memories", response_model=models.MemoryPage, responses=documented(401, 403, 422))
def list_memories(asked: Annotated[models.PageParameters, Query()], memory: Open, caller: Reader) -> dict[str, Any]:
    """List the memories of a scope, newest first."""
    scope = scope_of(caller, asked.user_id, asked.agent_id, asked.run_id)
    records, following = memory.page(
        **asdict(scope), filters=_read_filters(asked.filters), limit=asked.limit, cursor=asked.cursor
    )
    return {"results": [models.memory_of(record) for record in records], "next": following}


@router.delete("/memories", response_model=models.Deleted, responses=documented(401, 403, 409, 422, 507))
def erase_scope(asked: Annotated[models.ErasedScope, Query()], memory: Open, caller: Writer) -> dict[str, int]:
    """Erase every memory of exactly this user, agent and run for good, with the history."""
    if asked.user_id is None and caller.user is None:
        raise Problem(422, "user_id is missing; expected whose memories to erase")
    scope = scope_of(caller, asked.user_id, asked.agent_id, asked.run_id)
    return {"deleted": memory.delete_all(**asdict(scope), below=asked.below)}


@router.get("/memories/{id}", response_model=models.MemoryOut, responses=documented(401, 403, 404, 422))
def get(id: Id, asked: Annotated[models.Owner, Query()], memory: Open, caller: Reader) -> dict[str, Any]:
    """Get a memory."""
    return models.memory_of(find_record(memory, caller, id, asked.user_id))


@router.put("/memories/{id}", response_model=models.MemoryOut, responses=documented(
    400, 401, 403, 404, 409, 415, 422, 507
))  # fmt: skip
def update(
    id: Id,
    asked: Annotated[models.Owner, Query()],
    body: models.Update,
    request: Request,
    memory: Open,
    caller: Writer,
) -> dict[str, Any]:
    """Replace the text or the metadata of a memory."""
    caller.require("read")  # the answer has what was there before
    if body.text is not None:
        check_sizes(request.app.state.settings.limits, [body.text])
    record = find_record(memory, caller, id, asked.user_id)
    return models.memory_of(memory.update(id, body.text, body.metadata, user=record.user, keep_old=body.keep_old))


@router.delete("/memories/{id}", response_model=models.Deleted, responses=documented(401, 403, 404, 409, 422, 507))
def erase(id: Id, asked: Annotated[models.Owner, Query()], memory: Open, caller: Writer) -> dict[str, int]:
    """Erase a memory for good."""
    record = find_record(memory, caller, id, asked.user_id)
    return {"deleted": memory.delete(id, user=record.user)}


@router.get("/memories/{id}/history", response_model=models.History, responses=documented(401, 403, 404, 422))
def history(id: Id, asked: Annotated[models.Owner, Query()], memory: Open, caller: Reader) -> dict[str, Any]:
    """List what happened to a memory and to those that it replaced; texts that were erased are null."""
    scope = scope_of(caller, asked.user_id)
    if caller.agent is not None:  # the history does not say whose it is
        find_record(memory, caller, id, asked.user_id)
    events = memory.history(id, user=scope.user)
    if not events:
        raise unknown(id, scope.user)
    return {"results": [models.event_of(event) for event in events]}


@router.post("/search", response_model=models.FoundList, responses=documented(400, 401, 403, 415, 422))
def search(body: models.Query, request: Request, memory: Open, caller: Reader) -> dict[str, Any]:
    """Find the memories that match a question best, each with the parts of its score."""
    scope = scope_of(caller, body.user_id, body.agent_id, body.run_id)
    check_sizes(request.app.state.settings.limits, [body.query])
    found = memory.search(body.query, **asdict(scope), filters=body.filters, limit=body.limit, threshold=body.threshold)
    request.app.state.metrics.count("titans_searches_total")
    results = [models.found_of(hit) for hit in found]
    return {"results": results, "below": found.below, "ignored": list(found.ignored)}


@router.post("/surprise", response_model=models.SurpriseParts, responses=documented(400, 401, 403, 415, 422))
def surprise(body: models.Statement, request: Request, memory: Open, caller: Reader) -> dict[str, Any]:
    """Say what is surprising about a text to exactly this user, agent and run, without writing it."""
    scope = scope_of(caller, body.user_id, body.agent_id, body.run_id)
    check_sizes(request.app.state.settings.limits, [body.text])
    return asdict(memory.surprise(body.text, **asdict(scope)))


@router.get("/state", response_model=models.NeuralState, responses=documented(401, 403, 422))
def state(asked: Annotated[models.ScopeParameters, Query()], memory: Open, caller: Reader) -> dict[str, Any]:
    """Describe the neural memory of exactly this user, agent and run."""
    kept = memory.scope_memory(**asdict(scope_of(caller, asked.user_id, asked.agent_id, asked.run_id)))
    now, config = memory.neural.current(kept), memory.neural.config
    layers = [
        {
            "shape": list(weights.shape[-2:]), "norm": float(weights.norm()),
            "learned": float((weights - start).norm()), "momentum": float(momentum.norm()),
        }
        for weights, momentum, start in zip(now.weights, now.momentum, memory.neural.initial, strict=True)
    ]  # fmt: skip
    rule = {name: getattr(config, name) for name in ("chunk_size", "theta", "eta", "alpha")}
    return {"texts": kept.count, "open": len(kept.open), **rule, "layers": layers}


@router.get("/stats", response_model=models.Stats, responses=documented(401, 403, 422))
def stats(asked: Annotated[models.Owner, Query()], memory: Open, caller: Reader) -> dict[str, Any]:
    """Count the memories of a user or, for a caller who is bound to none, of the whole store."""
    user, agent = bounds_of(caller, asked.user_id, None)
    scopes = [(scope, count) for scope, count in memory.scopes(user) if agent in (None, scope.agent)]
    by_scope = [
        {"user_id": scope.user, "agent_id": scope.agent, "run_id": scope.session, "records": count}
        for scope, count in scopes
    ]
    # The other figures are of all agents.
    figures = memory.stats(user) if agent is None else {"records": sum(count for _, count in scopes)}
    figures |= {"scopes": len(scopes), "by_scope": by_scope}
    return {name: figures.get(name) for name in models.Stats.model_fields}


@router.post("/export", response_class=StreamingResponse, responses={
    **documented(400, 401, 403, 415, 422),
    200: _text("One memory per line, in the order in which they were written.", LINES, LINE),
})  # fmt: skip
def export(body: models.Selection, memory: Open, caller: Reader) -> StreamingResponse:
    """Stream all memories of a user, or of the whole store, as JSON lines that an import takes."""
    user, agent = bounds_of(caller, body.user_id, body.agent_id)

    def lines() -> Iterator[bytes]:
        cursor: str | None = "0"
        while cursor is not None:
            records, cursor = memory.export_page(user, AT_A_TIME, cursor)
            yield "".join(
                json.dumps(record.to_dict(), ensure_ascii=False) + "\n"
                for record in records
                if agent in (None, record.agent) and body.run_id in (None, record.session)
            ).encode()

    return StreamingResponse(lines(), media_type=LINES)


@router.post("/import", response_model=models.Imported, responses=documented(400, 401, 403, 409, 422, 507),
             openapi_extra={"requestBody": {"required": True, **_text("JSON lines.", LINES, LINE)}})  # fmt: skip
async def import_(request: Request, memory: Open, caller: Writer) -> dict[str, int]:
    """Add the memories of JSON lines, as an export writes them; those that are there already are skipped.

    A server that stops in between has added some of them; sent again, the rest is added.
    """
    limits: Limits = request.app.state.settings.limits
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as file:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limits.import_bytes:
                raise too_large(limits.import_bytes)
            await run_sync(file.write, part)
        if not size:
            raise Problem(422, "the body is empty; expected a memory per line, as JSON")
        file.seek(0)
        return {"imported": await run_sync(_import, memory, caller, limits, file, request.state)}


def _import(memory: Memory, caller: Caller, limits: Limits, file: IO[bytes], state: State) -> int:
    def stop_with_server(done: int, total: int, doing: str = "") -> None:
        if done < total and getattr(state, "stopping", False):
            detail = f"the server is stopping; {done:,} memories were imported, and sending all again adds the rest"
            raise Problem(503, detail, {"Retry-After": "5"})

    defaults = {"user": caller.user, "agent": caller.agent}

    def allowed() -> Iterator[tuple[int, Record, bool]]:
        for number, record, has_id in parse_records(_lines(file), "the body", defaults):
            try:
                bounds_of(caller, record.user, record.agent)
                check_sizes(limits, [record.text])
            except Problem as problem:
                raise Problem(problem.status_code, f"the body, line {number}: {problem.detail}") from None
            stop_with_server(0, number)
            yield number, record, has_id

    def is_visible(record: Record) -> bool:
        return caller.user in (None, record.user) and caller.agent in (None, record.agent)

    return memory.import_records(allowed(), "the body", stop_with_server, is_visible=is_visible)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise Problem(413, f"a line of the body is too long; expected at most {LONGEST_LINE:,} bytes")
        yield line


@public.get("/healthz", response_model=models.Status, responses=documented())
async def healthz() -> dict[str, str]:
    """Say that the server runs."""
    return {"status": "ok"}


@public.get("/readyz", response_model=models.Status, responses=documented())
def readyz(memory: Open) -> dict[str, str]:
    """Say that the store can be read."""
    memory.scopes("")
    return {"status": "ok"}


@public.get("/metrics", response_class=Response, dependencies=DESCRIBED, responses={
    **documented(401, 403), 200: _text("For Prometheus.", "text/plain", 'titans_searches_total{pid="42"} 7'),
})  # fmt: skip
async def render_metrics(request: Request) -> Response:
    """Count requests, writes, searches and the encoder's work, for Prometheus."""
    caller = (await identify(request.app.state, request.headers)).require("read")
    if caller.user is not None or caller.agent is not None:
        raise Problem(403, "this key is bound to a user or an agent; the figures are of all")
    return Response(request.app.state.metrics.render(), media_type=metrics.MEDIA_TYPE)


def find_record(memory: Memory, caller: Caller, id: str, user_id: str | None) -> Record:
    """A record that the caller may see."""
    scope = scope_of(caller, user_id)
    record = memory.get(id, user=scope.user)
    if record is None or not scope.covers(record.scope):
        raise unknown(id, scope.user)
    return record


def unknown(id: str, user: str) -> UnknownRecord:
    """Of a record that is not there, or not for this caller."""
    return UnknownRecord(f"there is no memory {id!r} of user {user!r}")


def check_sizes(limits: Limits, texts: Sequence[str]) -> None:
    """Raises a problem if there are too many texts, or one is too long."""
    if len(texts) > limits.texts:
        raise Problem(413, f"there are {len(texts):,} texts; expected at most {limits.texts:,}")
    longest = max(len(text.encode("utf-8", "replace")) for text in texts)
    if longest > limits.text_bytes:
        raise Problem(
            413, f"a text has {longest:,} bytes; expected at most {limits.text_bytes:,}, so cut it into parts"
        )


def _read_filters(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        raise Problem(422, 'filters is not valid JSON; expected an object such as {"topic": "food"}') from None
