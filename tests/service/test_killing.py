"""A server that is killed with SIGKILL loses nothing that it acknowledged, and writes nothing twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import ENGINES, figures_of

PROGRAM = Path(__file__).with_name("killing.py")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="servers are forked")]


@pytest.mark.parametrize("engine", ENGINES)
def test_fifty_servers_that_are_killed_lose_nothing_and_write_nothing_twice(tmp_path: Path, engine: str) -> None:
    figures = figures_of(PROGRAM, tmp_path, "--rounds", 50, "--engines", engine)[engine]
    assert figures["rounds"] == 50
    assert figures["answers_lost"] > 0 and figures["sent_again"] > 0
    assert figures["records"] >= figures["acknowledged"] > 100
