"""What memory caching costs: CPU time per token and bytes of state, by how many earlier states a memory reads.

    titans bench caching --out runs/bench-caching

Every memory starts with all its states kept, and in every round each of them runs once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titans import MemoryState, NeuralMemory
from titans.bench.settings import CachingBenchmarkSettings
from titans.bench.timing import about, bar_figure, new_report
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent

QUICK: dict[str, Any] = {"dim": 32, "depths": (1,), "kept": (0, 2), "segment": 8, "length": 16, "repeats": 1}
DECODED = 32  # tokens that are read one at a time
PASSES = ("read", "train", "decode")


def _start(settings: CachingBenchmarkSettings, depth: int, kept: int) -> tuple[NeuralMemory, MemoryState]:
    """A memory that has read as many segments as it keeps."""
    torch.manual_seed(0)
    cache = {"cache_segment_size": settings.segment, "cache_max_states": kept} if kept else {}
    memory = NeuralMemory(settings.dim, settings.heads, depth, **cache)  # type: ignore[arg-type]
    with torch.no_grad():
        _, state = memory(torch.randn(1, settings.segment * max(1, kept), settings.dim))
    return memory, state.detach()


def _passes(memory: NeuralMemory, state: MemoryState, x: Tensor) -> dict[str, Callable[[], int]]:
    """What is timed; each returns how many tokens it read."""

    def read() -> int:
        with torch.no_grad():
            memory(x, state)
        return x.shape[1]

    def train() -> int:
        memory(x, state)[0].square().mean().backward()
        return x.shape[1]

    def decode() -> int:
        """By the same way for all: the compiled step takes no memory with a cache."""
        after, tokens = state, x[:, :DECODED].split(1, dim=1)
        with torch.no_grad():
            for token in tokens:
                _, after = memory(token, after)
        return len(tokens)

    return dict(zip(PASSES, (read, train, decode), strict=True))


def _bytes(state: MemoryState) -> int:
    """Of all its tensors, shared ones counted once."""
    found: dict[int, int] = {}

    def weigh(x: Tensor) -> Tensor:
        found[x.data_ptr()] = min(x.nbytes, x.untyped_storage().nbytes())
        return x

    state.map(weigh)
    return sum(found.values())


def run_caching_benchmark(settings: CachingBenchmarkSettings, progress: Progress = silent) -> dict[str, Any]:
    """Time every memory in turns; returns the report, a dict that is ready for JSON."""
    report = new_report("caching", settings, settings.threads)
    torch.set_num_threads(settings.threads)
    cells = [(depth, kept) for depth in settings.depths for kept in settings.kept]
    begun = {cell: _start(settings, *cell) for cell in cells}
    x = torch.randn(1, settings.length, settings.dim)
    best = {cell: dict.fromkeys(PASSES, float("inf")) for cell in cells}
    for number in range(settings.repeats):
        progress(number, settings.repeats, f"round {number + 1}")
        for cell, (memory, state) in begun.items():
            for name, run in _passes(memory, state, x).items():
                start = time.process_time()
                tokens = run()
                best[cell][name] = min(best[cell][name], (time.process_time() - start) / tokens)
    progress(settings.repeats, settings.repeats, "done")
    return report | {
        "cells": [
            {"depth": depth, "kept": kept, "bytes": _bytes(begun[depth, kept][1]), "seconds": best[depth, kept]}
            for depth, kept in cells
        ]
    }


def sections(report: dict[str, Any]) -> list[Section]:
    """Every memory, as a table."""
    rows = [
        [str(cell["depth"]), str(cell["kept"]), *(f"{1e6 * cell['seconds'][name]:.0f}" for name in PASSES),
         f"{cell['bytes'] / 2**20:.2f}"]
        for cell in report["cells"]
    ]  # fmt: skip
    header = ["depth", "states kept", *(f"{name}, µs/token" for name in PASSES), "state, MiB"]
    caption = "CPU time per token, the best of all rounds; decoding is without the compiled step."
    return [Section("Cost", [], [Table(header, rows, caption)]), about(report)]


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """The time per token of reading and training, by the title of the section."""
    words = [f"depth {cell['depth']}, {cell['kept']} kept" for cell in report["cells"]]
    bars = {name: [1e6 * cell["seconds"][name] for cell in report["cells"]] for name in ("read", "train")}
    title = "The cost of reading earlier states"
    return {"Cost": [bar_figure("caching", title, words, bars, "", "µs per token")]}
