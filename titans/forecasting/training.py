"""Training and testing a forecaster on windows: one loop for our models and for those they are compared with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titans.forecasting.windows import Windows
from titans.report.progress import Progress, silent
from titans.words import require_whole


@dataclass(frozen=True)
class FitSettings:
    """How a forecaster is trained.

    Attributes:
        steps: updates at most.
        batch_size: windows of each.
        learning_rate: the highest, after a warm-up; it falls to zero along a cosine.
        weight_decay: of AdamW.
        evaluate_every: updates from one look at the validation windows to the next.
        patience: looks without a better figure after which it ends.
        valid_windows: how many validation windows a look takes at most, spread evenly.
        shortest_past: each training batch looks back on a random number of values, from this many to all that its
            windows have: a memory that always read the same number of tokens knows no other. None: on all of them.
        max_norm: of the gradients.
        seed: of the order of the windows and of dropout.
    """

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    evaluate_every: int = 100
    patience: int = 3
    valid_windows: int = 1000
    shortest_past: int | None = None
    max_norm: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises a ``ValueError`` at a setting that makes no sense."""
        counts = ("steps", "batch_size", "evaluate_every", "patience", "valid_windows")
        require_whole(**{name: getattr(self, name) for name in counts})
        for name in ("learning_rate", "max_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a positive number")


@dataclass(frozen=True)
class Fitted:
    """What training came to.

    Attributes:
        steps: updates until the best model, which is the one that is kept.
        valid: its loss on the validation windows.
        curve: updates and validation loss of every look.
    """

    steps: int
    valid: float
    curve: Sequence[tuple[int, float]]


def fit(
    model: nn.Module,
    train: Windows,
    valid: Windows,
    settings: FitSettings = FitSettings(),  # noqa: B008, frozen
    progress: Progress = silent,
) -> Fitted:
    """Trains ``model``, which ends with the weights that were best on the validation windows.

    A model is called with the names of :class:`titans.TitansForPrediction` and returns an object with a ``loss``.
    """
    settings.check()
    if settings.shortest_past is not None and not 1 <= settings.shortest_past <= train.past:
        raise ValueError(f"shortest_past is {settings.shortest_past}; expected a number from 1 to {train.past}")
    for name, windows in (("training", train), ("validation", valid)):
        if not len(windows):
            raise ValueError(
                f"the {name} part has no window of {windows.past} + {windows.future} values; "
                "expected a longer series, a shorter context or a shorter horizon"
            )
    torch.manual_seed(settings.seed)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_then_cosine(settings.steps))
    valid = valid.at_most(settings.valid_windows)
    best, kept, curve = (math.inf, 0), copy.deepcopy(model.state_dict()), []
    order = torch.empty(0, dtype=torch.int64)
    for step in range(1, settings.steps + 1):
        if len(order) < min(settings.batch_size, len(train)):
            order = torch.cat([order, torch.randperm(len(train))])
        numbers, order = order[: settings.batch_size], order[settings.batch_size :]
        batch = train.batch(numbers)
        if settings.shortest_past is not None:
            batch = _cut(batch, int(torch.randint(settings.shortest_past, train.past + 1, ())))
        model.train()
        loss = model(**_on(device, batch)).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        optimizer.step()
        schedule.step()
        if step % settings.evaluate_every == 0 or step == settings.steps:
            figure = mean_loss(model, valid, settings.batch_size)
            curve.append((step, figure))
            if figure < best[0]:
                best, kept = (figure, step), copy.deepcopy(model.state_dict())
            elif step - best[1] >= settings.patience * settings.evaluate_every:
                break
        progress(step, settings.steps, "" if not curve else f"validation {curve[-1][1]:.4f}")
    if not math.isfinite(best[0]):
        raise ValueError("the validation loss was never finite; expected a lower learning rate, or other data")
    model.load_state_dict(kept)
    model.eval()
    return Fitted(best[1], best[0], tuple(curve))


@torch.no_grad()
def mean_loss(model: nn.Module, windows: Windows, batch_size: int = 32) -> float:
    """The model's own loss over all windows."""
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    for batch in windows.in_order(batch_size):
        total += float(model(**_on(device, batch)).loss) * len(batch["past_values"])
    return total / len(windows)


@dataclass(frozen=True)
class Errors:
    """Sums over every window, (future, channels) each, so that any mean can be taken of them.

    Attributes:
        squared, absolute: of the errors.
        count: values that were observed.
    """

    squared: Tensor
    absolute: Tensor
    count: Tensor

    @property
    def mse(self) -> float:
        return float(self.squared.sum() / self.count.sum())

    @property
    def mae(self) -> float:
        return float(self.absolute.sum() / self.count.sum())


@torch.no_grad()
def forecast_errors(
    forecast: Callable[..., Any], windows: Windows, batch_size: int = 128, device: torch.device | None = None
) -> Errors:
    """The errors of ``prediction_outputs`` on every window, none dropped, added up in float64.

    Args:
        forecast: a module, or a function that is called as one.
        device: where it takes its inputs; default: where the parameters of a module are, otherwise the CPU.
    """
    parameter = None
    if isinstance(forecast, nn.Module):
        parameter = next(forecast.eval().parameters(), None)
    if device is None:
        device = torch.device("cpu") if parameter is None else parameter.device
    shape = windows.future, windows.values.shape[1]
    squared, absolute, count = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for batch in windows.in_order(batch_size):
        future, seen = batch.pop("future_values"), batch.pop("future_observed_mask").double()
        error = (forecast(**_on(device, batch)).prediction_outputs.cpu().double() - future.double()) * seen
        squared += error.square().sum(0)
        absolute += error.abs().sum(0)
        count += seen.sum(0)
    return Errors(squared, absolute, count)


def _cut(batch: dict[str, Tensor], past: int) -> dict[str, Tensor]:
    """The batch with the last ``past`` values of its pasts."""
    return {name: x[:, -past:] if name.startswith("past") else x for name, x in batch.items()}


def _on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in batch.items()}


def _warm_then_cosine(steps: int) -> Callable[[int], float]:
    warm = max(1, steps // 20)
    return lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))))
