"""Which part of a text memory's surprise tells a contradiction from ordinary talk?"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import titans
from titans.experiments.retrieval import Row, estimate, with_interval
from titans.experiments.text_tests import area_under_curve
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_bars
from titans.text.encoder import CachedEncoder, Progress, TextEncoder
from titans.text.facts import KINDS, NAMES, SMALL_TALK
from titans.text.memory import Memory
from titans.text.neural import NeuralTextMemory
from titans.text.versions import ALIKE, OVERLAP

PEOPLE, TOLD = 8, 0.75  # of the facts about them that could be told
STRANGERS = 3  # per kind of fact
SEEDS = (0, 1, 2, 3, 4)
SURE = 0.2  # from which on a text is taken for a contradiction
CONTRADICTIONS = ("another value in the same words", "another value in other words")
ORDINARY = ("the same again", "the same in other words", "another fact about the person", "a new person", "small talk")
PARTS = ("contradiction", "novelty", "loss")


class Said(NamedTuple):
    """What a memory hears next."""

    kind: str  # one of CONTRADICTIONS or ORDINARY
    text: str
    about: int | None = None  # the place of the fact that it is about


def make_scene(seed: int, people: int = PEOPLE, part: str = "test") -> tuple[list[str], list[Said]]:
    """Facts about some people, and what may be said to somebody who was told them."""
    rng = random.Random(f"{seed} {part}")
    known = rng.sample(NAMES[part], people)
    pairs = [(kind, name) for kind in KINDS for name in known]
    rng.shuffle(pairs)
    count = int(TOLD * len(pairs))
    told: list[str] = []
    said: list[Said] = []
    for place, (kind, name) in enumerate(pairs[:count]):
        value, other = rng.sample(kind.values(part), 2)
        wordings = rng.sample([kind.statement, kind.paraphrase], 2)
        (text, paraphrase), changed = ([each.format(n=name, v=v) for each in wordings] for v in (value, other))
        told.append(text)
        said += [Said(*each, place) for each in zip(CONTRADICTIONS, changed, strict=True)]
        said += [Said(ORDINARY[0], text, place), Said(ORDINARY[1], paraphrase, place)]
    others = [name for name in NAMES[part] if name not in known]
    strangers = [(kind, name) for kind in KINDS for name in rng.sample(others, STRANGERS)]
    for label, facts in ((ORDINARY[2], pairs[count:]), (ORDINARY[3], strangers)):
        for kind, name in facts:
            wording = rng.choice([kind.statement, kind.paraphrase])
            said.append(Said(label, wording.format(n=name, v=rng.choice(kind.values(part)))))
    return told, said + [Said(ORDINARY[4], text) for text in SMALL_TALK]


def measure(seed: int, people: int, encoder: CachedEncoder) -> Row:
    """The surprise of everything that may be said, in one scene: the parts of each text, by its kind."""
    told, said = make_scene(seed, people)
    encoder.learn([*told, *(each.text for each in said)])  # all at once is quicker than one by one
    parts: dict[str, list[list[float]]] = {}
    named = []
    with tempfile.TemporaryDirectory() as folder, Memory(folder, encoder=encoder) as memory:
        ids = [record.id for record in memory.add_many(told)]
        for each in said:
            found = memory.surprise(each.text)
            parts.setdefault(each.kind, []).append([round(getattr(found, part), 6) for part in PARTS])
            if each.kind in CONTRADICTIONS:
                named.append(found.contradicts is not None and ids.index(found.contradicts) == each.about)
    return {"seed": seed, "parts": parts, "named": statistics.fmean(named)}


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
    people, seeds = (2, SEEDS[:1]) if quick else (PEOPLE, SEEDS)
    cached = CachedEncoder(encoder or TextEncoder.load())
    settings = {
        "version": titans.__version__, "encoder": cached.fingerprint, "people": people,
        "memory": NeuralTextMemory.default(cached.width).fingerprint, "versions": [ALIKE, OVERLAP],
    }  # fmt: skip
    report: Row = {
        "name": "surprise", "command": command, "date": time.strftime("%Y-%m-%d"), "settings": settings,
        "rows": read_kept(out / "surprise.json", settings).get("rows", []),
    }  # fmt: skip
    for number, seed in enumerate(seeds):
        if progress is not None:
            progress(number, len(seeds), f"scene {number + 1}")
        if not any(row["seed"] == seed for row in report["rows"]):
            report["rows"].append(measure(seed, people, cached))
            write_figures(report, out)
    report["summary"] = summarize(report["rows"])
    write_outcome(report, "What surprises a text memory", [surprise_section(report)], out)
    return report


def summarize(rows: Sequence[Row]) -> Row:
    """Means over seeds with intervals: how well each part tells contradictions from each kind of ordinary talk.

    Beside that, the share of each kind of text that is taken for a contradiction, and how often a contradiction names
    the right fact.
    """
    areas = {
        part: {
            name: estimate([_area(row, index, kinds) for row in rows])
            for name, kinds in {"all": ORDINARY, **{kind: (kind,) for kind in ORDINARY}}.items()
        }
        for index, part in enumerate(PARTS)
    }
    taken = {
        kind: estimate([statistics.fmean(each[0] >= SURE for each in row["parts"][kind]) for row in rows])
        for kind in (*CONTRADICTIONS, *ORDINARY)
    }
    return {"areas": areas, "taken": taken, "named": estimate([row["named"] for row in rows])}


def _area(row: Row, part: int, ordinary: Sequence[str]) -> float:
    changed, other = (
        [each[part] for kind in kinds for each in row["parts"][kind]] for kinds in (CONTRADICTIONS, ordinary)
    )
    return area_under_curve(changed + other, [True] * len(changed) + [False] * len(other))


def surprise_section(report: Row) -> Section:
    """How well each part of surprise tells contradictions, and what is taken for one."""
    about = (
        f"A memory is told facts about {report['settings']['people']} people, and then hears other texts: a fact with "
        "another value, in the same words or in others, and ordinary talk. The first table has the area under the ROC "
        "curve, where 0.5 is chance: how often a contradiction has a higher value than a text of another kind."
    )
    summary = report["summary"]
    areas, taken = summary["areas"], summary["taken"]
    lines = [[part, *(with_interval(each) for each in areas[part].values())] for part in PARTS]
    header = ["part of surprise", *areas[PARTS[0]]]
    alarms = [[kind, with_interval(each, ".1%")] for kind, each in taken.items()]
    alarms.append(["named the fact that it contradicts", with_interval(summary["named"], ".1%")])
    tables = [
        Table(header, lines, "Contradictions against each kind of talk; in brackets the 95% interval over seeds."),
        Table(["text", f"contradiction of at least {SURE:g}"], alarms, "Shares of texts."),
    ]
    words = list(areas[PARTS[0]])
    curves = [
        Curve(part, [each["value"] for each in found], [each["low"] for each in found],
              [each["high"] for each in found], style=style)
        for style, (part, found) in enumerate((part, [areas[part][word] for word in words]) for part in PARTS)
    ]  # fmt: skip
    png = plot_bars(words, curves, "Contradictions against ordinary talk", "ordinary talk", "area under the ROC curve",
                    chance=0.5)  # fmt: skip
    return Section("A contradiction and ordinary talk", [about], tables, [Figure("surprise", png, "The areas as bars")])
