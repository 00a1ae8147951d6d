"""Low-rank updates of the attention of a frozen model (LoRA, arXiv 2106.09685), by the library peft."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ADAPTER = "titans"  # its name among the layers of peft
PROJECTIONS = r".*\.self_attn\.[qkvo]_proj"
SCALE = 2  # of an update
WRAPPED = ".base_layer."  # what peft puts into the names of the weights that it updates


def check_lora(model: nn.Module, rank: int) -> None:
    """Raises a ``ValueError`` unless updates of that rank can be added to a model."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"lora is {rank!r}; expected a whole number of at least 1, the rank of the updates")
    if any(WRAPPED in name for name, _ in model.named_parameters()):
        raise ValueError("model has layers of peft already; expected one without, or with them merged into its weights")
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError("lora needs the package peft: pip install 'titan-memory[adapt]'") from error


def add_lora(decoder: nn.Module, rank: int) -> None:
    """Adds an update, zero at first, to the projections of queries, keys, values and outputs of every layer.

    The updates can be trained, and are the same ones every time; all else of the decoder is frozen. Whether they can be
    added is for :func:`check_lora` to say.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=PROJECTIONS)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # where peft draws, before it moves what it drew
        torch.default_generator.manual_seed(0)
        inject_adapter_in_model(config, decoder, ADAPTER)
    for weight in lora_weights(decoder).values():
        if weight.dtype in (torch.float16, torch.bfloat16):  # too coarse for small steps
            weight.data = weight.data.float()


def lora_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """What :func:`add_lora` added to a model, by name, if it was called."""
    return {name: weight for name, weight in model.named_parameters() if f".{ADAPTER}." in name}


def load_lora(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Puts weights into what :func:`add_lora` added; a ``RuntimeError`` says which do not fit."""
    odd = sorted(lora_weights(model).keys() ^ weights.keys())
    if odd:
        raise RuntimeError(f"{odd[0]} is among the low-rank updates of the model or of the file, and not of both")
    model.load_state_dict(weights, strict=False)
