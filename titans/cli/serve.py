"""`titans serve`: the text memory for other programs, over HTTP; and the keys of its callers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from titans.cli.common import require
from titans.cli.memory import AsJson, Encoder, Neural, Store, in_sentences

if TYPE_CHECKING:
    from titans.service.access import Keys

app = typer.Typer(help="Serve a memory over HTTP: REST, MCP, a chat proxy and a page.")
keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke the keys of a server.")
app.add_typer(keys, name="keys")
KeysFile = Annotated[Path | None, typer.Option("--keys", help="File of the keys; by default beside the store.")]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    store: Store = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines reach needs keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    keys_file: KeysFile = None,
    upstream: Annotated[
        str | None,
        typer.Option(help="URL of the OpenAI-compatible server that answers chats; by default a local model."),
    ] = None,
    upstream_key: Annotated[
        str | None, typer.Option(help="Key for that server; by default, and safer, TITANS_UPSTREAM_KEY.")
    ] = None,
    upstream_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds without a word of that server, after which it is given up.")
    ] = 300,
    budget: Annotated[int, typer.Option(min=0, help="Tokens of a prompt that memories may take.")] = 512,
    rate: Annotated[int, typer.Option(min=0, help="Requests of a key in a minute, per worker; 0: any number.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that a worker answers at the same time.")] = 256,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request, except an import or a chat.")] = 4 << 20,
    cors: Annotated[
        list[str], typer.Option("--cors", help="Origin whose pages may call the server; may be repeated.")
    ] = [],  # noqa: B006
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that serve the same store.")] = 1,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "info",
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Serve a memory over HTTP until Ctrl-C; what is being written then is finished."""
    if context.invoked_subcommand is not None:
        return
    require("the server", "fastapi", "serve")
    with in_sentences():
        from titans.service.run import run
        from titans.service.settings import Limits, Settings

        run(
            Settings(
                store, encoder, neural, host, port, keys_file, upstream,
                upstream_key or os.environ.get("TITANS_UPSTREAM_KEY") or None, budget,
                Limits(body_bytes=max_body, rate=rate, concurrency=concurrency), tuple(cors), workers, log_level,
                upstream_seconds=upstream_timeout,
            )
        )  # fmt: skip


@contextmanager
def _opened(store: str | None, file: Path | None) -> Iterator[Keys]:
    require("the server", "fastapi", "serve")
    with in_sentences():
        from titans.service.access import Keys
        from titans.service.settings import Settings

        yield Keys(Settings(store, keys=file).keys_file)


@keys.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Name of the key, such as the program that will have it.")],
    user: Annotated[str | None, typer.Option(help="Bind the key to this user.")] = None,
    agent: Annotated[str | None, typer.Option(help="Bind the key to this agent, of the user or of all users.")] = None,
    any_user: Annotated[bool, typer.Option("--any-user", help="Bind the key to nobody: requests say whose.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="The key may not write.")] = False,
    write_only: Annotated[bool, typer.Option("--write-only", help="The key may not read.")] = False,
    store: Store = None,
    file: KeysFile = None,
) -> None:
    """Make a key and print it; it cannot be shown again."""
    if any_user == (user is not None or agent is not None):
        raise typer.BadParameter("expected --user, --agent or both of them, or else --any-user.")
    if read_only and write_only:
        raise typer.BadParameter("expected at most one of --read-only and --write-only.")
    rights = ("read",) if read_only else ("write",) if write_only else ("read", "write")
    with _opened(store, file) as opened:
        typer.echo(opened.add(name, user, agent, rights))


@keys.command("list")
def list_(store: Store = None, file: KeysFile = None, as_json: AsJson = False) -> None:
    """List the keys, the revoked ones too; what was made is not shown."""
    with _opened(store, file) as opened:
        found = opened.list()
    if as_json:
        typer.echo(json.dumps([asdict(key) for key in found], ensure_ascii=False, indent=2))
        return
    for key in found:
        bound = ", ".join(f"{what} {name!r}" for what, name in (("user", key.user), ("agent", key.agent)) if name)
        state = f"revoked {key.revoked[:10]}" if key.revoked else f"made {key.created[:10]}"
        typer.echo(f"{key.id}  {key.name}  {bound or 'any user'}  {', '.join(key.rights)}  {state}")


@keys.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name or id of the key.")], store: Store = None, file: KeysFile = None
) -> None:
    """End a key at once and for good; a running server refuses it from now on."""
    with _opened(store, file) as opened:
        opened.revoke(name)
    typer.echo(f"Revoked {name}.")
