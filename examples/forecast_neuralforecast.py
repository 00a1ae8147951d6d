"""Titans in neuralforecast, beside its PatchTST: both learn AirPassengers and are tested on its last three years.

Both have the same width, layers, windows, learning rate and steps, three seeds each, and patches of their own. Every
forecast of 12 months within those years counts. The last season repeats the months of the year before.

    python examples/forecast_neuralforecast.py [--steps 150] [--plot forecast.png]
"""

import argparse
import logging
import warnings

import matplotlib.pyplot as plt
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import PatchTST
from neuralforecast.utils import AirPassengersDF

from titans.forecasting import Titans

parser = argparse.ArgumentParser(description="Compare Titans with PatchTST in neuralforecast.")
parser.add_argument("--steps", type=int, default=150, help="training steps of each model")
parser.add_argument("--plot", default="forecast.png", help="file for the picture")
arguments = parser.parse_args()
warnings.filterwarnings("ignore", module="pytorch_lightning")
for name in ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.seed"):
    logging.getLogger(name).setLevel(logging.WARNING)

SEEDS, YEAR, TEST = (1, 2, 3), 12, 36
common = dict(
    h=YEAR, input_size=36, hidden_size=64, max_steps=arguments.steps, val_check_steps=arguments.steps,
    learning_rate=5e-3, windows_batch_size=64, logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
titans = dict(num_hidden_layers=2, patch_length=4, patch_stride=4, linear_skip=True)
patchtst = dict(encoder_layers=2, n_heads=4, linear_hidden_size=128, patch_len=12, stride=6)
models = [Titans(**common, **titans, random_seed=seed, alias=f"Titans {seed}") for seed in SEEDS]
models += [PatchTST(**common, **patchtst, random_seed=seed, alias=f"PatchTST {seed}") for seed in SEEDS]
forecaster = NeuralForecast(models=models, freq="ME")
tested = forecaster.cross_validation(AirPassengersDF, n_windows=TEST - YEAR + 1, step_size=1)
known = AirPassengersDF.set_index("ds")["y"]
tested["last season"] = known.shift(YEAR)[tested["ds"]].to_numpy()

rows = {}
for name in ("Titans", "PatchTST", "last season"):
    errors = tested.filter(like=name).sub(tested["y"], axis=0)
    scores = {"MAE": errors.abs().mean(), "MSE": errors.pow(2).mean()}
    rows[name] = {k: f"{v.mean():,.1f} ± {v.std(ddof=0):,.1f}" for k, v in scores.items()}
print(pd.DataFrame(rows).T.to_string())

last = tested[tested["cutoff"] == tested["cutoff"].max()]
plt.figure(figsize=(9, 4))
plt.plot(known[-72:], color="black", label="passengers")
for name, color in (("Titans", "tab:red"), ("PatchTST", "tab:blue"), ("last season", "tab:gray")):
    plt.plot(last["ds"], last.filter(like=name).mean(axis=1), color=color, label=name)
plt.legend()
plt.savefig(arguments.plot, dpi=120)
print(f"The forecasts of the last year are in {arguments.plot}.")
