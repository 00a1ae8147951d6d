"""Adapters on disk: memories and low-rank updates, with the model that they belong to by name and fingerprint."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from titans.adapters.lora import WRAPPED, load_lora
from titans.adapters.model import AdaptedModel, adapt
from titans.files import NOT_PACKAGED, packaged_model, replacing, write_json
from titans.models.loading import choose_device, load_model, quiet
from titans.words import sentence

SETTINGS, WEIGHTS, LORA = "adapter.json", "adapter.safetensors", "lora.safetensors"
FORMAT = "titans.adapter"
VERSION, VERSION_WITH_LORA = 2, 3
FIELDS = ("backbone", "fingerprint", "window", "sinks", "taps", "inject", "memory", "notes")
LOCAL = "local"  # the chat model that comes as a package
SAMPLED = 64  # numbers of each tensor that the fingerprint looks at


def fingerprint(model: PreTrainedModel, updates: Collection[str] = ()) -> str:
    """What tells the weights of a model from those of any other: a digest of some numbers of each tensor.

    Args:
        updates: names of the low-rank updates that it was given here, which are not looked at.
    """
    found = hashlib.blake2b(digest_size=16)
    weights = model.state_dict()
    if updates:
        weights = {name.replace(WRAPPED, "."): x for name, x in weights.items() if name not in updates}
    for name, weight in sorted(weights.items()):
        some = weight.detach().flatten()[:: max(1, weight.numel() // SAMPLED)][:SAMPLED]
        found.update(f"{name} {tuple(weight.shape)}".encode())
        found.update(some.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return found.hexdigest()


def load_backbone(name: str, device: torch.device | str = "auto") -> tuple[PreTrainedModel, Any]:
    """A causal model and its tokenizer.

    Args:
        name: a folder, the name of a model on the hub, a GGUF file, or ``local`` for SmolLM2-135M, which is a package.
    """
    if name == LOCAL or name.endswith(".gguf"):
        file = packaged_model() if name == LOCAL else Path(name)
        if file is None:
            raise ValueError(NOT_PACKAGED)
        model, tokenizer = _load_gguf(file, choose_device(device))
    else:
        model, tokenizer = load_model(name, device)
        if tokenizer is None:
            raise ValueError(f"{name} has no tokenizer; expected a model that was saved with one")
    model.config._name_or_path = name
    return model, tokenizer


def _load_gguf(file: Path, device: torch.device) -> tuple[PreTrainedModel, Any]:
    if not file.is_file():
        raise ValueError(f"{file} is not there; expected a GGUF file")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError("a GGUF file needs the package gguf: pip install 'titan-memory[adapt]'") from error
    with quiet(), redirect_stderr(io.StringIO()):  # which has a bar of its own
        try:
            loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except Exception as error:  # a damaged file raises whatever its reader raises
            raise ValueError(f"{file} cannot be loaded: {sentence(error)}") from error
        # What comes from a GGUF file counts as quantised, and refuses much: its weights go into a fresh model.
        config = type(loaded.config).from_dict(
            {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
        )
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
    model.to(device).eval()
    return model, tokenizer


def save_adapter(model: AdaptedModel, folder: str | Path) -> None:
    """Writes the memories, and the low-rank updates if there are any, with where the model comes from and the notes."""
    if not model.source:
        raise ValueError("source is empty; expected where the model comes from: a folder, a name on the hub or a file")
    source = str(Path(model.source).resolve()) if Path(model.source).exists() else model.source
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {WEIGHTS: model.memories.state_dict()}
    if model.lora is not None:
        weights[LORA] = model.updates
    for file, named in weights.items():
        with replacing(folder / file) as temporary:
            tensors = {name: x.detach().cpu().contiguous() for name, x in named.items()}
            save_file(tensors, temporary, metadata={"format": FORMAT})
    write_json(
        folder / SETTINGS,
        {
            "format": FORMAT, "version": VERSION if model.lora is None else VERSION_WITH_LORA, "backbone": source,
            "fingerprint": fingerprint(model.backbone, model.updates), "window": model.window,
            "sinks": model.sinks, "taps": model.taps, "inject": model.inject, "lora": model.lora,
            "memory": model.settings, "notes": model.notes,
        },
    )  # fmt: skip
    if model.lora is None:
        (folder / LORA).unlink(missing_ok=True)


def read_settings(folder: str | Path) -> dict[str, Any]:
    """What :func:`save_adapter` wrote beside the weights."""
    path = Path(folder) / SETTINGS
    if not path.is_file():
        raise ValueError(f"{path} is not there; expected a folder written by titans adapt")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {sentence(error)}") from error
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        raise ValueError(f"{path} is not of an adapter; expected a folder written by titans adapt")
    if settings.get("version") not in (VERSION, VERSION_WITH_LORA):
        raise ValueError(
            f"{path} has version {settings.get('version')}; expected {VERSION}, or {VERSION_WITH_LORA} with "
            "low-rank updates"
        )
    missing = [name for name in FIELDS if name not in settings]
    if missing:
        raise ValueError(f"{path} is damaged: it lacks {missing[0]}")
    return settings


def load_adapter(
    folder: str | Path, model: PreTrainedModel | None = None, device: torch.device | str = "auto"
) -> tuple[AdaptedModel, Any]:
    """An adapted model and its tokenizer, None if ``model`` was given.

    Args:
        folder: written by :func:`save_adapter`.
        model: the one that the adapter belongs to; None: it is loaded from where it was.
    """
    settings = read_settings(folder)
    tokenizer = None
    if model is None:
        model, tokenizer = load_backbone(settings["backbone"], device)
    if fingerprint(model) != settings["fingerprint"]:
        raise ValueError(
            f"the adapter in {folder} belongs to other weights than those of this model; expected "
            f"{settings['backbone']} as it was"
        )
    try:
        places = {name: settings[name] for name in ("taps", "inject", "window", "sinks")}
        made = adapt(model, **places, lora=settings.get("lora"), **settings["memory"])
        made.memories.load_state_dict(load_file(Path(folder) / WEIGHTS))
        if made.lora is not None:
            load_lora(made.backbone, load_file(Path(folder) / LORA))
    except (SafetensorError, OSError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the adapter in {folder} is damaged: {sentence(error)}") from error
    made.source, made.notes = settings["backbone"], settings["notes"]
    return made.eval(), tokenizer
