"""`titans tokenizer`: a byte-level BPE tokenizer trained on a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import bar, one_sentence
from titans.cli.prepare import Name, Separator, SkipBad, Sources, Split, TextColumn, check_train_extra, unescape

SAMPLE = 4_000_000  # bytes of text that the trained tokenizer is tried on


def tokenizer(
    sources: Sources,
    out: Annotated[Path, typer.Option(help="The folder for the tokenizer, new or empty.")],
    vocab_size: Annotated[
        int, typer.Option(help="How many tokens it has, the 256 bytes and the end of a text among them.")
    ] = 32_000,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Learn from no more text than this, taken from all over the sources.")
    ] = 500_000_000,
    separator: Separator = None,
    text_column: TextColumn = "text",
    split: Split = "train",
    name: Name = None,
    skip_bad: SkipBad = False,
) -> None:
    """Train a byte-level BPE tokenizer, which can encode any text, for `titans prepare --tokenizer`."""
    check_train_extra("tokenizer")

    from titans.models.tokenizer import check_new_folder, make_encoder, save_tokenizer, train_tokenizer
    from titans.training.sources import Reading, find_sources, sample_texts

    with one_sentence():
        reading = Reading(unescape(separator), text_column, split, name, skip_bad=skip_bad)
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
    if len(trained) < vocab_size:
        typer.echo(f"titans: the text gives {len(trained):,} tokens, and not {vocab_size:,}.", err=True)
    typer.echo(f"{len(trained):,} tokens, {size / tokens:.2f} bytes of text per token")
    typer.echo(f"Tokenizer: {out}")


@contextmanager
def _shown(texts: Iterator[str]) -> Iterator[Iterator[str]]:
    """The same texts, with a bar that shows how much of them has been read."""
    with bar("reading") as move:

        def read() -> Iterator[str]:
            size = 0
            for text in texts:
                yield text
                size += len(text)
                move(size, None, "characters read")
            move(size, None, "characters read; learning")

        yield read()
