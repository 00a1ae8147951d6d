"""How much does `titans serve` withstand, and how long does a chat wait for it?

    titans bench service --seconds 60 --out runs/bench-service
    titans bench service --store postgresql://USER:PASSWORD@HOST/DATABASE

Starts a server in a process of its own, on loopback. Clients of this process, all at the same time, search and write;
measured are: requests per second, their times, errors, the memory of the server, and whether every write that was
acknowledged is there in the end. Then chats go through the server, one by one, to an upstream that answers at once:
measured is the time until the first token, less that of the upstream alone and that of the encoder.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from titans.bench.settings import ServiceBenchmarkSettings
from titans.bench.text import places
from titans.bench.timing import about, bar_figure, new_report, work_folder
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent
from titans.text.location import hide_password

if TYPE_CHECKING:
    import httpx

STARTING = 120.0  # seconds that a server has
PART = 100  # texts of a request that fills the store
PAGE = 1000
WARM_UP = 5  # chats that are not timed
LOAD, CHATS = "Searches and writes of many clients", "Chats through the proxy"  # titles of sections
QUICK: dict[str, Any] = {"seconds": 3, "clients": 8, "records": 100, "chats": 5}
WHO = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Grace", "Hugo")
DOES = ("plays", "lost", "bought", "repairs", "paints", "sold", "likes", "borrowed")
WHAT = ("the piano", "a red bicycle", "two tickets to Oslo", "the old boat", "a blue door", "fresh bread", "a map")


@dataclass
class Seen:
    """What the clients saw: seconds by kind, what went wrong, and the ids that each user was given."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"search": [], "write": []})
    errors: Counter[str] = field(default_factory=Counter)
    written: dict[str, set[str]] = field(default_factory=dict)


def new_text(draw: random.Random) -> str:
    """A sentence that is most likely new."""
    return f"{draw.choice(WHO)} {draw.choice(DOES)} {draw.choice(WHAT)} on day {draw.randrange(10**6)}."


@contextmanager
def running_server(store: str, folder: Path, upstream: str, threads: int) -> Iterator[tuple[str, int]]:
    """The URL and the process of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "titans", "serve", "--store", store, "--port", str(port), "--keys", str(folder / "keys"),
        "--upstream", upstream, "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx

    end = time.monotonic() + STARTING
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise ValueError("the server did not start; its log says why")


class _Upstream(BaseHTTPRequestHandler):
    """Answers every chat at once with one token: a space, so that there is nothing to remember of it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Not to the terminal."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'data: {"choices": [{"index": 0, "delta": {"content": " "}}]}\n\ndata: [DONE]\n\n'
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running_upstream() -> Iterator[str]:
    """The URL of an endpoint that answers chats at once."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Upstream) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def process_bytes(process: int) -> int:
    """The resident memory of another process."""
    try:
        return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0]) * 1024
    except OSError:  # not Linux
        import psutil

        return int(psutil.Process(process).memory_info().rss)


async def _fill(http: httpx.AsyncClient, records: int, users: int, draw: random.Random) -> None:
    for start in range(0, records, PART):
        texts = [new_text(draw) for _ in range(min(PART, records - start))]
        answer = await http.post("/memories", json={"texts": texts, "user_id": f"user {start // PART % users}"})
        answer.raise_for_status()


async def _client(http: httpx.AsyncClient, number: int, share: float, end: float, seen: Seen) -> None:
    """Searches and writes, one after the other, until the end."""
    draw, user = random.Random(number), f"user {number}"
    while time.perf_counter() < end:
        is_write = draw.random() < share
        text = new_text(draw)
        body = {"text": text, "user_id": user} if is_write else {"query": text, "user_id": user}
        begun = time.perf_counter()
        try:
            answer = await http.post("/memories" if is_write else "/search", json=body)
        except Exception as error:
            seen.errors[type(error).__name__] += 1
            continue
        if answer.status_code != (201 if is_write else 200):
            seen.errors[str(answer.status_code)] += 1
            continue
        seen.seconds["write" if is_write else "search"].append(time.perf_counter() - begun)
        if is_write:
            seen.written.setdefault(user, set()).update(each["id"] for each in answer.json()["results"])


async def _count_lost(http: httpx.AsyncClient, written: dict[str, set[str]]) -> int:
    """How many of the records that were acknowledged are not there."""
    lost = 0
    for user, ids in written.items():
        found: set[str] = set()
        parameters: dict[str, Any] | None = {"user_id": user, "limit": PAGE}
        while parameters is not None:
            page = (await http.get("/memories", params=parameters)).raise_for_status().json()
            found |= {each["id"] for each in page["results"]}
            parameters = None if page["next"] is None else {**parameters, "cursor": page["next"]}
        lost += len(ids - found)
    return lost


async def measure_load(
    url: str, process: int, settings: ServiceBenchmarkSettings, progress: Progress = silent
) -> dict[str, Any]:
    """What many clients at the same time get, and what they do to the server."""
    import httpx

    many = httpx.Limits(max_connections=settings.clients, max_keepalive_connections=settings.clients)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=many) as http:
        progress(0, 3, "filling the store")
        await _fill(http, settings.records, settings.clients, random.Random(-1))
        await asyncio.gather(*(http.get("/stats") for _ in range(settings.clients)))  # connects
        seen, share = Seen(), settings.writes / 100
        progress(1, 3, "searching and writing")
        sizes = [process_bytes(process)]
        begun = time.perf_counter()
        end = begun + settings.seconds

        async def watch() -> None:
            await asyncio.sleep(settings.seconds / 2)
            sizes.append(process_bytes(process))

        await asyncio.gather(watch(), *(_client(http, i, share, end, seen) for i in range(settings.clients)))
        took = time.perf_counter() - begun
        sizes.append(process_bytes(process))
        progress(2, 3, "looking up what was written")
        lost = await _count_lost(http, seen.written)
    answered = sum(map(len, seen.seconds.values()))
    results: dict[str, Any] = {
        "requests": answered, "requests_per_second": answered / took, "errors": sum(seen.errors.values()),
        "kinds_of_errors": dict(seen.errors), "acknowledged": sum(map(len, seen.written.values())), "lost": lost,
        "server_bytes": sizes,
    }  # fmt: skip
    for kind, seconds in seen.seconds.items():
        results |= {f"{kind}_{name}": value for name, value in _shares(seconds).items()}
    return results


def _shares(seconds: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds; None if there is nothing."""
    names = {"p50_ms": 50, "p99_ms": 99}
    return {name: 1e3 * float(np.percentile(seconds, share)) if seconds else None for name, share in names.items()}


def _encoder_seconds(http: httpx.Client) -> float:
    """For how long the server's encoder has worked, in all."""
    found = re.findall(r"^titans_encoder_seconds_total\S* (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def _first_token(http: httpx.Client, url: str, text: str) -> float:
    """Seconds until the first token of an answer."""
    body = {"model": "any", "stream": True, "messages": [{"role": "user", "content": text}]}
    begun = time.perf_counter()
    with http.stream("POST", url, json=body, headers={"X-Memory-User": "user 0"}) as answer:
        answer.raise_for_status()
        seconds = 0.0
        for line in answer.iter_lines():  # to the end, so that the connection can be used again
            if line.startswith("data:") and not seconds:
                seconds = time.perf_counter() - begun
    return seconds


def measure_chats(url: str, upstream: str, chats: int, progress: Progress = silent) -> dict[str, Any]:
    """What the proxy adds to the time until the first token, with the encoder's time and without it."""
    import httpx

    draw = random.Random(-2)
    added, encoder = [], []
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(-WARM_UP, chats):
            progress(max(0, number), chats, "chatting")
            text = new_text(draw)
            alone = _first_token(http, f"{upstream}/chat/completions", text)
            before = _encoder_seconds(http)
            through = _first_token(http, "/v1/chat/completions", text)
            if number >= 0:
                encoder.append(_encoder_seconds(http) - before)
                added.append(through - alone)
    rest = [whole - part for whole, part in zip(added, encoder, strict=True)]
    figures = {"added": added, "encoder": encoder, "overhead": rest}
    return {f"chat_{what}_{name}": value for what, each in figures.items() for name, value in _shares(each).items()}


def run_service_benchmark(settings: ServiceBenchmarkSettings, progress: Progress = silent) -> dict[str, Any]:
    """Measure a server; returns the report, a dict that is ready for JSON."""
    report = new_report("service", settings, settings.threads)
    if settings.store is not None:
        report["settings"]["store"] = hide_password(settings.store)
    with (
        work_folder(None) as folder,
        places(settings.store, folder) as place,
        running_upstream() as upstream,
        running_server(place("served"), folder, upstream, settings.threads) as (url, process),
    ):
        results = asyncio.run(measure_load(url, process, settings, progress))
        results |= measure_chats(url, upstream, settings.chats, progress)
    return report | {"results": results}


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def sections(report: dict[str, Any]) -> list[Section]:
    """All figures, as text and tables."""
    found, settings = report["results"], report["settings"]
    sizes = ", ".join(f"{size / 1e6:,.0f}" for size in found["server_bytes"])
    rows = [
        ["requests answered per second", f"{found['requests_per_second']:,.1f}"],
        *[
            [f"{kind}, {name}", _milliseconds(found[f"{kind}_{key}_ms"])]
            for kind in ("search", "write")
            for name, key in (("median", "p50"), ("p99", "p99"))
        ],
        ["errors", " ".join([str(found["errors"]), *(f"({name})" for name in found["kinds_of_errors"])])],
        ["writes acknowledged", f"{found['acknowledged']:,}"],
        ["writes lost", f"{found['lost']:,}"],
        ["memory of the server at the start, in the middle, at the end", f"{sizes} MB"],
    ]
    names = {
        "added": "added to the first token", "encoder": "the encoder's part of it", "overhead": "everything else",
    }  # fmt: skip
    chats = [
        [name, _milliseconds(found[f"chat_{key}_p50_ms"]), _milliseconds(found[f"chat_{key}_p99_ms"])]
        for key, name in names.items()
    ]
    about_it = (
        f"{settings['clients']} clients for {settings['seconds']} s, {settings['writes']}% writes, a store with "
        f"{settings['records']:,} records before."
    )
    alone = f"{settings['chats']} chats one by one, less the time of the upstream alone."
    return [
        Section(LOAD, [about_it], [Table(["", "measured"], rows)]),
        Section(CHATS, [alone], [Table(["milliseconds", "median", "p99"], chats)]),
        about(report),
    ]


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """The times of searches and writes, by the title of the section."""
    found = report["results"]
    times = {kind: [found[f"{kind}_{share}_ms"] for share in ("p50", "p99")] for kind in ("search", "write")}
    return {LOAD: [bar_figure("service-load", "Time of a request", ["median", "p99"], times, "", "milliseconds")]}
