"""The memory of an adapter is the delta rule over sparse features, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titans.adapters.memory import TapMemory, above

HIDDEN, WORDS = 8, 20


def small() -> TapMemory:
    """A memory of two taps with weights of its own, in float64."""
    torch.manual_seed(0)
    memory = TapMemory(2, HIDDEN, WORDS, features=24, momentum=False, forgetting=False).double()
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    torch.nn.init.zeros_(memory.initial[0])
    return memory.eval()


def some_states(time: int = 40) -> Tensor:
    return torch.randn(1, time, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).double()


def features(memory: TapMemory, code: Tensor) -> Tensor:
    code = code / (code.norm() / code.numel() ** 0.5)
    found = torch.relu(memory.to_features.weight @ code + memory.to_features.bias)
    return found / found.norm()


@torch.no_grad()
def test_it_is_the_delta_rule_from_the_token_before_to_the_token() -> None:
    memory = small()
    x = memory.standardise(some_states())
    found, _ = memory.write(x, memory.init_state(1))
    weights, key = torch.zeros(HIDDEN, 24).double(), torch.zeros(24).double()
    for time, token in enumerate(x[0]):
        value = memory.to_value(token)
        value = value / (1 + value.square().sum()).sqrt()
        step = torch.sigmoid(memory.to_gates(token))[0]
        weights = weights + step * torch.outer(value - weights @ key, key)
        query = features(memory, memory.to_query(token))
        torch.testing.assert_close(found[0, 0, time], weights @ query, rtol=0, atol=1e-6)
        key = features(memory, memory.to_key(token))


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 1, 32]], ids=["one by one", "pieces"])
@torch.no_grad()
def test_any_split_gives_the_same_answers(sizes: list[int]) -> None:
    memory = small()
    x = memory.standardise(some_states())
    whole, _ = memory.write(x, memory.init_state(1))
    state, parts = memory.init_state(1), []
    for piece in x.split(sizes, dim=1):
        y, state = memory.write(piece, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=0, atol=1e-9)


@torch.no_grad()
def test_likeness_is_the_product_with_each_tokens_value() -> None:
    memory = small()
    embedding = torch.randn(WORDS, HIDDEN).double()
    memory.mean.normal_()
    memory.scale.uniform_(0.5, 2)
    words = F.pad((embedding - memory.mean[0]) * memory.scale[0], (0, HIDDEN))
    values = memory.to_value(words)
    memory.sizes.copy_(values.norm(dim=-1))
    y = torch.randn(1, 3, HIDDEN).double()
    torch.testing.assert_close(memory.likeness(y, embedding), y @ F.normalize(values, dim=-1).T)


def test_above_a_floor_is_a_soft_step() -> None:
    found = above(torch.tensor([-1.0, 0.2, 0.5, 1.0]), 0.4)
    assert found[0] < 1e-6 and found[1] < 1e-4
    torch.testing.assert_close(found[2:], torch.tensor([0.1, 0.6]), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"features": 0}, "features is 0; expected a whole number"), ({"heads": 2}, "heads is not a setting")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TapMemory(2, HIDDEN, WORDS, **settings)
