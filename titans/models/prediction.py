"""Titans as a forecaster: patches or variates as tokens, blocks that read them, one head for the whole horizon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForTimeSeriesPrediction
from transformers.utils import ModelOutput

from titans.models.cache import TitansCache
from titans.models.configuration import TitansPredictionConfig
from titans.models.modeling import TitansModel
from titans.models.packing import check_names
from titans.models.pretrained import TitansPreTrainedModel
from titans.words import require_whole

# with use_level, the least deviation that a forecast has room for, in z-scores: what lay still may move
ROOM = 0.1
# equal values differ from their mean by no more units in the last place than this
ROUNDING = 16


@dataclass
class TitansPredictionOutput(ModelOutput):
    """What a forecaster returns.

    Attributes:
        loss: where ``future_values`` were given.
        prediction_outputs: (batch, prediction_length, channels), the point forecast.
        quantile_outputs: (batch, prediction_length, channels, quantiles), with the quantile loss.
        loc, scale: (batch, 1, channels), what the forecast was shifted and stretched by: mean and deviation of the
            context; with ``use_level`` the scale is sqrt(deviation^2 + 0.1^2).
        hidden_states: those of the blocks.
    """

    loss: Tensor | None = None
    prediction_outputs: Tensor | None = None
    quantile_outputs: Tensor | None = None
    loc: Tensor | None = None
    scale: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class Level(nn.Module):
    """What a token is told of the level of its series, and of its channel."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.moments = nn.Linear(2, width)
        self.channels = nn.Parameter(torch.empty(channels, 1, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Channels start alike; the linear map has its own."""
        nn.init.zeros_(self.channels)

    def forward(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Mean and deviation (batch, channels, tokens) as (batch, channels, tokens, width)."""
        moments = torch.stack([loc, (scale + 1e-3).log()], dim=-1).to(self.channels.dtype)
        return self.moments(moments) + self.channels


class TitansForPrediction(TitansPreTrainedModel):
    """A Titans forecaster, called as transformers' ``PatchTSTForPrediction`` is.

    The last ``context_length`` values are the context: normalised as a whole, cut into tokens, read by the blocks, and
    mapped to the horizon. What came before is history: each of its tokens is normalised by the ``context_length``
    values that end with it, so that it never changes, and the memory can read it once and for all.
    """

    config_class = TitansPredictionConfig
    config: TitansPredictionConfig
    main_input_name = "past_values"

    def __init__(self, config: TitansPredictionConfig, outputs_per_step: int | None = None) -> None:
        """``outputs_per_step``: those of the head for a step of the horizon; None: one for each quantile."""
        super().__init__(config)
        width, channels = config.hidden_size, 1 if config.tokens == "patches" else config.num_input_channels
        self.embed = nn.Linear(config.token_length, width)
        self.position = nn.Parameter(torch.empty(config.tokens_in_context * channels, width))
        self.level = Level(config.num_input_channels, width) if config.use_level else None
        self.model = TitansModel(config)
        self.dropout = nn.Dropout(config.dropout)
        outputs = config.prediction_length * (outputs_per_step or len(config.quantiles or [0]))
        self.head = nn.Linear(config.tokens_in_context * width, outputs)
        self.skip = nn.Linear(config.context_length, outputs) if config.linear_skip else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            nn.init.normal_(self.position, std=self.config.initializer_range)

    def forward(
        self,
        past_values: Tensor,
        past_observed_mask: Tensor | None = None,
        future_values: Tensor | None = None,
        future_observed_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TitansPredictionOutput | tuple[Any, ...]:
        """Forecasts what follows ``past_values``.

        Args:
            past_values: (batch, time, channels); of any length, the last ``context_length`` values are the context, and
                what stands before is history. A shorter past leaves the start of the context empty.
            past_observed_mask: (batch, time, channels) or (batch, time), 0 where a value is missing.
            future_values: (batch, prediction_length, channels), for the loss.
            future_observed_mask: the same shape, 0 where a value does not count.
            past_key_values: the memory of a history before ``past_values``, see :meth:`remember`; it is not changed.
        """
        check_names(self, kwargs)
        past, observed = self._checked("past_values", past_values, past_observed_mask)
        context = self.config.context_length
        history, recent = self._split(past, observed)
        values, seen = _pad_front(*recent, context)
        loc, scale = moments(values, seen)
        values = normalise(values, seen, loc, scale).to(self.dtype)
        level = None
        if self.level is not None:
            level = self._in_sequence(self.level(loc, scale).expand(-1, -1, self.config.tokens_in_context, -1))
            scale = torch.hypot(scale, scale.new_tensor(ROOM))
        outputs, read = self.project(
            values,
            seen,
            level,
            history=history,
            past_key_values=past_key_values,
            output_hidden_states=output_hidden_states,
        )
        outputs = (loc.unsqueeze(-1) + scale.unsqueeze(-1) * outputs.sort(-1).values).transpose(1, 2)
        result = TitansPredictionOutput(
            loss=None if future_values is None else self._loss(outputs, future_values, future_observed_mask),
            prediction_outputs=outputs[..., self.config.point_quantile],
            quantile_outputs=outputs if self.config.quantiles else None,
            loc=loc.transpose(1, 2),
            scale=scale.transpose(1, 2),
            hidden_states=read.hidden_states,
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return result if wants_dict else result.to_tuple()

    def project(
        self, values: Tensor, seen: Tensor, covariates: Tensor | None = None, history: Any = None, **options: Any
    ) -> tuple[Tensor, Any]:
        """What the head makes of a normalised context.

        Args:
            values, seen: (batch, channels, context_length), and which of them were observed.
            covariates: (rows, tokens, width), added to the tokens of the context.
            history: the tokens before the context, and which of them have a value.
            options: of the blocks.

        Returns:
            (batch, channels, prediction_length, outputs of a step), and what the blocks returned.
        """
        x, mask = self._tokens(values, seen)
        x = x + self.position.to(x.dtype).expand(len(x), -1, -1)
        if covariates is not None:
            x = x + covariates
        count = x.shape[1]
        if self.config.tokens == "variates":  # blocks are causal: only at the second reading has each seen all
            x, mask = torch.cat([x, x], dim=1), torch.cat([mask, mask], dim=1)
        if history is not None:
            before, alive = history
            x, mask = torch.cat([before, x], dim=1), torch.cat([alive, mask], dim=1)
        read = self.model(
            inputs_embeds=self.dropout(x),
            attention_mask=None if bool(mask.all()) else mask,
            use_cache=False,
            return_dict=True,
            **options,
        )
        hidden = self._by_channel(read.last_hidden_state[:, -count:])
        outputs = self.head(self.dropout(hidden))
        if self.skip is not None:
            outputs = outputs + self.skip(values)
        return outputs.unflatten(-1, (self.config.prediction_length, -1)), read

    def remember(
        self,
        past_values: Tensor,
        past_observed_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        already_read: int = 0,
    ) -> TitansCache:
        """Reads all whole tokens of a history into the memory, for forecasts to start from.

        Args:
            past_values, past_observed_mask: as in :meth:`forward`.
            past_key_values: what was read before; changed by the call, and returned.
            already_read: how many of the first values only say what the first new token is normalised by, at most
                ``context_length`` less the length of a token.
        """
        past, observed = self._checked("past_values", past_values, past_observed_mask)
        require_whole(least=0, already_read=already_read)
        if already_read > self._overlap:
            raise ValueError(
                f"already_read is {already_read}; expected at most {self._overlap}, context_length less a token"
            )
        x, mask = self._history(past, observed, already_read)
        cache = self.model(
            inputs_embeds=self.dropout(x),
            attention_mask=None if bool(mask.all()) else mask,
            past_key_values=past_key_values,
            use_cache=True,
        ).past_key_values
        assert isinstance(cache, TitansCache)
        return cache

    @property
    def values_dtype(self) -> torch.dtype:
        """What values are normalised and forecast in, whatever the weights are: half precision is too coarse for it."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def _overlap(self) -> int:
        """Values that a token looks back on before its own."""
        return self.config.context_length - self.config.token_length

    def _split(self, past: Tensor, observed: Tensor) -> tuple[Any, tuple[Tensor, Tensor]]:
        """The tokens of the history, and the values of the context, (batch, channels, context) with their mask."""
        cut = max(0, past.shape[-1] - self.config.context_length)
        recent = past[..., cut:], observed[..., cut:]
        if cut < self.config.token_length:
            return None, recent
        return self._history(past[..., :cut], observed[..., :cut]), recent

    def _history(self, values: Tensor, seen: Tensor, before: int = 0) -> tuple[Tensor, Tensor]:
        """All tokens that fit into (batch, channels, time), after ``before`` values that are only looked back on."""
        size, step = self.config.token_length, self.config.token_stride
        values, seen = (F.pad(x, (self._overlap - before, 0)) for x in (values, seen))
        count = (values.shape[-1] - self.config.context_length) // step + 1
        if count < 1:
            raise ValueError(f"past_values has {values.shape[-1] - self._overlap} new values; expected {size} or more")
        windows, alive = (x.unfold(-1, self.config.context_length, step) for x in (values, seen))
        loc, scale = moments(windows, alive)
        x = self.embed(normalise(windows, alive, loc, scale)[..., -size:].to(self.dtype))
        if self.level is not None:
            x = x + self.level(loc.squeeze(-1), scale.squeeze(-1))
        return self._in_sequence(x), self._in_sequence(alive[..., -size:].any(-1))

    def _tokens(self, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The context's tokens, (rows, tokens, width), and which of them have a value."""
        patches, alive = (cut(x, self.config.token_length, self.config.token_stride) for x in (values, seen))
        return self._in_sequence(self.embed(patches)), self._in_sequence(alive.any(-1))

    def _in_sequence(self, x: Tensor) -> Tensor:
        """(batch, channels, tokens, ...) as sequences: of one channel each, or of the channels at each time."""
        return x.flatten(0, 1) if self.config.tokens == "patches" else x.transpose(1, 2).flatten(1, 2)

    def _by_channel(self, hidden: Tensor) -> Tensor:
        """The blocks' outputs over the context, (batch, channels, tokens x width)."""
        channels = self.config.num_input_channels
        if self.config.tokens == "patches":
            return hidden.flatten(1).unflatten(0, (-1, channels))
        return hidden

    def _checked(self, name: str, values: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Values and mask as (batch, channels, time); 0 where nothing was observed."""
        channels = self.config.num_input_channels
        if values.ndim != 3 or values.shape[-1] != channels or not values.shape[1]:
            raise ValueError(f"{name} has shape {tuple(values.shape)}; expected (batch, time, {channels})")
        if observed is None:
            observed = torch.ones_like(values, dtype=torch.bool)
        shape = tuple(values.shape)
        if tuple(observed.shape) not in (shape, shape[:2]):
            raise ValueError(f"the mask of {name} has shape {tuple(observed.shape)}; expected {shape} or {shape[:2]}")
        observed = (observed.unsqueeze(-1) if observed.ndim == 2 else observed).to(torch.bool).expand_as(values)
        values = values.to(self.values_dtype).masked_fill(~observed, 0)
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name} has values that are not finite; expected them to be masked as not observed")
        return values.transpose(1, 2), observed.transpose(1, 2)

    def _loss(self, outputs: Tensor, future: Tensor, observed: Tensor | None) -> Tensor:
        if future.shape != outputs.shape[:-1]:
            raise ValueError(
                f"future_values has shape {tuple(future.shape)}; expected {tuple(outputs.shape[:-1])}, "
                "(batch, prediction_length, channels)"
            )
        future, seen = (x.transpose(1, 2).unsqueeze(-1) for x in self._checked("future_values", future, observed))
        losses = point_losses(self.config, outputs, future).mean(-1, keepdim=True)
        return (losses * seen).sum() / seen.sum().clamp(min=1)


def point_losses(config: TitansPredictionConfig, outputs: Tensor, future: Tensor) -> Tensor:
    """What each output (..., quantiles) costs where ``future`` (..., 1) is the truth."""
    if config.loss == "mae":
        return (outputs - future).abs()
    if config.loss == "huber":
        return F.huber_loss(outputs, future.expand_as(outputs), reduction="none", delta=config.huber_delta)
    if config.loss == "quantile":
        levels = outputs.new_tensor(config.quantiles)
        return torch.maximum(levels * (future - outputs), (levels - 1) * (future - outputs))
    return (outputs - future).square()


def moments(values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of what was seen along the last axis, which is kept; (0, 0) where nothing was."""
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    loc = (values / count).sum(-1, keepdim=True)
    away = (values - loc) * seen
    unit = away.abs().amax(-1, keepdim=True)  # squares of anything larger or smaller may not be numbers
    scale = unit * normalise(away, seen, 0, unit).square().sum(-1, keepdim=True).div(count).sqrt()
    return loc, torch.where(scale > ROUNDING * torch.finfo(scale.dtype).eps * loc.abs(), scale, 0)


def normalise(values: Tensor, seen: Tensor, loc: Tensor | float, scale: Tensor) -> Tensor:
    """(values - loc) / scale; 0 where nothing was seen, or all values are equal."""
    return (values - loc) * (seen & (scale > 0)) / torch.where(scale > 0, scale, 1)


def cut(values: Tensor, size: int, step: int) -> Tensor:
    """(..., time) as tokens (..., tokens, size); 0 where the first one begins before the values do."""
    return F.pad(values, (-(values.shape[-1] - size) % step, 0)).unfold(-1, size, step)


def _pad_front(values: Tensor, seen: Tensor, length: int) -> tuple[Tensor, Tensor]:
    short = max(0, length - values.shape[-1])
    return F.pad(values, (short, 0)), F.pad(seen, (short, 0))


AutoModel.register(TitansPredictionConfig, TitansForPrediction, exist_ok=True)
AutoModelForTimeSeriesPrediction.register(TitansPredictionConfig, TitansForPrediction, exist_ok=True)
