"""`titans experiment`: the paper's experiments."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from titans.cli.common import bar, names, numbers, pairs
from titans.experiments import ON_TASKS

if TYPE_CHECKING:
    from titans.experiments.lm import LMExperiment

app = typer.Typer(help="Run an experiment of the paper: several models, several seeds, one report.")
Data = Annotated[Path, typer.Argument(help="Prepared data with a validation split: see titans prepare.")]
Out = Annotated[Path, typer.Option(help="Folder of the experiment; runs that it has are kept.")]
Names = Annotated[str | None, typer.Option(help="Some of the models, with commas between.")]
Seeds = Annotated[str, typer.Option(help="Seeds, with commas between.")]
Tokens = Annotated[int, typer.Option(help="Tokens of a run on text.")]
Fields = Annotated[list[str], typer.Option(help="Of our configs, or of one, MODEL.NAME=VALUE.")]
Depths = Annotated[str, typer.Option(help="Layers of the memory, with commas between.")]
AtATime = Annotated[int, typer.Option(help="Runs side by side, one thread each.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few steps: shows that it works; results go to OUT/quick.")]


@app.callback(invoke_without_command=True)
def _experiment(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("lm")
def lm(
    data: Data,
    out: Out = Path("runs/lm"),
    models: Names = None,
    size: Annotated[str, typer.Option(help="Size of all models.")] = "1.5m",
    seeds: Seeds = "0,1,2",
    tokens: Tokens = 1_500_000,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Of all models.")] = 4e-3,
    rate: Annotated[list[str], typer.Option(help="Of one model: NAME=RATE; may be given again.")] = [],  # noqa: B006
    field: Fields = [],  # noqa: B006
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    """Train our models and their baselines at equal parameters on equal tokens, and compare their validation loss."""
    from titans.experiments.lm import MODELS, LMExperiment, markdown, run_experiment

    out = _folder(out, quick)
    try:
        experiment = LMExperiment(
            data=str(data),
            out=str(out),
            models=names(models) or MODELS,
            size=size,
            seeds=numbers(seeds, "--seeds"),
            tokens=tokens,
            length=length,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            rates=pairs(rate, "--rate"),
            fields=pairs(field, "--field"),
            at_a_time=at_a_time,
        )
        with bar() as move:
            report = run_experiment(experiment.quick() if quick else experiment, move)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(markdown(report))
    typer.echo(f"Report: {out / 'lm.json'}, {out / 'lm.md'}, {out / 'lm.png'}")


@app.command("ablation")
def ablation(
    data: Data,
    out: Out = Path("runs/ablation"),
    seeds: Seeds = "0,1,2",
    tokens: Tokens = 500_000,
    field: Fields = [],  # noqa: B006
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    """Leave out one part of the memory after the other, on text and on recall: the paper's Table 5."""
    from titans.experiments.ablation import run_ablation

    out = _folder(out, quick)
    try:
        language = _language(data, out, seeds, tokens, field, at_a_time)
        with bar() as move:
            run_ablation(language, out, move, _command(), quick)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _show(out, "ablation")


@app.command("depth")
def depth(
    data: Data,
    out: Out = Path("runs/depth"),
    depths: Depths = "1,2,3,4",
    seeds: Seeds = "0,1,2",
    tokens: Tokens = 500_000,
    read: Annotated[int, typer.Option(min=64, help="Tokens that a model reads at a stretch when it is tested.")] = 2048,
    field: Fields = [],  # noqa: B006
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    """Train memories of one to four layers, and see how the loss falls along the text: the paper's Figure 7."""
    from titans.experiments.depth import LIMIT, run_depth

    out = _folder(out, quick)
    try:
        language = _language(data, out, seeds, tokens, field, at_a_time)
        language, limit = (language.quick(), read) if quick else (language, LIMIT)
        with bar() as move:
            run_depth(language, out, numbers(depths, "--depths"), read, move, _command(), limit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _show(out, "depth")


@app.command("memory")
def memory(
    out: Out = Path("runs/memory"),
    quick: Quick = False,
) -> None:
    """How many pairs an untrained memory holds, by depth and width, how long it holds them, and what surprises it."""
    from titans.experiments.memory import run_memory

    out = _folder(out, quick)
    with bar() as move:
        run_memory(out, move, _command(), quick)
    _show(out, "memory")


@app.command("text-memory")
def text_memory(
    data: Annotated[Path, typer.Argument(help="A file of conversations and questions in the format of LoCoMo.")],
    out: Out = Path("runs/text-memory"),
    seeds: Seeds = "0,1,2,3,4",
    quick: Quick = False,
) -> None:
    """What the neural memory adds to the search of a text memory, and tests where a memory should win."""
    from titans.experiments.text_memory import TextExperiment, run_text_memory

    out = _folder(out, quick)
    try:
        experiment = TextExperiment(str(data), numbers(seeds, "--seeds"))
        with bar() as move:
            run_text_memory(experiment.quick() if quick else experiment, out, move, _command())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _show(out, "text-memory")


@app.command("throughput")
def throughput(
    out: Out = Path("runs/throughput"),
    lengths: Annotated[str, typer.Option(help="Tokens per sequence, with commas between.")] = "512,2048,8192,16384",
    depths: Depths = "1,2,3,4",
    models: Names = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved rounds of timing.")] = 3,
    memory_mode: Annotated[str, typer.Option(help="Rule of our memories: exact or chunked.")] = "exact",
    quick: Quick = False,
) -> None:
    """Training speed against length, and against the memory's depth: the paper's Figures 8 and 9."""
    from titans.experiments.throughput import MODELS, run_throughput

    out = _folder(out, quick)
    try:
        sizes, layers = numbers(lengths, "--lengths"), numbers(depths, "--depths")
        if quick:
            sizes, layers, repeats = (64, 128), layers[:2], 1
        with bar() as move:
            run_throughput(out, sizes, layers, names(models) or MODELS, repeats, memory_mode, move, _command())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _show(out, "throughput")


def _language(data: Path, out: Path, seeds: str, tokens: int, field: list[str], at_a_time: int) -> LMExperiment:
    """Runs on text, as the command line asks for them."""
    from titans.experiments.lm import LMExperiment

    return LMExperiment(
        data=str(data), out=str(out), seeds=numbers(seeds, "--seeds"), tokens=tokens,
        fields=pairs(field, "--field"), at_a_time=at_a_time,
    )  # fmt: skip


def _show(out: Path, name: str) -> None:
    """Prints the table of an experiment, and where all of it is."""
    typer.echo((out / f"{name}.md").read_text(encoding="utf-8"))
    typer.echo(f"Report: {out / 'report.html'}, {out / name}.json and .md")


def _folder(out: Path, quick: bool) -> Path:
    """Where an experiment goes; a quick one not where it would be in the way of a whole one."""
    return out / "quick" if quick else out


def _command() -> str:
    return shlex.join(["titans", *sys.argv[1:]])


def _task_command(name: str, about: str) -> None:
    """The command of an experiment on tasks."""

    def command(
        out: Annotated[Path | None, typer.Option(help="Folder; runs that it has are kept. Default: runs/NAME.")] = None,
        models: Names = None,
        seeds: Seeds = "0,1,2",
        setting: Annotated[
            list[str], typer.Option("--set", help="Of its tasks, NAME=VALUE, such as haystack=FOLDER; may be repeated.")
        ] = [],  # noqa: B006
        train: Annotated[
            list[str], typer.Option("--train", help="Of the training, FIELD=VALUE, such as steps=400; may be repeated.")
        ] = [],  # noqa: B006
        start: Annotated[
            Path | None, typer.Option(help="Folder of an experiment whose trained models these runs begin with.")
        ] = None,
        at_a_time: AtATime = 2,
        quick: Quick = False,
    ) -> None:
        from rich.console import Console

        from titans.experiments.catalogue import EXPERIMENTS
        from titans.experiments.tasks import run_tasks
        from titans.report.results import print_tables

        folder = _folder(out or Path("runs") / name, quick)
        try:
            experiment = replace(EXPERIMENTS[name](pairs(setting, "--set")), seeds=numbers(seeds, "--seeds")).only(
                names(models)
            )
            experiment = replace(experiment, train={**experiment.train, **pairs(train, "--train")}, start=start)
            with bar() as move:
                report = run_tasks(experiment.quick() if quick else experiment, folder, at_a_time, move, _command())
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(str(error)) from error
        print_tables(report["results"], Console())
        typer.echo(f"Report: {folder / 'report.html'}, {folder / report['name']}.json and .md")

    app.command(name, help=about)(command)


for _name, _about in ON_TASKS.items():
    _task_command(_name, _about)
