"""Runs that leave a file of figures each: in this process or in several with one thread each, and none done twice."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from titans.files import write_atomically, write_json
from titans.report.outcome import read_kept
from titans.report.page import Section, Table
from titans.report.progress import Progress
from titans.words import nearest, sentence


class Run(Protocol):
    """What a run must have."""

    @property
    def name(self) -> str:
        """Unlike that of any other run of the experiment."""

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that its figures depend on, and that is kept with them."""

    def file(self, out: Path) -> Path:
        """Where its figures are, in the folder of the experiment."""


AnyRun = TypeVar("AnyRun", bound=Run)
Work = Callable[[AnyRun], dict[str, Any]]
Results = Iterator[tuple[AnyRun, str | None]]


def require_some(known: Mapping[str, Collection[str]], **lists: Sequence[Any]) -> None:
    """Raises a ``ValueError`` if one of the lists is empty, or has a name that is not ``known`` for it."""
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name} is empty; expected at least one")
        for value in values:
            if name in known and value not in known[name]:
                raise ValueError(f"{name} has {value!r}: {nearest(value, known[name])}")


def do_and_report(
    runs: Sequence[AnyRun],
    work: Work[AnyRun],
    out: Path,
    at_a_time: int,
    progress: Progress,
    about: Mapping[str, Any],
    write: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Does what is not done yet with the same settings, and reports all that is, even if it is interrupted.

    Args:
        work: see :func:`do_all`.
        about: what the report has beside the figures of its runs.
        write: completes and writes a report with at least one run.

    A ``ValueError`` says which runs failed, when all else is done and reported.
    """
    failed: dict[str, str] = {}
    try:
        missing = [run for run in runs if not read_kept(run.file(out), run.settings)]
        failed = do_all(missing, work, out, at_a_time, len(runs), progress)
    finally:
        done = [kept for run in runs if (kept := read_kept(run.file(out), run.settings))]
        report = {**about, "date": time.strftime("%Y-%m-%d"), "runs": done, "failed": failed}
        report["missing"] = len(runs) - len(done)
        if done:
            write(report)
    if failed:
        name, why = next(iter(failed.items()))
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed, the first one {name}: {why}")
    return report


def missing_section(report: Mapping[str, Any]) -> list[Section]:
    """Which runs of a report failed, and how many are missing; no section where all are done."""
    if not report["missing"]:
        return []
    total = report["missing"] + len(report["runs"])
    about = f"Without figures: {report['missing']} of {total} runs. The same command does them and keeps the others."
    lines = [[name, why] for name, why in report["failed"].items()]
    return [Section("Missing runs", [about], [Table(["failed run", "why"], lines)] if lines else [])]


def mean_and_spread(values: Sequence[float], form: str = ".3f") -> str:
    """The mean of the figures of several runs ± their standard deviation, as a text."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


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
