"""How sure a mean is: 95% intervals of shares, of other means, and over runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # half a 95% interval, of 2 to 10 runs
LARGEST = 1e100
Interval = tuple[float, float] | tuple[None, None]


def wilson(share: float, count: float, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's interval of a share of ``count`` trials, which stays within 0 and 1: 20 of 20 is 0.84 to 1."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    shrink = 1 + z**2 / count
    middle = (share + z**2 / (2 * count)) / shrink
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / shrink
    # near 0 and 1 the ends are exact but for rounding
    return min(share, max(0.0, middle - reach)), max(share, min(1.0, middle + reach))


def bootstrap(values: Sequence[float], seed: int = 0, level: float = LEVEL) -> Interval:
    """The interval in which the mean of ``values`` lies with probability ``level``, by the percentile bootstrap.

    Where all of them are 0 or all are 1, resampling says nothing: then it is Wilson's interval of a share. A single
    value says nothing about its spread, and both ends are None.
    """
    if not len(values):
        raise ValueError("values is empty; expected at least one")
    if len(values) == 1:
        return None, None
    data = np.asarray(values, dtype=np.float64)
    if data.min() == data.max() and data[0] in (0.0, 1.0):
        return wilson(float(data[0]), len(data), level)
    drawn = np.random.default_rng(seed).integers(0, len(data), (RESAMPLES, len(data)))
    means = data[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def is_number(value: Any) -> bool:
    """Whether this is a number, and not a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_number(value: Any) -> float | None:
    """The number, or None if this is none, or not finite, or too large for any figure."""
    return float(value) if is_number(value) and abs(value) < LARGEST else None


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval.

    Attributes:
        value: the mean.
        low, high: ends of the interval, None where the results have none.
        whole: whether everything that it is the mean of had a value.
    """

    value: float
    low: float | None
    high: float | None
    whole: bool = True

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def pool_shares(cells: Sequence[Mapping[str, Any]]) -> Estimate | None:
    """The mean over cells whose values are shares, each cell with the same weight, and the interval of all together.

    The interval is Wilson's, of as many trials as the cells have values: 10 of 10 and 10 of 10 is 20 of 20. Values
    between 0 and 1, as those of sequences with several questions, spread less than right and wrong do, and count as
    the larger number of trials that would spread as little; where all are alike, nothing is known of their spread, and
    each counts once. A cell that does not list its values holds ``count`` of them, right or wrong.

    None without a value; no interval where a cell does not say of how many it is.
    """
    good = [cell for cell in cells if as_number(cell.get("value")) is not None]
    if not good:
        return None
    share, whole = fmean(float(cell["value"]) for cell in good), len(good) == len(cells)
    counts, means, squares = [], [], []
    for cell in good:
        values = [number for value in cell.get("values") or () if (number := as_number(value)) is not None]
        counts.append(len(values) or as_number(cell.get("count")) or 0.0)
        means.append(fmean(values) if values else float(cell["value"]))
        squares.append(fmean(value**2 for value in values) if values else float(cell["value"]))
    if min(counts) < 1 or not 0 <= share <= 1:
        return Estimate(share, None, None, whole)
    trials = len(good) ** 2 / math.fsum(1 / count for count in counts)
    variance = fmean(squares) - fmean(means) ** 2
    if variance > 1e-9:
        trials *= max(1.0, share * (1 - share) / variance)
    return Estimate(share, *wilson(share, trials), whole)


def mean_of_cells(cells: Sequence[Mapping[str, Any]]) -> Estimate | None:
    """The mean over cells of one run, None without a value; the cells' intervals add up as those of separate draws."""
    good = [cell for cell in cells if as_number(cell.get("value")) is not None]
    if not good:
        return None
    value = fmean(float(cell["value"]) for cell in good)
    ends = [(as_number(cell.get("low")), as_number(cell.get("high")), float(cell["value"])) for cell in good]
    below = [v - low for low, _, v in ends if low is not None]
    above = [high - v for _, high, v in ends if high is not None]
    if len(below) < len(good) or len(above) < len(good):
        return Estimate(value, None, None, len(good) == len(cells))
    low, high = value - math.hypot(*below) / len(good), value + math.hypot(*above) / len(good)
    return Estimate(value, low, high, len(good) == len(cells))


def mean_of_runs(runs: Sequence[Estimate | None], top: float = math.inf) -> Estimate | None:
    """The mean over runs, None if none has a value.

    The interval is Student's over the runs, or the average one of a single run where that reaches further: all runs
    are measured on the same sequences, so more runs say no more about other sequences. It stays within 0 and ``top``.
    """
    good = [run for run in runs if run is not None]
    if len(good) < 2:
        return Estimate(good[0].value, good[0].low, good[0].high, good[0].whole and len(runs) == 1) if good else None
    values = [run.value for run in good]
    value = fmean(values)
    reach = STUDENT[min(len(good), 10) - 2] * statistics.stdev(values) / math.sqrt(len(good))
    low, high = value - reach, value + reach
    if all(run.low is not None and run.high is not None for run in good):
        low = min(low, value - fmean(run.value - run.low for run in good))  # type: ignore[operator]
        high = max(high, value + fmean(run.high - run.value for run in good))  # type: ignore[operator]
    # a value beyond the limits is an error of whoever wrote it, and is shown as it is
    low, high = max(low, min(0.0, value)), min(high, max(top, value))
    return Estimate(value, low, high, len(good) == len(runs) and all(run.whole for run in good))
