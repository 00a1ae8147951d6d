"""Losses: their gradients are those of their values, and Huber's is the definition in every engine that takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.cases import GUARD, Case, assert_same, draw, make, values, values_and_gradients
from titans.ops import (
    Dot,
    Huber,
    Loss,
    Squared,
    neural_memory_chunked,
    neural_memory_exact,
    neural_memory_recurrent,
)


@pytest.mark.parametrize("loss", [Squared(), Dot(), Huber(0.7), Huber(torch.tensor([[0.3], [1.2]]).double())], ids=str)
def test_the_gradient_is_that_of_the_value(loss: Loss) -> None:
    y, v = draw(2, 3, 5, seed=1).requires_grad_(), draw(2, 3, 5, seed=2)
    if isinstance(loss, Huber) and loss.parameter is not None:
        loss = Huber(loss.parameter[..., None])
    (expected,) = torch.autograd.grad(loss.value(y, v).sum(), y)
    torch.testing.assert_close(loss.scale * loss.gradient(y, v), expected)


def test_a_large_threshold_is_the_squared_loss_and_a_small_one_is_not() -> None:
    y, v = draw(3, 5, seed=1), draw(3, 5, seed=2)
    torch.testing.assert_close(Huber(1e3).value(y, v), Squared().value(y, v))
    assert (Huber(0.1).value(y, v) < Squared().value(y, v)).all()
    assert Huber(0.1).gradient(y, v).abs().max() <= 0.1


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan")])
def test_a_threshold_is_positive(threshold: float) -> None:
    with pytest.raises(ValueError, match=f"threshold is {threshold}; expected a positive number or a tensor of them"):
        Huber(threshold)


CASES = [
    *(Case(depth=depth, time=13) for depth in (1, 2, 3)),
    *(Case(depth=depth, time=13, bounded=True, masked=True, surprise=True) for depth in (1, 2)),
    Case(first_order=True, time=13),
    Case(depth=1, first_order=True, bounded=True, time=9),
    Case(norm=True, residual=True, rest=True, time=9),
    Case(depth=1, channels=True, surprise=True, time=9),
    Case(checkpoint_every=1, bias=True, max_norm=0.5, time=17),
]


@pytest.mark.parametrize("mode", ["chunked", "exact"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_huber_is_the_definition_with_the_gradient_of_its_threshold(case: Case, mode: str) -> None:
    call = make(case)
    found = []
    for op in ("recurrent", mode):
        threshold = torch.tensor([0.3, 0.8], dtype=torch.float64).view(-1, 1, 1).requires_grad_()
        options: dict[str, Any] = {"loss": Huber(threshold)}
        if mode == "exact" and case.max_norm is not None:
            options["guard_every"] = GUARD
        chunk = case.chunk
        if op == "recurrent":
            run, chunk = neural_memory_recurrent, chunk if mode == "chunked" else 1
        else:
            run = neural_memory_chunked if mode == "chunked" else neural_memory_exact  # type: ignore[assignment]
            options["checkpoint_every"] = case.checkpoint_every
        everything = values_and_gradients(run, call, chunk, **options)
        results = values(call(run, chunk, **options))
        weighed = sum((x * draw(*x.shape, seed=9)).sum() for x in results.values() if x.requires_grad)
        (everything["gradient of the threshold"],) = torch.autograd.grad(weighed, threshold)  # type: ignore[arg-type]
        assert everything["gradient of the threshold"].all(), "the case never reaches the threshold"
        found.append(everything)
    expected, actual = found
    assert_same(actual, expected)


def test_the_compiled_loops_decline_huber_and_say_so() -> None:
    with pytest.raises(
        ValueError, match="engine is 'native', which does not take this memory: loss is Huber, expected"
    ):
        make(Case())(neural_memory_chunked, 8, loss="huber", engine="native")
