"""What ``generate`` of transformers has to know of a model whose memory cannot forget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList

from titans.models.cache import TitansCache


class _Watch(StoppingCriteriaList):
    """Stopping criteria that remember which sequences had ended before the newest token: what they got is padding."""

    padded: Tensor | None = None
    _ended: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.padded, self._ended = self._ended, ends if self._ended is None else self._ended | ends
        return ends


class TitansGenerationMixin(GenerationMixin):
    """``generate``, for a :class:`titans.TitansCache`: padding is never read, neither in a prompt nor after an end."""

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        watch = _Watch(stopping_criteria)
        pads = any(hasattr(each, "eos_token_id") for each in stopping_criteria)  # as transformers decides it
        return super()._sample(input_ids, logits_processor, watch, *rest, watch=watch if pads else None, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        watch: _Watch | None = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in the library; a sequence that has ended is masked, so that its memory stands still.

        The tokenizer is that of stop strings, which the library hands on.
        """
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if watch is not None and watch.padded is not None and inputs.get("past_key_values") is not None:
            live = ~watch.padded.to(inputs["input_ids"].device)
            inputs["attention_mask"] = None if bool(live.all()) else live[:, None]
        return inputs

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: a memory reads in order, and positions would only tell where documents begin."""

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        mask = model_kwargs.get("attention_mask")
        if mask is None or bool(mask[:, -1].all()):
            return super()._prefill(input_ids, generation_config, model_kwargs, **kwargs)
        # The logits that count are the last ones: padding on the right goes to the left, which changes nothing else.
        cache = model_kwargs.get("past_key_values")
        new = mask.shape[1] - (0 if cache is None else cache.get_seq_length())
        order = mask[:, -new:].to(torch.int64).argsort(dim=1, stable=True)

        def moved(x: Tensor) -> Tensor:
            index = order.view(*order.shape, *(1,) * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
            return torch.cat([x[:, : x.shape[1] - new], x[:, -new:].gather(1, index)], dim=1)

        left = {name: moved(model_kwargs[name]) for name in ("attention_mask", "inputs_embeds") if name in model_kwargs}
        ids = moved(input_ids) if "inputs_embeds" not in left else input_ids
        return super()._prefill(ids, generation_config, model_kwargs | left, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.is_assistant:
            raise NotImplementedError("a memory cannot take tokens back, as a model that assists another one has to")
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation is {asked!r}; expected None: a memory has one form, which does not grow"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = TitansCache(self.config)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Not possible: there are no pages of keys and values to share out."""
        raise NotImplementedError("continuous batching pages keys and values, and a memory has none; expected generate")
