"""What stands around the memory: convolution, SiLU and unit norms before it, norm and gate behind it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans.ops.native import project as native

UNIT_EPS = 1e-12  # added to a squared length before it is divided by


def project_qkv(x: Tensor, past: Tensor | None, kernel: Tensor | None, heads: int, bounded: bool) -> Tensor:
    """silu(conv(x)) cut into queries and keys of length 1 and values, at most of length 1 if ``bounded``.

    Args:
        x: (batch, time, 3 * heads * width).
        past: (batch, reach, channels), the inputs before x; None without a convolution.
        kernel: (reach + 1, channels), None likewise.

    Returns:
        (3, batch, heads, time, width).
    """
    if native.available(x, past, kernel):
        result: Tensor = native.Project.apply(x, past, kernel, heads, bounded, UNIT_EPS)
        return result
    if kernel is not None:
        assert past is not None
        x = causal_conv(torch.cat([past, x], dim=1), kernel)
    q, k, v = F.silu(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + UNIT_EPS) for y in (q, k))
    if bounded:  # what is read is normalised, so a value's direction is what counts
        v = v * torch.rsqrt(v.square().sum(-1, keepdim=True) + 1)
    return torch.stack([q, k, v])


def gate_output(y: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMSNorm(y) * silu(gate): y (batch, heads, time, width), gate and result (batch, time, heads * width)."""
    if native.available(y, weight, gate):
        result: Tensor = native.Gate.apply(y, weight, gate, eps)
        return result
    return F.rms_norm(y, weight.shape, weight, eps).transpose(1, 2).flatten(2) * F.silu(gate)


def causal_conv(padded: Tensor, kernel: Tensor) -> Tensor:
    """y_t = sum_o kernel_o * padded_{t+o}, channel by channel.

    Args:
        padded: (batch, time + width - 1, channels): the inputs, behind the last width - 1 inputs before them.
        kernel: (width, channels); its last row multiplies the present token.

    Returns:
        (batch, time, channels).
    """
    result: Tensor = _CausalConv.apply(padded, kernel)
    return result


def _correlate(padded: Tensor, kernel: Tensor) -> Tensor:
    weight = kernel.t()[:, None, None, :]
    return F.conv2d(padded.mT.unsqueeze(2), weight, groups=kernel.shape[1]).squeeze(2).mT


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(padded, kernel)
        return _correlate(padded, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        padded, kernel = ctx.saved_tensors
        width, time = kernel.shape[0], grad.shape[1]
        to_padded = to_kernel = None
        if ctx.needs_input_grad[0]:
            to_padded = _correlate(F.pad(grad, (0, 0, width - 1, width - 1)), kernel.flip(0))
        if ctx.needs_input_grad[1]:
            rows = [(grad * padded[:, o : o + time]).sum((0, 1)) for o in range(width)]
            to_kernel = torch.stack(rows)
        return to_padded, to_kernel
