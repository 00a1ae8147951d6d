"""What stands before every door: pages of others are kept out, answers have safe headers, and errors no words."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titans.service.access import Keys, have_keys
from titans.service.metrics import Metrics
from titans.service.problems import Problem, to_problem
from titans.service.settings import is_loopback

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
log = logging.getLogger("titans.service")


class GuardMiddleware:
    """Counts and times every request, adds headers to its answer, and answers for whatever fails inside.

    Without keys, any program of this machine may call, which must not be a page of the web in somebody's browser: the
    server must be called by a name of this machine, and by no page but its own and those that are allowed.
    """

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics, origins: tuple[str, ...]) -> None:
        self.app, self.keys, self.metrics, self.origins = app, keys, metrics, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def begin(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        begun = time.perf_counter()
        self.metrics.running += 1
        try:
            await self._refuse_pages_of_others(Headers(scope=scope))
            await self.app(scope, receive, begin)
        except asyncio.CancelledError:  # the server stops, and has waited long enough
            if not status:
                await Problem(503, "the server is stopping", {"Retry-After": "5"}).response()(scope, receive, begin)
            raise
        except Exception as error:
            problem = to_problem(error)
            if not status:
                await problem.response()(scope, receive, begin)
            # Of an answer that had begun, whoever waits for the rest sees that it breaks off.
        finally:
            self.metrics.running -= 1
            seconds = time.perf_counter() - begun
            route, method = _route(scope), scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.count("titans_requests_total", route=route, method=method, status=str(status))
            self.metrics.observe(seconds, route=route)
            log.info("%s %s %d %.0f ms", method, route, status, 1000 * seconds)

    async def _refuse_pages_of_others(self, headers: Headers) -> None:
        if await have_keys(self.keys):
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_loopback(_hostname(host)):
            raise Problem(403, "without keys the server is called by localhost only")
        if origin is not None and origin not in self.origins and origin.partition("://")[2] != host:
            raise Problem(403, "pages of other origins may not call the server")


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def _hostname(host: str) -> str:
    """The name in a Host header; "" if it has none."""
    with suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def _route(scope: Scope) -> str:
    """The route as it is described, without what a request put into it; "other" for what is not there."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    if isinstance(path, str):
        return path
    return "/mcp" if scope["path"].rstrip("/") == "/mcp" else "other"
