"""`titans demo`: a model whose memory learns at test time, next to the same model without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from titans.cli.arguments import numbers


def demo(
    out_dir: Annotated[Path, typer.Option(help="Folder for the report, made if needed.")] = Path("titans-demo"),
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between: one run of each model a seed.")] = "0,1,2",
    quick: Annotated[bool, typer.Option(help="A few steps only: shows that it works, not that it learns.")] = False,
) -> None:
    """Train a small model to recall, with its memory and without, and show how far each remembers."""
