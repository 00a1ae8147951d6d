"""How much of the marked evidence a text memory finds in LoCoMo, LongMemEval and BEAM, and what it costs."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import titans
from titans.experiments.conversations import Conversation, read_conversations
from titans.experiments.retrieval import HYBRID, MEANING, WORDS, Row, estimate, with_interval
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_bars
from titans.report.progress import Progress, silent
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.neural import NeuralTextMemory
from titans.text.ranking import Ranking
from titans.words import require_whole

NAME = "memory-benchmarks"
METRICS = ("R@5", "R@10", "hit@10", "MRR")
LEVELS = ("turns", "sessions")
ARMS = {"BM25": WORDS, "cosine": MEANING, "hybrid": HYBRID, "as shipped": None}  # None: a search without any option
FOUND, READ = HYBRID.pool, 10  # hits of a search, and those of them that an LLM would read
LETTERS = 4  # of a token, about


@dataclass(frozen=True)
class MemoryBenchmarks:
    """How the experiment is run.

    Attributes:
        data: files of LoCoMo or LongMemEval, or folders of BEAM.
        limit: how many questions of each are asked, evenly spread over it; None: all.
        per_session: each session is a scope of its own, not each conversation.
        sessions: of each conversation, those that answer a question and the first ones up to this number; None: all.
    """

    data: tuple[str, ...]
    limit: int | None = None
    per_session: bool = False
    sessions: int | None = None

    def __post_init__(self) -> None:
        if not self.data or len(set(self.data)) < len(self.data):
            raise ValueError(f"data is {self.data}; expected at least one file or folder, each once")
        if self.limit is not None:
            require_whole(limit=self.limit)

    def quick(self) -> MemoryBenchmarks:
        """A few questions about a few sessions: enough to see that it works."""
        return replace(self, limit=min(self.limit or 4, 4), sessions=4)

    def choose(self, path: str, total: int) -> Iterator[Conversation]:
        """The conversations that are asked about, with the questions that are asked out of the ``total``."""
        many = min(total, self.limit or total)
        asked = {number * total // many for number in range(many)}
        numbers = itertools.count()
        for conversation in read_conversations(path):
            questions = tuple(question for question in conversation.questions if next(numbers) in asked)
            if questions:
                yield _shorten(replace(conversation, questions=questions), self.sessions)


def _shorten(conversation: Conversation, sessions: int | None) -> Conversation:
    if sessions is None:
        return conversation
    turns = conversation.turns
    answers = {session for question in conversation.questions for session in question.sessions}
    answers |= {turns[position].session for question in conversation.questions for position in question.evidence}
    others = dict.fromkeys(turn.session for turn in turns if turn.session not in answers)
    kept = answers | set(itertools.islice(others, max(0, sessions - len(answers))))
    positions = [position for position, turn in enumerate(turns) if turn.session in kept]
    moved = {position: new for new, position in enumerate(positions)}
    return replace(
        conversation,
        turns=tuple(turns[position] for position in positions),
        questions=tuple(
            replace(question, evidence=tuple(moved[position] for position in question.evidence))
            for question in conversation.questions
        ),
    )


def run_memory_benchmarks(
    experiment: MemoryBenchmarks, out: Path, progress: Progress = silent, command: str = "",
    encoder: TextEncoder | None = None,
) -> Row:  # fmt: skip
    """Measures what is not measured yet; writes memory-benchmarks.json, memory-benchmarks.md, the page and pictures.

    All data is read once before anything is measured. What was found in a conversation is kept in ``out`` and not
    measured again.
    """
    files = [_survey(path) for path in experiment.data]
    encoder = encoder or TextEncoder.load()
    settings = {
        "version": titans.__version__, "encoder": encoder.fingerprint, "per_session": experiment.per_session,
        "ranking": asdict(Ranking()), "memory": NeuralTextMemory.default(encoder.width).fingerprint,
    }  # fmt: skip
    total = sum(min(file["questions"], experiment.limit or file["questions"]) for file in files)
    done = 0
    for file in files:
        cells = []
        for conversation in experiment.choose(file["path"], file["questions"]):
            progress(done, total, f"{file['name']}, {conversation.name}: {len(conversation.turns):,} turns")
            cells.append(_find_or_measure(conversation, experiment.per_session, encoder, settings, out / "cells"))
            done += len(conversation.questions)
        file |= summarize(cells)
    report = {
        "name": NAME, "command": command, "date": time.strftime("%Y-%m-%d"), "settings": settings,
        "limit": experiment.limit, "files": files,
    }  # fmt: skip
    scope = "session" if experiment.per_session else "conversation"
    sections = [_section(file, number, scope) for number, file in enumerate(files, 1)]
    write_outcome(report, "How much of the evidence a text memory finds", sections, out)
    return report


def _survey(path: str) -> Row:
    """What a file holds."""
    file: Row = {"path": path, "name": Path(path).name or path}
    file |= dict.fromkeys(("conversations", "turns", "questions", "without_evidence"), 0)
    for conversation in read_conversations(path):
        file["benchmark"] = conversation.benchmark
        file["conversations"] += 1
        file["turns"] += len(conversation.turns)
        file["questions"] += len(conversation.questions)
        file["without_evidence"] += conversation.unanswerable
    return file


def _find_or_measure(
    conversation: Conversation, per_session: bool, encoder: TextEncoder, settings: Row, folder: Path
) -> Row:
    name = hashlib.sha256(repr(conversation).encode()).hexdigest()[:16]
    cell = read_kept(folder / f"{name}.json", settings)
    if not cell:
        cell = {"name": name, "settings": settings, **measure(conversation, encoder, per_session)}
        write_figures(cell, folder)
    return cell


def measure(conversation: Conversation, encoder: TextEncoder, per_session: bool = False) -> Row:
    """Writes a conversation to a memory of its own, session by session, and asks every question with each arm."""
    turns = conversation.turns
    positions: dict[str, list[int]] = {}  # several turns that say the same may be one record
    moment = None
    with tempfile.TemporaryDirectory() as folder, Memory(folder, encoder=encoder) as memory:
        start = time.perf_counter()
        for session, group in itertools.groupby(enumerate(turns), key=lambda each: each[1].session):
            members = list(group)
            created = [moment := turn.created or moment for _, turn in members]
            records = memory.add_many(
                [turn.text for _, turn in members],
                session=str(session) if per_session else None,
                role=[turn.speaker for _, turn in members],
                created=[each for each in created if each] if all(created) else None,
            )
            for (position, _), record in zip(members, records, strict=True):
                positions.setdefault(record.id, []).append(position)
        written = time.perf_counter() - start

        arms: dict[str, list[Row]] = {}
        shipped = memory.ranking
        for arm, ranking in ARMS.items():
            memory.ranking = ranking or shipped
            arms[arm] = []
            for question in conversation.questions:
                start = time.perf_counter()
                hits = memory.search(question.text, limit=FOUND)
                seconds = time.perf_counter() - start
                found = [positions[hit.record.id] for hit in hits]
                sessions = [[turns[position].session for position in each] for each in found]
                arms[arm].append({
                    "turns": score_hits(found, question.evidence),
                    "sessions": score_hits(_only_new(sessions), question.sessions),
                    "tokens": _tokens(hit.record.text for hit in hits.hits[:READ]),
                    "seconds": round(seconds, 5),
                })  # fmt: skip
    return {
        "conversation": conversation.name, "turns": len(turns), "records": len(positions),
        "tokens": _tokens(turn.text for turn in turns), "seconds_per_write": round(written / len(turns), 5),
        "kinds": [question.kind for question in conversation.questions], "arms": arms,
    }  # fmt: skip


def _only_new(hits: Iterable[Sequence[int]]) -> list[list[int]]:
    """Hits without what a better hit has; those that have nothing else are left out."""
    seen: set[int] = set()
    kept = []
    for hit in hits:
        if new := [each for each in dict.fromkeys(hit) if each not in seen]:
            seen.update(new)
            kept.append(new)
    return kept


def score_hits(hits: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[float] | None:
    """R@5, R@10, hit@10 and the reciprocal rank of the first hit with something that is wanted; None if nothing is.

    Args:
        hits: what each hit holds, best first.
        wanted: what answers the question.
    """
    if not wanted:
        return None
    five, ten = (len({each for hit in hits[:many] for each in hit}.intersection(wanted)) for many in (5, 10))
    first = next((rank for rank, hit in enumerate(hits, 1) if not set(wanted).isdisjoint(hit)), None)
    return [five / len(wanted), ten / len(wanted), float(ten > 0), 1 / first if first else 0.0]


def _tokens(texts: Iterable[str]) -> int:
    return round(sum(map(len, texts)) / LETTERS)


def summarize(cells: Sequence[Row]) -> Row:
    """The arms over all conversations of a file, and what they cost."""
    kinds = sorted({kind for cell in cells for kind in cell["kinds"]})
    return {
        "asked": sum(len(cell["kinds"]) for cell in cells), "asked_about": len(cells),
        "kinds": {kind: sum(cell["kinds"].count(kind) for cell in cells) for kind in kinds},
        "levels": {
            level: {arm: {kind: _over(cells, level, arm, kind) for kind in ("all", *kinds)} for arm in ARMS}
            for level in LEVELS
        },
        "whole_tokens": statistics.fmean(cell["tokens"] for cell in cells for _ in cell["kinds"]),
        "tokens": {arm: statistics.fmean(_each(cells, arm, "tokens")) for arm in ARMS},
        "search_ms": {arm: 1000 * statistics.median(_each(cells, arm, "seconds")) for arm in ARMS},
        "write_ms": 1000 * statistics.fmean(cell["seconds_per_write"] for cell in cells),
    }  # fmt: skip


def _each(cells: Iterable[Row], arm: str, field: str) -> list[float]:
    return [row[field] for cell in cells for row in cell["arms"][arm]]


def _over(cells: Iterable[Row], level: str, arm: str, kind: str) -> Row | None:
    """The mean of each metric over conversations; None if no question of this kind is marked at this level."""
    means = []
    for cell in cells:
        rows = [
            row[level]
            for row, of in zip(cell["arms"][arm], cell["kinds"], strict=True)
            if row[level] is not None and kind in ("all", of)
        ]
        if rows:
            means.append([statistics.fmean(values) for values in zip(*rows, strict=True)])
    return {metric: estimate(values) for metric, values in zip(METRICS, zip(*means, strict=True), strict=False)} or None


def _section(file: Row, number: int, scope: str) -> Section:
    about = (
        f"{file['benchmark']}: {file['conversations']:,} conversations of {file['turns']:,} turns, "
        f"{file['questions']:,} questions with marked evidence and {file['without_evidence']:,} others, which are not "
        f"asked. Asked: {file['asked']:,} questions about {file['asked_about']:,} conversations. No LLM judges "
        "anything: what counts is whether what is marked is found. Each conversation has a store of its own, with one "
        f"scope per {scope}; writing takes {file['write_ms']:.1f} ms per turn, encoding included."
    )
    meaning = (
        "R@5 and R@10: the share of the turns that answer a question among the first five and ten hits. hit@10: "
        "whether at least one is among the first ten. MRR: 1 / the rank of the first one. A session stands at the rank "
        "of the first hit that belongs to it, and sessions are counted as turns are. Means over conversations, in "
        "brackets the 95% interval over them."
    )
    arms = (
        "As shipped: a search without any option. Tokens, at "
        f"{LETTERS} characters each: what an LLM has to read per question, the first {READ} hits or everything. "
        "Milliseconds: the median of a search, encoding included."
    )
    levels = [level for level in LEVELS if file["levels"][level]["BM25"]["all"] is not None]
    tables = [table for level in levels for table in (_arms_table(file, level), _kinds_table(file, level))]
    return Section(file["name"], [about, meaning, arms], tables, [_picture(file, levels[0], f"{NAME}-{number}")])


def _arms_table(file: Row, level: str) -> Table:
    lines = [
        [
            arm, *(with_interval(each["all"][metric]) for metric in METRICS), f"{file['tokens'][arm]:,.0f}", "0",
            f"{file['search_ms'][arm]:.1f}",
        ]
        for arm, each in file["levels"][level].items()
    ]  # fmt: skip
    lines.append(["whole context", "1", "1", "1", "-", f"{file['whole_tokens']:,.0f}", "0", "-"])
    header = ["arm", *METRICS, "tokens per question", "LLM calls per write", "ms per search"]
    return Table(header, lines, f"{file['name']}: {level} that answer a question.")


def _kinds(file: Row, level: str) -> list[str]:
    return [kind for kind in file["kinds"] if file["levels"][level]["BM25"][kind] is not None]


def _kinds_table(file: Row, level: str) -> Table:
    arms = file["levels"][level]
    lines = [
        [kind, f"{file['kinds'][kind]:,}", *(with_interval(arms[arm][kind]["R@10"]) for arm in arms)]
        for kind in _kinds(file, level)
    ]
    return Table(["kind", "questions", *arms], lines, f"{file['name']}: R@10 of {level} by kind of question.")


def _picture(file: Row, level: str, name: str) -> Figure:
    kinds = _kinds(file, level)
    curves = [
        Curve(arm, [each[kind]["R@10"]["value"] for kind in kinds], style=style)
        for style, (arm, each) in enumerate(file["levels"][level].items())
    ]
    title = f"R@10 of {level} by kind of question"
    return Figure(name, plot_bars(kinds, curves, title, "kind", "R@10 (%)", percent=True), f"{file['name']}: {title}")
