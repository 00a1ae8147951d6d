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

from titans.experiments.locomo import Conversation
from titans.experiments.talks import HYBRID, MEANING, Orders, Talk, listen, name_nearest
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_lines
from titans.report.statistics import bootstrap
from titans.text.encoder import TextEncoder
from titans.text.facts import KINDS, NAMES
from titans.text.memory import Memory
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.ranking import Eviction, Ranking, fuse, order_by
from titans.text.voice import unexpected

Row = dict[str, Any]
Voice = Callable[[Talk, Orders], Orders]  # from the candidates of the others to an order

PEOPLE, CHANGED, VERSIONS = 6, 24, 3  # of a test with changing facts: people, facts that change, values of each
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
    """What the tests are done with."""

    conversations: Sequence[Conversation]
    talks: Sequence[Talk]
    encoder: TextEncoder
    config: NeuralConfig  # of the memory that is measured, beside the one that ships
    seeds: Sequence[int]

    def memories(self) -> dict[str, NeuralTextMemory]:
        """The memory that ships, and the one that is measured; neither is trained."""
        made = {"as shipped": NeuralTextMemory.default(self.encoder.width), "measured": NeuralTextMemory(self.config)}
        return {name: memory.eval() for name, memory in made.items()}


def shipped(width: int) -> Row:
    """What the tests of a store depend on that may change from version to version."""
    return {
        "ranking": asdict(Ranking()), "evictions": {name: asdict(each) for name, each in POLICIES.items()},
        "memory": NeuralTextMemory.default(width).fingerprint,
    }  # fmt: skip


def changing_facts(given: Given) -> list[Row]:
    """How often the first hit is the latest of several facts that exclude each other, for each ranking and seed.

    The weight of a voice that joins the hybrid is chosen on other people and other values.
    """
    quick = replace(given.config, theta=0.1, alpha=0.02)  # one that forgets what is older
    voices: dict[str, Voice] = {
        "recency": lambda talk, candidates: [order_by(each, float) for each in candidates],
        "memory": _spoken(NeuralTextMemory(given.config).eval(), False),
        "answer of a memory that forgets": _spoken(NeuralTextMemory(quick).eval(), True),
    }
    train = [_tell_facts(given, seed, "train") for seed in given.seeds[:2]]
    test = [_tell_facts(given, seed, "test") for seed in given.seeds]
    rows = [_fact_row("cosine", None, [_latest(talk, MEANING) for talk in test])]
    rows.append(_fact_row("hybrid", None, [_latest(talk, HYBRID) for talk in test]))
    for name, voice in voices.items():
        heard = "recency" if name == "recency" else "neural"
        rankings = {weight: _join(heard, weight) for weight in WEIGHTS}
        scores = {
            weight: statistics.fmean(_latest(talk, ranking, heard, voice) for talk in train)
            for weight, ranking in rankings.items()
        }
        best = max(scores, key=scores.__getitem__)
        rows.append(_fact_row(f"hybrid + {name}", best, [_latest(each, rankings[best], heard, voice) for each in test]))
    return rows


def _join(voice: str, weight: float) -> Ranking:
    return replace(HYBRID, recency=weight) if voice == "recency" else replace(HYBRID, neural=weight)


def _fact_row(name: str, weight: float | None, values: list[float]) -> Row:
    low, high = bootstrap(values)
    return {"ranking": name, "weight": weight, "value": statistics.fmean(values), "low": low, "high": high}


def _tell_facts(given: Given, seed: int, part: str) -> Talk:
    """Facts about some people in any order; the evidence of a question is all versions of its fact, the latest last."""
    rng = random.Random(f"{seed} {part}")
    people = rng.sample(NAMES[part].split(", "), PEOPLE)
    pairs = [(kind, name) for kind in KINDS for name in people]
    rng.shuffle(pairs)
    said = []
    for number, (kind, name) in enumerate(pairs):
        values = (kind.train if part == "train" else kind.test).split(", ")
        for value in rng.sample(values, VERSIONS if number < CHANGED else 1):
            said.append((number, rng.choice([kind.statement, kind.paraphrase]).format(n=name, v=value)))
    rng.shuffle(said)
    questions = []
    for number, (kind, name) in enumerate(pairs[:CHANGED]):
        places = [place for place, (of, _) in enumerate(said) if of == number]
        questions.append((rng.choice(kind.questions).format(n=name), places, 0))
    return listen(f"facts-{part}-{seed}", [text for _, text in said], questions, given.encoder)


def _spoken(neural: NeuralTextMemory, answers: bool) -> Voice:
    """The neural voice of a talk: what the memory does not expect of a question, or what it answers to it."""

    @torch.no_grad()
    def voice(talk: Talk, candidates: Orders) -> Orders:
        memory, _ = neural.write(neural.empty(), talk.turns)
        state = neural.current(memory)
        if answers:
            z = F.normalize(neural.answer(state, neural.project(talk.asked)[None]), dim=-1)[0]
        else:
            z = unexpected(neural, state, talk.asked[None])[0]
        return name_nearest(z, neural.project(talk.turns))

    return voice


def _latest(
    talk: Talk,
    ranking: Ranking,
    heard: str | None = None,
    voice: Voice | None = None,
) -> float:
    """The share of questions whose first hit is the last of their evidence."""
    hits = 0
    candidates = [sorted({*a, *b}) for a, b in zip(talk.words, talk.meaning, strict=True)]
    third = voice(talk, candidates) if voice is not None else None
    for index, evidence in enumerate(talk.evidence):
        voices = {"bm25": talk.words[index], "cosine": talk.meaning[index]}
        if heard is not None and third is not None:
            voices[heard] = third[index]
        order = fuse({name: places for name, places in voices.items() if getattr(ranking, name)}, ranking)
        hits += order[0][0] == evidence[-1]
    return hits / len(talk.evidence)


def full_store(given: Given) -> list[Row]:
    """What a store limited to a tenth of the turns keeps of the evidence, and finds, for each policy and conversation.

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
    places: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Memory(folder, encoder=encoder, limit=limit, eviction=eviction) as memory,
    ):
        for session in sorted({turn.session for turn in conversation.turns}):
            turns = [(place, turn) for place, turn in enumerate(conversation.turns) if turn.session == session]
            records = memory.add_many([turn.text for _, turn in turns])
            places |= {record.id: place for record, (place, _) in zip(records, turns, strict=True)}
        left = {places[record.id] for record in memory.records(limit=limit + len(places))}
        kept = [len(left.intersection(each.evidence)) / len(each.evidence) for each in conversation.questions]
        hits = [memory.search(each.text, limit=10) for each in conversation.questions]
    found = [
        len({places[hit.record.id] for hit in each}.intersection(question.evidence)) / len(question.evidence)
        for each, question in zip(hits, conversation.questions, strict=True)
    ]
    return statistics.fmean(kept), statistics.fmean(found)


def topic_drift(given: Given) -> list[Row]:
    """How well surprise tells the first turn after a change, of session or of conversation, from the turns within.

    The area under the curve: 0.5 is chance. Beside it, what no memory is needed for: 1 - the cosine with the turn
    before, and with the nearest of all turns before.
    """
    rows = []
    for index, (conversation, talk) in enumerate(zip(given.conversations, given.talks, strict=True)):
        sessions = [turn.session for turn in conversation.turns]
        other = given.talks[(index + 1) % len(given.talks)].turns
        mixed, starts = _alternate(talk.turns, other)
        for change, turns, first in (
            ("session", talk.turns, [a != b for a, b in itertools.pairwise(sessions)]),
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
        [1.0, *(1 - cosines[place, :place].max() for place in range(1, len(turns)))]
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
    return torch.cat(blocks), [place == 0 for block in blocks for place in range(len(block))]


def _area(values: Sequence[float] | np.ndarray, positive: Sequence[bool]) -> float:
    """The probability that a positive has the higher value of the two, and half of it if they are equal."""
    data, marked = np.asarray(values, dtype=np.float64), np.asarray(positive, dtype=bool)
    above = data[marked][:, None] - data[~marked][None, :]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


@torch.no_grad()
def forgetting(given: Given) -> list[Row]:
    """How much of a conversation is still known after turns of another: 1 - its loss / that of one never heard."""
    rows = []
    for name, memory in given.memories().items():
        for index, talk in enumerate(given.talks):
            learned = talk.turns[-LEARNED:]
            other, unheard = (given.talks[(index + step) % len(given.talks)].turns for step in (1, 2))
            after, done = memory.write(memory.empty(), learned)[0], 0
            for later in LATER:
                after, done = memory.write(after, other[done:later])[0], min(later, len(other))
                known, new = (_loss(memory, after, each) for each in (learned, unheard[:LEARNED]))
                rows.append({"memory": name, "conversation": talk.name, "later": later, "known": 1 - known / new})
    return rows


def _loss(neural: NeuralTextMemory, memory: Any, vectors: Tensor) -> float:
    """The mean of ||M(k) - v||^2 over texts, none of which is written."""
    state = neural.current(memory)
    k, v, _ = neural.associate(state, vectors[None], vectors[None, :0])
    told = neural.network(state.weights, k.unsqueeze(1)).squeeze(1)
    return float((told - v).square().sum(-1).mean())


TESTS: dict[str, Callable[[Given], list[Row]]] = {
    "facts": changing_facts, "store": full_store, "drift": topic_drift, "forgetting": forgetting,
}  # fmt: skip


def with_interval(estimate: Row, form: str = ".3f") -> str:
    """A value and its interval, for a table."""
    value = format(estimate["value"], form)
    return (
        value
        if estimate["low"] is None
        else f"{value} ({format(estimate['low'], form)} to {format(estimate['high'], form)})"
    )


def _mean_of(rows: Sequence[Row], field: str, **where: Any) -> str:
    values = [row[field] for row in rows if all(row[key] == value for key, value in where.items())]
    if not values:
        return "-"
    low, high = bootstrap(values)
    return with_interval({"value": statistics.fmean(values), "low": low, "high": high})


def _names(rows: Sequence[Row], field: str) -> list[Any]:
    return list(dict.fromkeys(row[field] for row in rows))


def sections(report: Row) -> list[Section]:
    """The parts of the page."""
    return [_facts_section(report["facts"]), _store_section(report["store"]), _drift_section(report["drift"]),
            _forgetting_section(report["forgetting"])]  # fmt: skip


def _facts_section(rows: Sequence[Row]) -> Section:
    words = (
        f"Facts about {PEOPLE} people at a time, of which {CHANGED} change and are said {VERSIONS} times, each time "
    )
    words += (
        "with another value. Shown is the share of questions whose first hit is the latest; one of the versions by "
    )
    words += f"chance would be {1 / VERSIONS:.2f}. Weights are chosen on other people and values."
    lines = [
        [row["ranking"], "-" if row["weight"] is None else f"{row['weight']:g}", with_interval(row)] for row in rows
    ]
    table = Table(["ranking", "weight", "latest first"], lines, "In brackets the 95% interval over seeds.")
    return Section("A fact that changes", [words], [table])


def _store_section(rows: Sequence[Row]) -> Section:
    words = "A store that may hold a tenth of the turns of a conversation, which come session by session. Shown is the "
    words += "share of the evidence that it still has at the end, and R@10 of a search in it."
    lines = [
        [policy, _mean_of(rows, "kept", policy=policy), _mean_of(rows, "R@10", policy=policy)]
        for policy in _names(rows, "policy")
    ]
    table = Table(["policy", "evidence kept", "R@10"], lines, "In brackets the 95% interval over conversations.")
    return Section("A store that is full", [words], [table])


def _drift_section(rows: Sequence[Row]) -> Section:
    words = "Is the first turn after a change more surprising than the turns within? The area under the curve, 0.5 is "
    words += f"chance: for the first turn of a session, and for a switch between two conversations every {BLOCK} turns."
    changes = _names(rows, "change")
    lines = [
        [measure, *(_mean_of(rows, "area", measure=measure, change=change) for change in changes)]
        for measure in _names(rows, "measure")
    ]
    table = Table(["measure", *(f"another {change}" for change in changes)], lines, "95% intervals over conversations.")
    return Section("A topic that drifts", [words], [table])


def _forgetting_section(rows: Sequence[Row]) -> Section:
    words = f"What is left of {LEARNED} turns after turns of another conversation: 1 - their loss / the loss of turns "
    words += "that were never heard; 0 is nothing."
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
    return Section("What is forgotten", [words], [table], [figure])
