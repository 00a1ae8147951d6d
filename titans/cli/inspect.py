"""`titans inspect`: what the memory of a model does along a text, as an HTML page."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import bar, check_output, one_sentence, require


def inspect(
    model: Annotated[
        str, typer.Argument(help="A folder with a saved model, or, for random weights, a config file or a variant.")
    ],
    text: Annotated[str | None, typer.Argument(help="The text to read.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from this file; - is standard input.")] = None,
    out: Annotated[Path, typer.Option(help="Write the page to this file.")] = Path("inspect.html"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Read at most this many tokens.")] = 20_000,
    piece: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one norm to the next; chosen by length if not given."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights.")] = 0,
) -> None:
    """Write an HTML page with the surprise, gates and norms of a model's memory along a text, and its attention."""
    data = _read(text, file)
    check_output(out)
    if json_path is not None:
        check_output(json_path)
    require("inspect", "transformers", "models")

    from titans.files import write_atomically
    from titans.inspection.inspect import inspect_tokens, load_subject
    from titans.inspection.page import render_page, to_json

    with one_sentence():
        subject = load_subject(model, seed)
        tokens = subject.tokenize(data)
        total = min(len(tokens), max_tokens)
        with bar("reading", total) as move:
            inspection = inspect_tokens(subject.model, tokens[:total], piece, lambda done: move(done, total, "reading"))
    if len(tokens) > max_tokens:
        typer.echo(f"titans: read the first {max_tokens:,} of {len(tokens):,} tokens (--max-tokens).", err=True)
    page = render_page(inspection, subject, len(tokens))
    write_atomically(out, page.encode())
    if json_path is not None:
        write_atomically(json_path, json.dumps(to_json(inspection), allow_nan=False).encode() + b"\n")
        typer.echo(f"Numbers: {json_path}")
    typer.echo(f"Page: {out}")


def _read(text: str | None, file: Path | None) -> bytes:
    if (text is None) == (file is None):
        raise typer.BadParameter("give the text to read, or --file with a file that holds it, and not both.")
    if file is None:
        data = os.fsencode(text or "")
    elif str(file) == "-":
        data = sys.stdin.buffer.read()
    else:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be read: {error.strerror}.") from error
    if not data:
        raise typer.BadParameter("the text is empty.")
    return data
