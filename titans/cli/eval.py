"""`titans eval`: what a model can do, measured with the tasks of the paper and others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from titans.cli.common import Device, bar, names, one_sentence, pairs, require, this_command

NONE = "none"  # the control that leaves the memory as it is


def evaluate(
    model: Annotated[str | None, typer.Argument(help="A folder with a saved model, or a name on the hub.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks to measure, with commas between them: names that --list shows, or your own FILE.py."),
    ] = None,
    setting: Annotated[
        list[str],
        typer.Option("--set", help="Change a setting of the tasks, NAME=VALUE or TASK.NAME=VALUE. May be repeated."),
    ] = [],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, help="How many sequences each cell has.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sequences.")] = 0,
    control: Annotated[
        str | None,
        typer.Option(
            help="Tamper with the memory: no-writes, reset (at the question) or swap; or search instead of it: bm25. "
            "Several with commas between them, 'none' for the memory as it is; none, reset and swap share a reading."
        ),
    ] = None,
    field: Annotated[
        list[str], typer.Option(help="Change a field of the model's config, NAME=VALUE. May be repeated.")
    ] = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option(help="Folder for results and report. Default: eval in the model's folder.")
    ] = None,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure these tasks anew.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two sequences per cell, to see that it works.")] = False,
    list_tasks: Annotated[bool, typer.Option("--list", help="Show all tasks and their settings.")] = False,
) -> None:
    """Measure a model on tasks. What was measured before is kept, and the report shows all of it."""
    for package in ("transformers", "matplotlib"):
        require("eval", package, "eval")
    if list_tasks:
        _show_tasks()
        return
    if model is None or not names(tasks):
        raise typer.BadParameter("a model and --tasks are needed; --list shows the tasks.")

    from rich.console import Console

    from titans.evaluation.evaluate import WAIT, results_folder
    from titans.evaluation.evaluate import evaluate as run
    from titans.evaluation.measure import CONTROLS, Evaluation
    from titans.files import EVAL, locked
    from titans.report.results import load_results, print_tables, write_report

    folder = out or results_folder(model)
    with one_sentence():
        evaluation = Evaluation(
            tasks=names(tasks),
            settings=pairs(setting, "--set"),
            samples=2 if quick else samples,
            seed=seed,
            fields=pairs(field, "--field"),
        )
        controls = dict.fromkeys(names(control) or (NONE,))
        for each in controls:
            if each not in (NONE, *CONTROLS):
                raise ValueError(f"control is {each!r}; expected some of {', '.join((NONE, *CONTROLS))}")
        asked = [dataclasses.replace(evaluation, control=None if each == NONE else each) for each in controls]
        with bar() as move:
            run(model, asked, folder, device=device, overwrite=overwrite, progress=move, command=this_command())
        with locked(folder, "titans eval", WAIT):  # with what another process may have added
            results = load_results([folder])
            page = write_report(results, folder)
    print_tables(results, Console())
    typer.echo(f"Results: {folder / EVAL}\nReport: {page}")


def _show_tasks() -> None:
    from titans.evaluation.harness import PREFIX
    from titans.evaluation.kinds import known_kinds

    for kind in known_kinds():
        settings = ", ".join(f"{name}={_plain(default)}" for name, default in kind.settings.items())
        typer.echo(f"{kind.name}: {kind.about}\n    {settings}")
    typer.echo(f"{PREFIX}NAME: any other task of lm-eval\nFILE.py: a task of your own, see docs/evaluation.md")


def _plain(value: Any) -> str:
    if value is dataclasses.MISSING:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
