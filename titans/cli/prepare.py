"""`titans prepare`: from text to the tokenised set that training reads."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from titans.training.prepare import Progress, Report


def prepare(
    sources: Annotated[
        list[str], typer.Argument(help="Text, JSONL or Parquet files, folders of them, or hf://owner/name of the hub.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the set, new or empty.")],
    tokenizer: Annotated[
        str, typer.Option(help="'bytes', a folder, a tokenizer.json file, or a name on the hub.")
    ] = "bytes",
    validation: Annotated[
        list[str] | None, typer.Option(help="Part of the documents, as 0.05; or a source, may be given again.")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help=r"Stands between the documents of a text file; \n is a line break.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="Of JSONL, Parquet and hub datasets.")] = "text",
    split: Annotated[str, typer.Option(help="Of hub datasets; or say it in the name, as hf://owner/name:split.")] = (
        "train"
    ),
    name: Annotated[str | None, typer.Option(help="Configuration of hub datasets.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of documents for validation.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Shards at a time; default: as many as cores.")] = None,
    shard_bytes: Annotated[
        int, typer.Option(min=64, help="Text of a shard: what a worker does at a time, and what a stop may lose.")
    ] = 8 << 20,
    overwrite: Annotated[bool, typer.Option(help="Replace a prepared set that is there, finished or not.")] = False,
) -> None:
    """Tokenise text into a set on disk that `titans train` reads; if it is stopped, the same command goes on."""
    check_train_extra("prepare")

    from titans.tasks.prepared import WORK
    from titans.training.prepare import prepare as run
    from titans.training.sources import Reading

    try:
        reading = Reading(unescape(separator), text_column, split, name, shard_bytes)
        with _bar() as show:
            report = run(
                sources,
                out,
                tokenizer,
                validation=_validation(validation),
                reading=reading,
                seed=seed,
                workers=workers or count_cores(),
                overwrite=overwrite,
                on_progress=show,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        if (out / WORK).exists():
            typer.echo("titans: what is done is kept, and the same command goes on from there.", err=True)
        raise
    _print(report)


def check_train_extra(verb: str) -> None:
    """Says what to install if something is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("datasets", "tokenizers", "transformers")):
        raise typer.BadParameter(f"{verb} needs datasets and transformers: pip install 'titan-memory[train]'.")


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def unescape(text: str | None) -> str | None:
    r"""A text from the command line in which \n, \t, \r and \\ stand for what they do in most languages."""
    if text is None:
        return None
    letters = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda found: letters[found[1]], text)


def _validation(values: list[str] | None) -> float | list[str] | None:
    """A part, if it is a number; otherwise sources."""
    if values and len(values) == 1:
        try:
            return float(values[0])
        except ValueError:
            pass
    return values


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """Shows how far the work is, if somebody is looking."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    counts = TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), counts, TimeRemainingColumn())
    screen = Console(stderr=True)
    with Bar(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("looking", total=None, documents=0, tokens=0, rate="")

        def show(progress: Progress) -> None:
            if bar.tasks[task].description != progress.stage:
                bar.reset(task, description=progress.stage, total=progress.total, documents=0, tokens=0, rate="")
            rate = f"{progress.tokens / max(bar.tasks[task].elapsed or 0, 1e-3):,.0f} tokens/s"
            bar.update(task, completed=progress.done, documents=progress.documents, tokens=progress.tokens, rate=rate)

        yield show


def _print(report: Report) -> None:
    if not report.fresh:
        typer.echo(f"{report.prepared.folder} is there already, prepared from these sources with these options:")
        for split, size in report.prepared.splits.items():
            typer.echo(f"{split}: {_documents(size.documents)}, {size.tokens:,} tokens")
        return
    for split, some in report.splits.items():
        typer.echo(
            f"{split}: {_documents(some.documents)}, {some.tokens:,} tokens "
            f"(median {some.median:,.0f}, longest {some.longest:,} a document)"
        )
    typer.echo(f"{report.bytes_per_token:.2f} bytes of text a token")
    if report.blank:
        typer.echo(f"left out: {_documents(report.blank)} without text")
    typer.echo(f"Prepared: {report.prepared.folder}")


def _documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"
