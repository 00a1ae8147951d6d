"""Load a saved language model and its tokenizer from a folder or the Hugging Face hub, or say why not."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from titans.files import may_be_on_hub, not_there
from titans.words import nearest, sentence

BYTES = (256, 257)  # vocabularies of models that read bytes, without and with a token between texts
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
# what is fetched of a model on the hub; copies of the weights for other programs are not
HUB_FILES, NOT_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt"), ("*/*", "consolidated*")


def choose_device(name: torch.device | str = "auto") -> torch.device:
    """The device of that name; ``auto`` is CUDA if there is any, else MPS, else the CPU."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in there if there[kind])
    if there.get(str(name)):
        return torch.device(name)  # without a tensor on it: of several processes, each may have a GPU of its own
    try:
        return torch.empty(0, device=name).device
    except Exception as error:  # each kind of device has its own way to be missing
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"device is {str(name)!r}, which cannot be used ({reason}); expected auto, cpu, cuda, cuda:N or mps"
        ) from error


def peak_memory(device: torch.device) -> float:
    """The most bytes that this process held at any time, of the GPU's memory or of the machine's; NaN if not known."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)


def load_model(
    name: str, device: torch.device | str = "auto", dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, Any]:
    """A language model, ours or one of transformers, ready to run, and its tokenizer; None: it was saved without one.

    Args:
        name: a folder written by ``save_pretrained``, or the name of a model on the hub.
        device: see :func:`choose_device`.
        dtype: the type of the weights; None: as they were saved.
    """
    device = choose_device(device)
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"{name} is a file; expected a folder written by save_pretrained")
    if not folder.is_dir():
        folder = _fetch(name)
    read_config(folder / "config.json")
    return load_folder(folder, device, dtype)


def load_folder(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, Any]:
    """As :func:`load_model`, from a folder that is known to have a config."""
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if type(config) not in AutoModelForCausalLM._model_mapping:
                raise ValueError(f"a {config.model_type} model does not go on with a text")
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
            )
            if info["missing_keys"]:
                raise ValueError(f"its weights lack {sorted(info['missing_keys'])[0]}")
            model = model.to(device).eval()
        except Exception as error:  # a damaged file raises whatever its reader raises
            raise ValueError(f"{folder} cannot be loaded: {sentence(error)}") from error
        return model, _load_tokenizer(folder)


def changed(model: PreTrainedModel, fields: dict[str, Any], new_parameters: bool = False) -> PreTrainedModel:
    """The same weights under a config with other fields.

    Args:
        new_parameters: the fields may ask for parameters that the model does not have, which start as in a new model.
    """
    config = changed_config(model.config.to_dict(), fields)
    try:
        other = AutoModelForCausalLM.from_config(config)
        weights = model.state_dict()
        other.load_state_dict((other.state_dict() if new_parameters else {}) | weights)
    except Exception as error:  # each module has its own way to refuse a value
        raise ValueError(f"the model cannot be changed to {fields}: {sentence(error)}") from None
    return other.to(model.device, model.dtype).eval()


def changed_config(known: dict[str, Any], fields: dict[str, Any]) -> PreTrainedConfig:
    """A model's config, given by its fields, with some of them changed; a ``ValueError`` says which one cannot be."""
    try:
        every = AutoConfig.for_model(**known).to_dict()  # a file leaves out those that are at their defaults
    except Exception as error:  # each config has its own way to refuse a value
        raise ValueError(f"the config of the model cannot be read: {sentence(error)}") from None
    for name in fields:
        if name not in every:
            raise ValueError(f"{name} is not a field of the model's config: {nearest(name, every)}")
    try:
        return AutoConfig.for_model(**(known | fields))
    except Exception as error:  # each config has its own way to refuse a value
        raise ValueError(f"the model cannot be changed to {fields}: {sentence(error)}") from None


def bytes_for(model: PreTrainedModel, name: str) -> Any:
    """The tokenizer of a model that was saved without one: it reads bytes, if its vocabulary is of that size."""
    size = model.get_input_embeddings().num_embeddings
    if size not in BYTES:
        sizes = " or ".join(map(str, BYTES))
        raise ValueError(f"{name} has no tokenizer and a vocabulary of {size}; expected {sizes}, to read bytes")
    from titans.models.tokenizer import byte_tokenizer

    return byte_tokenizer()


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config file."""
    if not path.is_file():
        raise ValueError(f"{path} is not there; expected a folder written by save_pretrained")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {sentence(error)}") from error
    return dict(fields) if isinstance(fields, dict) else {}


def _load_tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {sentence(error)}") from error


def _fetch(name: str) -> Path:
    """The folder that a model on the hub is kept in, after it has been downloaded if need be."""
    from huggingface_hub import snapshot_download

    expected = "expected a folder written by save_pretrained or the name of a model on the Hugging Face hub"
    if not may_be_on_hub(name):
        raise ValueError(f"{not_there(name)}; {expected}")
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(NOT_HUB_FILES)))
    except Exception as error:  # no such model, no network, no room: each its own class
        raise ValueError(
            f"{not_there(name)}, and was not found on the hub ({type(error).__name__}); {expected}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """While open, transformers shows no progress bars and no warnings: what matters comes as an error."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
