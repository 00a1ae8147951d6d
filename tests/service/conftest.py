"""A real server, started once for the tests of a module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tests.text.postgres_server import new_schema, postgres_server  # noqa: F401
from titans.service.run import configure
from titans.service.settings import Settings
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory


@dataclass(frozen=True)
class Server:
    """A running server: where it is, how to talk to it, and what is inside."""

    url: str
    http: httpx.Client
    app: FastAPI

    @property
    def memory(self) -> Memory:
        memory: Memory = self.app.state.memory
        return memory


Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def encoder() -> TextEncoder:
    """The packaged encoder, loaded once."""
    return TextEncoder.load()


@contextmanager
def running(settings: Settings) -> Iterator[Server]:
    """A server in a thread of this process, on a free port, until the end."""
    config = configure(settings)
    config.load()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=30) as http:
            yield Server(url, http, _application(config))
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def _application(config: uvicorn.Config) -> FastAPI:
    app: Any = config.loaded_app
    while not isinstance(app, FastAPI):
        app = app.app
    return app


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, encoder: TextEncoder) -> Iterator[Serve]:
    """Starts servers with the settings given, each on a store of its own unless one is named."""
    with ExitStack() as running_servers:

        def start(**settings: Any) -> Server:
            made = {"store": tmp_path_factory.mktemp("store"), "encoder": encoder, "port": 0, **settings}
            return running_servers.enter_context(running(Settings(**made)))

        yield start


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    """A server without keys."""
    return serve()
