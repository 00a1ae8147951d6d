"""The text memory for asynchronous programs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from titans.text.memory import Memory

P = ParamSpec("P")
R = TypeVar("R")


def _in_thread(
    method: Callable[Concatenate[Memory, P], R],
) -> Callable[Concatenate[AsyncMemory, P], Coroutine[Any, Any, R]]:
    @functools.wraps(method)
    async def call(self: AsyncMemory, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self.memory, *args, **kwargs)

    return call


class AsyncMemory:
    """:class:`Memory` for asynchronous programs: the same methods, each in a thread of its own.

    Takes what :class:`Memory` takes, or one that is already open.
    """

    def __init__(self, memory: Memory | str | Path | None = None, **options: Any) -> None:
        self.memory = memory if isinstance(memory, Memory) else Memory(memory, **options)

    async def __aenter__(self) -> AsyncMemory:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    add = _in_thread(Memory.add)
    add_many = _in_thread(Memory.add_many)
    search = _in_thread(Memory.search)
    use = _in_thread(Memory.use)
    get = _in_thread(Memory.get)
    records = _in_thread(Memory.records)
    page = _in_thread(Memory.page)
    update = _in_thread(Memory.update)
    delete = _in_thread(Memory.delete)
    delete_all = _in_thread(Memory.delete_all)
    history = _in_thread(Memory.history)
    surprise = _in_thread(Memory.surprise)
    scope_memory = _in_thread(Memory.scope_memory)
    scopes = _in_thread(Memory.scopes)
    stats = _in_thread(Memory.stats)
    check = _in_thread(Memory.check)
    compact = _in_thread(Memory.compact)
    export = _in_thread(Memory.export)
    export_page = _in_thread(Memory.export_page)
    import_ = _in_thread(Memory.import_)
    import_records = _in_thread(Memory.import_records)
    restore = _in_thread(Memory.restore)
    reindex = _in_thread(Memory.reindex)
    close = _in_thread(Memory.close)
