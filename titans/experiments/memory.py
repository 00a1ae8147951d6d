"""What a memory holds, and for how long, before anything is trained: capacity and decay, as tables and a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titans.evaluation.memory_tests import DEPTHS, WIDTHS, capacity, decay_of_association
from titans.evaluation.plots import Curve, plot_lines
from titans.evaluation.report import Figure, Section, Table
from titans.experiments.results import write_sections

Row = dict[str, Any]
PASSES = (1, 16)  # how often the pairs are written


def run_memory(
    out: Path, progress: Callable[[int, int, str], None] | None = None, command: str = "", quick: bool = False
) -> dict[str, Any]:
    """Measures both; writes memory.json, memory.md, the page and its pictures into ``out``."""
    depths, widths = (DEPTHS[:2], WIDTHS[:2]) if quick else (DEPTHS, WIDTHS)
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        if progress is not None:
            total = 2 * len(depths) * len(widths) + len(depths) * len(widths[:2])
            progress(len(rows), total, f"capacity at depth {row['depth']}, width {row['width']}")

    found = {1: capacity(depths, widths, seeds=2 if quick else 8, on_row=tell)["rows"]}
    found[PASSES[1]] = capacity(depths, widths[:2], etas=(0.0,), passes=PASSES[1], seeds=2, on_row=tell)["rows"]
    decay = decay_of_association(samples=4 if quick else 32)["rows"]
    report = {
        "name": "memory", "command": command, "date": time.strftime("%Y-%m-%d"), "decay": decay,
        "capacity": [row | {"passes": passes} for passes, each in found.items() for row in each],
    }  # fmt: skip
    sections = [capacity_section(report["capacity"]), decay_section(decay)]
    write_sections(report, "What a memory holds, and for how long", sections, out)
    return report


def capacity_section(rows: Sequence[Row]) -> Section:
    """Pairs held against depth and width, once for each number of passes."""
    about = (
        "Pairs of random unit vectors are written into a memory that was never trained, each once or as often as said; "
        "the capacity is the largest number of pairs of which 90% can be read back."
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
    figure = Figure("capacity", png, "Capacity against width, a line for each depth", "One pass, no momentum.")
    return Section("How much a memory holds", [about], [table], [figure])


def decay_section(rows: Sequence[Row]) -> Section:
    """What is left of an association after more writes, once for each forgetting and momentum."""
    about = (
        "One pair is written, then others; shown is how much of its value is still read: 1 is all of it. Forgetting "
        "returns to the memory's start."
    )
    writes = sorted({row["writes"] for row in rows})
    lines: list[list[str]] = []
    curves: list[Curve] = []
    for alpha, eta in dict.fromkeys((row["alpha"], row["eta"]) for row in rows):
        left = {row["writes"]: row["left"] for row in rows if (row["alpha"], row["eta"]) == (alpha, eta)}
        label = f"forgetting {alpha:g}" + (f", momentum {eta:g}" if eta else "")
        lines.append([label, *(f"{left[count]:.3f}" for count in writes)])
        if not eta:
            curves.append(Curve(label, [left[count] for count in writes], style=len(curves)))
    table = Table(["memory", *(f"after {count:,}" for count in writes)], lines, "Share of the value that is read.")
    places = [max(count, 0.5) for count in writes]  # the axis is a logarithm
    png = plot_lines(places, curves, "What is left of an association", "pairs written after it", "share that is read")
    figure = Figure(
        "decay", png, "Share of a value that is left after more writes", "Without momentum; 0.5 stands for none."
    )
    return Section("How long it holds it", [about], [table], [figure])
