"""The outer loop of the text memory: texts are written to it, and then sought by what asks for them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops import MemoryState
from titans.text.encoder import CachedEncoder, Progress, TextEncoder
from titans.text.facts import generate_facts
from titans.text.neural import NeuralConfig, NeuralTextMemory, add_previous

LEAST = 8  # messages to train on, and to hold out


@dataclass(frozen=True)
class TextTraining:
    """How a text memory is trained.

    Args:
        epochs: passes over the data.
        written: consecutive texts of an episode, which are written to a memory, and among which each answer is sought.
        neighbours: texts of an episode that ask for the text after them, besides the questions of the data.
        share: how much of the text before is added to each text that is sought among.
        learning_rate, weight_decay: of AdamW.
        clip: the largest norm of a step's gradient.
        temperature: of the loss.
        generated: episodes per epoch that are made from templates, besides those of the data.
        held_out: share of the data that is not trained on.
        seed: of the episodes.
    """

    epochs: int = 3
    written: int = 192
    neighbours: int = 32
    share: float = 0.5
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip: float = 1.0
    temperature: float = 0.05
    generated: int = 0
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"epochs": 0, "written": 2, "neighbours": 0, "generated": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least {least}")
        for name in ("learning_rate", "clip", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        for name in ("weight_decay", "share"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of at least 0")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; expected a share between 0 and 1")


class Message(NamedTuple):
    """A text of a transcript, and the questions that it answers."""

    text: str
    questions: tuple[str, ...] = ()


Session = list[Message]


class Texts(NamedTuple):
    """Texts in their order as vectors, and questions about them."""

    written: Tensor  # (n, width)
    asked: Tensor  # (m, width), the questions
    answers: Tensor  # (m,), the text that answers each
    follows: Tensor  # (n,), whether a text follows the one before it in the same session


class Episode(NamedTuple):
    """Texts that are written, and what asks for some of them."""

    written: Tensor  # (n, width)
    asked: Tensor  # (m, width)
    answers: Tensor  # (m,), the text that each asks for
    askers: Tensor  # (m,), the text that asks; -1 for a question


def read_transcripts(paths: Iterable[str | Path]) -> list[Session]:
    """The sessions of some files.

    A ``.jsonl`` or ``.json`` file has one object per line: ``text``, and optionally ``session`` and ``question``; with
    a question and an ``answer`` but no text, the answer is the text. In any other file each line is a message, and an
    empty line starts a new session.
    """
    sessions: list[Session] = []
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
        read = _read_objects if path.suffix in (".jsonl", ".json") else _read_lines
        found = [session for session in read(path, lines) if session]
        if not found:
            raise ValueError(f"{path} has no messages in it; expected one per line")
        sessions += found
    return sessions


def _read_lines(path: Path, lines: Sequence[str]) -> list[Session]:
    sessions: list[Session] = [[]]
    for line in lines:
        if line.strip():
            sessions[-1].append(Message(line.strip()))
        elif sessions[-1]:
            sessions.append([])
    return sessions


def _read_objects(path: Path, lines: Sequence[str]) -> list[Session]:
    sessions: dict[str, Session] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number},"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} cannot be read as JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{where} is not an object; expected one with a text")
        question = fields.get("question")
        text = fields.get("text", fields.get("answer") if question is not None else None)
        text, question = (_words(value, name, where) for value, name in ((text, "text"), (question or "", "question")))
        if not text:
            raise ValueError(f"{where} has an empty text; expected words")
        session = sessions.setdefault(str(fields.get("session")), [])
        questions = (question,) if question else ()
        if session and session[-1].text == text and questions:  # one more question about the same text
            session[-1] = Message(text, (*session[-1].questions, *questions))
        else:
            session.append(Message(text, questions))
    return list(sessions.values())


def _words(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} has a {name} of type {type(value).__name__}; expected words")
    return value.strip()


def generate_sessions(size: int, rng: random.Random, part: str = "train") -> list[Session]:
    """Facts about people, each stated in one of two ways, with two questions; a session each: none follows another."""
    facts = generate_facts(size, rng, part)
    return [[Message(rng.choice([fact.text, fact.paraphrase]), fact.questions)] for fact in facts]


def split_sessions(
    sessions: Sequence[Session], part: float, least: int, rng: random.Random
) -> tuple[list[Session], list[Session]]:
    """Sessions to train on, and sessions with about ``part`` of the messages, and no fewer than ``least``, to hold out.

    Whole sessions are held out where that leaves more than half to train on; otherwise the ends of all of them.
    """
    total = sum(map(len, sessions))
    if total < 2 * least:
        raise ValueError(f"the data has {total} messages; expected at least {2 * least}, for training and to hold out")
    wanted = min(max(least, round(part * total)), total - least)
    order = list(range(len(sessions)))
    rng.shuffle(order)
    chosen: set[int] = set()
    count = 0
    for index in order:
        if count >= wanted:
            break
        chosen.add(index)
        count += len(sessions[index])
    if total - count >= max(least, total // 2):
        return (
            [session for index, session in enumerate(sessions) if index not in chosen],
            [sessions[index] for index in sorted(chosen)],
        )
    joined = [message for session in sessions for message in session]
    return [joined[: total - wanted]], [joined[total - wanted :]]


def encode_sessions(sessions: Sequence[Session], encoder: TextEncoder) -> Texts:
    """Sessions one after the other, as a user's memory gets them."""
    messages = [message for session in sessions for message in session]
    pairs = [(question, index) for index, message in enumerate(messages) for question in message.questions]
    written, asked = (
        torch.from_numpy(encoder.encode(texts))
        for texts in ([message.text for message in messages], [question for question, _ in pairs])
    )
    answers = torch.tensor([index for _, index in pairs], dtype=torch.int64)
    follows = torch.tensor([place > 0 for session in sessions for place in range(len(session))])
    return Texts(written, asked, answers, follows)


def draw_episodes(data: Sequence[Texts], settings: TextTraining, rng: random.Random) -> list[Episode]:
    """Stretches that do not overlap, whose start differs from call to call, in random order."""
    episodes = []
    for texts in data:
        total = len(texts.written)
        length = min(settings.written, total)
        for start in range(rng.randrange(total % length + 1), total - length + 1, length):
            episodes.append(_draw_episode(texts, start, start + length, settings.neighbours, rng))
    rng.shuffle(episodes)
    return [episode for episode in episodes if len(episode.asked)]


def _draw_episode(texts: Texts, start: int, stop: int, neighbours: int, rng: random.Random) -> Episode:
    """The texts from ``start`` to ``stop``, the questions about them, and some of them for the next."""
    written = texts.written[start:stop]
    inside = (texts.answers >= start) & (texts.answers < stop)
    known = [place for place in range(1, stop - start) if texts.follows[start + place]]
    after = torch.tensor(rng.sample(known, min(neighbours, len(known))), dtype=torch.int64)
    questions, answers = texts.asked[inside], texts.answers[inside] - start
    askers = torch.cat([torch.full_like(answers, -1), after - 1])
    return Episode(written, torch.cat([questions, written[after - 1]]), torch.cat([answers, after]), askers)


def write_texts(neural: NeuralTextMemory, vectors: Tensor) -> MemoryState:
    """The memory after texts (n, width), with gradients."""
    state = neural.create()
    for chunk in vectors[None].split(neural.config.chunk_size, dim=1):
        state, _ = neural.write_chunk(state, chunk)
    return state


Reader = Callable[[NeuralTextMemory, Episode], Tensor]  # what stands for each query in the ranking, (m, dim)


def ask_memory(neural: NeuralTextMemory, episode: Episode) -> Tensor:
    """What the memory of an episode's texts does not expect of each query."""
    return neural.unexpected([write_texts(neural, episode.written)], episode.asked)


def ask_projection(neural: NeuralTextMemory, episode: Episode) -> Tensor:
    """Each query projected, as a memory without texts would leave it."""
    return neural.project(episode.asked)


def rank_texts(neural: NeuralTextMemory, episode: Episode, share: float, read: Reader = ask_memory) -> Tensor:
    """How near each text, in the context of the one before it, is to each query (m, n); a text never answers itself."""
    scores = read(neural, episode) @ add_previous(neural.project(episode.written), share).mT
    places = torch.arange(len(episode.written), device=scores.device)
    return scores.masked_fill(places == episode.askers.unsqueeze(1), -torch.inf)


def train_epoch(
    neural: NeuralTextMemory,
    optimizer: torch.optim.Optimizer,
    episodes: Sequence[Episode],
    settings: TextTraining,
    read: Reader = ask_memory,
    on_step: Callable[[float], None] | None = None,
) -> None:
    """One step for each episode on the cross-entropy of the right text among those of the episode."""
    for episode in episodes:
        scores = rank_texts(neural, episode, settings.share, read)
        loss = F.cross_entropy(scores / settings.temperature, episode.answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(neural.parameters(), settings.clip)
        optimizer.step()
        if on_step is not None:
            on_step(float(loss.detach()))


def make_optimizer(neural: NeuralTextMemory, settings: TextTraining) -> torch.optim.Optimizer:
    """AdamW with the settings' learning rate and weight decay."""
    return torch.optim.AdamW(neural.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)


@torch.no_grad()
def evaluate(neural: NeuralTextMemory, episodes: Sequence[Episode], settings: TextTraining) -> dict[str, float]:
    """Means over all queries: the loss, and how often the answer is first, by the memory and without it."""
    rows = []
    for episode in episodes:
        scores = rank_texts(neural, episode, settings.share)
        without = rank_texts(neural, episode, settings.share, ask_projection)
        losses = F.cross_entropy(scores / settings.temperature, episode.answers, reduction="none")
        found = [(each.argmax(-1) == episode.answers).float() for each in (scores, without)]
        rows.append(torch.stack([losses, *found]))
    return dict(zip(("loss", "found", "found_without"), torch.cat(rows, dim=1).mean(1).tolist(), strict=True))


@dataclass(frozen=True)
class Result:
    """A trained memory, and the figures of its training."""

    memory: NeuralTextMemory
    figures: dict[str, Any]


def train_memory(
    sessions: Sequence[Session],
    encoder: TextEncoder,
    config: NeuralConfig | None = None,
    settings: TextTraining = TextTraining(),  # noqa: B008 (frozen)
    on_progress: Progress | None = None,
) -> Result:
    """Trains a memory on sessions and on ``settings.generated`` episodes per epoch.

    Args:
        sessions: what :func:`read_transcripts` gives; may be empty if there are generated episodes.
        encoder: of the texts; stays as it is.
        config: of the memory; default: that of an untrained one.
        settings: how it is trained.
        on_progress: called with (done, total, what is being done).
    """
    started = time.perf_counter()
    config = config or NeuralConfig(width=encoder.width)
    if config.width != encoder.width:
        raise ValueError(f"width is {config.width}; expected {encoder.width}, that of the encoder's vectors")
    if not sessions and not settings.generated:
        raise ValueError("there are no sessions and generated is 0; expected episodes from one of them")
    rng = random.Random(settings.seed)
    cached = CachedEncoder(encoder)  # which is never trained

    def encode(some: Sequence[Session]) -> Texts:
        cached.learn([words for session in some for each in session for words in (each.text, *each.questions)],
                     on_progress)  # fmt: skip
        return encode_sessions(some, cached)

    def generate(count: int, part: str) -> list[Texts]:
        return [encode(generate_sessions(settings.written, rng, part)) for _ in range(count)]

    train, kept = [], []
    if sessions:
        trained, held_out = split_sessions(sessions, settings.held_out, LEAST, rng)
        train, kept = [encode(trained)], [encode(held_out)]
    if settings.generated:
        kept += generate(max(1, round(settings.held_out * settings.generated)), "test")
    checks = draw_episodes(kept, settings, rng)
    if not checks:
        raise ValueError("the data has no questions and neighbours is 0; expected texts to be asked for")

    neural = NeuralTextMemory(config)
    optimizer = make_optimizer(neural, settings)
    curve = [evaluate(neural, checks, settings)]
    per_epoch = 0
    done = 0

    def on_step(loss: float) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, per_epoch * settings.epochs, f"training, loss {loss:.3f}")

    for _ in range(settings.epochs):
        episodes = draw_episodes([*train, *generate(settings.generated, "train")], settings, rng)
        per_epoch = len(episodes)
        train_epoch(neural, optimizer, episodes, settings, on_step=on_step)
        curve.append(evaluate(neural, checks, settings))
    figures = {
        "settings": asdict(settings),
        "encoder": {"name": encoder.name, "fingerprint": encoder.fingerprint},
        "fingerprint": neural.fingerprint,
        "episodes": {"train": per_epoch, "held_out": len(checks)},
        "steps": done,
        "seconds": round(time.perf_counter() - started, 2),
        "held_out": {"before": curve[0], "after": curve[-1], "epochs": curve},
    }
    return Result(neural.requires_grad_(False), figures)
