"""A real PostgreSQL server with pgvector in a temporary folder: the wheel ``pgserver`` carries its programs."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

PASSWORD = "s3cret:/?@#"
SETTINGS = {"listen_addresses": "127.0.0.1", "shared_buffers": "64MB"}


class PostgresServer:
    """A server that runs until it is stopped: who comes by its socket is trusted, who comes by TCP needs a password."""

    def __init__(self, **settings: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pgserver
        self._programs: Any = pgserver
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._data = self.folder / "data"
        self._user = self._give_away() if os.name == "posix" and os.geteuid() == 0 else None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._options = SETTINGS | {"unix_socket_directories": str(self.folder), "port": str(self.port)} | settings
        try:
            self._run(
                "initdb", "--no-sync", "--username=postgres", "--encoding=utf8", "--locale=C", "--auth-local=trust",
                "--auth-host=scram-sha-256",
            )  # fmt: skip
            self.start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._data.exists():
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _give_away(self) -> str:
        """Gives the folder to another user, since the server refuses to run as root."""
        from pgserver import utils

        name = "pgserver"
        entry: Any = utils.ensure_user_exists(name)
        utils.ensure_prefix_permissions(Path(self._programs.__file__).parent / "pginstall" / "bin")
        os.chown(self.folder, entry.pw_uid, entry.pw_gid)
        return name

    def _run(self, program: str, *arguments: str) -> None:
        getattr(self._programs, program)([*arguments], pgdata=self._data, user=self._user)

    def start(self) -> None:
        """Starts the server, which recovers if it was killed, and waits until it answers."""
        options = " ".join(f"-c {name}={value}" for name, value in self._options.items())
        self._run("pg_ctl", "-w", "-t", "60", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        """Stops the server, if it runs."""
        with suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def kill(self) -> None:
        """Kills all processes of the server at once."""
        import psutil

        first = psutil.Process(int((self._data / "postmaster.pid").read_text().split()[0]))
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=30)

    def wait_for_clients(self) -> None:
        """Waits until the server has noticed that all clients are gone, and has undone what they left."""
        while self.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'titans'"):
            time.sleep(0.01)

    def url(self, schema: str, user: str = "postgres", database: str = "postgres") -> str:
        """Of a store on this server, by its socket."""
        return f"postgresql://{user}@/{database}?host={self.folder}&port={self.port}&schema={schema}"

    def tcp_url(self, schema: str, user: str = "postgres", password: str = PASSWORD, database: str = "postgres") -> str:
        """Of a store on this server, by TCP and with a password."""
        return f"postgresql://{user}:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}?schema={schema}"

    def execute(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Runs a statement as the administrator."""
        import psycopg

        parameters = {"host": str(self.folder), "port": self.port, "user": "postgres", "dbname": database}
        with psycopg.connect(**parameters, autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []


@functools.cache
def shared_server() -> PostgresServer:
    """One server for all tests of this process; it does not wait for the disk."""
    return PostgresServer(fsync="off")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The server, which is started when the first test needs it."""
    pytest.importorskip("psycopg")
    pytest.importorskip("pgserver")
    with shared_server() as server:
        yield server


@pytest.fixture
def new_schema(postgres_server: PostgresServer) -> Callable[[str], str]:
    """Makes the URL of a store that does not exist yet, by its name."""
    return lambda name: postgres_server.url(f"{name}-{uuid.uuid4().hex[:8]}")
