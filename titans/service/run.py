"""Runs the service: one process or several on one store, which finish what they write before they stop."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from titans.service.access import Keys
from titans.service.app import create_app
from titans.service.protocol import TimedProtocol
from titans.service.settings import Limits, Settings, is_loopback, is_read_only
from titans.text.encoder import TextEncoder
from titans.text.memory import open_store

VARIABLE = "TITANS_SERVE"  # tells worker processes the settings


def run(settings: Settings) -> None:
    """Serves until it is told to stop."""
    if not is_loopback(settings.host) and not Keys(settings.keys_file).exist():
        raise ValueError(
            f"host is {settings.host}, which others can reach, and there are no keys; "
            "make one first: `titans serve keys add NAME --user USER`"
        )
    open_store(
        settings.place, is_read_only(settings.place)
    ).close()  # what is wrong with it is said before anything else
    if settings.workers == 1:
        encoder = settings.encoder
        loaded = encoder if isinstance(encoder, TextEncoder) else TextEncoder.load(encoder)
        server = uvicorn.Server(configure(replace(settings, encoder=loaded)))
        server.run()
        if not server.started:
            raise ValueError("the server did not start; its log says why")
        return
    given = asdict(settings) | {"keys": settings.keys_file}
    os.environ[VARIABLE] = json.dumps(given, default=str)
    uvicorn.run(f"{__name__}:from_environment", workers=settings.workers, **_options(settings))


def configure(settings: Settings) -> uvicorn.Config:
    """How one process serves."""
    return uvicorn.Config(functools.partial(create_app, settings), **_options(settings))


def from_environment() -> FastAPI:
    """The application of a worker process."""
    given = json.loads(os.environ[VARIABLE])
    made = {"limits": Limits(**given["limits"]), "cors": tuple(given["cors"]), "keys": Path(given["keys"])}
    return create_app(Settings(**given | made))


def _options(settings: Settings) -> dict[str, Any]:
    # The server's own log, on standard error beside uvicorn's.
    level = settings.log_level.upper()
    loggers = {"titans.service": {"handlers": ["default"], "level": level, "propagate": False}}
    return {
        "log_config": {**LOGGING_CONFIG, "loggers": LOGGING_CONFIG["loggers"] | loggers},
        "factory": True,
        "http": TimedProtocol,
        "host": settings.host,
        "port": settings.port,
        "log_level": settings.log_level,
        "access_log": False,  # the line of a request has its query, which may name a user
        "server_header": False,
        "timeout_keep_alive": 75,  # longer than clients keep a connection: none is closed while a request is on its way
        "timeout_graceful_shutdown": settings.shutdown_seconds,
        "timeout_worker_healthcheck": 60,  # a worker answers nothing while it loads the encoder
    }
