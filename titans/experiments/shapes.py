"""The shape and the learning rate that suit each model best at one size, found with as many runs for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans.experiments.lm import LMExperiment, train_models
from titans.models.baselines import SMALL_VOCABULARY
from titans.report.outcome import write_outcome
from titans.report.page import Section, Table, show
from titans.report.progress import Progress, silent
from titans.tasks.prepared import load_prepared
from titans.words import nearest

Shape = dict[str, Any]  # fields of a config; the width of the feed-forward layers, or the state of Mamba2, follows
Found = dict[str, Any]  # a row of the report: model, shape, learning_rate, parameters, loss, cpu_minutes

RATES = (2e-3, 4e-3, 8e-3)
SIZE = "1.5m"  # of all candidates
# Layers, width and heads. Narrower and deeper ones were worse in an earlier search, of LMM, Gated DeltaNet, MAC and MAG
# (docs/log.md).
_LINEAR: Sequence[Shape] = (  # of models with a linear memory
    {"num_hidden_layers": 4, "hidden_size": 160, "memory_heads": 4, "memory_head_dim": 80},
    {"num_hidden_layers": 4, "hidden_size": 160, "memory_heads": 2, "memory_head_dim": 128},
    {"num_hidden_layers": 3, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 80},
    {"num_hidden_layers": 3, "hidden_size": 192, "memory_heads": 2, "memory_head_dim": 160},
)
_MEMORY: Sequence[Shape] = (
    {"memory_depth": 1, "num_hidden_layers": 4, "hidden_size": 160, "memory_heads": 4, "memory_head_dim": 80},
    {"memory_depth": 2, "num_hidden_layers": 4, "hidden_size": 160, "memory_heads": 4, "memory_head_dim": 64},
    {"memory_depth": 1, "num_hidden_layers": 3, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 80},
    {"memory_depth": 2, "num_hidden_layers": 3, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 64},
)
_HYBRID: Sequence[Shape] = (
    {"memory_depth": 1, "num_hidden_layers": 3, "hidden_size": 160, "memory_heads": 4, "memory_head_dim": 80},
    {"memory_depth": 2, "num_hidden_layers": 3, "hidden_size": 160, "memory_heads": 4, "memory_head_dim": 64},
    {"memory_depth": 1, "num_hidden_layers": 2, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 80},
    {"memory_depth": 2, "num_hidden_layers": 2, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 64},
)
_ATTENTION: Sequence[Shape] = (
    {"num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 4},
    {"num_hidden_layers": 4, "hidden_size": 160, "num_attention_heads": 4},
    {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 4},
    {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 8},
)
CANDIDATES: Mapping[str, Sequence[Shape]] = {
    "lmm": _MEMORY,
    "gated-deltanet": _LINEAR,
    "mamba2": (
        {"num_heads": 4, "head_dim": 64, "hidden_size": 128},
        {"num_heads": 5, "head_dim": 64, "hidden_size": 160},
        {"num_heads": 6, "head_dim": 64, "hidden_size": 192},
        {"num_heads": 10, "head_dim": 32, "hidden_size": 160},
    ),
    "sliding-window": _ATTENTION,
    "mal": _HYBRID,
    "mac": _HYBRID,
    "mag": _HYBRID,
    "transformer++": _ATTENTION,
}
# Bytes leave the layers what a vocabulary takes elsewhere: deeper shapes come into reach, and some have no feed-forward
# layers to speak of, as Mamba2 has none.
_OF_BYTES: Sequence[Shape] = (
    {"memory_depth": 1, "num_hidden_layers": 3, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 80},
    {"memory_depth": 1, "num_hidden_layers": 4, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 80},
    {"memory_depth": 1, "num_hidden_layers": 6, "hidden_size": 160, "memory_heads": 4, "memory_head_dim": 64},
    {"memory_depth": 1, "num_hidden_layers": 8, "hidden_size": 128, "memory_heads": 4, "memory_head_dim": 64},
)
_HYBRID_OF_BYTES: Sequence[Shape] = (
    {"memory_depth": 1, "num_hidden_layers": 2, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 80},
    {"memory_depth": 1, "num_hidden_layers": 3, "hidden_size": 192, "memory_heads": 4, "memory_head_dim": 64},
    {"memory_depth": 1, "num_hidden_layers": 4, "hidden_size": 160, "memory_heads": 4, "memory_head_dim": 64},
    {"memory_depth": 1, "num_hidden_layers": 6, "hidden_size": 128, "memory_heads": 4, "memory_head_dim": 64},
)
_ATTENTION_OF_BYTES: Sequence[Shape] = (
    {"num_hidden_layers": 8, "hidden_size": 128, "num_attention_heads": 4},
    {"num_hidden_layers": 6, "hidden_size": 160, "num_attention_heads": 4},
    {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4},
    {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 4},
)
BYTE_CANDIDATES: Mapping[str, Sequence[Shape]] = {
    "lmm": _OF_BYTES,
    "gated-deltanet": _OF_BYTES,
    "mamba2": CANDIDATES["mamba2"],
    "sliding-window": _ATTENTION_OF_BYTES,
    "mal": _HYBRID_OF_BYTES,
    "mac": _HYBRID_OF_BYTES,
    "mag": _HYBRID_OF_BYTES,
    "transformer++": _ATTENTION_OF_BYTES,
}


def candidates_for(vocab_size: int) -> Mapping[str, Sequence[Shape]]:
    """Shapes by model for a vocabulary, the same number for each."""
    return BYTE_CANDIDATES if vocab_size <= SMALL_VOCABULARY else CANDIDATES


def describe(shape: Shape) -> str:
    """A shape in words, such as ``num_hidden_layers 4, memory_head_dim 64``."""
    return ", ".join(f"{name} {value}" for name, value in shape.items())


def run_shapes(
    language: LMExperiment,
    rates: Sequence[float] = RATES,
    progress: Progress = silent,
    command: str = "",
) -> dict[str, Any]:
    """Finds each model's best shape and rate; writes shapes.json, shapes.md and the page into ``language.out``.

    All candidates are trained at the middle rate, and the best of each model at the other rates.

    Args:
        language: the runs; its models are those that are searched for.
        rates: learning rates, an odd number of them.
    """
    candidates = candidates_for(load_prepared(language.data).vocab_size)
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
    found = _train(language, rows, rows, middle, progress)
    best = [_ranked(found, model)[0]["label"] for model in language.models]
    for rate in rates:
        if rate != middle:
            found += _train(language, best, rows, rate, progress)
    chosen = {model: _ranked(found, model)[0] for model in language.models}
    report = {
        "name": "shapes",
        "command": command,
        "seeds": list(language.seeds),
        "found": found,
        "chosen": chosen,
    }
    others = ", ".join(f"{rate:g}" for rate in rates if rate != middle)
    about = (
        f"Validation loss, size {language.size}, after {language.tokens:,} training tokens: all shapes at a learning "
        f"rate of {middle:g}, each model's best at {others}. The feed-forward layers are as wide as the number of "
        "parameters allows; Mamba2 gets as many layers, then as large a state."
    )
    sections = [Section("What was tried", [about], [shapes_table(report)])]
    write_outcome(report, "Shapes and learning rates", sections, Path(language.out))
    return report


def _train(
    language: LMExperiment, labels: Iterable[str], rows: dict[str, Shape], rate: float, progress: Progress
) -> list[Found]:
    out = Path(language.out) / f"rate-{rate:g}"
    runs = replace(language, models=tuple(labels), rows=rows, learning_rate=rate, out=str(out))
    table = {row["model"]: row for row in train_models(runs, progress)["table"]}
    return [
        {
            "label": label,
            "model": rows[label]["name"],
            "shape": {name: value for name, value in rows[label].items() if name != "name"},
            **{name: table[label][name] for name in ("learning_rate", "parameters", "loss", "losses", "cpu_minutes")},
        }
        for label in runs.models
    ]


def _ranked(found: Sequence[Found], model: str) -> list[Found]:
    """The rows of a model, the best first."""
    mine = [row for row in found if row["model"] == model]
    return sorted(mine, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def shapes_table(report: dict[str, Any]) -> Table:
    """Everything that was tried, model by model, the best first."""
    rows = [
        [
            model,
            describe(row["shape"]),
            f"{row['learning_rate']:g}",
            f"{row['parameters']:,}",
            show(row["loss"]),
            f"{row['cpu_minutes']:.1f}",
            "chosen" if row == chosen else "",
        ]
        for model, chosen in report["chosen"].items()
        for row in _ranked(report["found"], model)
    ]
    header = ["model", "shape", "learning rate", "parameters", "loss", "CPU minutes", ""]
    return Table(header, rows, "Loss in nats per token.")
