"""A server as `titans serve` runs it: several processes, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cli.commands import assert_refused, run
from tests.service.conftest import running
from titans.cli.mcp import _open as open_for_mcp
from titans.service.settings import Settings
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.records import ReadOnlyStore


@contextmanager
def served(store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The process of `titans serve`, its URL and its log, once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    log = store.with_suffix(".log")
    arguments = [sys.executable, "-m", "titans", "serve", "--store", str(store), "--port", port, *options]
    with log.open("wb") as stream, subprocess.Popen(arguments, stderr=stream) as process:
        try:
            deadline = time.monotonic() + 240
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).raise_for_status()
                    break
                except httpx.HTTPError:
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.2)
            yield process, f"http://127.0.0.1:{port}", log
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_that_is_stopped_under_load_finishes_its_writes(
    tmp_path: Path, encoder: TextEncoder, workers: str
) -> None:
    acknowledged: list[str] = []

    def write(url: str, number: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            for index in range(10_000):
                text = f"Fact {index} of writer {number}, which is a secret."
                try:
                    answer = http.post("/memories", json={"text": text, "user_id": "ada"})
                except httpx.HTTPError:
                    return
                assert answer.status_code == 201, answer.text
                acknowledged.append(text)

    with served(tmp_path / "store", "--workers", workers) as (process, url, log):
        writers = [threading.Thread(target=write, args=(url, number)) for number in range(8)]
        for writer in writers:
            writer.start()
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        for writer in writers:
            writer.join()
        assert process.wait(60) in (0, -signal.SIGTERM)
    with Memory(tmp_path / "store", encoder=encoder) as memory:
        texts = [record.text for record in memory.records(user="ada", limit=100_000)]
        assert memory.check() == []
    assert len(acknowledged) > 20
    assert set(acknowledged) <= set(texts)
    # Not one request was cut off: each that was written was also acknowledged.
    assert len(texts) == len(set(texts)) == len(acknowledged)
    logged = log.read_text()
    assert "POST /memories 201" in logged
    assert "secret" not in logged
    assert "ada" not in logged


def test_a_store_that_cannot_be_opened_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store.db").write_bytes(b"something else")
    assert_refused(("serve", "--store", str(tmp_path / "store.db")), "is not a memory store", tmp_path, capsys)


def test_an_import_ends_between_two_writes_when_the_server_stops(
    tmp_path: Path, encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titans.text.memory.BATCH", 1)
    lines = "".join(json.dumps({"text": f"Fact {number}.", "user": "ada"}) + "\n" for number in range(500))
    with ThreadPoolExecutor(1) as threads, running(Settings(tmp_path, encoder, port=0)) as server:
        importing = threads.submit(httpx.post, f"{server.url}/import", content=lines, timeout=60)
        while not server.memory.records(user="ada", limit=1):
            time.sleep(0.01)
    answer = importing.result()
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    with Memory(tmp_path, encoder=encoder) as memory:
        many = len(memory.records(user="ada", limit=500))
    assert 0 < many < 500
    assert answer.json()["detail"].startswith(f"the server is stopping; {many} memories were imported")


@pytest.mark.slow
def test_a_request_that_is_given_up_when_the_server_stops_is_told(tmp_path: Path, encoder: TextEncoder) -> None:
    settings = Settings(tmp_path, encoder, port=0, shutdown_seconds=1)
    with ThreadPoolExecutor(1) as threads, running(settings) as server:

        @server.app.get("/never")
        async def never() -> None:
            await asyncio.sleep(60)

        asking = threads.submit(httpx.get, f"{server.url}/never", timeout=30)
        while not server.app.state.metrics.running:
            time.sleep(0.01)
    assert (asking.result().status_code, asking.result().json()["detail"]) == (503, "the server is stopping")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"upstream": "https://example.com/v1?version=1"}, "upstream is"),
        ({"upstream": "https://example.com/v1#"}, "upstream is"),
        ({"upstream": "https:///v1"}, "upstream is"),
        ({"upstream_key": ""}, "upstream_key is empty"),
        ({"upstream_key": "secret\n"}, "upstream_key is empty or has"),
    ],
)
def test_an_upstream_that_cannot_be_asked_is_refused_without_its_key(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        Settings(**settings)  # type: ignore[arg-type]
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("given", "key"), [("", None), ("ours", "ours")])
def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch, given: str, key: str | None) -> None:
    started: list[Settings] = []
    monkeypatch.setattr("titans.service.run.run", started.append)
    monkeypatch.setenv("TITANS_UPSTREAM_KEY", given)
    run("serve")
    assert started[0].upstream_key == key


def test_a_store_that_can_only_be_read_is_opened_to_read_for_an_mcp_client(
    tmp_path: Path, encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Memory(tmp_path, encoder=encoder) as memory:
        memory.add("Ada plays the piano.")
    monkeypatch.setattr(
        "titans.service.settings.can_write", lambda place: False
    )  # who runs the tests may write anything
    with open_for_mcp(tmp_path, encoder, None) as memory:  # type: ignore[arg-type]
        assert memory.search("piano").hits
        with pytest.raises(ReadOnlyStore):
            memory.add("Ada sings.")
