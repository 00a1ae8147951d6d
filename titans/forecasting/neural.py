"""Titans as a model of neuralforecast: ``NeuralForecast(models=[Titans(h=24, input_size=96)], freq="h")``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from neuralforecast.common._base_model import BaseModel
from neuralforecast.core import MODEL_FILENAME_DICT
from neuralforecast.losses.pytorch import MAE
from pytorch_lightning import Trainer
from torch import Tensor, nn

from titans.models.configuration import TitansConfig, TitansPredictionConfig
from titans.models.prediction import TitansForPrediction, cut
from titans.words import nearest, require_whole

# what neuralforecast's BaseModel leaves to its models
DEFAULTS: dict[str, Any] = {
    "valid_loss": None, "scaler_type": "standard", "max_steps": 1000, "learning_rate": 1e-3, "num_lr_decays": 3,
    "val_check_steps": 100, "batch_size": 32, "valid_batch_size": None, "windows_batch_size": 256,
    "inference_windows_batch_size": 1024, "start_padding_enabled": False,
}  # fmt: skip
# numbers per step that the network hands to the decoder of future variables
HANDED_ON = 8


class Titans(BaseModel):
    """A Titans forecaster with the arguments of neuralforecast's other models.

    neuralforecast scales each window and scales the forecast back: with its standard scaler, the default here, that is
    the instance normalisation of :class:`titans.TitansForPrediction`, for any loss. The past of exogenous variables is
    read with the patches that it belongs to, static ones with every patch; a small decoder puts what is known of a
    future step beside what the network says of it.

    Args:
        h, input_size: steps of the forecast, and values that it looks back on.
        loss: any loss of neuralforecast that models can be trained with.
        variant, hidden_size, num_hidden_layers, linear_skip, dropout: as in :class:`titans.TitansPredictionConfig`.
        patch_length, patch_stride: values of a patch, at most ``input_size``, and from one patch to the next.
        config: further fields of :class:`titans.TitansConfig`, such as ``{"memory_depth": 1}``.
        kwargs: the other arguments of neuralforecast's models, such as ``futr_exog_list``, ``hist_exog_list``,
            ``stat_exog_list``, ``valid_loss``, ``max_steps``, ``learning_rate``, ``num_lr_decays``,
            ``early_stop_patience_steps``, ``val_check_steps``, ``batch_size``, ``windows_batch_size``,
            ``scaler_type``, ``random_seed`` and ``alias``, and those of Lightning's ``Trainer``.
    """

    EXOGENOUS_FUTR = True
    EXOGENOUS_HIST = True
    EXOGENOUS_STAT = True
    EXOGENOUS_CAT = True
    MULTIVARIATE = False
    RECURRENT = False

    def __init__(
        self,
        h: int,
        input_size: int,
        loss: nn.Module = MAE(),  # noqa: B008
        variant: str = TitansPredictionConfig.variant,
        hidden_size: int = TitansPredictionConfig.hidden_size,
        num_hidden_layers: int = TitansPredictionConfig.num_hidden_layers,
        patch_length: int = TitansPredictionConfig.patch_length,
        patch_stride: int = TitansPredictionConfig.patch_stride,
        linear_skip: bool = TitansPredictionConfig.linear_skip,
        dropout: float = TitansPredictionConfig.dropout,
        config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        require_whole(h=h, input_size=input_size, patch_length=patch_length)
        own = {
            "context_length": input_size, "prediction_length": h, "variant": variant, "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers, "patch_length": min(patch_length, input_size),
            "patch_stride": patch_stride, "linear_skip": linear_skip, "dropout": dropout,
        }  # fmt: skip
        further = config or {}
        _check_names("a field for config", further, [name for name in TitansConfig.__annotations__ if name not in own])
        known = [name for each in (Titans, BaseModel, Trainer) for name in inspect.signature(each).parameters]
        _check_names("an argument of Titans", kwargs, known)
        outputs = getattr(loss, "outputsize_multiplier", None)
        if outputs is None:
            raise ValueError(f"loss is {loss!r}; expected one of neuralforecast.losses.pytorch, such as MAE()")
        settings = TitansPredictionConfig(**own, **further)
        super().__init__(h=h, input_size=input_size, loss=loss, **(DEFAULTS | kwargs))

        future = self.futr_exog_size
        past = settings.patch_length * (self.hist_exog_size + future) + self.stat_exog_size
        self.outputs: int = outputs
        self.network = TitansForPrediction(settings, outputs_per_step=self.outputs + (HANDED_ON if future else 0))
        self.covariates = nn.Linear(past, hidden_size, bias=False) if past else None
        self.decoder = None
        if future:
            inner = nn.Linear(HANDED_ON + future, hidden_size)
            self.decoder = nn.Sequential(inner, nn.SiLU(), nn.Linear(hidden_size, self.outputs))

    def forward(self, windows_batch: dict[str, Any]) -> Tensor:
        """What the loss needs for each step, (windows, h, outputs), from a batch as neuralforecast makes it."""
        values, seen = (windows_batch[name].transpose(1, 2) for name in ("insample_y", "insample_mask"))
        seen = seen > 0
        covariates = None if self.covariates is None else self.covariates(self._by_token(windows_batch))
        projected, _ = self.network.project(values.masked_fill(~seen, 0), seen, covariates)
        outputs, handed_on = projected.squeeze(1).tensor_split([self.outputs], dim=-1)
        if self.decoder is not None:
            future = windows_batch["futr_exog"][:, -self.h :]
            outputs = outputs + self.decoder(torch.cat([handed_on, future], dim=-1))
        return outputs

    def _by_token(self, batch: dict[str, Any]) -> Tensor:
        """The exogenous variables that each token is read with, (windows, tokens, variables)."""
        none = batch["insample_y"][..., :0]
        past = [x[:, : self.input_size] for x in (none, batch["hist_exog"], batch["futr_exog"]) if x is not None]
        # where the series is missing, neuralforecast lets its variables be missing too
        values = torch.cat(past, dim=-1).nan_to_num().transpose(1, 2)
        patches = cut(values, self.network.config.patch_length, self.network.config.patch_stride)
        tokens = patches.transpose(1, 2).flatten(2)
        static = batch["stat_exog"]
        if static is None:
            return tokens
        return torch.cat([tokens, static.unsqueeze(1).expand(-1, tokens.shape[1], -1)], dim=-1)


def _check_names(kind: str, given: dict[str, Any], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{name} is not {kind}; {nearest(name, known)}")


# where NeuralForecast.save and NeuralForecast.load look for the class
MODEL_FILENAME_DICT["titans"] = Titans
