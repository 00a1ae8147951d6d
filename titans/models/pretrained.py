"""What every Titans model shares: initialisation, saving and loading."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from titans.models.configuration import VARIANTS, TitansConfig
from titans.models.offload import load_whole_blocks

ATTENTIONS = ("sdpa", "eager")  # names of one and the same: our attention calls PyTorch's where that is exact
HUB_OPTIONS = ("cache_dir", "revision", "token", "subfolder", "local_files_only")


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Holds back the table of misfits that transformers logs: :meth:`from_pretrained` says it in one sentence."""

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporter = logging.getLogger("transformers.modeling_utils")
    reporter.addFilter(keep)
    try:
        yield
    finally:
        reporter.removeFilter(keep)


def _is_loaded(parameter: nn.Parameter) -> bool:
    """Whether transformers has it from a checkpoint."""
    return getattr(parameter, "_is_hf_initialized", False)


class TitansPreTrainedModel(PreTrainedModel):
    """Initialisation, loading, and what the library wants to know."""

    config_class = TitansConfig
    config: TitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LMMLayer", "MACLayer", "MAGLayer", "MALLayer"]
    _supports_sdpa = True
    _keep_in_fp32_modules = ["to_gates"]  # as they are computed; quantisers leave them alone
    _is_stateful = True  # a memory cannot take tokens back, as assisted generation would have it do

    def __init__(self, config: TitansConfig) -> None:
        config.check()
        super().__init__(config)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation not in (None, *ATTENTIONS):
            raise ValueError(f"attn_implementation is {attn_implementation!r}; expected one of {', '.join(ATTENTIONS)}")
        return attn_implementation or ATTENTIONS[0]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif hasattr(module, "reset_parameters"):
            loaded = [p for p in module.parameters() if _is_loaded(p)]
            values = [p.clone() for p in loaded]
            module.reset_parameters()  # type: ignore[operator]
            for parameter, value in zip(loaded, values, strict=True):
                parameter.copy_(value)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # The library leaves out modules whose own parameters were loaded; ours also initialise those of their parts.
        in_part = any(map(_is_loaded, self.parameters())) and not all(map(_is_loaded, module.parameters()))
        super()._initialize_weights(module, is_custom_code and not in_part)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """As in the library for subclasses; there, saving copies the source of the class, which ours do not need."""
        if not cls.__module__.startswith("titans."):
            super().register_for_auto_class(auto_class)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the library, but a checkpoint that does not fit the model is refused instead of half loaded.

        ``variant`` is one of ours, or else what the names of the files with the weights have, such as ``"fp16"``.
        """
        path = pretrained_model_name_or_path
        given = kwargs.get("config")
        wanted = given.variant if isinstance(given, TitansConfig) else None
        if kwargs.get("variant") in VARIANTS:
            wanted = kwargs.pop("variant")
        if wanted is not None and path is not None:
            hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
            variant = TitansConfig.get_config_dict(path, **hub)[0].get("variant", wanted)
            if variant != wanted:
                raise ValueError(f"{path} holds a {variant} model; expected {wanted}, the variant that was asked for")
        want_info = kwargs.pop("output_loading_info", False)
        problems = ["missing_keys", "unexpected_keys"]
        silence = nullcontext if kwargs.get("ignore_mismatched_sizes") else _without_load_report
        if not kwargs.get("ignore_mismatched_sizes"):
            problems.append("mismatched_keys")
            kwargs["ignore_mismatched_sizes"] = True
        try:
            with silence():
                model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"{path} has weights that cannot be read: {error}") from error
        for problem in problems:
            keys = sorted(key if isinstance(key, str) else key[0] for key in info[problem])
            if keys:
                kind = problem.removesuffix("_keys")
                source = "state_dict" if path is None else path
                raise ValueError(
                    f"{source} does not fit the config: {len(keys)} {kind} parameters, the first of them {keys[0]}"
                )
        load_whole_blocks(model)
        return (model, info) if want_info else model
