"""The demonstration: a model whose memory learns while it reads, beside the same model with its memory off."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table as Drawn

import titans
from titans.bench.model import BASELINE, PREFILL, run_model_benchmark
from titans.bench.settings import ModelBenchmarkSettings
from titans.bench.timing import busy_notices, machine_text
from titans.evaluation.measure import Evaluation
from titans.experiments.memory_tests import (
    AGAIN,
    CHANGED,
    FILLERS,
    NEW,
    PAUSE,
    mean_surprise,
    surprise_of_facts,
)
from titans.experiments.recipes import read_recipe, shipped_recipes
from titans.experiments.runs import Job, check_jobs, run_folder, run_jobs
from titans.experiments.tasks import read_result
from titans.files import METRICS
from titans.models import TitansForCausalLM
from titans.models.loading import load_model
from titans.report.outcome import read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table, print_table, show
from titans.report.plots import Curve, Span, plot_heat, plot_lines, plot_sequence, short_number
from titans.tasks.recall import Recall
from titans.training.callbacks import read_metrics
from titans.training.config import TrainConfig

SMALL = read_recipe(shipped_recipes()["_small"])  # the model and the schedule of the small experiments
MODEL: dict[str, Any] = {
    "name": "mac",
    **SMALL["model"],
    "memory_depth": 1,
}  # a linear memory learns it in the fewest steps
# Training begins with half the length, where a batch asks more often: the plateau before recall takes half the time.
TRAIN: dict[str, Any] = {
    **SMALL["train"], "data": f"task:{Recall.name}", "length": 64, "shortest": 32, "batch_tokens": 1024, "steps": 500,
    "log_every": 10, "eval_every": 40, "save_every": 80, "eval_tokens": 4096, "final_eval_tokens": 4096,
}  # fmt: skip
SEEDS = (0, 1)
LENGTHS = (64, 128, 256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES = 16  # sequences of each length and depth
WITH, WITHOUT = "with memory", "memory off"
ARMS: dict[str, dict[str, Any]] = {WITH: {}, WITHOUT: {"memory_writes": False}}

SURPRISED = 64  # sequences that the surprise is the mean of

OURS, THEIRS = "Titans", "Transformer"
LEAD = 1.05  # a lead that counts as faster
# The width and layers of the model that is trained, with longer segments: those of 16 tokens only make the test hard.
SPEED = ModelBenchmarkSettings(
    dim=MODEL["hidden_size"], layers=MODEL["num_hidden_layers"], heads=MODEL["num_attention_heads"], vocab_size=192,
    memory_depth=MODEL["memory_depth"], segment=512, persistent=MODEL["num_persistent_tokens"],
    lengths=(256, 1024, 4096, 8192, 16384), measures=(PREFILL,), repeats=3, only=("mac", BASELINE), peak_memory=False,
)  # fmt: skip
NAMES = {"mac": OURS, BASELINE: THEIRS}

NAME = "report"  # of the files that the demonstration writes
QUICK = "This was a quick run of a few steps, too few to learn from: it only shows that everything works."
TITLE = "Titans: a memory that learns while it reads"
Report = dict[str, Any]


def run_demo(
    out_dir: str | os.PathLike[str] = "titans-demo",
    seeds: Sequence[int] = SEEDS,
    quick: bool = False,
    at_a_time: int | None = None,
    command: str | None = None,
    console: Console | None = None,
) -> Report:
    """Train both models on recall at length 64, test them up to length 1024, and show what came out.

    Complete runs are kept, and a complete demonstration is only shown again.

    Args:
        out_dir: folder for `report.json`, `report.md`, `report.html` and its pictures, made if needed. `recall.png`
            shows recall against length. The runs are in `runs`, those of a quick demonstration in `quick/runs`.
        seeds: each of them gives one run of each model.
        quick: one seed and a few steps: shows that everything works, not that it learns.
        at_a_time: how many runs go side by side, each a process with one thread; None: two, if there are two cores.
        command: what the report says it was made with; None: the command that does the same.
        console: where progress and the table go; None: standard output.

    Returns what `report.json` holds.
    """
    seeds = tuple(seeds)[:1] if quick else tuple(seeds)
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds is {list(seeds)}; expected one or more different numbers from 0 up")
    out = Path(out_dir)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out_dir is the file {out}; expected a folder")
    console = console or Console()
    jobs = make_jobs(out, seeds, quick)
    speed = _speed_settings(quick)
    settings = {"version": titans.__version__, "jobs": [_about(job) for job in jobs], "speed": asdict(speed)}
    report = read_kept(out / f"{NAME}.json", settings)
    if report:
        console.print(
            f"This demonstration is in {out} already, and this is what came out; remove the folder to run it again.",
            highlight=False,
        )
    else:
        check_jobs(jobs)
        start = time.perf_counter()
        _run(jobs, min(2, os.cpu_count() or 1) if at_a_time is None else at_a_time, console)
        report = {
            "name": NAME,
            "title": TITLE,
            "command": command or _command(seeds, quick),
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"titans": titans.__version__, "torch": torch.__version__},
            "quick": quick,
            "trained_at": TRAIN["length"],
            "window": MODEL["window_size"],
            "pairs": task_of(jobs[0]).pairs,
            "chance": task_of(jobs[0]).chance,
            "lengths": list(task_of(jobs[0]).lengths),
            "depths": list(task_of(jobs[0]).depths),
            "runs": [_read_run(job) for job in jobs],
            "surprise": surprise_of_facts(_load(jobs[0]), task_of(jobs[0]), sequences=SURPRISED),
            "speed": _measure_speed(speed, console),
            "seconds": round(time.perf_counter() - start, 1),
            "settings": json.loads(json.dumps(settings)),
        }
        write_figures(report, out)  # what took minutes to measure is safe before anything is drawn
    page = write_outcome(report | {"name": NAME}, report["title"], sections(report), out)
    print_table(console, recall_table(report))
    for sentence in (*summary(report), about_surprise(report), about_speed(report), *([QUICK] if quick else [])):
        console.print(sentence, highlight=False)
    console.print(f"Report: {page}, its pictures beside it, and {out / NAME}.json and .md", highlight=False)
    return report


def make_jobs(out: Path, seeds: Sequence[int], quick: bool) -> list[Job]:
    """One run of each model per seed, and what it is tested with."""
    lengths, depths, samples = (LENGTHS[:2], DEPTHS[::4], 2) if quick else (LENGTHS, DEPTHS, SAMPLES)
    train = TRAIN | ({"steps": 4, "warmup": 1.0, "log_every": 1, "eval_every": 2} if quick else {})
    test = Evaluation((Recall.name,), {"lengths": list(lengths), "depths": list(depths)}, samples)
    jobs = []
    for seed in seeds:
        for label, fields in ARMS.items():
            folder = run_folder(out / "quick" if quick else out, label, seed)
            task = {"depths": list(depths)}
            config = TrainConfig(model=MODEL | fields, task=task, output=str(folder), seed=seed, **train)
            jobs.append(Job(config, (test,)))
    return jobs


def task_of(job: Job) -> Recall:
    """What a run is tested with."""
    settings = job.tests[0].settings
    return Recall(lengths=tuple(settings["lengths"]), depths=tuple(settings["depths"]))


def _arm(job: Job) -> str:
    return WITH if job.config.model.get("memory_writes", True) else WITHOUT


def _about(job: Job) -> dict[str, Any]:
    """All that decides what comes out of a run."""
    config = job.config.to_dict()
    del config["output"]
    return {"train": config, "tests": [asdict(test) for test in job.tests]}


def _command(seeds: Sequence[int], quick: bool) -> str:
    given = [] if tuple(seeds) == SEEDS else [f"--seed {seed}" for seed in seeds]
    return " ".join(["titans demo", *given, *(["--quick"] if quick else [])])


def _run(jobs: Sequence[Job], at_a_time: int, console: Console) -> None:
    """Train and test with a live table; where there is no terminal, with one line per run that ends."""
    finished = 0
    with Live(console=console, auto_refresh=False) as live:

        def show(done: int, total: int, running: str) -> None:
            nonlocal finished
            if done > finished and not console.is_terminal:
                console.print(f"{done} of {total} runs done", highlight=False)
            finished = done
            live.update(draw_progress(jobs, running.split(", ")), refresh=True)

        run_jobs(jobs, at_a_time, show)
        live.update(draw_progress(jobs, ()), refresh=True)
    if not console.is_terminal:
        console.line()


def draw_progress(jobs: Sequence[Job], running: Sequence[str]) -> Drawn:
    """How far the runs have come, by the files that they write; ``running`` names those that are under way."""
    table = Drawn(title=f"Learning to recall at {TRAIN['length']} tokens", title_justify="left", title_style="bold")
    widths = {"model": 11, "seed": 4, "step": 7, "loss": 5, "held-out accuracy": 17, "": 13}  # it should not twitch
    for name, width in widths.items():
        table.add_column(name, justify="left" if name in ("model", "") else "right", min_width=width)
    for job in jobs:
        lines = read_metrics(job.folder / METRICS)
        loss = [line["loss"] for line in lines if line.get("loss") is not None]
        accuracy = [line["eval_accuracy"] for line in lines if line.get("eval_accuracy") is not None]
        words = "waiting"
        if job.is_done():
            words = "done"
        elif job.name in running:
            words = f"testing {_tested(job)}" if job.is_trained() else "training" if lines else "starting"
        table.add_row(
            _arm(job),
            str(job.config.seed),
            f"{lines[-1]['step'] if lines else 0}/{job.config.steps}",
            f"{loss[-1]:.3f}" if loss else "",
            f"{accuracy[-1]:.1%}" if accuracy else "",
            words,
        )
    return table


def _tested(job: Job) -> str:
    """How many cells of its test a run has done, out of how many."""
    done = 0
    if job.results.is_file():
        done = len(read_result(job, _arm(job))["tasks"][Recall.name]["cells"])
    return f"{done}/{len(task_of(job).groups())}"


def _read_run(job: Job) -> dict[str, Any]:
    """What came out of a run."""
    result = read_result(job, _arm(job))
    trained, cells = result["training"], result["tasks"][Recall.name]["cells"]
    return {
        "model": _arm(job),
        "seed": job.config.seed,
        "parameters": int(trained["parameters"]),
        "steps": int(trained["steps"]),
        "cpu_seconds": round(trained["cpu_seconds"], 1),
        "held_out": trained["eval_accuracy"],
        "recall": [{**cell["group"], "value": cell["value"], "sequences": cell["count"]} for cell in cells],
    }


def _speed_settings(quick: bool) -> ModelBenchmarkSettings:
    return replace(SPEED, lengths=(128, 256), repeats=1) if quick else SPEED


def _load(job: Job) -> TitansForCausalLM:
    model = load_model(str(job.folder))[0]
    assert isinstance(model, TitansForCausalLM)
    return model


def _measure_speed(settings: ModelBenchmarkSettings, console: Console) -> dict[str, Any]:
    """Tokens per second of a forward pass, the median of the rounds, of our model and of a Llama of the same size."""
    with console.status("measuring speed") as status:
        measured = run_model_benchmark(settings, lambda done, total, what: status.update(f"speed, {what}"))
    speeds: dict[str, dict[int, float]] = {name: {} for name in NAMES.values()}
    for result in measured["results"]:
        speeds[NAMES[result["contender"]]][result["length"]] = result["length"] / result["median_seconds"]
    lengths = [length for length in settings.lengths if all(length in speed for speed in speeds.values())]
    return {
        "lengths": lengths,
        "tokens_per_second": {name: [speed[length] for length in lengths] for name, speed in speeds.items()},
        "parameters": {NAMES[each["name"]]: each["parameters"] for each in measured["contenders"]},
        "machine": machine_text(measured["machine"]),
        # a busy machine is no news: the runs have only just ended
        "notices": [notice for notice in measured["notices"] if notice not in busy_notices(measured["machine"])],
    }


def recalls(report: Report, model: str, length: int, depth: float = 0.0) -> list[float]:
    """What each seed recalls at a length and a depth; a run that diverged recalls nothing."""
    return [
        cell["value"] or 0.0
        for run in report["runs"]
        if run["model"] == model
        for cell in run["recall"]
        if (cell["length"], cell["depth"]) == (length, depth)
    ]


def summary(report: Report) -> list[str]:
    """Three sentences: what this is, and what the figures show."""
    near, far = report["trained_at"], report["lengths"][-1]
    shown = {arm: [f"{fmean(recalls(report, arm, n)):.1%}" for n in (near, far)] for arm in ARMS}
    return [
        "A Titans model learns while it reads: each token is one step of gradient descent on the weights of a small "
        "network, its memory, which still knows what attention no longer sees.",
        f"Trained on sequences of {near} tokens, with attention that sees {report['window']}, it recalls "
        f"{shown[WITH][0]} of {report['pairs']} facts from the start of such a sequence and {shown[WITH][1]} at "
        f"{far:,} tokens, {far // near} times as long.",
        f"The same model, trained alike with its memory switched off, recalls {shown[WITHOUT][0]} and "
        f"{shown[WITHOUT][1]}, where guessing gives {report['chance']:.1%}.",
    ]


def about_surprise(report: Report) -> str:
    """A sentence with the figures of the surprise."""
    new, again, changed = (mean_surprise(report["surprise"], name) for name in (NEW, AGAIN, CHANGED))
    return (
        f"The memory's surprise at the value of a new fact is {new:.2f}, at the same fact again {again:.2f}, and "
        f"{changed:.2f} when a known key comes with the value of another."
    )


def about_speed(report: Report) -> str:
    """A sentence with the figures of the speed."""
    lengths, speeds = report["speed"]["lengths"], report["speed"]["tokens_per_second"]
    ours, theirs = speeds[OURS], speeds[THEIRS]
    text = (
        f"From {lengths[0]:,} to {lengths[-1]:,} tokens {OURS} goes from {ours[0]:,.0f} to {ours[-1]:,.0f} tokens per "
        f"second, and a {THEIRS} of the same size from {theirs[0]:,.0f} to {theirs[-1]:,.0f}"
    )
    backwards = reversed(list(zip(lengths, ours, theirs, strict=True)))
    faster = [length for length, _, _ in takewhile(lambda each: each[1] > LEAD * each[2], backwards)]
    return f"{text}: {OURS} is faster from {faster[-1]:,} on." if faster else f"{text}."


def recall_table(report: Report) -> Table:
    """Recall against length: one row per length, with each seed in parentheses."""
    header = ["length", "times training", *(f"{name} (each seed)" for name in ARMS)]
    rows = []
    for length in report["lengths"]:
        row = [f"{length:,}", f"{length / report['trained_at']:g}"]
        for arm in ARMS:
            each = recalls(report, arm, length)
            row.append(f"{fmean(each):.1%} ({' '.join(f'{100 * value:.1f}' for value in each)})")
        rows.append(row)
    return Table(header, rows, f"Recall of {report['pairs']} facts from the start of the sequence.")


def sections(report: Report) -> list[Section]:
    """What the page shows."""
    short = [*summary(report), *([QUICK] if report["quick"] else [])]
    pairs, speed = report["pairs"], report["speed"]
    recall = Figure("recall", plot_recall(report), "Recall against length, with memory and with the memory off")
    surprise = Figure("surprise", plot_surprise(report), "The memory's surprise at each token of a sequence")
    return [
        Section("In short", short, figures=[recall]),
        Section(
            "Wherever the facts stand",
            [
                f"The {pairs} facts stand at any depth of the sequence: 0 is its start, 1 just before the questions. "
                "Numbers are the share of facts recalled, in percent, as a mean over the seeds.",
            ],
            figures=[plot_needle(report, arm) for arm in ARMS],
        ),
        Section(
            "What surprises the memory",
            [
                f"The model reads {pairs} facts, {PAUSE} fillers, and then, each time from the beginning, as many new "
                "facts, the same facts again, or the same keys with each other's values. Surprise is the norm of the "
                "gradient that a token sends into the memory, which is what the memory learns from; the figure shows "
                f"the memory of the first layer, as a mean over {SURPRISED} sequences.",
                about_surprise(report),
            ],
            figures=[surprise],
        ),
        Section(
            "Speed against length",
            [
                f"A forward pass over one sequence, one thread, the median of {report['settings']['speed']['repeats']} "
                f"alternating rounds: {OURS} (MAC, segments of {report['settings']['speed']['segment']} tokens, "
                f"{speed['parameters'][OURS]:,} parameters) and Llama of transformers "
                f"({speed['parameters'][THEIRS]:,}), whose attention sees all earlier tokens.",
                about_speed(report),
                *(f"{notice[0].upper()}{notice[1:]}" for notice in speed["notices"]),
            ],
            figures=[plot_speed(report)],
        ),
        _made_section(report),
    ]


def _made_section(report: Report) -> Section:
    header = ["model", "seed", "parameters", "steps", "CPU seconds", "held-out accuracy"]
    rows = [
        [run["model"], str(run["seed"]), f"{run['parameters']:,}", str(run["steps"]), f"{run['cpu_seconds']:.0f}",
         show(run["held_out"], ".1%")]
        for run in report["runs"]
    ]  # fmt: skip
    caption = f"Training on {report['trained_at']} tokens, the facts at any depth; held-out accuracy is on other facts."
    made = (
        f"Made by the command '{report['command']}' on {report['date']} in {report['seconds']:,.0f} seconds, titans "
        f"{report['versions']['titans']}, {report['speed']['machine']}."
    )
    return Section("How it was made", [made], [recall_table(report), Table(header, rows, caption)])


def plot_recall(report: Report) -> bytes:
    """Recall against length as PNG: a thick line for the mean, thin ones for the seeds."""
    lengths, window = report["lengths"], report["window"]
    curves = []
    for style, arm in enumerate(ARMS):
        each = [recalls(report, arm, length) for length in lengths]
        runs = list(zip(*each, strict=True))
        curves.append(Curve(arm, [fmean(values) for values in each], (), (), runs, style, report["trained_at"]))
    return plot_lines(
        lengths,
        curves,
        "Facts from the start, asked for at the end",
        "length of the sequence (tokens)",
        "facts recalled (%)",
        percent=True,
        chance=report["chance"],
        span=Span(window / 2, window, f"attention\nsees {window}"),
    )


def plot_needle(report: Report, arm: str) -> Figure:
    """Recall by depth and length, as a heat map."""
    lengths, depths = report["lengths"], report["depths"]
    png = plot_heat(
        [short_number(length) for length in lengths],
        [short_number(depth) for depth in depths],
        [[fmean(recalls(report, arm, length, depth)) for length in lengths] for depth in depths],
        f"Facts recalled: {arm}",
        "length (tokens)",
        "depth of the facts",
        "facts recalled (%)",
        lambda value: f"{100 * value:.0f}",
    )
    return Figure(f"needle-{arm.replace(' ', '-')}", png, f"Recall by length and depth, {arm}")


def plot_surprise(report: Report) -> bytes:
    """Surprise of the first layer along a sequence, as PNG."""
    values, parts = report["surprise"]["layers"][0], report["surprise"]["parts"]
    kinds = [
        "filler" if part == FILLERS else ("key", "value")[place % 2] for part, count in parts for place in range(count)
    ]
    return plot_sequence(values, kinds, parts, "What surprises the memory", "token of the sequence", "surprise")


def plot_speed(report: Report) -> Figure:
    """Tokens per second against length."""
    lengths, speeds = report["speed"]["lengths"], report["speed"]["tokens_per_second"]
    curves = [Curve(name, speeds[name], style=style) for style, name in enumerate((OURS, THEIRS))]
    png = plot_lines(
        lengths, curves, "Tokens per second, reading one sequence", "length (tokens)",
        "tokens per second",
    )  # fmt: skip
    return Figure("speed", png, f"Tokens per second against length, {OURS} and {THEIRS}")
