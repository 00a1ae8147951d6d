from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.cases import cell
from titans.report.statistics import Estimate, bootstrap, mean_of_cells, mean_of_runs, pool_shares, wilson

SHARES = st.floats(0, 1)


def shares(*values: float) -> dict[str, Any]:
    """A cell with these values."""
    return {"value": sum(values) / len(values), "values": list(values), "count": len(values)}


@pytest.mark.parametrize(
    ("right", "low", "high"), [(20, 0.8389, 1.0), (0, 0.0, 0.1611), (10, 0.2993, 0.7007), (19, 0.7639, 0.9911)]
)
def test_the_interval_of_a_share_is_wilson_s(right: int, low: float, high: float) -> None:
    values = [1.0] * right + [0.0] * (20 - right)
    assert wilson(right / 20, 20) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    listed, counted = pool_shares([shares(*values)]), pool_shares([{"value": right / 20, "count": 20}])
    assert listed is not None and counted is not None
    assert (listed.low, listed.high) == pytest.approx(wilson(right / 20, 20))
    assert (counted.low, counted.high) == pytest.approx(wilson(right / 20, 20))


def test_cells_are_pooled() -> None:
    assert pool_shares([shares(*[1] * 10), shares(*[1] * 10)]) == pool_shares([shares(*[1] * 20)])
    assert pool_shares([shares(*[1] * 10), shares(*[0] * 10)]) == pool_shares([shares(*[0, 1] * 10)])


def test_cells_weigh_the_same_and_a_small_one_makes_the_mean_less_sure() -> None:
    uneven, even = pool_shares([shares(*[1] * 5), shares(*[1] * 95)]), pool_shares([shares(*[1] * 50)] * 2)
    assert uneven is not None and even is not None and uneven.low is not None and even.low is not None
    assert uneven.low < even.low
    mixed = pool_shares([shares(*[0] * 2), shares(*[1] * 30)])
    assert mixed is not None and mixed.value == 0.5


def test_fractions_spread_less_than_right_and_wrong_and_are_surer() -> None:
    fractions = [0.25, 0.5, 0.5, 0.75] * 10
    pooled, hits = pool_shares([shares(*fractions)]), pool_shares([shares(*[0.0, 1.0] * 20)])
    assert pooled is not None and hits is not None
    low, high = bootstrap(fractions)
    assert (pooled.low, pooled.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    assert hits.low is not None and pooled.low is not None and hits.low < pooled.low - 0.05


def test_fractions_that_are_all_alike_count_once_each() -> None:
    pooled = pool_shares([shares(*[1 / 3] * 20)])
    assert pooled is not None and (pooled.low, pooled.high) == pytest.approx(wilson(1 / 3, 20))
    rounded = pool_shares([{"value": 2 / 3, "values": [0.666667] * 20}])  # as results keep them
    assert rounded is not None and (rounded.low, rounded.high) == pytest.approx(wilson(2 / 3, 20))


def test_shares_of_nobody_knows_how_many_have_no_interval() -> None:
    assert pool_shares([{"value": 0.5}]) == Estimate(0.5, None, None)
    assert pool_shares([shares(1, 0), {"value": 0.5}]) == Estimate(0.5, None, None)
    assert pool_shares([{"value": 1.5, "count": 20}]) == Estimate(1.5, None, None)  # no share at all
    assert pool_shares([{"value": None, "count": 20}]) is None


@given(st.lists(st.lists(SHARES, min_size=1, max_size=20), min_size=1, max_size=5))
def test_the_interval_of_shares_holds_their_mean_and_stays_within_0_and_1(groups: list[list[float]]) -> None:
    mean = pool_shares([shares(*values) for values in groups])
    assert mean is not None and mean.low is not None and mean.high is not None
    assert 0 <= mean.low <= mean.value + 1e-12 and mean.value - 1e-12 <= mean.high <= 1
    over_runs = mean_of_runs([mean, mean, pool_shares([shares(*groups[0])])], 1.0)
    assert over_runs is not None and over_runs.low is not None and over_runs.high is not None
    assert 0 <= over_runs.low <= over_runs.high <= 1


def test_the_interval_of_a_mean_over_cells_shrinks_with_their_number() -> None:
    assert mean_of_cells([cell(0.5, 0.1)] * 4) == Estimate(0.5, pytest.approx(0.45), pytest.approx(0.55))


def test_the_interval_of_a_mean_over_runs_is_student_s() -> None:
    # the mean of 1, 2, 3 has a standard error of 1 / sqrt(3), and Student's factor for three is 4.30
    runs = [Estimate(value, value - 0.1, value + 0.1) for value in (1.0, 2.0, 3.0)]
    mean = mean_of_runs(runs)
    assert mean is not None and mean.value == 2
    assert mean.low == 0  # a measure is not negative
    assert mean.high == pytest.approx(2 + 4.30 / math.sqrt(3))
    clipped = mean_of_runs([Estimate(value, None, None) for value in (0.9, 1.0, 0.95)], top=1.0)
    assert clipped is not None and clipped.high == 1


def test_runs_that_agree_are_no_surer_than_one_as_all_were_measured_on_the_same() -> None:
    mean = mean_of_runs([Estimate(0.5, 0.4, 0.7)] * 4)
    assert mean == Estimate(0.5, pytest.approx(0.4), pytest.approx(0.7))


@given(st.lists(st.one_of(st.none(), SHARES), max_size=6), SHARES)
def test_a_mean_lies_among_its_values_and_within_its_interval(values: list[float | None], half: float) -> None:
    cells = [cell(value, half) for value in values]
    good = [value for value in values if value is not None]
    for mean in (mean_of_cells(cells), mean_of_runs([mean_of_cells([one]) for one in cells], 1.0)):
        if not good:
            assert mean is None
            continue
        assert mean is not None and mean.low is not None and mean.high is not None
        assert min(good) - 1e-9 <= mean.value <= max(good) + 1e-9
        assert mean.low <= mean.value <= mean.high
        assert mean.whole == (len(good) == len(values))
