"""The application: one memory per process, and every door to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import FastAPI

from titans import __version__
from titans.service import mcp, page, proxy, rest
from titans.service.access import Keys
from titans.service.problems import add_handlers
from titans.service.settings import Settings
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application; its memory is open while the application runs.

    ``app.state`` has the ``settings``, the ``keys`` and, while it runs, the ``memory``.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Each waits in a thread for the store: there must be one for every request that may run.
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.limits.concurrency
        encoder = settings.encoder
        if not isinstance(encoder, TextEncoder):
            encoder = TextEncoder.load(encoder)
        with Memory(settings.place, encoder, settings.neural) as memory:
            app.state.memory = memory
            yield

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
    add_handlers(app)
    app.include_router(rest.router)
    app.include_router(proxy.router)
    app.include_router(page.router)
    mcp.mount(app)
    return app
