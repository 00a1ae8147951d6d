"""The application: one memory per process, and every door to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from titans import __version__
from titans.service import mcp, page, proxy, rest
from titans.service.access import Keys
from titans.service.encoding import BatchingEncoder
from titans.service.guard import GuardMiddleware
from titans.service.limits import LimitMiddleware, Rates
from titans.service.metrics import Metrics
from titans.service.problems import add_handlers
from titans.service.settings import Settings, is_read_only
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory

MOST_THREADS = 16  # that work on requests at the same time
SPARE_THREADS = 8  # for what is not a request, such as the stream of an export


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application; its memory is open while the application runs.

    ``app.state`` has the ``settings``, ``keys``, ``rates`` and ``metrics`` and, while it runs, the ``memory``.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Every thread keeps memory of its own, and more of them answer no more requests a second.
        threads = min(settings.limits.concurrency, MOST_THREADS) + SPARE_THREADS
        anyio.to_thread.current_default_thread_limiter().total_tokens = threads
        with open_memory(settings, app.state.metrics) as memory:
            app.state.memory = memory
            yield
        app.state.keys.close()

    app = FastAPI(
        title="Titans memory",
        version=__version__,
        summary="A memory for any LLM: it remembers texts, finds them again, and says what surprised it.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings = settings
    app.state.keys = Keys(settings.keys_file)
    app.state.rates = Rates(settings.limits.rate)
    app.state.metrics = Metrics()
    add_handlers(app)
    app.include_router(rest.router)
    app.include_router(rest.public)
    app.include_router(proxy.router)
    app.include_router(page.router)
    mcp.mount(app)
    # The last is the first that a request meets.
    app.add_middleware(LimitMiddleware, limits=settings.limits)
    if settings.cors:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(GuardMiddleware, keys=app.state.keys, metrics=app.state.metrics, origins=settings.cors)
    return app


def open_memory(settings: Settings, metrics: Metrics) -> Memory:
    """The memory of a server: its encoder takes the texts of concurrent requests together."""
    encoder = settings.encoder
    if not isinstance(encoder, TextEncoder):
        encoder = TextEncoder.load(encoder)
    place = settings.place
    return Memory(place, BatchingEncoder(encoder, metrics), settings.neural, read_only=is_read_only(place))
