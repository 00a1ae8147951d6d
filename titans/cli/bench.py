"""`titans bench`: measurements of speed and memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from titans.cli.common import bar, check_output, names, numbers, require

app = typer.Typer(help="Measure speed and memory.")


@app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _output(path: Path | None, out_dir: Path | None, default: str) -> Path | None:
    """Where an output goes: the path given, else `default` in the output directory, else nowhere."""
    path = path or (out_dir / default if out_dir else None)
    return None if path is None else check_output(path)


def _picture(path: Path | None) -> Path | None:
    if path is not None:
        if path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise typer.BadParameter(f"--plot takes a name that ends in .png, .svg or .pdf, got '{path}'.")
        if importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("--plot needs matplotlib: pip install 'titan-memory[bench]'.")
    return path


def _run(
    benchmark: ModuleType,
    run: Callable[[Callable[[int, int, str], None]], dict[str, Any]],
    notices: list[str],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Say the notices, run with a bar of progress, print the report and write it."""
    from rich.console import Console

    from titans.bench.timing import write_json

    for notice in notices:
        typer.echo(f"titans: {notice}", err=True)
    with bar() as move:
        report = run(move)
    benchmark.print_report(report, Console())
    for notice in report["notices"]:
        if notice not in notices:
            typer.echo(f"titans: {notice}", err=True)
    if json_path is not None:
        write_json(report, json_path)
        typer.echo(f"Report: {json_path}")
    if plot_path is not None:
        benchmark.write_plot(report, plot_path)
        typer.echo(f"Plot: {plot_path}")


@app.command("memory")
def memory(
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    heads: Annotated[int, typer.Option(help="Memories side by side, each dim / heads wide.")] = 4,
    depth: Annotated[int, typer.Option(help="Layers of each memory.")] = 2,
    chunk_size: Annotated[int, typer.Option(help="Tokens that share one gradient anchor.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences per call.")] = 1,
    lengths: Annotated[str, typer.Option(help="Tokens per sequence, with commas between.")] = "512,2048,8192,32768",
    recurrent_max_length: Annotated[int, typer.Option(help="Longest length for the token-by-token mode.")] = 512,
    reference_max_length: Annotated[int, typer.Option(help="Longest length for titans-pytorch.")] = 2048,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds of timing.")] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    only: Annotated[str | None, typer.Option(help="Contenders to run, with commas between; all by default.")] = None,
    peak_memory: Annotated[bool, typer.Option(help="Measure peak memory too, one process a figure.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw tokens per second here.")] = None,
    out_dir: Annotated[Path | None, typer.Option(help="Write memory.json and memory.png there.")] = None,
) -> None:
    """Speed and peak memory of the neural memory against length, next to titans-pytorch if installed."""
    sizes = numbers(lengths, "--lengths")
    json_path = _output(json_path, out_dir, "memory.json")
    plot_path = _picture(_output(plot_path, out_dir, "memory.png"))

    from titans.bench import memory as memory_benchmark

    try:
        settings = memory_benchmark.BenchmarkSettings(
            dim=dim,
            heads=heads,
            depth=depth,
            chunk_size=chunk_size,
            batch=batch,
            lengths=sizes,
            repeats=repeats,
            threads=threads,
            only=names(only),
            recurrent_max_length=recurrent_max_length,
            reference_max_length=reference_max_length,
            memory=peak_memory,
        )
        _, notices = memory_benchmark.choose_contenders(settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _run(
        memory_benchmark,
        lambda progress: memory_benchmark.run_memory_benchmark(settings, progress),
        notices,
        json_path,
        plot_path,
    )


@app.command("model")
def model(
    dim: Annotated[int, typer.Option(help="Width of every model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of every model (Mamba2: as many as fit).")] = 4,
    heads: Annotated[int, typer.Option(help="Heads of the attention and of the memory.")] = 4,
    vocab_size: Annotated[int, typer.Option(help="Different tokens.")] = 256,
    parameters: Annotated[int | None, typer.Option(help="Of every model, about; those of MAC by default.")] = None,
    memory_mode: Annotated[str, typer.Option(help="Rule of our memories: exact, chunked or recurrent.")] = "exact",
    memory_depth: Annotated[int, typer.Option(help="Layers of each memory.")] = 2,
    chunk_size: Annotated[int | None, typer.Option(help="Chunk of our memories (exact: tile).")] = None,
    window: Annotated[int, typer.Option(help="Tokens that MAG and MAL attend to.")] = 256,
    segment: Annotated[int, typer.Option(help="Tokens of a segment of MAC.")] = 128,
    persistent: Annotated[int, typer.Option(help="Persistent tokens of a layer.")] = 16,
    batch: Annotated[int, typer.Option(help="Sequences per call.")] = 1,
    lengths: Annotated[
        str, typer.Option(help="Tokens per sequence, with commas between.")
    ] = "512,2048,8192,16384,32768",
    decode_positions: Annotated[str, typer.Option(help="Where decoding is timed, with commas.")] = "1000,100000",
    decode_tokens: Annotated[int, typer.Option(help="Tokens that a round decodes.")] = 64,
    measures: Annotated[str, typer.Option(help="What to measure, with commas between.")] = "train,prefill,decode",
    repeats: Annotated[int, typer.Option(help="Interleaved rounds of timing.")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    only: Annotated[str | None, typer.Option(help="Contenders to run, with commas between; all by default.")] = None,
    max_seconds: Annotated[float, typer.Option(help="Longest that one measurement may take.")] = 600,
    max_memory: Annotated[float | None, typer.Option(help="GiB for one; 3/4 of what is free by default.")] = None,
    peak_memory: Annotated[bool, typer.Option(help="Measure peak memory too, one process a figure.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw tokens per second here.")] = None,
    out_dir: Annotated[Path | None, typer.Option(help="Write model.json and model.png there.")] = None,
) -> None:
    """Speed and peak memory of whole models against length: ours, transformers' and titans-pytorch's."""
    sizes, positions = numbers(lengths, "--lengths"), numbers(decode_positions, "--decode-positions")
    json_path = _output(json_path, out_dir, "model.json")
    plot_path = _picture(_output(plot_path, out_dir, "model.png"))

    from titans.bench import model as model_benchmark

    try:
        settings = model_benchmark.ModelBenchmarkSettings(
            dim=dim,
            layers=layers,
            heads=heads,
            vocab_size=vocab_size,
            parameters=parameters,
            memory_mode=memory_mode,
            memory_depth=memory_depth,
            chunk_size=chunk_size,
            window=window,
            segment=segment,
            persistent=persistent,
            batch=batch,
            lengths=sizes,
            decode_positions=positions,
            decode_tokens=decode_tokens,
            measures=names(measures),
            repeats=repeats,
            threads=threads,
            only=names(only),
            max_seconds=max_seconds,
            max_memory=max_memory,
            memory=peak_memory,
        )
        _, notices = model_benchmark.choose_contenders(settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _run(
        model_benchmark,
        lambda progress: model_benchmark.run_model_benchmark(settings, progress),
        notices,
        json_path,
        plot_path,
    )


@app.command("flops")
def flops(
    model: Annotated[str, typer.Option(help="lmm, mac, mag, mal or sliding-window.")] = "mac",
    size: Annotated[str, typer.Option(help="A size of configs/: 1m to 760m.")] = "760m",
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences that a GPU works on at a time.")] = 4,
    tokens: Annotated[float, typer.Option(help="Tokens of the run, as 30e9.")] = 30e9,
    chunk_size: Annotated[int, typer.Option(help="Chunk of the memory.")] = 64,
    vocab_size: Annotated[int | None, typer.Option(help="Different tokens; by default the size's.")] = None,
    first_order: Annotated[bool, typer.Option("--first-order", help="Outer gradients of first order.")] = False,
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Operations of training a model with chunked memory, counted by a formula, and what that takes of GPUs."""
    json_path = _output(json_path, None, "")
    require("flops", "transformers", "models")

    from rich.console import Console

    from titans.bench.flops import flops_report, print_report
    from titans.bench.timing import write_json

    fields = {"memory_chunk_size": chunk_size, "memory_first_order": first_order}
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    try:
        report = flops_report(model, size, length, batch, tokens, checkpointing, **fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print_report(report, Console())
    if json_path is not None:
        write_json(report, json_path)
        typer.echo(f"Report: {json_path}")
