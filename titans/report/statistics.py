"""How sure a mean is: intervals by drawing again from what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # half a 95% interval, of 2 to 10 runs
LARGEST = 1e100
Interval = tuple[float, float] | tuple[None, None]


def bootstrap(values: Sequence[float], seed: int = 0, level: float = LEVEL) -> Interval:
    """The interval in which the mean of ``values`` lies with probability ``level``, by the percentile bootstrap.

    Where all of them are 0 or all are 1, drawing again says nothing: then it is Wilson's interval of a share. Of a
    single value nothing is known, and both ends are None.
    """
    if not len(values):
        raise ValueError("values is empty; expected at least one")
    if len(values) == 1:
        return None, None
    data = np.asarray(values, dtype=np.float64)
    if data.min() == data.max() and data[0] in (0.0, 1.0):
        width = NormalDist().inv_cdf((1 + level) / 2) ** 2
        far = width / (len(data) + width)
        return (0.0, far) if data[0] == 0 else (1 - far, 1.0)
    drawn = np.random.default_rng(seed).integers(0, len(data), (RESAMPLES, len(data)))
    means = data[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def is_number(value: Any) -> bool:
    """Whether this is a number, and not a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite(value: Any) -> float | None:
    """The number, or None if it is missing, not finite, or too large for any figure."""
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

    @property
    def margin(self) -> float | None:
        """How far the interval reaches, on its longer side."""
        return None if self.low is None or self.high is None else max(self.value - self.low, self.high - self.value)

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def mean_of_cells(cells: Sequence[Mapping[str, Any]]) -> Estimate | None:
    """The mean over cells of one run, None without a value; the cells' intervals add up as those of separate draws."""
    good = [cell for cell in cells if finite(cell.get("value")) is not None]
    if not good:
        return None
    value = statistics.fmean(float(cell["value"]) for cell in good)
    ends = [(finite(cell.get("low")), finite(cell.get("high")), float(cell["value"])) for cell in good]
    below = [v - low for low, _, v in ends if low is not None]
    above = [high - v for _, high, v in ends if high is not None]
    if len(below) < len(good) or len(above) < len(good):
        return Estimate(value, None, None, len(good) == len(cells))
    low, high = value - math.hypot(*below) / len(good), value + math.hypot(*above) / len(good)
    return Estimate(value, low, high, len(good) == len(cells))


def mean_of_runs(runs: Sequence[Estimate | None], top: float = math.inf) -> Estimate | None:
    """The mean over runs, None if none has a value.

    The interval is Student's over the runs, or that of a run by itself, on average, where it reaches further: all runs
    are measured on the same sequences, so that more of them are no surer of what these leave open. It stays within 0
    and ``top``.
    """
    good = [run for run in runs if run is not None]
    if len(good) < 2:
        return Estimate(good[0].value, good[0].low, good[0].high, good[0].whole and len(runs) == 1) if good else None
    values = [run.value for run in good]
    value = statistics.fmean(values)
    reach = STUDENT[min(len(good), 10) - 2] * statistics.stdev(values) / math.sqrt(len(good))
    low, high = value - reach, value + reach
    if all(run.low is not None and run.high is not None for run in good):
        low = min(low, value - statistics.fmean(run.value - run.low for run in good))  # type: ignore[operator]
        high = max(high, value + statistics.fmean(run.high - run.value for run in good))  # type: ignore[operator]
    # a value beyond the limits is an error of whoever wrote it, and is shown as it is
    low, high = max(low, min(0.0, value)), min(high, max(top, value))
    return Estimate(value, low, high, len(good) == len(runs) and all(run.whole for run in good))
