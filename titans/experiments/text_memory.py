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
import torch.nn.functional as F
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
    add_previous,
    estimate,
    make_corpus,
    rank_fused,
    rank_nearest,
    residual,
    score,
    with_interval,
)
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_bars
from titans.text.encoder import CachedEncoder, Progress, TextEncoder
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.ranking import Ranking
from titans.text.training import write_texts

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
TUNED_ARMS = ("hybrid, tuned", "hybrid in context", WITHOUT, WITH, "untrained memory")


@dataclass(frozen=True)
class TextExperiment:
    """How the experiment is run.

    Attributes:
        data: a file in LoCoMo's format.
        seeds: for each of them every conversation is left out once; a seed also says which of the others validates.
        theta, eta, alpha, depth: of the memory, which has no bias and is as wide as the encoder's vectors.
        epochs, learning_rate: of the memory's outer loop.
        plain_epochs, plain_rate: of the projection without memory.
        stretch: consecutive turns that are written to the memory, and among which the answer is sought.
        neighbours: turns of a stretch that ask for the turn after them, besides the questions.
        share: how much of the turn before is added to a turn, in training.
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
        """One seed and the start of three conversations: enough to see that it works."""
        return replace(self, seeds=self.seeds[:1], epochs=1, plain_epochs=1, sessions=3, conversations=3)

    def config(self, width: int, seed: int = 0) -> NeuralConfig:
        """The config of the memory that is measured."""
        return NeuralConfig(
            width=width, dim=width, depth=self.depth, bias=False, theta=self.theta, eta=self.eta, alpha=self.alpha,
            heads=1, seed=seed,
        )  # fmt: skip

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
        texts = add_previous(self.neural.project(corpus.texts), share)
        if not self.remembers:
            return rank_nearest(self.neural.project(corpus.questions), texts)
        memory = self.neural.empty()
        if written is not None:
            memory, _ = self.neural.write(memory, written)
        return rank_nearest(residual(self.neural, self.neural.current(memory), corpus.questions[None])[0], texts)

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


def train_ranker(
    corpora: Sequence[Corpus], config: NeuralConfig, experiment: TextExperiment, seed: int, remembers: bool
) -> Ranker:
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
        for corpus, start in _stretches(corpora, experiment.stretch, rng):
            written, asked, answers = _episode(corpus, start, experiment, rng)
            texts = add_previous(neural.project(written), experiment.share)
            if remembers:
                z = residual(neural, write_texts(neural, written[None])[0], asked[None])[0]
            else:
                z = neural.project(asked)
            loss = F.cross_entropy(z @ texts.mT / experiment.temperature, answers)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(neural.parameters(), 1.0)
            optimizer.step()
    return Ranker(neural.eval(), remembers)


def _stretches(corpora: Sequence[Corpus], length: int, rng: random.Random) -> list[tuple[Corpus, int]]:
    """Stretches that do not overlap, whose start differs from epoch to epoch, in random order."""
    made = []
    for corpus in corpora:
        turns = len(corpus.texts)
        first = rng.randrange(turns % length + 1) if turns > length else 0
        made += [(corpus, start) for start in range(first, max(1, turns - length + 1), length)]
    rng.shuffle(made)
    return made


def _episode(
    corpus: Corpus, start: int, experiment: TextExperiment, rng: random.Random
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns (n, width), what asks for them (m, width), and which of them each asks for (m,)."""
    written = corpus.texts[start : start + experiment.stretch]
    pairs = [
        (corpus.questions[index], position - start)
        for index, positions in enumerate(corpus.evidence)
        for position in positions
        if start <= position < start + len(written)
    ]
    after = rng.sample(range(1, len(written)), min(experiment.neighbours, len(written) - 1))
    pairs += [(written[position - 1], position) for position in after]
    return written, torch.stack([asked for asked, _ in pairs]), torch.tensor([position for _, position in pairs])


def score_untrained(corpora: Sequence[Corpus], experiment: TextExperiment) -> dict[str, list[Scores]]:
    """What no seed changes: how every choice does on every corpus, without a memory and with an untrained one."""
    ranker = Ranker(NeuralTextMemory(experiment.config(corpora[0].texts.shape[1])).eval(), True)
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
    config = experiment.config(test.texts.shape[1], seed)
    for arm, remembers in ((WITHOUT, False), (WITH, True)):
        ranker = train_ranker(train, config, experiment, seed, remembers)
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
            untrained = untrained or score_untrained(corpora, experiment)
            found = run_cell(corpora, left_out, seed, experiment, untrained)
            cell = {"name": file.stem, "settings": settings, **found}
            write_figures(cell, file.parent)
        cell["rows"][SHIPPED] = score(corpus, corpus.shipped).tolist()  # the defaults may change
        cells.append(cell)
        done += 1
    of_tests: dict[str, list[Row]] = {}
    given = text_tests.Given(conversations, corpora, cached, experiment.config(cached.width), experiment.seeds)
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
    test = {}
    for other in (WITHOUT, ANOTHER, ZEROED, "hybrid, tuned", "hybrid in context"):
        ours, theirs = (_by_conversation(cells, arm, 0) for arm in (WITH, other))
        differences = [float(a[0] - b[0]) for a, b in zip(ours.values(), theirs.values(), strict=True)]
        test[other] = estimate(differences) | {"differences": dict(zip(ours, differences, strict=True))}
    passed = all((test[other]["low"] or 0) > 0 for other in (WITHOUT, ANOTHER))
    validation = {arm: statistics.fmean(cell["chosen"][arm]["R@10"] for cell in cells) for arm in TUNED_ARMS}
    chosen = {arm: [cell["chosen"][arm] for cell in cells] for arm in TUNED_ARMS}
    return {
        "arms": arms, "test": test, "passed": passed, "validation": validation,
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
        f"{verdict}. Not fixed before: the memory's step, momentum and forgetting, how it is read, and the share of "
        "the turn before. They were found by trials on five conversations of LoCoMo, so the figures on those are "
        "somewhat too good."
    )
    lines = []
    for other, each in report["test"].items():
        apart = ", ".join(f"{value:+.3f}" for value in each["differences"].values())
        lines.append([f"{WITH} - {other}", with_interval(each, "+.3f"), apart])
    best = report["best_on_validation"]
    values = ", ".join(f"{arm} {value:.3f}" for arm, value in report["validation"].items())
    return Section(
        "Does the neural part help?",
        [about, f"On validation the best arm is «{best}» (R@10: {values})."],
        [Table(["difference in R@10", "mean", "in each conversation"], lines, "Paired, by conversation.")],
    )
