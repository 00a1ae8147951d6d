"""The Python client against a real server, and against servers that fail."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.blocks import ROOT
from tests.service.conftest import Serve, Server
from titans.client import AsyncMemoryClient, Calls, MemoryClient, ServiceError
from titans.service.limits import Rates
from titans.text import Memory, Scope

LESSON = "Ada's piano lesson is on Tuesday."


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[MemoryClient]:
    with MemoryClient(server.url) as client:
        yield client


def test_it_returns_what_the_memory_itself_returns(server: Server, client: MemoryClient) -> None:
    record = client.add(LESSON, user="ada", session="monday", metadata={"topic": "music"}, role="user")
    assert record == client.get(record.id, user="ada") == server.memory.get(record.id, user="ada")
    assert (record.text, record.scope, record.role) == (LESSON, Scope("ada", None, "monday"), "user")

    cat, dog = client.add_many(["Ada has a cat.", "Ada has a dog."], user="ada", role=["user", "assistant"])
    assert (cat.role, dog.role) == ("user", "assistant")
    assert client.records(user="ada") == server.memory.records(user="ada")
    assert client.records(user="ada", filters={"topic": "music"}) == [record]
    newest, cursor = client.page(user="ada", limit=1)
    assert newest == [dog]
    assert client.page(user="ada", limit=2, cursor=cursor)[0] == [cat, record]

    found = client.search("When is the lesson?", user="ada", threshold=0.3)
    here = server.memory.search("When is the lesson?", user="ada", threshold=0.3)
    assert (found.below, found.threshold, found.ignored) == (here.below, 0.3, here.ignored)
    for hit, same in zip(found, here, strict=True):
        assert 0 <= hit.age < 60
        assert {**vars(hit), "age": 0} == {**vars(same), "age": 0}

    assert client.surprise("Ada has a cat.", user="ada") == server.memory.surprise("Ada has a cat.", user="ada")
    assert sorted(map(str, client.scopes("ada"))) == sorted(map(str, server.memory.scopes("ada")))
    assert client.stats("ada")["records"] == 3


def test_a_memory_is_changed_and_erased(server: Server, client: MemoryClient) -> None:
    record = client.add("Bo lives in Oslo.", user="bo")
    changed = client.update(record.id, "Bo lives in Rome.", user="bo", keep_old=True)
    assert (changed.text, changed.version) == ("Bo lives in Rome.", 2)
    assert client.history(record.id, user="bo") == server.memory.history(record.id, user="bo")
    assert client.delete(record.id, user="bo") == 1
    assert client.get(record.id, user="bo") is None
    assert client.history("unknown", user="bo") == []
    client.add("Bo asked for tea.", user="bo", agent="waiter")
    assert client.delete_all(user="bo") == 0
    assert client.delete_all(user="bo", below=True) == 1
    with pytest.raises(ServiceError, match=f"there is no memory '{record.id}' of user 'bo'") as error:
        client.delete(record.id, user="bo")
    assert error.value.status == 404


def test_what_was_exported_can_be_imported(server: Server, client: MemoryClient, serve: Serve, tmp_path: Path) -> None:
    client.add_many(["Cy is a cook.", "Cy is 40."], user="cy")
    assert client.export(tmp_path / "cy.jsonl", user="cy") == 2
    server.memory.export(tmp_path / "same.jsonl", user="cy")
    assert (tmp_path / "cy.jsonl").read_bytes() == (tmp_path / "same.jsonl").read_bytes()
    client.delete_all(user="cy")
    assert client.import_(tmp_path / "cy.jsonl") == 2
    assert client.import_(tmp_path / "cy.jsonl") == 0
    assert [record.text for record in client.records(user="cy")] == ["Cy is 40.", "Cy is a cook."]
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 5}\n')
    with pytest.raises(ServiceError, match="the body, line 2: text is of type int; expected a text"):
        client.import_(tmp_path / "bad.jsonl")


def test_the_asynchronous_client_does_the_same(server: Server, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncMemoryClient(server.url) as client:
            first, second = await asyncio.gather(client.add("Di skis.", user="di"), client.add("Di sails.", user="di"))
            assert {first.id, second.id} == {record.id for record in await client.records(user="di")}
            found = await client.search("Who sails?", user="di", limit=1)
            assert [hit.record.text for hit in found] == ["Di sails."]
            assert await client.export(tmp_path / "di.jsonl", user="di") == 2
            assert await client.import_(tmp_path / "di.jsonl") == 0
            assert await client.delete(first.id, user="di") == 1
            assert await client.get(first.id, user="di") is None
            with pytest.raises(ServiceError, match="text is empty; expected a text"):
                await client.add(" ", user="di")

    asyncio.run(run())


def test_everything_that_was_told_is_kept_word_for_word(client: MemoryClient) -> None:
    told = ["ok", "hm.", "The  build\tfailed\n  again.", "Ça va ? 好的 🙂", "I moved there in May.", "OK", "ok then"]
    client.add_many(told, user="gil")
    assert [record.text for record in reversed(client.records(user="gil"))] == told


def test_a_write_calls_nobody(client: MemoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        called.append(address)
        connect(self, address)

    client.stats("hal")  # the connection of this client is open
    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.setattr(socket.socket, "connect_ex", watched)
    client.add_many(["My name is Hal.", "I am 40.", "I moved to Lisbon, and my dog came with me."], user="hal")
    assert called == []


def test_both_clients_have_the_same_methods_with_the_names_of_memory() -> None:
    methods = {name for name in vars(MemoryClient) if not name.startswith("_")}
    assert methods == {name for name in vars(AsyncMemoryClient) if not name.startswith("_")}
    for name in methods - {"send"}:
        mine, theirs = inspect.signature(getattr(MemoryClient, name)), inspect.signature(getattr(Memory, name))
        assert mine == inspect.signature(getattr(AsyncMemoryClient, name))
        assert set(mine.parameters) <= set(theirs.parameters), name


def test_a_key_says_whose_memories_they_are(serve: Serve) -> None:
    server = serve()
    key = server.app.state.keys.add("ada", user="ada")
    with MemoryClient(server.url, key) as client:
        assert client.add(LESSON).user == "ada"
        with pytest.raises(ServiceError, match="this key is bound to another user_id") as error:
            client.search("Who?", user="bo")
        assert error.value.status == 403
    with MemoryClient(server.url) as client, pytest.raises(ServiceError, match="the key is missing"):
        client.stats()


def read_request(connection: socket.socket) -> bytes:
    """A request with its body."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(1 << 16)
    length = re.search(rb"content-length: (\d+)", request.lower())
    end = request.index(b"\r\n\r\n") + 4 + (int(length[1]) if length else 0)
    chunked = b"transfer-encoding: chunked" in request.lower()
    while len(request) < end or (chunked and not request.endswith(b"\r\n0\r\n\r\n")):
        request += connection.recv(1 << 16)
    return request


@contextmanager
def between(server: Server, *, lose: int = 0, delay: float = 0) -> Iterator[tuple[str, list[bytes]]]:
    """The address of something before a server that passes requests on, and loses or delays the first answers."""
    requests: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        port = int(server.url.rpartition(":")[2])
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with suppress(ConnectionError), connection, socket.create_connection(("127.0.0.1", port)) as there:
                requests.append(read_request(connection))
                there.sendall(requests[-1].replace(b"keep-alive", b"close"))
                answer = b""
                while part := there.recv(1 << 16):
                    answer += part
                time.sleep(delay if len(requests) == 1 else 0)
                if len(requests) > lose:
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)


def test_a_write_whose_answer_was_lost_is_made_once(server: Server) -> None:
    with between(server, lose=2) as (url, requests), MemoryClient(url) as client:
        record = client.add("Ed asked twice.", user="ed")
    assert len(requests) == 3
    assert [(each.id, each.repeats) for each in server.memory.records(user="ed")] == [(record.id, 0)]


def test_a_write_that_takes_too_long_is_made_again_and_carried_out_once(server: Server) -> None:
    with between(server, delay=0.7) as (url, requests), MemoryClient(url, timeout=0.5) as client:
        record = client.add("Gus asked twice.", user="gus")
    assert len(requests) > 1
    assert [(each.id, each.repeats) for each in server.memory.records(user="gus")] == [(record.id, 0)]


def test_an_import_may_take_longer_than_anything_else(server: Server, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"text": "Hal has time.", "user": "hal"}\n')
    clients: list[Callable[[str], int]] = [
        lambda url: MemoryClient(url, timeout=0.2).import_(tmp_path / "lines"),
        lambda url: asyncio.run(AsyncMemoryClient(url, timeout=0.2).import_(tmp_path / "lines")),
    ]
    for added, import_ in zip((1, 0), clients, strict=True):
        with between(server, delay=0.4) as (url, _):
            assert import_(url) == added


def test_what_cannot_be_repeated_is_not(server: Server) -> None:
    record = server.memory.add("Flo has one life.", user="flo")
    lost = pytest.raises(ServiceError, match="the connection was lost; it is not known whether")
    with between(server, lose=1) as (url, requests), MemoryClient(url) as client, lost:
        client.delete(record.id, user="flo")
    assert len(requests) == 1
    assert server.memory.get(record.id, user="flo") is None


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    away = pytest.raises(ServiceError, match="the server cannot be reached")
    with MemoryClient(f"http://127.0.0.1:{port}", retries=1) as client, away as error:
        client.add("Hi.")
    assert error.value.status is None


def test_a_server_that_is_slow_is_one_sentence() -> None:
    slow = pytest.raises(ServiceError, match="the server did not answer in time")
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never answers
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with MemoryClient(url, timeout=0.05) as client, slow:
            client.search("Who?")


def test_a_client_waits_as_long_as_a_busy_server_says_and_no_longer_than_is_sensible() -> None:
    call = Calls().stats()
    for status, said, pause in (
        (429, "3", 3.0),
        (503, "1", 1.0),
        (503, "600", None),
        (503, "", None),
        (404, "3", None),
    ):
        assert call.pause(httpx.Response(status, headers={"Retry-After": said}), 0) == pause


@pytest.mark.slow
def test_a_busy_server_is_asked_again_when_it_says(server: Server) -> None:
    state = server.app.state
    before, state.rates = state.rates, Rates(12)  # one comes back after 5 seconds
    for _ in range(12):
        state.rates.spend("")
    try:
        with pytest.raises(ServiceError) as error, MemoryClient(server.url, retries=0) as client:
            client.stats("nobody")
        assert error.value.status == 429
        with MemoryClient(server.url) as client:
            assert client.stats("nobody")["records"] == 0
    finally:
        state.rates = before


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MemoryClient("localhost:8000"), "url is 'localhost:8000'; expected one such as"),
        (lambda: MemoryClient(key="kéy"), "key has characters that no key has"),
        (lambda: MemoryClient().add_many("one"), "texts is one text; expected a list of them"),
        (lambda: MemoryClient().add_many(["a", "b"], role=["user"]), "role has 1 entries; expected 2, one per text"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_sent(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.slow
def test_neither_the_client_nor_the_mcp_server_waits_for_torch() -> None:
    code = "import sys, titans.client, titans.service.mcp; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_tests_that_the_guide_names_exist() -> None:
    page = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:tests/(\w+)/)?(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) >= 6
    for folder, file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / (folder or "service") / file).read_text(encoding="utf-8"), test
