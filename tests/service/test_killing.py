"""A server that is killed with SIGKILL loses nothing that it acknowledged, and writes nothing twice."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENGINES = ["sqlite", "postgres"] if importlib.util.find_spec("pgserver") else ["sqlite"]
PROGRAM = Path(__file__).with_name("killing.py")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="servers are forked")]


def run(*arguments: object) -> dict[str, Any]:
    """The figures of the program, run by itself: it forks, which must not happen here among threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PROGRAM.parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize("engine", ENGINES)
def test_fifty_servers_that_are_killed_lose_nothing_and_write_nothing_twice(tmp_path: Path, engine: str) -> None:
    figures = run(tmp_path, "--rounds", 50, "--engines", engine)[engine]
    assert figures["rounds"] == 50
    assert figures["answers_lost"] > 0 and figures["sent_again"] > 0
    assert figures["records"] >= figures["acknowledged"] > 100
