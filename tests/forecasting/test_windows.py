"""Windows: every one once, none dropped, pasts that reach back, and what is missing stays known as missing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from titans.forecasting.windows import Scaler, make_windows, split_rows


def counted(rows: int, channels: int = 1) -> np.ndarray:
    """A series whose values say where they stand."""
    return np.arange(rows, dtype=float)[:, None] + 1000 * np.arange(channels)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_every_window_comes_once_and_in_order_whatever_the_batch(batch_size: int) -> None:
    windows = make_windows([counted(30, 2)], [(12, 27)], past=5, future=4)
    batches = list(windows.in_order(batch_size))
    past, future = (torch.cat([batch[name] for batch in batches]) for name in ("past_values", "future_values"))
    by_hand = [(counted(30, 2)[t - 5 : t], counted(30, 2)[t : t + 4]) for t in range(12, 27 - 4 + 1)]
    assert len(windows) == len(by_hand) == 12
    assert torch.equal(past, torch.tensor(np.stack([x for x, _ in by_hand]), dtype=torch.float32))
    assert torch.equal(future, torch.tensor(np.stack([y for _, y in by_hand]), dtype=torch.float32))


def test_the_parts_of_a_series_share_pasts_and_no_future() -> None:
    parts = [make_windows([counted(40)], [ends], past=6, future=3) for ends in ((0, 20), (20, 30), (30, 40))]
    futures = [{int(x) for batch in part.in_order(8) for x in batch["future_values"].flatten()} for part in parts]
    assert futures == [set(range(6, 20)), set(range(20, 30)), set(range(30, 40))]
    assert next(parts[1].in_order(1))["past_values"].flatten().tolist() == list(range(14, 20))


def test_no_window_reaches_from_one_series_into_another() -> None:
    windows = make_windows([counted(10), counted(9) + 500], [(0, 10), (0, 9)], past=4, future=3)
    assert windows.origins.tolist() == [4, 5, 6, 7, 14, 15, 16]
    for batch in windows.in_order(1):
        whole = torch.cat([batch["past_values"], batch["future_values"]], dim=1).flatten()
        assert torch.equal(whole.diff(), torch.ones(6))


@pytest.mark.parametrize("ends", [(0, 6), (4, 6), (5, 6), (0, 2)])
def test_a_range_too_short_for_a_window_has_none(ends: tuple[int, int]) -> None:
    windows = make_windows([counted(6), counted(9)], [ends, (0, 9)], past=4, future=3)
    assert windows.origins.tolist() == [10, 11, 12]
    assert len(make_windows([counted(6)], [ends], past=4, future=3)) == 0


def test_missing_values_are_zeros_that_are_not_observed() -> None:
    series = counted(12)
    series[[2, 7]] = np.nan
    windows = make_windows([series], [(0, 12)], past=4, future=3)
    batch = windows.batch(torch.tensor([0]))
    assert batch["past_values"].flatten().tolist() == [0, 1, 0, 3]
    assert batch["past_observed_mask"].flatten().tolist() == [True, True, False, True]
    assert windows.batch(torch.tensor([1]))["future_observed_mask"].flatten().tolist() == [True, True, False]


def test_some_of_the_windows_are_spread_over_all() -> None:
    windows = make_windows([counted(100)], [(0, 100)], past=1, future=1)
    some = windows.at_most(10)
    assert some.origins.tolist() == [1, 12, 23, 34, 45, 55, 66, 77, 88, 99]
    assert windows.at_most(99) is windows


def test_scores_have_mean_0_and_deviation_1_and_come_back_as_they_were() -> None:
    values = np.random.default_rng(0).normal(5, [1.0, 20.0], (50, 2))
    values[3, 0] = np.nan
    scaler = Scaler.fit(values)
    scaled = scaler.scale(values)
    np.testing.assert_allclose(np.nanmean(scaled, 0), 0, atol=1e-12)
    np.testing.assert_allclose(np.nanstd(scaled, 0), 1)
    np.testing.assert_allclose(scaler.restore(scaled), values)


@pytest.mark.parametrize("level", [0.0, 7.0, 0.1, -1e8 / 3])
def test_a_constant_channel_keeps_its_unit(level: float) -> None:
    scaler = Scaler.fit(np.full((1000, 1), level))  # numpy gives 0.1 a deviation of 1e-17
    assert scaler.deviation.tolist() == [1.0]
    assert Scaler.fit(np.array([[level], [level + 1]])).deviation.tolist() == pytest.approx([0.5])


def test_a_series_is_split_into_training_validation_and_test_without_a_rest() -> None:
    assert split_rows(1000) == (700, 800, 1000)
    assert split_rows(17, valid=0.2, test=0.3) == (8, 12, 17)
