"""Titans as Hugging Face models: embedding, blocks, norm, head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from titans.layers import (
    BlockState,
    LMMBlock,
    MACBlock,
    MAGBlock,
    MALBlock,
    NeuralMemory,
    SegmentAttention,
    WindowAttention,
)
from titans.layers.norm import RMSNorm
from titans.layers.packing import pack
from titans.layers.step import linear
from titans.models.cache import TitansCache
from titans.models.configuration import VARIANTS, TitansConfig
from titans.models.decoding import TitansGenerationMixin
from titans.models.packing import LOSS, check_names, restarts_of
from titans.models.pretrained import TitansPreTrainedModel
from titans.ops.frame import Frame, make_frame
from titans.ops.native.library import is_transformed

logger = logging.get_logger(__name__)


class LMMLayer(GradientCheckpointingLayer, LMMBlock):
    """:class:`titans.layers.LMMBlock`, with gradient checkpointing."""


class MACLayer(GradientCheckpointingLayer, MACBlock):
    """:class:`titans.layers.MACBlock`, with gradient checkpointing."""


class MAGLayer(GradientCheckpointingLayer, MAGBlock):
    """:class:`titans.layers.MAGBlock`, with gradient checkpointing."""


class MALLayer(GradientCheckpointingLayer, MALBlock):
    """:class:`titans.layers.MALBlock`, with gradient checkpointing."""


def make_layer(config: TitansConfig, index: int) -> nn.Module:
    """Block number ``index`` of the model that ``config`` describes."""
    dim, attends = config.hidden_size, index in config.attending
    assert config.intermediate_size is not None
    options: dict[str, Any] = {
        "persistent": config.num_persistent_tokens,
        "ffn": config.ffn,
        "ffn_multiplier": config.intermediate_size / dim,
        # the first memory sees the tokens anyway, unless attention stands before it
        "token_skip": config.token_skip and (index > 0 or (config.variant == "mac" and attends)),
    }
    memory = NeuralMemory(dim, **config.memory_options, check_values=False) if config.use_memory else None
    if config.variant == "lmm":
        assert memory is not None
        return LMMLayer(dim, memory, **options)
    heads, window, qk_norm = config.num_attention_heads, config.window_size, config.qk_norm
    if config.variant == "mac":
        segment = SegmentAttention(dim, heads, config.segment_size, qk_norm=qk_norm) if attends else None
        return MACLayer(dim, memory, segment, gate=config.effective_gate, **options)
    attention = WindowAttention(dim, heads, window, qk_norm=qk_norm) if attends else None
    if config.variant == "mag":
        return MAGLayer(dim, memory, attention, gate=config.effective_gate, **options)
    if config.variant == "mal":
        return MALLayer(dim, memory, attention, **options)
    raise ValueError(f"variant is {config.variant!r}; expected one of {', '.join(VARIANTS)}")


class TitansModel(TitansPreTrainedModel):
    """Embedding, blocks and norm."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.vocab_size else None
        self.embed_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # what blocks add is not small
        self.layers = nn.ModuleList(make_layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        restart: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | Tensor | None = None,
        max_length_k: int | Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Reads a stretch of a batch of sequences.

        Args:
            input_ids: (batch, time), or ``inputs_embeds`` (batch, time, hidden_size).
            attention_mask: (batch, time), or longer, in which case its end counts; 0 for padding, which is skipped
                wherever it stands, and otherwise 1, or the number of each token's document.
            past_key_values: what went before, changed by the call if ``use_cache``.
            use_cache: whether to return a cache to go on from; default: as the config says, but not in training.
            restart: (batch,) bool, True for the sequences that start anew here, whatever the cache has of them; or
                (batch, time) bool, True where a token begins another document, which is read as if it were alone.
                The cache then has each row's last document.
            position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k: where documents begin, as collators of transformers and
                TRL say it, see :func:`titans.models.packing.restarts_of`.
            max_length_q, max_length_k: come with them, and are not needed.
            kwargs: what callers pass to every model.

        Returns:
            the last hidden states (0 at padding), the cache, and the hidden states before and after every block.
        """
        check_names(self, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds, and not both")
        if inputs_embeds is None:
            assert input_ids is not None
            if self.embed_tokens is None:
                raise ValueError("vocab_size is 0, so that the model has no embedding; expected inputs_embeds")
            self._check_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; "
                f"expected (batch, time, {self.config.hidden_size})"
            )
        x = self.embed_norm(inputs_embeds)
        batch, time = x.shape[:2]
        cache = past_key_values
        if cache is not None:
            if not isinstance(cache, TitansCache):
                raise ValueError(f"past_key_values is a {type(cache).__name__}; expected a TitansCache")
            cache.check(self.config, batch)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        frame, mask = self._compact(x, attention_mask)
        documents = (restart, position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k)
        restart = restarts_of((batch, time), attention_mask, *documents)
        alone = time == 1 and frame is None and restart is None and not output_hidden_states
        if alone and use_cache and cache is not None and not torch.is_grad_enabled():
            y = cache.step(self.layers, x[:, 0])
            if y is not None:
                output = BaseModelOutputWithPast(last_hidden_state=self.norm(y.unsqueeze(1)), past_key_values=cache)
                return output if wants_dict else output.to_tuple()
        if use_cache and self.training and self._checkpoints_reentrantly():
            logger.warning_once("use_cache does not go with reentrant gradient checkpointing: no cache is returned")
            use_cache = False
        packing = None
        if restart is not None and restart.ndim == 2:
            packing, mask = pack(restart, None if frame is None else frame.present), None
            x = packing.put(x)
        elif frame is not None:
            x = frame.put(x.unsqueeze(1)).squeeze(1)

        def laid_out(x: Tensor) -> Tensor:
            if packing is not None:
                return packing.take(x)
            return x if frame is None else frame.take(x.unsqueeze(1)).squeeze(1)

        hidden = [laid_out(x)] if output_hidden_states else []
        states: list[BlockState] = []
        before = cache.states if cache is not None else [None] * len(self.layers)
        tokens = x if self.config.token_skip else None
        for layer, state in zip(self.layers, before, strict=True):
            x, after = layer(x, state, mask, restart if packing is None else packing, tokens)
            if use_cache:
                states.append(after)
            if output_hidden_states:
                hidden.append(laid_out(x))
        x = laid_out(self.norm(x))

        if use_cache:
            cache = TitansCache(self.config) if cache is None else cache
            cache.replace(states, time)
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=tuple(hidden) if output_hidden_states else None,
        )
        return output if wants_dict else output.to_tuple()

    def _checkpoints_reentrantly(self) -> bool:
        """Whether gradient checkpointing is on in the older way, which cuts states off from the graph."""
        function = getattr(self.layers[0], "_gradient_checkpointing_func", None)
        keywords = getattr(function, "keywords", {})
        return bool(self.layers[0].gradient_checkpointing and keywords.get("use_reentrant", False))

    def _check_ids(self, ids: Tensor) -> None:
        if ids.ndim != 2:
            raise ValueError(f"input_ids has shape {tuple(ids.shape)}; expected (batch, time)")
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"input_ids has dtype {ids.dtype}; expected int64 or int32")
        # elsewhere a look at the numbers would make the host wait, or break a graph
        if ids.numel() and ids.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed(ids):
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"input_ids has the token {low if low < 0 else high}; "
                    f"expected numbers from 0 to {self.config.vocab_size - 1}, vocab_size - 1"
                )

    @staticmethod
    def _compact(x: Tensor, attention_mask: Tensor | None) -> tuple[Frame | None, Tensor | None]:
        """Where each token goes when padding is dropped, and the mask of what is left; None: there is no padding."""
        if attention_mask is None:
            return None, None
        batch, time = x.shape[:2]
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < time:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, time) = {(batch, time)}"
            )
        mask = attention_mask[:, attention_mask.shape[1] - time :].to(torch.bool)
        if bool(mask.all()):
            return None, None
        frame = make_frame(time, mask, torch.zeros(batch, dtype=torch.int64, device=x.device), time, None)
        live = frame.live
        return frame, None if live is None or bool(live.all()) else live


class TitansForCausalLM(TitansPreTrainedModel, TitansGenerationMixin):
    """A Titans language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(config)
        self.model = TitansModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        restart: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | Tensor | None = None,
        max_length_k: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As :meth:`TitansModel.forward`, and:

        Args:
            labels: (batch, time), the tokens themselves, shifted here; -100 where none is wanted. The first token of a
                document inside a row is not wanted.
            kwargs: ``shift_labels`` (batch, time), the target of each token, instead of labels;
                ``num_items_in_batch``, by which the summed loss is divided.
            logits_to_keep: how many logits to return, counted from the end, or which; 0: all of them.
        """
        check_names(self, kwargs, *LOSS)
        documents = (restart, position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k)
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            True,
            *documents,
            **{name: value for name, value in kwargs.items() if name not in LOSS},
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = output.last_hidden_state[:, kept]
        # A token alone goes the quick way; how many logits are kept of a longer call changes no bit of them.
        is_alone = output.last_hidden_state.shape[1] == 1
        logits = linear(self.lm_head, hidden) if is_alone else self.lm_head(hidden)
        loss = None
        options = {name: kwargs[name] for name in LOSS if name in kwargs}
        if labels is not None or options.get("shift_labels") is not None:
            if labels is not None:
                starts = restarts_of(output.last_hidden_state.shape[:2], attention_mask, *documents)
                if starts is not None and starts.ndim == 2:
                    labels = labels.masked_fill(starts, -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return result if wants_dict else result.to_tuple()


AutoModel.register(TitansConfig, TitansModel, exist_ok=True)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM, exist_ok=True)
