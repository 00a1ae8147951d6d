"""Layers that somebody has taken over: what they say counts, not the weight below."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from titans.layers import NeuralMemory
from titans.layers.linear import call_wide, first_outputs, is_plain

X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Module):
    """What an adapter does: the layer below, and something more."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def hooked(base: nn.Linear) -> nn.Module:
    base.register_forward_hook(lambda module, args, y: 2 * y)
    return base


def replaced(base: nn.Linear) -> nn.Module:
    old = base.forward
    base.forward = lambda x: 2 * old(x)  # type: ignore[method-assign]
    return base


TAKEN: list[Callable[[nn.Linear], nn.Module]] = [Doubled, hooked, replaced]


@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_layer_gives_the_first_of_its_channels(bias: bool) -> None:
    module = nn.Linear(6, 9, bias=bias)
    assert is_plain(module)
    torch.testing.assert_close(first_outputs(module, X, 4), module(X)[..., :4])


@pytest.mark.parametrize("take", TAKEN)
def test_a_layer_that_was_taken_over_is_called(take: Callable[[nn.Linear], nn.Module]) -> None:
    base = nn.Linear(6, 9)
    expected = 2 * base(X)
    module = take(base)
    assert not is_plain(module)
    torch.testing.assert_close(first_outputs(module, X, 4), expected[..., :4])  # type: ignore[arg-type]
    torch.testing.assert_close(call_wide(module, X, torch.float32), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("take", [lambda module: module, Doubled])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wide_call_is_float32_under_autocast(take: Callable[[nn.Linear], nn.Module], dtype: torch.dtype) -> None:
    module = take(nn.Linear(6, 9).to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call_wide(module, X, torch.float32)  # type: ignore[arg-type]
    assert y.dtype == torch.float32
    if dtype == torch.float32:
        torch.testing.assert_close(y, module(X))


@pytest.mark.parametrize("name", ["to_qkv", "to_gates", "to_gate", "to_out", "norm"])
def test_every_projection_and_the_norm_of_a_memory_can_be_taken_over(name: str) -> None:
    torch.manual_seed(0)
    memory, merged = NeuralMemory(6, heads=2), NeuralMemory(6, heads=2)
    nn.init.normal_(memory.initial[-1])
    merged.load_state_dict(memory.state_dict())
    with torch.no_grad():
        for parameter in getattr(merged, name).parameters():
            parameter *= 2
    setattr(memory, name, Doubled(getattr(memory, name)))
    torch.testing.assert_close(memory(X)[0], merged(X)[0])
    torch.testing.assert_close(memory.read(X), merged.read(X))
    one = X[:, :1]
    torch.testing.assert_close(memory.step(one)[0], merged.step(one)[0])
