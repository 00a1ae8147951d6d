"""Does a text memory find a contradiction more surprising than a paraphrase of what it was told?"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import titans
from titans.experiments.retrieval import Row, estimate, with_interval
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_bars
from titans.text.encoder import Progress, TextEncoder
from titans.text.facts import draw_values, generate_facts
from titans.text.neural import NeuralTextMemory

TRIPLES = 200
KNOWN = (0, 1, 5, 20, 100)  # other facts that the memory is told first
SEEDS = (0, 1, 2)  # of those facts
WHEN = ("before", "after", "another")
ABOUT = {"after": "told the text", "before": "not told", "another": "told another triple's text"}


class Triple(NamedTuple):
    """A text, a paraphrase of it, and a text that contradicts it."""

    text: str
    paraphrase: str
    contradiction: str


def generate_triples(count: int, rng: random.Random, part: str = "test") -> list[Triple]:
    """Triples no two of which are about the same thing of the same person; see ``generate_facts`` for the parts."""
    return [
        Triple(
            kind.statement.format(n=name, v=value),
            kind.paraphrase.format(n=name, v=value),
            kind.statement.format(n=name, v=other),
        )
        for kind, name, value, other in draw_values(count, rng, part)
    ]


def measure_surprise(memory: NeuralTextMemory, triples: Tensor, context: Tensor) -> Tensor:
    """How surprising texts, paraphrases and contradictions are to a memory that was told the text, or was not.

    Args:
        memory: projections and start.
        triples: (n, 3, width), the vectors of :func:`generate_triples`.
        context: (m, width), texts that the memory is told first; each triple starts from there.

    Returns:
        (n, 3, 3): before the text is told, after it, and after the text of another triple instead; for each, the
        surprise of text, paraphrase and contradiction.
    """
    known, _ = memory.write(memory.empty(), context)
    after = [memory.write(known, triple[:1])[0] for triple in triples]
    rows = [
        [[float(memory.write(state, text[None])[1]) for text in triple] for state in (known, after[i], after[i - 1])]
        for i, triple in enumerate(triples)
    ]
    return torch.tensor(rows)


def run_surprise(
    out: Path,
    progress: Progress | None = None,
    command: str = "",
    quick: bool = False,
    encoder: TextEncoder | None = None,
) -> Row:
    """Measures what is not measured yet; writes surprise.json, surprise.md, the page and its picture into ``out``.

    What surprise.json already holds, made by the same version with the same settings, is kept.
    """
    count, known, seeds = (24, KNOWN[:2], SEEDS[:1]) if quick else (TRIPLES, KNOWN, SEEDS)
    encoder = encoder or TextEncoder.load()
    memory = NeuralTextMemory.default(encoder.width)
    settings = {
        "version": titans.__version__, "encoder": encoder.fingerprint, "memory": memory.fingerprint, "triples": count,
    }  # fmt: skip
    report: Row = {
        "name": "surprise", "command": command, "date": time.strftime("%Y-%m-%d"), "settings": settings,
        "rows": read_kept(out / "surprise.json", settings).get("rows", []),
    }  # fmt: skip
    texts = [text for triple in generate_triples(count, random.Random(0)) for text in triple]
    triples = torch.from_numpy(encoder.encode(texts)).view(count, 3, -1)
    plan = [{"known": many, "seed": seed} for many in known for seed in (seeds if many else seeds[:1])]
    for number, asked in enumerate(plan):
        if progress is not None:
            progress(number, len(plan), f"a memory that knows {asked['known']} other facts")
        if not any(asked.items() <= row.items() for row in report["rows"]):
            facts = generate_facts(asked["known"], random.Random(asked["seed"]))
            context = torch.from_numpy(encoder.encode([fact.text for fact in facts]))
            report["rows"].append(asked | _judge(measure_surprise(memory, triples, context)))
            write_figures(report, out)
    report["summary"] = summarize(report["rows"])
    write_outcome(report, "What surprises a text memory", [surprise_section(report)], out)
    return report


def _judge(surprise: Tensor) -> Row:
    """For each triple, 1 or 0: is a repetition less surprising, and the contradiction more than the paraphrase?"""
    repeated = surprise[:, 1, 0] < surprise[:, 0, 0]
    higher = surprise[:, :, 2] > surprise[:, :, 1]
    return {
        "repeated": repeated.int().tolist(),
        **{when: higher[:, index].int().tolist() for index, when in enumerate(WHEN)},
    }


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Shares of the triples, and their intervals over triples, for each number of facts known before."""
    made = []
    for known in dict.fromkeys(row["known"] for row in rows):
        mine = [row for row in rows if row["known"] == known]
        shares = {name: np.mean([row[name] for row in mine], axis=0) for name in ("repeated", *WHEN)}
        made.append({"known": known} | {name: estimate(each.tolist()) for name, each in shares.items()})
    return made


def surprise_section(report: Row) -> Section:
    """One row for each number of facts that the memory knew before."""
    about = (
        f"{report['settings']['triples']} triples: a text about a person, a paraphrase of it, and a text that "
        "contradicts it. An untrained memory is told some facts about other people, then the text. Shown is the share "
        "of triples whose contradiction is more surprising than the paraphrase; as a control also for a memory that "
        "is not told the text, and for one that is told the text of another triple instead. (An empty memory finds all "
        "texts equally surprising, so without other facts the share of «not told» is nothing but rounding.)"
    )
    rows = report["summary"]
    lines = [[f"{row['known']}", *(with_interval(row[name], ".1%") for name in ("repeated", *ABOUT))] for row in rows]
    header = ["other facts known", "repetition less surprising", *ABOUT.values()]
    table = Table(header, lines, "Shares of triples, in brackets the 95% interval over triples.")
    curves = [
        Curve(words, [row[name]["value"] for row in rows], [row[name]["low"] for row in rows],
              [row[name]["high"] for row in rows], style=style)
        for style, (name, words) in enumerate(ABOUT.items())
    ]  # fmt: skip
    png = plot_bars(
        [f"{row['known']}" for row in rows], curves, "Contradiction more surprising than paraphrase",
        "other facts known", "share of triples (%)", percent=True,
    )  # fmt: skip
    return Section("Contradiction and paraphrase", [about], [table], [Figure("surprise", png, "The shares as bars")])
