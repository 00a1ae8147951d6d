"""`titans mcp`: the text memory for one MCP client, over stdin and stdout."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from titans.cli.common import require
from titans.cli.memory import Agent, Encoder, Neural, Session, Store, User, in_sentences

if TYPE_CHECKING:
    from titans.text.memory import Memory


def mcp(
    store: Store = None,
    user: User = "default",
    agent: Agent = None,
    session: Session = None,
    encoder: Encoder = None,
    neural: Neural = None,
) -> None:
    """Serve a memory to one MCP client, such as an editor, which runs this command by itself."""
    require("mcp", "mcp", "serve")
    with in_sentences():
        from titans.service.mcp import run_stdio
        from titans.text.location import default_store
        from titans.text.records import Scope

        place = default_store() if store is None else store
        if sys.stdin.isatty():
            typer.echo("titans: waiting for an MCP client on standard input, not for you; Ctrl-C ends it.", err=True)
        run_stdio(Scope(user, agent, session), functools.partial(_open, place, encoder, neural))


def _open(place: str | Path, encoder: str | None, neural: Path | None) -> Memory:
    from titans.service.settings import is_read_only
    from titans.text.memory import Memory

    return Memory(place, encoder, neural, read_only=is_read_only(place))
