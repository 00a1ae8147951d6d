"""Every window of a series that a forecaster is trained or tested on: a past, and the future that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = dict[str, Tensor]  # past_values, past_observed_mask, future_values, future_observed_mask


@dataclass(frozen=True)
class Scaler:
    """What turns the values of each channel into z-scores, and back."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def fit(cls, values: NDArray[np.float64]) -> Scaler:
        """Of (time, channels), NaN where a value is missing; a constant channel keeps its unit."""
        mean, deviation = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
        # of equal numbers, the deviation is one of rounding
        return cls(mean, np.where(deviation > 1e-9 * np.abs(mean), deviation, 1.0))

    def scale(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., channels) as z-scores."""
        return (values - self.mean) / self.deviation

    def restore(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., channels) in the units of the data."""
        return values * self.deviation + self.mean


@dataclass(frozen=True)
class Windows:
    """Windows of one or more series, which stand one after the other in ``values``.

    Attributes:
        values: (time, channels), 0 where a value is missing.
        observed: (time, channels) bool.
        origins: where each window's future starts.
        past, future: how many values lie before and after an origin.
    """

    values: Tensor
    observed: Tensor
    origins: Tensor
    past: int
    future: int

    def __len__(self) -> int:
        return len(self.origins)

    def batch(self, numbers: Tensor) -> Batch:
        """The windows of these numbers, as a forecaster takes them."""
        origins = self.origins[numbers].unsqueeze(1)
        past = origins + torch.arange(-self.past, 0)
        future = origins + torch.arange(self.future)
        return {
            "past_values": self.values[past],
            "past_observed_mask": self.observed[past],
            "future_values": self.values[future],
            "future_observed_mask": self.observed[future],
        }

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """All windows, each once, the last batch smaller if need be."""
        for numbers in torch.arange(len(self)).split(batch_size):
            yield self.batch(numbers)

    def at_most(self, count: int) -> Windows:
        """The same windows, or ``count`` of them, spread evenly."""
        if len(self) <= count:
            return self
        return replace(self, origins=self.origins[torch.linspace(0, len(self) - 1, count).round().long()])


def make_windows(
    series: Sequence[NDArray[np.float64]],
    ranges: Sequence[tuple[int, int]],
    past: int,
    future: int,
) -> Windows:
    """All windows whose futures lie in the given range of rows of each series, (time, channels) each.

    Pasts may reach back before the range: what is known is known. A series too short for a window has none.
    """
    stacked = torch.from_numpy(np.concatenate([np.asarray(values, np.float32) for values in series]))
    observed = torch.isfinite(stacked)
    origins, offset = [], 0
    for values, (start, stop) in zip(series, ranges, strict=True):
        first = max(start, past)
        origins.append(torch.arange(first, max(first, stop - future + 1)) + offset)
        offset += len(values)
    return Windows(stacked.masked_fill(~observed, 0), observed, torch.cat(origins), past, future)


def split_rows(rows: int, valid: float = 0.1, test: float = 0.2) -> tuple[int, int, int]:
    """Where the training, validation and test parts of a series end, as shares of its rows.

    Training and test parts are rounded down, as in the comparisons of Informer and its successors.
    """
    train = int(rows * round(1 - valid - test, 9))
    return train, max(train, rows - int(rows * test)), rows
