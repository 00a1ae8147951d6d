"""The exact rule against its definition: outputs, final state and gradients, and how its sweeps get there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import (
    CHOICES,
    CHUNKS,
    LENGTHS,
    ONE_AT_A_TIME,
    Case,
    Op,
    assert_equals_the_definition,
    assert_same,
    exact_by_sweeps,
    make,
    mixed,
    relative_error,
    values,
    values_and_gradients,
)
from titans.ops import neural_memory_exact, neural_memory_recurrent

DECAY_FIRST = [
    Case(decay_first=True),
    Case(depth=1, decay_first=True),
    Case(depth=1, decay_first=True, channels=True, momentum=False),
    Case(decay_first=True, masked=True, bounded=True, surprise=True),
    Case(decay_first=True, first_order=True),
    Case(decay_first=True, rest=True, masked=True),
    Case(depth=1, decay_first=True, rest=True),
    Case(decay_first=True, loss="dot", forgetting=False),
]


both_ways = pytest.mark.parametrize("op", [neural_memory_exact, exact_by_sweeps], ids=["default", "sweeps"])


@both_ways
@pytest.mark.parametrize("case", ONE_AT_A_TIME + DECAY_FIRST, ids=str)
def test_every_option_equals_the_definition(case: Case, op: Op) -> None:
    assert_equals_the_definition(op, case)


@both_ways
@pytest.mark.parametrize("case", mixed(24, 2, {**CHOICES, "decay_first": (False, True)}), ids=str)
def test_mixed_options_equal_the_definition(case: Case, op: Op) -> None:
    assert_equals_the_definition(op, case)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize(
    "case",
    mixed(300, 2000, {**CHOICES, "decay_first": (False, True), "time": (1, 5, 17, 63, 64, 100, 257)}),
    ids=str,
)
def test_many_mixed_options_equal_the_definition(case: Case, op: Op) -> None:
    assert_equals_the_definition(op, case, allow_chaos=True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("time", LENGTHS)
def test_no_length_and_no_tile_moves_the_result(time: int, depth: int) -> None:
    call = make(Case(time=time, depth=depth, width=4))
    expected = values_and_gradients(neural_memory_recurrent, call, 1)
    tiles: list[int | None] = [None] if time > 100 else [*CHUNKS[: 4 if time < 64 or depth == 1 else 3], None]
    for tile in tiles:
        for op in (neural_memory_exact, exact_by_sweeps):
            assert_same(values_and_gradients(op, call, tile), expected)


def test_a_guarded_memory_takes_any_tile_too() -> None:
    call = make(Case(time=40, max_norm=0.5))
    expected = values(call(neural_memory_recurrent, 1, guard_every=12))
    for tile in (1, 5, 7, 12, 64, None):
        for op in (neural_memory_exact, exact_by_sweeps):
            assert_same(values(call(op, tile, guard_every=12)), expected)


def sweep_errors(call: Any, sweeps: list[int], tile: int) -> list[float]:
    """How far outputs are from the definition after so many sweeps."""
    expected = call(neural_memory_recurrent, 1)[0]
    return [relative_error(call(neural_memory_exact, tile, sweeps=n)[0], expected) for n in sweeps]


@pytest.mark.parametrize(
    ("case", "sweeps"),
    [(Case(time=32), [1, 2, 4, 8]), (Case(time=32, depth=3, bounded=True), [1, 8, 12, 20])],
    ids=["small steps", "large steps"],
)
def test_sweeps_converge_to_the_definition(case: Case, sweeps: list[int]) -> None:
    errors = sweep_errors(make(case), sweeps, tile=32)
    assert errors[0] > 1e-2, "the case is too easy to show anything"
    assert all(after < 0.5 * before for before, after in pairwise(errors))
    assert errors[-1] < 1e-6


def test_as_many_sweeps_as_tokens_are_exact_where_few_are_useless() -> None:
    """Equal keys and large steps: every token depends strongly on all before it."""
    call = make(Case(time=16))
    call = call.map(lambda name, x: x[:, :, :1].expand_as(x) if name == "k" else x)
    call = call.map(lambda name, x: 10 * x if name == "theta" else x)
    few, one_less, all_of_them, more = sweep_errors(call, [8, 15, 16, 100], tile=16)
    assert few > 1e-1
    assert max(one_less, all_of_them, more) < 1e-9


def test_residuals_tell_how_far_the_sweeps_have_come() -> None:
    call = make(Case(time=20))
    reports: dict[int, list[Tensor]] = {n: [] for n in (2, 4, 7)}
    for sweeps, residuals in reports.items():
        call(neural_memory_exact, 8, sweeps=sweeps, residuals=residuals)
        assert len(residuals) == 3, "one a tile"
        assert all(r.ndim == 0 and r.isfinite() for r in residuals)
    assert max(reports[7]) < max(reports[4]) < max(reports[2])


def test_linear_memory_has_no_residuals() -> None:
    residuals: list[Tensor] = []
    make(Case(depth=1))(neural_memory_exact, 8, residuals=residuals)
    assert residuals == []


def test_a_tolerance_stops_the_sweeps_when_it_is_met() -> None:
    call = make(Case(time=32))
    expected = call(neural_memory_recurrent, 1)[0]
    errors = []
    for tolerance in (1e-2, 1e-5, 1e-12):
        residuals: list[Tensor] = []
        y, _ = call(neural_memory_exact, 32, tolerance=tolerance, residuals=residuals)
        assert max(residuals) <= tolerance
        errors.append(relative_error(y, expected))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-9
    assert errors[0] > 1e-9, "a loose tolerance must save sweeps"


def test_few_sweeps_still_give_every_gradient() -> None:
    found = values_and_gradients(neural_memory_exact, make(Case()), 8, sweeps=1)
    gradients = {name: g for name, g in found.items() if name.startswith("gradient")}
    assert all(g.isfinite().all() and g.any() for g in gradients.values())
    assert torch.equal(found["y"], make(Case())(neural_memory_exact, 8, sweeps=1)[0])
