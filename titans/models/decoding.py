"""What ``generate`` of transformers has to know of a model whose memory cannot forget."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList

from titans.models.cache import TitansCache
from titans.models.packing import DOCUMENTS, on_tokens, restarts_of


class _Watch(StoppingCriteriaList):
    """Stopping criteria that remember which sequences had ended before the newest token: what they got is padding."""

    padded: Tensor | None = None
    _ended: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.padded, self._ended = self._ended, ends if self._ended is None else self._ended | ends
        return ends


def _seen(inputs: dict[str, Any]) -> int:
    cache = inputs.get("past_key_values")
    return 0 if cache is None else cache.get_seq_length()


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
        starts: Tensor | None = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in the library; a sequence that has ended is masked, so that its memory stands still.

        Documents begin at ``starts``, counted from the first token that the cache has seen. The tokenizer is that of
        stop strings, which the library hands on.
        """
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if starts is not None:
            read = inputs.get("inputs_embeds")
            seen, time = _seen(inputs), (inputs["input_ids"] if read is None else read).shape[1]
            here = starts[:, seen : seen + time]
            if bool(here.any()):
                inputs["restart"] = F.pad(here, (0, time - here.shape[1]))
        if watch is not None and watch.padded is not None and inputs.get("past_key_values") is not None:
            live = ~watch.padded.to(inputs["input_ids"].device)
            inputs["attention_mask"] = None if bool(live.all()) else live[:, None]
        return inputs

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: a memory reads in order, and positions would only tell where documents begin."""

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        mask, embedded = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
        batch, given = (input_ids if embedded is None else embedded).shape[:2]
        seen, new = _seen(model_kwargs), given
        if seen:
            covered = getattr(generation_config, "_mask_length", given) if mask is None else mask.shape[1]
            new = covered - seen
            if new < 1 or given not in ((new, covered) if embedded is None else (covered,)):
                raise ValueError(
                    f"past_key_values has seen {seen} tokens, {given} are given and the mask covers {covered}; "
                    "expected the whole history with new tokens after it, or a mask that covers it and them"
                )
        # Documents begin in the prompt only. What is left of them for the calls to come, and for pieces of this one:
        told = {name: model_kwargs.pop(name, None) for name in DOCUMENTS}
        told = {name: x if x is None or x.ndim < 2 else x[..., -new:] for name, x in told.items()}
        starts = restarts_of((batch, new), mask, **told)
        if mask is not None:
            mask = model_kwargs["attention_mask"] = mask.to(torch.bool)
        if starts is not None:
            starts = starts if starts.ndim == 2 else F.pad(starts[:, None], (0, new - 1))
            model_kwargs["starts"] = F.pad(starts if mask is None else on_tokens(starts, mask[:, -new:]), (seen, 0))
        if mask is None or bool(mask[:, -1].all()):
            return super()._prefill(input_ids, generation_config, model_kwargs, **kwargs)
        # The logits that count are the last ones: padding on the right goes to the left, which changes nothing else.
        order = mask[:, -new:].to(torch.int64).argsort(dim=1, stable=True)

        def moved(x: Tensor) -> Tensor:
            index = order.view(*order.shape, *(1,) * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
            return torch.cat([x[:, : x.shape[1] - new], x[:, -new:].gather(1, index)], dim=1)

        left = {"input_ids": input_ids} | model_kwargs
        for name, x in left.items():
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[:2] in ((batch, new), (batch, seen + new)):
                left[name] = moved(x)
        return super()._prefill(left.pop("input_ids"), generation_config, left, **kwargs)

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
