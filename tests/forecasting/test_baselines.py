"""The forecasters that ours are compared with: shapes, missing values, and what the simple ones must get right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from titans.forecasting.baselines import NAMES, build_baseline, filled

# small enough to be built in no time
SMALL: dict[str, dict[str, Any]] = {
    "patchtst": {"d_model": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 8, "patch_length": 4},
    "itransformer": {"hidden_size": 8, "n_heads": 2, "e_layers": 1, "d_ff": 8},
    "nhits": {"mlp_units": [[8, 8]] * 3},
}


def small(name: str, horizon: int = 5, channels: int = 3, **options: Any) -> torch.nn.Module:
    return build_baseline(name, 16, horizon, channels, **SMALL.get(name, {}), **options).eval()


@pytest.mark.parametrize("name", NAMES)
def test_a_baseline_forecasts_every_channel_and_its_loss_is_the_squared_error(name: str) -> None:
    torch.manual_seed(0)
    past, future = torch.randn(2, 16, 3), torch.randn(2, 5, 3)
    model = small(name)
    made = model(past, future_values=future)
    assert made.prediction_outputs.shape == future.shape
    torch.testing.assert_close(made.loss, (made.prediction_outputs - future).square().mean())
    if any(True for _ in model.parameters()):
        made.loss.backward()
        assert any(
            bool(parameter.grad.abs().sum() > 0) for parameter in model.parameters() if parameter.grad is not None
        )


@pytest.mark.parametrize("name", ["patchtst", "itransformer", "dlinear", "nhits"])
def test_the_seed_alone_says_which_weights_a_baseline_starts_with(name: str) -> None:
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(torch.cat([p.detach().flatten() for p in small(name).parameters()]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize("name", ["patchtst", "dlinear", "nhits"])
def test_a_channel_is_forecast_from_itself_alone(name: str) -> None:
    torch.manual_seed(0)
    model = small(name)
    past = torch.randn(1, 16, 3)
    other = past.clone()
    other[..., 2] += 1
    change = (model(past).prediction_outputs - model(other).prediction_outputs).abs().amax((0, 1))
    assert change[:2].max() < 1e-5 < change[2]


def test_the_last_season_is_exact_on_a_periodic_series_and_the_last_value_on_a_constant_one() -> None:
    series = torch.arange(6.0).repeat(10).view(1, -1, 1)
    for start in range(16, 30):
        past, future = series[:, start - 16 : start], series[:, start : start + 14]
        assert torch.equal(small("last-season", 14, 1, season=6)(past).prediction_outputs, future)
    past = torch.randn(2, 16, 3)
    assert torch.equal(small("last-value")(past).prediction_outputs, past[:, -1:].repeat(1, 5, 1))


def test_a_missing_value_is_the_last_one_before_it_and_the_first_one_before_any() -> None:
    values = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [3.0, 5.0], [0.0, 0.0]]])
    observed = torch.tensor([[[True, False], [False, False], [True, True], [False, False]]])
    assert filled(values, observed)[0].T.tolist() == [[1, 1, 3, 3], [5, 5, 5, 5]]
    assert small("last-value", 2, 2)(values, observed).prediction_outputs[0].tolist() == [[3, 5], [3, 5]]


def test_what_was_not_observed_does_not_count_in_the_loss() -> None:
    past, future = torch.zeros(1, 16, 1), torch.tensor([1.0, 2.0, 100.0]).view(1, 3, 1)
    seen = torch.tensor([True, True, False]).view(1, 3, 1)
    made = small("last-value", 3, 1)(past, future_values=future, future_observed_mask=seen)
    assert float(made.loss) == 2.5


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dlinar", {}, "baseline is 'dlinar': did you mean dlinear?"),
        ("last-season", {"season": 17}, "season is 17; expected 1 to 16"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        small(name, **options)
    assert str(error.value) == said
