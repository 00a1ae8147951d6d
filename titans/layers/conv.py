"""Depthwise causal convolution, with a backward pass that is as fast as its forward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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


def stream_conv(x: Tensor, kernel: Tensor, past: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal convolution over a stretch of a stream, channel by channel.

    Args:
        x: (batch, time, channels).
        kernel: (width, channels).
        past: (batch, width - 1, channels), the last inputs before x.
        mask: (batch, time) bool; False for padding, which must stand after a row's tokens.

    Returns:
        (batch, time, channels), and the last inputs of each row, to go on from.
    """
    padded = torch.cat([past.to(x.dtype), x], dim=1)
    width = kernel.shape[0] - 1
    if mask is None:
        last = padded[:, padded.shape[1] - width :]
    else:
        index = mask.sum(1, keepdim=True) + torch.arange(width, device=x.device)
        last = padded.gather(1, index.unsqueeze(-1).expand(-1, -1, padded.shape[-1]))
    return causal_conv(padded, kernel.to(x.dtype)), last


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
