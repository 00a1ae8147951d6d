"""`titans train`: train a model as a YAML file and flags say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import one_sentence, require

FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file with the fields of the run; see configs/train/.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the output folder.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
    fields: Annotated[bool, typer.Option("--fields", help="List every field with its default, and exit.")] = False,
) -> None:
    """Train a model. Every field of the YAML file is also a flag: --learning-rate 1e-3 --model.size 10m."""
    for package in ("transformers", "datasets", "yaml"):
        require("train", package, "train")

    from titans.training.config import describe_fields, load_config

    if fields:
        typer.echo(describe_fields())
        return
    flags = list(context.args)
    if config is not None and str(config).startswith("--"):
        flags, config = [str(config), *flags], None
    with one_sentence():
        settings = load_config(config, flags)

        from titans.training.run import train as run

        result = run(settings, resume=resume, overwrite=overwrite)
    if result.finished:
        peak = result.metrics["peak_memory_gib"]
        typer.echo(f"Model: {result.output} ({result.steps:,} steps; peak memory {peak:.2f} GiB)")
        if "eval_loss" in result.metrics:
            loss, perplexity = result.metrics["eval_loss"], result.metrics["eval_perplexity"]
            tokens = result.metrics.get("eval_tokens")  # runs of earlier versions do not say
            over = "" if tokens is None else f" over {tokens:,.0f} tokens"
            typer.echo(f"Validation loss {loss:.4f}, perplexity {perplexity:.2f}, at the end{over}.")
