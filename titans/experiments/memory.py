"""How much an untrained memory holds, for how long, and what surprises it: the experiment and its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import titans
from titans.experiments.memory_tests import (
    AGAIN,
    CHANGED,
    DEPTHS,
    ETAS,
    NEW,
    PAUSE,
    WIDTHS,
    bound,
    capacity,
    decay_of_association,
    mean_surprise,
    surprise_of_facts,
)
from titans.models import TitansConfig, TitansForCausalLM
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_lines
from titans.report.progress import Progress, silent
from titans.tasks.recall import Recall

Row = dict[str, Any]
PASSES = (1, 16)  # how often the pairs are written
FACTS = {NEW: "a new fact", AGAIN: "a repeated one", CHANGED: "a changed one"}


def run_memory(out: Path, progress: Progress = silent, command: str = "", quick: bool = False) -> dict[str, Any]:
    """Measures what is not measured yet; writes memory.json, memory.md, the page and its figures into ``out``.

    Results in memory.json that the same version made with the same settings are kept.
    """
    depths, widths = (DEPTHS[:2], WIDTHS[:2]) if quick else (DEPTHS, WIDTHS)
    seeds, samples = (2, 4) if quick else (8, 32)
    settings = {"version": titans.__version__, "seeds": seeds, "samples": samples}
    kept = read_kept(out / "memory.json", settings)
    once, often = {"passes": PASSES[0], "seeds": seeds}, {"passes": PASSES[1], "seeds": 2}
    plan: list[Row] = [{"depth": d, "width": w, "eta": eta, **once} for d in depths for w in widths for eta in ETAS]
    plan += [{"depth": d, "width": w, "eta": 0.0, **often} for d in depths for w in widths[:2]]
    report: dict[str, Any] = {
        "name": "memory", "command": command, "date": time.strftime("%Y-%m-%d"), "settings": settings,
        "capacity": kept.get("capacity", []), "decay": kept.get("decay", []), "surprise": kept.get("surprise", []),
    }  # fmt: skip
    for number, asked in enumerate(plan):
        progress(number, len(plan), f"capacity at depth {asked['depth']}, width {asked['width']}")
        if not any(asked.items() <= row.items() for row in report["capacity"]):
            report["capacity"].append(asked | capacity(**asked))
            write_figures(report, out)
    report["decay"] = report["decay"] or decay_of_association(samples=samples)["rows"]
    report["surprise"] = report["surprise"] or [measure_surprise(depth, samples) for depth in depths]
    sections = [
        capacity_section(report["capacity"]), decay_section(report["decay"]), surprise_section(report["surprise"])
    ]  # fmt: skip
    write_outcome(report, "What a memory holds, and for how long", sections, out)
    return report


def measure_surprise(depth: int, sequences: int) -> Row:
    """How much facts surprise an untrained memory of this depth whose keys are the tokens before the values."""
    config = TitansConfig(
        variant="lmm", vocab_size=Recall().vocab_size, hidden_size=64, num_hidden_layers=1, memory_heads=1,
        memory_depth=depth,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TitansForCausalLM(config)
    found = surprise_of_facts(bound(model), sequences=sequences)
    return {"depth": depth} | {name: mean_surprise(found, name) for name in FACTS}


def surprise_section(rows: Sequence[Row]) -> Section:
    """How much new, known and changed facts surprise, one row per depth."""
    about = (
        "A model whose memory is untrained, but has the token before each value as its key, reads pairs, "
        f"{PAUSE} fillers, and then other pairs, the same ones again, or the same keys with each other's values. "
        "Surprise is the norm of the gradient that a token sends into the memory."
    )
    lines = [[f"depth {row['depth']}", *(f"{row[name]:.3f}" for name in FACTS)] for row in rows]
    table = Table(["memory", *FACTS.values()], lines, "Mean surprise at the values.")
    return Section("What surprises it", [about], [table])


def capacity_section(rows: Sequence[Row]) -> Section:
    """How many pairs are held, by depth and width, for each number of passes."""
    about = (
        "Pairs of random unit vectors are written into an untrained memory, in one pass or several. The capacity is "
        "the largest number of pairs of which 90% can be read back."
    )
    widths = sorted({row["width"] for row in rows})
    kinds = list(dict.fromkeys((row["depth"], row["eta"], row["passes"]) for row in rows))
    lines: list[list[str]] = []
    curves: list[Curve] = []
    for depth, eta, passes in kinds:
        mine = {row["width"]: row for row in rows if (row["depth"], row["eta"], row["passes"]) == (depth, eta, passes)}
        label = f"depth {depth}" + (f", momentum {eta:g}" if eta else "") + (f", {passes} passes" if passes > 1 else "")
        values = [mine[width]["capacity"] if width in mine else None for width in widths]
        lines.append([label, *("-" if value is None else f"{value:,}" for value in values)])
        if passes == 1 and not eta:
            curves.append(Curve(label, values, style=len(curves)))
    table = Table(["memory", *(f"width {width}" for width in widths)], lines, "Pairs of which 90% are held.")
    png = plot_lines(widths, curves, "Pairs held by an untrained memory", "width of the memory", "pairs")
    figure = Figure("capacity", png, "Capacity against width, one line per depth", "One pass, no momentum.")
    return Section("How much a memory holds", [about], [table], [figure])


def decay_section(rows: Sequence[Row]) -> Section:
    """What is left of an association after more writes, for each forgetting and momentum."""
    about = (
        "One pair is written, then others. Shown is how much of its value can still be read, where 1 is all of it. "
        "Forgetting returns the memory to its start."
    )
    writes = sorted({row["writes"] for row in rows})
    places = [count for count in writes if count]  # a logarithmic axis has no place for 0
    lines: list[list[str]] = []
    curves: list[Curve] = []
    for alpha, eta in dict.fromkeys((row["alpha"], row["eta"]) for row in rows):
        left = {row["writes"]: row["left"] for row in rows if (row["alpha"], row["eta"]) == (alpha, eta)}
        label = f"forgetting {alpha:g}" + (f", momentum {eta:g}" if eta else "")
        lines.append([label, *(f"{left[count]:.3f}" for count in writes)])
        if not eta:
            curves.append(Curve(label, [left[count] for count in places], style=len(curves)))
    table = Table(["memory", *(f"after {count:,}" for count in writes)], lines, "Share of the value that is read.")
    png = plot_lines(places, curves, "What is left of an association", "pairs written after it", "share that is read")
    figure = Figure("decay", png, "Share of a value that is left after more writes", "Without momentum.")
    return Section("How long it holds an association", [about], [table], [figure])
