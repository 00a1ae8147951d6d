"""Tests of a text memory in use: a fact that changes, a store that is full, a topic that drifts, what is forgotten."""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titans.experiments.conversations import Conversation
from titans.experiments.retrieval import HYBRID, MEANING, Corpus, Row, estimate, with_interval
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_lines
from titans.text.encoder import TextEncoder
from titans.text.facts import KINDS, NAMES
from titans.text.memory import NEAREST, Memory
from titans.text.neural import NeuralTextMemory
from titans.text.ranking import Eviction, Ranking
from titans.text.records import Record
from titans.text.surprise import LAST, Surprise, assess
from titans.text.versions import ALIKE, OVERLAP

PEOPLE, CHANGED, VERSIONS = 6, 24, 3  # of the test with changing facts: people, facts that change, values of each
WEIGHTS = (0.1, 0.25, 0.5, 1.0, 2.0)
SHIPPED, WITHOUT_VERSIONS = "as shipped", "as shipped, without versions"
POLICIES = {
    "informative": Eviction(),
    "informative, without surprise": Eviction(surprise=0.0),
    "surprise alone": Eviction(details=0.0),
    "longest": Eviction("longest"),
    "random": Eviction("random"),
    "fifo": Eviction("fifo"),
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
    seeds: Sequence[int]


def shipped(width: int) -> Row:
    """What the tests of a store depend on and what may change from version to version."""
    return {
        "ranking": asdict(Ranking()), "evictions": {name: asdict(each) for name, each in POLICIES.items()},
        "memory": NeuralTextMemory.default(width).fingerprint, "versions": [ALIKE, OVERLAP],
    }  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """Statements about some people in any order, and questions, each with the places of all versions of its answer."""

    texts: Sequence[str]
    questions: Sequence[str]
    versions: Sequence[Sequence[int]]  # the latest last


def changing_facts(given: Given) -> list[Row]:
    """How often the first hit is the latest of several facts that exclude each other, for each ranking.

    Beside it, how often it is any of them. How much recency counts is chosen on other people and other values.
    """
    recent = {weight: replace(HYBRID, recency=weight) for weight in WEIGHTS}
    train = _measure([make_facts(seed, "train") for seed in given.seeds[:2]], given.encoder, [*recent.values()])
    weight = max(zip(train.mean(1)[:, 0], recent, strict=True))[1]
    unlinked = {
        "cosine": MEANING, "hybrid": HYBRID, f"hybrid + recency, weight {weight:g}": recent[weight],
        WITHOUT_VERSIONS: Ranking(),
    }  # fmt: skip
    facts = [make_facts(seed, "test") for seed in given.seeds]
    found = dict(zip(unlinked, _measure(facts, given.encoder, [*unlinked.values()]), strict=True))
    found[SHIPPED] = _measure(facts, given.encoder, [Ranking()], linked=True)[0]
    return [
        {"ranking": name, "latest": estimate(values[:, 0].tolist()), "any": estimate(values[:, 1].tolist())}
        for name, values in found.items()
    ]


def _measure(
    facts: Sequence[Facts], encoder: TextEncoder, rankings: Sequence[Ranking], linked: bool = False
) -> np.ndarray:
    """(rankings, facts, 2): the shares of questions whose first hit is the latest version, and any version."""
    return np.array([_first_hits(each, encoder, rankings, linked) for each in facts]).swapaxes(0, 1)


def make_facts(seed: int, part: str) -> Facts:
    """Facts about some people in any order, some of them told several times with another value each time."""
    rng = random.Random(f"{seed} {part}")
    people = rng.sample(NAMES[part], PEOPLE)
    pairs = [(kind, name) for kind in KINDS for name in people]
    rng.shuffle(pairs)
    stated = []
    for number, (kind, name) in enumerate(pairs):
        for value in rng.sample(kind.values(part), VERSIONS if number < CHANGED else 1):
            stated.append((number, rng.choice([kind.statement, kind.paraphrase]).format(n=name, v=value)))
    rng.shuffle(stated)
    questions = [rng.choice(kind.questions).format(n=name) for kind, name in pairs[:CHANGED]]
    versions = [[place for place, (of, _) in enumerate(stated) if of == number] for number in range(CHANGED)]
    return Facts([text for _, text in stated], questions, versions)


def _first_hits(
    facts: Facts, encoder: TextEncoder, rankings: Sequence[Ranking], linked: bool
) -> list[tuple[float, float]]:
    """For each ranking, the shares of questions whose first hit is the latest version, and any version."""
    # What different speakers say is never a version of the same statement.
    roles = None if linked else [f"speaker {index}" for index in range(len(facts.texts))]
    shares = []
    with _open(encoder) as memory:
        places = {record.id: place for place, record in enumerate(memory.add_many(facts.texts, role=roles))}
        for ranking in rankings:
            memory.ranking = ranking
            hits = [places[memory.search(asked).hits[0].record.id] for asked in facts.questions]
            right = [(hit == each[-1], hit in each) for hit, each in zip(hits, facts.versions, strict=True)]
            latest, version = (statistics.fmean(each) for each in zip(*right, strict=True))
            shares.append((latest, version))
    return shares


@contextmanager
def _open(encoder: TextEncoder, **options: Any) -> Iterator[Memory]:
    """A store that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, Memory(folder, encoder=encoder, **options) as memory:
        yield memory


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
    with _open(encoder, limit=limit, eviction=eviction) as memory:
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
    """How well each part of surprise tells the first turn after a change of session or of conversation from the others.

    The area under the ROC curve: 0.5 is chance.
    """
    rows = []
    for index, (conversation, corpus) in enumerate(zip(given.conversations, given.corpora, strict=True)):
        sessions = [turn.session for turn in conversation.turns]
        other = (index + 1) % len(given.corpora)
        order, starts = _alternate(len(corpus.texts), len(given.corpora[other].texts))
        turns = [turn.text for turn in (*conversation.turns, *given.conversations[other].turns)]
        vectors = torch.cat([corpus.texts, given.corpora[other].texts])
        for change, here, first in (
            ("session", [*range(len(sessions))], [False, *(a != b for a, b in itertools.pairwise(sessions))]),
            ("conversation", order, starts),
        ):
            if not any(first[1:]):
                continue
            found = surprises([turns[place] for place in here], vectors[here])[1:]  # the first turn follows nothing
            for part in ("drift", "novelty", "loss"):
                area = area_under_curve([getattr(each, part) for each in found], first[1:])
                rows.append({"change": change, "part": part, "conversation": conversation.name, "area": area})
    return rows


def surprises(texts: Sequence[str], vectors: Tensor) -> list[Surprise]:
    """What a scope finds surprising about each of its texts, given those before it."""
    memory = NeuralTextMemory.default(vectors.shape[1])
    losses = memory.write(memory.empty(), vectors)[1].tolist()
    records = [Record(str(place), text) for place, text in enumerate(texts)]
    matrix = vectors.numpy()
    made = []
    for place, (text, vector, loss) in enumerate(zip(texts, matrix, losses, strict=True)):
        cosines = matrix[:place] @ vector
        nearest = [(records[row], float(cosines[row])) for row in np.argsort(-cosines)[:NEAREST]]
        made.append(assess(text, vector, loss, matrix[max(0, place - LAST) : place], nearest))
    return made


def _alternate(one: int, other: int) -> tuple[list[int], list[bool]]:
    """Two conversations of so many turns in turn, a block of each at a time; and which turns are the first of a block.

    The turns of the other are numbered after those of the one.
    """
    blocks = [
        [first + row for row in range(start, start + BLOCK)]
        for start in range(0, min(one, other) - BLOCK + 1, BLOCK)
        for first in (0, one)
    ] or [[*range(one)], [*range(one, one + other)]]
    return [row for block in blocks for row in block], [row == block[0] for block in blocks for row in block]


def area_under_curve(values: Sequence[float] | np.ndarray, positive: Sequence[bool]) -> float:
    """The probability that a positive has a higher value than a negative; equal values count as half."""
    data, marked = np.asarray(values, dtype=np.float64), np.asarray(positive, dtype=bool)
    above = data[marked][:, None] - data[~marked][None, :]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


@torch.no_grad()
def forgetting(given: Given) -> list[Row]:
    """How much of a conversation is still known after turns of another: 1 - its loss / that of one never seen."""
    rows = []
    memory = NeuralTextMemory.default(given.encoder.width)
    for index, corpus in enumerate(given.corpora):
        learned = corpus.texts[-LEARNED:]
        other, unseen = (given.corpora[(index + step) % len(given.corpora)].texts for step in (1, 2))
        after, done = memory.write(memory.empty(), learned)[0], 0
        for later in LATER:
            after, done = memory.write(after, other[done:later])[0], min(later, len(other))
            known, new = (_loss(memory, after, each) for each in (learned, unseen[:LEARNED]))
            rows.append({"conversation": corpus.name, "later": later, "known": 1 - known / new})
    return rows


def _loss(neural: NeuralTextMemory, memory: Any, vectors: Tensor) -> float:
    """The mean of ||M(k) - v||^2 over texts, none of which is written."""
    state = neural.current(memory)
    k, v = neural.associate(neural.project(vectors[None]))
    answers = neural.network(state.weights, k.unsqueeze(1)).squeeze(1)
    return float((answers - v).square().sum(-1).mean())


TESTS: dict[str, Callable[[Given], list[Row]]] = {
    "facts": changing_facts, "store": full_store, "drift": topic_drift, "forgetting": forgetting,
}  # fmt: skip


def _mean_of(rows: Sequence[Row], field: str, **where: Any) -> str:
    values = [row[field] for row in rows if field in row and all(row[key] == value for key, value in where.items())]
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
        "with another value, in one of two wordings. Shown is the share of questions whose first hit is the latest "
        "version, and of those whose first hit is any version: what a ranking does not find, no version can mend."
    )
    lines = [[row["ranking"], with_interval(row["latest"]), with_interval(row["any"])] for row in rows]
    table = Table(["ranking", "latest first", "any version first"], lines, "In brackets the 95% interval over seeds.")
    return Section("A fact that changes", [about], [table])


def _store_section(rows: Sequence[Row]) -> Section:
    about = (
        "A store that may hold a tenth of the turns of a conversation, which come session by session. Shown is the "
        "share of the evidence that it still has at the end, how much more that is than with the longest turns, "
        "conversation by conversation, and R@10 of a search in it."
    )
    longest = {row["conversation"]: row["kept"] for row in rows if row["policy"] == "longest"}
    more = [
        row | ({"more": row["kept"] - longest[row["conversation"]]} if row["policy"] != "longest" else {})
        for row in rows
    ]
    lines = [
        [policy, *(_mean_of(more, field, policy=policy) for field in ("kept", "more", "R@10"))]
        for policy in _names(rows, "policy")
    ]
    header = ["policy", "evidence kept", "more than the longest", "R@10"]
    table = Table(header, lines, "In brackets the 95% interval over conversations.")
    return Section("A store that is full", [about], [table])


def _drift_section(rows: Sequence[Row]) -> Section:
    about = (
        "Is the first turn after a change more surprising than the others? The area under the ROC curve, where 0.5 is "
        f"chance: for the first turn of a session, and for a switch between two conversations every {BLOCK} turns."
    )
    changes = _names(rows, "change")
    lines = [
        [part, *(_mean_of(rows, "area", part=part, change=change) for change in changes)]
        for part in _names(rows, "part")
    ]
    header = ["part of surprise", *(f"another {change}" for change in changes)]
    table = Table(header, lines, "In brackets the 95% interval over conversations.")
    return Section("A topic that drifts", [about], [table])


def _forgetting_section(rows: Sequence[Row]) -> Section:
    about = (
        f"What is left of {LEARNED} turns after turns of another conversation: 1 - their loss / the loss of turns that "
        "the memory never saw; 0 is nothing."
    )
    line = ["known", *(_mean_of(rows, "known", later=later) for later in LATER)]
    values = [statistics.fmean(row["known"] for row in rows if row["later"] == later) for later in LATER]
    table = Table(["", *(f"after {later}" for later in LATER)], [line], "95% intervals over conversations.")
    png = plot_lines([max(1, each) for each in LATER], [Curve("known", values)], "What is left of a conversation",
                     "turns of another conversation after it", "share that is known")  # fmt: skip
    figure = Figure("text-memory-forgetting", png, "Share of a conversation that is left", "1 stands for none.")
    return Section("What is forgotten", [about], [table], [figure])
