"""The memory as other models: the settings under which it is linear attention, RetNet, GLA, DeltaNet, or TTT.

Each preset is the rule of :mod:`titans.ops.presets` in the surroundings of our LMM block: short convolutions, SiLU, an
output norm and an output gate, and a start of the memory that is learned like the other weights (from zero for linear
memory). So these baselines differ from our models in the memory's rule, and in nothing else.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "variant": "lmm",
    "num_persistent_tokens": 0,
    "memory_depth": 1,
    "memory_momentum": False,
    "memory_forget_to": "zero",
    "memory_bounded": False,
    "memory_gate_cutoff": 0.0,
}
_ADDITIVE = _COMMON | {  # M_t = decay_t M_{t-1} + v_t k_t^T
    "memory_mode": "chunked",
    "memory_chunk_size": 64,
    "memory_loss": "dot",
    "memory_fixed_theta": 1.0,
    "memory_unit_keys": False,
}
_DELTA = _COMMON | {"memory_theta_max": 0.5}  # beta = 2 theta, in (0, 1)
_TTT = _COMMON | {  # f(x) = x + LayerNorm(MLP(x)), gradients at the start of each mini-batch of 16
    "memory_mode": "chunked",
    "memory_chunk_size": 16,
    "memory_forgetting": False,
    "memory_activation": "gelu_tanh",
    "memory_bias": True,
    "memory_residual": True,
    "memory_layer_norm": True,
    "memory_theta_max": 0.1,
}
PRESETS: dict[str, dict[str, Any]] = {
    "linear-attention": _ADDITIVE | {"memory_forgetting": False},
    "retnet": _ADDITIVE,
    "gla": _ADDITIVE,
    "deltanet": _DELTA | {"memory_forgetting": False},
    "gated-deltanet": _DELTA | {"memory_decay_first": True},
    "ttt-linear": _TTT,
    "ttt-mlp": _TTT | {"memory_depth": 2, "memory_expansion": 4.0},
}


def apply_preset(name: str, fields: dict[str, Any], memory_heads: int) -> dict[str, Any]:
    """``fields`` over what a preset sets, under its name only if none of them changes the preset's memory."""
    own = preset_fields(name, fields.get("memory_heads", memory_heads))
    kept = all(fields[field] == own[field] for field in own.keys() & fields.keys() if field.startswith("memory_"))
    return own | fields | ({} if kept else {"preset": None})


def check_preset(name: str, fields: dict[str, Any]) -> None:
    """Raises a ``ValueError`` if the memory that all fields of a config describe is not that of the preset."""
    for field, expected in preset_fields(name, fields["memory_heads"]).items():
        if field.startswith("memory_") and fields[field] != expected:
            raise ValueError(
                f"preset is {name!r} and {field} is {fields[field]!r}; "
                f"expected {expected!r}, or TitansConfig.from_preset, which sets what belongs to a preset"
            )


def preset_fields(name: str, memory_heads: int) -> dict[str, Any]:
    """What a preset sets of :class:`titans.TitansConfig`."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(PRESETS)}")
    fields = PRESETS[name] | {"preset": name}
    if name == "retnet" and isinstance(memory_heads, int):  # gamma = 1 - 2^(-5 - head)
        fields["memory_fixed_alpha"] = [2.0 ** (-5 - head) for head in range(memory_heads)]
    return fields
