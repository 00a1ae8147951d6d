"""What memory caching costs, by how many states are kept."""

from __future__ import annotations

import pytest

from titans.bench.caching import QUICK, figures, run_caching_benchmark, sections
from titans.bench.settings import CachingBenchmarkSettings


def test_every_memory_is_timed_and_weighed() -> None:
    seen: list[int] = []
    report = run_caching_benchmark(CachingBenchmarkSettings(**QUICK), lambda done, total, what: seen.append(done))
    assert seen == [0, 1]
    none, two = report["cells"]
    assert (none["kept"], two["kept"]) == (0, 2)
    assert min(*none["seconds"].values(), *two["seconds"].values()) > 0
    weights, mean = 4 * 32 * 32 // 4, 4 * 32  # bytes of one state and of its mean
    assert two["bytes"] - none["bytes"] == 2 * (weights + mean + 8) + mean
    shown = sections(report)[0]
    assert [row[:2] for row in shown.tables[0].rows] == [["1", "0"], ["1", "2"]]
    assert figures(report)[shown.title][0].png.startswith(b"\x89PNG")


def test_a_wrong_setting_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="kept has -1; expected at least 0"):
        CachingBenchmarkSettings(kept=(-1,))
    with pytest.raises(ValueError, match="depths has 0; expected at least 1"):
        CachingBenchmarkSettings(depths=(0,))
