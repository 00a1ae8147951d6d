"""`titans eval`: what a model can do, measured with the tasks of the paper and others."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from titans.cli.common import bar, names, pairs


def evaluate(
    model: Annotated[str | None, typer.Argument(help="A folder with a saved model, or a name on the hub.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, with commas between; --list shows them.")] = None,
    setting: Annotated[
        list[str], typer.Option("--set", help="Of the tasks, NAME=VALUE, or of one, TASK.NAME=VALUE; may be repeated.")
    ] = [],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, help="Sequences of a cell.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the sequences.")] = 0,
    control: Annotated[
        str | None, typer.Option(help="Tamper with the memory: no-writes, reset (at the question) or swap.")
    ] = None,
    field: Annotated[
        list[str], typer.Option(help="Change a field of the model's config, NAME=VALUE; may be repeated.")
    ] = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option(help="Folder of results and report; default: eval in the model's.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure these tasks anew.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two sequences of a cell: shows that it works.")] = False,
    list_tasks: Annotated[bool, typer.Option("--list", help="Show the tasks and their settings.")] = False,
) -> None:
    """Measure a model on tasks; what is measured already is kept, and the report shows all of it."""
    for package in ("transformers", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise typer.BadParameter(f"eval needs {package}: pip install 'titan-memory[eval]'.")
    if list_tasks:
        _show_tasks()
        return
    if model is None or not names(tasks):
        raise typer.BadParameter("a model and --tasks are needed; --list shows the tasks.")

    from rich.console import Console

    from titans.evaluation.evaluate import Evaluation
    from titans.evaluation.evaluate import evaluate as run
    from titans.report.results import print_tables, write_report

    folder = out or (Path(model) / "eval" if Path(model).is_dir() else Path("eval") / Path(model).name)
    try:
        evaluation = Evaluation(
            model=model,
            tasks=names(tasks),
            out=folder,
            settings=pairs(setting, "--set"),
            samples=2 if quick else samples,
            seed=seed,
            control=control,
            fields=pairs(field, "--field"),
            device=device,
        )
        with bar() as move:
            result = run(evaluation, overwrite, move, shlex.join(["titans", *sys.argv[1:]]))
        page = write_report([result], folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print_tables([result], Console())
    typer.echo(f"Results: {folder / 'eval.json'}\nReport: {page}")


def _show_tasks() -> None:
    import dataclasses

    from titans.evaluation import harness
    from titans.evaluation.evaluate import ANY, PERPLEXITY, known_settings
    from titans.tasks import TASKS

    for name, task in TASKS.items():
        fields: Any = dataclasses.fields(task)  # type: ignore[arg-type]
        settings = ", ".join(f"{field.name}={_plain(field.default)}" for field in fields)
        typer.echo(f"{name}: {task.title}. {task.source}\n    {settings}")
    for name in (PERPLEXITY, *harness.TASKS):
        about = "Loss along a text." if name == PERPLEXITY else "Common sense, through lm-eval."
        typer.echo(f"{name}: {about}\n    {', '.join(known_settings(name))}")
    typer.echo(f"{ANY}NAME: any other task of lm-eval.")


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
