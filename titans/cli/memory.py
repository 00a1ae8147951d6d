"""`titans memory`: look at a store of texts, copy it, and put it in order."""

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

app = typer.Typer(no_args_is_help=True, help="Look at a store of texts, copy it, and put it in order.")

Store = Annotated[
    Path, typer.Option("--store", envvar="TITANS_MEMORY", help="Folder of the store, or its file; also TITANS_MEMORY.")
]
Encoder = Annotated[
    str | None, typer.Option(help="Text encoder: a folder, or a name on the hub; default: the one that is installed.")
]
Neural = Annotated[Path | None, typer.Option(help="Folder that `titans text train` wrote; default: untrained.")]
Url = Annotated[
    str | None, typer.Option(help="Qdrant as the vector index: URL of a server, or a folder for its local mode.")
]
DEFAULT_STORE = Path("titans-memory")


def json_pairs(items: list[str], option: str) -> dict[str, Any]:
    """NAME=VALUE as JSON knows values: what YAML takes for a date stays a text."""
    made: dict[str, Any] = json.loads(json.dumps(pairs(items, option), default=str))
    return made


@contextmanager
def open_memory(store: Path, new: bool = False, **options: Any) -> Iterator[Memory]:
    """An open memory; what is wrong with it or with what is asked of it becomes one sentence.

    With ``new`` a store that is not there is made.
    """
    require("the text memory", "transformers", "text")

    from titans.text.memory import Memory
    from titans.text.sqlite import locate

    file = locate(store)
    if not new and not file.is_file():
        raise typer.BadParameter(f"there is no memory store at {file}; `titans remember` makes one.")
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _say
        try:
            with Memory(store, **options) as memory:
                yield memory
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


def _say(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning, as a sentence."""
    typer.echo(f"titans: {' '.join(str(message).split())}", err=True)


@app.command("stats")
def stats(
    store: Store = DEFAULT_STORE,
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read all of the store and say what is damaged.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Figures of a store."""
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
    file: Annotated[Path, typer.Argument(help="File of JSON lines to write.")],
    store: Store = DEFAULT_STORE,
    user: Annotated[str | None, typer.Option(help="Only this user's records.")] = None,
) -> None:
    """Write all records to a file of JSON lines."""
    check_output(file)
    with open_memory(store) as memory:
        count = memory.export(file, user)
    typer.echo(f"{count:,} records: {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of JSON lines, each with a text.")],
    store: Store = DEFAULT_STORE,
    encoder: Encoder = None,
    neural: Neural = None,
    url: Url = None,
) -> None:
    """Add the records of a file of JSON lines, in their order; those that are there already are passed over."""
    with (
        bar("encoding") as move,
        open_memory(store, new=True, encoder=encoder, neural=neural, url=url) as memory,
    ):
        count = memory.import_(file, lambda done, total: move(done, total, "writing"))
    typer.echo(f"{count:,} records added to {store}")


@app.command("reindex")
def reindex(store: Store = DEFAULT_STORE, encoder: Encoder = None, neural: Neural = None, url: Url = None) -> None:
    """Make all vectors and memories again, with this encoder and these projections."""
    with bar("encoding") as move, open_memory(store, encoder=encoder, neural=neural, url=url) as memory:
        count = memory.reindex(lambda done, total: move(done, total, "encoding"))
    typer.echo(f"{count:,} records of {store} have new vectors and memories")


@app.command("recover")
def recover(
    store: Annotated[Path, typer.Argument(help="The damaged store; it is not changed.")],
    out: Annotated[Path, typer.Option(help="The new store.")],
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Salvage what can be read of a damaged store into a new one."""
    require("the text memory", "transformers", "text")

    from titans.text.recovery import recover as run

    try:
        with bar("reading") as move:
            found = run(store, out, encoder, neural, lambda done, total: move(done, total, "writing"))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    lost = "how many are lost is not known" if found.lost is None else f"{found.lost:,} are lost"
    typer.echo(f"{len(found.records):,} records written to {out}; {lost}")
