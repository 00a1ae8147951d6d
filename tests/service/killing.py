"""A server that is killed under load, and what must hold of what it acknowledged; as a program, it prints JSON.

    python tests/service/killing.py FOLDER --rounds 50 --clients 8 --engines sqlite postgres

In every round a server is forked from a process that has loaded the encoder, clients write and search, and the server
is killed with SIGKILL in the middle of it. The next server must have every write that was acknowledged. Each client
sends what was not acknowledged again, with its idempotency key, and now and then something that was, as if the answer
had been lost: no text may ever be there twice, or be counted as told again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from titans.service.run import configure
from titans.service.settings import Settings
from titans.text.encoder import TextEncoder

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program, it is not part of a package
from tests.text.postgres_server import PostgresServer

STARTING = 60.0  # seconds that a server has
AGAIN = 0.1  # share of the writes that are sent again though they were acknowledged
SEARCHES = 0.2
PAGE = 1000


@dataclass
class Write:
    """A request that writes, and the ids in its answer once there was one."""

    key: str
    texts: list[str]
    ids: list[str] | None = None


@dataclass
class Client:
    """What one client has sent, in all rounds."""

    name: str
    draw: random.Random
    writes: list[Write] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    again: int = 0

    def send(self, http: httpx.Client, write: Write) -> None:
        """Sends a write, maybe not for the first time."""
        body = {"texts": write.texts, "user_id": "ada", "run_id": self.name}
        answer = http.post("/memories", json=body, headers={"Idempotency-Key": write.key})
        if answer.status_code != 201:
            self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")
            return
        ids = [each["id"] for each in answer.json()["results"]]
        if write.ids not in (None, ids):
            self.wrong.append(f"{write.key} wrote {write.ids} and then {ids}")
        write.ids = ids

    def work(self, url: str, stopped: threading.Event) -> None:
        """Calls the server until it is gone: first what it did not acknowledge before."""
        with httpx.Client(base_url=url, timeout=30) as http:
            try:
                for write in self.writes:
                    if write.ids is None:
                        self.again += 1
                        self.send(http, write)
                while not stopped.is_set() and not self.wrong:
                    self.step(http)
            except httpx.TransportError:
                pass  # it was killed

    def step(self, http: httpx.Client) -> None:
        """One random call."""
        if self.draw.random() < SEARCHES:
            answer = http.post("/search", json={"query": "Who counts?", "user_id": "ada", "limit": 3})
            if answer.status_code != 200:
                self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")
            return
        acknowledged = [write for write in self.writes[-20:] if write.ids is not None]
        if acknowledged and self.draw.random() < AGAIN:
            self.again += 1
            self.send(http, self.draw.choice(acknowledged))
            return
        many = self.draw.choice([1, 1, 1, 3])
        texts = [f"{self.name} counts to {self.draw.getrandbits(60)}." for _ in range(many)]
        self.writes.append(Write(uuid.UUID(int=self.draw.getrandbits(128)).hex, texts))
        self.send(http, self.writes[-1])


def check(url: str, clients: list[Client]) -> int:
    """Raises if an acknowledged write is not there, or any is there twice; returns how many records there are."""
    found: dict[str, dict[str, Any]] = {}
    with httpx.Client(base_url=url, timeout=60) as http:
        cursor: str | None = ""
        while cursor is not None:
            page = http.get(
                "/memories", params={"user_id": "ada", "limit": PAGE, **({"cursor": cursor} if cursor else {})}
            )
            assert page.status_code == 200, page.text
            for each in page.json()["results"]:
                assert each["memory"] not in found, f"{each['memory']} is there twice"
                assert each["repeats"] == 0, f"{each['memory']} was written {each['repeats'] + 1} times"
                found[each["memory"]] = each
            cursor = page.json()["next"]
    for client in clients:
        assert not client.wrong, client.wrong
        for write in client.writes:
            there = [text in found for text in write.texts]
            assert all(there) or (write.ids is None and not any(there)), f"of {write}, there is {there}"
            if write.ids is not None:
                assert write.ids == [found[text]["id"] for text in write.texts], f"{write} has other ids"
    return len(found)


def fork_server(settings: Settings) -> int:
    """Starts a server in a process of its own; returns its id when it is ready."""
    process = os.fork()
    if not process:
        try:
            uvicorn.Server(configure(settings)).run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    end = time.monotonic() + STARTING
    while time.monotonic() < end:
        try:
            if httpx.get(f"http://127.0.0.1:{settings.port}/readyz").status_code == 200:
                return process
        except httpx.TransportError:
            time.sleep(0.02)
        assert not os.waitpid(process, os.WNOHANG)[0], "the server ended by itself"
    raise AssertionError(f"the server did not start in {STARTING:.0f} seconds")


def acknowledged(clients: list[Client]) -> int:
    return sum(write.ids is not None for client in clients for write in client.writes)


def wait_for(clients: list[Client], writes: int) -> None:
    """Waits until so many writes were acknowledged: a server that has just begun is slow."""
    end = time.monotonic() + STARTING
    while acknowledged(clients) < writes and time.monotonic() < end:
        time.sleep(0.01)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def run(folder: Path, encoder: TextEncoder, engine: str, rounds: int, many: int, seconds: float) -> dict[str, float]:
    """All rounds, and a last server that is checked; returns figures."""
    draw = random.Random(0)
    clients = [Client(f"client {number}", random.Random(number)) for number in range(many)]
    lost_answers = records = 0
    with ExitStack() as stack:
        place = folder / engine
        server = stack.enter_context(PostgresServer()) if engine == "postgres" else None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = Settings(
            place if server is None else server.url("killed"), encoder, port=port, keys=folder / f"{engine}-keys",
            log_level="critical",
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        for _ in range(rounds):
            process = fork_server(settings)
            try:
                records = check(url, clients)
                stopped = threading.Event()
                threads = [threading.Thread(target=client.work, args=(url, stopped)) for client in clients]
                for thread in threads:
                    thread.start()
                wait_for(clients, acknowledged(clients) + many)
                time.sleep(draw.uniform(0, seconds))
            finally:
                kill(process)
            stopped.set()
            for thread in threads:
                thread.join()
            lost_answers += sum(write.ids is None for client in clients for write in client.writes)
        process = fork_server(settings)
        try:
            stopped.set()
            for client in clients:
                client.work(url, stopped)  # only what was not acknowledged
            records = check(url, clients)
            assert all(write.ids is not None for client in clients for write in client.writes)
        finally:
            kill(process)
    sent_again = sum(client.again for client in clients)
    return {
        "rounds": rounds, "acknowledged": acknowledged(clients), "answers_lost": lost_answers, "sent_again": sent_again,
        "records": records,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="Of a round, at most.")
    parser.add_argument("--engines", nargs="+", choices=["sqlite", "postgres"], default=["sqlite"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    encoder = TextEncoder.load()
    given = (options.rounds, options.clients, options.seconds)
    print(json.dumps({engine: run(options.folder, encoder, engine, *given) for engine in options.engines}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
