"""`titans memory`: inspect, change, copy and repair a store of texts; and the options that other commands share."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from titans.cli.common import bar, check_output, one_sentence, pairs, read_json_value, require

if TYPE_CHECKING:
    from titans.text.encoder import TextEncoder
    from titans.text.memory import Memory
    from titans.text.neural import NeuralTextMemory
    from titans.text.records import Scope

app = typer.Typer(no_args_is_help=True, help="Inspect, change, copy and repair a store of texts.")

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="TITANS_MEMORY",
        help="Folder or file of the store, or postgresql://USER@HOST/NAME; by default in your data folder.",
    ),
]
Encoder = Annotated[
    str | None, typer.Option(help="Folder or hub name of the text encoder; by default the one that is installed.")
]
Neural = Annotated[
    Path | None, typer.Option(help="Folder written by `titans text train`; by default the memory is untrained.")
]
User = Annotated[str, typer.Option(help="User that the memory belongs to.")]
Agent = Annotated[str | None, typer.Option(help="Agent that the memory belongs to.")]
Session = Annotated[str | None, typer.Option(help="Conversation that the memory belongs to.")]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Largest number of records in the store; beyond it, those that tell least are erased."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Id = Annotated[str, typer.Argument(help="Id of the record.")]
Purpose = Literal["read", "change", "add"]
LISTED = 20  # scopes that are named before they are erased


def json_pairs(items: list[str], option: str) -> dict[str, Any]:
    """NAME=VALUE pairs of metadata: a value is JSON if it can be read as such, else the text that was typed."""
    return pairs(items, option, read_json_value)


@contextmanager
def in_sentences() -> Iterator[None]:
    """What is wrong with a memory, or with what is asked of it, becomes one sentence; so do warnings."""
    require("the text memory", "transformers", "text")
    with one_sentence(), warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show_warning
        yield


@contextmanager
def open_memory(
    store: str | None,
    to: Purpose,
    encoder: str | None = None,
    neural: Path | None = None,
    limit: int | None = None,
) -> Iterator[Memory]:
    """An open memory, whose errors are those of :func:`in_sentences`.

    Args:
        to: "read" opens a store even where nothing can be written; where something can, a search still counts what it
            found. "change" needs a store that is there, and "add" makes one that is not.
    """
    with in_sentences():
        from titans.text.database import can_write
        from titans.text.location import default_store, is_server
        from titans.text.memory import Memory

        place = default_store() if store is None else store
        if to != "add":
            _require_store(place)
        # Before a store is made: wrong names leave none behind.
        loaded, projections = load_weights(encoder, neural) if to == "add" else (encoder, neural)
        read_only = to == "read" and not is_server(place) and not can_write(place)
        with Memory(place, loaded, projections, limit, read_only=read_only) as memory:
            yield memory


def _require_store(place: str | Path) -> None:
    from titans.text.database import locate
    from titans.text.location import is_server
    from titans.text.memory import open_store

    if is_server(place):
        open_store(place, read_only=True).close()  # raises if there is none
    elif not locate(place).is_file():
        raise ValueError(f"there is no memory store at {locate(place)}; `titans remember` makes one.")


def load_weights(encoder: str | None, neural: Path | None) -> tuple[TextEncoder, NeuralTextMemory | None]:
    """The encoder and the projections that two options name; None for the projections that are the default."""
    from titans.text.encoder import TextEncoder
    from titans.text.neural import NeuralTextMemory

    return TextEncoder.load(encoder), None if neural is None else NeuralTextMemory.load(neural)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"titans: {' '.join(str(message).split())}", err=True)


@app.command("stats")
def stats(
    store: Store = None,
    user: Annotated[str | None, typer.Option(help="Show only this user.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read the whole store and report damage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the number of records, scopes and bytes of a store."""
    with open_memory(store, "read") as memory:
        figures = memory.stats(user)
        figures["by_scope"] = [
            {"user": scope.user, "agent": scope.agent, "session": scope.session, "records": count}
            for scope, count in memory.scopes(user)
        ]
        problems = memory.check() if check else []
        name = memory.store.name
    if check:
        figures["problems"] = problems
    if as_json:
        typer.echo(json.dumps(figures, ensure_ascii=False, indent=2))
    else:
        _show(figures)
    if problems:
        from titans.text.location import is_server

        salvage = f"; `titans memory recover {name} --out NEW` salvages what can be read."
        raise typer.BadParameter(f"{name} is damaged, {problems[0]}{'.' if is_server(name) else salvage}")


def _show(figures: dict[str, Any]) -> None:
    _show_fields({name: figures[name] for name in figures if name not in ("by_scope", "problems")})
    for row in figures["by_scope"]:
        names = ", ".join(f"{name} {row[name]!r}" for name in ("user", "agent", "session") if row[name])
        typer.echo(f"{row['records']:>10,}  {names}")


def _show_fields(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if value is not None:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else value
            typer.echo(f"{name.replace('_', ' '):15}{shown}")


@app.command("show")
def show(id: Id, store: Store = None, user: User = "default", as_json: AsJson = False) -> None:
    """Show a record."""
    with open_memory(store, "read") as memory:
        record = memory.get(id, user=user)
        if record is None:
            raise _unknown(id, user)
    if as_json:
        typer.echo(json.dumps(record.to_dict(), ensure_ascii=False, indent=2))
    else:
        _show_fields(record.to_dict())


@app.command("history")
def history(id: Id, store: Store = None, user: User = "default", as_json: AsJson = False) -> None:
    """Show what happened to a record and to those that it replaced; texts that were erased are not shown."""
    with open_memory(store, "read") as memory:
        events = memory.history(id, user=user)
        if not events:
            raise _unknown(id, user)
    if as_json:
        typer.echo(json.dumps([asdict(event) for event in events], ensure_ascii=False, indent=2))
        return
    for event in events:
        text = "" if event.text is None else " ".join(event.text.split())
        typer.echo(f"{event.at[:19]}  {event.kind:8}{event.id[:8]}  {text}".rstrip())


def _unknown(id: str, user: str) -> ValueError:
    return ValueError(f"there is no record {id!r} of user {user!r}")


@app.command("update")
def update(
    id: Id,
    text: Annotated[str | None, typer.Argument(help="New text; without one, only the metadata change.")] = None,
    store: Store = None,
    user: User = "default",
    metadata: Annotated[
        list[str], typer.Option("--metadata", help="Keep NAME=VALUE instead of the old metadata; may be repeated.")
    ] = [],  # noqa: B006
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Keep the old text in the record's history instead of erasing it.")
    ] = False,
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Replace the text or the metadata of a record."""
    data = json_pairs(metadata, "--metadata") if metadata else None
    with open_memory(store, "change", encoder=encoder, neural=neural) as memory:
        record = memory.update(id, text, data, user=user, keep_old=keep_old)
    typer.echo(f"Updated {record.id}, version {record.version}, surprise {record.surprise:.3f}.")


@app.command("delete")
def delete(
    ids: Annotated[list[str], typer.Argument(help="Ids of the records.")],
    store: Store = None,
    user: User = "default",
    neural: Neural = None,
) -> None:
    """Erase records for good: all of them or, if one is unknown, none."""
    with open_memory(store, "change", neural=neural) as memory:
        count = memory.delete(ids, user=user)
    typer.echo(f"{count:,} records erased")


@app.command("delete-all")
def delete_all(
    store: Store = None,
    user: User = "default",
    agent: Agent = None,
    session: Session = None,
    below: Annotated[
        bool, typer.Option("--below", help="Also erase the records of every agent and session that is not named.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase every record of exactly this user, agent and session for good, with the history."""
    with open_memory(store, "change") as memory:
        from titans.text.records import Scope

        scope = Scope(user, agent, session)
        covered = covered_scopes(memory, scope)
        erased = covered if below else {each: covered[each] for each in covered if each == scope}
        if erased and not yes and not _confirm(erased):
            typer.echo("nothing is erased")
            return
        count = memory.delete_all(user=user, agent=agent, session=session, below=below)
        left = sum(covered_scopes(memory, scope).values())
    typer.echo(f"{count:,} records erased" + (f"; {left:,} below {scope} stay without --below" if left else ""))


def covered_scopes(memory: Memory, scope: Scope) -> dict[Scope, int]:
    """The scope and those below it that have records, with the number of them."""
    return {each: count for each, count in memory.scopes(scope.user) if scope.covers(each)}


def _confirm(scopes: dict[Scope, int]) -> bool:
    """Says what would be erased, and asks."""
    many = f"{sum(scopes.values()):,} records of {len(scopes):,} scopes"
    if not sys.stdin.isatty():
        raise ValueError(f"there is no terminal to ask in, so {many} stay; --yes erases without asking")
    for scope, count in [*scopes.items()][:LISTED]:
        typer.echo(f"{count:>10,}  {scope}")
    if len(scopes) > LISTED:
        typer.echo(f"{'':>10}  and {len(scopes) - LISTED:,} more scopes")
    return typer.confirm(f"Erase {many}?")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    store: Store = None,
    user: Annotated[str | None, typer.Option(help="Export only the records of this user.")] = None,
) -> None:
    """Write all records to a file, one JSON object per line."""
    check_output(file)
    with open_memory(store, "read") as memory:
        from titans.text.database import belongs
        from titans.text.location import is_server

        if not is_server(memory.store.name) and belongs(file, memory.store.name):
            raise ValueError(f"{file} belongs to the store itself; expected another file.")
        count = memory.export(file, user)
    typer.echo(f"{count:,} records: {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL file; each object needs a text.")],
    store: Store = None,
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Add the records of a JSONL file, in their order; records that are already there are skipped."""
    with in_sentences():
        from titans.text.records import read_records

        if file.is_file():  # a pipe can be read only once
            for _ in read_records(file):
                pass
    with bar("encoding") as move, open_memory(store, "add", encoder=encoder, neural=neural) as memory:
        count, name = memory.import_(file, move), memory.store.name
    typer.echo(f"{count:,} records added to {name}")


@app.command("reindex")
def reindex(store: Store = None, encoder: Encoder = None, neural: Neural = None) -> None:
    """Make all vectors and memories again, with the given encoder and projections."""
    with bar("encoding") as move, open_memory(store, "change", encoder=encoder, neural=neural) as memory:
        count, name = memory.reindex(move), memory.store.name
    typer.echo(f"{count:,} records of {name} have new vectors and memories")


@app.command("compact")
def compact(store: Store = None) -> None:
    """Rewrite a store without the space of what was erased."""
    with open_memory(store, "change") as memory:
        saved, name = memory.compact(), memory.store.name
    typer.echo(f"{name} is {max(saved, 0):,} bytes smaller")


@app.command("recover")
def recover(
    store: Annotated[str, typer.Argument(help="Folder or file of the damaged store, which is not changed.")],
    out: Annotated[str, typer.Option(help="Folder or file of the new store.")],
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Copy what can still be read of a damaged store to a new one."""
    with in_sentences(), bar("reading") as move:
        from titans.text.location import is_server
        from titans.text.recovery import recover as run

        if is_server(store) or is_server(out):
            raise ValueError("a server repairs its own files; expected the folder or file of a store")
        found = run(store, out, *load_weights(encoder, neural), move)
    lost = "it is not known how many are lost" if found.lost is None else f"{found.lost:,} are lost"
    typer.echo(f"{len(found.records):,} records written to {out}; {lost}")
