"""Requests that nobody means well with: each gets a status and one sentence, and the server goes on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import psutil
import pytest

from tests.service.conftest import Serve, Server
from titans.service.settings import Limits

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def hasty(serve: Serve) -> Server:
    """A server that waits a second for a body, with a memory in it."""
    server = serve(limits=Limits(body_seconds=1, import_bytes=8 << 20, chat_bytes=8 << 20))
    server.memory.add("Ada plays the piano.", user="ada")
    return server


@pytest.fixture(autouse=True)
def _goes_on(hasty: Server) -> Iterator[None]:
    """After each of these tests the server answers, and has what it had."""
    yield
    assert hasty.http.get("/healthz").status_code == 200
    found = hasty.http.get("/memories", params={"user_id": "ada"}).json()["results"]
    assert [each["memory"] for each in found] == ["Ada plays the piano."]


def sentence(answer: httpx.Response, *statuses: int) -> str:
    """What a problem says: one sentence, in one line, with nothing of the server's inside."""
    assert answer.status_code in statuses, (answer.status_code, answer.text[:300])
    assert answer.headers["content-type"] == "application/problem+json"
    detail: str = answer.json()["detail"]
    assert detail and "\n" not in detail and len(detail) < 400
    assert not any(word in detail for word in ("Traceback", "site-packages", ".py", "0x"))
    return detail


def exchange(server: Server, data: bytes, seconds: float = 1.2) -> str:
    """What a server answers to these bytes until it hangs up, or says nothing for a while."""
    parts: list[bytes] = []
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with suppress(TimeoutError, ConnectionError), socket.create_connection(address, timeout=seconds) as connection:
        connection.sendall(data)
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts).decode()


def test_ten_megabytes_are_refused_before_and_while_they_arrive(hasty: Server) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(160):
            yield b"x" * 65_536

    for path in ("/memories", "/search", "/export", "/mcp", "/v1/chat/completions", "/v1/messages", "/import"):
        text = json.dumps({"text": "x" * (10 << 20)}).encode()
        assert hasty.http.post(path, content=text, headers=JSON).status_code == 413
        with suppress(httpx.WriteError, httpx.ReadError):  # hung up on while it still talked
            assert httpx.post(hasty.url + path, content=parts(), headers=JSON).status_code == 413


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"text": "\xff\xfe"}', 400),
        (b'\xff\xfe{\x00"\x00t\x00', 400),
        (b'{"text": "\\ud800"}', 422),
        (b'{"text": "x", "metadata": {"a": "\\ud800"}}', 422),
        (b'{"text": "\\u0000"}', 422),
        (b'{"text": "x", "user_id": "\\u0000"}', 422),
        (b'{"text": "x", "user_id": "' + b"u" * 5000 + b'"}', 422),
        (b"[" * 100_000, 400),
        (b'{"text": "x", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", (400, 422)),
        (b'{"text": "x", "metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", 422),
        (b'{"text": "x", "metadata": {"a": NaN}}', (400, 422)),
        (b'{"text": "x", "metadata": {"a": Infinity}}', (400, 422)),
        (b'{"text": "x", "metadata": {"a": 1e999}}', (400, 422)),
        (b'{"text": "x", "metadata": {"a": ' + b"9" * 5000 + b"}}", (400, 422)),
        (b'{"text": "x", "metadata": {"a": 99999999999999999999}}', 422),
        (b'{"text": "x", "text": 5}', 422),
        (b'{"text": "x", "__proto__": {}}', 422),
        (b'{"text": "x", "' + b"f" * 100_000 + b'": 1}', 422),
        (b'{"text": true}', 422),
        (b"null", 422),
        (b"[]", 422),
        (b"5", 422),
        (b'"text"', 422),
        (b"", 422),
        (b"{", 400),
        (b'{"text": "x"}{"text": "y"}', 400),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_what_is_no_request_is_refused_in_a_sentence(hasty: Server, body: bytes, status: int | tuple[int, ...]) -> None:
    statuses = status if isinstance(status, tuple) else (status,)
    sentence(hasty.http.post("/memories", content=body, headers=JSON), *statuses)
    assert hasty.http.post("/search", content=body, headers=JSON).status_code in (400, 422)


@pytest.mark.parametrize("number", ["0", "-1", "1e400", "NaN", "9" * 400, "1.5", '"10"', "true", "[]", "null"])
def test_a_limit_that_is_no_number_is_refused(hasty: Server, number: str) -> None:
    body = f'{{"query": "piano", "limit": {number}}}'.encode()
    sentence(hasty.http.post("/search", content=body, headers=JSON), 400, 422)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "multipart/form-data", "application/json; charset=utf-16", "", "x" * 4000]
)
def test_another_type_of_body_is_refused(hasty: Server, kind: str) -> None:
    answer = hasty.http.post("/memories", content=b'<text a="b">', headers={"Content-Type": kind})
    sentence(answer, 400, 415, 422)


@pytest.mark.parametrize(
    "path",
    [
        "/memories/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/memories/..%5c..%5c", "/memories/%00", "/memories/a%00b",
        "/memories/%0d%0aX-Injected:%201", "/memories/%ff%fe", "/memories/" + "i" * 5000, "/memories/%20",
        "/memories/'%20OR%201=1--", "/memories/{id}", "/page/..%2fpage.py", "/page/%2e%2e%2f%2e%2e%2f__init__.py",
        "/page/%2fetc%2fpasswd", "/page/index.html%00.js", "/page//etc/passwd", "/page/", "//memories", "/memories//",
        "/./memories/../stats/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/docs", "/.git/config", "/mcp/../x",
    ],
)  # fmt: skip
def test_tricks_with_paths_find_nothing(hasty: Server, path: str) -> None:
    port = hasty.url.rpartition(":")[2]
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"  # as it is: clients tidy paths
    answer = exchange(hasty, head.encode("latin-1"))
    status = int(answer.split(" ", 2)[1])
    assert status in (307, 404, 405, 422)
    assert "root:" not in answer and "import " not in answer and "\r\nX-Injected" not in answer


def test_headers_and_names_inject_nothing(hasty: Server) -> None:
    told = hasty.http.post("/memories", json={"text": "x", "user_id": "eve"}, headers={"Idempotency-Key": "a" * 201})
    sentence(told, 422)
    answer = hasty.http.post("/memories", json={"text": "x", "user_id": "a\r\nX-Injected: 1"})
    assert "U+000D" in sentence(answer, 422) and "x-injected" not in answer.headers
    port = hasty.url.rpartition(":")[2]
    for head in (
        "X-Memory-User: a\x00b", "X-Memory-User: " + "u" * 300, "X-Memory: sideways",
        "X-Memory-User: a\x01b",
    ):  # fmt: skip
        body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        raw = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{head}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        answered = exchange(hasty, raw.encode("latin-1") + body)
        assert answered.split(" ", 2)[1] in ("400", "422"), (head, answered[:300])


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nContent-Length: 6", "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: -1", "Content-Length: 0x5", "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity", "Content-Length: 99999999999999999999999",
        "Content-Length : 5", "\x00: 1", "No colon",
    ],
)  # fmt: skip
def test_a_request_that_could_be_read_in_two_ways_is_refused(hasty: Server, head: str) -> None:
    """Otherwise a server before this one could take the rest of it for a request of somebody else."""
    port = hasty.url.rpartition(":")[2]
    smuggled = "0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    raw = (
        f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n{head}\r\n\r\n{smuggled}"
    )
    answer = exchange(hasty, raw.encode("latin-1"))
    assert "titans_requests" not in answer
    assert answer.count("HTTP/1.1 ") <= 1 and not answer.startswith("HTTP/1.1 2")


def test_headers_without_end_are_hung_up_on(hasty: Server) -> None:
    port = hasty.url.rpartition(":")[2]
    endless = f"GET /stats HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n" + "X-More: more\r\n" * 100_000
    answer = exchange(hasty, endless.encode())
    assert answer == "" or answer.startswith("HTTP/1.1 4")


@pytest.mark.parametrize("chunk", ["ffffffffffffffffff\r\nx", "-1\r\nx", "zz\r\n", "5;" + "e" * 100_000 + "\r\nx"])
def test_chunks_that_are_none_are_refused(hasty: Server, chunk: str) -> None:
    port = hasty.url.rpartition(":")[2]
    head = f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(hasty, (head + chunk).encode())
    assert answer == "" or answer.split(" ", 2)[1] in ("400", "408", "413", "422")


def test_slow_clients_do_not_keep_others_waiting(hasty: Server) -> None:
    port = int(hasty.url.rpartition(":")[2])
    starts = (
        b"GET /stats HT",  # never ends its line
        b"GET /stats HTTP/1.1\r\nHost: x\r\nX-Slow: ",  # nor its headers
        b'POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"query": ',  # nor its body
    )
    before = psutil.Process().num_fds()
    with ExitStack() as open_ones:
        slow = [open_ones.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)]
        for number, connection in enumerate(slow):
            connection.sendall(starts[number % 2])
        begun = time.monotonic()
        for _ in range(5):
            assert hasty.http.post("/search", json={"query": "piano", "user_id": "ada"}).status_code == 200
        assert time.monotonic() - begun < 5
        dripping = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.1))
        dripping.sendall(starts[2])
        said = b""
        while not said and time.monotonic() - begun < 10:
            try:
                said = dripping.recv(100)
            except TimeoutError:
                dripping.sendall(b"x")
        assert said.startswith(b"HTTP/1.1 408 ")
    deadline = time.monotonic() + 5
    while psutil.Process().num_fds() > before + 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert psutil.Process().num_fds() <= before + 5


def test_headers_that_do_not_arrive_are_given_up(hasty: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans.service.protocol.HEADER_SECONDS", 0.3)
    port = hasty.url.rpartition(":")[2]
    whole = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    for sent in ("", "GET /sta", whole + "X-Slow: "):
        begun = time.monotonic()
        assert exchange(hasty, sent.encode(), seconds=10) == ""
        assert 0.25 < time.monotonic() - begun < 5
    with httpx.Client(base_url=hasty.url) as patient:  # who takes time between requests is not hung up on
        first = patient.get("/healthz").extensions["network_stream"].get_extra_info("client_addr")
        time.sleep(0.5)
        assert patient.get("/healthz").extensions["network_stream"].get_extra_info("client_addr") == first


@pytest.mark.slow
def test_what_is_refused_leaves_no_memory_behind(hasty: Server) -> None:
    body = json.dumps({"text": "x" * (3 << 20)}).encode()

    def hammer(many: int) -> int:
        for _ in range(many):
            assert hasty.http.post("/memories", content=body, headers=JSON).status_code == 413
            hasty.http.get(f"/memories/{time.monotonic_ns()}")
        return psutil.Process().memory_info().rss

    hammer(10)
    before = hammer(10)
    assert hammer(30) - before < 20 << 20
