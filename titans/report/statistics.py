"""How sure a mean is: intervals by drawing again from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
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
