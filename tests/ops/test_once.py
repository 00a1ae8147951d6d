"""Second derivatives: exact, or refused, never silently zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from titans.layers import NeuralMemory, WindowAttention
from titans.ops import Tokens, run_memory

DIM, TIME = 4, 5


def memory(mode: str = "exact") -> NeuralMemory:
    torch.manual_seed(0)
    made = NeuralMemory(DIM, heads=1, mode=mode, chunk_size=2).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return made.requires_grad_(False)


def sequence(time: int = TIME) -> Tensor:
    return torch.randn(1, time, DIM, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mode", [pytest.param("exact", marks=pytest.mark.slow), "chunked"])
def test_the_definition_of_the_memory_can_be_differentiated_twice(mode: str) -> None:
    made = memory(mode)
    state = replace(made.init_state(1), conv=())
    q, k, v = (torch.randn(1, 1, 3, DIM, dtype=torch.float64, requires_grad=True) for _ in range(3))
    theta, alpha, eta = torch.rand(3, 1, 1, 3, dtype=torch.float64) / 3

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run_memory(made.rule(state), Tokens(q, k, v, theta, alpha, eta, None), state, "definition")[0]

    assert torch.autograd.gradgradcheck(read, (q, k, v), fast_mode=True)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("part", ["memory", "attention"])
def test_a_second_derivative_of_a_layer_is_refused_even_where_gradients_come_in_as_constants(part: str) -> None:
    made = memory() if part == "memory" else WindowAttention(DIM, 1, 4).double().requires_grad_(False)
    x = sequence(6)
    (gradient,) = torch.autograd.grad(made(x)[0].sum(), x, create_graph=True)
    loss = gradient.square().sum() + x.square().sum()
    for differentiate in (lambda: torch.autograd.grad(loss, x, retain_graph=True), loss.backward):
        with pytest.raises(RuntimeError, match=r"second derivative|derivative for .* is not implemented"):
            differentiate()


def test_a_graph_of_the_gradient_that_nobody_differentiates_changes_nothing() -> None:
    made, x = memory(), sequence()
    expected = torch.autograd.grad(made(x)[0].sum(), x)
    torch.testing.assert_close(torch.autograd.grad(made(x)[0].sum(), x, create_graph=True), expected)


def test_transforms_of_torch_func_are_refused() -> None:
    made = memory()
    weights = dict(made.named_parameters())
    x = sequence().detach()
    calls = (
        lambda: torch.vmap(lambda x: made(x)[0])(x[None]),
        lambda: torch.func.grad(lambda x: made(x)[0].sum())(x),
        lambda: torch.func.grad(lambda w: torch.func.functional_call(made, w, (x,))[0].sum())(weights),
    )
    for call in calls:
        with pytest.raises(ValueError, match="transform of torch"):
            call()
    torch.testing.assert_close(torch.func.functional_call(made, weights, (x,))[0], made(x)[0])
