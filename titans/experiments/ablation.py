"""The paper's Table 5 at a small scale: what each part of the memory is worth, in language and in recall."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans.evaluation.report import Section, Table, write_report
from titans.experiments.catalogue import PARTS, recall
from titans.experiments.lm import LMExperiment, run_experiment
from titans.experiments.results import as_markdown, write_results
from titans.experiments.runs import Progress
from titans.experiments.tasks import TaskExperiment, run_tasks

MODELS = ("mac", "mag", "mal")
# Table 5 of the paper: perplexity of language modelling, accuracy of reasoning, accuracy over long contexts.
PAPER = {
    "LMM": (27.01, 47.83, 92.68),
    "MAC": (26.67, 48.65, 97.95),
    "MAG": (25.70, 48.60, 96.70),
    "MAL": (25.91, 47.87, 96.91),
    "linear memory": (28.49, 46.97, 85.34),
    "without convolution": (28.73, 45.82, 90.28),
    "without momentum": (28.98, 45.49, 87.12),
    "without forgetting": (29.04, 45.11, 85.60),
    "without persistent memory": (27.63, 46.35, 92.49),
}


def language_rows() -> dict[str, dict[str, Any]]:
    """The models of the table, by the labels that it has for them."""
    rows: dict[str, dict[str, Any]] = {label: {"name": "lmm", **part} for label, part in PARTS.items()}
    return rows | {name.upper(): {"name": name} for name in MODELS}


def run_ablation(
    language: LMExperiment, out: Path, progress: Progress | None = None, command: str = "", quick: bool = False
) -> dict[str, Any]:
    """Runs what is not done yet of both halves; writes ablation.json, ablation.md and the page into ``out``.

    Args:
        language: the runs on text; its models are replaced by those of the table.
        out: folder of the experiment, with ``language`` and ``recall`` in it.
        progress: told how far each half is.
        command: what the results say they were made with.
        quick: a few steps only.
    """
    rows = language_rows()
    language = replace(language, models=tuple(rows), rows=rows, out=str(out / "language"), quick=quick)
    texts = run_experiment(language, progress)
    experiment: TaskExperiment = replace(recall({}), seeds=language.seeds)
    pairs = run_tasks(
        experiment.quick() if quick else experiment, out / "recall", language.at_a_time, progress, command
    )
    report = {
        "name": "ablation",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(language.seeds),
        "rows": table_rows(texts["table"], pairs["results"]),
        "language": texts,
        "recall": pairs["results"],
    }
    table = paper_table(report["rows"])
    write_results(report, as_markdown(table) + "\n", out)
    section = Section("The table of the paper, and ours beside it", [_about(language)], [table])
    write_report(pairs["results"], out, "What each part of the memory is worth", [section])
    return report


def _about(language: LMExperiment) -> str:
    return (
        f"Language: validation perplexity after {language.tokens:,} tokens at {language.size} parameters. Recall: of "
        "eight pairs, trained at 64 tokens. The paper's models have 400M parameters and 15B tokens; its long context "
        "is BABILong. Below, the same recall with the memory tampered with: nothing written, reset or swapped with "
        "another sequence's when the questions come, and read in chunks it was not trained with."
    )


def table_rows(texts: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of the table for every model: both halves' figures and the paper's."""
    by_label = {row["model"]: row for row in texts}
    rows = []
    for label, paper in PAPER.items():
        row: dict[str, Any] = {"label": label, "paper": paper}
        if label in by_label:
            found = by_label[label]
            row |= {"loss": found["loss"], "spread": found["spread"], "perplexity": found["perplexity"]}
        mine = [result for result in results if result["model"]["name"] == label]
        for key, far in (("near", min), ("far", max)):
            row[key] = [_at(result, far) for result in mine]
        rows.append(row)
    return rows


def _at(result: dict[str, Any], which: Any) -> float | None:
    cell = which(result["tasks"]["recall"]["cells"], key=lambda cell: cell["group"]["length"])
    value: float | None = cell["value"]
    return value


def paper_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Ours and the paper's side by side."""
    header = [
        "model",
        "perplexity",
        "loss ±",
        "recall at 64",
        "recall at 1,024",
        "paper: perplexity",
        "reasoning",
        "long",
    ]
    lines = []
    for row in rows:
        spread = f" ± {row['spread']:.3f}" if row.get("spread") is not None else ""
        own = [f"{row['perplexity']:.2f}", f"{row['loss']:.3f}{spread}"] if "loss" in row else ["-", "-"]
        lines.append(
            [row["label"], *own, _mean(row["near"]), _mean(row["far"]), *(f"{figure:.2f}" for figure in row["paper"])]
        )
    return Table(header, lines, "Means over the seeds, ± their standard deviation; recall with each seed in brackets.")


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.3f} ({', '.join('NaN' if v is None else f'{v:.2f}' for v in values)})"
