"""The speed of `titans train` beside that of a bare loop."""

from __future__ import annotations

from typing import Any

import pytest

from titans.bench import overhead
from titans.bench.overhead import QUICK, figures, run_overhead_benchmark, sections
from titans.bench.settings import OverheadBenchmarkSettings


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds run in this process, on short sequences."""
    monkeypatch.setattr(overhead, "answer_of", lambda worker, job, threads: worker(job))
    monkeypatch.setattr(overhead, "LENGTH", 32)
    monkeypatch.setattr(overhead, "TEXT", 4000)


@pytest.mark.slow
def test_both_loops_are_timed_in_every_round() -> None:
    seen: list[int] = []
    settings = OverheadBenchmarkSettings(**QUICK | {"steps": 3, "rounds": 2})
    report = run_overhead_benchmark(settings, lambda done, total, what: seen.append(done))
    assert seen == [0, 1, 2]
    for each in report["rounds"]:
        assert each["ratio"] == each["trainer"] / each["bare"] > 0
    assert report["median"] == sum(each["ratio"] for each in report["rounds"]) / 2
    shown = sections(report)[0]
    assert [row[0] for row in shown.tables[0].rows] == ["1", "2"]
    assert f"{report['median']:.1%}" in shown.paragraphs[0]
    assert figures(report)[shown.title][0].png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 2}, "steps is 2; expected at least 3"),
        ({"rounds": 0}, "rounds is 0; expected at least 1"),
        ({"data": "nowhere"}, "nowhere"),
        ({"model": "magg"}, r"'magg': did you mean mag\?"),
    ],
)
def test_a_wrong_setting_is_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_overhead_benchmark(OverheadBenchmarkSettings(**fields))
