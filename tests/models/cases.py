"""What the tests of the models share: tiny models of every kind, all of whose parameters matter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from titans import TitansConfig, TitansForCausalLM
from titans.models import PRESETS

SEGMENT = WINDOW = 8
CHUNK = 4
VOCAB = 31
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "segment_size": SEGMENT,
    "window_size": WINDOW,
    "num_persistent_tokens": 3,
    "memory_heads": 2,
}
CHUNKED = {"memory_mode": "chunked", "memory_chunk_size": CHUNK}
VARIANTS: dict[str, dict[str, Any]] = {name: {"variant": name} for name in ("lmm", "mac", "mag", "mal")}
SWITCHES: dict[str, dict[str, Any]] = {
    "lmm, token skip": {"variant": "lmm", "token_skip": True},
    "mac, chunked": {"variant": "mac", **CHUNKED},
    "mag, chunked, linear": {"variant": "mag", "memory_depth": 1, **CHUNKED},
    "mal, linear, untied, plain, token skip": {
        "variant": "mal", "memory_depth": 1, "tie_word_embeddings": False, "ffn": "plain", "qk_norm": False,
        "token_skip": True,
    },
    "mac, no memory": {"variant": "mac", "use_memory": False},
    "mac, no attention, token skip": {"variant": "mac", "use_attention": False, "token_skip": True},
    "mac, no persistent": {"variant": "mac", "num_persistent_tokens": 0, "gate": "silu"},
    "mac, no convolution, token skip": {
        "variant": "mac", "memory_conv_kernel": 0, "memory_gates": "constant", "token_skip": True,
    },
    "mag, no memory": {"variant": "mag", "use_memory": False, "gate": "sum"},
    "mag, attention above": {"variant": "mag", "attention_layers": [1]},
    "mag, multiply, token skip": {"variant": "mag", "gate": "multiply", "token_skip": True},
    "mal, no memory": {"variant": "mal", "use_memory": False},
    "mal, no attention": {"variant": "mal", "use_attention": False},
}  # fmt: skip
KINDS = [*VARIANTS, *PRESETS, *SWITCHES]


def config(kind: str, **fields: Any) -> TitansConfig:
    """The tiny config of a variant, a preset, or a variant with something switched."""
    if kind in PRESETS:
        return TitansConfig.from_preset(kind, **{**TINY, "num_persistent_tokens": 0, **fields})
    return TitansConfig(**{**TINY, **(VARIANTS | SWITCHES)[kind], **fields})


def model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> TitansForCausalLM:
    """A tiny model whose parameters have all left their initial values, and whose gates are open."""
    torch.manual_seed(seed)
    made = TitansForCausalLM(config(kind, **fields))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return made.to(dtype).eval()


def tokens(time: int, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


def in_pieces(made: TitansForCausalLM, ids: Tensor, cuts: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """Logits and cache of ids, read in one call for every piece."""
    cache = None
    logits = []
    for start, stop in pairwise([0, *cuts, ids.shape[1]]):
        part = None if mask is None else mask[:, :stop]
        output = made(ids[:, start:stop], attention_mask=part, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
        cache = output.past_key_values
    return torch.cat(logits, dim=1), cache
