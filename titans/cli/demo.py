"""`titans demo`: a model whose memory learns while it reads, beside the same model without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import one_sentence, require


def demo(
    out_dir: Annotated[
        Path, typer.Option("--out-dir", "--out", help="Write the report and the runs into this folder.")
    ] = Path("titans-demo"),
    seed: Annotated[list[int], typer.Option(help="Train both models with this seed; may be repeated.")] = [0, 1],  # noqa: B006
    quick: Annotated[
        bool, typer.Option(help="Train for a few steps: shows that it works, not that it learns.")
    ] = False,
) -> None:
    """Train a small model to recall, with its memory and without, and show how far each remembers.

    What the folder already holds is kept: an interrupted demonstration goes on, and a complete one is shown again.
    """
    for package in ("transformers", "accelerate", "datasets", "yaml", "matplotlib", "jinja2"):
        require("the demonstration", package, "demo")

    from titans.experiments.demo import run_demo
    from titans.files import locked

    with one_sentence(), locked(out_dir, "titans demo"):
        run_demo(out_dir, seeds=seed, quick=quick)
