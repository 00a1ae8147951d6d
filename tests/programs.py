"""Programs that tests run by themselves, and servers that they talk to."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseServer
from typing import Any, TypeVar

ENGINES = ["sqlite", "postgres"] if importlib.util.find_spec("pgserver") else ["sqlite"]
Server = TypeVar("Server", bound=BaseServer)


def figures_of(program: Path, *arguments: object) -> dict[str, Any]:
    """The figures of a program that forks, which must not happen here among threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=program.parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextmanager
def running(made: Server) -> Iterator[Server]:
    """A server that answers in a thread."""
    with made as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
