"""HTTP as uvicorn speaks it, except that it does not wait for ever for the headers of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 30.0  # that a client has for the headers of a request; of its body, the limits speak


class TimedProtocol(H11Protocol):
    """Hangs up on who has begun a request, or a connection, and does not get to the end of its headers in time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Takes a part of a request, and waits for the rest if it is a part of its headers."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
