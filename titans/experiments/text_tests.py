"""Three tests where a text memory should win: a fact that changes, a store that is full, a topic that drifts."""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titans.experiments.conversations import Conversation
from titans.experiments.retrieval import (
    HYBRID,
    Corpus,
    Orders,
    Row,
    estimate,
    make_corpus,
    rank_fused,
    rank_nearest,
    with_interval,
)
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_lines
from titans.text.encoder import TextEncoder
from titans.text.facts import KINDS, NAMES
from titans.text.memory import Memory
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.ranking import Eviction, Ranking, order_by

PEOPLE, CHANGED, VERSIONS = 6, 24, 3  # of the test with changing facts: people, facts that change, values of each
WEIGHTS = (0.1, 0.25, 0.5, 1.0, 2.0)
POLICIES = {
    "surprise": Eviction("surprise"),
    "surprise alone": Eviction("surprise", recency=0.0, uses=0.0),
    "fifo": Eviction("fifo"),
    "random": Eviction("random"),
    "longest": Eviction("longest"),
}
TENTH = 10
BLOCK = 24  # turns of one conversation before the other goes on
LEARNED = 128  # turns that are to be forgotten
LATER = (0, 16, 64, 256)  # turns of another conversation after them


@dataclass(frozen=True)
class Given:
    """What the tests are run on."""

    conversations: Sequence[Conversation]
    corpora: Sequence[Corpus]  # of the conversations
    encoder: TextEncoder
    config: NeuralConfig  # of the memory that is measured, beside the one that ships
    seeds: Sequence[int]

    def memories(self) -> dict[str, NeuralTextMemory]:
        """The memory that ships and the one that is measured; neither is trained."""
        made = {"as shipped": NeuralTextMemory.default(self.encoder.width), "measured": NeuralTextMemory(self.config)}
        return {name: memory.eval() for name, memory in made.items()}


def shipped(width: int) -> Row:
    """What the tests of a store depend on and what may change from version to version."""
    return {
        "ranking": asdict(Ranking()), "evictions": {name: asdict(each) for name, each in POLICIES.items()},
        "memory": NeuralTextMemory.default(width).fingerprint,
    }  # fmt: skip


def changing_facts(given: Given) -> list[Row]:
    """How often the first hit is the latest of several facts that exclude each other, for each ranking.

    The weight of an order that joins the hybrid is chosen on other people and other values.
    """
    forgetful = replace(given.config, theta=0.1, alpha=0.02)  # forgets what is older
    joined: dict[str, tuple[str, Callable[[Corpus], Orders]]] = {
        "recency": ("recency", _newest_first),
        "memory": ("neural", _neural_order(NeuralTextMemory(given.config).eval(), False)),
        "answer of a memory that forgets": ("neural", _neural_order(NeuralTextMemory(forgetful).eval(), True)),
    }
    train = [_changing_corpus(given, seed, "train") for seed in given.seeds[:2]]
    test = [_changing_corpus(given, seed, "test") for seed in given.seeds]

    def measure(corpora: Sequence[Corpus], name: str, weight: float) -> list[float]:
        field, order = joined[name]
        ranking = Ranking(**asdict(HYBRID) | {field: weight})
        return [_latest_first(each, rank_fused(each, ranking, **{field: order(each)})) for each in corpora]

    rows: list[Row] = [
        {"ranking": "cosine", "weight": None, **estimate([_latest_first(each, each.cosine) for each in test])},
        {
            "ranking": "hybrid", "weight": None,
            **estimate([_latest_first(each, rank_fused(each, HYBRID)) for each in test]),
        },
    ]  # fmt: skip
    for name in joined:
        scores = {weight: statistics.fmean(measure(train, name, weight)) for weight in WEIGHTS}
        best = max(scores, key=scores.__getitem__)
        rows.append({"ranking": f"hybrid + {name}", "weight": best, **estimate(measure(test, name, best))})
    return rows


def _changing_corpus(given: Given, seed: int, part: str) -> Corpus:
    """Facts about some people in any order; the evidence of a question is all versions of its fact, the latest last."""
    rng = random.Random(f"{seed} {part}")
    people = rng.sample(NAMES[part], PEOPLE)
    pairs = [(kind, name) for kind in KINDS for name in people]
    rng.shuffle(pairs)
    stated = []
    for number, (kind, name) in enumerate(pairs):
        for value in rng.sample(kind.values(part), VERSIONS if number < CHANGED else 1):
            stated.append((number, rng.choice([kind.statement, kind.paraphrase]).format(n=name, v=value)))
    rng.shuffle(stated)
    questions = []
    for number, (kind, name) in enumerate(pairs[:CHANGED]):
        positions = [position for position, (of, _) in enumerate(stated) if of == number]
        questions.append((rng.choice(kind.questions).format(n=name), positions, 0))
    return make_corpus(f"facts-{part}-{seed}", [text for _, text in stated], questions, given.encoder)


def _newest_first(corpus: Corpus) -> Orders:
    """The candidates of words and meaning, the newest first."""
    return [order_by([*{*a, *b}], float) for a, b in zip(corpus.bm25, corpus.cosine, strict=True)]


def _neural_order(neural: NeuralTextMemory, answers: bool) -> Callable[[Corpus], Orders]:
    """The texts nearest to what the memory answers to a question, or to what it leaves of it."""

    @torch.no_grad()
    def order(corpus: Corpus) -> Orders:
        state = neural.current(neural.write(neural.empty(), corpus.texts)[0])
        if answers:
            z = F.normalize(neural.answer(state, neural.project(corpus.questions)[None]), dim=-1)[0]
        else:
            z = neural.unexpected([state], corpus.questions)
        return rank_nearest(z, neural.project(corpus.texts))

    return order


def _latest_first(corpus: Corpus, orders: Orders) -> float:
    """The share of questions whose first hit is the last of their evidence."""
    return statistics.fmean(order[0] == each[-1] for order, each in zip(orders, corpus.evidence, strict=True))


def full_store(given: Given) -> list[Row]:
    """How much evidence a store for a tenth of the turns keeps and finds, for each policy and conversation.

    The turns come session by session, as they would to a store in use.
    """
    rows = []
    for name, eviction in POLICIES.items():
        seeds = given.seeds if name == "random" else given.seeds[:1]
        for conversation in given.conversations:
            found = [_keep(conversation, given.encoder, replace(eviction, seed=seed)) for seed in seeds]
            kept, recall = (statistics.fmean(each) for each in zip(*found, strict=True))
            rows.append({"policy": name, "conversation": conversation.name, "kept": kept, "R@10": recall})
    return rows


def _keep(conversation: Conversation, encoder: TextEncoder, eviction: Eviction) -> tuple[float, float]:
    """The share of the evidence that is kept, and R@10 over all of it."""
    limit = max(1, len(conversation.turns) // TENTH)
    positions: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Memory(folder, encoder=encoder, limit=limit, eviction=eviction) as memory,
    ):
        for session in sorted({turn.session for turn in conversation.turns}):
            turns = [(position, turn) for position, turn in enumerate(conversation.turns) if turn.session == session]
            records = memory.add_many([turn.text for _, turn in turns])
            positions |= {record.id: position for record, (position, _) in zip(records, turns, strict=True)}
        left = {positions[record.id] for record in memory.records(limit=limit + len(positions))}
        kept = [len(left.intersection(each.evidence)) / len(each.evidence) for each in conversation.questions]
        hits = [memory.search(each.text, limit=10) for each in conversation.questions]
    found = [
        len({positions[hit.record.id] for hit in each}.intersection(question.evidence)) / len(question.evidence)
        for each, question in zip(hits, conversation.questions, strict=True)
    ]
    return statistics.fmean(kept), statistics.fmean(found)


def topic_drift(given: Given) -> list[Row]:
    """How well surprise tells the first turn after a change of session or of conversation from the others.

    The area under the ROC curve: 0.5 is chance. Beside it stand two measures that need no memory: 1 - the cosine with
    the turn before, and with the nearest of all turns before.
    """
    rows = []
    for index, (conversation, corpus) in enumerate(zip(given.conversations, given.corpora, strict=True)):
        sessions = [turn.session for turn in conversation.turns]
        other = given.corpora[(index + 1) % len(given.corpora)].texts
        mixed, starts = _alternate(corpus.texts, other)
        for change, turns, first in (
            ("session", corpus.texts, [a != b for a, b in itertools.pairwise(sessions)]),
            ("conversation", mixed, starts[1:]),
        ):
            if not any(first):
                continue
            for name, values in _novelties(given, turns).items():
                area = _area(values[1:], first)
                rows.append({"change": change, "measure": name, "conversation": conversation.name, "area": area})
    return rows


def _novelties(given: Given, turns: Tensor) -> dict[str, np.ndarray]:
    found = {
        f"surprise, {name}": memory.write(memory.empty(), turns)[1].numpy() for name, memory in given.memories().items()
    }
    cosines = (turns @ turns.mT).numpy()
    found["1 - cosine with the turn before"] = np.array([1.0, *(1 - np.diagonal(cosines, -1))])
    found["1 - cosine with the nearest before"] = np.array(
        [1.0, *(1 - cosines[row, :row].max() for row in range(1, len(turns)))]
    )
    return found


def _alternate(one: Tensor, other: Tensor) -> tuple[Tensor, list[bool]]:
    """Two conversations in turn, a block of each at a time, and which turns are the first of a block."""
    blocks = [
        block
        for pair in zip(one.split(BLOCK), other.split(BLOCK), strict=False)
        for block in pair
        if len(block) == BLOCK
    ] or [one, other]
    return torch.cat(blocks), [row == 0 for block in blocks for row in range(len(block))]


def _area(values: Sequence[float] | np.ndarray, positive: Sequence[bool]) -> float:
    """The probability that a positive has a higher value than a negative; equal values count as half."""
    data, marked = np.asarray(values, dtype=np.float64), np.asarray(positive, dtype=bool)
    above = data[marked][:, None] - data[~marked][None, :]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


@torch.no_grad()
def forgetting(given: Given) -> list[Row]:
    """How much of a conversation is still known after turns of another: 1 - its loss / that of one never seen."""
    rows = []
    for name, memory in given.memories().items():
        for index, corpus in enumerate(given.corpora):
            learned = corpus.texts[-LEARNED:]
            other, unseen = (given.corpora[(index + step) % len(given.corpora)].texts for step in (1, 2))
            after, done = memory.write(memory.empty(), learned)[0], 0
            for later in LATER:
                after, done = memory.write(after, other[done:later])[0], min(later, len(other))
                known, new = (_loss(memory, after, each) for each in (learned, unseen[:LEARNED]))
                rows.append({"memory": name, "conversation": corpus.name, "later": later, "known": 1 - known / new})
    return rows


def _loss(neural: NeuralTextMemory, memory: Any, vectors: Tensor) -> float:
    """The mean of ||M(k) - v||^2 over texts, none of which is written."""
    state = neural.current(memory)
    k, v, _ = neural.associate(vectors[None], vectors[None, :0])
    answers = neural.network(state.weights, k.unsqueeze(1)).squeeze(1)
    return float((answers - v).square().sum(-1).mean())


TESTS: dict[str, Callable[[Given], list[Row]]] = {
    "facts": changing_facts, "store": full_store, "drift": topic_drift, "forgetting": forgetting,
}  # fmt: skip


def _mean_of(rows: Sequence[Row], field: str, **where: Any) -> str:
    values = [row[field] for row in rows if all(row[key] == value for key, value in where.items())]
    return with_interval(estimate(values)) if values else "-"


def _names(rows: Sequence[Row], field: str) -> list[Any]:
    return list(dict.fromkeys(row[field] for row in rows))


def sections(report: Row) -> list[Section]:
    """The parts of the page."""
    return [_facts_section(report["facts"]), _store_section(report["store"]), _drift_section(report["drift"]),
            _forgetting_section(report["forgetting"])]  # fmt: skip


def _facts_section(rows: Sequence[Row]) -> Section:
    about = (
        f"Facts about {PEOPLE} people at a time. {CHANGED} of them change: they are stated {VERSIONS} times, each time "
        "with another value. Shown is the share of questions whose first hit is the latest version; picking one of the "
        f"versions by chance gives {1 / VERSIONS:.2f}. Weights are chosen on other people and values."
    )
    lines = [
        [row["ranking"], "-" if row["weight"] is None else f"{row['weight']:g}", with_interval(row)] for row in rows
    ]
    table = Table(["ranking", "weight", "latest first"], lines, "In brackets the 95% interval over seeds.")
    return Section("A fact that changes", [about], [table])


def _store_section(rows: Sequence[Row]) -> Section:
    about = (
        "A store that may hold a tenth of the turns of a conversation, which come session by session. Shown is the "
        "share of the evidence that it still has at the end, and R@10 of a search in it."
    )
    lines = [
        [policy, _mean_of(rows, "kept", policy=policy), _mean_of(rows, "R@10", policy=policy)]
        for policy in _names(rows, "policy")
    ]
    table = Table(["policy", "evidence kept", "R@10"], lines, "In brackets the 95% interval over conversations.")
    return Section("A store that is full", [about], [table])


def _drift_section(rows: Sequence[Row]) -> Section:
    about = (
        "Is the first turn after a change more surprising than the others? The area under the ROC curve, where 0.5 is "
        f"chance: for the first turn of a session, and for a switch between two conversations every {BLOCK} turns."
    )
    changes = _names(rows, "change")
    lines = [
        [measure, *(_mean_of(rows, "area", measure=measure, change=change) for change in changes)]
        for measure in _names(rows, "measure")
    ]
    table = Table(["measure", *(f"another {change}" for change in changes)], lines, "95% intervals over conversations.")
    return Section("A topic that drifts", [about], [table])


def _forgetting_section(rows: Sequence[Row]) -> Section:
    about = (
        f"What is left of {LEARNED} turns after turns of another conversation: 1 - their loss / the loss of turns that "
        "the memory never saw; 0 is nothing."
    )
    lines, curves = [], []
    for style, memory in enumerate(_names(rows, "memory")):
        lines.append([memory, *(_mean_of(rows, "known", memory=memory, later=later) for later in LATER)])
        values = [
            statistics.fmean(row["known"] for row in rows if (row["memory"], row["later"]) == (memory, later))
            for later in LATER
        ]
        curves.append(Curve(memory, values, style=style))
    table = Table(["memory", *(f"after {later}" for later in LATER)], lines, "95% intervals over conversations.")
    png = plot_lines([max(1, each) for each in LATER], curves, "What is left of a conversation", "turns of another "
                     "conversation after it", "share that is known")  # fmt: skip
    figure = Figure("text-memory-forgetting", png, "Share of a conversation that is left", "1 stands for none.")
    return Section("What is forgotten", [about], [table], [figure])
