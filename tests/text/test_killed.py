from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import ENGINES, figures_of

PROGRAM = Path(__file__).with_name("killing.py")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="writers are forked")


def test_writers_that_are_killed_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    figures = figures_of(PROGRAM, tmp_path / "work", "--rounds", 3, "--seconds", 1.5, "--engines", *ENGINES)
    assert [each["rounds"] for each in figures.values()] == [3] * len(ENGINES)
    assert all(each["most_records"] > 0 for each in figures.values())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_hundred_rounds_of_four_writers_lose_nothing(tmp_path: Path, engine: str) -> None:
    figures = figures_of(PROGRAM, tmp_path / "work", "--rounds", 200, "--seed", 1, "--engines", engine)[engine]
    assert figures["rounds"] == 200 and figures["most_records"] > 100
    assert figures["server_kills"] == (100 if engine == "postgres" else 0)


@pytest.mark.slow
def test_a_store_of_ten_thousand_records_opens_in_less_than_a_second_after_a_kill(tmp_path: Path) -> None:
    figures = figures_of(PROGRAM, tmp_path / "work", "--reopen", 10_000)
    assert figures["open_and_search"] < 1.0
