"""What a frozen model makes of texts, recorded once: a memory is trained on it without running the model again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titans.adapters.model import AdaptedModel
from titans.files import replacing
from titans.tasks import Answer

STORED = torch.float16
LIMIT = 6e4  # the first tokens of a text may have states that float16 cannot hold


@dataclass(frozen=True)
class Reading:
    """A text, and what the model made of it with its memories off.

    Attributes:
        ids: (time,).
        states: hidden states by layer, (time, hidden_size) each, 0 for the embedding.
        last: (time, hidden_size), after the last layer, before the norm.
        answers: what the text asks, if anything.
        window: what attention saw.
    """

    ids: Tensor
    states: dict[int, Tensor]
    last: Tensor
    answers: tuple[Answer, ...] = ()
    window: int = 0

    def save(self, path: Path) -> None:
        """Writes it as one file, under a temporary name first."""
        tensors = {"ids": self.ids, "last": self.last} | {str(layer): x for layer, x in self.states.items()}
        words = {"answers": json.dumps([[a.place, list(a.wanted)] for a in self.answers]), "window": str(self.window)}
        with replacing(path) as temporary:
            save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, metadata=words)

    @classmethod
    def load(cls, path: Path) -> Reading:
        """The inverse of :meth:`save`."""
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                words = file.metadata()
            answers = tuple(Answer(place, tuple(wanted)) for place, wanted in json.loads(words["answers"]))
            ids, last = tensors.pop("ids"), tensors.pop("last")
            return cls(ids, {int(name): x for name, x in tensors.items()}, last, answers, int(words["window"]))
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is damaged: delete it, and it is recorded again") from error


@torch.no_grad()
def record(model: AdaptedModel, ids: Tensor, layers: Sequence[int], answers: Sequence[Answer] = ()) -> Reading:
    """Reads a text (time,) with the memories off, and keeps the states of some layers."""
    kept: dict[int | str, list[Tensor]] = {layer: [] for layer in layers} | {"last": []}
    hooks = [
        model.decoder.layers[layer].register_forward_pre_hook(_keeper(kept[layer]), with_kwargs=True)
        for layer in layers
    ]
    hooks.append(model.decoder.norm.register_forward_pre_hook(_keeper(kept["last"]), with_kwargs=True))
    try:
        model(ids.unsqueeze(0).to(model.device), use_memory=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    done = {name: torch.cat(parts, dim=1)[0].clamp(-LIMIT, LIMIT).to(STORED).cpu() for name, parts in kept.items()}
    last = done.pop("last")
    return Reading(ids, {int(layer): x for layer, x in done.items()}, last, tuple(answers), model.window)


def _keeper(kept: list[Tensor]) -> Any:
    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])

    return keep


@contextmanager
def window_of(model: AdaptedModel, window: int) -> Iterator[None]:
    """While open, the model has another window."""
    before, model.window = model.window, window
    try:
        yield
    finally:
        model.window = before


def head(model: AdaptedModel, last: Tensor) -> Tensor:
    """The logits of states after the last layer."""
    weight: Tensor = next(model.get_output_embeddings().parameters())
    logits: Tensor = model.get_output_embeddings()(model.decoder.norm(last.to(weight.dtype)))
    return logits.float()
