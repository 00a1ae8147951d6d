"""The official MCP client against a real server, over HTTP and stdio."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.docs.blocks import ROOT, check_command
from tests.service.conftest import Serve, Server
from titans.service import Limits
from titans.text import Memory

LESSON = "Ada's piano lesson is on Tuesday."
READ = ["search_memories", "get_memories", "get_memory", "memory_stats"]
WRITE = ["add_memory", "update_memory", "delete_memory", "delete_all_memories"]
Talk = Callable[[Client], Awaitable[Any]]


def talk(server: Server, what: Talk, mode: Any = "auto", **headers: str) -> Any:
    """What a client says over HTTP; the headers are those of its configuration."""

    async def run() -> Any:
        async with (
            httpx2.AsyncClient(headers=headers, timeout=30) as http,
            Client(streamable_http_client(f"{server.url}/mcp", http_client=http), mode=mode) as client,
        ):
            return await what(client)

    return asyncio.run(run())


def call(server: Server, name: str, arguments: dict[str, Any] | None = None, **headers: str) -> tuple[str, Any]:
    """The text of a tool's result, and its structured content: None for an error."""
    result = talk(server, lambda client: client.call_tool(name, arguments or {}), **headers)
    return result.content[0].text, None if result.is_error else result.structured_content


def refusal(server: Server, what: Talk, **headers: str) -> str:
    """What an error of the protocol says."""

    async def run(client: Client) -> str:
        with pytest.raises(MCPError) as error:
            await what(client)
        return error.value.message

    said: str = talk(server, run, **headers)
    return said


def of(user: str) -> dict[str, str]:
    return {"X-Memory-User": user}


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_a_fact_told_over_mcp_is_found_over_rest_and_the_other_way_round(server: Server, mode: str) -> None:
    async def tell(client: Client) -> Any:
        return (
            await client.call_tool("add_memory", {"text": LESSON, "metadata": {"topic": "music"}})
        ).structured_content

    told = talk(server, tell, mode, **of(mode))
    found = server.http.post("/search", json={"query": "When is the lesson?", "user_id": mode}).json()
    assert [(each["id"], each["memory"]) for each in found["results"]] == [(told["id"], LESSON)]

    server.http.post("/memories", json={"text": "Ada has a cat called Molly.", "user_id": mode})
    text, found = call(server, "search_memories", {"query": "What is the cat called?", "limit": 1}, **of(mode))
    assert "Ada has a cat called Molly." in text
    assert found["results"][0]["memory"] == "Ada has a cat called Molly."
    assert found["results"][0]["parts"]["cosine_rank"] == 1


def test_a_model_sees_eight_tools_that_take_no_user(server: Server) -> None:
    tools = talk(server, lambda client: client.list_tools()).tools
    assert sorted(tool.name for tool in tools) == sorted(READ + WRITE)
    for tool in tools:
        assert tool.input_schema["additionalProperties"] is False
        assert not {"user", "user_id", "agent_id", "run_id"} & set(tool.input_schema.get("properties", {}))
        assert tool.annotations is not None and tool.annotations.read_only_hint is (tool.name in READ)
        assert tool.description and len(tool.description) < 120


def test_a_memory_is_told_changed_listed_and_erased(server: Server) -> None:
    text, first = call(server, "add_memory", {"text": "Bo lives in Oslo."}, **of("bo"))
    assert (first["event"], text.startswith("Remembered")) == ("ADD", True)
    text, again = call(server, "add_memory", {"text": "Bo lives in Oslo."}, **of("bo"))
    assert (again["event"], again["id"], again["repeats"]) == ("REPEAT", first["id"], 1)
    assert text.startswith("Known already, told 2 times")

    _, changed = call(server, "update_memory", {"id": first["id"], "text": "Bo lives in Rome."}, **of("bo"))
    assert (changed["memory"], changed["version"]) == ("Bo lives in Rome.", 2)
    text, same = call(server, "get_memory", {"id": first["id"]}, **of("bo"))
    assert json.loads(text) == same == changed

    call(server, "add_memory", {"text": "Bo plays the cello."}, **of("bo"))
    text, page = call(server, "get_memories", {"limit": 1}, **of("bo"))
    assert [each["memory"] for each in page["results"]] == ["Bo plays the cello."]
    assert f"go on with the cursor {page['next']}" in text
    _, rest = call(server, "get_memories", {"cursor": page["next"]}, **of("bo"))
    assert ([each["id"] for each in rest["results"]], rest["next"]) == ([first["id"]], None)

    assert call(server, "delete_memory", {"id": first["id"]}, **of("bo"))[1] == {"deleted": 1}
    server.memory.add("Bo asked for tea.", user="bo", agent="waiter")
    text, stats = call(server, "memory_stats", **of("bo"))
    assert (text, stats["memories"]) == ("Memories: 2.", 2)
    assert {"agent_id": "waiter", "run_id": None, "memories": 1} in stats["scopes"]
    assert call(server, "delete_all_memories", **of("bo"))[1] == {"deleted": 2}
    assert call(server, "search_memories", {"query": "Where does Bo live?"}, **of("bo"))[0] == "Nothing found."


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("add_memory", {}, "text is missing"),
        ("add_memory", {"text": 5}, "text: input should be a valid string"),
        ("add_memory", {"text": "Hi.", "user_id": "ada"}, "'user_id' is not an argument of this tool"),
        ("add_memory", {"text": "Hi.", "a\nb": 1}, "'a\\nb' is not an argument of this tool"),
        ("add_memory", {"text": " "}, "text is empty; expected a text"),
        ("add_memory", {"text": "\u0007"}, "text has the control character"),
        ("add_memory", {"text": "x" * 200_000}, "a text has 200,000 bytes; expected at most 100,000"),
        ("search_memories", {"query": "a", "limit": 0}, "limit: input should be greater than or equal to 1"),
        ("search_memories", {"query": "a", "filters": {"x": {"near": 1}}}, "filters['x'] is"),
        ("get_memories", {"cursor": "x"}, "cursor is 'x'; expected what the page before gave"),
        ("get_memory", {"id": "nobody"}, "there is no memory 'nobody'"),
        ("update_memory", {"id": "nobody", "text": "Hi."}, "there is no memory 'nobody'"),
        ("delete_memory", {"id": "nobody"}, "there is no memory 'nobody'"),
    ],
)
def test_what_is_wrong_is_one_sentence_for_the_model(
    server: Server, name: str, arguments: dict[str, Any], sentence: str
) -> None:
    text, result = call(server, name, arguments)
    assert result is None
    assert text.startswith(sentence) and "\n" not in text


def test_memories_are_resources_in_pages(server: Server) -> None:
    records = server.memory.add_many([f"Note {number}." for number in range(103)], user="cy")

    async def read(client: Client) -> tuple[list[str], list[str], str]:
        first = await client.list_resources()
        second = await client.list_resources(cursor=first.next_cursor)
        assert second.next_cursor is None
        text = (await client.read_resource(f"memory://{records[0].id}")).contents[0].text
        return [each.name for each in first.resources], [each.uri for each in second.resources], text

    names, uris, text = talk(server, read, **of("cy"))
    assert (len(names), names[0]) == (100, "Note 102.")
    assert uris == [f"memory://{record.id}" for record in reversed(records[:3])]
    assert text == "Note 0."
    for user, uri, sentence in (
        ("di", f"memory://{records[0].id}", f"there is no memory '{records[0].id}'"),
        ("cy", "file:///etc/passwd", "uri is 'file:///etc/passwd'; expected memory://ID"),
    ):
        assert refusal(server, lambda client, uri=uri: client.read_resource(uri), **of(user)) == sentence


def test_a_name_in_a_header_may_have_any_letters(server: Server) -> None:
    server.memory.add(LESSON, user="Zoë 好")
    headers = {"X-Memory-User": "Zoë 好".encode()}
    assert call(server, "memory_stats", **headers)[1]["memories"] == 1  # type: ignore[arg-type]


def test_an_unknown_tool_is_an_error_of_the_protocol(server: Server) -> None:
    assert refusal(server, lambda client: client.call_tool("drop_tables", {})) == "there is no tool 'drop_tables'"


@pytest.mark.parametrize("version", [None, "2025-06-18", "2026-07-28", "1999-01-01", "\u00e9"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 5, "arguments": []}}',
        b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add_memory", "arguments": "text"}}',
        b'{"jsonrpc": "2.0", "id": 1, "method": "\\ud800"}',
        b'{"jsonrpc": "2.0", "id": 1, "method": "resources/read", "params": {"uri": "memory://\\ud800"}}',
        b'{"jsonrpc": "2.0", "id": ' + b"9" * 5_000 + b', "method": "tools/list"}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_not_the_protocol_is_refused_and_the_server_lives(
    server: Server, version: str | None, body: bytes
) -> None:
    headers: dict[str, Any] = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    headers |= {} if version is None else {"MCP-Protocol-Version": version.encode("latin-1")}
    answer = server.http.post("/mcp", content=body, headers=headers)
    assert answer.status_code < 500, answer.text
    assert answer.status_code >= 400 or "error" in answer.json()
    assert server.http.get("/healthz").status_code == 200


def test_only_posts_are_taken(server: Server) -> None:
    assert server.http.get("/mcp", headers={"Accept": "text/event-stream"}).status_code == 405


@pytest.fixture(scope="module")
def guarded(serve: Serve) -> tuple[Server, dict[str, dict[str, str]]]:
    """A server with keys, and the headers of each."""
    server = serve(limits=Limits(rate=1_000))
    keys = server.app.state.keys
    made = {
        "ada": keys.add("ada", user="ada"),
        "bot": keys.add("bot", user="ada", agent="bot"),
        "reader": keys.add("reader", user="ada", rights=("read",)),
        "anybody": keys.add("anybody"),
    }
    server.memory.add(LESSON, user="ada")
    server.memory.add("Bo lives in Oslo.", user="bo")
    return server, {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}


def test_a_key_fixes_the_user(guarded: tuple[Server, dict[str, dict[str, str]]]) -> None:
    server, keys = guarded
    text, found = call(server, "search_memories", {"query": "Where does Bo live?"}, **keys["ada"])
    assert {each["user_id"] for each in found["results"]} == {"ada"}
    assert "Oslo" not in text
    other = server.memory.records(user="bo")[0].id
    for name in ("get_memory", "delete_memory"):
        assert call(server, name, {"id": other}, **keys["ada"]) == (f"there is no memory '{other}'", None)


def test_a_key_of_an_agent_does_not_see_what_others_told(guarded: tuple[Server, dict[str, dict[str, str]]]) -> None:
    server, keys = guarded
    told = server.memory.records(user="ada")[-1]
    assert call(server, "get_memories", **keys["bot"])[1]["results"] == []
    assert call(server, "get_memory", {"id": told.id}, **keys["bot"])[1] is None
    assert call(server, "delete_all_memories", **keys["bot"])[1] == {"deleted": 0}
    _, mine = call(server, "add_memory", {"text": "The bot has work to do."}, **keys["bot"])
    assert (mine["user_id"], mine["agent_id"]) == ("ada", "bot")
    assert call(server, "memory_stats", **keys["bot"])[0] == "Memories: 1."


def test_a_key_that_may_only_read_has_no_tools_to_write(guarded: tuple[Server, dict[str, dict[str, str]]]) -> None:
    server, keys = guarded
    tools = talk(server, lambda client: client.list_tools(), **keys["reader"]).tools
    assert sorted(tool.name for tool in tools) == sorted(READ)
    assert call(server, "add_memory", {"text": "Hi."}, **keys["reader"]) == ("this key may not write", None)


@pytest.mark.parametrize(
    ("key", "user", "status", "sentence"),
    [
        (None, None, 401, "the key is missing; expected Authorization: Bearer KEY or X-API-Key: KEY"),
        ("tm_000000000000_x", None, 401, "the key is unknown or was revoked"),
        ("ada", "bo", 403, "this key is bound to another user_id"),
        ("anybody", None, 400, "X-Memory-User is missing; this key is bound to no user"),
    ],
)
def test_who_may_not_come_in_is_told_why(
    guarded: tuple[Server, dict[str, dict[str, str]]], key: str | None, user: str | None, status: int, sentence: str
) -> None:
    server, keys = guarded
    headers = {} if key is None else keys.get(key, {"Authorization": f"Bearer {key}"})
    headers = headers | ({} if user is None else of(user))
    answer = server.http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=headers)
    assert (answer.status_code, answer.json()["detail"]) == (status, sentence)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "titans", "mcp", *map(str, arguments)]


@contextmanager
def started(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], Callable[..., Any]]]:
    """A process that is spoken to by hand, after the handshake, and how to call one of its tools."""
    with subprocess.Popen(
        command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def say(**message: Any) -> None:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            process.stdin.flush()

        def call(name: str, **given: Any) -> Any:
            say(id=2, method="tools/call", params={"name": name, "arguments": given})
            return json.loads(process.stdout.readline())["result"]

        who = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        say(id=1, method="initialize", params=who)
        assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "titans-memory"
        say(method="notifications/initialized")
        try:
            yield process, call
        finally:
            process.kill()


@pytest.mark.slow
def test_a_client_over_stdio_and_a_server_share_a_store(serve: Serve, tmp_path: Path) -> None:
    server = serve(store=tmp_path)
    server.http.post("/memories", json={"text": LESSON, "user_id": "ada"})
    first, *rest = command("--store", tmp_path, "--user", "ada", "--agent", "editor")

    async def use() -> tuple[Any, Any]:
        async with Client(StdioServerParameters(command=first, args=rest, env={"PYTHONPATH": "."})) as client:
            added = await client.call_tool("add_memory", {"text": "Ada uses tabs."})
            found = await client.call_tool("search_memories", {"query": "When is the piano lesson?"})
            return added.structured_content, found.structured_content

    added, found = asyncio.run(use())
    assert (added["user_id"], added["agent_id"]) == ("ada", "editor")
    assert [each["memory"] for each in found["results"]] == ["Ada uses tabs."], (
        "what others told ada is not the agent's"
    )
    answer = server.http.post("/search", json={"query": "tabs or spaces?", "user_id": "ada"}).json()
    assert answer["results"][0]["memory"] == "Ada uses tabs."


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end of input", "signal"])
def test_stdio_ends_cleanly_and_says_nothing_but_the_protocol(tmp_path: Path, how: str) -> None:
    with started("--store", tmp_path) as (process, call):
        assert call("add_memory", text=LESSON)["isError"] is False
        assert process.stdin is not None and process.stdout is not None
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        assert process.wait(timeout=10) == 0
        assert process.stdout.read() == ""
    with Memory(tmp_path) as memory:
        assert [record.text for record in memory.records()] == [LESSON]


@pytest.mark.slow
def test_a_store_that_cannot_be_opened_is_one_sentence_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "memory.sqlite3").write_text("This is not a database. " * 100)
    with started("--store", tmp_path / "memory.sqlite3") as (_, call):
        result = call("memory_stats")
    assert result["isError"] is True
    assert "memory.sqlite3" in result["content"][0]["text"]


def test_a_wrong_name_ends_with_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    from titans.cli import main

    with pytest.raises(SystemExit, match="2"):
        main(["mcp", "--user", ""])
    assert capfd.readouterr() == ("", "titans: Invalid value: user has 0 characters; expected a name of 1 to 200\n")


def test_the_set_ups_in_the_guide_are_json_and_their_commands_exist() -> None:
    page = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    setups = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)]
    servers = [(setup.get("mcpServers") or setup["servers"])["memory"] for setup in setups]
    assert len(servers) == 4
    for server in servers:
        if "url" in server:
            assert server["url"].endswith("/mcp")
        else:
            assert Path(server["command"]).name == "titans"
            check_command(server["args"])
