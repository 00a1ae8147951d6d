"""Runs in this process and in several: what is done leaves a file, and what fails is told and stops nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from titans.experiments.workers import do_all, do_and_report, mean_and_spread, missing_section
from titans.report.outcome import read_kept
from titans.report.progress import silent


@dataclass(frozen=True)
class Square:
    number: int

    @property
    def name(self) -> str:
        return f"square-{self.number}"

    @property
    def settings(self) -> dict[str, Any]:
        return {"number": self.number}

    def file(self, out: Path) -> Path:
        return out / "runs" / f"{self.name}.json"


def square(run: Square) -> dict[str, Any]:
    if run.number == 2:
        raise ValueError("2 is odd here;\nexpected another")
    return {"square": run.number**2, "settings": run.settings}


RUNS = [Square(number) for number in (1, 2, 3)]


def kept(out: Path) -> dict[str, Any]:
    return {run.name: read_kept(run.file(out), run.settings) for run in RUNS}


def test_side_by_side_equals_one_by_one_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    failed = [
        do_all(RUNS, square, tmp_path / str(count), count, 5, lambda *step: steps.append(step)) for count in (1, 2)
    ]
    assert kept(tmp_path / "1") == kept(tmp_path / "2")
    assert kept(tmp_path / "1")["square-3"]["square"] == 9 and not kept(tmp_path / "1")["square-2"]
    for count, why in enumerate(failed, 1):
        log = tmp_path / str(count) / "runs" / "square-2.log"
        assert why == {"square-2": f"2 is odd here; expected another (see {log})"}
        assert "Traceback" in log.read_text()
    assert [done for done, _, _ in steps] == [2, 3, 4, 5] * 2


def test_what_is_done_is_reported_and_kept_and_then_the_failure_is_told(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    done: list[int] = []

    def counted(run: Square) -> dict[str, Any]:
        done.append(run.number)
        return square(run)

    for _ in range(2):
        with pytest.raises(ValueError, match=r"^1 of 3 runs failed, the first one square-2: 2 is odd here"):
            do_and_report(RUNS, counted, tmp_path, 1, silent, {"name": "squares"}, reports.append)
    assert done == [1, 2, 3, 2]
    assert reports[0] == reports[1] and [run["square"] for run in reports[0]["runs"]] == [1, 9]
    (section,) = missing_section(reports[0])
    assert section.paragraphs[0].startswith("Without figures: 1 of 3 runs.")
    assert section.tables[0].rows[0][0] == "square-2"


def test_a_mean_has_a_spread_where_there_are_several() -> None:
    assert (mean_and_spread([]), mean_and_spread([0.5])) == ("-", "0.500")
    assert mean_and_spread([1.0, 2.0], "+.1f") == "+1.5 ± 0.7"
