"""The paper's Table 5 at a small scale: what each part of the memory is worth, in language and in recall."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans.evaluation.measure import CONTROLS
from titans.experiments.catalogue import find_experiment
from titans.experiments.lm import LMExperiment, run_experiment
from titans.experiments.recipes import read_recipe, shipped_recipes
from titans.experiments.tasks import TaskExperiment, run_tasks
from titans.report.outcome import write_outcome
from titans.report.page import Section, Table, show
from titans.report.progress import Progress, silent
from titans.report.results import result_sections

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
# The same for all, so that a row differs from the first in what it says alone; fewer layers beside attention.
SHAPE = {"hidden_size": 192, "memory_heads": 4, "memory_head_dim": 64, "memory_depth": 2}
# The paper's blocks, whatever is best for a model by itself.
OPTIONS = {"token_skip": False, "gate": None, "memory_momentum": True}
LAYERS = {"lmm": 3, "mac": 2, "mag": 2, "mal": 2}


def language_models() -> dict[str, dict[str, Any]]:
    """The models of the table as in the recipe of recall, of two layers of memory and one width."""
    models: dict[str, dict[str, Any]] = read_recipe(shipped_recipes()["recall"])["models"]
    return {
        label: SHAPE | OPTIONS | {"num_hidden_layers": LAYERS[model["name"]]} | model
        for label, model in models.items()
        if label in PAPER
    }


def run_ablation(
    language: LMExperiment, out: Path, progress: Progress = silent, command: str = "", quick: bool = False
) -> dict[str, Any]:
    """Runs what is not done yet of both halves; writes ablation.json, ablation.md and the page into ``out``.

    Args:
        language: the runs on text; its models are replaced by those of the table.
        out: folder of the experiment, with ``language`` and ``recall`` in it.
        progress: called with how far each half has come.
        command: what the results say they were made with.
        quick: a few steps of one seed only.
    """
    rows = language_models()
    language = replace(language, models=tuple(rows), rows=rows, out=str(out / "language")).judged_at_the_end()
    experiment = replace(find_experiment("recall"), seeds=language.seeds)
    if quick:
        language, experiment = language.quick(), experiment.quick()
    texts = run_experiment(language, progress, command)
    pairs = run_tasks(experiment, out / "recall", language.at_a_time, progress, command)
    report = {
        "name": "ablation",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(language.seeds),
        "rows": table_rows(texts["table"], pairs["results"]),
        "language": texts,
        "recall": pairs["results"],
    }
    about = about_ablation(language, experiment, pairs["results"])
    section = Section("The paper's table, and ours beside it", [about], [paper_table(report["rows"])])
    write_outcome(report, "What each part of the memory is worth", result_sections(pairs["results"], [section]), out)
    return report


def about_ablation(language: LMExperiment, experiment: TaskExperiment, results: Sequence[dict[str, Any]]) -> str:
    """What was run, and how it differs from the paper's."""
    entry = results[0]["tasks"]["recall"]
    seeds = f"seed{'s' if len(language.seeds) > 1 else ''} {', '.join(map(str, language.seeds))}"
    controls = [f"{test.control}: {CONTROLS[test.control]}" for test in experiment.controls if test.control]
    sizes = [test.fields["memory_chunk_size"] for test in experiment.controls if test.fields]
    controls += [f"read in chunks of {', '.join(map(str, sizes))}, which it was not trained with"] if sizes else []
    return (
        f"Language: validation perplexity after {language.tokens:,} tokens at {language.size} parameters. Recall: of "
        f"{entry['settings']['pairs']} pairs, trained at {entry['trained_at']:,} tokens. Both with {seeds}. The "
        "paper's models have 400M parameters and 15B tokens; its long context is BABILong. Below, the same recall with "
        f"the memory tampered with ({'; '.join(controls)})."
    )


def table_rows(texts: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of the table per model: the figures of both halves and the paper's."""
    by_label = {row["model"]: row for row in texts}
    rows = []
    for label, paper in PAPER.items():
        row: dict[str, Any] = {"label": label, "paper": paper}
        if label in by_label:
            row |= {name: by_label[label][name] for name in ("loss", "spread", "perplexity")}
        mine = [result["tasks"]["recall"]["cells"] for result in results if result["model"]["name"] == label]
        for key, which in (("near", min), ("far", max)):
            found = [which(cells, key=lambda cell: cell["group"]["length"]) for cells in mine]
            row |= {key: [cell["value"] for cell in found], f"{key}_length": found[0]["group"]["length"]}
        rows.append(row)
    return rows


def paper_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Ours and the paper's side by side."""
    header = [
        "model",
        "perplexity",
        "loss ±",
        *(f"recall at {rows[0][name]:,}" for name in ("near_length", "far_length")),
        "paper: perplexity",
        "reasoning",
        "long",
    ]
    lines = []
    for row in rows:
        spread = f" ± {row['spread']:.3f}" if row.get("spread") is not None else ""
        own = [show(row["perplexity"], ".2f"), f"{show(row['loss'])}{spread}"] if "loss" in row else ["-", "-"]
        lines.append(
            [row["label"], *own, _mean(row["near"]), _mean(row["far"]), *(f"{figure:.2f}" for figure in row["paper"])]
        )
    return Table(
        header,
        lines,
        "Means over the seeds, ± their standard deviation; recall with each seed in brackets, where one that diverged "
        "recalls nothing.",
    )


def _mean(values: Sequence[float | None]) -> str:
    mean = statistics.fmean(value or 0.0 for value in values)
    return f"{mean:.3f} ({', '.join(show(value, '.2f') for value in values)})"
