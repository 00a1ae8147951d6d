"""What a neural memory adds to the search of a text memory: LoCoMo's questions, and tests where a memory should win."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import titans
from titans.experiments import text_tests
from titans.experiments.locomo import CATEGORIES, Conversation, read_locomo
from titans.experiments.talks import (
    HYBRID,
    MEANING,
    WORDS,
    KnownEncoder,
    Orders,
    Progress,
    Talk,
    join,
    judge,
    listen,
    name_nearest,
)
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_bars
from titans.report.statistics import bootstrap
from titans.text.encoder import TextEncoder
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.ranking import Ranking
from titans.text.training import write_texts
from titans.text.voice import in_context, unexpected

Row = dict[str, Any]

METRICS = ("R@10", "R@5", "MRR")
CONSTANTS = (5.0, 20.0, 60.0)
SHARES = (0.0, 0.5)  # of the turn before
TUNED = [
    replace(HYBRID, cosine=cosine, constant=constant) for constant in CONSTANTS for cosine in (0.25, 0.5, 0.75, 1.0)
]
THIRD = [
    replace(HYBRID, cosine=cosine, neural=neural, constant=constant)
    for constant in CONSTANTS
    for cosine in (0.0, 0.5, 1.0)
    for neural in (0.5, 1.0)
]
WITH, WITHOUT, ZEROED, ANOTHER = "with memory", "projection, no memory", "memory zeroed", "another's memory"
SHIPPED = "as shipped"
ARMS = {
    "BM25": "words alone",
    "cosine": "meaning alone",
    "hybrid": "both, by reciprocal rank fusion with equal weights and the constant 60",
    "hybrid, tuned": "weights and constant chosen on validation",
    "hybrid in context": "the same, and for its meaning a turn counts half of the turn before it",
    WITHOUT: "a third voice: the learned projection of question and turns",
    WITH: "a third voice: what the memory of the conversation does not expect of the question, trained",
    ZEROED: "the same at the memory's start",
    ANOTHER: "the same with the memory of another conversation",
    "untrained memory": "the same with projections that nothing was trained for",
    SHIPPED: "a search as it is without any option",
}
TUNED_ARMS = ("hybrid, tuned", "hybrid in context", WITHOUT, WITH, "untrained memory")


@dataclass(frozen=True)
class TextExperiment:
    """How it is done.

    Attributes:
        data: a file in LoCoMo's format.
        seeds: for each of them every conversation is left out once; a seed also says which of the others validates.
        theta, eta, alpha, depth: of the memory, which has no bias and is as wide as the encoder's vectors.
        epochs, learning_rate: of the memory's outer loop.
        plain_epochs, plain_rate: of the projection without memory.
        stretch: turns that follow each other, of which the memory is told and among which the answer is sought.
        neighbours: turns of a stretch that ask for the turn after them, besides the questions.
        share: of the turn before, in training.
        temperature: of the contrastive loss.
        sessions, conversations: how much of the data is used; None: all.
    """

    data: str
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    theta: float = 0.03
    eta: float = 0.9
    alpha: float = 0.002
    depth: int = 1
    epochs: int = 3
    learning_rate: float = 1e-4
    plain_epochs: int = 12
    plain_rate: float = 3e-4
    stretch: int = 192
    neighbours: int = 32
    share: float = 0.5
    temperature: float = 0.05
    sessions: int | None = None
    conversations: int | None = None

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {self.seeds}; expected at least one, each once")

    def quick(self) -> TextExperiment:
        """One seed, and the start of three conversations: shows that it works."""
        return replace(self, seeds=self.seeds[:1], epochs=1, plain_epochs=1, sessions=3, conversations=3)

    def config(self, width: int, seed: int = 0) -> NeuralConfig:
        """Of the memory that is measured."""
        return NeuralConfig(
            width=width, dim=width, depth=self.depth, bias=False, theta=self.theta, eta=self.eta, alpha=self.alpha,
            heads=1, seed=seed,
        )  # fmt: skip

    def read(self) -> list[Conversation]:
        """The conversations, or as much of them as is asked for."""
        found = read_locomo(self.data)[: self.conversations]
        if len(found) < 3:
            raise ValueError(
                f"{self.data} has {len(found)} conversations; expected at least 3: to train on, to validate and to test"
            )
        return found if self.sessions is None else [_shorten(each, self.sessions) for each in found]


def _shorten(conversation: Conversation, sessions: int) -> Conversation:
    turns = tuple(turn for turn in conversation.turns if turn.session <= sessions)
    questions = tuple(each for each in conversation.questions if max(each.evidence) < len(turns))
    if not questions:
        raise ValueError(f"no question about {conversation.name} is answered in its first {sessions} sessions")
    return replace(conversation, turns=turns, questions=questions)


@dataclass(frozen=True)
class Choice:
    """How a third voice is used: the weights, and how much of the turn before counts."""

    ranking: Ranking
    share: float

    def to_dict(self) -> Row:
        """As JSON takes it."""
        names = ("bm25", "cosine", "neural", "constant")
        return {name: getattr(self.ranking, name) for name in names} | {"share": self.share}


def choose(options: Mapping[Choice, np.ndarray]) -> tuple[Choice, float]:
    """The best choice by R@10, and its value; among equals the first."""
    values = {choice: float(rows[:, 0].mean()) for choice, rows in options.items()}
    best = max(values, key=values.__getitem__)
    return best, values[best]


class Voice:
    """A trained or untrained memory, and what it says of a talk when it has been told one, nothing, or another."""

    def __init__(self, neural: NeuralTextMemory, remembers: bool) -> None:
        self.neural, self.remembers = neural, remembers

    @torch.no_grad()
    def orders(self, talk: Talk, share: float, told: Tensor | None) -> Orders:
        """What is named for the questions of a talk by a memory of texts (n, width); None: it knows nothing."""
        records = in_context(self.neural.project(talk.turns), share)
        if not self.remembers:
            return name_nearest(self.neural.project(talk.asked), records)
        memory = self.neural.empty()
        if told is not None:
            memory, _ = self.neural.write(memory, told)
        return name_nearest(unexpected(self.neural, self.neural.current(memory), talk.asked[None])[0], records)

    def options(self, talk: Talk) -> dict[Choice, np.ndarray]:
        """How well every choice does on a talk."""
        named = {share: self.orders(talk, share, talk.turns) for share in SHARES}
        return {
            Choice(ranking, share): judge(talk, join(talk, ranking, named[share]))
            for share in SHARES
            for ranking in THIRD
        }

    def judge(self, talk: Talk, choice: Choice, told: Tensor | None) -> np.ndarray:
        """How well one choice does."""
        return judge(talk, join(talk, choice.ranking, self.orders(talk, choice.share, told)))


def train_voice(
    talks: Sequence[Talk], config: NeuralConfig, experiment: TextExperiment, seed: int, remembers: bool
) -> Voice:
    """Trains projections, and with ``remembers`` all of the memory, to tell the turn that answers from its neighbours.

    An episode is a stretch of a conversation: its turns are written, and each question about one of them, and some of
    the turns for the turn after them, are sought among them. The loss is the cross-entropy of the right turn.
    """
    rng = random.Random(seed)
    neural = NeuralTextMemory(config)
    rate, epochs = (experiment.learning_rate, experiment.epochs) if remembers else (
        experiment.plain_rate, experiment.plain_epochs
    )  # fmt: skip
    optimizer = torch.optim.AdamW(neural.parameters(), lr=rate)
    for _ in range(epochs):
        for talk, start in _stretches(talks, experiment.stretch, rng):
            told, asked, answers = _episode(talk, start, experiment, rng)
            records = in_context(neural.project(told), experiment.share)
            if remembers:
                z = unexpected(neural, write_texts(neural, told[None])[0], asked[None])[0]
            else:
                z = neural.project(asked)
            loss = F.cross_entropy(z @ records.mT / experiment.temperature, answers)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(neural.parameters(), 1.0)
            optimizer.step()
    return Voice(neural.eval(), remembers)


def _stretches(talks: Sequence[Talk], length: int, rng: random.Random) -> list[tuple[Talk, int]]:
    """Stretches that do not overlap, from a place that differs from epoch to epoch, in any order."""
    made = []
    for talk in talks:
        first = rng.randrange(len(talk.turns) % length + 1) if len(talk.turns) > length else 0
        made += [(talk, start) for start in range(first, max(1, len(talk.turns) - length + 1), length)]
    rng.shuffle(made)
    return made


def _episode(talk: Talk, start: int, experiment: TextExperiment, rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Turns (n, width), what asks for them (m, width), and which of them each asks for (m,)."""
    told = talk.turns[start : start + experiment.stretch]
    pairs = [
        (talk.asked[index], place - start)
        for index, places in enumerate(talk.evidence)
        for place in places
        if start <= place < start + len(told)
    ]
    after = rng.sample(range(1, len(told)), min(experiment.neighbours, len(told) - 1))
    pairs += [(told[place - 1], place) for place in after]
    return told, torch.stack([asked for asked, _ in pairs]), torch.tensor([place for _, place in pairs])


@dataclass(frozen=True)
class Fixed:
    """What no seed changes: how every choice does on every talk, without a memory and with an untrained one."""

    tuned: list[dict[Choice, np.ndarray]]
    in_context: list[dict[Choice, np.ndarray]]
    untrained: list[dict[Choice, np.ndarray]]


def fix(talks: Sequence[Talk], experiment: TextExperiment) -> Fixed:
    """Measures it."""
    voice = Voice(NeuralTextMemory(experiment.config(talks[0].turns.shape[1])).eval(), True)
    tuned, context, untrained = [], [], []
    for talk in talks:
        near = name_nearest(talk.asked, in_context(talk.turns, SHARES[1]))
        tuned.append({Choice(ranking, 0.0): judge(talk, join(talk, ranking)) for ranking in TUNED})
        context.append(
            {Choice(ranking, SHARES[1]): judge(talk, join(talk, ranking, meaning=near)) for ranking in TUNED}
        )
        untrained.append(voice.options(talk))
    return Fixed(tuned, context, untrained)


def run_cell(talks: Sequence[Talk], left_out: int, seed: int, experiment: TextExperiment, fixed: Fixed) -> Row:
    """One conversation left out: what each arm does on it, with all that is chosen or trained on the others."""
    test = talks[left_out]
    others = [(left_out + 1 + step) % len(talks) for step in range(len(talks) - 1)]
    validation, another = others[seed % len(others)], others[(seed + 1) % len(others)]
    learned_from = [talks[index] for index in others if index != validation]

    plain = {"BM25": WORDS, "cosine": MEANING, "hybrid": HYBRID}
    rows = {arm: judge(test, join(test, ranking)) for arm, ranking in plain.items()}
    chosen: dict[str, tuple[Choice, float]] = {}
    for arm, options in (
        ("hybrid, tuned", fixed.tuned), ("hybrid in context", fixed.in_context), ("untrained memory", fixed.untrained)
    ):  # fmt: skip
        chosen[arm] = choose(options[validation])
        rows[arm] = options[left_out][chosen[arm][0]]
    config = experiment.config(test.turns.shape[1], seed)
    for arm, remembers in ((WITHOUT, False), (WITH, True)):
        voice = train_voice(learned_from, config, experiment, seed, remembers)
        chosen[arm] = choose(voice.options(talks[validation]))
        rows[arm] = voice.judge(test, chosen[arm][0], test.turns)
    for arm, told in ((ZEROED, None), (ANOTHER, talks[another].turns)):
        rows[arm] = voice.judge(test, chosen[WITH][0], told)
    return {
        "seed": seed, "left_out": test.name, "validation": talks[validation].name, "another": talks[another].name,
        "trained_on": [talk.name for talk in learned_from], "kinds": list(test.kinds),
        "chosen": {arm: choice.to_dict() | {"R@10": value} for arm, (choice, value) in chosen.items()},
        "rows": {arm: np.round(found, 6).tolist() for arm, found in rows.items()},
    }  # fmt: skip


def run_text_memory(
    experiment: TextExperiment, out: Path, progress: Progress | None = None, command: str = "",
    encoder: TextEncoder | None = None,
) -> Row:  # fmt: skip
    """Measures what is not measured yet; writes text-memory.json, text-memory.md, the page and its pictures.

    A finished cell, one seed and one conversation left out, is kept in ``out`` and not measured again.
    """
    conversations = experiment.read()
    known = KnownEncoder(encoder or TextEncoder.load(), out / "vectors.npz")
    known.learn([text for each in conversations for text in _texts(each)], progress)
    settings = asdict(experiment) | {"version": titans.__version__, "encoder": known.fingerprint}
    settings["turns"] = {each.name: len(each.turns) for each in conversations}
    del settings["seeds"], settings["data"]
    plan = list(itertools.product(experiment.seeds, range(len(conversations))))
    tests = text_tests.TESTS
    done = 0

    def tell(what: str) -> None:
        if progress is not None:
            progress(done, len(plan) + len(tests), what)

    tell("asking the store")
    talks = [_listen(each, known) for each in conversations]
    fixed: Fixed | None = None
    cells = []
    for seed, left_out in plan:
        tell(f"seed {seed}, {talks[left_out].name} left out")
        file = out / "cells" / f"{seed}-{left_out}.json"
        cell = read_kept(file, settings)
        if not cell:
            fixed = fixed or fix(talks, experiment)
            cell = {"name": file.stem, "settings": settings, **run_cell(talks, left_out, seed, experiment, fixed)}
            write_figures(cell, file.parent)
        cell["rows"][SHIPPED] = judge(talks[left_out], talks[left_out].shipped).tolist()  # that may change
        cells.append(cell)
        done += 1
    found: dict[str, list[Row]] = {}
    given = text_tests.Given(conversations, talks, known, experiment.config(known.width), experiment.seeds)
    for name, test in tests.items():
        tell(name)
        file = out / "cells" / f"{name}.json"
        wanted = settings | {"seeds": experiment.seeds, "shipped": text_tests.shipped(known.width)}
        kept = read_kept(file, wanted)
        if not kept:
            kept = {"name": name, "settings": wanted, "rows": test(given)}
            write_figures(kept, file.parent)
        found[name] = kept["rows"]
        done += 1
    report = {
        "name": "text-memory", "command": command, "date": time.strftime("%Y-%m-%d"), "settings": settings,
        "seeds": list(experiment.seeds), "conversations": [_about(each) for each in conversations],
        **summarize(cells), **found,
    }  # fmt: skip
    write_outcome(report, "What a neural memory adds to a text memory", sections(report), out)
    return report


def _listen(conversation: Conversation, encoder: TextEncoder) -> Talk:
    questions = [(each.text, each.evidence, each.category) for each in conversation.questions]
    return listen(conversation.name, [turn.text for turn in conversation.turns], questions, encoder)


def _texts(conversation: Conversation) -> list[str]:
    return [turn.text for turn in conversation.turns] + [question.text for question in conversation.questions]


def _about(conversation: Conversation) -> Row:
    return {
        "name": conversation.name, "turns": len(conversation.turns), "questions": len(conversation.questions),
        "without_evidence": conversation.unanswerable,
    }  # fmt: skip


def summarize(cells: Sequence[Row]) -> Row:
    """The arms over all cells: means over conversations with intervals, the test, and what validation says."""
    arms = {arm: {name: _over(cells, arm, kind) for kind, name in {0: "all", **CATEGORIES}.items()} for arm in ARMS}
    test = {}
    for other in (WITHOUT, ANOTHER, ZEROED, "hybrid, tuned", "hybrid in context"):
        ours, theirs = (_by_conversation(cells, arm, 0) for arm in (WITH, other))
        differences = [float(a[0] - b[0]) for a, b in zip(ours.values(), theirs.values(), strict=True)]
        test[other] = _estimate(differences) | {"differences": dict(zip(ours, differences, strict=True))}
    passed = all((test[other]["low"] or 0) > 0 for other in (WITHOUT, ANOTHER))
    validation = {arm: statistics.fmean(cell["chosen"][arm]["R@10"] for cell in cells) for arm in TUNED_ARMS}
    chosen = {arm: [cell["chosen"][arm] for cell in cells] for arm in TUNED_ARMS}
    return {
        "arms": arms, "test": test, "passed": passed, "validation": validation,
        "best_on_validation": max(validation, key=validation.__getitem__), "chosen": chosen,
    }  # fmt: skip


def _by_conversation(cells: Sequence[Row], arm: str, kind: int) -> dict[str, np.ndarray]:
    """Of every conversation that has questions of a category (0: of any), the metrics, (3,), over all seeds."""
    found: dict[str, list[np.ndarray]] = {}
    for cell in cells:
        rows = np.array(cell["rows"][arm])[[not kind or each == kind for each in cell["kinds"]]]
        if len(rows):
            found.setdefault(cell["left_out"], []).append(rows.mean(axis=0))
    return {name: np.mean(values, axis=0) for name, values in found.items()}


def _over(cells: Sequence[Row], arm: str, kind: int) -> Row | None:
    means = list(_by_conversation(cells, arm, kind).values())
    if not means:
        return None
    return {metric: _estimate([float(mean[index]) for mean in means]) for index, metric in enumerate(METRICS)}


def _estimate(values: Sequence[float]) -> Row:
    low, high = bootstrap(values)
    return {"value": statistics.fmean(values), "low": low, "high": high}


def sections(report: Row) -> list[Section]:
    """The parts of the page."""
    return [*(_metric_section(report, metric) for metric in METRICS), _test_section(report),
            *text_tests.sections(report)]  # fmt: skip


def _metric_section(report: Row, metric: str) -> Section:
    arms = report["arms"]
    kinds = [kind for kind in arms["BM25"] if arms["BM25"][kind] is not None]
    lines = [
        [
            arm,
            text_tests.with_interval(each["all"][metric]),
            *(f"{each[kind][metric]['value']:.3f}" for kind in kinds[1:]),
        ]
        for arm, each in arms.items()
    ]
    names = ", ".join(f"{each['name']} ({each['turns']} turns)" for each in report["conversations"])
    about = {
        "R@10": "the share of the turns that answer a question among the first ten that are found",
        "R@5": "the share of the turns that answer a question among the first five that are found",
        "MRR": "1 / the place of the first turn that answers the question",
    }[metric]
    words = f"{metric}: {about}. Means over {len(report['conversations'])} conversations, each left out in turn, and "
    words += f"{len(report['seeds'])} seeds; what is trained or chosen never saw the one left out. In brackets the 95% "
    words += "interval by drawing conversations again."
    shown = ("BM25", "cosine", "hybrid", "hybrid in context", WITHOUT, WITH, ANOTHER)
    curves = [Curve(arm, [arms[arm][kind][metric]["value"] for kind in kinds], style=i) for i, arm in enumerate(shown)]
    png = plot_bars(kinds, curves, f"{metric} by category of question", "category", f"{metric} (%)", percent=True)
    arms_in_words = "; ".join(f"{arm}: {what}" for arm, what in ARMS.items())
    paragraphs = [words, f"Conversations: {names}.", f"Arms. {arms_in_words}."] if metric == "R@10" else [words]
    table = Table(["arm", "all", *kinds[1:]], lines, f"{metric} by category.")
    figure = Figure(f"text-memory-{metric.replace('@', '')}", png, f"{metric} of the arms by category of question")
    return Section(f"Questions about conversations: {metric}", paragraphs, [table], [figure])


def _test_section(report: Row) -> Section:
    verdict = "PASSED" if report["passed"] else "NOT PASSED"
    words = (
        f"Fixed before the run: the arm «{WITH}» beats both «{WITHOUT}» and «{ANOTHER}» in R@10, which is so if the "
    )
    words += f"95% interval of the paired difference over conversations is above 0 for both. {verdict}. What was "
    words += "not: the memory's step, momentum and forgetting, how it is read, and the share of the turn before were "
    words += "found by trials on five conversations of LoCoMo, so on those the figures are somewhat too good."
    lines = []
    for other, each in report["test"].items():
        apart = ", ".join(f"{value:+.3f}" for value in each["differences"].values())
        lines.append([f"{WITH} - {other}", text_tests.with_interval(each, "+.3f"), apart])
    best = report["best_on_validation"]
    values = ", ".join(f"{arm} {value:.3f}" for arm, value in report["validation"].items())
    return Section(
        "Does the neural part help?",
        [words, f"On validation the best arm is «{best}» (R@10: {values})."],
        [Table(["difference in R@10", "mean", "of each conversation"], lines, "Paired, by conversation.")],
    )
