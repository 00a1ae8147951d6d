"""Convolution, SiLU, norms and gate: the compiled loops against PyTorch, values and gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from titans.ops.native import library
from titans.ops.project import UNIT_EPS, gate_output, last_inputs, project_heads

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def with_gradients(function: Callable[[], Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    result = function()
    weight = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return [result.detach(), *torch.autograd.grad((result * weight).sum(), leaves)]


def compare(function: Callable[[], Tensor], leaves: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TITANS_NATIVE") == "0":
        pytest.skip("the compiled loops are switched off")
    assert library.library(leaves[0].dtype) is not None, "these tests need a C compiler"
    compiled = with_gradients(function, leaves)
    monkeypatch.setattr(library, "library", lambda dtype: None)
    tolerance = TOLERANCE[leaves[0].dtype]
    for found, expected in zip(compiled, with_gradients(function, leaves), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("eps", [(UNIT_EPS, UNIT_EPS, 1.0), (None, UNIT_EPS, None), (1.0,)])
@pytest.mark.parametrize(("time", "reach"), [(1, 3), (2, 3), (3, 3), (40, 3), (7, 0), (7, None)])
def test_projection(
    time: int, reach: int | None, eps: tuple[float | None, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(time)
    channels, heads = len(eps) * 2 * 5, 2
    x = torch.randn(2, time, channels, dtype=dtype, requires_grad=True)
    past = kernel = None
    if reach is not None:
        past = torch.randn(2, reach, channels, dtype=dtype, requires_grad=True)
        kernel = torch.randn(reach + 1, channels, dtype=dtype, requires_grad=True)
    leaves = [t for t in (x, past, kernel) if t is not None and t.numel()]
    compare(lambda: project_heads(x, past, kernel, heads, eps), leaves, monkeypatch)


def test_projection_is_the_textbook_one(either_way: str) -> None:
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    past, kernel = torch.randn(1, 2, 12, dtype=torch.float64), torch.randn(3, 12, dtype=torch.float64)
    rows = torch.cat([past, x], dim=1)
    z = torch.stack([(rows[0, t : t + 3] * kernel).sum(0) for t in range(6)])
    h = (z * torch.sigmoid(z)).view(6, 3, 2, 2)
    found = project_heads(x, past, kernel, 2, (UNIT_EPS, UNIT_EPS, 1.0))
    for t in range(6):
        for part in range(3):
            for head in range(2):
                expected = h[t, part, head] / (h[t, part, head].square().sum() + (UNIT_EPS, UNIT_EPS, 1)[part]).sqrt()
                torch.testing.assert_close(found[part, 0, head, t], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    y = torch.randn(2, 3, 7, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(5, dtype=dtype, requires_grad=True)
    gate = torch.randn(2, 7, 15, dtype=dtype, requires_grad=True)
    compare(lambda: gate_output(y, weight, gate, 1e-2), [y, weight, gate], monkeypatch)


@pytest.mark.parametrize("size", [1e-20, 1.0, 50.0, 1e6])
def test_large_and_tiny_inputs_stay_finite(size: float, either_way: str) -> None:
    x = (size * torch.randn(1, 9, 24)).requires_grad_()
    result = project_heads(x, None, None, 2, (UNIT_EPS, UNIT_EPS, 1.0))
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert result.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("time", [1, 2, 3, 10])
def test_the_last_inputs_are_each_rows_own(time: int) -> None:
    past, x = torch.arange(-3, 0).view(1, 3, 1).expand(2, 3, 1), torch.arange(time).view(1, time, 1).expand(2, time, 1)
    counts = (time, time // 2)
    mask = torch.arange(time) < torch.tensor(counts).unsqueeze(1)
    expected = torch.tensor([[count - 3, count - 2, count - 1] for count in counts]).unsqueeze(-1)
    assert torch.equal(last_inputs(past, x, mask), expected)
    assert torch.equal(last_inputs(past[:1], x[:1], None), expected[:1])
