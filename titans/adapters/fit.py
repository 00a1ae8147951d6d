"""Teaching the memories of an adapted model, on recorded states: language and recall together."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.adapters.calibrate import read_texts
from titans.adapters.memory import TapMemory
from titans.adapters.model import HEAD, AdaptedModel
from titans.adapters.saving import fingerprint
from titans.adapters.states import Reading, head, record, window_of
from titans.files import replacing, write_json
from titans.report.progress import Progress, silent
from titans.tasks import Task
from titans.tasks.background import PARTS, writer_for

LANGUAGE = "language"
CHECKPOINT = "training.pt"
STATES = "states"
SAVE_EVERY = 20
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
    write_cost: float = 0.0
    places: int = 96
    narrow: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "texts", "batch", "places"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least 1")
        for name in ("rate", "gate_rate"):
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
    """Records texts of every kind, or goes on where it was stopped; what is there already is kept."""
    by_name = {task.name: task for task in tasks}
    plans = [
        Plan(kind, length, number, number < settings.narrow * settings.texts)
        for number in range(settings.texts)
        for kind in (*by_name, LANGUAGE)
        for length in settings.lengths
    ]
    made_with = {
        "tasks": {task.name: asdict(task) for task in tasks},  # type: ignore[call-overload]
        "backbone": fingerprint(model.backbone), "texts": texts,
        "window": model.window, "sinks": model.sinks, "taps": model.taps, "seed": settings.seed,
    }  # fmt: skip
    note = folder / "settings.json"
    folder.mkdir(parents=True, exist_ok=True)
    if note.is_file() and json.loads(note.read_text(encoding="utf-8")) != _plain(made_with):
        raise ValueError(f"{folder} has states of another model, window or text; expected a new folder, or the same")
    write_json(note, made_with)
    layers = sorted({tap for taps in model.taps for tap in taps if tap})
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
    """Trains the memories on recorded texts, or goes on from a checkpoint.

    Each step has texts of tasks, whose answers count, and of plain language; in both, some other tokens count by how
    much better or worse they are predicted than without the memory.
    """
    if any(where != HEAD for where in model.inject):
        raise ValueError(
            f"inject is {model.inject}; expected {HEAD}: only what is said there can be learned from recorded states"
        )
    memories = [memory for memory in model.memories if isinstance(memory, TapMemory)]
    named = [(name, p) for memory in memories for name, p in memory.named_parameters() if name.split(".")[0] in LEARNED]
    gates = [p for name, p in named if name.split(".")[0] in GATES]
    others = [p for name, p in named if name.split(".")[0] not in GATES]
    groups = [{"params": others, "peak": settings.rate}, {"params": gates, "peak": settings.gate_rate}]
    optimiser = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
    first = 0
    begun = hashlib.blake2b(
        b"".join(x.detach().cpu().numpy().tobytes() for x in model.memories.state_dict().values()), digest_size=16
    )
    made_with = _plain(asdict(settings)) | {"start": begun.hexdigest()}
    if checkpoint is not None and checkpoint.is_file():
        try:
            kept = torch.load(checkpoint, map_location=model.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(f"{checkpoint} is damaged: delete it, and training begins again") from error
        if kept["settings"] != made_with:
            raise ValueError(f"{checkpoint} is of a training with other settings; expected the same, or a new folder")
        model.memories.load_state_dict(kept["memories"])
        optimiser.load_state_dict(kept["optimiser"])
        first = kept["step"]
    recent: list[tuple[float, float]] = []
    for step in range(first, settings.steps):
        progress(step, settings.steps, "steps")
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * _schedule(step, settings.steps)
        if settings.write_cost:
            price = settings.write_cost * min(1.0, step / (0.5 * settings.steps)) / max(settings.lengths)
            for memory in memories:
                memory.prices = {"theta": torch.tensor(price, device=model.device)}
        rng = random.Random(f"{settings.seed} {step}")
        torch.manual_seed(rng.getrandbits(48))
        batch = choose(plans, settings, step, rng)
        recall, language = _losses(model, [Reading.load(states / plan.name) for plan in batch], settings, rng)
        (recall + language).backward()
        if torch.nn.utils.clip_grad_norm_([*gates, *others], 1.0).isfinite():
            optimiser.step()
        optimiser.zero_grad()
        recent.append((float(recall.detach()), float(language.detach())))
        if len(recent) == SAVE_EVERY or step + 1 == settings.steps:
            found, lost = (sum(column) / len(recent) for column in zip(*recent, strict=True))
            say(f"step {step + 1} of {settings.steps}  recall {found:.3f}  language {lost:+.4f}")
            recent = []
            if checkpoint is not None:
                with replacing(checkpoint) as temporary:
                    torch.save(
                        {
                            "settings": made_with,
                            "step": step + 1,
                            "memories": model.memories.state_dict(),
                            "optimiser": optimiser.state_dict(),
                        },
                        temporary,
                    )
    for memory in memories:
        memory.prices = {}
    progress(settings.steps, settings.steps, "steps")


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


def _losses(
    model: AdaptedModel, readings: Sequence[Reading], settings: FitSettings, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """The loss of the answers, and how much worse than without the memory other tokens are predicted."""
    said = [read_texts(model, index, readings) for index in range(len(model.memories))]

    def logits(text: int, places: Tensor) -> Tensor:
        found = without(text, places)
        for index, (y, gate) in enumerate(said):
            found = found + model.memory_logits(index, y[text : text + 1, :, places], gate[text : text + 1, places])[0]
        return found

    @torch.no_grad()
    def without(text: int, places: Tensor) -> Tensor:
        return head(model, readings[text].last.to(model.device)[places].float())

    recall, language = [], []
    for text, reading in enumerate(readings):
        ids = reading.ids.to(model.device)
        begin, end = min(reading.window, len(ids) // 2), len(ids) - 1
        if reading.answers:
            end = min(end, reading.answers[0].place - 1)
            for answer in reading.answers:
                places = torch.arange(answer.place - 1, answer.place - 1 + len(answer.wanted), device=model.device)
                recall.append(F.cross_entropy(logits(text, places), ids[places + 1]))
        if end > begin:
            at = torch.tensor(sorted(rng.choices(range(begin, end), k=settings.places)), device=model.device)
            before = F.cross_entropy(without(text, at), ids[at + 1])
            language.append(F.cross_entropy(logits(text, at), ids[at + 1]) - before)
    zero = said[0][0].sum() * 0
    of_answers = torch.stack(recall).mean() if recall else zero
    of_language = torch.stack(language).mean() if language else zero
    share = sum(bool(reading.answers) for reading in readings) / len(readings)
    return share * of_answers, of_language


def _schedule(step: int, steps: int) -> float:
    """Up over the first twentieth, or 20 steps if that is more, and down over the last third."""
    up, down = max(20, steps // 20), max(1, steps // 3)
    return min(1.0, (step + 1) / up) * min(1.0, (steps - step) / down)


def _plain(value: Any) -> Any:
    """A value as JSON would give it back."""
    return json.loads(json.dumps(value))
