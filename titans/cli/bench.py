"""`titans bench`: what the memory and the models cost, and what they bear."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titans.cli.common import bar, names, numbers, require

if TYPE_CHECKING:
    from titans.report.page import Figure, Section

app = typer.Typer(help="Measure speed, memory in use, and what a memory bears.")
Progress = Callable[[int, int, str], None]
Run = Callable[[Any, Progress, Path | None], dict[str, Any]]  # settings, progress, output folder -> report


def _numbers(parameter: typer.CallbackParam, value: str) -> Any:
    return numbers(value, parameter.opts[0])


def _names(value: str | None) -> Any:
    return names(value)


Batch = Annotated[int, typer.Option(help="Sequences per call.")]
Lengths = Annotated[str, typer.Option(help="Tokens per sequence, separated by commas.", callback=_numbers)]
Repeats = Annotated[int, typer.Option(help="Interleaved rounds of timing.")]
Threads = Annotated[int, typer.Option(help="CPU threads.")]
Only = Annotated[
    str | None, typer.Option(help="Contenders to run, separated by commas; all by default.", callback=_names)
]
PeakMemory = Annotated[bool, typer.Option(help="Measure peak memory too, in one process per figure.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the report as JSON, Markdown, page and pictures.")]
Kept = Annotated[
    Path | None,
    typer.Option(help="Folder for the report as JSON, Markdown, page and pictures; what is finished there is kept."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: shows that it works; the report goes to OUT/quick.")]


@app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _run(
    context: typer.Context,
    title: str,
    settings: Callable[..., Any],
    run: Run,
    sections: Callable[[dict[str, Any]], list[Section]],
    figures: Callable[[dict[str, Any]], dict[str, list[Figure]]],
    quick: dict[str, Any],
) -> None:
    """Run a benchmark whose settings are the options of its command; prints the report, and writes it to --out.

    Args:
        figures: gives the pictures of each section, by its title.
        quick: settings that --quick puts in the place of those that were not given.
    """
    from rich.console import Console

    from titans.files import locked
    from titans.report.outcome import write_outcome
    from titans.report.page import print_table

    given = dict(context.params)
    out: Path | None = given.pop("out")
    if given.pop("quick", False):
        sources = {name: context.get_parameter_source(name) for name in given}
        asked = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        given |= {name: value for name, value in quick.items() if name not in asked}
        out = None if out is None else out / "quick"
    if out is not None:
        require("--out", "matplotlib", "plot")
    command = shlex.join(["titans", *sys.argv[1:]])
    try:
        chosen = settings(**given)
        with nullcontext() if out is None else locked(out, command):
            with bar() as move:
                report = {"command": command, **run(chosen, move, out)}
            parts = sections(report)
            if out is not None:
                drawn = figures(report)
                write_outcome(report, title, [replace(part, figures=drawn.get(part.title, ())) for part in parts], out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    for part in parts[:-1]:  # the last one repeats the settings
        console.print(part.title, style="bold underline", highlight=False)
        for paragraph in part.paragraphs:
            console.print(paragraph, highlight=False, markup=False)
        for table in part.tables:
            print_table(console, table)
    for notice in report["notices"]:
        typer.echo(f"titans: {notice}", err=True)
    if out is not None:
        typer.echo(f"Report: {out / 'report.html'}, {out / report['name']}.json and .md")


@app.command("memory")
def memory(
    context: typer.Context,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    heads: Annotated[int, typer.Option(help="Memories side by side, each dim / heads wide.")] = 4,
    depth: Annotated[int, typer.Option(help="Layers of each memory.")] = 2,
    chunk_size: Annotated[int, typer.Option(help="Tokens that share one gradient anchor.")] = 64,
    batch: Batch = 1,
    lengths: Lengths = "512,2048,8192,32768",
    recurrent_max_length: Annotated[int, typer.Option(help="Longest length for the token-by-token mode.")] = 512,
    reference_max_length: Annotated[int, typer.Option(help="Longest length for titans-pytorch.")] = 2048,
    repeats: Repeats = 5,
    threads: Threads = 1,
    only: Only = None,
    peak_memory: PeakMemory = True,
    out: Out = None,
    quick: Quick = False,
) -> None:
    """Measure speed and peak memory of the neural memory against length, next to titans-pytorch if installed."""
    from titans.bench import memory as bench

    _require_resident_memory()
    _run(
        context, "Speed and peak memory of the neural memory", bench.MemoryBenchmarkSettings,
        lambda settings, move, _: bench.run_memory_benchmark(settings, move),
        bench.sections, bench.figures, bench.QUICK,
    )  # fmt: skip


@app.command("model")
def model(
    context: typer.Context,
    dim: Annotated[int, typer.Option(help="Width of every model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of every model (Mamba2: as many as fit).")] = 4,
    heads: Annotated[int, typer.Option(help="Heads of the attention and of the memory.")] = 4,
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 256,
    parameters: Annotated[
        int | None, typer.Option(help="Approximate size of every model; that of MAC by default.")
    ] = None,
    memory_mode: Annotated[str, typer.Option(help="Rule of our memories: exact, chunked or recurrent.")] = "exact",
    memory_depth: Annotated[int, typer.Option(help="Layers of each memory.")] = 2,
    chunk_size: Annotated[int | None, typer.Option(help="Chunk of our memories (exact: tile).")] = None,
    window: Annotated[int, typer.Option(help="Tokens that MAG and MAL attend to.")] = 256,
    segment: Annotated[int, typer.Option(help="Tokens of a segment of MAC.")] = 128,
    persistent: Annotated[int, typer.Option(help="Persistent tokens of a layer.")] = 16,
    batch: Batch = 1,
    lengths: Lengths = "512,2048,8192,16384,32768",
    decode_positions: Annotated[
        str, typer.Option(help="Positions at which decoding is timed, separated by commas.", callback=_numbers)
    ] = "1000,100000",
    decode_tokens: Annotated[int, typer.Option(help="Tokens that a round decodes.")] = 64,
    measures: Annotated[
        str, typer.Option(help="What to measure, separated by commas.", callback=_names)
    ] = "train,prefill,decode",
    repeats: Repeats = 3,
    threads: Threads = 1,
    only: Only = None,
    max_seconds: Annotated[float, typer.Option(help="Longest time that one measurement may take.")] = 600,
    max_memory: Annotated[
        float | None, typer.Option(help="GiB that one measurement may take; 3/4 of what is free by default.")
    ] = None,
    peak_memory: PeakMemory = True,
    out: Out = None,
    quick: Quick = False,
) -> None:
    """Measure speed and peak memory of whole models against length: ours, transformers' and titans-pytorch's."""
    require("bench model", "transformers", "models")

    from titans.bench import model as bench

    _require_resident_memory()
    _run(
        context, "Speed and peak memory of whole models", bench.ModelBenchmarkSettings,
        lambda settings, move, _: bench.run_model_benchmark(settings, move),
        bench.sections, bench.figures, bench.QUICK,
    )  # fmt: skip


@app.command("stream")
def stream(
    context: typer.Context,
    tokens: Annotated[int, typer.Option(help="Length of every stream.")] = 1_000_000,
    decode_tokens: Annotated[int, typer.Option(help="Tokens that are read one at a time.")] = 20_000,
    only: Annotated[
        str | None,
        typer.Option(
            help="Runs, such as stream-exact-1 or bounds-default-chunked-2, separated by commas; all by default.",
            callback=_names,
        ),
    ] = None,
    out: Kept = None,
    quick: Quick = False,
) -> None:
    """Stream a million tokens through a memory: growth, speed, bounds, and whether it still learns afterwards."""
    from titans.bench import stream as bench

    _require_resident_memory()
    _run(
        context, "Long streams, and learning afterwards", bench.StreamBenchmarkSettings,
        bench.run_stream_benchmark, bench.sections, bench.figures, bench.QUICK,
    )  # fmt: skip


@app.command("carried")
def carried(
    context: typer.Context,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.", callback=_numbers)] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Optimiser steps of every run.")] = 1000,
    documents: Annotated[int, typer.Option(help="Documents to train on.")] = 20_000,
    threads: Threads = 1,
    out: Kept = None,
    quick: Quick = False,
) -> None:
    """Train on documents that ask for a fact after more than one training length, with memory carried and without."""
    _require_training("bench carried")

    from titans.bench import carried as bench

    _run(
        context, "Memory carried from sequence to sequence", bench.CarriedBenchmarkSettings,
        bench.run_carried_benchmark, bench.sections, bench.figures, bench.QUICK,
    )  # fmt: skip


@app.command("overhead")
def overhead(
    context: typer.Context,
    data: Annotated[
        str | None, typer.Option(help="Folder that `titans prepare` wrote; random letters by default.")
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model.")] = "mag",
    size: Annotated[str, typer.Option(help="Size of the model, such as 1.5m.")] = "1.5m",
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 30,
    rounds: Annotated[int, typer.Option(help="Runs of each loop, in turns.")] = 5,
    threads: Threads = 1,
    out: Out = None,
    quick: Quick = False,
) -> None:
    """Compare the speed of `titans train` with that of a bare loop over the same model and batches."""
    _require_training("bench overhead")

    from titans.bench import overhead as bench

    _run(
        context, "What the Trainer costs", bench.OverheadBenchmarkSettings,
        lambda settings, move, _: bench.run_overhead_benchmark(settings, move),
        bench.sections, bench.figures, bench.QUICK,
    )  # fmt: skip


@app.command("text")
def text(
    context: typer.Context,
    texts: Annotated[str, typer.Argument(help="Folder of text files, such as novels.")],
    records: Annotated[int, typer.Option(help="Sentences to remember.")] = 100_000,
    queries: Annotated[int, typer.Option(help="Searches that are timed.")] = 300,
    batch: Annotated[int, typer.Option(help="Texts that are written one by one, and in a batch.")] = 1000,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's choice by default.")] = None,
    out: Kept = None,
    quick: Quick = False,
) -> None:
    """Measure a text memory with many records: writes, searches, deletions, and how much its index finds."""
    for package in ("transformers", "usearch"):
        require("bench text", package, "text")

    from titans.bench import text as bench

    _run(
        context, "A text memory with many records", bench.TextBenchmarkSettings, bench.run_text_benchmark,
        bench.sections, bench.figures, bench.QUICK,
    )  # fmt: skip


@app.command("flops")
def flops(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="lmm, mac, mag, mal or sliding-window.")] = "mac",
    size: Annotated[str, typer.Option(help="A size of configs/, from 1m to 760m.")] = "760m",
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences that a GPU works on at a time.")] = 4,
    tokens: Annotated[float, typer.Option(help="Tokens of the run, such as 30e9.")] = 30e9,
    chunk_size: Annotated[int, typer.Option(help="Chunk of the memory.")] = 64,
    vocab_size: Annotated[int | None, typer.Option(help="Size of the vocabulary; that of the size by default.")] = None,
    first_order: Annotated[bool, typer.Option("--first-order", help="Outer gradients of first order.")] = False,
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing.")] = True,
    out: Out = None,
) -> None:
    """Count the operations of training a model with chunked memory by a formula, and what that takes of GPUs."""
    require("bench flops", "transformers", "models")

    from titans.bench import flops as bench

    _run(
        context, "Operations of training a model", bench.FlopsSettings,
        lambda settings, move, _: bench.flops_report(settings, move),
        bench.sections, bench.figures, {},
    )  # fmt: skip


def _require_resident_memory() -> None:
    """Linux says how much memory a process holds; elsewhere psutil does."""
    if not Path("/proc/self/status").exists():
        require("this benchmark", "psutil", "bench")


def _require_training(command: str) -> None:
    for package in ("transformers", "accelerate", "datasets", "yaml"):
        require(command, package, "train")
