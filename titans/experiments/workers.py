"""Runs that leave a file of figures each: in this process or in several with one thread each, and none done twice."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from titans.files import write_atomically, write_json
from titans.report.progress import Progress
from titans.words import sentence


class Run(Protocol):
    """What a run must have."""

    @property
    def name(self) -> str:
        """Unlike that of any other run of the experiment."""

    def file(self, out: Path) -> Path:
        """Where its figures are, in the folder of the experiment."""


AnyRun = TypeVar("AnyRun", bound=Run)
Work = Callable[[AnyRun], dict[str, Any]]
Results = Iterator[tuple[AnyRun, str | None]]


def do_all(
    runs: Sequence[AnyRun], work: Work[AnyRun], out: Path, at_a_time: int, total: int, progress: Progress
) -> dict[str, str]:
    """Does the runs, ``at_a_time`` of them side by side, and one at a time in this process.

    Args:
        work: a function of a module, from a run to its figures.
        total: how many runs there are with those that were done before.

    Returns why those that failed did, by their names.
    """
    failed: dict[str, str] = {}
    done = total - len(runs)
    results = _one_by_one(runs, work, out) if at_a_time == 1 else _side_by_side(runs, work, out, at_a_time)
    progress(done, total, runs[0].name if runs else "")
    with closing(results):  # type: ignore[type-var]
        for run, why in results:
            done += 1
            if why is not None:
                failed[run.name] = why
            progress(done, total, f"after {run.name}")
    return failed


def _one_by_one(runs: Sequence[AnyRun], work: Work[AnyRun], out: Path) -> Results[AnyRun]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run in runs:
            yield run, _attempt(run, work, out)
    finally:
        torch.set_num_threads(threads)


def _side_by_side(runs: Sequence[AnyRun], work: Work[AnyRun], out: Path, at_a_time: int) -> Results[AnyRun]:
    if not runs:
        return
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    pool = ProcessPoolExecutor(at_a_time, context, _start_worker, (theirs,))
    try:
        futures = {pool.submit(_attempt, run, work, out): run for run in runs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], "its process, or one beside it, was ended from outside; it can be done again"
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: Connection) -> None:
    """One thread; and the process ends when its parent does, in whatever way, or closes its end of the pipe."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent

    def wait() -> None:
        try:
            parent.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _attempt(run: AnyRun, work: Work[AnyRun], out: Path) -> str | None:
    """Does a run and writes its figures; returns why it failed, and leaves the whole story beside the figures."""
    log = run.file(out).with_suffix(".log")
    try:
        write_json(run.file(out), work(run))
    except Exception as error:
        write_atomically(log, traceback.format_exc().encode())
        return f"{sentence(error)} (see {log})"
    log.unlink(missing_ok=True)
    return None
