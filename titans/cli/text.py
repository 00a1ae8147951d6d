"""`titans text train`: the outer loop of the text memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import bar, require
from titans.cli.memory import Encoder

app = typer.Typer(help="Train the neural part of the text memory.")
GENERATED = 20  # episodes per epoch, where there is no data


@app.callback(invoke_without_command=True)
def _text(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("train")
def train(
    out: Annotated[Path, typer.Option(help="New or empty folder for the trained memory.")],
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Transcripts: one message per line, or JSONL with text, session, question; without any, facts are "
            "generated."
        ),
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=0, help="Episodes per epoch made from templates; by default 20 without data, else 0."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4,
    clip: Annotated[float, typer.Option(help="Largest norm of a step's gradient.")] = 1.0,
    written: Annotated[int, typer.Option(min=2, help="Consecutive texts that are written, then sought.")] = 192,
    neighbours: Annotated[
        int, typer.Option(min=0, help="Texts among them that ask for the text after them, besides the questions.")
    ] = 32,
    second_order: Annotated[
        bool, typer.Option("--second-order/--first-order", help="Take gradients through the memory's own gradients.")
    ] = True,
    data_dependent: Annotated[
        bool, typer.Option(help="Learn step, momentum and forgetting as functions of the text.")
    ] = False,
    encoder: Encoder = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the starting weights and the episodes.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Train two short epochs, to see that it works.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the memory in the folder.")] = False,
) -> None:
    """Train a text memory on transcripts, or on generated facts.

    A store keeps to the projections that wrote its memories. To change them, run `titans memory reindex --neural
    FOLDER`, which encodes all its texts and writes all its memories again, and give `--neural FOLDER` to every command
    from then on.
    """
    require("text train", "transformers", "text")

    from titans.text.encoder import TextEncoder
    from titans.text.neural import NeuralConfig, check_folder
    from titans.text.training import TextTraining, read_transcripts, train_memory

    try:
        check_folder(out, overwrite)
        sessions = read_transcripts(data or [])
        settings = TextTraining(
            epochs=epochs,
            written=written,
            neighbours=neighbours,
            learning_rate=learning_rate,
            clip=clip,
            generated=generated if generated is not None else 0 if sessions else GENERATED,
            seed=seed,
        )
        if quick:
            settings = replace(settings, epochs=min(epochs, 2), generated=min(settings.generated, 4))
        with bar("loading") as show:
            loaded = TextEncoder.load(encoder)
            config = NeuralConfig(
                width=loaded.width, first_order=not second_order, data_dependent=data_dependent, seed=seed
            )
            result = train_memory(sessions, loaded, config, settings, show)
        result.memory.save(out, result.figures, overwrite)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    figures = result.figures
    episodes, before, after = figures["episodes"], figures["held_out"]["before"], figures["held_out"]["after"]
    typer.echo(
        f"{episodes['train']:,} episodes per epoch, {episodes['held_out']:,} held out; "
        f"{figures['steps']:,} steps in {figures['seconds']:,.0f} s"
    )
    typer.echo(f"held-out loss {before['loss']:.4f} before, {after['loss']:.4f} after")
    for name, words in (("found", "by the memory"), ("found_without", "without a memory")):
        typer.echo(f"held-out answers found first {words} {before[name]:.0%} before, {after[name]:.0%} after")
    typer.echo(f"Memory: {out} (version {result.memory.fingerprint})")
