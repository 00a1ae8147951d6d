"""The paper's Figures 8 and 9 on this machine: training speed against length, and against the memory's depth."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import titans
from titans.bench.model import BASELINE, OURS, TRAIN, run_model_benchmark
from titans.bench.settings import ModelBenchmarkSettings
from titans.bench.timing import speed_figure
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Section, Table
from titans.report.progress import Progress, silent

MODELS = (*OURS, BASELINE, "mamba2", "gated-deltanet-hybrid")


def run_throughput(
    out: Path,
    lengths: Sequence[int],
    depths: Sequence[int],
    models: Sequence[str] = MODELS,
    repeats: int = 3,
    memory_mode: str = "exact",
    progress: Progress = silent,
    command: str = "",
) -> dict[str, Any]:
    """Time what is not timed yet; writes throughput.json, throughput.md, the page and its pictures into ``out``.

    Lengths are timed one after the other; those that throughput.json has, of the same version and settings, are kept.
    """
    settings = ModelBenchmarkSettings(
        lengths=tuple(lengths), measures=(TRAIN,), repeats=repeats, only=tuple(models), peak_memory=False,
        memory_mode=memory_mode,
    )  # fmt: skip
    version = {"version": titans.__version__}
    report: dict[str, Any] = {
        "name": "throughput", "command": command, "date": time.strftime("%Y-%m-%d"), "settings": version,
        "parts": read_kept(out / "throughput.json", version).get("parts", []),
    }  # fmt: skip

    def run(asked: ModelBenchmarkSettings) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for length in asked.lengths:
            slow = {each["contender"] for part in found for each in part["left_out"]}
            part = replace(asked, lengths=(length,), only=tuple(name for name in asked.only if name not in slow))
            if not part.only:
                break
            known = json.loads(json.dumps(asdict(part)))
            done = next((each for each in report["parts"] if each["settings"] == known), None)
            if done is None:
                done = run_model_benchmark(part, progress)
                report["parts"].append(done)
                write_figures(report, out)
            found.append(done)
        return found

    by_length = run(settings)
    by_depth = {depth: run(replace(settings, memory_depth=depth, only=("lmm",))) for depth in depths}
    parameters = by_length[0]["target_parameters"]
    about = f"Forward and backward pass, {memory_mode} memory, {parameters:,} parameters each."
    ours = {f"LMM, depth {depth}": speeds(each, "lmm") for depth, each in by_depth.items()}
    sections = [
        _section("Training speed against length", about, "length", {name: speeds(by_length, name) for name in models}),
        _section("Training speed against the memory's depth", about, "depth", ours),
    ]
    write_outcome(report, "Training speed", sections, out)
    return report


def speeds(parts: Sequence[dict[str, Any]], name: str) -> dict[int, float]:
    """Tokens per second of a model at each length."""
    rows = [row for part in parts for row in part["results"] if row["contender"] == name]
    return {row["length"]: row["tokens_per_second"] for row in rows}


def _section(title: str, about: str, name: str, found: dict[str, dict[int, float]]) -> Section:
    lengths = sorted({length for each in found.values() for length in each})
    rows = [
        [label, *(f"{each[length]:,.0f}" if length in each else "-" for length in lengths)]
        for label, each in found.items()
    ]
    table = Table(["model", *(f"{length:,}" for length in lengths)], rows, "Tokens per second; - was not measured.")
    return Section(
        title, [about], [table], [speed_figure(f"throughput-{name}", title, found, lengths, "tokens in the sequence")]
    )
