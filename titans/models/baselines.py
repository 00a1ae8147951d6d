"""Any of our models and of those they are compared with, at the same number of parameters: ``build(name, size)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from titans.models.configuration import VARIANTS, TitansConfig
from titans.models.presets import PRESETS, apply_preset


@dataclass(frozen=True)
class Size:
    """What the models of one size have in common.

    Attributes:
        parameters: how many, embeddings included; the width of the feed-forward layers is chosen to come close.
        hidden_size, num_attention_heads, memory_heads, vocab_size: as in :class:`titans.TitansConfig`.
        segment_size, window_size, num_persistent_tokens: the same.
        layers: of a model with memory and attention.
        plain_layers: of a model with one of them.
    """

    parameters: int
    hidden_size: int
    num_attention_heads: int
    memory_heads: int
    layers: int
    plain_layers: int
    vocab_size: int = 32000
    segment_size: int = 1024
    window_size: int = 2048
    num_persistent_tokens: int = 32


SIZES = {
    "1m": Size(1_000_000, 96, 4, 2, 5, 6, 512, 64, 128, 4),
    "1.5m": Size(1_500_000, 128, 4, 4, 3, 4, 2048, 64, 64, 4),
    "10m": Size(10_000_000, 256, 4, 4, 6, 8, 8192, 256, 512, 16),
    "170m": Size(170_000_000, 768, 12, 6, 14, 18),
    "340m": Size(340_000_000, 1024, 16, 8, 17, 22),
    "400m": Size(400_000_000, 1024, 16, 8, 20, 26),
    "760m": Size(760_000_000, 1536, 16, 12, 17, 22),
}
RATE = 4e-3  # the learning rate of small models for which none was searched


@dataclass(frozen=True)
class Best:
    """The best of what was tried for a model at a size.

    Attributes:
        shape: fields of its config, one choice: who changes one of them has none of it.
        rate: the learning rate in that shape.
        options: other fields of its config, in any shape.
    """

    shape: dict[str, Any] = field(default_factory=dict)
    rate: float = RATE
    options: dict[str, Any] = field(default_factory=dict)


_LINEAR: dict[str, Any] = {"hidden_size": 192, "memory_depth": 1, "memory_heads": 4, "memory_head_dim": 80}
_SKIP = {"token_skip": True}  # measured with LMM and MAL (docs/log.md), and given to Gated DeltaNet with the LMM
_PLAIN = _SKIP | {"memory_momentum": False}  # momentum costs time and gains nothing there (docs/log.md)
_SUM = _SKIP | {"gate": "sum"}  # what attention and memory say is added: measured with MAG (docs/log.md)
# What `titans experiment shapes` found (docs/results/shapes.md). At other sizes no search was made: there all models
# have the width and the heads of their size.
BEST: dict[str, dict[str, Best]] = {
    "1.5m": {
        "lmm": Best(_LINEAR | {"num_hidden_layers": 3}, 8e-3, _PLAIN),
        "mac": Best(_LINEAR | {"num_hidden_layers": 2}),
        "mag": Best(_LINEAR | {"num_hidden_layers": 2}, 8e-3, _SUM),
        "mal": Best(_LINEAR | {"num_hidden_layers": 3, "hidden_size": 160}, options=_SKIP),
        "gated-deltanet": Best(_LINEAR | {"num_hidden_layers": 3}, 8e-3, _SKIP),
        "mamba2": Best({"hidden_size": 192, "num_heads": 6, "head_dim": 64}, 8e-3),
        "sliding-window": Best({"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 4}),
        "transformer++": Best({"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 8}),
    },
}
# The same for bytes, whose embeddings leave more parameters to the layers. LMM's rate was chosen again with token_skip.
SMALL_VOCABULARY = 512
BEST_OF_BYTES: dict[str, dict[str, Best]] = {
    "1.5m": {
        "lmm": Best(_LINEAR | {"num_hidden_layers": 4}, 4e-3, _SKIP),
        "mag": Best(_LINEAR | {"num_hidden_layers": 4, "hidden_size": 160, "memory_head_dim": 64}, 4e-3, _SUM),
        "mal": Best(_LINEAR | {"num_hidden_layers": 6, "hidden_size": 128, "memory_head_dim": 64}),  # without _SKIP
        "gated-deltanet": Best(_LINEAR | {"num_hidden_layers": 4}, 8e-3, _SKIP),
        "mamba2": Best({"hidden_size": 192, "num_heads": 6, "head_dim": 64}),
        "sliding-window": Best({"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 4}, 8e-3),
    },
}
OTHERS: dict[str, type[PreTrainedConfig]] = {
    "sliding-window": TitansConfig,
    "transformer++": LlamaConfig,
    "mamba2": Mamba2Config,
    "gated-deltanet-hybrid": Qwen3NextConfig,
}
NAMES = (*VARIANTS, *PRESETS, *OTHERS)
STEP = 8  # widths are multiples of this
LONGEST = 1 << 20  # positions that the transformers baselines are told of
TOLERANCE = 0.05  # of the number of parameters


def config_class(name: str) -> type[PreTrainedConfig]:
    """The class of the config of a model that is known by ``name``."""
    return OTHERS.get(name, TitansConfig)


def own_fields(name: str, given: dict[str, Any], memory_heads: int) -> dict[str, Any]:
    """What the name of a model of ours says of its config, and ``given`` over it."""
    if name in PRESETS:
        return apply_preset(name, given, memory_heads)
    if name == "sliding-window":
        return {"variant": "mag", "use_memory": False, "num_persistent_tokens": 0} | given
    return {"variant": name} | given


def best(name: str, size: str, vocab_size: int | None = None) -> Best:
    """The best that is known for a model; linear presets have the shape and the rate of Gated DeltaNet, their kin."""
    kin = "gated-deltanet" if PRESETS.get(name, {}).get("memory_depth") == 1 and not name.startswith("ttt") else name
    found = BEST.get(size, {})
    if vocab_size is not None and vocab_size <= SMALL_VOCABULARY:
        found = found | BEST_OF_BYTES.get(size, {})
    return found.get(name, found.get(kin, Best()))


def config_for(name: str, size: str, **overrides: Any) -> PreTrainedConfig:
    """The description of the model ``name`` (one of ``NAMES``) at ``size`` (one of ``SIZES``).

    It has the :func:`best` shape that is known. ``overrides`` are fields of its config, in place of that shape if they
    change it; the width of the feed-forward layers then follows, unless it is among them.
    A ``ValueError`` says so where no width meets the size.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(NAMES)}")
    if size not in SIZES:
        raise ValueError(f"size is {size!r}; expected one of {', '.join(SIZES)}")
    own = SIZES[size]
    known = best(name, size, overrides.get("vocab_size", own.vocab_size))
    shape, overrides = known.shape, known.options | overrides
    if all(overrides.get(each, value) == value for each, value in shape.items()):  # a shape is one choice
        overrides = shape | overrides
    common: dict[str, Any] = {
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "num_hidden_layers": own.layers if name in ("mac", "mag", "mal") else own.plain_layers,
        "tie_word_embeddings": True,
    }
    head_dim = own.hidden_size // own.num_attention_heads
    if name == "mamba2":
        config = _mamba2(own, common, overrides)
        if "state_size" not in overrides:
            _check_size(config, name, size, "state_size")
        return config
    if name == "transformer++":
        common |= {"num_attention_heads": own.num_attention_heads, "max_position_embeddings": LONGEST}
    elif name == "gated-deltanet-hybrid":
        common |= {
            "num_attention_heads": own.num_attention_heads,
            "num_key_value_heads": own.num_attention_heads,
            "head_dim": head_dim,
            "linear_num_key_heads": own.num_attention_heads,
            "linear_num_value_heads": own.num_attention_heads,
            "linear_key_head_dim": head_dim,
            "linear_value_head_dim": head_dim,
            "num_experts": 0,
            "max_position_embeddings": LONGEST,
        }
    else:
        common |= {
            name: getattr(own, name)
            for name in ("num_attention_heads", "memory_heads", "segment_size", "window_size", "num_persistent_tokens")
        }
        common |= own_fields(name, overrides, own.memory_heads)
    common |= overrides
    make = config_class(name)
    if "intermediate_size" not in overrides:
        common["intermediate_size"] = fit(
            lambda n: count_parameters(make(**common | {"intermediate_size": n})), own.parameters
        )
    config = make(**common)
    if "intermediate_size" not in overrides:
        _check_size(config, name, size, "intermediate_size")
    return config


def _check_size(config: PreTrainedConfig, name: str, size: str, field: str) -> None:
    count, target = count_parameters(config), SIZES[size].parameters
    if abs(count / target - 1) > TOLERANCE:
        raise ValueError(
            f"{name} has {count:,} parameters with these fields, whatever its {field}; "
            f"expected {target:,}, the size {size}, or {field} among the fields"
        )


def build(name: str, size: str, **overrides: Any) -> PreTrainedModel:
    """A new model: see :func:`config_for`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_for(name, size, **overrides))
    return model


def count_parameters(config: PreTrainedConfig) -> int:
    """How many parameters the language model of a config has, tied ones counted once; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def state_bytes(model: PreTrainedModel, length: int) -> int:
    """What ``model`` keeps of one sequence of ``length`` tokens in order to go on.

    The model reads two tokens and three; what grows between the two grows on up to the window, or without end where
    there is none. MAC is the same after every segment, so that it reads one of them, or grows in the open one.
    """
    if length < 1:
        raise ValueError(f"length is {length}; expected a number of tokens")
    config = model.config
    slots, closed = length, False
    if isinstance(config, TitansConfig):
        if config.variant == "mac":
            closed = length % config.segment_size == 0
            slots = config.segment_size if closed else length % config.segment_size
        else:
            slots = min(length, max(1, config.window_size - 1))
    if closed or slots <= 3:
        return _cache_bytes(model, slots)
    two, three = (_cache_bytes(model, count) for count in (2, 3))
    return two + (three - two) * (slots - 2)


def _cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    was_training = model.training
    output = model.eval()(torch.zeros(1, tokens, dtype=torch.int64, device=model.device), use_cache=True)
    model.train(was_training)
    cache = output.past_key_values if "past_key_values" in output else output.cache_params
    tensors = {x.data_ptr(): x for x in _tensors([vars(layer) for layer in cache.layers])}
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def fit(count: Callable[[int], int], target: int, step: int = STEP) -> int:
    """The multiple of ``step`` at which ``count``, a linear function, comes closest to ``target``."""
    low, high = count(step), count(2 * step)
    return step * max(1, 1 + round((target - low) / (high - low)))


def _mamba2(own: Size, common: dict[str, Any], overrides: dict[str, Any]) -> PreTrainedConfig:
    """Mamba2 has no feed-forward layers: it takes as many layers as fit, and a state that makes up for the rest."""
    head_dim = own.hidden_size // own.num_attention_heads
    common |= {"head_dim": head_dim, "num_heads": 2 * own.num_attention_heads, "n_groups": 1, "initializer_range": 0.02}
    common |= {"chunk_size": 64}  # a tile of its scan, the same function: on a CPU larger ones are much slower
    common |= overrides

    def count(field: str) -> Callable[[int], int]:
        return lambda n: count_parameters(Mamba2Config(**common | {field: n}))

    if "num_hidden_layers" not in overrides:
        common["num_hidden_layers"] = fit(count("num_hidden_layers"), own.parameters, step=1)
    if "state_size" not in overrides:
        common["state_size"] = fit(count("state_size"), own.parameters)
    return Mamba2Config(**common)
