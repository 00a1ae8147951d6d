"""What the Trainer costs: tokens per second of `titans train` against a bare loop over the same model and batches.

    titans bench overhead --out runs/bench-overhead

The two take turns; each figure is CPU time between two steps of a run, logging and looks at the memory included.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from titans.bench.settings import OverheadBenchmarkSettings
from titans.bench.timing import about, answer_of, bar_figure, new_report
from titans.files import METRICS
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent
from titans.training.build import make_model
from titans.training.callbacks import read_metrics
from titans.training.config import TrainConfig
from titans.training.data import collate
from titans.training.prepare import prepare
from titans.training.run import make_rows, open_data, train

LENGTH, ROWS = 256, 4  # tokens of a sequence, sequences of a step
TEXT = 200_000  # characters of the text that is made if no data are given
QUICK: dict[str, Any] = {"size": "1m", "steps": 4, "rounds": 1}


def make_config(settings: OverheadBenchmarkSettings, data: str, output: str) -> TrainConfig:
    """Of one run."""
    return TrainConfig(
        model={"name": settings.model, "size": settings.size}, data=data, output=output, length=LENGTH,
        batch_tokens=ROWS * LENGTH, micro_batch=ROWS, steps=settings.steps, learning_rate=1e-3,
        log_every=settings.steps // 3, eval_every=0, save_every=10 * settings.steps, trackers=[],
    )  # fmt: skip


def with_trainer(config: TrainConfig) -> float:
    """Tokens per second of `titans train`, between the first and the last line of its log."""
    train(config)
    lines = [line for line in read_metrics(Path(config.output) / METRICS) if "loss" in line]
    first, last = lines[0], lines[-1]
    steps, seconds = last["step"] - first["step"], last["cpu_seconds"] - first["cpu_seconds"]
    return float(config.batch_tokens * steps / seconds)


def bare(config: TrainConfig) -> float:
    """Tokens per second of the shortest loop that does the same to the weights, after its first step."""
    data = open_data(config)
    rows = make_rows(config, data, config.steps or 1)
    model = make_model(config, data.vocab_size, data.end).train()
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


def _round(job: dict[str, Any]) -> dict[str, Any]:
    """One run of each loop, in this process."""
    settings = OverheadBenchmarkSettings(**job["settings"])
    torch.set_num_threads(settings.threads)
    config = make_config(settings, job["data"], job["output"])
    found = {"trainer": with_trainer(config), "bare": bare(config)}
    return found | {"ratio": found["trainer"] / found["bare"]}


def run_overhead_benchmark(settings: OverheadBenchmarkSettings, progress: Progress = silent) -> dict[str, Any]:
    """Time both loops in turns; returns the report, a dict that is ready for JSON."""
    report = new_report("overhead", settings, settings.threads)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        data = settings.data or str(_random_letters(Path(folder)))
        open_data(make_config(settings, data, ""))  # said now, and not by a process
        for number in range(settings.rounds):
            progress(number, settings.rounds, f"round {number + 1}")
            job = {"settings": report["settings"], "data": data, "output": f"{folder}/{number}"}
            rounds.append(answer_of(_round, job, settings.threads))
    progress(settings.rounds, settings.rounds, "done")
    return report | {"rounds": rounds, "median": statistics.median(each["ratio"] for each in rounds)}


def _random_letters(folder: Path) -> Path:
    text = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=TEXT))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare([str(folder / "text.txt")], folder / "data")
    return folder / "data"


def sections(report: dict[str, Any]) -> list[Section]:
    """Every round, and the median of the ratios, as text and tables."""
    rows = [
        [str(number), f"{each['trainer']:,.0f}", f"{each['bare']:,.0f}", f"{each['ratio']:.3f}"]
        for number, each in enumerate(report["rounds"], 1)
    ]
    words = f"titans train runs at {report['median']:.1%} of the speed of a bare loop, the median of the rounds."
    header = ["round", "titans train", "bare loop", "ratio"]
    return [Section("Speed", [words], [Table(header, rows, "Tokens per CPU second.")]), about(report)]


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """Tokens per second of both loops in every round, by the title of the section."""
    bars = {
        name: [each[key] for each in report["rounds"]]
        for name, key in {"titans train": "trainer", "bare loop": "bare"}.items()
    }
    title = "Training speed: titans train and a bare loop"
    words = [f"round {number}" for number in range(1, len(report["rounds"]) + 1)]
    return {"Speed": [bar_figure("overhead", title, words, bars, "", "tokens per CPU second")]}
