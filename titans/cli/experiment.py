"""`titans experiment`: the paper's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Run an experiment of the paper: several models, several seeds, one report.")


@app.callback(invoke_without_command=True)
def _experiment(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _pairs(items: list[str], option: str) -> dict[str, Any]:
    """NAME=VALUE, value as in YAML."""
    import yaml

    pairs = {}
    for item in items:
        name, given, text = item.partition("=")
        if not given or not name:
            raise typer.BadParameter(f"{option} takes NAME=VALUE, got '{item}'.")
        pairs[name] = yaml.safe_load(text)
    return pairs


@app.command("lm")
def lm(
    data: Annotated[Path, typer.Argument(help="Prepared data with a validation split: see titans prepare.")],
    out: Annotated[Path, typer.Option(help="Folder of the experiment; runs that it has are kept.")] = Path("runs/lm"),
    models: Annotated[str | None, typer.Option(help="Models, with commas between.")] = None,
    size: Annotated[str, typer.Option(help="Size of all models.")] = "1.5m",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    tokens: Annotated[int, typer.Option(help="Tokens of a run.")] = 1_500_000,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Of all models.")] = 4e-3,
    rate: Annotated[list[str], typer.Option(help="Of one model: NAME=RATE; may be given again.")] = [],  # noqa: B006
    field: Annotated[list[str], typer.Option(help="Of our configs, or of one, MODEL.NAME=VALUE.")] = [],  # noqa: B006
    at_a_time: Annotated[int, typer.Option(help="Runs side by side, one thread each.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps: shows that it works.")] = False,
) -> None:
    """Train our models and their baselines at equal parameters on equal tokens, and compare their validation loss."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from titans.experiments.lm import MODELS, LMExperiment, markdown, run_experiment

    try:
        numbers = tuple(int(seed) for seed in seeds.split(","))
    except ValueError:
        raise typer.BadParameter(f"--seeds takes whole numbers with commas between them, got '{seeds}'.") from None
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        experiment = LMExperiment(
            data=str(data),
            out=str(out),
            models=tuple(name.strip() for name in models.split(",")) if models else MODELS,
            size=size,
            seeds=numbers,
            tokens=tokens,
            length=length,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            rates=_pairs(rate, "--rate"),
            fields=_pairs(field, "--field"),
            at_a_time=at_a_time,
            quick=quick,
        )
        with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
            task = bar.add_task("starting", total=None)
            report = run_experiment(
                experiment, lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(markdown(report))
    typer.echo(f"Report: {out / 'lm.json'}, {out / 'lm.md'}, {out / 'lm.png'}")
