"""`titans demo`: a model whose memory learns while it reads, next to the same model without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import require


def demo(
    out_dir: Annotated[
        Path, typer.Option("--out-dir", "--out", help="Folder for report and runs, made if needed.")
    ] = Path("titans-demo"),
    seed: Annotated[list[int], typer.Option(help="One run of each model; may be given again.")] = [0, 1],  # noqa: B006
    quick: Annotated[bool, typer.Option(help="A few steps: shows that it works, not that it learns.")] = False,
) -> None:
    """Train a small model to recall, with its memory and without, and show how far each remembers.

    What is in the folder already is kept: an interrupted demonstration goes on, and a complete one is shown again.
    """
    for package in ("transformers", "accelerate", "datasets", "yaml", "matplotlib"):
        require("the demonstration", package, "demo")

    from titans.experiments.demo import run_demo

    try:
        run_demo(out_dir, seeds=seed, quick=quick)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
