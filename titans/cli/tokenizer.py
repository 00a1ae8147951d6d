"""`titans tokenizer`: a byte-level BPE tokenizer trained on a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.prepare import check_train_extra, unescape

SAMPLE = 4_000_000  # bytes of text that the trained tokenizer is tried on


def tokenizer(
    sources: Annotated[
        list[str], typer.Argument(help="Text, JSONL or Parquet files, folders of them, or hf://owner/name of the hub.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tokenizer, new or empty.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens, the 256 bytes and the end of a text among them.")] = 32_000,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Learn from no more text than this, taken from all over the sources.")
    ] = 500_000_000,
    separator: Annotated[
        str | None, typer.Option(help=r"Stands between the documents of a text file; \n is a line break.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="Of JSONL, Parquet and hub datasets.")] = "text",
    split: Annotated[str, typer.Option(help="Of hub datasets.")] = "train",
    name: Annotated[str | None, typer.Option(help="Configuration of hub datasets.")] = None,
) -> None:
    """Train a byte-level BPE tokenizer, which loses nothing of any text, for `titans prepare --tokenizer`."""
    check_train_extra("tokenizer")

    from titans.models.tokenizer import check_new_folder, make_encoder, save_tokenizer, train_tokenizer
    from titans.training.sources import Reading, find_sources, sample_texts

    try:
        reading = Reading(unescape(separator), text_column, split, name)
        check_new_folder(out)
        found = find_sources(sources, reading, folder=out)
        with _shown(sample_texts(found, reading, max_bytes)) as texts:
            trained = train_tokenizer(texts, vocab_size)
        encode = make_encoder(trained)
        size = tokens = 0
        for text in sample_texts(found, reading, min(max_bytes, SAMPLE)):
            size += len(text.encode())
            tokens += len(encode([text])[0])
        if not tokens:
            raise ValueError(f"there is no text in {', '.join(sources)}; expected some to learn from.")
        save_tokenizer(trained, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if len(trained) < vocab_size:
        typer.echo(f"titans: the text gives {len(trained):,} tokens, and not {vocab_size:,}.", err=True)
    typer.echo(f"{len(trained):,} tokens, {size / tokens:.2f} bytes of text a token")
    typer.echo(f"Tokenizer: {out}")


@contextmanager
def _shown(texts: Iterator[str]) -> Iterator[Iterator[str]]:
    """The same texts; shows how much of them has been read, if somebody is looking."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def read() -> Iterator[str]:
            for text in texts:
                yield text
                bar.advance(task, len(text))
            bar.update(task, description="learning")

        yield read()
