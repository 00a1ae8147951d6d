"""`titans remember`: write texts to a memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import bar
from titans.cli.memory import DEFAULT_STORE, Encoder, Neural, Store, Url, json_pairs, open_memory

SPLITS = ("whole", "lines", "paragraphs")


def remember(
    text: Annotated[str | None, typer.Argument(help="What to remember; - reads it from the input.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A file of text instead.")] = None,
    split: Annotated[
        str, typer.Option(help="What a text of the input or file is: whole, lines or paragraphs.")
    ] = "whole",
    store: Store = DEFAULT_STORE,
    user: Annotated[str, typer.Option(help="Whose memory.")] = "default",
    agent: Annotated[str | None, typer.Option(help="Of which agent.")] = None,
    session: Annotated[str | None, typer.Option(help="Of which conversation.")] = None,
    role: Annotated[str | None, typer.Option(help="Who said it.")] = None,
    metadata: Annotated[
        list[str], typer.Option("--metadata", help="NAME=VALUE to keep with it; may be repeated.")
    ] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="Most records of the store; others go.")] = None,
    encoder: Encoder = None,
    neural: Neural = None,
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Write a text to a memory, and say how surprising it was."""
    if (text is None) == (file is None):
        raise typer.BadParameter("a text, - or --file is needed, and only one of them.")
    if split not in SPLITS:
        raise typer.BadParameter(f"--split takes {', '.join(SPLITS)}, got '{split}'.")
    texts = [text] if text is not None and text != "-" else _cut(_read(file), split)
    with (
        bar("remembering") as move,
        open_memory(store, new=True, encoder=encoder, neural=neural, limit=limit, url=url) as memory,
    ):
        records = []
        for start in range(0, len(texts), 1000):
            records += memory.add_many(
                texts[start : start + 1000], user=user, agent=agent, session=session, role=role,
                metadata=json_pairs(metadata, "--metadata"),
            )  # fmt: skip
            move(len(records), len(texts), "remembering")
    if as_json:
        typer.echo(json.dumps([record.to_dict() for record in records], ensure_ascii=False, indent=2))
    elif len(records) == 1:
        typer.echo(f"Remembered {records[0].id}, surprise {records[0].surprise:.3f}.")
    else:
        mean = sum(record.surprise for record in records) / len(records)
        typer.echo(f"Remembered {len(records):,} texts, mean surprise {mean:.3f}.")


def _read(file: Path | None) -> str:
    """The text of a file, or of the input."""
    name = "the input" if file is None else str(file)
    try:
        return (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not valid UTF-8 at byte {error.start}.") from None


def _cut(text: str, split: str) -> list[str]:
    parts = [text] if split == "whole" else text.split("\n" if split == "lines" else "\n\n")
    kept = [part.strip() for part in parts if part.strip()]
    return kept or [text]  # nothing but space is refused with a sentence
