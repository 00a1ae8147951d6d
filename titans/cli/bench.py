"""`titans bench`: what the memory and the models cost, and how much they can withstand."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from titans.cli.common import bar, names, numbers, one_sentence, require, single_command, this_command

TRAINING = ("transformers", "accelerate", "datasets", "yaml")
REPORT = "Folder for the report as JSON, Markdown, page and pictures"
QUICK = "Use small sizes, to check that it works. The report goes to OUT/quick."


@dataclass(frozen=True)
class Benchmark:
    """A command, which runs the module of its name in ``titans.bench``.

    Attributes:
        help: what it does.
        title: of its report.
        settings: the name of its settings in ``titans.bench.settings``, whose fields are its options.
        run: the name of its function: settings, progress and, if it keeps anything, the output folder -> report.
        packages, extra: what it needs, and the extra that installs that.
        resident: whether it measures how much memory a process holds.
        keeps: whether it keeps in the output folder what is finished.
        quick: whether it has small sizes, the ``QUICK`` of its module.
    """

    help: str
    title: str
    settings: str
    run: str
    packages: Sequence[str] = ()
    extra: str = ""
    resident: bool = False
    keeps: bool = False
    quick: bool = True


BENCHMARKS = {
    "memory": Benchmark(
        "Measure speed and peak memory of the neural memory against length, next to titans-pytorch if installed.",
        "Speed and peak memory of the neural memory", "MemoryBenchmarkSettings", "run_memory_benchmark", resident=True,
    ),
    "model": Benchmark(
        "Measure speed and peak memory of whole models against length: ours, transformers' and titans-pytorch's.",
        "Speed and peak memory of whole models", "ModelBenchmarkSettings", "run_model_benchmark",
        ("transformers",), "models", resident=True,
    ),
    "stream": Benchmark(
        "Stream a million tokens through a memory: growth, speed, bounds, and whether it still learns afterwards.",
        "Long streams, and learning afterwards", "StreamBenchmarkSettings", "run_stream_benchmark",
        resident=True, keeps=True,
    ),
    "carried": Benchmark(
        "Train on documents that ask for a fact after more than one training length, with memory carried and without.",
        "Memory carried from sequence to sequence", "CarriedBenchmarkSettings", "run_carried_benchmark",
        TRAINING, "train", keeps=True,
    ),
    "overhead": Benchmark(
        "Compare the speed of `titans train` with that of a bare loop over the same model and batches.",
        "What the Trainer costs", "OverheadBenchmarkSettings", "run_overhead_benchmark", TRAINING, "train",
    ),
    "caching": Benchmark(
        "Measure what memory caching costs, by how many earlier states a memory reads.",
        "What memory caching costs", "CachingBenchmarkSettings", "run_caching_benchmark",
    ),
    "adapter": Benchmark(
        "Measure what a window with a memory costs beside full attention, by length.",
        "A window and a memory beside full attention", "AdapterBenchmarkSettings", "run_adapter_benchmark",
        ("transformers",), "adapt", resident=True,
    ),
    "text": Benchmark(
        "Measure a text memory with many records: writes, searches, deletions, and how much its index finds.",
        "A text memory with many records", "TextBenchmarkSettings", "run_text_benchmark",
        ("transformers", "usearch"), "text", keeps=True,
    ),
    "service": Benchmark(
        "Measure `titans serve` under load: throughput, times, errors, memory, and what it adds to a chat.",
        "The memory as a service", "ServiceBenchmarkSettings", "run_service_benchmark",
        ("fastapi", "usearch"), "serve", resident=True,
    ),
    "flops": Benchmark(
        "Estimate the operations and GPU hours of training a model with chunked memory.",
        "Operations of training a model", "FlopsSettings", "flops_report", ("transformers",), "models", quick=False,
    ),
}  # fmt: skip


class Benchmarks(TyperGroup):
    """One command for each of ``BENCHMARKS``, made when needed: their settings are not loaded before."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        return list(BENCHMARKS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name."""
        return _make_command(cmd_name, BENCHMARKS[cmd_name]) if cmd_name in BENCHMARKS else None


app = typer.Typer(cls=Benchmarks, help="Measure speed, memory use, and how much a memory can withstand.")


@app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _make_command(name: str, benchmark: Benchmark) -> Any:
    """The command of a benchmark, with an option for each setting that has a help text."""
    settings = getattr(import_module("titans.bench.settings"), benchmark.settings)

    def command(context: typer.Context, **options: Any) -> None:
        _run(context, name, benchmark, settings, options)

    hints = get_type_hints(settings)
    kinds: dict[str, tuple[Any, Any]] = {
        each.name: _option(hints[each.name], each.default, each.metadata["help"])
        for each in fields(settings)
        if "help" in each.metadata
    }
    about = f"{REPORT}; what is finished there is kept." if benchmark.keeps else f"{REPORT}."
    kinds["out"] = Annotated[Path | None, typer.Option(help=about)], None
    if benchmark.quick:
        kinds["quick"] = Annotated[bool, typer.Option("--quick", help=QUICK)], False
    given = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for key, (kind, default) in kinds.items()
    ]
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature([first, *given])  # type: ignore[attr-defined]
    return single_command(name, benchmark.help, command)


def _option(kind: Any, default: Any, help: str) -> tuple[Any, Any]:
    """The type and the default of an option; several values are one text with commas between them."""
    if default is MISSING:
        return Annotated[kind, typer.Argument(help=help)], inspect.Parameter.empty
    if get_origin(kind) is not tuple:
        return Annotated[kind, typer.Option(help=help)], default
    read = _numbers if get_args(kind)[0] is int else _names
    return Annotated[str | None, typer.Option(help=help, callback=read)], ",".join(map(str, default)) or None


def _numbers(parameter: typer.CallbackParam, value: str) -> Any:
    return numbers(value, parameter.opts[0])


def _names(value: str | None) -> Any:
    return names(value)


def _run(context: typer.Context, name: str, benchmark: Benchmark, settings: Any, given: dict[str, Any]) -> None:
    """Run a benchmark whose settings are the options of its command; prints the report, and writes it to --out.

    With --quick, the ``QUICK`` of its module stands in the place of the settings that were not given.
    """
    from rich.console import Console

    from titans.files import locked
    from titans.report.outcome import write_outcome
    from titans.report.page import print_table

    for package in benchmark.packages:
        require(f"bench {name}", package, benchmark.extra)
    if benchmark.resident and not Path("/proc/self/status").exists():  # elsewhere than on Linux, psutil looks there
        require("this benchmark", "psutil", "bench")
    module = import_module(f"titans.bench.{name}")
    out: Path | None = given.pop("out")
    if given.pop("quick", False):
        sources = {name: context.get_parameter_source(name) for name in given}
        asked = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        given |= {name: value for name, value in module.QUICK.items() if name not in asked}
        out = None if out is None else out / "quick"
    if out is not None:
        require("--out", "matplotlib", "plot")
    command = this_command()
    with one_sentence():
        chosen = settings(**given)
        with nullcontext() if out is None else locked(out, command):
            with bar() as move:
                where = {"out": out} if benchmark.keeps else {}
                report = {"command": command, **getattr(module, benchmark.run)(chosen, move, **where)}
            parts = module.sections(report)
            if out is not None:
                drawn = module.figures(report)
                write_outcome(
                    report, benchmark.title, [replace(part, figures=drawn.get(part.title, ())) for part in parts], out
                )
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
