"""The shape and the learning rate that suit each model best at one size, found with as many runs for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans.experiments.lm import LMExperiment, train_models
from titans.report.outcome import write_outcome
from titans.report.page import Section, Table, show
from titans.report.progress import Progress, silent
from titans.words import nearest

Shape = dict[str, Any]  # fields of a config; the width of the feed-forward layers, or the state of Mamba2, follows
Found = dict[str, Any]  # a row of the report: model, shape, learning_rate, parameters, loss, cpu_minutes

RATES = (2e-3, 4e-3, 8e-3)
SIZE = "1.5m"
_LINEAR: Sequence[Shape] = (  # of models with a linear memory
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 8},
    {"num_hidden_layers": 6, "memory_head_dim": 64},
    {"num_hidden_layers": 6, "memory_heads": 2, "memory_head_dim": 128},
    {"num_hidden_layers": 4, "hidden_size": 160, "memory_head_dim": 80},
    {"num_hidden_layers": 10, "hidden_size": 96, "memory_head_dim": 48},
    {"num_hidden_layers": 3, "hidden_size": 192, "memory_head_dim": 80},
    {"num_hidden_layers": 4, "hidden_size": 160, "memory_heads": 2, "memory_head_dim": 128},
)
_MEMORY: Sequence[Shape] = (
    {"memory_depth": 2, "num_hidden_layers": 4},
    {"memory_depth": 1, "num_hidden_layers": 8},
    {"memory_depth": 1, "num_hidden_layers": 6, "memory_head_dim": 64},
    {"memory_depth": 2, "num_hidden_layers": 6, "memory_head_dim": 64},
    {"memory_depth": 1, "num_hidden_layers": 4, "hidden_size": 160, "memory_head_dim": 80},
    {"memory_depth": 1, "num_hidden_layers": 10, "hidden_size": 96, "memory_head_dim": 48},
    {"memory_depth": 1, "num_hidden_layers": 3, "hidden_size": 192, "memory_head_dim": 80},
    {"memory_depth": 2, "num_hidden_layers": 4, "hidden_size": 160, "memory_head_dim": 64},
)
_HYBRID: Sequence[Shape] = (
    {"memory_depth": 2, "num_hidden_layers": 3},
    {"memory_depth": 1, "num_hidden_layers": 5},
    {"memory_depth": 1, "num_hidden_layers": 4, "memory_head_dim": 64},
    {"memory_depth": 2, "num_hidden_layers": 4, "memory_head_dim": 64},
    {"memory_depth": 1, "num_hidden_layers": 3, "hidden_size": 160, "memory_head_dim": 80},
    {"memory_depth": 1, "num_hidden_layers": 7, "hidden_size": 96, "memory_head_dim": 48},
    {"memory_depth": 1, "num_hidden_layers": 2, "hidden_size": 192, "memory_head_dim": 80},
    {"memory_depth": 2, "num_hidden_layers": 3, "hidden_size": 160, "memory_head_dim": 64},
)
_ATTENTION: Sequence[Shape] = (
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 6},
    {"num_hidden_layers": 8},
    {"num_hidden_layers": 6, "num_attention_heads": 8},
    {"num_hidden_layers": 4, "hidden_size": 160},
    {"num_hidden_layers": 10, "hidden_size": 96},
    {"num_hidden_layers": 3, "hidden_size": 192},
    {"num_hidden_layers": 4, "hidden_size": 160, "num_attention_heads": 8},
)
CANDIDATES: Mapping[str, Sequence[Shape]] = {
    "lmm": _MEMORY,
    "gated-deltanet": _LINEAR,
    "mac": _HYBRID,
    "mag": _HYBRID,
    "mal": _HYBRID,
    "sliding-window": _ATTENTION,
    "transformer++": _ATTENTION,
    "mamba2": (
        {"num_heads": 8, "head_dim": 32, "chunk_size": 64},
        {"num_heads": 4, "head_dim": 64, "chunk_size": 64},
        {"num_heads": 4, "head_dim": 64, "chunk_size": 64, "num_hidden_layers": 8},
        {"num_heads": 2, "head_dim": 128, "chunk_size": 64},
        {"num_heads": 5, "head_dim": 64, "chunk_size": 64, "hidden_size": 160},
        {"num_heads": 3, "head_dim": 64, "chunk_size": 64, "hidden_size": 96},
        {"num_heads": 6, "head_dim": 64, "chunk_size": 64, "hidden_size": 192},
        {"num_heads": 10, "head_dim": 32, "chunk_size": 64, "hidden_size": 160},
    ),
}


def describe(shape: Shape) -> str:
    """A shape in words, such as ``num_hidden_layers 4, memory_head_dim 64``."""
    return ", ".join(f"{name} {value}" for name, value in shape.items())


def run_shapes(
    language: LMExperiment,
    rates: Sequence[float] = RATES,
    progress: Progress = silent,
    command: str = "",
    candidates: Mapping[str, Sequence[Shape]] = CANDIDATES,
) -> dict[str, Any]:
    """Trains every candidate at the middle rate and each model's best at the others; writes shapes.json, shapes.md and
    the page into the folder of ``language``.

    Args:
        language: the runs; its models are those that are searched for.
        rates: learning rates, an odd number of them.
        candidates: shapes by model, the same number for each.
    """
    for model in language.models:
        if model not in candidates:
            raise ValueError(f"models has {model!r}: {nearest(model, candidates)}")
    if len(rates) % 2 == 0 or any(not rate > 0 for rate in rates):
        raise ValueError(f"rates is {list(rates)}; expected an odd number of positive numbers")
    language = language.judged_at_the_end()
    middle = sorted(rates)[len(rates) // 2]
    rows = {
        f"{model}-{number}": {"name": model, **shape}
        for model in language.models
        for number, shape in enumerate(candidates[model])
    }
    found = _train(language, tuple(rows), rows, middle, progress)
    best = {model: _best(found, model)["label"] for model in language.models}
    for rate in rates:
        if rate != middle:
            found += _train(language, tuple(best.values()), rows, rate, progress)
    chosen = {model: _best(found, model) for model in language.models}
    report = {
        "name": "shapes",
        "command": command,
        "tokens": language.tokens,
        "seeds": list(language.seeds),
        "found": found,
        "chosen": chosen,
    }
    about = (
        f"Validation loss after {language.tokens:,} training tokens, size {language.size}: all shapes at a learning "
        f"rate of {middle:g}, then each model's best at {', '.join(f'{r:g}' for r in rates if r != middle)}. "
        "What a shape does not say is as models.build has it; the feed-forward layers (Mamba2: the state) are as wide "
        "as the number of parameters allows."
    )
    write_outcome(report, "Shapes and learning rates", [Section("What was tried", [about], [shapes_table(report)])],
                  Path(language.out))  # fmt: skip
    return report


def _train(
    language: LMExperiment, labels: tuple[str, ...], rows: dict[str, Shape], rate: float, progress: Progress
) -> list[Found]:
    out = Path(language.out) / f"rate-{rate:g}"
    runs = replace(language, models=labels, rows=rows, learning_rate=rate, out=str(out))
    table = {row["model"]: row for row in train_models(runs, progress)["table"]}
    return [
        {
            "label": label,
            "model": rows[label]["name"],
            "shape": {name: value for name, value in rows[label].items() if name != "name"},
            **{name: table[label][name] for name in ("learning_rate", "parameters", "loss", "losses", "cpu_minutes")},
        }
        for label in labels
    ]


def _best(found: Sequence[Found], model: str) -> Found:
    mine = [row for row in found if row["model"] == model]
    return min(mine, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def shapes_table(report: dict[str, Any]) -> Table:
    """Everything that was tried, model by model, the best first."""
    rows = []
    for model, chosen in report["chosen"].items():
        mine = [row for row in report["found"] if row["model"] == model]
        for row in sorted(mine, key=lambda row: math.inf if row["loss"] is None else row["loss"]):
            rows.append(
                [
                    model,
                    describe(row["shape"]),
                    f"{row['learning_rate']:g}",
                    f"{row['parameters']:,}",
                    show(row["loss"]),
                    f"{row['cpu_minutes']:.1f}",
                    "chosen" if row == chosen else "",
                ]
            )
    header = ["model", "shape", "learning rate", "parameters", "loss", "CPU minutes", ""]
    return Table(header, rows, "Loss in nats per token.")
