"""The memory network M: an MLP whose weights are the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_NORM_EPS = 1e-6


def _silu_derivative(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 + z * (1 - gate))


def _gelu_derivative(z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density


def _gelu_tanh_derivative(z: Tensor) -> Tensor:
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (z + 0.044715 * z**3))
    return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh.square()) * scale * (1 + 3 * 0.044715 * z.square())


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _relu_derivative(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (F.silu, _silu_derivative),
    "gelu": (F.gelu, _gelu_derivative),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_derivative),
    "relu": (F.relu, _relu_derivative),
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

    Called as ``network(weights, x)`` with one (batch, heads, out, in) weight a layer and x (batch, heads, time, in);
    returns (batch, heads, time, out).
    """

    activation: str = "silu"
    bias: bool = False
    residual: bool = False
    norm: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; expected one of {', '.join(ACTIVATIONS)}")

    def __call__(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        activate, _ = ACTIVATIONS[self.activation]
        h = x
        for index, weight in enumerate(weights):
            z = (append_one(h) if self.bias else h) @ weight.mT
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
