"""What a window with a memory costs, by length."""

from __future__ import annotations

from titans.bench.adapter import QUICK, WAYS, figures, run_adapter_benchmark, sections
from titans.bench.settings import AdapterBenchmarkSettings


def test_the_state_of_a_window_does_not_grow() -> None:
    report = run_adapter_benchmark(AdapterBenchmarkSettings(**QUICK))
    rows = {(row["way"], row["length"]): row for row in report["rows"]}
    short, long = QUICK["lengths"]
    assert set(rows) == {(way, length) for way in WAYS for length in (short, long)}
    assert all(row["read"] > 0 and row["write"] > 0 for row in rows.values())
    assert rows["window", short]["state"] == rows["window", long]["state"]
    assert rows["window and memory", long]["state"] > rows["window", long]["state"]
    assert rows["full attention", long]["state"] > 1.9 * rows["full attention", short]["state"]
    shown = sections(report)[0]
    assert [row[1] for row in shown.tables[0].rows] == [*WAYS, *WAYS]
    assert figures(report)[shown.title][0].png.startswith(b"\x89PNG")
