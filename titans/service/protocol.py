"""HTTP as uvicorn speaks it, but headers are not waited for without end, and requests know when the server stops."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 30.0  # that a client has for the headers of a request; of its body, the limits speak


class TimedProtocol(H11Protocol):
    """Hangs up on who has begun a request, or a connection, and does not get to the end of its headers in time.

    The state of a request has ``stopping`` once the server stops, for what takes long and can be ended before its end.
    """

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

    def shutdown(self) -> None:
        """Tells the request that is being answered, if there is one."""
        if self.cycle is not None:
            self.cycle.scope["state"]["stopping"] = True
        super().shutdown()

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
