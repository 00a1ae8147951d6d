"""`titans prepare`: from text to the tokenised set that training reads."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from titans.cli.common import bar, one_sentence

if TYPE_CHECKING:
    from titans.report.progress import Move
    from titans.training.prepare import Progress, Report

Sources = Annotated[
    list[str], typer.Argument(help="Text, JSONL or Parquet files, folders of them, or hf://OWNER/NAME on the hub.")
]
Separator = Annotated[
    str | None, typer.Option(help=r"The separator between documents in a text file; \n is a line break.")
]
TextColumn = Annotated[str, typer.Option(help="The column of JSONL, Parquet and hub datasets that holds the text.")]
Split = Annotated[
    str, typer.Option(help="The split of hub datasets whose name does not say it: hf://OWNER/NAME:SPLIT.")
]
Name = Annotated[str | None, typer.Option(help="The configuration of hub datasets.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out lines of JSONL that are bad, and count them.")]


def prepare(
    sources: Sources,
    out: Annotated[Path, typer.Option(help="The folder for the set, new or empty.")],
    tokenizer: Annotated[
        str, typer.Option(help="The tokenizer: bytes, a folder, a tokenizer.json file, or a name on the hub.")
    ] = "bytes",
    validation: Annotated[
        list[str] | None,
        typer.Option(
            help="The validation split: a fraction of the documents, such as 0.05, or sources; may be repeated."
        ),
    ] = None,
    separator: Separator = None,
    text_column: TextColumn = "text",
    split: Split = "train",
    name: Name = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed that chooses the documents for validation.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="How many shards are made at a time; default: one per core.")
    ] = None,
    shard_bytes: Annotated[
        int, typer.Option(min=64, help="How much text a worker takes at a time, and at most loses when it is stopped.")
    ] = 8 << 20,
    skip_bad: SkipBad = False,
    overwrite: Annotated[bool, typer.Option(help="Replace a prepared set that is there, finished or not.")] = False,
) -> None:
    """Tokenise text into a set on disk that `titans train` reads; if it was stopped, run the same command again."""
    check_train_extra("prepare")

    from titans.tasks.prepared import WORK
    from titans.training.prepare import KEPT
    from titans.training.prepare import prepare as run
    from titans.training.sources import Reading

    try:
        with one_sentence(), bar("looking") as move:
            reading = Reading(unescape(separator), text_column, split, name, shard_bytes, skip_bad)
            report = run(
                sources,
                out,
                tokenizer,
                validation=_validation(validation),
                reading=reading,
                seed=seed,
                workers=workers or count_cores(),
                overwrite=overwrite,
                on_progress=_show(move),
            )
    except KeyboardInterrupt:
        if (out / WORK).exists():
            typer.echo(f"titans: {KEPT}.", err=True)
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
    """A fraction if it is one number, otherwise sources."""
    if values and len(values) == 1:
        try:
            return float(values[0])
        except ValueError:
            pass
    return values


def _show(move: Move) -> Callable[[Progress], None]:
    """Moves a bar as the work goes on."""
    stage, start = "", 0.0

    def show(progress: Progress) -> None:
        nonlocal stage, start
        now = time.perf_counter()
        if progress.stage != stage:
            stage, start = progress.stage, now
        counts = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
        rate = progress.tokens / max(1e-3, now - start)
        move(progress.done, progress.total, f"{stage}: {counts}, {rate:,.0f} tokens/s")

    return show


def _print(report: Report) -> None:
    if not report.fresh:
        typer.echo(f"{report.prepared.folder} is there already, prepared from these sources with these options:")
        for split, size in report.prepared.splits.items():
            typer.echo(f"{split}: {_documents(size.documents)}, {size.tokens:,} tokens")
        return
    for split, some in report.splits.items():
        typer.echo(
            f"{split}: {_documents(some.documents)}, {some.tokens:,} tokens "
            f"(per document: median {some.median:,.0f}, longest {some.longest:,})"
        )
    typer.echo(f"{report.bytes_per_token:.2f} bytes of text per token")
    if report.blank:
        typer.echo(f"left out: {_documents(report.blank)} without text")
    if report.skipped:
        typer.echo(f"left out: {report.skipped:,} bad line{'' if report.skipped == 1 else 's'}")
    typer.echo(f"Prepared: {report.prepared.folder}")


def _documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"
