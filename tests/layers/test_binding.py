"""Other bindings of values to keys: each is its definition by autograd, and keeps what always holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import cases
from titans import NeuralMemory, TitansConfig
from titans.layers.binding import BINDINGS
from titans.ops import Tokens

DIM, TIME, BATCH, HEADS = 8, 7, 2, 2
# of each: steps per token, their sign, whether keys are the queries, and the first layer that learns
MEANINGS = {
    "two_steps": (2, 1, False, 0),
    "four_steps": (4, 1, False, 0),
    "ascent": (1, -1, False, 0),
    "key_queries": (1, 1, True, 0),
    "last_layer": (1, 1, False, 1),
}
every_binding = pytest.mark.parametrize("binding", BINDINGS)


def quick(name: str) -> Any:
    """Every binding, this one with the quick tests, the others with the slow ones."""
    marks = {each: () if each == name else pytest.mark.slow for each in BINDINGS}
    return pytest.mark.parametrize("binding", [pytest.param(each, marks=mark) for each, mark in marks.items()])


def draw(*shape: int, seed: int = 1) -> Tensor:
    return cases.draw(*shape, seed=seed)


def assert_same(expected: Iterable[Tensor], found: Iterable[Tensor]) -> None:
    one, other = ({str(i): each for i, each in enumerate(tensors)} for tensors in (expected, found))
    cases.assert_same(other, one)


def memory(binding: str | None, **options: Any) -> NeuralMemory:
    """A small memory, none of whose parameters stands at its start."""
    torch.manual_seed(0)
    layer = NeuralMemory(DIM, HEADS, binding=binding, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def tokens_of(layer: NeuralMemory, x: Tensor) -> Tokens:
    caught: list[Tokens] = []
    layer.observer = lambda tokens, state, surprise: caught.append(tokens)
    layer.write(x, layer.init_state(len(x)))
    layer.observer = None
    return caught[0]


def definition(layer: NeuralMemory, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Reads and weights of a bounded deep memory, one sequence, head, token and step after another."""
    steps, sign, from_keys, learned = MEANINGS[str(layer.binding)]
    q, k, v, theta, alpha, eta, _ = tokens_of(layer, x)
    assert alpha is not None and eta is not None
    outputs = []
    ends: list[list[Tensor]] = [[] for _ in layer.initial]

    def apply(weights: list[Tensor], x: Tensor) -> Tensor:
        for weight in weights[:-1]:
            x = F.silu(weight @ x)
        return weights[-1] @ x

    for row in range(BATCH):
        for head in range(HEADS):
            start = [weight[head] for weight in layer.initial]
            weights, momentum = [*start], [torch.zeros_like(weight) for weight in start]
            for t in range(TIME):
                at = row, head, t
                for step in range(steps):
                    error = apply(weights, k[at]) - v[at]
                    found = torch.autograd.grad(error.square().sum(), weights[learned:], create_graph=True)
                    kappa = sum(u.square().sum() for u in found) / (4 * error.square().sum())
                    size = sign * theta[at] / (1 + kappa)
                    keep = 1 - alpha[at] if step == 0 else 1
                    for i, u in enumerate(found, learned):
                        momentum[i] = eta[at] * momentum[i] - size * u
                        weights[i] = keep * (weights[i] - start[i]) + start[i] + momentum[i]
                outputs.append(apply(weights, (k if from_keys else q)[at]))
            for end, weight in zip(ends, weights, strict=True):
                end.append(weight)
    y = torch.stack(outputs).view(BATCH, HEADS, TIME, -1)
    return y, [torch.stack(end).view(BATCH, HEADS, *end[0].shape) for end in ends]


@every_binding
def test_every_binding_is_its_definition_with_gradients(binding: str) -> None:
    layer, x = memory(binding), draw(BATCH, TIME, DIM)
    y, state = layer.write(x, layer.init_state(BATCH))
    expected, weights = definition(layer, x)
    assert_same([expected, *weights], [y, *state.weights])
    direction = draw(*y.shape, seed=5)
    parameters = [*layer.initial, layer.to_qkv.weight, layer.to_gates.weight, layer.conv]  # type: ignore[union-attr]
    assert_same(*(torch.autograd.grad((each * direction).sum(), parameters) for each in (expected, y)))


@quick("two_steps")
@pytest.mark.parametrize("engine", ["dual", pytest.param("definition", marks=pytest.mark.slow)])
def test_every_engine_runs_every_binding_with_and_without_padding(binding: str, engine: str) -> None:
    x, mask = draw(BATCH, TIME, DIM), torch.ones(BATCH, TIME, dtype=torch.bool)
    mask[1, :3] = mask[0, 4] = False
    for options in ({}, {"bounded": False, "momentum": False, "forgetting": False, "theta_max": 0.1, "depth": 3}):
        expected = memory(binding, **options)(x, mask=mask, return_surprise=True)
        found = memory(binding, engine=engine, **options)(x, mask=mask, return_surprise=True)
        assert_same([expected[0], *expected[2]], [found[0], *found[2]])
        alone = memory(binding, **options)(x[1:, 3:])
        assert_same(alone[:1], [expected[0][1:, 3:]])


@quick("last_layer")
def test_any_split_gives_the_same(binding: str) -> None:
    layer, x = memory(binding), draw(BATCH, 40, DIM)
    whole, end = layer(x)
    outputs, state = [], None
    for part in x.split([1, 1, 21, 17], dim=1):
        y, state = layer.step(part, state) if part.shape[1] == 1 else layer(part, state)
        outputs.append(y)
    assert state is not None
    assert_same([whole, *end.weights, *end.momentum], [torch.cat(outputs, dim=1), *state.weights, *state.momentum])


def test_layers_before_the_last_stay_at_the_start() -> None:
    layer = memory("last_layer", depth=3)
    _, state = layer(draw(BATCH, TIME, DIM))
    moved = [not torch.equal(w, start.expand_as(w)) for w, start in zip(state.weights, layer.initial, strict=True)]
    assert moved == [False, False, True]
    x = draw(BATCH, TIME, DIM)
    assert torch.equal(memory("last_layer", depth=1)(x)[0], memory(None, depth=1)(x)[0])


def test_ascent_stays_finite_on_one_key_for_ever() -> None:
    layer = memory("ascent").float()
    with torch.no_grad():
        y, state = layer(torch.ones(1, 3000, DIM))
    assert y.isfinite().all() and all(w.isfinite().all() for w in state.weights)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"binding": "descent"}, "binding is 'descent'; expected one of two_steps, four_steps, ascent"),
        ({"binding": "ascent", "mode": "chunked"}, "binding is 'ascent'; expected it in exact mode"),
    ],
)
def test_what_cannot_be_bound_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        NeuralMemory(DIM, HEADS, **options)
    with pytest.raises(ValueError, match=r"^memory_binding is 'descent'; expected one of two_steps"):
        TitansConfig(memory_binding="descent")
