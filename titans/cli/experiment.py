"""`titans experiment`: several models, several seeds, one report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from titans.cli.common import (
    Device,
    bar,
    decimals,
    names,
    numbers,
    one_sentence,
    pairs,
    require,
    single_command,
    this_command,
)
from titans.experiments.recipes import PROGRAMS, SUFFIXES, known_experiments
from titans.files import locked
from titans.words import nearest

if TYPE_CHECKING:
    from titans.experiments.lm import LMExperiment
    from titans.report.progress import Move

Data = Annotated[Path, typer.Argument(help="Prepared data with a validation split, see titans prepare.")]
Out = Annotated[Path, typer.Option(help="Folder of the experiment. Runs that it has are kept.")]
Names = Annotated[str | None, typer.Option(help="Only these models, with commas between them.")]
Seeds = Annotated[str, typer.Option(help="One run of every model for each seed, with commas between them.")]
Tokens = Annotated[int, typer.Option(help="Training tokens per run on text.")]
Length = Annotated[int, typer.Option(help="Tokens per sequence.")]
Fields = Annotated[
    list[str],
    typer.Option(help="Change a field of our models' configs, NAME=VALUE, or of one model's, MODEL.NAME=VALUE."),
]
Depths = Annotated[str, typer.Option(help="Layers of the memory, with commas between them.")]
AtATime = Annotated[int, typer.Option(help="How many runs go on side by side, with one thread each.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Train for a few steps only, to see that it works. Results go to OUT/quick.")
]
# The packages that an experiment needs, and the extra that installs them.
TRAINING = ("transformers", "accelerate", "datasets", "yaml", "matplotlib"), "train"
NEEDS = {
    "forecasting": (("transformers", "pandas", "neuralforecast", "matplotlib"), "forecast,plot"),
    "genomics": (("transformers", "matplotlib"), "models,plot"),
    "memory": (("transformers", "matplotlib"), "models,plot"),
    "memory-benchmarks": (("transformers", "matplotlib"), "text,plot"),
    "surprise": (("transformers", "matplotlib"), "text,plot"),
    "text-memory": (("transformers", "matplotlib"), "text,plot"),
    "throughput": (("transformers", "matplotlib"), "models,plot"),
}


class Experiments(TyperGroup):
    """Commands of this file, and one for every recipe and entry point, which are only looked for when needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        self._find()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or of a YAML file."""
        if cmd_name.endswith(SUFFIXES):
            return _recipe_command(cmd_name, f"The recipe {cmd_name}.")
        if cmd_name not in self.commands:
            self._find()
        if cmd_name not in self.commands:
            self.suggest_commands = False  # or a second suggestion follows this one
            raise typer.BadParameter(f"experiment is {cmd_name!r}: {nearest(cmd_name, self.commands)}")
        return super().get_command(ctx, cmd_name)

    def _find(self) -> None:
        require("experiment", "yaml", "train")
        for name, about in known_experiments().items():
            self.commands.setdefault(name, _recipe_command(name, about))


app = typer.Typer(
    cls=Experiments,
    help="Run an experiment: several models, several seeds, one report. NAME may also be a recipe of your own, a "
    "YAML file; configs/experiments has examples.",
)


@app.callback(invoke_without_command=True)
def _experiment(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("lm", help=PROGRAMS["lm"])
def lm(
    data: Data,
    out: Out = Path("runs/lm"),
    models: Names = None,
    size: Annotated[str, typer.Option(help="Size of every model, such as 1.5m.")] = "1.5m",
    seeds: Seeds = "0,1,2",
    tokens: Tokens = 1_500_000,
    length: Length = 256,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per batch.")] = 1024,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of every model. Default: the best known for each.")
    ] = None,
    rate: Annotated[list[str], typer.Option(help="Learning rate of one model, NAME=RATE. May be repeated.")] = [],  # noqa: B006
    field: Fields = [],  # noqa: B006
    equal_time: Annotated[
        bool, typer.Option("--equal-time", help="Train once more, on as many tokens as equal CPU times allow.")
    ] = False,
    device: Device = "auto",
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    with _program("lm", out, quick) as (out, move):
        from titans.experiments.lm import MODELS, run_experiment

        experiment = replace(
            _on_text(data, out, seeds, tokens, field, device, at_a_time),
            models=names(models) or MODELS,
            size=size,
            length=length,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            rates=pairs(rate, "--rate"),
        )
        run_experiment(experiment.quick() if quick else experiment, move, this_command(), equal_time)


@app.command("shapes", help=PROGRAMS["shapes"])
def shapes(
    data: Data,
    out: Out = Path("runs/shapes"),
    models: Names = None,
    seeds: Seeds = "0",
    tokens: Tokens = 153_600,
    rates: Annotated[str, typer.Option(help="Learning rates, an odd number of them.")] = "0.002,0.004,0.008",
    field: Fields = [],  # noqa: B006
    device: Device = "auto",
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    with _program("shapes", out, quick) as (out, move):
        from titans.experiments.shapes import CANDIDATES, run_shapes

        language = replace(
            _on_text(data, out, seeds, tokens, field, device, at_a_time), models=names(models) or tuple(CANDIDATES)
        )
        run_shapes(language.quick() if quick else language, decimals(rates, "--rates"), move, this_command())


@app.command("ablation", help=PROGRAMS["ablation"])
def ablation(
    data: Data,
    out: Out = Path("runs/ablation"),
    seeds: Seeds = "0,1,2",
    tokens: Tokens = 500_000,
    field: Fields = [],  # noqa: B006
    device: Device = "auto",
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    with _program("ablation", out, quick) as (out, move):
        from titans.experiments.ablation import run_ablation

        language = _on_text(data, out, seeds, tokens, field, device, at_a_time)
        run_ablation(language, out, move, this_command(), quick)


@app.command("linear", help=PROGRAMS["linear"])
def linear(
    data: Annotated[
        Path | None,
        typer.Argument(
            help="Prepared data with a validation split, see titans prepare. Default: recall and parity only."
        ),
    ] = None,
    out: Out = Path("runs/linear"),
    models: Names = None,
    seeds: Seeds = "0,1,2",
    tokens: Tokens = 204_800,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps on recall and on parity, instead of 800 and 500.")
    ] = None,
    field: Fields = [],  # noqa: B006
    device: Device = "auto",
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    with _program("linear", out, quick) as (out, move):
        from titans.experiments.linear import run_linear

        language = None if data is None else _on_text(data, out, seeds, tokens, field, device, at_a_time)
        chosen = numbers(seeds, "--seeds")
        run_linear(language, out, chosen, names(models), steps, at_a_time, move, this_command(), quick)


@app.command("depth", help=PROGRAMS["depth"])
def depth(
    data: Data,
    out: Out = Path("runs/depth"),
    depths: Depths = "1,2,3,4",
    seeds: Seeds = "0,1,2",
    tokens: Tokens = 500_000,
    length: Length = 256,
    read: Annotated[
        int, typer.Option(min=64, help="Tokens that a model reads with one memory when it is tested.")
    ] = 2048,
    field: Fields = [],  # noqa: B006
    device: Device = "auto",
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    with _program("depth", out, quick) as (out, move):
        from titans.experiments.depth import LIMIT, run_depth

        language = _on_text(data, out, seeds, tokens, field, device, at_a_time)
        language = replace(language, length=length, batch_tokens=max(length, language.batch_tokens))
        language, limit = (language.quick(), read) if quick else (language, max(LIMIT, 8 * read))
        run_depth(language, out, numbers(depths, "--depths"), read, move, this_command(), limit)


@app.command("forecasting", help=PROGRAMS["forecasting"])
def forecasting(
    folder: Annotated[
        Path, typer.Argument(help="A folder with CSV files that have one column per variate, or one such file.")
    ],
    out: Out = Path("runs/forecasting"),
    data: Annotated[str | None, typer.Option(help="Only these files, without .csv, with commas between them.")] = None,
    models: Names = None,
    horizons: Annotated[
        str, typer.Option(help="Values that are forecast, with commas between them.")
    ] = "96,192,336,720",
    seeds: Seeds = "0,1,2",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of every model at most, instead of its own number.")
    ] = None,
    parts: Annotated[
        str,
        typer.Option(
            help="What is compared: table (all models at a look-back of 96), look-back (longer look-backs against a "
            "memory that has read everything before), or both with a comma between them."
        ),
    ] = "table",
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    with _program("forecasting", out, quick) as (out, move):
        from titans.experiments.forecasting import MODELS, ForecastingExperiment, run_forecasting

        experiment = ForecastingExperiment(
            str(folder), names(data), MODELS if models is None else names(models), numbers(horizons, "--horizons"),
            numbers(seeds, "--seeds"), names(parts), fit={} if steps is None else {"steps": steps},
            at_a_time=at_a_time,
        )  # fmt: skip
        run_forecasting(experiment.quick() if quick else experiment, out, move, this_command())


@app.command("genomics", help=PROGRAMS["genomics"])
def genomics(
    data: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="Folder with CSV files (sequence,label) or in the layout of the genomic-benchmarks package, one such "
            "file, or the name of a data set of that package where it is installed.",
        ),
    ],
    out: Out = Path("runs/genomics"),
    models: Names = None,
    folds: Annotated[int, typer.Option(help="Folds of data that comes without splits; near copies share a fold.")] = 5,
    only_folds: Annotated[int | None, typer.Option(help="Test only so many of the folds.")] = None,
    control_folds: Annotated[
        int,
        typer.Option(
            help="Test LMMs that are changed, pre-trained or trained on shuffled labels in at most so many folds."
        ),
    ] = 3,
    seeds: Seeds = "0",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of every model, instead of each model's own.")
    ] = None,
    word: Annotated[int, typer.Option(help="Letters of the words that tokens are made of. 1: single letters.")] = 4,
    stride: Annotated[int, typer.Option(help="Letters from one token to the next. 1: a token per nucleotide.")] = 8,
    drop_shared: Annotated[
        bool,
        typer.Option("--drop-shared", help="Leave out sequences that several splits have, instead of refusing them."),
    ] = False,
    at_a_time: AtATime = 2,
    quick: Quick = False,
) -> None:
    with _program("genomics", out, quick) as (out, move):
        from titans.experiments.genomics import MODELS, GenomicsExperiment, run_genomics

        experiment = GenomicsExperiment(
            data, tuple(MODELS) if models is None else names(models), folds, only_folds, control_folds,
            numbers(seeds, "--seeds"), word, stride, fit={} if epochs is None else {"epochs": epochs},
            drop_shared=drop_shared, at_a_time=at_a_time,
        )  # fmt: skip
        run_genomics(experiment.quick() if quick else experiment, out, move, this_command())


@app.command("memory", help=PROGRAMS["memory"])
def memory(out: Out = Path("runs/memory"), quick: Quick = False) -> None:
    with _program("memory", out, quick) as (out, move):
        from titans.experiments.memory import run_memory

        run_memory(out, move, this_command(), quick)


@app.command("memory-benchmarks", help=PROGRAMS["memory-benchmarks"])
def memory_benchmarks(
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files of LoCoMo or LongMemEval, or folders of BEAM: one conversation's, or one that has several.",
        ),
    ],
    out: Out = Path("runs/memory-benchmarks"),
    limit: Annotated[
        int | None, typer.Option(min=1, help="Ask so many questions of each file, evenly spread over it. Default: all.")
    ] = None,
    per_session: Annotated[
        bool, typer.Option("--per-session", help="Give each session a scope of its own, instead of each conversation.")
    ] = False,
    quick: Quick = False,
) -> None:
    with _program("memory-benchmarks", out, quick) as (out, move):
        from titans.experiments.memory_benchmarks import MemoryBenchmarks, run_memory_benchmarks

        experiment = MemoryBenchmarks(tuple(map(str, data)), limit, per_session)
        run_memory_benchmarks(experiment.quick() if quick else experiment, out, move, this_command())


@app.command("surprise", help=PROGRAMS["surprise"])
def surprise(out: Out = Path("runs/surprise"), quick: Quick = False) -> None:
    with _program("surprise", out, quick) as (out, move):
        from titans.experiments.surprise import run_surprise

        run_surprise(out, move, this_command(), quick)


@app.command("text-memory", help=PROGRAMS["text-memory"])
def text_memory(
    data: Annotated[Path, typer.Argument(help="A file of conversations and questions in the format of LoCoMo.")],
    out: Out = Path("runs/text-memory"),
    seeds: Seeds = "0,1,2,3,4",
    quick: Quick = False,
) -> None:
    with _program("text-memory", out, quick) as (out, move):
        from titans.experiments.text_memory import TextExperiment, run_text_memory

        experiment = TextExperiment(str(data), numbers(seeds, "--seeds"))
        run_text_memory(experiment.quick() if quick else experiment, out, move, this_command())


@app.command("throughput", help=PROGRAMS["throughput"])
def throughput(
    out: Out = Path("runs/throughput"),
    lengths: Annotated[
        str, typer.Option(help="Tokens per sequence, with commas between them.")
    ] = "512,2048,8192,16384",
    depths: Depths = "1,2,3,4",
    models: Names = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved rounds of timing.")] = 3,
    memory_mode: Annotated[str, typer.Option(help="Update rule of our memories: exact or chunked.")] = "exact",
    quick: Quick = False,
) -> None:
    with _program("throughput", out, quick) as (out, move):
        from titans.experiments.throughput import MODELS, run_throughput

        sizes, layers = numbers(lengths, "--lengths"), numbers(depths, "--depths")
        if quick:
            sizes, layers, repeats = (64, 128), layers[:2], 1
        run_throughput(out, sizes, layers, names(models) or MODELS, repeats, memory_mode, move, this_command())


def _recipe_command(name: str, about: str) -> Any:
    """The command of an experiment on tasks."""

    def command(
        out: Annotated[
            Path | None, typer.Option(help="Folder of the experiment. Runs that it has are kept. Default: runs/NAME.")
        ] = None,
        models: Names = None,
        seeds: Annotated[
            str | None, typer.Option(help="Seeds other than those of the recipe, with commas between them.")
        ] = None,
        setting: Annotated[
            list[str],
            typer.Option(
                "--set", help="Change a setting of the tasks, NAME=VALUE or TASK.NAME=VALUE. May be repeated."
            ),
        ] = [],  # noqa: B006
        train: Annotated[
            list[str],
            typer.Option("--train", help="Change a field of the training, such as steps=400. May be repeated."),
        ] = [],  # noqa: B006
        start: Annotated[
            Path | None, typer.Option(help="Begin with the trained models of another experiment: its folder.")
        ] = None,
        field: Fields = [],  # noqa: B006
        device: Device = "auto",
        at_a_time: AtATime = 2,
        quick: Quick = False,
    ) -> None:
        from rich.console import Console

        with _running(name, out or Path("runs") / Path(name).stem, quick) as (folder, move):
            from titans.experiments.catalogue import find_experiment
            from titans.experiments.tasks import run_tasks
            from titans.report.results import print_tables

            experiment = find_experiment(name, pairs(setting, "--set")).only(names(models))
            changes = {**pairs(train, "--train"), **({} if device == "auto" else {"device": device})}
            experiment = replace(
                experiment, train={**experiment.train, **changes}, start=start, fields=pairs(field, "--field")
            )
            if seeds is not None:
                experiment = replace(experiment, seeds=numbers(seeds, "--seeds"))
            report = run_tasks(experiment.quick() if quick else experiment, folder, at_a_time, move, this_command())
        print_tables(report["results"], Console())
        typer.echo(f"Report: {folder / 'report.html'}, {folder / report['name']}.json and .md")

    return single_command(name, about, command)


@contextmanager
def _running(name: str, out: Path, quick: bool) -> Iterator[tuple[Path, Move]]:
    """The folder of an experiment, where no other process writes, and its progress bar; a quick one is out of the way
    of a whole one. What an experiment imports is imported in here, once it is known to be installed."""
    packages, extra = NEEDS.get(name, TRAINING)
    for package in packages:
        require(f"experiment {name}", package, extra)
    out = out / "quick" if quick else out
    with one_sentence((ValueError, TypeError)), locked(out, f"titans experiment {name}"), bar() as move:
        yield out, move


@contextmanager
def _program(name: str, out: Path, quick: bool) -> Iterator[tuple[Path, Move]]:
    """The same; afterwards prints the tables of the experiment, and where all of it is."""
    with _running(name, out, quick) as (out, move):
        yield out, move
    lines = (out / f"{name}.md").read_text(encoding="utf-8").splitlines()
    typer.echo("\n".join(line for line in lines if not line.startswith("![")))
    typer.echo(f"Report: {out / 'report.html'}, {out / name}.json and .md")


def _on_text(
    data: Path, out: Path, seeds: str, tokens: int, field: list[str], device: str, at_a_time: int
) -> LMExperiment:
    """Runs on text, as the command line asks for them."""
    from titans.experiments.lm import LMExperiment

    return LMExperiment(
        data=str(data), out=str(out), seeds=numbers(seeds, "--seeds"), tokens=tokens, fields=pairs(field, "--field"),
        device=device, at_a_time=at_a_time,
    )  # fmt: skip
