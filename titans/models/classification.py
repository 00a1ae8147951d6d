"""Titans that reads a sequence and says what it is: classes, several labels at once, or numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils import logging

from titans.models.cache import TitansCache
from titans.models.configuration import TitansConfig
from titans.models.modeling import TitansModel
from titans.models.packing import check_names, restarts_of
from titans.models.pretrained import TitansPreTrainedModel

logger = logging.get_logger(__name__)


class TitansForSequenceClassification(TitansPreTrainedModel):
    """A Titans model with a linear layer on what it makes of all of a sequence, or of its last token.

    ``num_labels``, ``id2label`` and ``problem_type`` of the config are those of transformers, ``pooling`` is ours. The
    weights of a language model can be loaded; the layer on top is then new, which a warning says.
    """

    accepts_loss_kwargs = False  # a Trainer that accumulates gradients takes the mean itself, for every kind of label
    _keys_to_ignore_on_load_missing = ["score.weight"]
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TitansModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        if "score.weight" in loading_info.missing_keys:
            logger.warning("score.weight is not in the checkpoint and is new: train the model before you use it.")
        super()._adjust_missing_and_unexpected_keys(loading_info)

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
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | Tensor | None = None,
        max_length_k: int | Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """As :meth:`TitansModel.forward`, and:

        Args:
            attention_mask: if it is not given, tokens that are ``pad_token_id`` of the config are padding.
            labels: (batch,) class numbers; (batch, num_labels) of 0.0 and 1.0 where several labels may hold;
                (batch,) or (batch, num_labels) numbers for a regression.
            use_cache: whether to return a cache to go on from; only tokens of this call are pooled.

        Returns:
            the loss, if there are labels, and logits of shape (batch, num_labels).
        """
        check_names(self, kwargs, "num_items_in_batch")
        pad = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and pad is not None:
            attention_mask = input_ids != pad
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            bool(use_cache),
            output_hidden_states,
            return_dict=True,
        )
        documents = (position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k)
        if restarts_of(output.last_hidden_state.shape[:2], attention_mask, None, *documents) is not None:
            raise ValueError("a row of the batch has several documents; expected one, which has one label")
        logits = self.score(self._pool(output.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            self._check_labels(labels, len(logits))
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        result = SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return result if wants_dict else result.to_tuple()

    def _pool(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """One vector for each sequence, of its real tokens: (batch, time, width) to (batch, width)."""
        batch, time = hidden.shape[:2]
        if attention_mask is None:
            mask = torch.ones(batch, time, dtype=torch.bool, device=hidden.device)
        else:
            mask = attention_mask[:, attention_mask.shape[1] - time :].to(torch.bool)
        if not bool(mask.any(1).all()):
            raise ValueError("a sequence of the batch has no tokens besides padding; expected at least one")
        if self.config.pooling == "mean":  # hidden states at padding are 0
            return hidden.sum(1) / mask.sum(1, keepdim=True).to(hidden.dtype)
        last = (mask * torch.arange(time, device=mask.device)).argmax(1)
        return hidden[torch.arange(batch, device=hidden.device), last]

    def _check_labels(self, labels: Tensor, batch: int) -> None:
        if not labels.ndim or len(labels) != batch:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}; expected one label per sequence, {batch} of them"
            )
        if labels.is_floating_point() or self.config.problem_type not in (None, "single_label_classification"):
            return
        most = self.num_labels - 1
        wrong = labels[(labels > most) | ((labels < 0) & (labels != -100))]
        if most and wrong.numel():
            raise ValueError(f"labels has {int(wrong[0])}; expected numbers from 0 to {most}, num_labels - 1")


AutoModelForSequenceClassification.register(TitansConfig, TitansForSequenceClassification, exist_ok=True)
