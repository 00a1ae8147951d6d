"""The paper's Figure 7 at a small scale: how deep a memory should be, judged by the loss along a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans.evaluation.measure import Evaluation
from titans.experiments.lm import LMExperiment, train_models
from titans.experiments.runs import Job
from titans.experiments.tasks import read_result
from titans.report.outcome import write_outcome
from titans.report.page import Section, Table, show
from titans.report.progress import Progress, silent
from titans.report.results import result_sections

# At any depth up to 4 there is room for feed-forward layers.
SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 64, "memory_momentum": True,
}  # fmt: skip
LIMIT = 65536  # tokens of the validation text that it is tested on


def run_depth(
    language: LMExperiment,
    out: Path,
    depths: Sequence[int],
    read: int,
    progress: Progress = silent,
    command: str = "",
    limit: int = LIMIT,
) -> dict[str, Any]:
    """Trains an LMM of every depth; writes depth.json, depth.md, the page and its figures into ``out``.

    Args:
        language: the runs; its models are replaced by one per depth.
        depths: layers of the memory.
        read: tokens that a trained model reads, to see how its loss falls along them.
        limit: tokens of the validation text that it is tested on.
    """
    if not depths or min(depths) < 1:
        raise ValueError(f"depths is {list(depths)}; expected one or more numbers of at least 1")
    rows: dict[str, dict[str, Any]] = {
        f"depth {depth}": {"name": "lmm", "memory_depth": depth, **SHAPE} for depth in depths
    }
    settings = {"data": language.data, "context": "sliding", "length": read, "limit": limit}
    tests = (Evaluation(("perplexity",), settings),)
    language = replace(language, models=tuple(rows), rows=rows, out=str(out), tests=tests).judged_at_the_end()
    texts = train_models(language, progress)
    results = [read_result(Job(language.config(label, seed)), label) for seed in language.seeds for label in rows]
    table = depth_table(texts["table"], results)
    about = (
        f"LMM with a memory of {', '.join(map(str, depths))} layers, {language.size} parameters each, trained on "
        f"{language.tokens:,} tokens in sequences of {language.length}, tested on windows of {read:,} tokens."
    )
    sections = result_sections(results, [Section("Overall", [about], [table])])
    report = {**texts, "name": "depth", "command": command, "results": results}
    write_outcome(report, "How deep a memory should be", sections, out)
    return report


def depth_table(rows: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> Table:
    """The validation loss at the training length and what training cost, by depth."""
    lines = []
    for row in sorted(rows, key=lambda row: str(row["model"])):
        mine = [result for result in results if result["model"]["name"] == row["model"]]
        last = [result["tasks"]["perplexity"]["cells"][-1]["value"] for result in mine]
        shown = ", ".join(map(show, last))
        spread = "" if row["spread"] is None else f" ± {row['spread']:.3f}"
        minutes = f"{row['cpu_minutes']:.1f}"
        lines.append([row["model"], f"{row['parameters']:,}", f"{show(row['loss'])}{spread}", shown, minutes])
    header = ["memory", "parameters", "validation loss", "loss at the last positions, each seed", "CPU minutes per run"]
    return Table(header, lines, "Loss in nats per token; ± is the standard deviation over the seeds.")
