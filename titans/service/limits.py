"""What one request and one caller may take: bytes, time, a place among those that run, and a rate."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titans.service.problems import Problem
from titans.service.settings import Limits

CALLERS = 10_000  # whose rates are kept
SLOWEST = 16_384  # bytes of a body in a second
UNLIMITED = ("/healthz", "/readyz", "/metrics")  # answered even if there is too much to do


class Rates:
    """How much of its rate each caller has left; of this process."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by name: how many, and when it was so

    def spend(self, name: str) -> None:
        """Takes one request of a caller's rate; raises a problem if none is left."""
        if not self.rate:
            return
        now = time.monotonic()
        left, since = self._left.pop(name, (float(self.rate), now))
        left = min(self.rate, left + (now - since) * self.rate / 60)
        self._left[name] = max(0.0, left - 1) if left >= 1 else left, now
        if len(self._left) > CALLERS:
            self._left.popitem(last=False)
        if left < 1:
            seconds = math.ceil((1 - left) * 60 / self.rate)
            raise Problem(
                429,
                f"this key has sent {self.rate} requests in a minute; come back later",
                {"Retry-After": str(seconds)},
            )


class LimitMiddleware:
    """Refuses bodies that are too large or too slow, and requests beyond those that may run at the same time."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, with a body that is watched."""
        if scope["type"] != "http" or scope["path"] in UNLIMITED:
            await self.app(scope, receive, send)
            return
        most = self._largest(scope["path"])
        try:
            if self.running >= self.limits.concurrency:
                raise Problem(503, "the server has too much to do; try again in a moment", {"Retry-After": "1"})
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
                # Where one of them says that the request ends, a server before this one may not have seen its end.
                raise Problem(400, "the length of the body is said in two ways; expected one", {"Connection": "close"})
            declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
            if declared.isdigit() and int(declared) > most:
                raise too_large(most)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        self.running += 1
        try:
            await self.app(scope, self._watch(receive, most), send)
        finally:
            self.running -= 1

    def _largest(self, path: str) -> int:
        """How many bytes a body may have."""
        if path.startswith("/v1/"):
            return self.limits.chat_bytes
        return self.limits.import_bytes if path == "/import" else self.limits.body_bytes

    def _watch(self, receive: Receive, most: int) -> Receive:
        """Receives as before until the body is complete, and raises a problem if that takes too much."""
        seconds = self.limits.body_seconds
        deadline, read, complete = time.monotonic() + seconds, 0, False

        async def watched() -> Message:
            nonlocal deadline, read, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                complete = True
                raise Problem(408, "the body did not arrive in time", {"Connection": "close"}) from None
            read += len(message.get("body", b""))
            deadline += len(message.get("body", b"")) / SLOWEST  # a long import takes its time, as long as it moves
            complete = not message.get("more_body", False)
            if read > most:
                complete = True
                raise too_large(most)
            return message

        return watched


def too_large(most: int) -> Problem:
    """Of a body."""
    return Problem(413, f"the body is too large; expected at most {most:,} bytes", {"Connection": "close"})
