"""What the tests of forecasters share: tiny models, all of whose parameters matter, and series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titans import TitansForPrediction, TitansPredictionConfig

VARIANTS = ("lmm", "mac", "mag", "mal")
CONTEXT, HORIZON, CHANNELS = 12, 5, 3
QUANTILES = [0.1, 0.4, 0.9]
TINY: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "segment_size": 4,
    "window_size": 4, "num_persistent_tokens": 2, "memory_heads": 2, "context_length": CONTEXT,
    "prediction_length": HORIZON, "num_input_channels": CHANNELS, "patch_length": 4, "patch_stride": 3, "dropout": 0.0,
}  # fmt: skip


def config(**fields: Any) -> TitansPredictionConfig:
    return TitansPredictionConfig(**{**TINY, **fields})


def model(dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> TitansForPrediction:
    """A tiny model whose parameters have all left their initial values."""
    torch.manual_seed(seed)
    made = TitansForPrediction(config(**fields))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return made.to(dtype).eval()


def series(time: int, batch: int = 2, seed: int = 1, channels: int = CHANNELS) -> Tensor:
    """Random walks, whose mean and deviation change along the way."""
    steps = torch.randn(batch, time, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return steps.cumsum(1)
