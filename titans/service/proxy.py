"""The memory for clients of chat endpoints: it recalls, asks the endpoint, passes its answer on, and keeps both."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import quote

import anyio
import httpx
from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers, State
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from titans.service.access import Caller, identify, scope_of_headers
from titans.service.local import TEXT_ONLY, LocalModel, list_models, read_request
from titans.service.problems import Problem, to_problem
from titans.service.rest import check_sizes
from titans.service.settings import Settings
from titans.text.chat import CANDIDATES, printable
from titans.text.llm import LLM, estimate_tokens
from titans.text.prompt import RULE, Layout, Prompt, build_prompt
from titans.text.records import Hit, Record, Scope

CONNECT_SECONDS = 10  # until the upstream has to accept a connection
MEMORY_SECONDS = 5  # until a request goes on without the memory
LONGEST_HEADER = 4_000  # characters
MODES = ("on", "read-only", "off")
MOST_MESSAGES = 10_000  # of a chat, with their parts
GONE = 499  # the status of a request whose client went away, in the figures
EVENT_END = re.compile(rb"\n\n|[\r\n]\r\n?")  # an empty line, whichever way lines end
LINE_END = re.compile(rb"\r\n|\n|\r")
BEFORE = Layout(question=f"{RULE}\n\n{{}}")  # memories, what they are, and then the message
SENT_ON = re.compile(r"accept|user-agent|idempotency-key|http-referer|x-title|(openai|anthropic|x-stainless)-.*")
PASSED_BACK = re.compile(
    r"content-type|retry-after(-ms)?|x-should-retry|(x-)?request-id|(openai|anthropic|x-ratelimit)-.*"
)
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
log = logging.getLogger("titans.service")


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    timeout = httpx.Timeout(settings.upstream_seconds, connect=CONNECT_SECONDS, pool=None)
    connections = httpx.Limits(max_connections=None, max_keepalive_connections=settings.limits.concurrency)
    app.state.local = LocalModel()
    async with httpx.AsyncClient(
        timeout=timeout,
        limits=connections,
        headers={"Accept-Encoding": "identity"},  # what is not compressed can be passed on as it comes
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # one caller's would go out with another's request
    ) as app.state.upstream:
        yield
    app.state.local.close()


router = APIRouter(lifespan=_lifespan, include_in_schema=False)  # others describe these interfaces


class Dialect(NamedTuple):
    """What differs between the chat interfaces: the route, the header of a key, and where an answer has its text."""

    path: str
    key: Callable[[str], dict[str, str]]
    find_text: Callable[[Any], str]
    error_event: bytes


def _openai_text(data: Any) -> str:
    first = _first_choice(data["choices"])
    return "".join(_text_of((choice.get("delta") or choice.get("message") or {}).get("content")) for choice in first)


def _first_choice(choices: Sequence[Any]) -> Iterator[Any]:
    """Of several answers that a request may ask for, the first: one choice, or none in this part of a stream."""
    return (choice for choice in choices if choice.get("index", 0) == 0)


def _anthropic_text(data: Any) -> str:
    return _text_of(data["content"] if data["type"] == "message" else data["delta"]["text"])


def _text_of(content: Any) -> str:
    """The text of a message's content, which may have several parts, some of them not texts."""
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""


OPENAI = Dialect("/chat/completions", lambda key: {"Authorization": f"Bearer {key}"}, _openai_text, b"data: ")
ANTHROPIC = Dialect("/messages", lambda key: {"X-API-Key": key}, _anthropic_text, b"event: error\ndata: ")


class Said(NamedTuple):
    """What the memory does with the messages of a request.

    Attributes:
        place: of the user's last message among them; None if there is none with a text.
        text: of that message.
        is_new: it is the last of all, and not one before the results of tools.
    """

    place: int | None = None
    text: str = ""
    is_new: bool = False


class Recalled(NamedTuple):
    """A prompt with the memories that fit, how surprising the message was, and why the memory failed if it did."""

    prompt: Prompt
    surprise: float | None = None
    failure: str | None = None


@dataclass
class Recollection:
    """What the memory does for one request; whatever fails of it is noted, and the request goes on.

    Attributes:
        scope: whose memories; None: the memory is off.
        reads, writes: what the caller may do, and wants.
        name: that the client gave to the request, and gives again if it repeats it; None: it gave none.
        headers: what the answer says about it.
    """

    state: State
    scope: Scope | None
    reads: bool
    writes: bool
    name: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    async def recall(self, said: Said, choose: Callable[[Sequence[Hit]], Prompt]) -> Prompt:
        """The prompt that ``choose`` makes of what was found for a message, which is then stored."""
        if self.scope is None:
            self.headers["X-Memory-Status"] = "off"
            return await run_sync(choose, ())
        try:
            # Not interrupted: a store that is late still gets the message.
            with anyio.fail_after(MEMORY_SECONDS, shield=True):
                recalled = await run_sync(self._recall, said, choose, abandon_on_cancel=True)
        except TimeoutError:
            recalled = Recalled(await run_sync(choose, ()), None, "the memory does not answer in time")
        self._note(recalled.failure)
        if recalled.surprise is not None:
            self.headers["X-Memory-Surprise"] = f"{recalled.surprise:.4f}"
        if recalled.prompt.used:
            self.headers["X-Memory-Ids"] = _join(hit.record.id for hit in recalled.prompt.used)
        return recalled.prompt

    async def keep(self, answer: str, model: Any, whole: bool) -> None:
        """Stores an answer, or as much of one as there is."""
        answer = printable(answer).strip()
        if not self.writes or not answer:
            return
        metadata: dict[str, Any] = {"model": printable(model)[:200]} if isinstance(model, str) else {}
        failures: list[str] = []

        def store() -> None:
            with _noting(failures):
                self._store(answer, "assistant", metadata if whole else {**metadata, "stopped": True})

        try:
            with anyio.fail_after(MEMORY_SECONDS, shield=True):
                await run_sync(store, abandon_on_cancel=True)
        except TimeoutError:
            failures.append("the memory does not answer in time")
        if failures:
            log.warning("an answer was not remembered: %s", failures[0])
            self._note(failures[0])

    def _recall(self, said: Said, choose: Callable[[Sequence[Hit]], Prompt]) -> Recalled:
        memory, scope = self.state.memory, self.scope
        assert scope is not None
        hits: list[Hit] = []
        failures: list[str] = []
        record = None
        if said.text and self.reads:
            with _noting(failures):
                check_sizes(self.state.settings.limits, [said.text])
                hits = memory.search(said.text, **asdict(scope), limit=CANDIDATES, count_uses=False).hits
                self.state.metrics.count("titans_searches_total")
        prompt = choose(hits)
        with _noting(failures):
            memory.use([hit.record.id for hit in prompt.used], user=scope.user)
        if said.is_new and self.writes:
            with _noting(failures):
                record = self._store(said.text, "user")
        return Recalled(prompt, None if record is None else record.surprise, failures[0] if failures else None)

    def _store(self, text: str, role: str, metadata: dict[str, Any] | None = None) -> Record:
        assert self.scope is not None
        check_sizes(self.state.settings.limits, [text])
        # Another answer to the same request is another write.
        write = repr((self.name, self.scope, role, text, metadata)).encode("utf-8", "surrogatepass")
        name = None if self.name is None else hashlib.sha256(write).hexdigest()
        record: Record = self.state.memory.add(text, **asdict(self.scope), role=role, metadata=metadata, request=name)
        self.state.metrics.count("titans_texts_written_total")
        return record

    def _note(self, failure: str | None) -> None:
        self.headers.setdefault("X-Memory-Status", "ok")
        if failure is not None:
            self.headers["X-Memory-Status"] = f"failed: {failure}"


@contextmanager
def _noting(failures: list[str]) -> Iterator[None]:
    """Notes why something fails, in words that are safe in a header and quote no text."""
    try:
        yield
    except Exception as error:
        problem = to_problem(error)
        reason = "the message cannot be remembered" if problem.status_code == 422 else problem.detail
        failures.append(re.sub(r"[^ -~]", "?", reason))


def _join(ids: Iterator[str]) -> str:
    """Ids for a header: an import may have brought any characters."""
    joined = ",".join(quote(id, safe="") for id in ids)
    return joined if len(joined) <= LONGEST_HEADER else joined[:LONGEST_HEADER].rpartition(",")[0]


class Reply(NamedTuple):
    """What an upstream, or the local model, answers."""

    status: int
    headers: dict[str, str]
    parts: AsyncGenerator[bytes, None]
    close: Callable[[], Awaitable[None]]


class Relay(StreamingResponse):
    """The answer as a stream, which ends with its client: what came until then is kept, and the upstream let go."""

    def __init__(self, reply: Reply, content: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(content, reply.status, headers)
        self._content, self._reply = content, reply

    async def stream_response(self, send: Send) -> None:
        """Sends it."""
        async with aclosing(self._content):
            await super().stream_response(send)

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Answers, even a client that is gone before the stream has begun."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._reply.close()


@router.post("/v1/chat/completions")
async def complete(request: Request) -> Response:
    """Answers a chat, with the memories of the user."""
    return await _in_shape(_chat(request, OPENAI))


@router.post("/v1/messages")
async def message(request: Request) -> Response:
    """The same for clients of Anthropic's interface."""
    return await _in_shape(_chat(request, ANTHROPIC))


@router.get("/v1/models")
@router.get("/v1/models/{model:path}")
async def models(request: Request, model: str = "") -> Response:
    """Lists the models, or describes one."""
    return await _in_shape(_models(request, model))


async def _in_shape(answer: Awaitable[Response]) -> Response:
    """An answer; an error in the shape that clients of chat endpoints read."""
    try:
        return await answer
    except Exception as error:
        problem = to_problem(error)
        return JSONResponse(_error(problem), problem.status_code, problem.headers)


def _error(problem: Problem) -> dict[str, Any]:
    """An error for clients of OpenAI and of Anthropic."""
    status = problem.status_code
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = problem.to_dict()["detail"]
    return {"type": "error", "error": {"message": detail, "type": kind, "param": None, "code": None}}


async def _models(request: Request, model: str) -> Response:
    state = request.app.state
    caller = await identify(state, request.headers)
    if model and not {"", ".", ".."}.isdisjoint(model.split("/")):
        raise _unknown_model()
    if state.settings.upstream is not None:
        path = "/models" + (f"/{quote(model)}" if model else "")
        reply = await _ask(request, caller, path, OPENAI)
        return Response(await _read(reply.parts), reply.status, reply.headers)
    found = list_models(await state.local.load())
    if model and model != found["data"][0]["id"]:
        raise _unknown_model()
    return JSONResponse(found["data"][0] if model else found)


def _unknown_model() -> Problem:
    return Problem(404, "there is no such model; GET /v1/models lists those there are")


async def _chat(request: Request, dialect: Dialect) -> Response:
    state = request.app.state
    caller = await identify(state, request.headers)
    memory = _open(state, caller, request.headers)
    raw = await request.body()
    return await _while_there(request, _in_shape(_answer(request, dialect, caller, memory, raw)))


async def _while_there(request: Request, answer: Awaitable[Response]) -> Response:
    """An answer, which is given up if the client goes away before it begins; the body has been read."""
    response = Response(status_code=GONE)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        response = await answer
        group.cancel_scope.cancel()
    return response


async def _answer(request: Request, dialect: Dialect, caller: Caller, memory: Recollection, raw: bytes) -> Response:
    state = request.app.state
    # Not in the event loop: others would wait until a long chat is read.
    body, said = await run_sync(_parse, raw)
    messages = body["messages"]
    if state.settings.upstream is not None:

        def choose(hits: Sequence[Hit]) -> Prompt:
            known = {_bare(_text_of(item.get("content"))) for item in messages} if hits else ()
            new = [hit for hit in hits if _bare(hit.record.text) not in known]
            return build_prompt("", new, count_tokens=estimate_tokens, budget=state.settings.budget, layout=BEFORE)

        prompt = await memory.recall(said, choose)
        if prompt.used:
            assert said.place is not None
            body["messages"] = _insert(messages, said.place, prompt.messages[-1]["content"])
            raw = await run_sync(lambda: json.dumps(body).encode())
        model = body.get("model")
        reply = await _ask(request, caller, dialect.path, dialect, raw, memory.headers)
    elif dialect is OPENAI:
        llm: LLM = await state.local.load()
        model, asked = llm.name, read_request(body, llm.context)
        fill = await run_sync(_for_local, llm, messages, said, state.settings.budget, asked.max_tokens)
        prompt = await memory.recall(said, fill)
        kind = "text/event-stream" if asked.stream else "application/json"
        parts = state.local.answer(prompt.messages, asked)
        reply = Reply(200, {"Content-Type": kind}, parts, parts.aclose)
    else:
        raise Problem(501, "the local model answers /v1/chat/completions only; expected a server with --upstream")
    return await _pass_on(reply, dialect, memory, model)


async def _pass_on(reply: Reply, dialect: Dialect, memory: Recollection, model: Any) -> Response:
    """The answer to the client, which the memory keeps: of a stream after its last word, and before its end."""
    if reply.headers.get("Content-Type", "").startswith("text/event-stream") and reply.status < 400:
        headers = {**reply.headers, **memory.headers, "X-Accel-Buffering": "no"}
        return Relay(reply, _relay(reply.parts, dialect, memory, model), headers)
    try:
        content = await _read(reply.parts)
    except Problem as problem:
        problem.headers = {**(problem.headers or {}), **memory.headers}
        raise
    if reply.status < 400:
        await memory.keep(_read_text(content, dialect), model, True)
    return Response(content, reply.status, {**reply.headers, **memory.headers})


async def _relay(
    parts: AsyncGenerator[bytes, None], dialect: Dialect, memory: Recollection, model: Any
) -> AsyncGenerator[bytes, None]:
    """The events of a stream as they come."""
    said: list[str] = []
    complete = failed = kept = False

    async def keep() -> None:
        nonlocal kept
        if not kept:
            kept = True
            await memory.keep("".join(said), model, complete and not failed)

    try:
        async with aclosing(_events(parts)) as batches:
            async for events in batches:
                ready: list[bytes] = []
                for event in events:
                    heard = _read_event(event, dialect)
                    said.append(heard.text)
                    complete, failed = complete or heard.is_complete, failed or heard.is_error
                    if heard.is_last:
                        if ready:
                            yield b"".join(ready)
                        ready = []
                        await keep()
                    ready.append(event)
                yield b"".join(ready)
    except Problem as problem:
        await keep()
        yield b"\n\n" + dialect.error_event + json.dumps(_error(problem)).encode() + b"\n\n"
    finally:
        await keep()


async def _events(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[list[bytes], None]:
    """The complete events of each part: half of one, if the stream breaks off, would only confuse a client."""
    held = b""
    async with aclosing(parts):
        async for part in parts:
            known = max(0, len(held) - 2)  # before this, no event ends
            held += part
            ends = [0, *(found.end() for found in EVENT_END.finditer(held, known))]
            if len(ends) > 1:
                yield [held[start:end] for start, end in pairwise(ends)]
                held = held[ends[-1] :]
    if held:
        yield [held]


class Heard(NamedTuple):
    """What one event of a stream says.

    Attributes:
        text: of the answer.
        is_complete: the answer is, after this.
        is_last: nothing more is said at all.
        is_error: the answer failed.
    """

    text: str = ""
    is_complete: bool = False
    is_last: bool = False
    is_error: bool = False


def _read_event(event: bytes, dialect: Dialect) -> Heard:
    fields = [line.partition(b":") for line in LINE_END.split(event)]
    data = b"\n".join(value.removeprefix(b" ") for name, _, value in fields if name == b"data")
    if data.strip() == b"[DONE]":
        return Heard(is_complete=True, is_last=True)
    with suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        said = json.loads(data)
        if said.get("error") or "error" in (said.get("type"), said.get("object")):
            return Heard(is_error=True)
        if said.get("type") == "message_stop":
            return Heard(is_complete=True, is_last=True)
        finished = any(choice.get("finish_reason") for choice in _first_choice(said.get("choices", ())))
        return Heard(_read_text(data, dialect), finished)
    return Heard()


def _read_text(data: bytes, dialect: Dialect) -> str:
    """The text of an answer or of a part of one; "" if there is none."""
    with suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return dialect.find_text(json.loads(data))
    return ""


async def _read(parts: AsyncGenerator[bytes, None]) -> bytes:
    async with aclosing(parts):
        return b"".join([part async for part in parts])


async def _ask(
    request: Request,
    caller: Caller,
    path: str,
    dialect: Dialect,
    content: bytes | None = None,
    on_error: Mapping[str, str] | None = None,
) -> Reply:
    """Sends a request to the upstream."""
    state = request.app.state
    settings: Settings = state.settings
    given = {name.decode("latin-1"): value for name, value in request.headers.raw}
    headers = {name: value for name, value in given.items() if SENT_ON.fullmatch(name)}
    if content is not None:
        headers["content-type"] = b"application/json"
    if settings.upstream_key is not None:
        headers |= {name: value.encode() for name, value in dialect.key(settings.upstream_key).items()}
    elif not caller.name:  # a key of this server is for nobody else
        headers |= {name: given[name] for name in ("authorization", "x-api-key") if name in given}
    made = [(name.encode("latin-1"), value) for name, value in headers.items()]
    url = f"{(settings.upstream or '').rstrip('/')}{path}"
    if request.url.query:
        url += f"?{request.url.query}"
    client: httpx.AsyncClient = state.upstream
    with _upstream_problems(on_error):
        sent = client.build_request(request.method, url, headers=made, content=content)
        response = await client.send(sent, stream=True)
    passed = {
        name.title(): value
        for name, value in response.headers.items()
        if PASSED_BACK.fullmatch(name) and value.isascii()
    }
    return Reply(response.status_code, passed, _parts(response), response.aclose)


async def _parts(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        with _upstream_problems():
            async for part in response.aiter_bytes():
                yield part
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()


@contextmanager
def _upstream_problems(headers: Mapping[str, str] | None = None) -> Iterator[None]:
    """An upstream that is away, slow or breaks off is a problem of one sentence."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise Problem(504, "the upstream does not answer in time", headers) from error
    except httpx.ConnectError as error:
        raise Problem(502, "the upstream cannot be reached", headers) from error
    except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
        raise Problem(502, "the request cannot be sent to the upstream as it is", headers) from error
    except httpx.HTTPError as error:
        raise Problem(502, "the upstream broke off", headers) from error


def _open(state: State, caller: Caller, headers: Headers) -> Recollection:
    """What the memory may do for a request: the headers say whose it is, within what the key is bound to."""
    mode = headers.get("x-memory", "on").strip().lower()
    if mode not in MODES:
        raise Problem(400, f"X-Memory is {mode[:20]!a}; expected {', '.join(MODES[:-1])} or {MODES[-1]}")
    if mode == "off":
        return Recollection(state, None, False, False)
    writes = mode == "on" and "write" in caller.rights
    scope = scope_of_headers(caller, headers)
    return Recollection(state, scope, "read" in caller.rights, writes, headers.get("idempotency-key"))


def _parse(raw: bytes) -> tuple[dict[str, Any], Said]:
    """The body of a request, and what the user says in it."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        body = json.loads(raw, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Problem(400, "the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise Problem(400, "the body is no object; expected one with messages")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Problem(400, "messages is missing; expected a list of at least one")
    many = 0
    for item in messages:
        content = item.get("content") if isinstance(item, dict) else 0
        parts = content if isinstance(content, list) else []
        if not (content is None or isinstance(content, (str, list))) or not all(
            isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts
        ):
            raise Problem(400, "a message cannot be read; expected a role, and a content that is a text or parts")
        many += 1 + len(parts)
    if many > MOST_MESSAGES:
        raise Problem(413, f"there are {many:,} messages and parts; expected at most {MOST_MESSAGES:,}")
    return body, _last_said(messages)


def _last_said(messages: Sequence[Mapping[str, Any]]) -> Said:
    """What the user said last; results of tools, which one interface has the user say, are not said by anybody."""
    for place in range(len(messages) - 1, -1, -1):
        item = messages[place]
        content = item.get("content")
        results = isinstance(content, list) and any(part.get("type") == "tool_result" for part in content)
        text = printable(_text_of(content)).strip()
        if item.get("role") == "user" and text and not results:
            return Said(place, text, place == len(messages) - 1)
    return Said()


def _insert(messages: Sequence[Mapping[str, Any]], place: int, memories: str) -> list[Mapping[str, Any]]:
    """The messages with the memories at the head of one of them, and everything else as it was."""
    content = messages[place]["content"]
    if isinstance(content, str):
        content = memories + content
    else:
        content = [{"type": "text", "text": memories.rstrip()}, *content]
    return [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]]


def _for_local(
    llm: LLM, messages: Sequence[Mapping[str, Any]], said: Said, budget: int, max_tokens: int
) -> Callable[[Sequence[Hit]], Prompt]:
    """Makes the prompt of the local model, which knows one system's text and the words of a conversation."""
    contents = [item["content"] for item in messages if isinstance(item.get("content"), list)]
    if any(part.get("type") != "text" for parts in contents for part in parts):
        raise Problem(400, TEXT_ONLY.format("images"))
    if not said.is_new:
        raise Problem(400, "the last message is not a text of the user; expected one for the local model")
    texts = [(item.get("role"), _text_of(item.get("content"))) for item in messages[: said.place]]
    system = "\n\n".join(text for role, text in texts if role in ("system", "developer"))
    history = [{"role": str(role), "content": text} for role, text in texts if role in ("user", "assistant") and text]

    def choose(hits: Sequence[Hit]) -> Prompt:
        return build_prompt(
            said.text, hits, count_tokens=llm.count_tokens, system=system or None, history=history, budget=budget,
            room=llm.context - max_tokens, layout=llm.layout, specials=llm.specials,
        )  # fmt: skip

    return choose


def _bare(text: str) -> str:
    """The text without case and spacing, to tell whether two messages say the same."""
    return " ".join(text.casefold().split())
