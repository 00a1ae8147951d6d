"""Whatever a caller asks, at any door, nothing of a scope that its key is not for comes back, or changes there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.service.conftest import Serve, Server
from tests.service.upstream import Upstream, answering
from titans.text.records import Scope

USERS, AGENTS = ("ada", "ben"), (None, "bot", "elf")
RUNS = (None, "monday")
SCOPES = [Scope(user, agent, run) for user in USERS for agent in AGENTS for run in RUNS]
RPC = {"jsonrpc": "2.0", "id": 1}
RIGHTS = (("read",), ("write",), ("read", "write"))
NAMES = st.sampled_from([None, None, *USERS, "ADA", "ada ", "%", "*", "default", "ada/bot", "' OR 1=1 --"])
AGENT_NAMES = st.sampled_from([None, None, "bot", "elf", "BOT", "%"])
RUN_NAMES = st.sampled_from([None, None, "monday", "%"])
CURSORS = st.one_of(st.none(), st.integers(0, 60).map(str), st.sampled_from(["-1", "9" * 19, "x", "1 OR 1=1", "٣"]))
WORDS = st.sampled_from(["secret", "What is the secret of ben?", "ada", "elf", "*", "secret OR 1=1", '"secret"'])
FILTERS = st.sampled_from([None, {}, {"of": "ben"}, {"of": {"ne": "nobody"}}, {"of": ["ada", "ben"]}, {"user": "ben"}])
QUICK = settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.generate,),
)
LONG = settings(QUICK, max_examples=500, derandomize=False, print_blob=True)


@dataclass
class Key:
    """A key and what it is for; none at all if its scope is None."""

    token: str
    user: str | None = None
    agent: str | None = None
    rights: tuple[str, ...] = ()

    def covers(self, scope: Scope) -> bool:
        """Whether it is for that scope, in any way."""
        return bool(self.rights) and self.user in (None, scope.user) and self.agent in (None, scope.agent)


@dataclass
class World:
    """A server with a secret in each scope, keys for all of them, and something that answers chats."""

    server: Server
    upstream: Upstream
    keys: list[Key]
    http: httpx.Client
    secrets: dict[Scope, str] = field(default_factory=dict)
    ids: dict[Scope, str] = field(default_factory=dict)

    def fill(self) -> None:
        """Puts the secrets where they are missing: a caller may have erased what was its own."""
        for scope in SCOPES:
            found = self.server.memory.get(self.ids.get(scope, "none"), user=scope.user)
            if found is None or self.secrets[scope] not in found.text:
                request = None if scope in self.secrets else f"request of {scope}"
                self.secrets[scope] = uuid.uuid4().hex
                (record,) = self.server.memory.add_many(
                    [f"The secret of {scope.user} is {self.secrets[scope]}."], user=scope.user, agent=scope.agent,
                    session=scope.session, metadata={"of": scope.user}, request=request,
                )  # fmt: skip
                self.ids[scope] = record.id

    def state(self, scope: Scope) -> list[tuple[Any, ...]]:
        """Everything of exactly one scope that nobody else may change."""
        memory = self.server.memory
        records = memory.records(user=scope.user, agent=scope.agent, session=scope.session, limit=1000)
        return [
            (record.id, record.text, record.metadata, record.version, record.repeats)
            for record in records
            if record.scope == scope
        ]


@pytest.fixture(scope="module")
def world(serve: Serve) -> Iterator[World]:
    with answering("Fine", ".") as upstream:
        server = serve(upstream=upstream.url)
        keys = [Key(""), Key("tm_000000000000_none")]
        for user in (None, *USERS):
            for agent in AGENTS:
                for rights in RIGHTS:
                    made = server.app.state.keys.add(f"{user} {agent} {rights}", user, agent, rights)
                    keys.append(Key(made, user, agent, rights))
        gone = server.app.state.keys.add("gone")
        server.app.state.keys.revoke("gone")
        with httpx.Client(base_url=server.url, timeout=30) as http:
            yield World(server, upstream, [*keys, Key(gone)], http)


Call = tuple[str, str, dict[str, Any]]  # a method, a path, and what httpx sends


def rpc(method: str, headers: dict[str, str], **params: Any) -> Call:
    """A call of the MCP server."""
    accept = {"Accept": "application/json, text/event-stream"}
    return "POST", "/mcp", {"json": {**RPC, "method": method, "params": params}, "headers": {**headers, **accept}}


def chat(words: str, headers: dict[str, str], path: str = "/v1/chat/completions", **more: Any) -> Call:
    """A call of the proxy."""
    body = {"model": "words", "messages": [{"role": "user", "content": words}], **more}
    return "POST", path, {"json": body, "headers": headers}


@st.composite
def calls(draw: st.DrawFn) -> tuple[Call, int]:
    """A call with ``{id}`` where an id goes, and the number of the scope that it is of."""
    names = {"user_id": draw(NAMES), "agent_id": draw(AGENT_NAMES), "run_id": draw(RUN_NAMES)}
    named = {name: value for name, value in names.items() if value is not None}
    owner = {"user_id": named["user_id"]} if "user_id" in named else {}
    headers = {
        f"X-Memory-{what}": value.strip()
        for what, value in zip(("User", "Agent", "Session"), names.values(), strict=True)
        if value is not None
    }
    number = draw(st.integers(0, len(SCOPES) - 1))
    filters, cursor, words = draw(FILTERS), draw(CURSORS), draw(WORDS)
    request = {"Idempotency-Key": f"request of {SCOPES[draw(st.integers(0, len(SCOPES) - 1))]}"}
    line = {"id": "{id}", "text": "Mine now.", "user": names["user_id"] or "ben", "agent": names["agent_id"]}
    page = {**named, **({"cursor": cursor} if cursor else {}), **({"filters": json.dumps(filters)} if filters else {})}
    tools: dict[str, dict[str, Any]] = {
        "add_memory": {"text": "Told by another."},
        "search_memories": {"query": words, "filters": filters, "limit": 100},
        "get_memories": {"cursor": cursor, "filters": filters}, "get_memory": {"id": "{id}"},
        "update_memory": {"id": "{id}", "text": "Changed."}, "delete_memory": {"id": "{id}"}, "memory_stats": {},
        "delete_all_memories": {}, "get_memory ": {"id": "{id}"},
    }  # fmt: skip

    rest: list[Call] = [
        ("GET", "/memories", {"params": page}),
        ("GET", "/memories/{id}", {"params": owner}),
        ("GET", "/memories/{id}/history", {"params": owner}),
        ("GET", "/stats", {"params": owner}),
        ("GET", "/state", {"params": named}),
        ("POST", "/search", {"json": {**named, "query": words, "filters": filters, "limit": 1000, "threshold": -1}}),
        ("POST", "/surprise", {"json": {**named, "text": words}}),
        ("POST", "/export", {"json": named}),
        ("POST", "/memories", {"json": {**named, "text": "Told by another."}, "headers": request}),
        ("POST", "/import", {"content": json.dumps(line).encode()}),
        ("PUT", "/memories/{id}", {"params": owner, "json": {"text": "Changed."}}),
        ("PUT", "/memories/{id}", {"params": owner, "json": {"metadata": {}}}),
        ("DELETE", "/memories/{id}", {"params": owner}),
        ("DELETE", "/memories", {"params": {**named, "below": "true"}}),
    ]
    others: list[Call] = [
        *[("GET", path, {}) for path in ("/metrics", "/openapi.json", "/healthz", "/readyz", "/", "/page/app.js")],
        chat(words, headers),
        chat(words, headers, stream=True),
        chat(words, headers, "/v1/messages", max_tokens=9),
        ("GET", "/v1/models", {"headers": headers}),
        rpc("tools/call", headers, name=(name := draw(st.sampled_from(sorted(tools)))), arguments=tools[name]),
        rpc("tools/list", headers),
        rpc("resources/list", headers, **({"cursor": cursor} if cursor else {})),
        rpc("resources/read", headers, uri="memory://{id}"),
        rpc("resources/templates/list", headers),
    ]
    return draw(st.one_of(st.sampled_from(rest), st.sampled_from(others))), number


def send(world: World, key: Key, call: Call, id: str) -> tuple[str, str]:
    """What was sent, and all that came back or was sent on."""
    method, path, given = call
    sent = json.loads(json.dumps({**given, "content": given.get("content", b"").decode()}).replace("{id}", id))
    headers = {**sent.pop("headers", {}), **({"Authorization": f"Bearer {key.token}"} if key.token else {})}
    content = sent.pop("content").encode() or None
    before = len(world.upstream.seen)
    answer = world.http.request(
        method,
        path.replace("{id}", quote(id, safe="")),
        headers=headers,
        **sent,
        **({"content": content} if content else {}),
    )
    assert answer.status_code < 500, (answer.status_code, answer.text)
    passed_on = "".join(seen.raw.decode() + str(seen.headers) for seen in world.upstream.seen[before:])
    assert not key.token or key.token not in passed_on
    return f"{path} {sent} {headers} {id}", f"{answer.headers} {answer.text} {passed_on}"


def hold(world: World, key: Key, asked: list[tuple[Call, int]]) -> None:
    """Makes the calls, and raises if one of them crosses into a scope that the key is not for."""
    world.fill()
    foreign = [scope for scope in SCOPES if not key.covers(scope)]
    hidden = SCOPES if "read" not in key.rights else foreign
    states = {scope: world.state(scope) for scope in SCOPES}
    for call, number in asked:
        sent, came = send(world, key, call, world.ids[SCOPES[number]])
        for scope in hidden:
            assert world.secrets[scope] not in came, f"{call} with the key of {key} shows a secret of {scope}"
        for scope in foreign:
            assert world.ids[scope] in sent or world.ids[scope] not in came, f"{call} by {key} shows an id of {scope}"
    for scope in foreign if "write" in key.rights else SCOPES:
        assert world.state(scope) == states[scope], f"{asked} by {key} changed {scope}"


ASKED = st.lists(calls(), min_size=1, max_size=6)


@QUICK
@given(number=st.integers(0, 28), asked=ASKED)
def test_no_call_crosses_into_another_scope(world: World, number: int, asked: list[tuple[Call, int]]) -> None:
    hold(world, world.keys[number % len(world.keys)], asked)


@pytest.mark.slow
@LONG
@given(number=st.integers(0, 29), asked=ASKED)
def test_hundreds_of_series_of_calls_cross_nowhere(world: World, number: int, asked: list[tuple[Call, int]]) -> None:
    hold(world, world.keys[number % len(world.keys)], asked)


def test_the_calls_find_what_they_may(world: World) -> None:
    """Otherwise nothing would be shown by saying that they find nothing else."""
    world.fill()
    own = Scope("ada", "bot", None)
    key = next(each for each in world.keys if (each.user, each.agent, len(each.rights)) == ("ada", "bot", 2))
    calls: list[Call] = [
        ("GET", "/memories", {}), ("GET", "/memories/{id}", {}), ("GET", "/memories/{id}/history", {}),
        ("POST", "/search", {"json": {"query": "secret"}}), ("POST", "/export", {"json": {}}), chat("secret?", {}),
        rpc("tools/call", {}, name="get_memory", arguments={"id": "{id}"}), rpc("resources/read", {}, uri="memory://{id}"),
        rpc("tools/call", {}, name="search_memories", arguments={"query": "secret"}),
    ]  # fmt: skip
    for call in calls:
        _, came = send(world, key, call, world.ids[own])
        assert world.secrets[own] in came, (call, came)


def test_a_key_that_may_only_write_reads_nothing_by_writing(world: World) -> None:
    world.fill()
    own = Scope("ada", "bot", None)
    key = next(each for each in world.keys if (each.user, each.agent, each.rights) == ("ada", "bot", ("write",)))
    for call in (
        ("PUT", "/memories/{id}", {"json": {"metadata": {"seen": True}}}),
        rpc("tools/call", {}, name="update_memory", arguments={"id": "{id}", "metadata": {"seen": True}}),
    ):
        _, came = send(world, key, call, world.ids[own])
        assert world.secrets[own] not in came
        assert "this key may not read" in came
