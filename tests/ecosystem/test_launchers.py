"""torchrun and ``accelerate launch``: two processes train what one process trains, whichever of them started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.cases import model

ROOT = Path(__file__).parents[2]
STEPS, BATCH = 3, 4
# A script as a user would write it: the Trainer, rows of a fixed order, one file with the losses of the whole batches.
SCRIPT = f"""
import json, sys, torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

output, each = sys.argv[1], int(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
ids = torch.randint(31, ({STEPS * BATCH}, 20), generator=torch.Generator().manual_seed(0))
rows = [{{"input_ids": row, "labels": row}} for row in ids]
arguments = TrainingArguments(
    output, per_device_train_batch_size=each, max_steps={STEPS}, logging_steps=1, learning_rate=1e-2, use_cpu=True,
    train_sampling_strategy="sequential", report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.save_model(output)
if trainer.is_world_process_zero():
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    norms = [float(weight.double().norm()) for weight in weights.values()]
    with open(output + ".json", "w") as file:
        json.dump({{"processes": trainer.args.world_size, "losses": found, "norms": norms}}, file)
"""
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# --cpu starts one process, however many are asked for; --multi_gpu starts as many, and the script says use_cpu
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]


def run(launcher: list[str], name: str, each: int, folder: Path) -> dict[str, list[float]]:
    """What the script finds if a launcher starts it."""
    environment = os.environ | {"HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "train.py", name, str(each)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.slow
def test_two_processes_train_what_one_does_whoever_started_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    model("mac", torch.float32).save_pretrained(tmp_path / "model")
    alone = run(ALONE, "alone", BATCH, tmp_path)
    assert alone["processes"] == 1 and len(alone["losses"]) == STEPS and alone["losses"][0] > alone["losses"][-1]
    for name, launcher in (("torchrun", TORCHRUN), ("accelerate", ACCELERATE)):
        found = run(launcher, name, BATCH // 2, tmp_path)
        assert found["processes"] == 2
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert (tmp_path / name / "titans_model.py").is_file()
