"""`titans serve`: the text memory for other programs, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import require
from titans.cli.memory import Encoder, Neural, Store, in_sentences

app = typer.Typer(help="Serve a memory over HTTP: REST, MCP, a chat proxy and a page.")
keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke the keys of a server.")
app.add_typer(keys, name="keys")
KeysFile = Annotated[Path | None, typer.Option("--keys", help="File of the keys; by default beside the store.")]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    store: Store = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    keys_file: KeysFile = None,
    encoder: Encoder = None,
    neural: Neural = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that serve the same store.")] = 1,
) -> None:
    """Serve a memory over HTTP until Ctrl-C."""
    if context.invoked_subcommand is not None:
        return
    require("the server", "fastapi", "serve")
    with in_sentences():
        from titans.service.run import run
        from titans.service.settings import Settings

        run(Settings(store, encoder, neural, host, port, keys_file, workers=workers))
