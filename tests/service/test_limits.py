"""What one request and one caller may take, and what the server says beyond it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np
import pytest

from tests.service.conftest import Serve, Server
from titans.service.encoding import TOGETHER, BatchingEncoder
from titans.service.limits import Rates
from titans.service.metrics import Metrics
from titans.service.problems import Problem
from titans.service.settings import Limits
from titans.text.encoder import TextEncoder

SMALL = Limits(body_bytes=2_000, import_bytes=4_000, texts=3, text_bytes=1_000, concurrency=2, body_seconds=1)


@pytest.fixture(scope="module")
def small(serve: Serve) -> Server:
    """A server with narrow limits."""
    return serve(limits=SMALL)


@contextmanager
def raw(server: Server, head: str, body: bytes = b"") -> Iterator[socket.socket]:
    """A connection on which a request, or a part of one, was sent."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        text = f"{head} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        connection.sendall(text.encode() + body)
        yield connection


def read_all(connection: socket.socket) -> str:
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts).decode()


def test_what_is_too_large_is_refused(small: Server) -> None:
    for body, sentence in (
        ({"text": "x" * 3_000}, "the body is too large; expected at most 2,000 bytes"),
        ({"text": "x" * 1_001}, "a text has 1,001 bytes; expected at most 1,000, so cut it into parts"),
        ({"texts": ["x"] * 4}, "there are 4 texts; expected at most 3"),
    ):
        answer = small.http.post("/memories", json=body)
        assert (answer.status_code, answer.json()["detail"]) == (413, sentence)
    lines = b'{"text": "One."}\n' * 150
    assert small.http.post("/import", content=lines).status_code == 200  # which has a limit of its own
    assert small.http.post("/import", content=lines * 2).status_code == 413


def test_a_body_without_a_length_is_counted_as_it_comes(small: Server) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    answer = httpx.post(f"{small.url}/search", content=parts(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_body_that_does_not_arrive_is_given_up(small: Server) -> None:
    with raw(small, "POST /search", b'Content-Length: 100\r\n\r\n{"query": ') as slow:
        answer = read_all(slow)
    assert answer.startswith("HTTP/1.1 408 ")
    assert "the body did not arrive in time" in answer
    assert small.http.get("/stats").status_code == 200


def test_beyond_those_that_may_run_a_request_is_sent_away(small: Server) -> None:
    with ExitStack() as slow:
        for _ in range(100):  # some of the first may be sent away themselves
            slow.enter_context(raw(small, "POST /search", b"Content-Length: 100\r\n\r\n"))
            if (answer := small.http.get("/stats")).status_code == 503:
                break
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert small.http.get("/healthz").status_code == 200
    deadline = time.monotonic() + 5
    while small.http.get("/stats").status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert small.http.get("/stats").status_code == 200


def test_a_rate_is_of_one_caller_and_comes_back(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("titans.service.limits.time.monotonic", lambda: now)
    rates = Rates(60)
    for _ in range(60):
        rates.spend("ada")
    with pytest.raises(Problem) as refused:
        rates.spend("ada")
    assert (refused.value.status_code, refused.value.headers) == (429, {"Retry-After": "1"})
    rates.spend("ben")
    now = 1.0
    rates.spend("ada")
    with pytest.raises(Problem):
        rates.spend("ada")


def test_too_many_requests_are_told_when_to_come_back(serve: Serve) -> None:
    server = serve(limits=Limits(rate=2))
    statuses = [server.http.get("/stats").status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert int(server.http.get("/stats").headers["retry-after"]) in range(1, 61)


def test_texts_that_wait_together_are_encoded_together_with_the_same_vectors(encoder: TextEncoder) -> None:
    texts = [f"Text number {i} of some that wait." for i in range(16)]
    alone = [encoder.encode([text]) for text in texts]
    metrics = Metrics()
    together = BatchingEncoder(encoder, metrics)
    found: dict[int, np.ndarray] = {}
    barrier = threading.Barrier(len(texts))

    def ask(index: int) -> None:
        barrier.wait()
        found[index] = together.encode([texts[index]])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[i], alone[i]) for i in range(len(texts)))
    figures = metrics.render()
    assert "titans_encoder_texts_total" in figures
    batches = next(line for line in figures.splitlines() if line.startswith("titans_encoder_batches_total"))
    assert int(batches.split()[-1]) < len(texts)


def test_what_is_wrong_with_one_text_is_no_others_affair(encoder: TextEncoder) -> None:
    together = BatchingEncoder(encoder, Metrics())
    results = together._encode_all([["fine"], [None]])  # type: ignore[list-item]
    assert isinstance(results[0], np.ndarray)
    assert isinstance(results[1], ValueError)
    with pytest.raises(ValueError, match="expected"):
        together.encode([None])  # type: ignore[list-item]


class Watched(TextEncoder):
    """An encoder that notes what it is given, and begins when it may."""

    name, pooling, max_tokens, width, fingerprint = "watched", "mean", 256, 1, ""  # type: ignore[assignment]

    def __init__(self) -> None:
        self.begun, self.may = threading.Semaphore(0), threading.Event()
        self.batches: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.batches.append(list(texts))
        self.begun.release()
        self.may.wait()
        return np.array([[len(text)] for text in texts], dtype=np.float32)


def test_a_question_does_not_wait_for_the_whole_of_a_long_write() -> None:
    watched = Watched()
    together = BatchingEncoder(watched, Metrics())
    long = [f"{i} " + "word " * 1000 for i in range(50)]
    with ThreadPoolExecutor(3) as threads:
        writes = [threads.submit(together.encode, long)]
        assert watched.begun.acquire(timeout=10)
        writes.append(threads.submit(together.encode, long))
        question = threads.submit(together.encode, ["short"])
        while len(together._waiting) < 2:
            time.sleep(0.001)
        watched.may.set()
        assert question.result(10).tolist() == [[5]]
        for write in writes:
            assert write.result(10)[:, 0].tolist() == [len(text) for text in long]
    assert "short" in watched.batches[1] + watched.batches[2]
    assert max(sum(map(len, batch)) for batch in watched.batches) <= TOGETHER
