"""Attention of a causal model of transformers over a window and the first tokens of the text, its sinks.

A query at position p sees the keys at p - window + 1 to p, and those at 0 to sinks - 1. Sinks stand as if the text
between them and the window were not there, so that no distance is longer than window + sinks, however long the text
(arXiv 2309.17453). With a window as long as the text this is full attention.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "titans_window"  # of the attention in transformers
EMPTY = -1  # the position of a place in the cache that holds no token


@dataclass(frozen=True)
class View:
    """What the queries of one call see.

    Attributes:
        mask: (batch, 1, queries, keys) bool.
        sinks: (batch, 1, keys, 1) bool, which keys are sinks.
        turn: cosine and sine (batch, 1, queries, width) that turn queries to where the sinks are near; None: no query
            is farther from them than it would be without a window.
    """

    mask: Tensor
    sinks: Tensor
    turn: tuple[Tensor, Tensor] | None


def make_view(query: Tensor, key: Tensor, window: int, sinks: int, frequencies: Tensor) -> View:
    """The view of queries at positions (batch, queries) of keys at positions (batch, keys); ``EMPTY``: padding.

    Args:
        frequencies: by which the model rotates, (width / 2,).
    """
    at, of = query.unsqueeze(-1), key.unsqueeze(-2)
    mask = (of != EMPTY) & (of <= at) & ((of > at - window) | (of < sinks))
    mask |= (at == EMPTY) & (of == EMPTY)  # padding sees padding: a softmax over nothing is not a number
    farther = (query - (window + sinks - 1)).clamp(min=0)
    turn = None
    if bool(farther.any()):
        angle = -farther.unsqueeze(-1) * frequencies.float()
        angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
        turn = angle.cos(), angle.sin()
    return View(mask.unsqueeze(1), (key < sinks)[:, None, :, None], turn)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., width) rotated, as Llama does it: the first half of the rotated channels with the second."""
    width = cos.shape[-1]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = x[..., :width] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, x[..., width:]], dim=-1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    view: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """PyTorch's attention; queries meet sinks turned, other keys as they are, in a product of twice the width.

    Args:
        view: a :class:`View`, or whatever has one as its attribute ``view``.
    """
    view = getattr(view, "view", view)
    rotated = getattr(module, "use_rope", True)  # SmolLM3 has layers that do not rotate
    if view is not None and view.turn is not None and rotated:
        cos, sin = (x.to(query.dtype) for x in view.turn)
        query = torch.cat([query, rotate(query, cos, sin)], dim=-1)
        key = torch.cat([key.masked_fill(view.sinks, 0), key.masked_fill(~view.sinks, 0)], dim=-1)
    kwargs.pop("sliding_window", None)  # the mask has it
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without one, transformers would forget about padding


class WindowLayer(CacheLayerMixin):
    """The keys and values of one layer: all of the present call, until they are cut."""

    is_compileable = False
    keys: Tensor | None
    values: Tensor | None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first update brings the tensors."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What is kept, and what is new, which is kept too."""
        if self.keys is None or self.values is None:
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        self.is_initialized = True
        return self.keys, self.values

    def cut(self, kept: Tensor) -> None:
        """Keeps the places (batch, kept)."""
        assert self.keys is not None and self.values is not None
        index = kept[:, None, :, None]
        self.keys = self.keys.gather(2, index.expand(-1, self.keys.shape[1], -1, self.keys.shape[3]))
        self.values = self.values.gather(2, index.expand(-1, self.values.shape[1], -1, self.values.shape[3]))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Whoever asks is given a mask that is as large as it must be."""
        return query_length + self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """How many places are filled."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        """There is no longest sequence."""
        return -1


class WindowCache(Cache):
    """Keys and values of the sinks and of the last ``window`` tokens of each sequence.

    Args:
        layers: of the model.
        window: how many tokens a query sees, itself included.
        sinks: how many first tokens it sees besides.

    Attributes:
        positions: (batch, places) of the tokens that are kept, ``EMPTY`` where there is none.
        length: (batch,), how many tokens each sequence has had, without padding.
        seen: how many tokens a sequence was called with, padding counted.
    """

    layers: list[WindowLayer]

    def __init__(self, layers: int, window: int, sinks: int) -> None:
        super().__init__(layers=[WindowLayer() for _ in range(layers)])
        self.window, self.sinks = window, sinks
        self.positions: Tensor | None = None
        self.length: Tensor | None = None
        self.seen = 0

    def place(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The positions (batch, time) of new tokens, False in ``mask`` for padding, and of all there are then."""
        before = mask.new_zeros(len(mask), dtype=torch.long) if self.length is None else self.length
        new = torch.where(mask, before[:, None] + mask.long().cumsum(1) - 1, EMPTY)
        return new, new if self.positions is None else torch.cat([self.positions, new], dim=1)

    def cut(self, new: Tensor, positions: Tensor) -> None:
        """After a call of tokens at ``new``, forgets what no later token will see."""
        length = positions.amax(dim=1).clamp(min=EMPTY) + 1
        room = min(positions.shape[1], self.sinks + self.window - 1)
        # the next token sees the sinks and the last window - 1: the highest ranks, in the order they came
        near = positions > (length - self.window).unsqueeze(1)
        rank = torch.where(near | ((positions != EMPTY) & (positions < self.sinks)), positions, EMPTY)
        kept = rank.sort(dim=1, stable=True).indices[:, rank.shape[1] - room :]
        self.positions = rank.gather(1, kept)
        self.length = length
        self.seen += new.shape[1]
        for layer in self.layers:
            layer.cut(kept)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the model was called with so far, padding counted."""
        return self.seen

    def map(self, function: Any) -> None:
        """Applies a function to every tensor, sequences first."""
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = function(layer.keys), function(layer.values)
        self.positions = None if self.positions is None else function(self.positions)
        self.length = None if self.length is None else function(self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Picks sequences by index: what beam search needs."""
        self.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence."""
        self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Picks sequences by index."""
        self.reorder_cache(indices)

    def reset(self) -> None:
        """Back to the start of a sequence."""
        for layer in self.layers:
            layer.keys = layer.values = None
        self.positions = self.length = None
        self.seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: what left the window is gone."""
        raise NotImplementedError("a window cannot take tokens back; keep a copy of the cache from before them")


def decoder_of(model: PreTrainedModel) -> Any:
    """The part of a causal model that has the layers, if its attention is one that a window can be put on.

    A ``ValueError`` says what is missing.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {name}; expected a causal language model of transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model is {name}, an encoder with a decoder; expected a causal language model")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    if not isinstance(layers, nn.ModuleList) or not all(
        all(hasattr(getattr(layer, "self_attn", None), part) for part in parts) for layer in layers
    ):
        raise ValueError(
            f"model is {name}, whose layers have no standard attention; expected one of the families of Llama, "
            "Mistral, Qwen or SmolLM"
        )
    if model.get_output_embeddings() is None or not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"model is {name}; expected a causal language model whose attention can be chosen")
    _check_rotation(model, decoder)
    _check_ends(model, decoder)
    return decoder


@torch.no_grad()
def _check_ends(model: PreTrainedModel, decoder: Any) -> None:
    """Raises a ``ValueError`` unless layers are given plain embeddings, and logits are a product of the last states."""
    given: list[Tensor] = []
    hook = decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: given.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    ids = torch.arange(1, 4, device=model.device)[None]
    try:
        output = model(ids, use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    plain = model.get_input_embeddings()(ids)
    logits = model.get_output_embeddings()(output.hidden_states[-1])
    if not (torch.allclose(given[0], plain, rtol=1e-2) and torch.allclose(output.logits, logits, rtol=1e-2, atol=1e-3)):
        raise ValueError(
            f"model is {type(model).__name__}, which scales its embeddings or its logits; expected one that does not"
        )


def _check_rotation(model: PreTrainedModel, decoder: Any) -> None:
    """Raises a ``ValueError`` unless the model rotates queries and keys as :func:`rotate` does."""
    name, rotary = type(model).__name__, getattr(decoder, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    if rotary is None or frequencies is None:
        raise ValueError(f"model is {name}, which does not rotate queries and keys; expected rotary positions")
    kind = getattr(rotary, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"model is {name}, whose rotation changes with the length ({kind}); expected one that does not"
        )
    apply = getattr(sys.modules[type(decoder.layers[0].self_attn).__module__], "apply_rotary_pos_emb", None)
    x = torch.randn(1, 1, 1, 2 * len(frequencies), generator=torch.Generator().manual_seed(0)).to(frequencies.device)
    close = False
    if apply is not None:
        near, far = (apply(x, x, *rotary(x, torch.tensor([[p]], device=x.device)))[0] for p in (3, 8))
        angle = 5 * torch.cat([frequencies, frequencies]).float()
        close = torch.allclose(rotate(near, angle.cos(), angle.sin()), far, atol=1e-4)
    if not close:
        raise ValueError(f"model is {name}, which rotates queries and keys in a way of its own; expected that of Llama")
