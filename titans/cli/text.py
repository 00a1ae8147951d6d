"""`titans text train`: the outer loop of the text memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import bar, require

app = typer.Typer(help="The text memory: train its projections, its gates and its start.")
GENERATED = 200  # episodes an epoch, where there is no data


@app.callback(invoke_without_command=True)
def _text(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("train")
def train(
    out: Annotated[Path, typer.Option(help="Folder for the trained memory, new or empty.")],
    data: Annotated[
        list[Path] | None,
        typer.Argument(help="Transcripts: a message a line, or JSONL with text, session, question. None: generated."),
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=0, help="Episodes an epoch made from templates; default: 200 without data, else 0."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Episodes of a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-4,
    clip: Annotated[float, typer.Option(help="The largest norm of a step's gradient.")] = 1.0,
    written: Annotated[int, typer.Option(min=1, help="Texts of an episode that are written.")] = 6,
    asked: Annotated[int, typer.Option(min=1, help="Texts of an episode that ask for written ones.")] = 2,
    second_order: Annotated[
        bool, typer.Option("--second-order/--first-order", help="Gradients through the memory's own gradients, or not.")
    ] = True,
    contrastive: Annotated[
        bool,
        typer.Option(
            help="A retrieval loss as well: without it, the same value for every text meets the other losses."
        ),
    ] = True,
    data_dependent: Annotated[
        bool, typer.Option(help="Step, momentum and forgetting that depend on the text.")
    ] = False,
    associate: Annotated[str, typer.Option(help="'self', or 'previous': the key is of the text before.")] = "self",
    encoder: Annotated[str | None, typer.Option(help="Folder or hub name of the encoder; default: MiniLM.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the start and of the episodes.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Two short epochs: shows that it works.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the memory in the folder.")] = False,
) -> None:
    """Learn, from a user's transcripts or from generated facts, how texts are written to the memory and asked for.

    Memories that were written with other projections are of no use to the new ones: a store that is opened with the
    trained folder rebuilds them from its log.
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
            asked=asked,
            batch=batch,
            learning_rate=learning_rate,
            clip=clip,
            contrastive=float(contrastive),
            generated=generated if generated is not None else 0 if sessions else GENERATED,
            seed=seed,
        )
        if quick:
            settings = replace(settings, epochs=min(epochs, 2), generated=min(settings.generated, 16))
        config = NeuralConfig(
            first_order=not second_order, data_dependent=data_dependent, associate=associate, seed=seed
        )
        with bar("loading") as show:
            result = train_memory(sessions, TextEncoder.load(encoder), config, settings, show)
        result.memory.save(out, result.figures, overwrite)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    figures = result.figures
    episodes, before, after = figures["episodes"], figures["held_out"]["before"], figures["held_out"]["after"]
    typer.echo(
        f"{episodes['train']:,} episodes an epoch, {episodes['held_out']:,} held out; "
        f"{figures['steps']:,} steps in {figures['seconds']:,.0f} s"
    )
    for name in ("read", "write"):
        typer.echo(f"held-out {name} loss {before[name]:.4f} before, {after[name]:.4f} after")
    for name, words in (("found", "by the read"), ("found_without", "without a memory")):
        typer.echo(f"held-out answers found {words} {before[name]:.0%} before, {after[name]:.0%} after")
    typer.echo(f"by chance {1 / written:.0%}")
    typer.echo(f"Memory: {out} (version {result.memory.fingerprint})")
