"""Experiments whose runs are over at once, with losses of the test's choice: for what is made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from titans.experiments import runs
from titans.experiments.runs import Job
from titans.files import METRICS, RESULT
from titans.training.prepare import prepare


class Done:
    """A process that has ended well."""

    returncode = 0

    def poll(self) -> int:
        return 0


def finish(monkeypatch: pytest.MonkeyPatch, loss_of: Callable[[Job], float]) -> None:
    """Every run ends at once with the loss of its job, after a second of CPU time."""

    def start(job: Job) -> Done:
        loss = loss_of(job)
        figures = {"eval_loss": loss, "parameters": 10.0, "tokens": 512, "cpu_seconds": 1.0, "peak_memory": math.nan}
        job.folder.mkdir(parents=True)
        (job.folder / RESULT).write_text(json.dumps(figures))
        lines = [{"step": 1, "eval_loss": 5.0}, {"step": 2, "eval_loss": loss}]
        (job.folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Done()

    monkeypatch.setattr(runs, "_start", start)
    monkeypatch.setattr(runs, "POLL", 0.0)


def text(folder: Path) -> str:
    """A prepared folder of a little text, with a validation split."""
    files = [folder / "train.txt", folder / "validation.txt"]
    for file in files:
        file.write_text("To be, or not to be. " * 100)
    prepare([str(files[0])], folder / "data", validation=[str(files[1])])
    return str(folder / "data")
