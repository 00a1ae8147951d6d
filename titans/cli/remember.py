"""`titans remember`: write texts to a memory."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import bar
from titans.cli.memory import (
    Agent,
    AsJson,
    Encoder,
    Limit,
    Neural,
    Session,
    Store,
    User,
    in_sentences,
    json_pairs,
    open_memory,
)

SPLITS = ("whole", "lines", "paragraphs")


def remember(
    text: Annotated[str | None, typer.Argument(help="Text to remember; - reads it from standard input.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Remember this text file.")] = None,
    split: Annotated[
        str, typer.Option(help="Remember the input or file as a whole, or each of its lines or paragraphs.")
    ] = "whole",
    store: Store = None,
    user: User = "default",
    agent: Agent = None,
    session: Session = None,
    role: Annotated[str | None, typer.Option(help="Role of the speaker, such as user or assistant.")] = None,
    metadata: Annotated[
        list[str],
        typer.Option(
            "--metadata", help="Keep NAME=VALUE with the text; a VALUE that is not JSON is a text. May be repeated."
        ),
    ] = [],  # noqa: B006
    limit: Limit = None,
    encoder: Encoder = None,
    neural: Neural = None,
    as_json: AsJson = False,
) -> None:
    """Write a text to a memory, and say how surprising it was."""
    if (text is None) == (file is None):
        raise typer.BadParameter("expected a text, - or --file, and only one of them.")
    if split not in SPLITS:
        raise typer.BadParameter(f"--split takes {', '.join(SPLITS)}, got '{split}'.")
    data = json_pairs(metadata, "--metadata")
    with in_sentences():  # everything is checked before the store is made or written to
        from titans.text.records import Scope, check_metadata, check_role, check_text

        Scope(user, agent, session)
        check_role(role)
        check_metadata(data)
        parts = [("text", text)] if text is not None and text != "-" else _cut(*_read(file), split)
        texts = [check_text(part, name) for name, part in parts]
    with (
        bar("remembering") as move,
        open_memory(store, "add", encoder=encoder, neural=neural, limit=limit) as memory,
    ):
        records = []
        for start in range(0, len(texts), 1000):
            records += memory.add_many(
                texts[start : start + 1000], user=user, agent=agent, session=session, role=role, metadata=data
            )
            move(len(records), len(texts), "remembering")
    if as_json:
        typer.echo(json.dumps([record.to_dict() for record in records], ensure_ascii=False, indent=2))
    elif len(records) == 1:
        again = f", told {records[0].repeats + 1} times" if records[0].repeats else ""
        typer.echo(f"Remembered {records[0].id}{again}, surprise {records[0].surprise:.3f}.")
    else:
        mean = sum(record.surprise for record in records) / len(records)
        typer.echo(f"Remembered {len(records):,} texts, mean surprise {mean:.3f}.")


def _read(file: Path | None) -> tuple[str, str]:
    """The name and the text of a file, or of standard input."""
    name = "the input" if file is None else str(file)
    try:
        return name, (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not valid UTF-8 at byte {error.start}.") from None


def _cut(name: str, text: str, split: str) -> list[tuple[str, str]]:
    """The parts of a text, each with a name that says where it is; of an empty one, the text itself."""
    if split == "whole" or not text.strip():
        return [(name, text.strip())]
    kind, end = ("line", "\n") if split == "lines" else ("the paragraph at line", r"\n\s*\n")
    parts, line = [], 1
    for part in re.split(f"({end})", text):
        before = part[: len(part) - len(part.lstrip())].count("\n")
        if part.strip():
            parts.append((f"{kind} {line + before} of {name}", part.strip()))
        line += part.count("\n")
    return parts
