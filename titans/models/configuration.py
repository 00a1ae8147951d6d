"""``TitansConfig``: every number and switch of a Titans model, checked where it is made."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

from titans.models.presets import PRESETS, apply_preset, check_preset

VARIANTS = ("lmm", "mac", "mag", "mal")
FFNS = ("swiglu", "plain")
GATES = ("sigmoid", "silu", "multiply", "sum", "memory")
TOKENS = ("patches", "variates")
PREDICTION_LOSSES = ("mse", "mae", "huber", "quantile")
POOLINGS = ("mean", "last")
# More tokens than any memory holds: where lm-eval tries how many such texts fit (batch_size=auto), it is told at once
# that none do, and takes one text at a time; and their size in bytes still fits into 64 bits.
NO_LIMIT = 2**48
# the file that a saved model brings along, and what the Auto classes find in it
LOADER = Path(__file__).with_name("titans_model.py")
AUTO_MAPS = {
    "titans": {
        "AutoConfig": "TitansConfig",
        "AutoModel": "TitansModel",
        "AutoModelForCausalLM": "TitansForCausalLM",
        "AutoModelForSequenceClassification": "TitansForSequenceClassification",
    },
    "titans_prediction": {
        "AutoConfig": "TitansPredictionConfig",
        "AutoModel": "TitansForPrediction",
        "AutoModelForTimeSeriesPrediction": "TitansForPrediction",
    },
}
DEFAULT_GATES = {"mac": "memory"}  # the attention's output reaches the stream anyway
# the least that whole numbers may be
LEAST = {
    "vocab_size": 1, "hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1,
    "segment_size": 1, "window_size": 1, "num_persistent_tokens": 0, "memory_heads": 1, "memory_head_dim": 1,
    "memory_depth": 1, "memory_chunk_size": 1, "memory_sweeps": 0, "memory_conv_kernel": 0,
    "memory_local_heads": 0, "memory_checkpoint_every": 1, "memory_cache_segment_size": 1, "memory_cache_top_k": 1,
    "memory_cache_max_states": 1, "max_position_embeddings": 1,
}  # fmt: skip
# the most that positive numbers may be
MOST = {
    "memory_expansion": None, "memory_theta_max": 1, "memory_fixed_theta": 1, "memory_max_norm": None,
    "rms_norm_eps": None, "initializer_range": None,
}  # fmt: skip


class TitansConfig(PreTrainedConfig):
    """The description of a Titans model.

    Args:
        variant: ``"lmm"``, memory alone; ``"mac"``, as a context; ``"mag"``, as a gate; ``"mal"``, as a layer.
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: as usual.
        intermediate_size: hidden width of the feed-forward layers; None: 8/3 hidden_size for SwiGLU, 4 for plain.
        ffn: ``"swiglu"`` or ``"plain"``.
        segment_size: MAC: tokens of a segment, C in the paper.
        window_size: MAG, MAL: tokens that a token's attention sees, itself included.
        num_persistent_tokens: learnable tokens of each block (Eq. 19); 0: none.
        token_skip: whether memories see the tokens' embeddings beside the stream, weighed by channel, wherever
            something was added to it before; what earlier blocks have added soon outweighs them.
        use_memory, use_attention: switch either off.
        attention_layers: MAC, MAG, MAL: the layers that have attention, counted from 0; the others have their memory
            alone (in MAC without persistent tokens). None: all.
        gate: MAC, MAG: how attention y and memory m, both normalised, are combined: ``"sigmoid"``, y sigmoid(m), the
            default of MAG; ``"memory"``, m sigmoid(y), that of MAC; ``"silu"``, ``"multiply"`` or ``"sum"``. None: the
            default.
        qk_norm: RMSNorm on the attention's queries and keys.
        pooling: what a classifier looks at: ``"mean"``, all tokens alike, or ``"last"``, the last one.
        preset: the name of the preset whose memory this is, see :meth:`from_preset`; a label that must be true.
        memory_*: the arguments of :class:`titans.NeuralMemory` with the same names.
        rms_norm_eps: of the last norm.
        initializer_range: standard deviation of the embeddings at the start.
        max_position_embeddings: tokens of a text that other programs, such as lm-eval, may give the model before they
            cut it; the model itself has no limit.
    """

    model_type: ClassVar[str] = "titans"
    least_vocabulary: ClassVar[int] = 1
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    variant: str = "mac"
    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    ffn: str = "swiglu"
    segment_size: int = 1024
    window_size: int = 2048
    num_persistent_tokens: int = 32
    token_skip: bool = False
    use_memory: bool = True
    use_attention: bool = True
    attention_layers: list[int] | None = None
    gate: str | None = None
    qk_norm: bool = True
    pooling: str = "mean"
    preset: str | None = None

    memory_heads: int = 4
    memory_head_dim: int | None = None
    memory_depth: int = 2
    memory_expansion: float = 1.0
    memory_mode: str = "exact"
    memory_chunk_size: int | None = None
    memory_sweeps: int | None = None
    memory_activation: str = "silu"
    memory_bias: bool = False
    memory_residual: bool = False
    memory_layer_norm: bool = False
    memory_loss: str = "squared"
    memory_decay_first: bool = False
    memory_unit_keys: bool = True
    memory_conv_kernel: int = 4
    memory_conv_start: str = "token"
    memory_local_heads: int | None = None
    memory_momentum: bool = True
    memory_forgetting: bool = True
    memory_forget_to: str = "start"
    memory_gates: str = "token"
    memory_theta_max: float = 1.0
    memory_gate_cutoff: float = 0.0
    memory_fixed_theta: float | None = None
    memory_fixed_alpha: list[float] | None = None
    memory_bounded: bool = True
    memory_max_norm: float = 10.0
    memory_writes: bool = True
    memory_cache_segment_size: int | None = None
    memory_cache_top_k: int | None = None
    memory_cache_average: bool = False
    memory_cache_max_states: int | None = None
    memory_binding: str | None = None
    memory_first_order: bool = False
    memory_checkpoint_every: int | None = None

    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = NO_LIMIT
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Checks, and fills in what follows from the rest."""
        self.check()
        super().__post_init__(**kwargs)
        # whoever holds a config may ask the Auto classes for its model next
        import titans.models.classification  # noqa: F401

    def check(self) -> None:
        """Raises a ``ValueError`` at a field that makes no sense; fills in ``intermediate_size`` if it is None.

        A config is checked where it is made, and again where a model is made of it: fields may change in between.
        """
        self._check_each()
        if self.intermediate_size is None:
            width = 8 * self.hidden_size / 3 if self.ffn == "swiglu" else 4 * self.hidden_size
            self.intermediate_size = max(1, round(width / 8) * 8)
        if self.preset is not None:
            check_preset(self.preset, dict(vars(self)))
        if self.variant != "lmm" and self.use_attention and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} and hidden_size is {self.hidden_size}; "
                "expected heads that divide the width"
            )
        if self.use_memory and self.memory_head_dim is None and self.hidden_size % self.memory_heads:
            raise ValueError(
                f"memory_heads is {self.memory_heads} and hidden_size is {self.hidden_size}; "
                "expected heads that divide the width, or memory_head_dim"
            )
        if self.memory_local_heads is not None and self.memory_local_heads > self.memory_heads:
            raise ValueError(
                f"memory_local_heads is {self.memory_local_heads} and memory_heads is {self.memory_heads}; "
                "expected no more of them"
            )
        chosen = self.attention_layers
        if chosen is not None:
            listed = isinstance(chosen, (list, tuple)) and all(isinstance(each, int) for each in chosen)
            if not listed or any(isinstance(each, bool) for each in chosen):
                raise ValueError(f"attention_layers is {chosen!r}; expected a list of whole numbers, or None")
            if self.variant == "lmm" or not self.use_attention or not self.use_memory:
                missing = "attention" if self.use_memory else "memory"
                expected = "None, or a mac, mag or mal with attention and memory"
                raise ValueError(f"attention_layers is {chosen} in a model without {missing}; expected {expected}")
            if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.num_hidden_layers)):
                raise ValueError(
                    f"attention_layers is {chosen}; expected different numbers from 0 to {self.num_hidden_layers - 1}"
                )
            self.attention_layers = sorted(chosen)  # one order for one model
        kept = self.memory_cache_segment_size
        if kept is not None and self.variant == "mac" and self.use_attention and kept % self.segment_size:
            raise ValueError(
                f"memory_cache_segment_size is {kept} and segment_size is {self.segment_size}; "
                "expected a multiple of segment_size in MAC"
            )
        if not self.use_memory and (self.variant == "lmm" or not self.use_attention):
            raise ValueError(
                "use_memory is False and nothing else is left that looks back; "
                "expected attention, or memory_writes=False for a memory that stays as it is"
            )

    def _check_each(self) -> None:
        """Each field by itself."""
        from titans.layers.binding import BINDINGS
        from titans.layers.memory import CONV_STARTS, GATE_SOURCES, HOMES, MODES
        from titans.ops.losses import LOSSES
        from titans.ops.network import ACTIVATIONS

        choices = {
            "variant": VARIANTS, "ffn": FFNS, "gate": GATES, "memory_mode": MODES, "memory_loss": LOSSES,
            "memory_activation": ACTIVATIONS, "memory_gates": GATE_SOURCES, "memory_forget_to": HOMES,
            "memory_conv_start": CONV_STARTS, "memory_binding": BINDINGS, "pooling": POOLINGS, "preset": PRESETS,
        }  # fmt: skip
        least = LEAST | {"vocab_size": self.least_vocabulary}
        check_fields(self, TitansConfig.__annotations__, choices, least, MOST)
        if not (_is_number(self.memory_gate_cutoff) and 0 <= self.memory_gate_cutoff < 1):
            raise ValueError(f"memory_gate_cutoff is {self.memory_gate_cutoff!r}; expected a number in [0, 1)")
        alphas = self.memory_fixed_alpha
        if alphas is not None and not (isinstance(alphas, (list, tuple)) and all(map(_is_number, alphas))):
            raise ValueError(f"memory_fixed_alpha is {alphas!r}; expected a list of numbers, one per head")

    @classmethod
    def from_preset(cls, name: str, **fields: Any) -> TitansConfig:
        """The description of a model that the memory contains as a special case; ``fields`` are as for the class.

        Where they change the preset's memory, the config does not bear its name.
        """
        return cls(**apply_preset(name, fields, cls.memory_heads))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in the library, but ``variant="fp16"`` for a model means files of that name, as it does there."""
        for_model = kwargs.get("return_unused_kwargs") or "_from_pipeline" in kwargs
        if not for_model or kwargs.get("variant", VARIANTS[0]) in VARIANTS:
            return super().from_dict(config_dict, **kwargs)
        variant = kwargs.pop("variant")
        loaded = super().from_dict(config_dict, **kwargs)
        return (loaded[0], loaded[1] | {"variant": variant}) if isinstance(loaded, tuple) else loaded

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in the library, with what the Auto classes need to load the model without ``import titans``."""
        if self._is_ours:
            mine = {name: f"{LOADER.stem}.{kind}" for name, kind in AUTO_MAPS[self.model_type].items()}
            told = getattr(self, "auto_map", None) or {}
            self.auto_map = mine | {name: place for name, place in told.items() if _is_theirs(place, save_directory)}
        super().save_pretrained(save_directory, *args, **kwargs)
        self._add_loader(save_directory)

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        self._add_loader(working_dir)  # a file from before the saving would not count as modified
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _add_loader(self, folder: str | os.PathLike[str]) -> None:
        if self._is_ours:
            shutil.copyfile(LOADER, Path(folder) / LOADER.name)

    @property
    def _is_ours(self) -> bool:
        return type(self).__module__ == __name__

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """As in the library for subclasses; there, saving copies the source of the class, which ours do not need."""
        if cls.__module__ != __name__:
            super().register_for_auto_class(auto_class)

    @property
    def attending(self) -> list[int]:
        """The layers that have attention."""
        if self.variant == "lmm" or not self.use_attention:
            return []
        return list(range(self.num_hidden_layers)) if self.attention_layers is None else self.attention_layers

    @property
    def effective_gate(self) -> str:
        """``gate``, or the variant's default."""
        return DEFAULT_GATES.get(self.variant, "sigmoid") if self.gate is None else self.gate

    @property
    def memory_options(self) -> dict[str, Any]:
        """The memory_* fields, by the names that :class:`titans.NeuralMemory` knows them by."""
        names = [name for name in TitansConfig.__annotations__ if name.startswith("memory_")]
        return {name.removeprefix("memory_"): getattr(self, name) for name in names}

    def fingerprint(self) -> dict[str, Any]:
        """What a cache must agree in with the model that it is given to."""
        general = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        names = [f.name for f in dataclasses.fields(self) if f.name not in (*general, *NOT_IN_CACHE)]
        values = {name: getattr(self, name) for name in names} | {"gate": self.effective_gate}
        return dict(json.loads(json.dumps(values)))


# fields that a state does not depend on
NOT_IN_CACHE = (
    "prediction_length", "linear_skip", "dropout", "loss", "huber_delta", "quantiles", "pooling",
    "preset", "vocab_size", "initializer_range", "use_cache", "tie_word_embeddings", "pad_token_id", "bos_token_id",
    "eos_token_id", "memory_first_order", "memory_checkpoint_every", "memory_conv_start", "max_position_embeddings",
)  # fmt: skip


def _is_theirs(place: Any, folder: str | os.PathLike[str]) -> bool:
    """Whether an entry of an ``auto_map`` names a class of somebody else, in a file that is there or on the hub."""
    if not isinstance(place, str):  # a pair of tokenizers
        return True
    repository, _, name = place.rpartition("--")
    module = name.split(".")[0]
    return module != LOADER.stem and (bool(repository) or (Path(folder) / f"{module}.py").is_file())


def check_fields(
    config: PreTrainedConfig,
    kinds: Mapping[str, str],
    choices: Mapping[str, Iterable[str]],
    least: Mapping[str, int],
    most: Mapping[str, float | None],
) -> None:
    """Raises a ``ValueError`` at a field that is not of its kind.

    Args:
        kinds: the fields to check, with their annotations.
        choices: what a text may be.
        least: the least that whole numbers may be.
        most: the most that positive numbers may be; None: anything.
    """
    for name, kind in kinds.items():
        value = getattr(config, name)
        if value is None and kind.endswith("| None"):
            continue
        if name in choices and not (isinstance(value, str) and value in choices[name]):
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices[name])}")
        if kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected True or False")
        if name in least and not (_is_number(value, int) and value >= least[name]):
            raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least[name]}")
        if name in most:
            limit = most[name]
            if not (_is_number(value) and value > 0 and (limit is None or value <= limit)):
                expected = "a positive number" if limit is None else f"a number in (0, {limit}]"
                raise ValueError(f"{name} is {value!r}; expected {expected}")


def _is_number(value: Any, kind: Any = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_rising(levels: Any) -> bool:
    if not isinstance(levels, (list, tuple)) or not all(map(_is_number, levels)):
        return False
    return all(low < high for low, high in pairwise([0, *levels, 1]))


class TitansPredictionConfig(TitansConfig):
    """The description of a Titans forecaster; everything of :class:`TitansConfig`, and:

    Args:
        context_length: values that a forecast looks back on directly, normalised by their own mean and deviation.
            Whatever came before reaches the forecast through the memory alone.
        prediction_length: values that are forecast at once.
        num_input_channels: variates of a series.
        tokens: ``"patches"``, where each channel is a sequence of its own and a token is a patch of it, as in PatchTST;
            ``"variates"``, where the channels stand in one sequence and a token is a channel's whole context, as in
            iTransformer. The blocks read these tokens twice, so that each forecast depends on all channels; those of
            the history once.
        patch_length, patch_stride: values of a patch, and from one patch to the next.
        use_level: tells each token what normalisation took away, the mean and the deviation, and which channel it
            belongs to: for series whose level means something, such as a temperature, given as z-scores. Without it, a
            series that is shifted or stretched has the same forecast, shifted or stretched.
        linear_skip: adds a linear map from the context to the horizon to what the blocks forecast.
        dropout: on the tokens and before the head.
        loss: ``"mse"``, ``"mae"``, ``"huber"`` or ``"quantile"``.
        huber_delta: where Huber's loss turns from squares to distances.
        quantiles: for the quantile loss, rising; the one closest to the middle is the point forecast.
    """

    model_type: ClassVar[str] = "titans_prediction"
    least_vocabulary: ClassVar[int] = 0

    variant: str = "lmm"
    vocab_size: int = 0
    hidden_size: int = 64
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    segment_size: int = 16
    window_size: int = 16
    num_persistent_tokens: int = 0
    memory_heads: int = 4
    memory_local_heads: int | None = 0
    tie_word_embeddings: bool = False

    context_length: int = 96
    prediction_length: int = 96
    num_input_channels: int = 1
    tokens: str = "patches"
    patch_length: int = 16
    patch_stride: int = 16
    use_level: bool = False
    linear_skip: bool = False
    dropout: float = 0.1
    loss: str = "mse"
    huber_delta: float = 1.0
    quantiles: list[float] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """As that of :class:`TitansConfig`."""
        super().__post_init__(**kwargs)
        import titans.models.prediction  # noqa: F401

    def check(self) -> None:
        """As :meth:`TitansConfig.check`."""
        super().check()
        least = dict.fromkeys(
            ("context_length", "prediction_length", "num_input_channels", "patch_length", "patch_stride"), 1
        )
        choices = {"tokens": TOKENS, "loss": PREDICTION_LOSSES}
        check_fields(self, TitansPredictionConfig.__annotations__, choices, least, {"huber_delta": None})
        if self.patch_length > self.context_length:
            raise ValueError(
                f"patch_length is {self.patch_length} and context_length is {self.context_length}; "
                "expected patches that fit into the context"
            )
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout is {self.dropout!r}; expected a number in [0, 1)")
        if self.quantiles is not None and not _are_rising(self.quantiles):
            raise ValueError(f"quantiles is {self.quantiles!r}; expected a list of rising numbers between 0 and 1")
        if (self.loss == "quantile") != bool(self.quantiles):
            raise ValueError(
                f"loss is {self.loss!r} and quantiles is {self.quantiles!r}; expected quantiles with the quantile loss"
            )

    @property
    def point_quantile(self) -> int:
        """Which of the quantiles is the point forecast."""
        levels = self.quantiles or [0.5]
        return min(range(len(levels)), key=lambda i: abs(levels[i] - 0.5))

    @property
    def token_length(self) -> int:
        """Values that a token is made of."""
        return self.patch_length if self.tokens == "patches" else self.context_length

    @property
    def token_stride(self) -> int:
        """Values from one token of a channel to the next."""
        return self.patch_stride if self.tokens == "patches" else self.context_length

    @property
    def tokens_in_context(self) -> int:
        """Tokens of one channel that cover the context."""
        return 1 + -(-(self.context_length - self.token_length) // self.token_stride)


AutoConfig.register("titans", TitansConfig, exist_ok=True)
AutoConfig.register("titans_prediction", TitansPredictionConfig, exist_ok=True)
