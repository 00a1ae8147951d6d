"""Forecasting from the whole past: a series streams through the memory, and forecasts start from all of it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from titans.evaluation.score import reading
from titans.forecasting.training import Errors, forecast_errors
from titans.forecasting.windows import Scaler, Windows
from titans.models.cache import TitansCache, digest
from titans.models.configuration import TitansPredictionConfig
from titans.models.prediction import TitansForPrediction
from titans.ops.state import read_tensors, write_tensors
from titans.words import require_whole

FORMAT = "titans.Forecaster"
VERSION = "1"
# Tokens are read in blocks that lie where the series says, not the calls: any split into calls gives the same bits.
BLOCK = 32


class Forecaster:
    """A series that is observed as it comes, and forecast at any time from all that came.

    The last ``context_length`` values stand as they are. Older ones were read by the model's memory, once, as
    :meth:`TitansForPrediction.forward` reads a long past: forecasts equal those of one such call, at a cost in time and
    memory that does not grow with the series.

    Args:
        model: whose parameters are never changed.
        scaler: what turns observations into what the model was trained on, and forecasts back.
        test_time_learning: False: nothing older than the context is read, so that forecasts come from the last
            ``context_length`` values alone, by the same model. What the memory writes while it reads these stays: a
            model with ``config.memory_writes=False`` has none of it, neither here nor in training.
        batch_size: of several series that are observed together, a row of each at a time; None: one series.

    Attributes:
        seen: how many rows were observed.
    """

    def __init__(
        self,
        model: TitansForPrediction,
        scaler: Scaler | None = None,
        test_time_learning: bool = True,
        batch_size: int | None = None,
    ) -> None:
        if batch_size is not None:
            require_whole(batch_size=batch_size)
        channels = model.config.num_input_channels
        if scaler is not None and len(scaler.mean) != channels:
            raise ValueError(f"scaler is of {len(scaler.mean)} channels; expected {channels}, those of the model")
        self.model, self.scaler, self.test_time_learning, self.batch_size = (
            model,
            scaler,
            test_time_learning,
            batch_size,
        )
        self.seen = 0
        empty = batch_size or 1, 0, channels
        self._values = torch.empty(empty, dtype=model.values_dtype, device=model.device)  # the last ones, scaled
        self._observed = torch.empty(empty, dtype=torch.bool, device=model.device)
        self._cache: TitansCache | None = None
        self._read = 0  # tokens that the cache has read

    def observe(self, values: ArrayLike | Tensor, observed: ArrayLike | Tensor | None = None) -> None:
        """Takes the next rows of the series.

        Args:
            values: (time, channels); (channels,) is one row, and (time,) the rows of a single channel. With a
                ``batch_size``: (batch, time, channels).
            observed: the shape of ``values``, 0 where a value is missing; default: where it is NaN.
        """
        self._take(*self._checked(values, observed))

    def forecast(self, horizon: int | None = None, quantiles: bool = False) -> NDArray[Any]:
        """What comes next, in the units of the observations; the forecaster stays as it is.

        A horizon beyond ``prediction_length`` is reached by taking forecasts for observations. The quantiles of its
        later parts know nothing of the errors of the earlier ones: the further, the more they are too narrow.

        Args:
            horizon: rows to forecast; default: the model's ``prediction_length``.
            quantiles: whether to return the model's quantiles instead of point forecasts.

        Returns:
            (horizon, channels), or (horizon, channels, quantiles); with a ``batch_size``, (batch, horizon, ...). A
            channel without a value in the last ``context_length`` rows is NaN.
        """
        config = self.model.config
        horizon = config.prediction_length if horizon is None else horizon
        require_whole(horizon=horizon)
        if quantiles and not config.quantiles:
            raise ValueError("quantiles is True; expected a model with loss='quantile'")
        if not self.seen:
            raise ValueError("nothing was observed; expected a call of observe() before forecast()")
        ahead, parts = self.copy(), []
        for left in range(horizon, 0, -config.prediction_length):
            point, levels = ahead._predict()
            parts.append(levels if quantiles else point.unsqueeze(-1))
            if left > config.prediction_length:
                ahead._take(point, ~point.isnan())
        found = torch.cat(parts, dim=1)[:, :horizon].cpu().numpy()
        if self.scaler is not None:
            found = np.moveaxis(self.scaler.restore(np.moveaxis(found, -1, 0)), 0, -1)
        found = found if quantiles else found[..., 0]
        return found[0] if self.batch_size is None else found

    def copy(self) -> Forecaster:
        """Another forecaster that has observed the same; what either observes from here on is its own."""
        return copy.copy(self)  # tensors and caches are replaced, never changed

    @property
    def nbytes(self) -> int:
        """What the state weighs."""
        kept = self._values.nbytes + self._observed.nbytes
        return kept if self._cache is None else kept + self._cache.nbytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what was observed, but not the model, as one safetensors file, under a temporary name first."""
        tensors = {"values": self._values, "observed": self._observed}
        words = {
            "format": FORMAT,
            "version": VERSION,
            "config": json.dumps(self.model.config.fingerprint()),
            "model": digest(self.model.state_dict(), {}),
            "state": json.dumps([self.seen, self._read, self.test_time_learning, self.batch_size]),
        }
        if self.scaler is not None:
            tensors["mean"], tensors["deviation"] = (
                torch.from_numpy(x) for x in (self.scaler.mean, self.scaler.deviation)
            )
        if self._cache is not None:
            states, words_of_cache = self._cache.pack()
            tensors |= {f"cache.{name}": x for name, x in states.items()}
            words["cache"] = json.dumps(words_of_cache)
        write_tensors(path, tensors, words | {"digest": digest(tensors, words)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: TitansForPrediction) -> Forecaster:
        """Reads what :meth:`save` wrote, to go on with the same model; scaler and switches come from the file."""
        tensors, words = read_tensors(path, model.device, FORMAT, VERSION, "forecaster")
        if words.pop("digest", None) != digest(tensors, words):
            raise ValueError(f"{path} is damaged: its contents are not what was saved")
        theirs, mine = json.loads(words["config"]), model.config.fingerprint()
        for name in mine:
            if theirs.get(name) != mine[name]:
                raise ValueError(
                    f"{path} comes from a model with {name}={theirs.get(name)!r}; this one has {name}={mine[name]!r}"
                )
        if words["model"] != digest(model.state_dict(), {}):
            raise ValueError(f"{path} comes from a model with other weights; expected the model it was saved with")
        scaler = Scaler(*(tensors[name].cpu().numpy() for name in ("mean", "deviation"))) if "mean" in tensors else None
        seen, read, learning, batch_size = json.loads(words["state"])
        made = cls(model, scaler, learning, batch_size)
        made.seen, made._read, made._values, made._observed = seen, read, tensors["values"], tensors["observed"]
        if "cache" in words:
            states = {name.removeprefix("cache."): x for name, x in tensors.items() if name.startswith("cache.")}
            made._cache = TitansCache.unpack(states, json.loads(words["cache"]))
        return made

    def _checked(self, values: Any, observed: Any) -> tuple[Tensor, Tensor]:
        """Scaled rows and their mask, (batch, time, channels), for the model."""
        channels, rows = self.model.config.num_input_channels, self.batch_size
        given = _array("values", values)
        x = given
        if rows is None:
            x = (x.reshape(-1, 1) if channels == 1 and x.ndim < 2 else np.atleast_2d(x))[None]
        if x.ndim != 3 or len(x) != (rows or 1) or x.shape[2] != channels or not x.shape[1]:
            expected = f"(time, {channels})" if rows is None else f"({rows}, time, {channels})"
            raise ValueError(f"values has shape {given.shape}; expected {expected}, with at least one row")
        if observed is None:
            known = ~np.isnan(x)
        else:
            mask = _array("observed", observed)
            if mask.shape != given.shape:
                raise ValueError(f"observed has shape {mask.shape}; expected that of values, {given.shape}")
            known = mask.reshape(x.shape) != 0
        scaled = x if self.scaler is None else self.scaler.scale(x)
        kept = torch.from_numpy(np.where(known, scaled, 0.0)).to(self.model.device, self.model.values_dtype)
        if not bool(kept.isfinite().all()):
            raise ValueError(
                "values has numbers that are not finite; expected finite ones, or NaN or a 0 in observed where missing"
            )
        return kept, torch.from_numpy(known).to(self.model.device)

    def _take(self, values: Tensor, observed: Tensor) -> None:
        """Appends rows, reads the blocks of tokens that are complete, and keeps what is still needed."""
        first = self.seen - self._values.shape[1]
        self._values = torch.cat([self._values, values.masked_fill(~observed, 0)], dim=1)
        self._observed = torch.cat([self._observed, observed], dim=1)
        self.seen += values.shape[1]
        while self._unread >= BLOCK:
            self._cache = self._remember(BLOCK)
            self._read += BLOCK
        config = self.model.config
        needed = self.seen - config.context_length
        if self.test_time_learning:
            needed = min(needed, self._read * config.token_stride + config.token_length - config.context_length)
        drop = max(0, needed - first)
        self._values, self._observed = self._values[:, drop:].clone(), self._observed[:, drop:].clone()

    @property
    def _unread(self) -> int:
        """Tokens of the history, those that end before the context, which the cache has not read."""
        if not self.test_time_learning:
            return 0
        config = self.model.config
        spare = self.seen - config.context_length - config.token_length
        return max(0, spare // config.token_stride + 1) - self._read

    def _remember(self, count: int) -> TitansCache:
        """A cache that has read the next ``count`` tokens, too."""
        before, start, stop = _borders(self.model.config, self._read, count)
        first = self.seen - self._values.shape[1]
        values, observed = (x[:, before - first : stop - first] for x in (self._values, self._observed))
        cache = None if self._cache is None else self._cache.copy()
        with reading(self.model):
            return self.model.remember(values, observed, past_key_values=cache, already_read=start - before)

    def _predict(self) -> tuple[Tensor, Tensor]:
        """Point forecasts (batch, prediction_length, channels) and quantiles, scaled; NaN where nothing is known."""
        cache = self._remember(self._unread) if self._unread else self._cache
        values, observed = (x[:, -self.model.config.context_length :] for x in (self._values, self._observed))
        with reading(self.model):
            output = self.model(values, observed, past_key_values=cache)
        unknown = ~observed.any(1, keepdim=True)
        point, levels = output.prediction_outputs, output.quantile_outputs
        point = point.masked_fill(unknown, torch.nan)
        return point, point if levels is None else levels.masked_fill(unknown.unsqueeze(-1), torch.nan)


@torch.no_grad()
def streamed_errors(model: TitansForPrediction, windows: Windows, forecast: Callable[..., Any] | None = None) -> Errors:
    """The errors on every window, as if each past began with the first row of the series.

    Args:
        windows: of one series, in rising order, with the model's context as their past.
        forecast: called in place of the model.
    """
    model.eval()
    parts = [
        forecast_errors(partial(forecast or model.__call__, past_key_values=cache), block, len(block), model.device)
        for cache, block in streamed_states(model, windows)
    ]
    return Errors(*(sum(each) for each in zip(*((p.squared, p.absolute, p.count) for p in parts), strict=True)))


def streamed_states(model: TitansForPrediction, windows: Windows) -> Iterator[tuple[TitansCache | None, Windows]]:
    """The memory that has read what lies before the contexts of some windows, one copy for each, and these windows.

    The memory changes with every token, and many windows start between two tokens.
    """
    config = model.config
    size, step = config.token_length, config.token_stride
    counts = (windows.origins - config.context_length - size).div(step, rounding_mode="floor").add(1).clamp(min=0)
    cache: TitansCache | None = None
    read = first = 0
    for count, block in zip(*(x.tolist() for x in counts.unique_consecutive(return_counts=True)), strict=True):
        if count > read:
            before, start, stop = _borders(config, read, count - read)
            values, observed = (x[None, before:stop].to(model.device) for x in (windows.values, windows.observed))
            cache = model.remember(values, observed, past_key_values=cache, already_read=start - before)
            read = count
        copies = None if cache is None else cache.copy()
        if copies is not None:
            copies.batch_select_indices(torch.arange(copies.batch_size, device=model.device).repeat(block))
        yield copies, replace(windows, origins=windows.origins[first : first + block])
        first += block


def _borders(config: TitansPredictionConfig, read: int, count: int) -> tuple[int, int, int]:
    """The rows of ``count`` tokens after the first ``read``: where their look-back begins, they begin, and they end."""
    start = read * config.token_stride
    stop = start + (count - 1) * config.token_stride + config.token_length
    return max(0, start + config.token_length - config.context_length), start, stop


def _array(name: str, values: Any) -> NDArray[np.float64]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().to(torch.float64).numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        kind = type(values).__name__
        raise ValueError(f"{name} is a {kind} that cannot be read as numbers; expected an array of them") from error
