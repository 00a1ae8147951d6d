"""What stands around the memory: convolution, SiLU and unit norms before it, norm and gate behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops.native import project as native
from titans.ops.native.library import can_run_native
from titans.ops.once import once_differentiable

UNIT_EPS = 1e-12  # added to a squared length before it is divided by


def project_heads(
    x: Tensor, past: Tensor | None, kernel: Tensor | None, heads: int, eps: Sequence[float | None]
) -> Tensor:
    """silu(conv(x)) cut into parts (queries, keys, values), one vector per head each, with its length normalised.

    Args:
        x: (batch, time, parts * heads * width).
        past: (batch, reach, channels), the inputs before x; None without a convolution.
        kernel: (reach + 1, channels), None likewise.
        eps: one a part: y / sqrt(||y||^2 + eps), of length 1 for a small eps, at most 1 for 1; None: as it is.

    Returns:
        (parts, batch, heads, time, width).
    """
    if can_run_native(x, past, kernel):
        return native.project(x, past, kernel, heads, eps)
    if kernel is not None:
        assert past is not None
        x = causal_conv(torch.cat([past, x], dim=1), kernel)
    parts = F.silu(x).unflatten(-1, (len(eps), heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return torch.stack(
        [
            y if e is None else y * torch.rsqrt(y.square().sum(-1, keepdim=True) + e)
            for y, e in zip(parts, eps, strict=True)
        ]
    )


def last_inputs(past: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """The ``past`` of the call after this one: each row's last inputs.

    Args:
        past: (batch, reach, channels).
        x: (batch, time, channels).
        mask: (batch, time) bool; False for padding, which must stand after a row's tokens.
    """
    reach, time = past.shape[1], x.shape[1]
    if mask is not None:
        index = mask.sum(1, keepdim=True) + torch.arange(reach, device=x.device)
        padded = torch.cat([past, x], dim=1)
        return padded.gather(1, index.unsqueeze(-1).expand(-1, -1, padded.shape[-1]))
    return x[:, time - reach :] if time >= reach else torch.cat([past[:, time:], x], dim=1)


def gate_output(y: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMSNorm(y) * silu(gate): y (batch, heads, time, width), gate and result (batch, time, heads * width)."""
    if can_run_native(y, weight, gate):
        return native.gate(y, weight, gate, eps)
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
