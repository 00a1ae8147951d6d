"""The memory network M: an MLP whose weights are the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_NORM_EPS = 1e-6


def _silu(z: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(z)
    value = z * gate
    return value, torch.addcmul(gate, value, 1 - gate)


def _gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    below = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return z * below, below + z * density


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor]:
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (z + 0.044715 * z**3))
    slope = 0.5 * z * (1 - tanh.square()) * scale * (1 + 3 * 0.044715 * z.square())
    return 0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + slope


def _relu(z: Tensor) -> tuple[Tensor, Tensor]:
    return F.relu(z), (z > 0).to(z.dtype)


class Activation(NamedTuple):
    """An activation: ``value(z)`` alone, and ``with_derivative(z)``, which shares the work."""

    value: Callable[[Tensor], Tensor]
    with_derivative: Callable[[Tensor], tuple[Tensor, Tensor]]


ACTIVATIONS = {
    "silu": Activation(F.silu, _silu),
    "gelu": Activation(F.gelu, _gelu),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), _gelu_tanh),
    "relu": Activation(F.relu, _relu),
}


def append_one(x: Tensor) -> Tensor:
    """``[x, 1]`` along the last dimension: a bias is a weight whose input is 1."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)


@dataclass(frozen=True)
class MemoryMLP:
    """M(x): linear layers with an activation between them, none at the end.

    Args:
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        bias: every weight is (out, in + 1); its last column multiplies a constant 1.
        residual: M(x) = x + MLP(x).
        norm: (weight, bias), each (heads, width): a LayerNorm on the MLP's output, before the residual.

    Called as ``network(weights, x)`` with one (batch, heads, out, in) weight per layer and x (batch, heads, time, in);
    returns (batch, heads, time, out). ``product(x, weight)`` may take the place of ``x @ weight.mT``.
    """

    activation: str = "silu"
    bias: bool = False
    residual: bool = False
    norm: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; expected one of {', '.join(ACTIVATIONS)}")

    def __call__(
        self, weights: Sequence[Tensor], x: Tensor, product: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        activate = ACTIVATIONS[self.activation].value
        h = x
        for index, weight in enumerate(weights):
            h = append_one(h) if self.bias else h
            z = h @ weight.mT if product is None else product(h, weight)
            h = activate(z) if index + 1 < len(weights) else z
        if self.norm is not None:
            gain, shift = self.norm
            h = F.layer_norm(h, h.shape[-1:], eps=LAYER_NORM_EPS) * gain.unsqueeze(-2) + shift.unsqueeze(-2)
        return x + h if self.residual else h


def layer_norm_vjp(z: Tensor, gain: Tensor, grad: Tensor) -> Tensor:
    """Pulls ``grad`` back through ``LayerNorm(z) * gain``; written out so that it can be differentiated again."""
    centred = z - z.mean(-1, keepdim=True)
    inverse_std = torch.rsqrt(centred.square().mean(-1, keepdim=True) + LAYER_NORM_EPS)
    unit = centred * inverse_std
    grad = grad * gain
    projection = grad.mean(-1, keepdim=True) + unit * (grad * unit).mean(-1, keepdim=True)
    return inverse_std * (grad - projection)
