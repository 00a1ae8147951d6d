"""`titans demo`: a model whose memory learns at test time, next to the same model without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out_dir: Annotated[Path, typer.Option(help="Folder for the report, made if needed.")] = Path("titans-demo"),
    seed: Annotated[list[int], typer.Option(help="One run of each model; may be given again.")] = [0, 1, 2],  # noqa: B006
    quick: Annotated[bool, typer.Option(help="A few steps: shows that it works, not that it learns.")] = False,
) -> None:
    """Train a small model to recall, with its memory and without, and show how far each remembers."""
    from titans.evaluation.demo import run_demo

    try:
        run_demo(out_dir, seeds=seed, quick=quick)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
