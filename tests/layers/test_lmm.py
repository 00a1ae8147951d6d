from __future__ import annotations

import pytest
import torch

from titans import NeuralMemory
from titans.layers.blocks import LMMBlock


def block(**kwargs: object) -> LMMBlock:
    torch.manual_seed(0)
    return LMMBlock(16, NeuralMemory(16, heads=2, **kwargs), ffn_multiplier=2.0)  # type: ignore[arg-type]


RULES = [
    pytest.param({"mode": "exact", "depth": 1}, id="exact-linear"),
    pytest.param({"mode": "exact", "depth": 2, "chunk_size": 8, "sweeps": 8}, id="exact-deep"),
    pytest.param({"mode": "chunked", "depth": 2, "chunk_size": 4}, id="chunked"),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_stream_keeps_its_shape_and_the_block_is_a_change_to_it(rule: dict[str, object]) -> None:
    x = torch.randn(3, 10, 16)
    y, state = block(**rule)(x)
    assert y.shape == x.shape
    assert state.batch_size == 3
    assert not torch.equal(x, y)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("split", [1, 3, 4, 9])
def test_any_split_into_two_calls_gives_the_same_stream(rule: dict[str, object], split: int) -> None:
    layer = block(**rule).double()
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    whole, end = layer(x)
    first, state = layer(x[:, :split])
    second, state = layer(x[:, split:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(state.memory.weights, end.memory.weights)


def test_a_padded_row_gives_what_it_gives_alone() -> None:
    layer = block(mode="exact", depth=2).double()
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, :4] = False
    padded, _ = layer(x, mask=mask)
    alone, _ = layer(x[:1, 4:])
    torch.testing.assert_close(padded[:1, 4:], alone)


@pytest.mark.parametrize("rule", RULES)
def test_every_parameter_gets_a_gradient(rule: dict[str, object]) -> None:
    layer = block(**rule)
    y, _ = layer(torch.randn(2, 12, 16))
    (y * torch.randn_like(y)).sum().backward()
    without = [name for name, p in layer.named_parameters() if p.grad is None]
    assert without == []


def test_widths_that_do_not_fit_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"memory.dim is 16, the block's dim is 32"):
        LMMBlock(32, NeuralMemory(16))
    with pytest.raises(ValueError, match="ffn_multiplier x dim must be at least 1, got 0 x 16"):
        LMMBlock(16, NeuralMemory(16), ffn_multiplier=0)
