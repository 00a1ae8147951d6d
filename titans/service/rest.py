"""The REST interface, in the shape that clients of mem0 know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from titans.service import models
from titans.service.access import Reader, Writer, scope_of
from titans.text.memory import Memory
from titans.text.records import Record


async def _memory(request: Request) -> Memory:
    memory: Memory = request.app.state.memory
    return memory


Open = Annotated[Memory, Depends(_memory)]
router = APIRouter()


@router.post("/memories", status_code=201, response_model=models.WrittenList)
def add(body: models.NewMemories, memory: Open, caller: Writer) -> dict[str, Any]:
    """Remembers a text, several texts, or the messages of a chat: all of them or none."""
    scope = scope_of(caller, body.user_id, body.agent_id, body.run_id)
    texts, roles = zip(*body.said, strict=True)
    records = memory.add_many(texts, **asdict(scope), metadata=body.metadata, role=roles)
    return {"results": written_of(records)}


@router.get("/memories", response_model=models.MemoryPage)
def list_memories(asked: Annotated[models.Listed, Query()], memory: Open, caller: Reader) -> dict[str, Any]:
    """The memories of a scope, newest first."""
    scope = scope_of(caller, asked.user_id, asked.agent_id, asked.run_id)
    records = memory.records(**asdict(scope), limit=asked.limit)
    return {"results": [models.memory_of(record) for record in records], "next": None}


@router.post("/search", response_model=models.FoundList)
def search(body: models.Query, memory: Open, caller: Reader) -> dict[str, Any]:
    """The memories that match a question best, each with the parts of its score."""
    scope = scope_of(caller, body.user_id, body.agent_id, body.run_id)
    found = memory.search(body.query, **asdict(scope), filters=body.filters, limit=body.limit, threshold=body.threshold)
    results = [models.found_of(hit) for hit in found]
    return {"results": results, "below": found.below, "ignored": list(found.ignored)}


def written_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Records as :meth:`Memory.add_many` returns them, each with whether it is new or was known already."""
    left = Counter(record.id for record in records)
    results = []
    for record in records:
        # A new record that the same call repeats was told once for each of its other places, and not before.
        event = "REPEAT" if record.repeats >= left[record.id] else "ADD"
        left[record.id] = 0
        results.append({**models.memory_of(record), "event": event})
    return results
