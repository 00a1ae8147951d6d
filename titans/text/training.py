"""The outer loop of the text memory: episodes in which a few texts are written and then asked for."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops import MemoryState
from titans.text.encoder import CachedEncoder, Progress, TextEncoder
from titans.text.facts import generate_facts
from titans.text.neural import NeuralConfig, NeuralTextMemory

MIN_WORDS = 6  # of a text that is long enough to be asked for by half of it


@dataclass(frozen=True)
class TextTraining:
    """How a text memory is trained.

    Args:
        epochs: passes over the data.
        written: texts of an episode that are written to the memory.
        asked: queries of an episode, each of which is answered by one of the texts that were written.
        batch: episodes per step.
        learning_rate, weight_decay: of AdamW.
        clip: the largest norm of a step's gradient.
        write, read: weights of the losses on the write and on the read.
        contrastive: weight of the retrieval loss, which reaches every parameter; 0: none. The other two alone are
            smallest if all texts have the same value, and then nothing can be found.
        temperature: of the retrieval loss.
        generated: episodes per epoch that are made from templates, besides those of the data.
        held_out: share of the data that is not trained on.
        seed: of the episodes.
    """

    epochs: int = 10
    written: int = 6
    asked: int = 2
    batch: int = 8
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip: float = 1.0
    write: float = 0.1
    read: float = 1.0
    contrastive: float = 1.0
    temperature: float = 0.05
    generated: int = 0
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "written", "asked", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least 1")
        if self.asked > self.written:
            raise ValueError(
                f"asked is {self.asked} and written is {self.written}; expected no more asked than written"
            )
        for name in ("learning_rate", "clip", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        for name in ("weight_decay", "write", "read", "contrastive", "generated"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of at least 0")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; expected a share between 0 and 1")


class Message(NamedTuple):
    """A text of a transcript, and the questions that it answers."""

    text: str
    questions: tuple[str, ...] = ()


Session = list[Message]


class Episode(NamedTuple):
    """Texts that are written, texts that are asked, and which of the written ones is the answer to each."""

    written: tuple[str, ...]
    asked: tuple[str, ...]
    answers: tuple[int, ...]


class Batch(NamedTuple):
    """Episodes as vectors."""

    written: Tensor  # (episodes, written, width)
    asked: Tensor  # (episodes, asked, width)
    answers: Tensor  # (episodes, asked)


class Losses(NamedTuple):
    """The parts of the outer loss, and how often the answer is found among the texts of its episode."""

    write: Tensor
    read: Tensor
    contrastive: Tensor
    found: Tensor  # the read is nearest to the value of the answer
    found_without: Tensor  # without a memory: the projected query is nearest to the projected answer


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


def generate_sessions(count: int, size: int, rng: random.Random, part: str = "train") -> list[Session]:
    """Sessions of ``size`` facts about people, each stated in one of two ways and with two questions."""
    sessions = []
    for _ in range(count):
        facts = generate_facts(size, rng, part)
        sessions.append([Message(rng.choice([fact.text, fact.paraphrase]), fact.questions) for fact in facts])
    return sessions


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


def draw_episodes(sessions: Sequence[Session], settings: TextTraining, rng: random.Random) -> list[Episode]:
    """Episodes from stretches of consecutive messages, each message in about one of them.

    A query is a question, where the data has some for a text of the stretch; otherwise half of a text that was written,
    or a message that was left out, whose neighbour answers it. What is left of a session that does not fill an episode
    joins what is left of the next.
    """
    size = settings.written + settings.asked
    stretches: list[Session] = []
    rest: Session = []
    for session in sessions:
        known = sum(bool(message.questions) for message in session)
        length = settings.written if known >= settings.asked else size
        start = rng.randrange(min(length, len(session) % length + 1))
        stretches += [session[i : i + length] for i in range(start, len(session) - length + 1, length)]
        used = start + (len(session) - start) // length * length
        rest += session[:start] + session[used:]
    # Messages in the rest are not consecutive: there only questions and halves are queries.
    stretches += [rest[i : i + settings.written] for i in range(0, len(rest) - settings.written + 1, settings.written)]
    episodes = [_draw_episode(stretch, settings, rng) for stretch in stretches]
    rng.shuffle(episodes)
    return episodes


def _draw_episode(stretch: Session, settings: TextTraining, rng: random.Random) -> Episode:
    """An episode of a stretch of ``written`` messages, or of ``written + asked``, of which some are left out."""
    left_out: set[int] = set()
    while len(stretch) - len(left_out) > settings.written:
        free = [i for i in range(len(stretch)) if not {i - 1, i, i + 1} & left_out]
        left_out.add(rng.choice(free or [i for i in range(len(stretch)) if i not in left_out]))
    places = [i for i in range(len(stretch)) if i not in left_out]
    written = [stretch[i] for i in places]

    queries: dict[int, list[str]] = {}  # by answer
    for index, message in enumerate(written):
        if message.questions:
            queries[index] = list(message.questions)
    if len(queries) < settings.asked:
        for index in left_out:
            for neighbour in (index + 1, index - 1):
                if neighbour in places:
                    queries.setdefault(places.index(neighbour), []).append(stretch[index].text)
                    break
        for index, message in enumerate(written):
            queries.setdefault(index, []).extend(halves(message.text))
        for index, message in enumerate(written):
            queries[index] = queries[index] or [message.text]
    answers = tuple(rng.sample(sorted(queries), settings.asked))
    asked = tuple(rng.choice(queries[index]) for index in answers)
    return Episode(tuple(message.text for message in written), asked, answers)


def halves(text: str) -> list[str]:
    """The first and the second half of the words of a text, if it has enough of them."""
    words = text.split()
    if len(words) < MIN_WORDS:
        return []
    return [" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])]


def make_batch(episodes: Sequence[Episode], encoder: TextEncoder) -> Batch:
    """The vectors of some episodes."""
    written, asked = (
        torch.from_numpy(np.stack([encoder.encode(texts) for texts in group]))
        for group in ([episode.written for episode in episodes], [episode.asked for episode in episodes])
    )
    return Batch(written, asked, torch.tensor([episode.answers for episode in episodes]))


def write_texts(memory: NeuralTextMemory, vectors: Tensor) -> tuple[MemoryState, Tensor, Tensor]:
    """Writes texts (batch, n, width) to empty memories, with gradients.

    Returns the memories after them, and the keys and values that were written, (batch, n, dim).
    """
    state, before = memory.create(len(vectors)), vectors[:, :0]
    keys, values = [], []
    for chunk in vectors.split(memory.config.chunk_size, dim=1):
        k, v, _ = memory.associate(state, chunk, before)
        state, _ = memory.write_chunk(state, chunk, before)
        before = chunk[:, -1:]
        keys.append(k)
        values.append(v)
    return state, torch.cat(keys, dim=1), torch.cat(values, dim=1)


def episode_losses(memory: NeuralTextMemory, batch: Batch, temperature: float | None = None) -> Losses:
    """The losses of some episodes, each a mean over texts or queries.

    With M the memory after the texts of an episode, and sg what is kept out of the gradient:

        write = ||M(k) - v||^2 for the texts that were written; for every parameter but W_Q
        read = ||sg(M)(W_Q sg(x)) - sg(v)||^2 for a query x and the value v of its answer; for W_Q alone
        contrastive = -log softmax(cos(z, text) / temperature)[answer] over the texts of the batch, for z the projected
            query, the read of it and the turn's output; for every parameter; 0 without a temperature
    """
    state, k, v = write_texts(memory, batch.written)
    write = (memory.network(state.weights, k.unsqueeze(1)).squeeze(1) - v).square().sum(-1).mean()

    x = memory.project(batch.asked)
    answer = memory.answer(state.detach(), x.detach())
    target = v.gather(1, batch.answers.unsqueeze(-1).expand(-1, -1, v.shape[-1])).detach()
    read = (answer - target).square().sum(-1).mean()
    texts = memory.project(batch.written)
    found, found_without = (
        ((asked @ among.mT).argmax(-1) == batch.answers).float().mean() for asked, among in ((answer, v), (x, texts))
    )

    contrastive = read.new_zeros(())
    if temperature is not None:
        texts = texts.flatten(0, 1)
        first = torch.arange(len(batch.written), device=x.device).unsqueeze(1) * batch.written.shape[1]
        labels = (first + batch.answers).flatten()
        # Another episode may have the same text, which would then be a right answer, too.
        same = texts @ texts.mT > 1 - 1e-4
        others = same[labels] & (torch.arange(len(texts), device=x.device) != labels.unsqueeze(1))
        turn = memory.take_turn(state, batch.asked)
        for z in (x, turn.h, turn.o):
            scores = F.normalize(z, dim=-1).flatten(0, 1) @ texts.mT / temperature
            contrastive = contrastive + F.cross_entropy(scores.masked_fill(others, -torch.inf), labels) / 3
    return Losses(write, read, contrastive, found, found_without)


def add_gradients(memory: NeuralTextMemory, losses: Losses, settings: TextTraining) -> None:
    """Adds the gradients of each loss to the parameters that it is for."""
    query = memory.to_query.weight
    others = [parameter for parameter in memory.parameters() if parameter is not query]
    if settings.contrastive:
        (settings.contrastive * losses.contrastive).backward(retain_graph=True)
    (settings.write * losses.write).backward(inputs=others)
    (settings.read * losses.read).backward(inputs=[query])


@torch.no_grad()
def evaluate(memory: NeuralTextMemory, batches: Sequence[Batch], settings: TextTraining) -> dict[str, float]:
    """The means of :class:`Losses` over batches."""
    temperature = settings.temperature if settings.contrastive else None
    sizes = torch.tensor([float(len(batch.written)) for batch in batches])
    losses = torch.stack([torch.stack(episode_losses(memory, batch, temperature)) for batch in batches])
    means = (losses * sizes.unsqueeze(1)).sum(0) / sizes.sum()
    return dict(zip(Losses._fields, (float(value) for value in means), strict=True))


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
        config: of the memory; default: that of an untrained one, with the encoder's width.
        settings: how it is trained.
        on_progress: called with (done, total, what is being done).
    """
    started = time.perf_counter()
    config = replace(config or NeuralConfig(), width=encoder.width)
    rng = random.Random(settings.seed)
    trained, held_out = _episodes(sessions, settings, rng)
    cached = CachedEncoder(encoder)  # which is never trained

    def batches(episodes: Sequence[Episode]) -> Iterator[Batch]:
        cached.learn([text for each in episodes for text in (*each.written, *each.asked)], on_progress)
        for start in range(0, len(episodes), settings.batch):
            yield make_batch(episodes[start : start + settings.batch], cached)

    checks = list(batches(held_out))

    memory = NeuralTextMemory(config)
    before = evaluate(memory, checks, settings)
    optimizer = torch.optim.AdamW(memory.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    total = sum(-(-len(epoch) // settings.batch) for epoch in trained)
    done = 0
    curve = [before]
    for epoch in trained:
        for batch in batches(epoch):
            losses = episode_losses(memory, batch, settings.temperature if settings.contrastive else None)
            optimizer.zero_grad()
            add_gradients(memory, losses, settings)
            torch.nn.utils.clip_grad_norm_(memory.parameters(), settings.clip)
            optimizer.step()
            done += 1
            if on_progress is not None:
                on_progress(done, total, f"training, read loss {float(losses.read.detach()):.3f}")
        curve.append(evaluate(memory, checks, settings))
    figures = {
        "settings": asdict(settings),
        "encoder": {"name": encoder.name, "fingerprint": encoder.fingerprint},
        "fingerprint": memory.fingerprint,
        "episodes": {"train": len(trained[0]), "held_out": len(held_out)},
        "steps": total,
        "seconds": round(time.perf_counter() - started, 2),
        "held_out": {"before": before, "after": curve[-1], "epochs": curve},
    }
    return Result(memory.requires_grad_(False), figures)


def _episodes(
    sessions: Sequence[Session], settings: TextTraining, rng: random.Random
) -> tuple[list[list[Episode]], list[Episode]]:
    """The episodes of every epoch, and those that are held out."""
    size = settings.written + settings.asked
    train: list[Session] = []
    held_out: list[Episode] = []
    if sessions:
        train, kept = split_sessions(sessions, settings.held_out, size, rng)
        held_out = draw_episodes(kept, settings, rng)
    elif not settings.generated:
        raise ValueError("there are no sessions and generated is 0; expected episodes from one of them")
    if settings.generated:
        count = max(1, round(settings.held_out * settings.generated))
        held_out += draw_episodes(generate_sessions(count, settings.written, rng, "test"), settings, rng)
    epochs = []
    for _ in range(settings.epochs):
        made = generate_sessions(settings.generated, settings.written, rng)
        epoch = draw_episodes(train, settings, rng) + draw_episodes(made, settings, rng)
        rng.shuffle(epoch)
        epochs.append(epoch)
    return epochs, held_out
