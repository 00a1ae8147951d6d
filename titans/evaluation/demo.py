"""The demonstration: a model whose memory learns at test time, next to the same model with that switched off."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import platform
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from titans.evaluation.recall import RecallConfig, run_recall
from titans.files import write_atomically

LENGTHS: tuple[int, ...] = (64, 128, 256, 512, 1024)
SEEDS = (0, 1, 2)
CONFIG = RecallConfig(depth=1, steps=600)  # a linear memory: the fastest to train that recalls it all
ARMS = {"memory": "with memory", "memory_off": "memory off"}

Report = dict[str, Any]
OnStep = Callable[[int, float, float], None]  # steps taken, loss, accuracy
Move = Callable[[int, int, float, float], None]  # the job's number, then the same


@dataclass(frozen=True)
class _Job:
    """One training run: what a worker process is handed."""

    arm: str
    seed: int
    config: RecallConfig
    lengths: tuple[int, ...]
    sequences: int  # tested at each length

    @property
    def title(self) -> str:
        return f"{ARMS[self.arm]}, seed {self.seed}"

    def run(self, on_step: OnStep) -> dict[str, Any]:
        return run_recall(self.config, self.seed, self.lengths, self.sequences, on_step)


def run_demo(
    out_dir: str | os.PathLike[str] = "titans-demo",
    seeds: Sequence[int] = SEEDS,
    quick: bool = False,
    workers: int | None = None,
    command: str | None = None,
    console: Console | None = None,
) -> Report:
    """Train both models on recall at length 64, test them up to 1024, and write down what came out.

    Args:
        out_dir: folder for `report.json`, `recall.png` and `report.html`; made if it is not there.
        seeds: one run of each model per seed.
        quick: one seed and a few steps: shows that everything works, not that it learns.
        workers: processes to train in, one thread each; 1 trains in this process; none: two, if there are two
            cores. A script that asks for more than one needs the usual `if __name__ == "__main__":`.
        command: what the report says it was made with; none: the command that does the same.
        console: where progress and the table go; none: standard output.

    Returns what `report.json` holds.
    """
    seeds = tuple(seeds)[:1] if quick else tuple(seeds)
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds must be one or more different numbers from 0 up, got {list(seeds)}")
    if workers is None:
        workers = min(2, os.cpu_count() or 1)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    out = Path(out_dir)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out_dir must be a folder, got the file {out}")
    _require_matplotlib()
    out.mkdir(parents=True, exist_ok=True)

    config, lengths, sequences = CONFIG, LENGTHS, 64
    if quick:
        config = replace(CONFIG, steps=6, eval_every=3, batch_size=8, eval_sequences=8)
        lengths, sequences = LENGTHS[:2], 8
    jobs = [
        _Job(arm, seed, replace(config, writes=arm == "memory"), lengths, sequences) for seed in seeds for arm in ARMS
    ]
    console = console or Console()
    start = time.perf_counter()
    results = _run_all(jobs, 1 if quick else workers, console)

    report: Report = {
        "command": command or _command(seeds, quick),
        "quick": quick,
        "seeds": list(seeds),
        "lengths": list(lengths),
        "trained_at": config.length,
        "pairs": config.pairs,
        "chance": config.chance,
        "seconds": round(time.perf_counter() - start, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "arms": {arm: [r for job, r in zip(jobs, results, strict=True) if job.arm == arm] for arm in ARMS},
    }
    picture = plot_recall(report)
    write_atomically(out / "report.json", json.dumps(report, indent=2, allow_nan=False).encode() + b"\n")
    write_atomically(out / "recall.png", picture)
    write_atomically(out / "report.html", render_html(report, picture).encode())
    console.print(render_table(report))
    console.print(summary(report))
    console.print(f"Written to {out}: report.html, recall.png, report.json", highlight=False)
    return report


def mean_recall(report: Report, arm: str, length: int) -> float:
    """Mean over the seeds; a run that diverged recalls nothing."""
    return fmean(run["recall"][str(length)] or 0.0 for run in report["arms"][arm])


def summary(report: Report) -> str:
    """Two sentences on what the figures show."""
    near, far = report["trained_at"], report["lengths"][-1]
    shown = {arm: [f"{mean_recall(report, arm, n):.1%}" for n in (near, far)] for arm in ARMS}
    return (
        f"Trained on sequences of {near} tokens, the model with memory recalls {shown['memory'][0]} of the pairs "
        f"at that length and {shown['memory'][1]} at {far} tokens, {far // near} times as long. The same model, "
        f"trained alike with its memory switched off, recalls {shown['memory_off'][0]} and "
        f"{shown['memory_off'][1]}, where guessing a value gives {report['chance']:.1%}."
    )


def _rows(report: Report) -> Iterator[list[str]]:
    """Header and rows of the table, as text."""
    yield ["length", "x training", *(f"{name} (seeds)" for name in ARMS.values())]
    for length in report["lengths"]:
        cells = [str(length), f"{length / report['trained_at']:g}"]
        for arm, runs in report["arms"].items():
            each = (run["recall"][str(length)] for run in runs)
            shown = " ".join("NaN" if recall is None else f"{100 * recall:.1f}" for recall in each)
            cells.append(f"{mean_recall(report, arm, length):.1%} ({shown})")
        yield cells


def render_table(report: Report) -> Table:
    """Recall against length, for the terminal."""
    header, *rows = _rows(report)
    table = Table(title=f"Recall of {report['pairs']} pairs, trained at length {report['trained_at']}")
    for name in header:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def plot_recall(report: Report) -> bytes:
    """The picture as PNG: recall against length, a thick line for the mean and a thin one for each seed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    lengths = report["lengths"]
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    colours, grey = {"memory": "#1f5fa8", "memory_off": "#c2571a"}, "#777777"

    def label(text: str, point: tuple[float, float], offset: tuple[float, float], colour: str) -> None:
        axes.annotate(text, point, offset, textcoords="offset points", color=colour, annotation_clip=False)

    for arm, name in ARMS.items():
        for run in report["arms"][arm]:
            each = [run["recall"][str(n)] or 0.0 for n in lengths]
            axes.plot(lengths, each, color=colours[arm], linewidth=0.8, alpha=0.45)
        means = [mean_recall(report, arm, n) for n in lengths]
        axes.plot(lengths, means, color=colours[arm], linewidth=2.2, marker="o", markersize=5, clip_on=False)
        label(name, (lengths[-1], means[-1]), (10, 4), colours[arm])
    axes.axhline(report["chance"], color=grey, linewidth=1, linestyle="--")
    label("guessing", (lengths[-1], report["chance"]), (10, -14), grey)
    axes.axvline(report["trained_at"], color=grey, linewidth=1, linestyle=":")
    label("trained here", (report["trained_at"], 0.5), (5, 0), grey)

    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(-0.06, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel("sequence length, tokens")
    axes.set_title(f"Recall of {report['pairs']} key-value pairs from the start of the sequence", loc="left")
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Titans: recall against length</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }}
img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .3rem .8rem; border-bottom: 1px solid #ddd; }}
code {{ background: #f2f2f2; padding: .1rem .3rem; }}
footer {{ color: #666; font-size: .9rem; }}
</style>
</head>
<body>
<h1>A memory that learns at test time</h1>
<p>{summary}</p>
<img alt="Recall against sequence length, with and without memory" src="data:image/png;base64,{picture}">
<table>
<thead><tr>{header}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<footer>
<p>Made with <code>{command}</code>, seeds {seeds}, in {seconds:.0f} seconds; torch {torch}.{quick}</p>
</footer>
</body>
</html>
"""


def render_html(report: Report, picture: bytes) -> str:
    """One page with everything in it: nothing is fetched when it is opened."""
    header, *rows = ([html.escape(cell) for cell in row] for row in _rows(report))
    return _PAGE.format(
        summary=html.escape(summary(report)),
        picture=base64.b64encode(picture).decode(),
        header="".join(f"<th>{cell}</th>" for cell in header),
        rows="\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows),
        command=html.escape(report["command"]),
        seeds=", ".join(map(str, report["seeds"])),
        seconds=report["seconds"],
        torch=html.escape(report["versions"]["torch"]),
        quick=" A quick run: a few steps, too few to learn from." if report["quick"] else "",
    )


def _command(seeds: Sequence[int], quick: bool) -> str:
    given = [] if tuple(seeds) == SEEDS else [f"--seed {seed}" for seed in seeds]
    return " ".join(["titans demo", *given, *(["--quick"] if quick else [])])


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the demonstration draws a picture with matplotlib: pip install 'titan-memory[demo]'"
        ) from error


@contextmanager
def _progress_bars(jobs: Sequence[_Job], console: Console) -> Iterator[Move]:
    """One bar a job; yields the function that moves bar `index`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f} steps  {task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(job.title, total=job.config.steps, figures="", start=False) for job in jobs]

        def move(index: int, step: int, loss: float, accuracy: float) -> None:
            if step == 1:
                progress.start_task(bars[index])
            progress.update(bars[index], completed=step, figures=f"loss {loss:.3f}  recall {accuracy:4.0%}")

        yield move


def _run_all(jobs: Sequence[_Job], workers: int, console: Console) -> list[dict[str, Any]]:
    """Run every job, `workers` at a time, and return what each of them returned, in their order."""
    with _progress_bars(jobs, console) as move:
        if workers == 1:
            return [job.run(_bind(move, index)) for index, job in enumerate(jobs)]
        context = get_context("spawn")
        steps = context.Queue()
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(steps,))
        try:
            futures = [pool.submit(_run_in_worker, index, job) for index, job in enumerate(jobs)]
            _follow(futures, steps, move)
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _follow(futures: Sequence[Future[dict[str, Any]]], steps: Any, move: Move) -> None:
    """Move the bars until every job is done, or one has failed."""
    while not all(future.done() for future in futures):
        if any(future.done() and future.exception() for future in futures):
            return
        try:
            move(*steps.get(timeout=0.2))
        except queue.Empty:
            continue
    while not steps.empty():
        move(*steps.get())


def _bind(move: Move, index: int) -> OnStep:
    return lambda step, loss, accuracy: move(index, step, loss, accuracy)


_steps: Any = None  # a worker's way to tell the parent how far it is


def _start_worker(steps: Any) -> None:
    global _steps
    _steps = steps
    torch.set_num_threads(1)


def _run_in_worker(index: int, job: _Job) -> dict[str, Any]:
    return job.run(lambda step, loss, accuracy: _steps.put((index, step, loss, accuracy)))
