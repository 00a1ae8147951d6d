"""What a run shows and keeps while it goes on: a progress bar, the figures of every log, and a way to stop in order."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from titans.files import METRICS, finite, write_atomically
from titans.report.progress import Move, bar


class ProgressBar(TrainerCallback):
    """A bar with loss, perplexity, tokens per second and the time left; lines where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)
        self.shown = ExitStack()
        self.move: Move | None = None
        self.words = "training"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar."""
        if state.is_world_process_zero:
            self.move = self.shown.enter_context(bar(self.words, state.max_steps, self.console))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves it."""
        if self.move is not None:
            self.move(state.global_step, state.max_steps, self.words)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Shows new figures."""
        if not logs or not state.is_world_process_zero:
            return
        if "loss" in logs:
            speed = f"{logs['tokens_per_second']:,.0f} tokens/s"
            self.words = f"loss {logs['loss']:.4f}  perplexity {logs['perplexity']:.4g}  {speed}"
            if not self.console.is_terminal:
                self._print(f"step {state.global_step:>6,} of {state.max_steps:,}  {self.words}")
        elif "eval_loss" in logs:
            self._print(
                f"step {state.global_step:>6,}  validation loss {logs['eval_loss']:.4f}  "
                f"perplexity {logs['eval_perplexity']:.4g}  accuracy {logs['eval_accuracy']:.3f}  "
                f"over {logs['eval_tokens']:,.0f} tokens"
            )

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar."""
        self.close()

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self.shown.close()
        self.move = None


class MetricsFile(TrainerCallback):
    """Writes every log as a line of JSON; a resumed run drops the lines after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.start = time.time()
        self.spent = self.passed = 0.0  # CPU seconds, and seconds, of the processes before this one

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drops the lines of steps that will be taken again."""
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
        if kept:
            self.spent, self.passed = kept[-1]["cpu_seconds"], kept[-1]["seconds"]
        write_atomically(self.path, "".join(map(_line, kept)).encode())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Adds a line."""
        if logs and state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line({"step": state.global_step, **logs, **self.times()}))

    def times(self) -> dict[str, float]:
        """CPU seconds and seconds of the whole run so far."""
        return {"cpu_seconds": self.spent + time.process_time(), "seconds": self.passed + time.time() - self.start}


def _line(figures: dict[str, Any]) -> str:
    return json.dumps(finite(figures), allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without a last one that was cut off; a figure that was not finite is None."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines


class StopInOrder(TrainerCallback):
    """On SIGTERM, as schedulers send it before they kill, and on Ctrl-C: a checkpoint after this step, and an end.

    A second Ctrl-C stops at once.

    Args:
        say: told of Ctrl-C.

    Attributes:
        interrupted: whether Ctrl-C was the reason.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.asked = self.interrupted = False
        self.process = os.getpid()
        self.before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listens."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a shell
                    self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a data worker: the terminal tells all processes of Ctrl-C
            return
        if number == signal.SIGINT:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            self.say("a checkpoint will be saved after this step; Ctrl-C again stops at once.")
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
        self.close()

    def close(self) -> None:
        """Leaves the signals as they were."""
        while self.before:
            number, handler = self.before.popitem()
            signal.signal(number, handler)
