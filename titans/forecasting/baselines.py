"""The forecasters that ours are compared with, each behind the call of ``TitansForPrediction``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.words import nearest

NAMES = ("patchtst", "itransformer", "dlinear", "nhits", "last-value", "last-season")


@dataclass(frozen=True)
class Forecast:
    """A point forecast, (batch, prediction_length, channels), and its loss where the truth was given."""

    prediction_outputs: Tensor
    loss: Tensor | None = None


class Baseline(nn.Module):
    """A forecaster that maps (batch, context, channels) to (batch, horizon, channels), trained by the squared error.

    A missing value is taken for the last one that was observed before it.
    """

    def __init__(self, forecast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forecast = forecast

    def forward(
        self,
        past_values: Tensor,
        past_observed_mask: Tensor | None = None,
        future_values: Tensor | None = None,
        future_observed_mask: Tensor | None = None,
    ) -> Forecast:
        made = self.forecast(filled(past_values, past_observed_mask))
        if future_values is None:
            return Forecast(made)
        if future_observed_mask is None or bool(future_observed_mask.all()):
            return Forecast(made, F.mse_loss(made, future_values))
        seen = future_observed_mask.to(made.dtype)
        return Forecast(made, ((made - future_values) * seen).square().sum() / seen.sum().clamp(min=1))


def filled(values: Tensor, observed: Tensor | None) -> Tensor:
    """(batch, time, channels) with the last observed value where one is missing; the first one before any."""
    if observed is None or bool(observed.all()):
        return values
    places = torch.arange(values.shape[1], device=values.device).view(1, -1, 1)
    last = torch.where(observed, places, -1).cummax(dim=1).values
    first = observed.to(torch.uint8).argmax(dim=1, keepdim=True)
    return values.gather(1, torch.where(last < 0, first, last))


def build_baseline(name: str, context: int, horizon: int, channels: int, season: int = 1, **options: Any) -> Baseline:
    """The baseline of that name.

    Args:
        name: one of ``NAMES``.
        context, horizon, channels: what it reads and forecasts.
        season: values of one season, for ``"last-season"``.
        options: as its library names them: transformers' PatchTSTConfig, and neuralforecast's iTransformer, DLinear
            and NHITS.
    """
    if name == "last-value":
        return Baseline(lambda past: past[:, -1:].expand(-1, horizon, -1))
    if name == "last-season":
        if not 1 <= season <= context:
            raise ValueError(f"season is {season}; expected 1 to {context}")
        return Baseline(lambda past: past[:, -season:].repeat(1, -(-horizon // season), 1)[:, :horizon])
    if name == "patchtst":
        return Baseline(_PatchTST(context, horizon, channels, options))
    if name not in NAMES:
        raise ValueError(f"baseline is {name!r}: {nearest(name, NAMES)}")
    return Baseline(_neuralforecast(name, context, horizon, channels, options))


class _PatchTST(nn.Module):
    def __init__(self, context: int, horizon: int, channels: int, options: dict[str, Any]) -> None:
        super().__init__()
        from transformers import PatchTSTConfig, PatchTSTForPrediction

        config = PatchTSTConfig(
            context_length=context, prediction_length=horizon, num_input_channels=channels, **PATCHTST | options
        )
        self.model = PatchTSTForPrediction(config)

    def forward(self, past: Tensor) -> Tensor:
        forecast: Tensor = self.model(past_values=past).prediction_outputs
        return forecast


class _Neural(nn.Module):
    """A model of neuralforecast as a plain module: of one channel at a time, or of all together."""

    def __init__(self, model: nn.Module, together: bool) -> None:
        super().__init__()
        self.model, self.together = model, together

    def forward(self, past: Tensor) -> Tensor:
        y = past if self.together else past.transpose(1, 2).flatten(0, 1).unsqueeze(-1)
        batch = {"insample_y": y, "insample_mask": torch.ones_like(y)}
        made: Tensor = self.model(batch | dict.fromkeys(("futr_exog", "hist_exog", "stat_exog")))
        return made if self.together else made.squeeze(-1).unflatten(0, (len(past), -1)).transpose(1, 2)


def _neuralforecast(name: str, context: int, horizon: int, channels: int, options: dict[str, Any]) -> nn.Module:
    import logging

    logging.getLogger("lightning_fabric.utilities.seed").setLevel(logging.ERROR)
    from neuralforecast.losses.pytorch import MSE
    from neuralforecast.models import NHITS, DLinear, iTransformer

    seed = torch.initial_seed()
    given = {"h": horizon, "input_size": context, "loss": MSE(), "random_seed": seed % 2**32} | options
    if name == "itransformer":
        return _Neural(iTransformer(n_series=channels, **ITRANSFORMER | given), together=True)
    model = {"dlinear": DLinear, "nhits": NHITS}[name](**given)
    return _Neural(model, together=False)


# As their authors have them for look-backs of 96 and small data.
PATCHTST = {
    "patch_length": 16, "patch_stride": 8, "d_model": 128, "num_attention_heads": 16, "num_hidden_layers": 3,
    "ffn_dim": 256, "attention_dropout": 0.0, "ff_dropout": 0.2, "path_dropout": 0.0, "head_dropout": 0.0,
    "positional_dropout": 0.2, "pooling_type": None, "scaling": "std", "share_projection": True, "do_mask_input": False,
}  # fmt: skip
ITRANSFORMER = {"hidden_size": 256, "d_ff": 256, "e_layers": 2, "n_heads": 8, "dropout": 0.1}
