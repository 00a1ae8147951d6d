"""What a run shows and keeps while it goes on: a bar, a line of figures at every look, and a way to stop in order."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from titans.files import METRICS


class ProgressBar(TrainerCallback):
    """A bar with loss, perplexity, tokens per second and the time left; lines where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)
        self.bar: Any = None
        self.task: Any = None
        self.words = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = (
            TextColumn("training"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeLeft(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=self.console)
        self.bar.start()
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step, words="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves it."""
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step, words=self.words)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """New words."""
        if not logs or not state.is_world_process_zero:
            return
        if "loss" in logs:
            speed = f"{logs['tokens_per_second']:,.0f} tokens/s"
            self.words = f"loss {logs['loss']:.4f}  perplexity {logs['perplexity']:.4g}  {speed}"
            line = f"step {state.global_step:>6,} of {state.max_steps:,}  {self.words}"
            if self.bar is None:
                self.console.print(line, highlight=False)
        elif "eval_loss" in logs:
            self.console.print(
                f"step {state.global_step:>6,}  validation loss {logs['eval_loss']:.4f}  "
                f"perplexity {logs['eval_perplexity']:.4g}  accuracy {logs['eval_accuracy']:.3f}",
                highlight=False,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class MetricsFile(TrainerCallback):
    """Every figure of the run as a line of JSON; a continued run takes back the lines after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.start = time.time()
        self.spent = self.passed = 0.0  # CPU seconds, and seconds, of the processes before this one

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps the lines of the steps that count."""
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
        if kept:
            self.spent, self.passed = kept[-1]["cpu_seconds"], kept[-1]["seconds"]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """One more line."""
        if logs and state.is_world_process_zero:
            finite = {name: value if math.isfinite(value) else None for name, value in logs.items()}
            line = {"step": state.global_step, **finite, **self.times()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def times(self) -> dict[str, float]:
        """CPU seconds and seconds of the whole run so far."""
        return {"cpu_seconds": self.spent + time.process_time(), "seconds": self.passed + time.time() - self.start}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off is left out."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines


class StopInOrder(TrainerCallback):
    """On SIGTERM, as schedulers send it before they kill: a checkpoint after this step, and an end."""

    def __init__(self) -> None:
        self.asked = False
        self.before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listens."""
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops if it was asked to; several processes agree on it where they log."""
        stop = self.asked
        if args.world_size > 1:
            if state.global_step % args.logging_steps:
                return
            votes = torch.tensor([float(stop)], device=args.device)
            dist.all_reduce(votes)
            stop = self.asked = bool(votes > 0)
        if stop:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops listening."""
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
            self.before = None
