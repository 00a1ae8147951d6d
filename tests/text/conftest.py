"""A real encoder that is loaded once, and stores that are closed at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.text.postgres_server import new_schema, postgres_server  # noqa: F401
from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.memory import Memory

Opener = Callable[..., Memory]
Place = Callable[[str], str]


@pytest.fixture(scope="session")
def encoder() -> TextEncoder:
    """The packaged encoder, which encodes each text once."""
    return CachedEncoder(TextEncoder.load())


@pytest.fixture(scope="session")
def other_encoder() -> TextEncoder:
    """One that makes other vectors."""
    return CachedEncoder(TextEncoder.load(pooling="cls"))


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where stores are, by name: in files, and on a real PostgreSQL server."""
    if request.param == "sqlite":
        return lambda name: str(tmp_path / name)
    return functools.cache(request.getfixturevalue("new_schema"))


@pytest.fixture
def open_plain(tmp_path: Path, encoder: TextEncoder) -> Iterator[Opener]:
    """Opens stores by name, in files."""
    with _opening(lambda name: str(tmp_path / name), encoder) as opener:
        yield opener


@pytest.fixture
def open_memory(place: Place, encoder: TextEncoder) -> Iterator[Opener]:
    """Opens stores by name, in one engine and in the other."""
    with _opening(place, encoder) as opener:
        yield opener


@contextmanager
def _opening(place: Place, encoder: TextEncoder) -> Iterator[Opener]:
    with ExitStack() as opened:

        def open_(name: str = "store", **options: Any) -> Memory:
            return opened.enter_context(Memory(place(name), **{"encoder": encoder, **options}))

        yield open_
