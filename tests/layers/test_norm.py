"""RMSNorm as a compiled loop against PyTorch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titans.layers.norm import RMSNorm

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 5, 7), (130, 7), (0, 7)])
def test_it_is_the_norm_of_pytorch(shape: tuple[int, ...], dtype: torch.dtype, either_way: str) -> None:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(7, eps=1e-2).to(dtype), nn.RMSNorm(7, eps=1e-2).to(dtype)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x, way = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    results = []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        results.append([y.detach(), *torch.autograd.grad((y * way).sum(), [leaf, norm.weight])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_view_that_is_not_contiguous_is_normalised_too() -> None:
    norm = RMSNorm(4)
    x = torch.randn(2, 5, 3, 4).transpose(1, 2)
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (4,), norm.weight, 1e-6))
