"""The memory for MCP clients, over stdio and HTTP: tools and resources within one scope, which no model can change."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import anyio
import mcp_types as types
from anyio import to_thread
from fastapi import APIRouter, FastAPI, Request
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel, Field, ValidationError
from pydantic.json_schema import JsonSchemaMode
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from titans import __version__
from titans.service.access import Caller, Right, identify, scope_of_headers
from titans.service.models import (
    Deleted,
    FoundList,
    Input,
    MemoryOut,
    MemoryPage,
    Name,
    Text,
    Written,
    as_sent,
    found_of,
    memory_of,
    written_of,
)
from titans.service.problems import Problem, to_problem
from titans.text.records import Record, Scope, UnknownRecord

if TYPE_CHECKING:
    from titans.text.memory import Memory  # at run time only with an open memory: it needs torch

SCHEME = "memory://"  # of the resources
INSTRUCTIONS = (
    "A long-term memory of one user. Search it when an answer may depend on what was said before; add what is worth "
    "knowing in a later conversation, one fact per memory, in full sentences."
)
LISTED = 100  # resources on a page
NAMED = 60  # characters of a resource's name
COUNTERS = {"add_memory": "titans_texts_written_total", "search_memories": "titans_searches_total"}
T = TypeVar("T")
Context = ServerRequestContext[Any, Request]
Result = tuple[str, dict[str, Any]]  # the text for the model, and the same for programs
Run = Callable[["Memory", Scope, Any], Result]


@dataclass(frozen=True)
class View:
    """What one client may see of a memory.

    Attributes:
        scope: all that it reads, and where it writes.
        caller: whose rights it has.
        use: the memory, open as long as it is used.
        watch: around every call of a tool, by its name and arguments: refuses and counts.
    """

    scope: Scope
    caller: Caller
    use: Callable[[], AbstractContextManager[Memory]]
    watch: Callable[[str, Input], AbstractContextManager[None]] = lambda name, given: nullcontext()

    async def run(self, rights: Sequence[Right], act: Callable[[Memory, Scope], T]) -> T:
        """What a function makes of the memory, in a thread, if the client has the rights to it."""
        for right in rights:
            self.caller.require(right)

        def run() -> T:
            with self.use() as memory:
                return act(memory, self.scope)

        return await to_thread.run_sync(run)


class Tool(NamedTuple):
    """A tool as it is offered, the form of its arguments, the rights that it needs, and what it does."""

    offer: types.Tool
    arguments: type[Input]
    rights: tuple[Right, ...]
    run: Run


TOOLS: dict[str, Tool] = {}


class AddMemory(Input):
    """What is to be remembered."""

    text: Text = Field(description="One fact in a full sentence, such as: Ada's piano lesson is on Tuesday at five.")
    metadata: dict[str, Any] | None = Field(
        None, description='Names and values to filter by, such as {"topic": "music"}.'
    )


class SearchMemories(Input):
    """A question."""

    query: Text = Field(description="A question or words, such as: When is the piano lesson?")
    limit: int = Field(10, ge=1, le=100, description="The largest number of memories.")
    filters: dict[str, Any] | None = Field(
        None, description='Only memories with this metadata: {"topic": "music"} or {"year": {"gte": 2020}}.'
    )
    threshold: float | None = Field(
        None, ge=-1, le=1, allow_inf_nan=False, description="Leave out what is less alike, such as 0.2."
    )


class GetMemories(Input):
    """A page."""

    limit: int = Field(20, ge=1, le=100, description="The largest number of memories.")
    cursor: str | None = Field(None, description="Where to go on: what the page before gave as next.")
    filters: dict[str, Any] | None = Field(None, description='Only memories with this metadata: {"topic": "music"}.')


class OneMemory(Input):
    """Which one."""

    id: Name = Field(description="Id of the memory.")


class UpdateMemory(OneMemory):
    """What it is to be."""

    text: Text | None = Field(None, description="The new text.")
    metadata: dict[str, Any] | None = Field(None, description="The new metadata, instead of the old.")


class Nothing(Input):
    """No arguments."""


class Stats(BaseModel):
    """How much is remembered."""

    memories: int = Field(description="Of this scope and below it.")
    scopes: list[dict[str, Any]] = Field(description="How many of each agent and session.")


def tool(
    arguments: type[Input], result: type[BaseModel], *rights: Right, destructive: bool = False
) -> Callable[[Run], Run]:
    """Offers a function as a tool: its name and its docstring are what the model sees."""

    def offer(run: Run) -> Run:
        offered = types.Tool(
            name=run.__name__,
            title=run.__name__.replace("_", " ").capitalize(),
            description=" ".join((run.__doc__ or "").split()),
            input_schema=_schema(arguments),
            output_schema=_schema(result, "serialization"),
            annotations=types.ToolAnnotations(
                read_only_hint="write" not in rights, destructive_hint=destructive, open_world_hint=False
            ),
        )
        TOOLS[run.__name__] = Tool(offered, arguments, rights, run)
        return run

    return offer


def _schema(model: type[BaseModel], mode: JsonSchemaMode = "validation") -> dict[str, Any]:
    made = model.model_json_schema(mode=mode)
    for each in (made, *made.get("$defs", {}).values()):  # what programs do not need only costs a model's tokens
        for name in ("title", "description", "examples"):
            each.pop(name, None)
    return made


@tool(AddMemory, Written, "write")
def add_memory(memory: Memory, scope: Scope, given: AddMemory) -> Result:
    """Remember a fact for later conversations. The same fact again is counted, not stored twice."""
    record = memory.add(given.text, **asdict(scope), metadata=given.metadata)
    text = f"Known already, told {record.repeats + 1} times" if record.repeats else "Remembered"
    return f"{text}: {_line(record)}", written_of([record])[0]


@tool(SearchMemories, FoundList, "read")
def search_memories(memory: Memory, scope: Scope, given: SearchMemories) -> Result:
    """Find the memories that answer a question, best first. Of a fact that changed, the newest version counts."""
    found = memory.search(
        given.query, **asdict(scope), limit=given.limit, filters=given.filters, threshold=given.threshold
    )
    lines = [_line(hit.record) + (f" (replaced by {hit.replaced_by})" if hit.replaced_by else "") for hit in found]
    text = "\n".join(lines) or "Nothing found."
    if found.below:
        text += f"\n{found.below} more were below the threshold."
    results = [found_of(hit) for hit in found]
    return text, {"results": results, "below": found.below, "ignored": list(found.ignored)}


@tool(GetMemories, MemoryPage, "read")
def get_memories(memory: Memory, scope: Scope, given: GetMemories) -> Result:
    """List memories, newest first, in pages. To find something, search instead."""
    records, following = memory.page(**asdict(scope), limit=given.limit, filters=given.filters, cursor=given.cursor)
    text = "\n".join(map(_line, records)) or "Nothing is remembered."
    if following is not None:
        text += f"\nThere are more: go on with the cursor {following}."
    return text, {"results": [memory_of(record) for record in records], "next": following}


@tool(OneMemory, MemoryOut, "read")
def get_memory(memory: Memory, scope: Scope, given: OneMemory) -> Result:
    """Read one memory by its id, with its metadata, when it was told and how often."""
    record = _find(memory, scope, given.id)
    return json.dumps(memory_of(record), ensure_ascii=False), memory_of(record)


@tool(UpdateMemory, MemoryOut, "read", "write", destructive=True)  # the answer has what was there before
def update_memory(memory: Memory, scope: Scope, given: UpdateMemory) -> Result:
    """Correct a memory. The old text is erased; for a fact that has changed since, add a new memory instead."""
    _find(memory, scope, given.id)
    record = memory.update(given.id, given.text, given.metadata, user=scope.user)
    return f"Updated: {_line(record)}", memory_of(record)


@tool(OneMemory, Deleted, "write", destructive=True)
def delete_memory(memory: Memory, scope: Scope, given: OneMemory) -> Result:
    """Erase one memory for good."""
    _find(memory, scope, given.id)
    return f"Erased {given.id}.", {"deleted": memory.delete(given.id, user=scope.user)}


@tool(Nothing, Deleted, "write", destructive=True)
def delete_all_memories(memory: Memory, scope: Scope, given: Nothing) -> Result:
    """Erase every memory for good. Only if the user asked for exactly that."""
    deleted = memory.delete_all(**asdict(scope), below=True)
    return f"Memories that were erased: {deleted}.", {"deleted": deleted}


@tool(Nothing, Stats, "read")
def memory_stats(memory: Memory, scope: Scope, given: Nothing) -> Result:
    """Tell how many memories there are, by agent and session."""
    counts = {each: count for each, count in memory.scopes(scope.user) if scope.covers(each)}
    scopes = [{"agent_id": each.agent, "run_id": each.session, "memories": count} for each, count in counts.items()]
    total = sum(counts.values())
    return f"Memories: {total}.", {"memories": total, "scopes": scopes}


def _find(memory: Memory, scope: Scope, id: str) -> Record:
    """A record that the scope covers; one that it does not cover is as unknown as one that is not there."""
    record = memory.get(id, user=scope.user)
    if record is None or not scope.covers(record.scope):
        raise UnknownRecord(f"there is no memory {id!r}")
    return record


def _line(record: Record) -> str:
    """A record in one line, with what a model needs to speak of it."""
    role = "" if record.role is None else f" {record.role}:"
    return f"[{record.id}] {record.created[:10]}{role} {' '.join(record.text.split())}"


def make_server(view_of: Callable[[Request | None], View]) -> Server[Any]:
    """An MCP server; ``view_of`` says what a client may see, of HTTP by its request."""

    async def list_tools(context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        rights = view_of(context.request).caller.rights
        return types.ListToolsResult(tools=[tool.offer for tool in TOOLS.values() if rights.issuperset(tool.rights)])

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = TOOLS.get(params.name)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:NAMED]!r}")
        view = view_of(context.request)
        try:
            given = tool.arguments.model_validate(params.arguments or {})
            with view.watch(params.name, given):
                text, result = await view.run(tool.rights, lambda memory, scope: tool.run(memory, scope, given))
            if "read" not in view.caller.rights and "event" in result:
                text, result = "Remembered.", as_sent(result)
        except Exception as error:
            problem = Problem(422, _sentence(error)) if isinstance(error, ValidationError) else to_problem(error)
            words = types.TextContent(text=problem.to_dict()["detail"])
            return types.CallToolResult(content=[words], is_error=True)
        return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=result)

    async def list_resources(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        cursor = None if params is None else params.cursor
        with _as_error():
            records, following = await view_of(context.request).run(
                ["read"], lambda memory, scope: memory.page(**asdict(scope), limit=LISTED, cursor=cursor)
            )
        return types.ListResourcesResult(resources=[_resource(each) for each in records], next_cursor=following)

    async def list_templates(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            uri_template=SCHEME + "{id}", name="memory", description="A memory by its id.", mime_type="text/plain"
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        with _as_error():
            if not uri.startswith(SCHEME):
                raise ValueError(f"uri is {uri[:NAMED]!a}; expected {SCHEME}ID")
            id = unquote(uri.removeprefix(SCHEME))
            record = await view_of(context.request).run(["read"], lambda memory, scope: _find(memory, scope, id))
        contents = types.TextResourceContents(uri=uri, mime_type="text/plain", text=record.text)
        return types.ReadResourceResult(contents=[contents])

    return Server(
        "titans-memory",
        title="Titans memory",
        version=__version__,
        instructions=INSTRUCTIONS,
        get_tool_input_schema=lambda name: TOOLS[name].offer.input_schema if name in TOOLS else None,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )


def _resource(record: Record) -> types.Resource:
    words = " ".join(record.text.split())
    return types.Resource(
        uri=SCHEME + quote(record.id, safe=""),
        name=words if len(words) <= NAMED else f"{words[: NAMED - 3]}...",
        mime_type="text/plain",
        size=len(record.text.encode()),
    )


def _sentence(error: ValidationError) -> str:
    """What is wrong with the first argument that is."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(map(str, first["loc"]))[:NAMED]
    if first["type"] == "extra_forbidden":
        return f"{name!a} is not an argument of this tool"
    if first["type"] == "missing":
        return f"{name} is missing"
    message = first["msg"].removeprefix("Value error, ")
    return f"{name}: {message[:1].lower()}{message[1:]}"


@contextmanager
def _as_error() -> Iterator[None]:
    """An error becomes one of the protocol, with one sentence."""
    try:
        yield
    except Exception as error:
        problem = to_problem(error)
        code = types.INVALID_PARAMS if problem.status_code < 500 else types.INTERNAL_ERROR
        raise MCPError(code, problem.to_dict()["detail"]) from error


def mount(app: FastAPI) -> None:
    """Adds the MCP server to an application, at /mcp; the key of each request says whose memories it serves."""
    from titans.service.rest import check_sizes  # not with this module: it needs torch

    limits = app.state.settings.limits

    @contextmanager
    def watch(name: str, given: Input) -> Iterator[None]:
        check_sizes(limits, [getattr(given, field, None) or "" for field in ("text", "query")])
        yield
        if name in COUNTERS:
            app.state.metrics.count(COUNTERS[name])

    def view_of(request: Request | None) -> View:
        assert request is not None
        return View(request.state.scope, request.state.caller, lambda: nullcontext(app.state.memory), watch)

    # Without sessions, any of several workers can answer any request.
    sessions = StreamableHTTPSessionManager(
        make_server(view_of), json_response=True, stateless=True, max_request_body_size=limits.body_bytes
    )

    class Endpoint:
        async def __call__(self, connection: Connection, receive: Receive, send: Send) -> None:
            request = Request(connection)
            caller = await identify(app.state, request.headers)
            request.state.caller, request.state.scope = caller, scope_of_headers(caller, request.headers)
            await sessions.handle_request(connection, receive, send)

    router = APIRouter(lifespan=lambda _: sessions.run())
    router.routes.append(Route("/mcp", Endpoint(), methods=["POST"]))
    app.include_router(router)


def run_stdio(scope: Scope, open_memory: Callable[[], Memory]) -> None:
    """Serves one client over stdin and stdout until it hangs up, or until SIGTERM or SIGINT.

    The memory is opened while the client introduces itself, so that it need not wait for torch.
    """
    memory = _Lazy(open_memory)

    def end(code: int) -> None:
        memory.close()
        # At once: a thread may wait for stdin for ever, and to unload torch takes longer than clients wait.
        os._exit(code)

    signal.signal(signal.SIGTERM, lambda number, frame: end(0))
    signal.signal(signal.SIGINT, lambda number, frame: end(130))
    threading.Thread(target=memory.load, daemon=True).start()

    async def serve() -> None:
        server = make_server(lambda _: View(scope, Caller(), memory.use))
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(serve)
    end(0)


class _Lazy:
    """A memory that is opened when it is first used, by one call at a time, and closed after the last."""

    def __init__(self, open_memory: Callable[[], Memory]) -> None:
        self._open = functools.cache(open_memory)
        self._lock = threading.RLock()  # a signal may come while it is being closed

    @contextmanager
    def use(self) -> Iterator[Memory]:
        with self._lock:
            try:
                memory = self._open()
            except ValueError as error:  # the store is the client's own: it may know what is wrong with it
                raise Problem(503, str(error)) from error
            yield memory

    def load(self) -> None:
        """Opens it, and loads what a first search needs; what goes wrong is told to whoever uses it."""
        with suppress(Exception), self.use() as memory:
            memory.encoder.encode(["warm"])

    def close(self) -> None:
        with self._lock:
            if self._open.cache_info().currsize:
                self._open().close()
