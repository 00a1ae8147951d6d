"""The paper's Figures 8 and 9 on this machine: training speed against length, and against the memory's depth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans.evaluation.model_benchmark import BASELINE, OURS, TRAIN, ModelBenchmarkSettings, run_model_benchmark
from titans.evaluation.plots import Curve, plot_lines
from titans.evaluation.report import Figure, Section, Table
from titans.experiments.results import write_sections

LENGTHS = (512, 2048, 8192, 16384)
DEPTHS = (1, 2, 3, 4)
MODELS = (*OURS, BASELINE, "mamba2", "gated-deltanet-hybrid")


def run_throughput(
    out: Path,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[int] = DEPTHS,
    models: Sequence[str] = MODELS,
    repeats: int = 3,
    memory_mode: str = "exact",
    progress: Callable[[int, int, str], None] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Times both; writes throughput.json, throughput.md, the page and its pictures into ``out``."""
    settings = ModelBenchmarkSettings(
        lengths=tuple(lengths), measures=(TRAIN,), repeats=repeats, only=tuple(models), memory=False,
        memory_mode=memory_mode,
    )  # fmt: skip
    by_length = run_model_benchmark(settings, progress)
    by_depth = {
        depth: run_model_benchmark(replace(settings, memory_depth=depth, only=("lmm",)), progress) for depth in depths
    }
    report = {
        "name": "throughput", "command": command, "date": time.strftime("%Y-%m-%d"), "by_length": by_length,
        "by_depth": {str(depth): each for depth, each in by_depth.items()},
    }  # fmt: skip
    about = f"Forward and backward pass, {memory_mode} memory, {by_length['target_parameters']:,} parameters each."
    ours = {f"LMM, depth {depth}": speeds(each, "lmm") for depth, each in by_depth.items()}
    sections = [
        _section("Training speed against length", about, "length", {name: speeds(by_length, name) for name in models}),
        _section("Training speed against the memory's depth", about, "depth", ours),
    ]
    write_sections(report, "Training speed", sections, out)
    return report


def speeds(report: dict[str, Any], name: str) -> dict[int, float | None]:
    """Tokens per second of a model at each length."""
    return {row["length"]: row["tokens_per_second"] for row in report["results"] if row["contender"] == name}


def _section(title: str, about: str, name: str, found: dict[str, dict[int, float | None]]) -> Section:
    lengths = sorted({length for each in found.values() for length in each})
    rows = [[label, *_cells(each, lengths)] for label, each in found.items()]
    curves = [Curve(label, [each.get(length) for length in lengths], style=index)
              for index, (label, each) in enumerate(found.items())]  # fmt: skip
    png = plot_lines(lengths, curves, title, "tokens in the sequence", "tokens per second")
    table = Table(["model", *(f"{length:,}" for length in lengths)], rows, "Tokens per second; - was not measured.")
    return Section(title, [about], [table], [Figure(f"throughput-{name}", png, title)])


def _cells(each: dict[int, float | None], lengths: Sequence[int]) -> list[str]:
    values = [each.get(length) for length in lengths]
    return ["-" if value is None else f"{value:,.0f}" for value in values]
