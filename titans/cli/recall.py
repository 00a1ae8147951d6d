"""`titans recall`: find texts in a memory."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from titans.cli.memory import AsJson, Encoder, Neural, Store, User, json_pairs, open_memory

if TYPE_CHECKING:
    from titans.text.records import Hit


def recall(
    query: Annotated[str, typer.Argument(help="The question.")],
    store: Store = None,
    user: User = "default",
    agent: Annotated[str | None, typer.Option(help="Search only the memory of this agent.")] = None,
    session: Annotated[str | None, typer.Option(help="Search only the memory of this conversation.")] = None,
    filter_: Annotated[
        list[str], typer.Option("--filter", help="Search only texts with metadata NAME=VALUE; may be repeated.")
    ] = [],  # noqa: B006
    limit: Annotated[int, typer.Option(help="Largest number of texts to show.")] = 10,
    threshold: Annotated[float | None, typer.Option(help="Leave out texts whose cosine is lower.")] = None,
    why: Annotated[bool, typer.Option("--why", help="Show the parts of each score.")] = False,
    encoder: Encoder = None,
    neural: Neural = None,
    as_json: AsJson = False,
) -> None:
    """Find the texts of a memory that match a question best."""
    filters = json_pairs(filter_, "--filter")
    with open_memory(store, "read", encoder=encoder, neural=neural) as memory:
        found = memory.search(
            query, user=user, agent=agent, session=session, filters=filters, limit=limit, threshold=threshold
        )
        if found.note is not None:
            raise ValueError(f"{found.note} in {memory.store.name}.")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), ensure_ascii=False, indent=2))
        return
    for hit in found:
        typer.echo(f"{hit.score:.3f}  {hit.record.created[:10]}  {' '.join(hit.record.text.split())}")
        if why:
            typer.echo(f"       {_reasons(hit)}")
    below = f", {found.below} below the threshold" if threshold is not None else ""
    ignored = f"; too common to be looked up: {', '.join(found.ignored)}" if found.ignored else ""
    typer.echo(f"{len(found)} found{below}{ignored}.", err=True)


def _reasons(hit: Hit) -> str:
    parts = [f"cosine {hit.cosine:.3f}" + (f" (rank {hit.cosine_rank})" if hit.cosine_rank else "")]
    if hit.bm25 is not None:
        parts.append(f"words {hit.bm25:.2f} (rank {hit.bm25_rank})")
    if hit.neural is not None:
        parts.append(f"memory {hit.neural:.3f} (rank {hit.neural_rank})")
    if hit.record.repeats:
        parts.append(f"told {hit.record.repeats + 1} times")
    if hit.replaced_by is not None:
        parts.append(f"replaced by {hit.replaced_by}")
    return ", ".join([*parts, f"surprise {hit.surprise:.3f}", f"id {hit.record.id}"])
