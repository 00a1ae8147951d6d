"""Experiments without training: what was measured is kept, and a quick one is not in the way."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from titans.bench.settings import ModelBenchmarkSettings
from titans.cli import main
from titans.experiments import memory, throughput


def test_capacities_that_were_measured_before_an_interruption_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def measure(**row: Any) -> dict[str, Any]:
        asked.append(row)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return row | {"capacity": len(asked)}

    monkeypatch.setattr(memory, "capacity", measure)
    decay = {"rows": [{"alpha": 0.0, "eta": 0.0, "writes": count, "left": 1.0} for count in (0, 4)]}
    monkeypatch.setattr(memory, "decay_of_association", lambda samples: decay)
    with pytest.raises(KeyboardInterrupt):
        memory.run_memory(tmp_path, quick=True)
    report = memory.run_memory(tmp_path, quick=True)
    assert len(report["capacity"]) == 12 and len(asked) == 13
    assert [row["capacity"] for row in report["capacity"][:4]] == [1, 2, 3, 5]
    assert memory.run_memory(tmp_path, quick=True)["capacity"] == report["capacity"] and len(asked) == 13
    monkeypatch.setattr(memory.titans, "__version__", "other")
    memory.run_memory(tmp_path, quick=True)
    assert len(asked) == 25


def test_a_changed_fact_surprises_a_memory_that_binds_and_a_repeated_one_less() -> None:
    row = memory.measure_surprise(depth=1, sequences=16)
    assert row[memory.AGAIN] < 0.9 * min(row[memory.NEW], row[memory.CHANGED])
    section = memory.surprise_section([row])
    assert section.tables[0].header == ["memory", "a new fact", "a repeated one", "a changed one"]
    assert section.tables[0].rows == [["depth 1", *(f"{row[name]:.3f}" for name in memory.FACTS)]]


def test_lengths_that_were_timed_are_kept_and_a_model_that_was_too_slow_is_not_timed_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[int, int, tuple[str, ...]]] = []

    def run(settings: ModelBenchmarkSettings, progress: Any) -> dict[str, Any]:
        timed.append((settings.memory_depth, settings.lengths[0], settings.only))
        rows = [{"contender": name, "length": settings.lengths[0], "tokens_per_second": 9.0} for name in settings.only]
        slow = [{"contender": "mac"}] if settings.lengths[0] == 128 and "mac" in settings.only else []
        return {"settings": asdict(settings), "results": rows, "left_out": slow, "target_parameters": 100}

    monkeypatch.setattr(throughput, "run_model_benchmark", run)
    options: dict[str, Any] = {"depths": (1,), "models": ("lmm", "mac"), "repeats": 1}
    throughput.run_throughput(tmp_path, (64, 128), **options)
    throughput.run_throughput(tmp_path, (64, 128, 256), **options)
    both = ("lmm", "mac")
    assert timed == [(2, 64, both), (2, 128, both), (1, 64, ("lmm",)), (1, 128, ("lmm",)),
                     (2, 256, ("lmm",)), (1, 256, ("lmm",))]  # fmt: skip
    assert "| mac | 9 | 9 | - |" in (tmp_path / "throughput.md").read_text()
    assert len(json.loads((tmp_path / "throughput.json").read_text())["parts"]) == 6
    throughput.run_throughput(tmp_path, (64, 128), **options | {"repeats": 2})
    assert len(timed) == 10


@pytest.mark.parametrize("name", ["memory", "throughput"])
def test_a_quick_experiment_is_not_in_the_way_of_a_whole_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(out: Path, *options: Any) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text("done")

    monkeypatch.setattr({"memory": memory, "throughput": throughput}[name], f"run_{name}", run)
    with pytest.raises(SystemExit) as end:
        main(["experiment", name, "--quick", "--out", str(tmp_path)])
    assert end.value.code == 0 and str(tmp_path / "quick" / "report.html") in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["quick"]
