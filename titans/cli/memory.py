"""`titans memory`: inspect, copy and repair a store of texts; and the options that other commands share."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titans.cli.common import bar, check_output, pairs, require

if TYPE_CHECKING:
    from titans.text.memory import Memory

app = typer.Typer(no_args_is_help=True, help="Inspect, copy and repair a store of texts.")

Store = Annotated[Path, typer.Option("--store", envvar="TITANS_MEMORY", help="Folder or file of the store.")]
Encoder = Annotated[
    str | None, typer.Option(help="Folder or hub name of the text encoder; by default the one that is installed.")
]
Neural = Annotated[
    Path | None, typer.Option(help="Folder written by `titans text train`; by default the memory is untrained.")
]
Url = Annotated[
    str | None, typer.Option(help="Use Qdrant as the vector index: URL of a server, or a folder for its local mode.")
]
User = Annotated[str, typer.Option(help="User that the memory belongs to.")]
Agent = Annotated[str | None, typer.Option(help="Agent that the memory belongs to.")]
Session = Annotated[str | None, typer.Option(help="Conversation that the memory belongs to.")]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Largest number of records in the store; beyond it, the least surprising are erased."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_STORE = Path("titans-memory")


def json_pairs(items: list[str], option: str) -> dict[str, Any]:
    """NAME=VALUE pairs with values that JSON has: what YAML takes for a date stays a text."""
    made: dict[str, Any] = json.loads(json.dumps(pairs(items, option), default=str))
    return made


@contextmanager
def open_memory(store: Path, new: bool = False, **options: Any) -> Iterator[Memory]:
    """An open memory; what is wrong with it or with what is asked of it becomes one sentence.

    With ``new``, a store that does not exist is created.
    """
    require("the text memory", "transformers", "text")

    from titans.text.database import locate
    from titans.text.memory import Memory

    file = locate(store)
    if not new and not file.is_file():
        raise typer.BadParameter(f"there is no memory store at {file}; `titans remember` makes one.")
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show_warning
        try:
            with Memory(store, **options) as memory:
                yield memory
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"titans: {' '.join(str(message).split())}", err=True)


@app.command("stats")
def stats(
    store: Store = DEFAULT_STORE,
    user: Annotated[str | None, typer.Option(help="Show only this user.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read the whole store and report damage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the number of records, scopes and bytes of a store."""
    with open_memory(store) as memory:
        figures = memory.stats(user)
        figures["by_scope"] = [
            {"user": scope.user, "agent": scope.agent, "session": scope.session, "records": count}
            for scope, count in memory.scopes(user)
        ]
        problems = memory.check() if check else []
    if check:
        figures["problems"] = problems
    if as_json:
        typer.echo(json.dumps(figures, ensure_ascii=False, indent=2))
    else:
        _show(figures)
    if problems:
        raise typer.BadParameter(
            f"{figures.get('path', store)} is damaged, {problems[0]}; "
            f"`titans memory recover {store} --out NEW` salvages what can be read."
        )


def _show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if name not in ("by_scope", "problems") and value is not None:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else value
            typer.echo(f"{name.replace('_', ' '):15}{shown}")
    for row in figures["by_scope"]:
        names = ", ".join(f"{name} {row[name]!r}" for name in ("user", "agent", "session") if row[name])
        typer.echo(f"{row['records']:>10,}  {names}")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    store: Store = DEFAULT_STORE,
    user: Annotated[str | None, typer.Option(help="Export only the records of this user.")] = None,
) -> None:
    """Write all records to a file, one JSON object per line."""
    check_output(file)
    with open_memory(store) as memory:
        count = memory.export(file, user)
    typer.echo(f"{count:,} records: {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL file; each object needs a text.")],
    store: Store = DEFAULT_STORE,
    encoder: Encoder = None,
    neural: Neural = None,
    url: Url = None,
) -> None:
    """Add the records of a JSONL file, in their order; records that are already there are skipped."""
    with (
        bar("encoding") as move,
        open_memory(store, new=True, encoder=encoder, neural=neural, url=url) as memory,
    ):
        count = memory.import_(file, move)
    typer.echo(f"{count:,} records added to {store}")


@app.command("reindex")
def reindex(store: Store = DEFAULT_STORE, encoder: Encoder = None, neural: Neural = None, url: Url = None) -> None:
    """Make all vectors and memories again, with the given encoder and projections."""
    with bar("encoding") as move, open_memory(store, encoder=encoder, neural=neural, url=url) as memory:
        count = memory.reindex(move)
    typer.echo(f"{count:,} records of {store} have new vectors and memories")


@app.command("recover")
def recover(
    store: Annotated[Path, typer.Argument(help="Folder or file of the damaged store, which is not changed.")],
    out: Annotated[Path, typer.Option(help="Folder or file of the new store.")],
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Copy what can still be read of a damaged store to a new one."""
    require("the text memory", "transformers", "text")

    from titans.text.recovery import recover as run

    try:
        with bar("reading") as move:
            found = run(store, out, encoder, neural, move)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    lost = "it is not known how many are lost" if found.lost is None else f"{found.lost:,} are lost"
    typer.echo(f"{len(found.records):,} records written to {out}; {lost}")
