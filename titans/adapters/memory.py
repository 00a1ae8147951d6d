"""The memory of an adapter: it reads states of some layers of a model, and speaks at its head or at a later layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.layers import NeuralMemory
from titans.layers.memory import Start
from titans.ops import MemoryState
from titans.ops.project import UNIT_EPS, last_inputs

LARGEST = 10.0  # standardised states beyond it are cut: the first tokens of a text have some that are thousands
FLOOR = 0.35  # of likeness at the start: the values of two tokens have less
SOFTNESS = 0.03  # over what width it is passed
STEP = 0.9  # of a token at the start: it is learned at once
FIXED = ("heads", "head_dim", "depth", "conv_kernel", "conv_start")


class TapMemory(NeuralMemory):
    """A linear :class:`titans.NeuralMemory` from what stood before a token to the token, with many sparse keys.

    States of a language model are much alike. A key is therefore made of features that only some states have: random
    projections above a threshold. Two states have to be near to share many of them, and the more features there are,
    the more tokens fit beside each other. A key is made of the state before the token that is its value; queries and
    keys start alike and may be learned apart.

    What it recalls it says in one of two ways. At the head, :meth:`logits`: tokens whose values are much like it become
    likelier, the others stay as they are, so that a memory that knows nothing of a query says nothing. At a layer,
    :meth:`output`: a product with how far it is open, without norm, to be added to the state of the model there.

    Args:
        taps: how many states of the model a token has.
        hidden_size, vocab_size: of the model; values have the same size as its states.
        at_head: whether it speaks at the head.
        features: of a key; None: four times ``hidden_size``.
        threshold: what a projection must exceed to count, in standard deviations.
        settings: of :class:`titans.NeuralMemory`.

    Attributes:
        mean, scale: (taps, hidden_size), by which states are standardised.
        sizes: at the head, (vocab_size,), of the values of all tokens before they are squashed.
        floor: how much like a value an answer must be to count.
        loudness: by how much likeness above the floor is louder than the logits of the model.
    """

    mean: Tensor
    scale: Tensor
    sizes: Tensor

    def __init__(
        self,
        taps: int,
        hidden_size: int,
        vocab_size: int,
        at_head: bool = True,
        features: int | None = None,
        threshold: float = 1.5,
        **settings: Any,
    ) -> None:
        for name in FIXED:
            if name in settings:
                raise ValueError(f"{name} is not a setting of this memory; expected features, threshold, or others")
        features = 4 * hidden_size if features is None else features
        if not isinstance(features, int) or features < 1:
            raise ValueError(f"features is {features}; expected a whole number of at least 1")
        if not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise ValueError(f"threshold is {threshold}; expected a number")
        super().__init__(taps * hidden_size, 1, 1, head_dim=hidden_size, conv_kernel=0, **settings)
        self.features, self.threshold = features, threshold
        self.conv_kernel = 2  # a key is made of the token before
        del self.to_qkv
        self.initial = Start([torch.zeros(1, hidden_size, features)])
        code = hidden_size * max(1, taps - 1)  # of what is not the value
        self.to_query, self.to_key = nn.Linear(self.dim, code), nn.Linear(self.dim, code)
        self.to_features = nn.Linear(code, features)
        self.to_value = nn.Linear(self.dim, hidden_size, bias=False)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.to_gate = nn.Linear(self.dim, 1)
        del self.to_out
        if at_head:
            self.floor = nn.Parameter(torch.tensor(FLOOR))
            self.loudness = nn.Parameter(torch.zeros(()))  # until it has been calibrated or trained, it says nothing
            self.register_buffer("sizes", torch.ones(vocab_size))
        else:
            self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)
            nn.init.zeros_(self.to_out.weight)
        self.register_buffer("mean", torch.zeros(taps, hidden_size))
        self.register_buffer("scale", torch.ones(taps, hidden_size))
        generator = torch.Generator().manual_seed(0)  # the same features for all
        with torch.no_grad():
            random = torch.randn(features, code, generator=generator) / code**0.5
            nn.init.normal_(self.to_query.weight, std=self.dim**-0.5)
            self.to_key.weight.copy_(self.to_query.weight)
            nn.init.zeros_(self.to_query.bias)
            nn.init.zeros_(self.to_key.bias)
            self.to_features.weight.copy_(random)
            self.to_features.bias.fill_(-threshold)
            if self.to_gates is not None and "theta" in self.gate_names:
                self.to_gates.weight.zero_()
                self.to_gates.bias[self.gate_names.index("theta")] = torch.logit(torch.tensor(STEP))
        nn.init.zeros_(self.to_gate.weight)
        nn.init.zeros_(self.to_gate.bias)

    def standardise(self, states: Tensor) -> Tensor:
        """(batch, time, taps, hidden_size) as the input (batch, time, dim) of the memory."""
        x = ((states.to(self.mean.dtype) - self.mean) * self.scale).clamp(-LARGEST, LARGEST)
        return x.flatten(-2)

    def features_of(self, code: Tensor) -> Tensor:
        """(batch, time, features), of length 1: the features that codes of queries or keys have."""
        code = code * ((code.square().sum(-1, keepdim=True) + UNIT_EPS) / code.shape[-1]).rsqrt()
        found = F.relu(self.to_features(code))
        return found * (found.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()

    def init_state(self, batch_size: int) -> MemoryState:
        """As of :class:`titans.NeuralMemory`; the first token has no key."""
        state = super().init_state(batch_size)
        return replace(state, conv=(self.to_key.weight.new_zeros(batch_size, *self._conv_shape),))

    @property
    def _conv_shape(self) -> tuple[int, int]:
        return 1, self.features

    def _project(
        self, x: Tensor, past: tuple[Tensor, ...], mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        q, made = self.features_of(self.to_query(x)), self.features_of(self.to_key(x))
        before = past[0].to(q.dtype)
        k = torch.cat([before, made[:, :-1]], dim=1)
        v = self.to_value(x)
        v = v * (1 + v.square().sum(-1, keepdim=True)).rsqrt()
        return q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), (last_inputs(before, made, mask).clone(),)

    def output(self, y: Tensor, gate: Tensor) -> Tensor:
        """What the network said, y (batch, 1, time, hidden_size), as far as it is open: (batch, time, hidden_size)."""
        out: Tensor = self.to_out(y.to(gate.dtype).squeeze(1) * torch.sigmoid(gate))
        return out

    def likeness(self, y: Tensor, embedding: Tensor) -> Tensor:
        """How much y (batch, time, hidden_size) is like the value of each token: (batch, time, vocab_size)."""
        asked = F.linear(y, self.to_value.weight[:, : embedding.shape[1]].T) * self.scale[0]
        inner = F.linear(asked, embedding.to(asked.dtype)) - (asked * self.mean[0]).sum(-1, keepdim=True)
        return inner / self.sizes

    def logits(self, y: Tensor, gate: Tensor, embedding: Tensor) -> Tensor:
        """What it adds to the logits (batch, time, vocab_size): how much like the value of each token y is, above the
        floor.

        Args:
            y: of :meth:`write`, (batch, 1, time, hidden_size).
            gate: of :meth:`output_gate`, (batch, time, 1).
            embedding: (vocab_size, hidden_size), of the model: the first tap is made of it.
        """
        like = self.likeness(y.to(gate.dtype).squeeze(1), embedding)
        return self.loudness * torch.sigmoid(gate) * above(like, self.floor)


def above(like: Tensor, floor: Tensor | float) -> Tensor:
    """What is left of a likeness above a floor, about 0 below it."""
    return SOFTNESS * F.softplus((like - floor) / SOFTNESS)
