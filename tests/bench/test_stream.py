"""For any finite input, for as long as it lasts: everything finite, norms bounded, and the memory still learns."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from titans import NeuralMemory
from titans.bench import stream as stream_benchmark
from titans.bench.settings import StreamBenchmarkSettings
from titans.bench.stream import (
    QUICK,
    RULES,
    RUNS,
    SETTINGS,
    STREAMS,
    figures,
    make_memory,
    relearn,
    run_bounds,
    run_stream_benchmark,
    sections,
)

SHORT, LONG = 4096, 1_000_000
MEMORIES = [(setting, mode, depth) for setting in SETTINGS for mode, depth in RULES]
each_memory = pytest.mark.parametrize(("setting", "mode", "depth"), MEMORIES)
# stale gradients at the gates' extremes oscillate: there the chunked rule promises bounds, not quick learning
LEARNERS = [memory for memory in MEMORIES if memory[0] == "default" or memory[1] == "exact"]
each_learner = pytest.mark.parametrize(("setting", "mode", "depth"), LEARNERS)
each_stream = pytest.mark.parametrize("stream", STREAMS)


@cache
def after(tokens: int, setting: str, mode: str, depth: int) -> dict[str, Any]:
    """What each stream did to a small memory; all streams are read at once."""
    return run_bounds(make_memory(setting, mode, depth, dim=16), tokens)["streams"]


def check(found: dict[str, Any]) -> None:
    # no row of M - M_0 or S is longer than max_norm = 10 where a chunk ends; ||M_0|| is at most 3 * 4 here
    limit = 10.0 * 16**0.5 * (1 + 1e-5) + 12.0
    assert found["finite"]
    assert found["weights"] <= limit
    assert found["momentum"] <= limit


@each_stream
@each_memory
def test_norms_stay_bounded(setting: str, mode: str, depth: int, stream: str) -> None:
    check(after(SHORT, setting, mode, depth)[stream])


@each_stream
@each_learner
def test_a_fresh_token_is_learned_after_the_stream(setting: str, mode: str, depth: int, stream: str) -> None:
    found = after(SHORT, setting, mode, depth)[stream]
    assert found["learns"], found["missing"]


@pytest.mark.slow
@each_memory
def test_a_million_tokens_leave_a_memory_that_learns(setting: str, mode: str, depth: int) -> None:
    streams = after(LONG, setting, mode, depth)
    for found in streams.values():
        check(found)
    if (setting, mode, depth) in LEARNERS:
        assert {name: found["missing"] for name, found in streams.items() if not found["learns"]} == {}


@pytest.mark.parametrize(("mode", "depth"), RULES)
def test_a_memory_that_writes_nothing_does_not_pass_for_one_that_learns(mode: str, depth: int) -> None:
    memory = make_memory("default", mode, depth, dim=16)
    state = memory.init_state(2).detach()
    assert [row["learns"] for row in relearn(memory, state)["rows"]] == [True, True]
    memory.writes = False
    assert [row["learns"] for row in relearn(memory, state)["rows"]] == [False, False]


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e15, 1e30, 1e38])
@pytest.mark.parametrize(("mode", "depth"), RULES)
def test_outputs_are_finite_for_inputs_of_any_size(mode: str, depth: int, scale: float) -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(16, heads=2, depth=depth, mode=mode)
    x = scale * torch.randn(2, 200, 16).clamp(-3, 3)
    x[:, 100:] /= scale
    y, state = memory(x)
    assert y.isfinite().all()
    assert all(norm.isfinite().all() for norm in state.norms().values())


def here(worker: Any, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """A run in this process: what it measures does not matter here."""
    answer: dict[str, Any] = json.loads(json.dumps(worker(job)))
    return answer


TINY = StreamBenchmarkSettings(**QUICK | {"tokens": 512, "call": 16, "decode_tokens": 20})


def test_the_report_has_every_run_and_the_page_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_benchmark, "in_fresh_process", here)
    monkeypatch.setattr(stream_benchmark, "PRESENTATIONS", (4, 8))
    seen: list[tuple[int, int, str]] = []
    report = run_stream_benchmark(TINY, lambda *step: seen.append(step))
    assert seen == [*((index, 3, name) for index, name in enumerate(TINY.only)), (3, 3, "done")]
    assert [run["run"] for run in report["runs"]] == list(TINY.only)
    flows, bounds, _ = sections(report)
    assert [row[:2] for row in flows.tables[0].rows] == [["stream-chunked-1", "512"], ["decode-chunked-1", "20"]]
    assert [row[0] for row in bounds.tables[0].rows] == list(STREAMS)
    assert list(figures(report)) == [flows.title, bounds.title]


def test_a_finished_run_is_kept_until_its_settings_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(worker: Any, job: dict[str, Any], threads: int) -> dict[str, Any]:
        done.append(job["run"])
        return {**job, "read": job["tokens"], "growth": 1.0, "speed": 1.0, "tokens_per_second": 9, "finite": True}

    monkeypatch.setattr(stream_benchmark, "in_fresh_process", note)
    first, second = (StreamBenchmarkSettings(only=RUNS[:count]) for count in (1, 2))
    run_stream_benchmark(first, out=tmp_path)
    assert len(run_stream_benchmark(second, out=tmp_path)["runs"]) == 2
    assert done == list(RUNS[:2])
    run_stream_benchmark(StreamBenchmarkSettings(only=RUNS[:1], tokens=500_000), out=tmp_path)
    assert done == [*RUNS[:2], RUNS[0]]


def test_a_run_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_benchmark, "in_fresh_process", lambda *_, **__: {"error": "out of memory"})
    report = run_stream_benchmark(StreamBenchmarkSettings(only=RUNS[:2]))
    assert report["runs"] == []
    assert [f"{name} failed: out of memory." for name in RUNS[:2]] == report["notices"][-2:]
    assert [part.title for part in sections(report)] == ["Settings"] and figures(report) == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": 80_000}, "tokens is 80000; expected at least 81920"),
        ({"tokens": 100, "only": ("bounds-fast-exact-1",)}, "tokens is 100; expected at least 512"),
        ({"decode_tokens": 5}, "decode_tokens is 5; expected at least 20"),
        ({"only": ("stream-exact-3",)}, "only has 'stream-exact-3': did you mean stream-exact"),
    ],
)
def test_a_wrong_setting_is_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StreamBenchmarkSettings(**fields)
