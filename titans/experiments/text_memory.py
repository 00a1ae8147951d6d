"""What a neural memory adds to the search of a text memory: LoCoMo's questions, and tests where a memory should win."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import titans
from titans.experiments import text_tests
from titans.experiments.conversations import CATEGORIES, Conversation, read_locomo
from titans.experiments.retrieval import (
    HYBRID,
    MEANING,
    WORDS,
    Corpus,
    Orders,
    Row,
    estimate,
    make_corpus,
    rank_fused,
    rank_nearest,
    score,
    with_interval,
)
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_bars
from titans.text.encoder import CachedEncoder, Progress, TextEncoder
from titans.text.neural import NeuralConfig, NeuralTextMemory, add_previous
from titans.text.ranking import Ranking
from titans.text.training import (
    Reader,
    Texts,
    TextTraining,
    ask_memory,
    ask_projection,
    draw_episodes,
    make_optimizer,
    train_epoch,
)

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
    "hybrid in context": "the same, with half of the turn before added to the meaning of each turn",
    WITHOUT: "a third ranking: by a learned projection of question and turns",
    WITH: "a third ranking: by what the trained memory of the conversation does not expect of the question",
    ZEROED: "the same with the memory at its start",
    ANOTHER: "the same with the memory of another conversation",
    "untrained memory": "the same with an untrained memory",
    SHIPPED: "a search without any option",
}
HYBRIDS = ("hybrid, tuned", "hybrid in context")
TUNED_ARMS = (*HYBRIDS, WITHOUT, WITH, "untrained memory")


@dataclass(frozen=True)
class TextExperiment:
    """How the experiment is run.

    Attributes:
        data: a file in LoCoMo's format.
        seeds: for each of them every conversation is left out once; a seed also says which of the others validates.
        training: of the memory.
        plain: of the projection without memory.
        sessions, conversations: how much of the data is used; None: all.
    """

    data: str
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    training: TextTraining = TextTraining()  # noqa: RUF009 (frozen)
    plain: TextTraining = TextTraining(epochs=12, learning_rate=3e-4)  # noqa: RUF009 (frozen)
    sessions: int | None = None
    conversations: int | None = None

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {self.seeds}; expected at least one, each once")

    def quick(self) -> TextExperiment:
        """One seed and the start of three conversations: enough to see that it works."""
        training, plain = (replace(each, epochs=1) for each in (self.training, self.plain))
        return replace(self, seeds=self.seeds[:1], training=training, plain=plain, sessions=3, conversations=3)

    def read(self) -> list[Conversation]:
        """The conversations, or as many and as much of them as was asked for."""
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
    """How the neural ranking is used: the weights, and how much of the turn before counts."""

    ranking: Ranking
    share: float

    def to_dict(self) -> Row:
        """As JSON takes it."""
        names = ("bm25", "cosine", "neural", "constant")
        return {name: getattr(self.ranking, name) for name in names} | {"share": self.share}


Scores = dict[Choice, np.ndarray]  # for each choice, R@10, R@5 and MRR of every question


def choose(options: Mapping[Choice, np.ndarray]) -> tuple[Choice, float]:
    """The best choice by R@10, and its value; among equals the first."""
    values = {choice: float(rows[:, 0].mean()) for choice, rows in options.items()}
    best = max(values, key=values.__getitem__)
    return best, values[best]


@dataclass(frozen=True)
class Ranker:
    """Ranks texts by a memory of them; without ``remembers`` by the projection alone."""

    neural: NeuralTextMemory
    remembers: bool

    @torch.no_grad()
    def rank(self, corpus: Corpus, share: float, written: Tensor | None) -> Orders:
        """The orders for a corpus by a memory of the texts ``written`` (n, width); None: it knows nothing."""
        memory = self.neural.empty()
        if written is not None:
            memory, _ = self.neural.write(memory, written)
        states = [self.neural.current(memory)] if self.remembers else []
        texts = add_previous(self.neural.project(corpus.texts), share)
        return rank_nearest(self.neural.unexpected(states, corpus.questions), texts)

    def score(self, corpus: Corpus, choice: Choice, written: Tensor | None) -> np.ndarray:
        """How well one choice does."""
        return score(corpus, rank_fused(corpus, choice.ranking, neural=self.rank(corpus, choice.share, written)))

    def score_all(self, corpus: Corpus) -> Scores:
        """How well every choice does."""
        orders = {share: self.rank(corpus, share, corpus.texts) for share in SHARES}
        return {
            Choice(ranking, share): score(corpus, rank_fused(corpus, ranking, neural=orders[share]))
            for share in SHARES
            for ranking in THIRD
        }


def train_ranker(corpora: Sequence[Corpus], settings: TextTraining, remembers: bool) -> Ranker:
    """Trains projections, and with ``remembers`` all of the memory, to tell the turn that answers from the others."""
    rng = random.Random(settings.seed)
    data = [_to_texts(corpus) for corpus in corpora]
    neural = NeuralTextMemory(NeuralConfig(width=corpora[0].texts.shape[1], seed=settings.seed))
    optimizer = make_optimizer(neural, settings)
    read: Reader = ask_memory if remembers else ask_projection
    for _ in range(settings.epochs):
        train_epoch(neural, optimizer, draw_episodes(data, settings, rng), settings, read)
    return Ranker(neural.eval(), remembers)


def _to_texts(corpus: Corpus) -> Texts:
    pairs = [(index, position) for index, positions in enumerate(corpus.evidence) for position in positions]
    questions, answers = torch.tensor(pairs).unbind(1)
    return Texts(corpus.texts, corpus.questions[questions], answers, torch.arange(len(corpus.texts)) > 0)


def score_untrained(corpora: Sequence[Corpus]) -> dict[str, list[Scores]]:
    """What no seed changes: how every choice does on every corpus, without a memory and with an untrained one."""
    ranker = Ranker(NeuralTextMemory.default(corpora[0].texts.shape[1]), True)
    found: dict[str, list[Scores]] = {"hybrid, tuned": [], "hybrid in context": [], "untrained memory": []}
    for corpus in corpora:
        near = rank_nearest(corpus.questions, add_previous(corpus.texts, SHARES[1]))
        for arm, share, cosine in (("hybrid, tuned", 0.0, corpus.cosine), ("hybrid in context", SHARES[1], near)):
            found[arm].append(
                {Choice(each, share): score(corpus, rank_fused(corpus, each, cosine=cosine)) for each in TUNED}
            )
        found["untrained memory"].append(ranker.score_all(corpus))
    return found


def run_cell(
    corpora: Sequence[Corpus], left_out: int, seed: int, experiment: TextExperiment, untrained: dict[str, list[Scores]]
) -> Row:
    """One conversation left out: what each arm does on it, with all that is chosen or trained on the others."""
    test = corpora[left_out]
    others = [(left_out + 1 + step) % len(corpora) for step in range(len(corpora) - 1)]
    validation, another = others[seed % len(others)], others[(seed + 1) % len(others)]
    train = [corpora[index] for index in others if index != validation]

    plain = {"BM25": WORDS, "cosine": MEANING, "hybrid": HYBRID}
    rows = {arm: score(test, rank_fused(test, ranking)) for arm, ranking in plain.items()}
    chosen: dict[str, tuple[Choice, float]] = {}
    for arm, options in untrained.items():
        chosen[arm] = choose(options[validation])
        rows[arm] = options[left_out][chosen[arm][0]]
    for arm, settings, remembers in ((WITHOUT, experiment.plain, False), (WITH, experiment.training, True)):
        ranker = train_ranker(train, replace(settings, seed=seed), remembers)
        chosen[arm] = choose(ranker.score_all(corpora[validation]))
        rows[arm] = ranker.score(test, chosen[arm][0], test.texts)
    for arm, written in ((ZEROED, None), (ANOTHER, corpora[another].texts)):
        rows[arm] = ranker.score(test, chosen[WITH][0], written)
    return {
        "seed": seed, "left_out": test.name, "validation": corpora[validation].name, "another": corpora[another].name,
        "trained_on": [corpus.name for corpus in train], "kinds": list(test.categories),
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
    cached = CachedEncoder(encoder or TextEncoder.load(), out / "vectors.npz")
    cached.learn([text for each in conversations for text in _texts(each)], progress)
    settings = asdict(experiment) | {"version": titans.__version__, "encoder": cached.fingerprint}
    settings["memory"] = NeuralTextMemory.default(cached.width).fingerprint
    settings["turns"] = {each.name: len(each.turns) for each in conversations}
    del settings["seeds"], settings["data"]
    plan = list(itertools.product(experiment.seeds, range(len(conversations))))
    tests = text_tests.TESTS
    done = 0

    def report_progress(what: str) -> None:
        if progress is not None:
            progress(done, len(plan) + len(tests), what)

    report_progress("searching a store")
    corpora = [_make_corpus(each, cached) for each in conversations]
    untrained: dict[str, list[Scores]] | None = None
    cells = []
    for seed, left_out in plan:
        corpus = corpora[left_out]
        report_progress(f"seed {seed}, {corpus.name} left out")
        file = out / "cells" / f"{seed}-{left_out}.json"
        cell = read_kept(file, settings)
        if not cell:
            untrained = untrained or score_untrained(corpora)
            found = run_cell(corpora, left_out, seed, experiment, untrained)
            cell = {"name": file.stem, "settings": settings, **found}
            write_figures(cell, file.parent)
        cell["rows"][SHIPPED] = score(corpus, corpus.shipped).tolist()  # the defaults may change
        cells.append(cell)
        done += 1
    of_tests: dict[str, list[Row]] = {}
    given = text_tests.Given(conversations, corpora, cached, experiment.seeds)
    for name, test in tests.items():
        report_progress(name)
        file = out / "cells" / f"{name}.json"
        wanted = settings | {"seeds": experiment.seeds, "shipped": text_tests.shipped(cached.width)}
        kept = read_kept(file, wanted)
        if not kept:
            kept = {"name": name, "settings": wanted, "rows": test(given)}
            write_figures(kept, file.parent)
        of_tests[name] = kept["rows"]
        done += 1
    report = {
        "name": "text-memory", "command": command, "date": time.strftime("%Y-%m-%d"), "settings": settings,
        "seeds": list(experiment.seeds), "conversations": [_about(each) for each in conversations],
        **summarize(cells), **of_tests,
    }  # fmt: skip
    write_outcome(report, "What a neural memory adds to a text memory", sections(report), out)
    return report


def _make_corpus(conversation: Conversation, encoder: TextEncoder) -> Corpus:
    questions = [(each.text, each.evidence, each.category) for each in conversation.questions]
    return make_corpus(conversation.name, [turn.text for turn in conversation.turns], questions, encoder)


def _texts(conversation: Conversation) -> list[str]:
    return [turn.text for turn in conversation.turns] + [question.text for question in conversation.questions]


def _about(conversation: Conversation) -> Row:
    return {
        "name": conversation.name, "turns": len(conversation.turns), "questions": len(conversation.questions),
        "without_evidence": conversation.unanswerable,
    }  # fmt: skip


def summarize(cells: Sequence[Row]) -> Row:
    """The arms over all cells: means over conversations with intervals, the test, and the best arm on validation."""
    arms = {arm: {name: _over(cells, arm, kind) for kind, name in {0: "all", **CATEGORIES}.items()} for arm in ARMS}
    test = {other: _difference(cells, WITH, other) for other in (WITHOUT, ANOTHER, ZEROED, *HYBRIDS)}
    shipped = {other: _difference(cells, SHIPPED, other) for other in ("BM25", *HYBRIDS)}
    passed = all((test[other]["low"] or 0) > 0 for other in (WITHOUT, ANOTHER))
    validation = {arm: statistics.fmean(cell["chosen"][arm]["R@10"] for cell in cells) for arm in TUNED_ARMS}
    chosen = {arm: [cell["chosen"][arm] for cell in cells] for arm in TUNED_ARMS}
    return {
        "arms": arms, "test": test, "shipped": shipped, "passed": passed, "validation": validation,
        "best_on_validation": max(validation, key=validation.__getitem__), "chosen": chosen,
    }  # fmt: skip


def _by_conversation(cells: Sequence[Row], arm: str, kind: int) -> dict[str, np.ndarray]:
    """For each conversation with questions of a category (0: of any), the mean metrics (3,) over all seeds."""
    found: dict[str, list[np.ndarray]] = {}
    for cell in cells:
        rows = np.array(cell["rows"][arm])[[not kind or each == kind for each in cell["kinds"]]]
        if len(rows):
            found.setdefault(cell["left_out"], []).append(rows.mean(axis=0))
    return {name: np.mean(values, axis=0) for name, values in found.items()}


def _difference(cells: Sequence[Row], arm: str, other: str) -> Row:
    """The difference of two arms in R@10, paired by conversation."""
    ours, theirs = (_by_conversation(cells, each, 0) for each in (arm, other))
    differences = {name: float(ours[name][0] - theirs[name][0]) for name in ours}
    return estimate(list(differences.values())) | {"differences": differences}


def _over(cells: Sequence[Row], arm: str, kind: int) -> Row | None:
    means = list(_by_conversation(cells, arm, kind).values())
    if not means:
        return None
    return {metric: estimate([float(mean[index]) for mean in means]) for index, metric in enumerate(METRICS)}


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
            with_interval(each["all"][metric]),
            *(f"{each[kind][metric]['value']:.3f}" for kind in kinds[1:]),
        ]
        for arm, each in arms.items()
    ]
    names = ", ".join(f"{each['name']} ({each['turns']} turns)" for each in report["conversations"])
    meaning = {
        "R@10": "the share of the turns that answer a question among the first ten that are found",
        "R@5": "the share of the turns that answer a question among the first five that are found",
        "MRR": "1 / the rank of the first turn that answers the question",
    }[metric]
    about = (
        f"{metric}: {meaning}. Means over {len(report['conversations'])} conversations, each left out in turn, and "
        f"{len(report['seeds'])} seeds; nothing is trained or chosen on the one left out. In brackets the 95% interval "
        "over conversations."
    )
    shown = ("BM25", "cosine", "hybrid", "hybrid in context", WITHOUT, WITH, ANOTHER)
    curves = [Curve(arm, [arms[arm][kind][metric]["value"] for kind in kinds], style=i) for i, arm in enumerate(shown)]
    png = plot_bars(kinds, curves, f"{metric} by category of question", "category", f"{metric} (%)", percent=True)
    all_arms = "; ".join(f"{arm}: {what}" for arm, what in ARMS.items())
    paragraphs = [about, f"Conversations: {names}.", f"Arms. {all_arms}."] if metric == "R@10" else [about]
    table = Table(["arm", "all", *kinds[1:]], lines, f"{metric} by category.")
    figure = Figure(f"text-memory-{metric.replace('@', '')}", png, f"{metric} of the arms by category of question")
    return Section(f"Questions about conversations: {metric}", paragraphs, [table], [figure])


def _test_section(report: Row) -> Section:
    verdict = "PASSED" if report["passed"] else "NOT PASSED"
    about = (
        f"Fixed before the run: the arm «{WITH}» passes if it beats both «{WITHOUT}» and «{ANOTHER}» in R@10, that is, "
        "if the 95% interval of the paired difference over conversations is above 0 for both. "
        f"{verdict}. Not fixed before: the memory's step, momentum and forgetting, how it is read, the share of the "
        "turn before, and the weights of a search without any option. They were found by trials on five conversations "
        "of LoCoMo, so the figures on those are somewhat too good."
    )
    lines = []
    for arm, differences in ((WITH, report["test"]), (SHIPPED, report["shipped"])):
        for other, each in differences.items():
            apart = ", ".join(f"{value:+.3f}" for value in each["differences"].values())
            lines.append([f"{arm} - {other}", with_interval(each, "+.3f"), apart])
    best = report["best_on_validation"]
    values = ", ".join(f"{arm} {value:.3f}" for arm, value in report["validation"].items())
    return Section(
        "Does the neural part help?",
        [about, f"On validation the best arm is «{best}» (R@10: {values})."],
        [Table(["difference in R@10", "mean", "in each conversation"], lines, "Paired, by conversation.")],
    )
