"""The shape and the learning rate that suit each model best at one size, found with as many runs for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans.experiments.lm import LMExperiment, train_models
from titans.report.outcome import write_outcome
from titans.report.page import Section, Table, show
from titans.report.progress import Progress, silent
from titans.words import nearest

Shape = dict[str, Any]  # fields of a config; the width of the feed-forward layers, or the state of Mamba2, follows
Found = dict[str, Any]  # a row of the report: model, shape, tokens, learning_rate, parameters, loss, cpu_minutes

RATES = (2e-3, 4e-3, 8e-3)
SIZE = "1.5m"  # of all candidates
SHORTER = 2  # the first runs see so many times fewer tokens than the last
FINALISTS = 3
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
    """Finds each model's best shape and rate; writes shapes.json, shapes.md and the page into ``language.out``.

    All candidates are trained on half of the tokens at the middle rate; of each model the best few on all tokens;
    and the best of those at the other rates.

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
    language = replace(language, size=SIZE).judged_at_the_end()
    middle = sorted(rates)[len(rates) // 2]
    rows = {
        f"{model}-{number}": {"name": model, **shape}
        for model in language.models
        for number, shape in enumerate(candidates[model])
    }
    short = max(language.batch_tokens, language.tokens // SHORTER)
    first = _train(replace(language, tokens=short), rows, rows, middle, progress)
    finalists = [row["label"] for model in language.models for row in _ranked(first, model)[:FINALISTS]]
    found = _train(language, finalists, rows, middle, progress)
    best = [_ranked(found, model)[0]["label"] for model in language.models]
    for rate in rates:
        if rate != middle:
            found += _train(language, best, rows, rate, progress)
    chosen = {model: _ranked(found, model)[0] for model in language.models}
    report = {
        "name": "shapes",
        "command": command,
        "seeds": list(language.seeds),
        "found": [*found, *first],
        "chosen": chosen,
    }
    others = ", ".join(f"{rate:g}" for rate in rates if rate != middle)
    about = (
        f"Validation loss, size {language.size}: all shapes after {short:,} training tokens at a learning rate of "
        f"{middle:g}; each model's best {FINALISTS} after {language.tokens:,}; the best of those at {others}. What a "
        "shape does not say is as models.build has it; the feed-forward layers (Mamba2: the state) are as wide as the "
        "number of parameters allows."
    )
    sections = [Section("What was tried", [about], [shapes_table(report)])]
    write_outcome(report, "Shapes and learning rates", sections, Path(language.out))
    return report


def _train(
    language: LMExperiment, labels: Iterable[str], rows: dict[str, Shape], rate: float, progress: Progress
) -> list[Found]:
    out = Path(language.out) / f"{language.tokens}-tokens" / f"rate-{rate:g}"
    runs = replace(language, models=tuple(labels), rows=rows, learning_rate=rate, out=str(out))
    table = {row["model"]: row for row in train_models(runs, progress)["table"]}
    return [
        {
            "label": label,
            "model": rows[label]["name"],
            "shape": {name: value for name, value in rows[label].items() if name != "name"},
            "tokens": language.tokens,
            **{name: table[label][name] for name in ("learning_rate", "parameters", "loss", "losses", "cpu_minutes")},
        }
        for label in runs.models
    ]


def _ranked(found: Sequence[Found], model: str) -> list[Found]:
    """The rows of a model, the best of the longest runs first."""
    mine = [row for row in found if row["model"] == model]
    return sorted(mine, key=lambda row: (-row["tokens"], math.inf if row["loss"] is None else row["loss"]))


def shapes_table(report: dict[str, Any]) -> Table:
    """Everything that was tried, model by model, the longest runs and the best first."""
    rows = [
        [
            model,
            describe(row["shape"]),
            f"{row['learning_rate']:g}",
            f"{row['parameters']:,}",
            f"{row['tokens']:,}",
            show(row["loss"]),
            f"{row['cpu_minutes']:.1f}",
            "chosen" if row == chosen else "",
        ]
        for model, chosen in report["chosen"].items()
        for row in _ranked(report["found"], model)
    ]
    header = ["model", "shape", "learning rate", "parameters", "training tokens", "loss", "CPU minutes", ""]
    return Table(header, rows, "Loss in nats per token.")
