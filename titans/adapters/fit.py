"""Teaching the memories of an adapted model language and recall together.

A frozen model is not run again: its memories learn on states that were recorded. One with low-rank updates is run, with
gradients, as its states change.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.adapters.calibrate import read_texts
from titans.adapters.lora import load_lora
from titans.adapters.memory import TapMemory
from titans.adapters.model import HEAD, AdaptedModel
from titans.adapters.saving import fingerprint
from titans.adapters.states import Reading, head, record, window_of
from titans.files import replacing, write_json
from titans.layers.memory import priced
from titans.report.progress import Progress, silent
from titans.tasks import Task
from titans.tasks.background import PARTS, writer_for

LANGUAGE = "language"
CHECKPOINT = "training.pt"
STATES = "states"
SAVE_EVERY = 20
SAVE_EVERY_WITH_LORA = 5  # steps take longer, as the model runs
# what is learned of a memory; values stay what they are, and so does its start
GATES = ("to_gates", "gate_bias", "to_gate", "loudness", "floor")
LEARNED = (*GATES, "to_query", "to_key", "to_features")


@dataclass(frozen=True)
class FitSettings:
    """How a memory is taught.

    Attributes:
        steps: updates.
        texts: how many texts are recorded of each kind: of each task, and of plain language.
        lengths: of the texts, in tokens; longer ones come in as training goes on.
        batch: texts of tasks per step; half as many of plain language besides.
        rate: the highest learning rate.
        gate_rate: that of the gates, which would not move otherwise.
        lora_rate: that of low-rank updates of the model, if it has them.
        write_cost: the price of a write by every token of a text, in nats per step; it grows over the first half.
        places: tokens of a text whose prediction counts as language.
        narrow: the share of texts that are read with a quarter of the window, so that the memory cannot be passed by.
        seed: of the texts and of their order.
    """

    steps: int = 100
    texts: int = 44
    lengths: tuple[int, ...] = (1024,)
    batch: int = 2
    rate: float = 1e-4
    gate_rate: float = 1e-2
    lora_rate: float = 5e-4
    write_cost: float = 0.0
    places: int = 96
    narrow: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "texts", "batch", "places"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least 1")
        for name in ("rate", "gate_rate", "lora_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        if not self.lengths or min(self.lengths) < 16:
            raise ValueError(f"lengths is {list(self.lengths)}; expected numbers of tokens, 16 or more")
        if not 0 <= self.narrow <= 1:
            raise ValueError(f"narrow is {self.narrow}; expected a share from 0 to 1")
        if self.write_cost < 0:
            raise ValueError(f"write_cost is {self.write_cost}; expected 0 or more")


@dataclass(frozen=True)
class Plan:
    """One text to record: what it is, and where it is kept."""

    kind: str
    length: int
    number: int
    narrow: bool

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.kind}-{self.length}-{self.number:04d}{'-narrow' if self.narrow else ''}.safetensors"


def draw(
    kind: str, tasks: dict[str, Task], texts: str | None, tokenizer: Any, length: int, split: str, key: str
) -> Any:
    """The tokens of a text of a kind, and what it asks: the same ones for the same key."""
    rng = random.Random(key)
    if kind == LANGUAGE:
        writer = writer_for(tokenizer)
        sentences = writer.read(texts, PARTS[split])
        taken, _ = sentences.take(rng, length - len(writer.opening), texts is None, "the text")
        return [*writer.opening, *taken.tolist()], ()
    task = tasks[kind]
    example = task.draw(rng, task.training_group(rng, length), split, tokenizer)
    return list(example.tokens), tuple(example.answers)


def record_texts(
    model: AdaptedModel,
    tokenizer: Any,
    tasks: Sequence[Task],
    texts: str | None,
    settings: FitSettings,
    folder: Path,
    progress: Progress = silent,
) -> list[Plan]:
    """Records texts of every kind, or goes on where it was stopped; what is there already is kept.

    Of a model with low-rank updates only the last states are, which say how well it predicted the texts at the start.
    """
    by_name = {task.name: task for task in tasks}
    plans = [
        Plan(kind, length, number, number < settings.narrow * settings.texts)
        for number in range(settings.texts)
        for kind in (*by_name, LANGUAGE)
        for length in settings.lengths
    ]
    made_with = {
        "tasks": {task.name: asdict(task) for task in tasks},  # type: ignore[call-overload]
        "backbone": fingerprint(model.backbone, model.updates), "texts": texts,
        "window": model.window, "sinks": model.sinks, "taps": model.taps, "seed": settings.seed,
    }  # fmt: skip
    layers = sorted({tap for taps in model.taps for tap in taps if tap})
    if model.lora is not None:
        made_with["lora"] = _digest(model.updates)
        layers = []
    note = folder / "settings.json"
    folder.mkdir(parents=True, exist_ok=True)
    if note.is_file():
        before, now = json.loads(note.read_text(encoding="utf-8")), _plain(made_with)
        differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if differing:
            which = "a model with other low-rank updates" if differing == ["lora"] else "another model, window or text"
            raise ValueError(f"{folder} has states of {which}; expected a new folder, or the same")
    write_json(note, made_with)
    for done, plan in enumerate(plans):
        progress(done, len(plans), "texts")
        path = folder / plan.name
        if path.is_file():
            continue
        key = f"{settings.seed} {plan.name}"
        ids, answers = draw(plan.kind, by_name, texts, tokenizer, plan.length, "train", key)
        with window_of(model, max(model.sinks + 1, model.window // 4) if plan.narrow else model.window):
            record(model, torch.tensor(ids), layers, answers).save(path)
    progress(len(plans), len(plans), "texts")
    return plans


def fit(
    model: AdaptedModel,
    plans: Sequence[Plan],
    states: Path,
    settings: FitSettings,
    checkpoint: Path | None = None,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Trains the memories, and the low-rank updates if there are any, on recorded texts, or goes on from a checkpoint.

    Each step has texts of tasks, whose answers count, and of plain language; in both, some other tokens count by how
    much better or worse they are predicted than without the memory, and before any update.
    """
    if any(where != HEAD for where in model.inject):
        raise ValueError(f"inject is {model.inject}; expected {HEAD}: only what is said there can be learned")
    memories = [memory for memory in model.memories if isinstance(memory, TapMemory)]
    groups = _groups(model, memories, settings)
    of_memories = [weight for group in groups[:2] for weight in group["params"]]
    optimiser = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
    made_with = _plain(asdict(settings)) | {"start": _digest(model.memories.state_dict())}
    if model.lora is None:
        del made_with["lora_rate"]
    else:
        made_with["lora"] = _digest(model.updates)
    first = 0 if checkpoint is None else _resume(checkpoint, model, optimiser, made_with)
    every = SAVE_EVERY if model.lora is None else SAVE_EVERY_WITH_LORA
    recent: list[tuple[float, float]] = []
    for step in range(first, settings.steps):
        progress(step, settings.steps, "steps")
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * _schedule(step, settings.steps)
        prices = {}
        if settings.write_cost:
            price = settings.write_cost * min(1.0, step / (0.5 * settings.steps)) / max(settings.lengths)
            prices["theta"] = torch.tensor(price, device=model.device)
        rng = random.Random(f"{settings.seed} {step}")
        torch.manual_seed(rng.getrandbits(48))
        batch = choose(plans, settings, step, rng)
        readings = [Reading.load(states / plan.name) for plan in batch]
        with priced(memories, prices):
            recent.append(add_gradients(model, readings, settings, rng))
        if clip_gradients([of_memories, [*model.updates.values()]]):
            optimiser.step()
        optimiser.zero_grad()
        if len(recent) == every or step + 1 == settings.steps:
            found, lost = (sum(column) / len(recent) for column in zip(*recent, strict=True))
            say(f"step {step + 1} of {settings.steps}  recall {found:.3f}  language {lost:+.4f}")
            recent = []
            if checkpoint is not None:
                _save(checkpoint, model, optimiser, made_with, step + 1)
    progress(settings.steps, settings.steps, "steps")


def _groups(model: AdaptedModel, memories: Sequence[TapMemory], settings: FitSettings) -> list[dict[str, Any]]:
    """What is learned, with the highest learning rate of each: two groups of the memories, and low-rank updates."""
    named = [(name.split(".")[0], p) for memory in memories for name, p in memory.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for part, p in named if part in LEARNED and part not in GATES], "peak": settings.rate},
        {"params": [p for part, p in named if part in GATES], "peak": settings.gate_rate},
    ]
    if model.lora is not None:
        groups.append({"params": [*model.updates.values()], "peak": settings.lora_rate})
    return groups


def clip_gradients(parts: Sequence[Sequence[Tensor]]) -> bool:
    """Shortens the gradients of each part to a norm of 1 at most, whatever the others have; are all of them finite?"""
    norms = [torch.nn.utils.clip_grad_norm_(part, 1.0) for part in parts]
    return all(bool(norm.isfinite()) for norm in norms)


def _resume(checkpoint: Path, model: AdaptedModel, optimiser: torch.optim.Optimizer, made_with: dict[str, Any]) -> int:
    """Loads what :func:`_save` wrote, if it is there; returns how many steps were made."""
    if not checkpoint.is_file():
        return 0
    try:
        kept = torch.load(checkpoint, map_location=model.device, weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{checkpoint} is damaged: delete it, and training begins again") from error
    if kept["settings"] != made_with:
        raise ValueError(f"{checkpoint} is of a training with other settings; expected the same, or a new folder")
    model.memories.load_state_dict(kept["memories"])
    if model.lora is not None:
        load_lora(model.backbone, kept["lora"])
    optimiser.load_state_dict(kept["optimiser"])
    return int(kept["step"])


def _save(
    checkpoint: Path, model: AdaptedModel, optimiser: torch.optim.Optimizer, made_with: dict[str, Any], step: int
) -> None:
    kept = {"settings": made_with, "step": step, "memories": model.memories.state_dict()}
    if model.lora is not None:
        kept["lora"] = {name: x.detach() for name, x in model.updates.items()}
    with replacing(checkpoint) as temporary:
        torch.save(kept | {"optimiser": optimiser.state_dict()}, temporary)


def choose(plans: Sequence[Plan], settings: FitSettings, step: int, rng: random.Random) -> list[Plan]:
    """The texts of a step, all of one length: of the shortest at first, of any later."""
    lengths = sorted(settings.lengths)
    open_lengths = lengths[: 1 + int(len(lengths) * min(1.0, 2 * step / settings.steps))]
    length = rng.choice(open_lengths)
    asked = [plan for plan in plans if plan.kind != LANGUAGE and plan.length == length]
    plain = [plan for plan in plans if plan.kind == LANGUAGE and plan.length == length]
    kinds = sorted({plan.kind for plan in asked})
    chosen = []
    for number in range(settings.batch if asked else 0):
        kind = kinds[(step * settings.batch + number) % len(kinds)]
        chosen.append(rng.choice([plan for plan in asked if plan.kind == kind]))
    return chosen + [rng.choice(plain) for _ in range(max(1, settings.batch // 2))]


@dataclass(frozen=True)
class _Targets:
    """A text, and the places whose predictions count: those of each answer, and some others, as language."""

    reading: Reading
    answers: list[Tensor]
    language: Tensor

    @property
    def places(self) -> Tensor:
        """All of them."""
        return torch.cat([*self.answers, self.language])


def add_gradients(
    model: AdaptedModel, readings: Sequence[Reading], settings: FitSettings, rng: random.Random
) -> tuple[float, float]:
    """Adds the gradients of a step to what is learned.

    Returns the loss of the answers, and how much worse than when they were recorded other tokens are predicted. A model
    that is run has the gradients of one text at a time.
    """
    texts = [_choose_places(reading, settings, rng, model.device) for reading in readings]
    asking = sum(bool(text.answers) for text in texts) / len(texts)
    answers, plain = sum(len(text.answers) for text in texts), sum(len(text.language) > 0 for text in texts)
    total = torch.zeros(2)
    for part in [texts] if model.lora is None else [[text] for text in texts]:
        predict = _predict_recorded if model.lora is None else _predict_live
        losses = [_losses(model, text, logits) for text, logits in zip(part, predict(model, part), strict=True)]
        recall, language = torch.stack(losses).sum(0)
        recall, language = recall * asking / max(1, answers), language / max(1, plain)
        (recall + language).backward()
        total += torch.stack([recall, language]).detach().cpu()
    return float(total[0]), float(total[1])


def _choose_places(reading: Reading, settings: FitSettings, rng: random.Random, device: torch.device) -> _Targets:
    """Which predictions of a text count: as language, some beyond the window and before the first question."""
    begin, end = min(reading.window, len(reading.ids) // 2), len(reading.ids) - 1
    if reading.answers:
        end = min(end, reading.answers[0].place - 1)
    answers = [
        torch.arange(answer.place - 1, answer.place - 1 + len(answer.wanted), device=device)
        for answer in reading.answers
    ]
    some = sorted(rng.choices(range(begin, end), k=settings.places)) if end > begin else []
    return _Targets(reading, answers, torch.tensor(some, dtype=torch.long, device=device))


def _predict_recorded(model: AdaptedModel, texts: Sequence[_Targets]) -> list[Tensor]:
    """The logits (places, vocabulary) of each text, from the recorded states of a frozen model."""
    said = [read_texts(model, index, [text.reading for text in texts]) for index in range(len(model.memories))]
    found = []
    for row, text in enumerate(texts):
        logits = _recorded(model, text.reading, text.places)
        for index, (y, gate) in enumerate(said):
            at = slice(row, row + 1)
            logits = logits + model.memory_logits(index, y[at, :, text.places], gate[at, text.places])[0]
        found.append(logits)
    return found


def _predict_live(model: AdaptedModel, texts: Sequence[_Targets]) -> list[Tensor]:
    """The logits (places, vocabulary) of each text, from the model itself."""
    found = []
    for text in texts:
        with window_of(model, text.reading.window):
            found.append(model(text.reading.ids[None].to(model.device), logits_to_keep=text.places).logits[0].float())
    return found


def _losses(model: AdaptedModel, text: _Targets, logits: Tensor) -> Tensor:
    """(2,): the losses of the answers of a text, added, and how much worse its language is predicted than recorded."""
    wanted = text.reading.ids.to(model.device)
    recall = language = logits.new_zeros(())
    *answers, others = logits.split([len(places) for places in (*text.answers, text.language)])
    for found, places in zip(answers, text.answers, strict=True):
        recall = recall + F.cross_entropy(found, wanted[places + 1])
    if len(text.language):
        after = wanted[text.language + 1]
        before = F.cross_entropy(_recorded(model, text.reading, text.language), after)
        language = F.cross_entropy(others, after) - before
    return torch.stack([recall, language])


@torch.no_grad()
def _recorded(model: AdaptedModel, reading: Reading, places: Tensor) -> Tensor:
    """The logits (places, vocabulary) that the model had without its memories when the text was recorded."""
    return head(model, reading.last.to(model.device)[places].float())


def _schedule(step: int, steps: int) -> float:
    """Up over the first twentieth, or 20 steps if that is more, and down over the last third."""
    up, down = max(20, steps // 20), max(1, steps // 3)
    return min(1.0, (step + 1) / up) * min(1.0, (steps - step) / down)


def _plain(value: Any) -> Any:
    """A value as JSON would give it back."""
    return json.loads(json.dumps(value))


def _digest(weights: Mapping[str, Tensor]) -> str:
    """What tells weights from others."""
    found = hashlib.blake2b(digest_size=16)
    for x in weights.values():
        found.update(x.detach().cpu().numpy().tobytes())
    return found.hexdigest()
