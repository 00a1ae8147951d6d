"""What the Trainer costs: tokens per second of `titans train` against a bare loop over the same model and batches.

    python benchmarks/overhead.py --data data

The two take turns; each figure is the CPU time from the end of a round's first step to the end of its last, logging and
looks at the memory included. Prints every round and the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from titans.training.build import make_model
from titans.training.callbacks import MetricsFile
from titans.training.config import TrainConfig
from titans.training.data import collate
from titans.training.run import _arguments, make_rows, open_data
from titans.training.trainer import MemoryTrainer


class Ends(TrainerCallback):
    """When each step ended, in CPU time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """One more."""
        self.times.append(time.process_time())


def with_trainer(config: TrainConfig, data: Any) -> float:
    """Tokens per second of a run, as `titans train` does it."""
    rows, model = make_rows(config, data, config.steps or 1), make_model(config, len(data.tokenizer), 256)
    args = _arguments(config, Path(config.output), config.steps or 1, config.rows, 1, validates=False)
    ends = Ends()
    Path(config.output).mkdir(parents=True, exist_ok=True)
    MemoryTrainer(config, model, args, rows, callbacks=[ends, MetricsFile(Path(config.output))]).train()
    return config.batch_tokens * (len(ends.times) - 1) / (ends.times[-1] - ends.times[0])


def bare(config: TrainConfig, data: Any) -> float:
    """Tokens per second of the shortest loop that does the same to the weights."""
    rows, model = make_rows(config, data, config.steps or 1), make_model(config, len(data.tokenizer), 256).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    times = []
    for batch in DataLoader(rows, config.rows, collate_fn=collate):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time())
    return config.batch_tokens * (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    """Rounds of both, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared folder")
    parser.add_argument("--model", default="mag")
    parser.add_argument("--size", default="1.5m")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            config = TrainConfig(
                model={"name": options.model, "size": options.size}, data=options.data, output=f"{folder}/{number}",
                length=256, batch_tokens=1024, micro_batch=4, steps=options.steps, learning_rate=1e-3,
                save_every=10 * options.steps, trackers=[],
            )  # fmt: skip
            data = open_data(config)
            pair = with_trainer(config, data), bare(config, data)
            ratios.append(pair[0] / pair[1])
            print(
                f"round {number}: Trainer {pair[0]:,.0f}, bare loop {pair[1]:,.0f} tokens/s: {ratios[-1]:.3f}",
                flush=True,
            )
    print(json.dumps({"median": statistics.median(ratios), "rounds": ratios}))


if __name__ == "__main__":
    main()
