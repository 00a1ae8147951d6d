"""The model that a training config names."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from titans.models import TitansConfig, TitansForCausalLM
from titans.models.baselines import NAMES, SIZES, config_class, config_for, own_fields
from titans.models.configuration import VARIANTS
from titans.models.loading import changed, load_model
from titans.training.config import TrainConfig
from titans.words import nearest, sentence


def model_config(config: TrainConfig, vocab_size: int, eos_token_id: int | None) -> PreTrainedConfig:
    """The config of a new model: by name and size, or by name and all fields that differ from the defaults."""
    wanted = dict(config.model)
    name = wanted.pop("name", None)
    size = wanted.pop("size", None)
    if name not in NAMES:
        raise ValueError(f"model.name is {name!r}: {nearest(str(name), NAMES)}")
    if size is not None and size not in SIZES:
        raise ValueError(f"model.size is {size!r}: {nearest(str(size), SIZES)}")
    kind = config_class(name)
    known = [each.name for each in dataclasses.fields(kind)]
    for key in map(str, wanted):
        if key not in known:
            raise ValueError(f"model.{key} is not a field of {name}: {nearest(key, known)}")
    given = wanted.get("vocab_size")
    if given is None:
        wanted["vocab_size"] = vocab_size
    elif isinstance(given, int) and given < vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size:,} tokens and model.vocab_size is {wanted['vocab_size']:,}; "
            "expected a model with at least as many"
        )
    # the tokenizer's end of text, as generation wants to know it
    special = {"bos_token_id": eos_token_id, "eos_token_id": eos_token_id, "pad_token_id": eos_token_id}
    wanted = special | wanted
    if kind is TitansConfig:
        wanted.setdefault("memory_first_order", config.outer_gradients == "first")
    try:
        if size is not None:
            return config_for(name, size, **wanted)
        return kind(**own_fields(name, wanted, TitansConfig.memory_heads)) if kind is TitansConfig else kind(**wanted)
    except ValueError:
        raise
    except Exception as error:  # each config of transformers has its own way to refuse a value
        raise ValueError(f"model is not a {name}: {sentence(error)[:300]}") from None


def make_model(config: TrainConfig, vocab_size: int, eos_token_id: int | None) -> Any:
    """The model to train: a new one, random by ``seed``, or one that was trained before."""
    pretrained = config.model.get("pretrained")
    if pretrained is None:
        made = model_config(config, vocab_size, eos_token_id)
        if config.carry and not isinstance(made, TitansConfig):
            raise ValueError(
                f"carry is {config.carry} and {config.model['name']} has no memory to carry; expected carry 0, "
                f"or one of {', '.join(VARIANTS)}"
            )
        if config.separate_documents and not isinstance(made, TitansConfig):
            raise ValueError(
                f"separate_documents is true and {config.model['name']} is not a Titans model; expected false"
            )
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(made)
    try:
        model: Any = load_model(str(pretrained), "cpu", torch.float32)[0]
        if fields := {name: value for name, value in config.model.items() if name != "pretrained"}:
            torch.manual_seed(config.seed)
            model = changed(model, fields, new_parameters=True)
    except ValueError as error:
        raise ValueError(f"model.pretrained is {pretrained!r}: {error}") from None
    if model.config.vocab_size < vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size:,} tokens and {pretrained} knows {model.config.vocab_size:,}; "
            "expected a model with at least as many"
        )
    if config.carry and not isinstance(model, TitansForCausalLM):
        raise ValueError(f"carry is {config.carry} and {pretrained} has no memory to carry; expected carry 0")
    if config.separate_documents and not isinstance(model, TitansForCausalLM):
        raise ValueError(f"separate_documents is true and {pretrained} is not a Titans model; expected false")
    if isinstance(model, TitansForCausalLM):
        first_order = config.outer_gradients == "first"
        model.config.memory_first_order = first_order
        for module in model.modules():
            if hasattr(module, "first_order"):
                module.first_order = first_order
    return model


def shard(model: torch.nn.Module, device: torch.device) -> None:
    """Shards a model over all processes, in place: FSDP2, with one unit per layer and one for the rest."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def layers_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The blocks of a language model: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)
