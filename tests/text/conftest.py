"""A real encoder that is loaded once, and stores that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.memory import Memory


@pytest.fixture(scope="session")
def encoder() -> TextEncoder:
    """The packaged encoder, which encodes each text once."""
    return CachedEncoder(TextEncoder.load())


@pytest.fixture(scope="session")
def other_encoder() -> TextEncoder:
    """One that makes other vectors."""
    return CachedEncoder(TextEncoder.load(pooling="cls"))


@pytest.fixture(params=["sqlite", "qdrant"])
def backend(request: pytest.FixtureRequest) -> str:
    """Runs a test with the vectors in this process, and with Qdrant."""
    name: str = request.param
    return name


Opener = Callable[..., Memory]


@pytest.fixture
def open_plain(tmp_path: Path, encoder: TextEncoder) -> Iterator[Opener]:
    """Opens stores by name."""
    opened = []

    def open_(name: str = "store", **options: Any) -> Memory:
        opened.append(Memory(tmp_path / name, **{"encoder": encoder, **options}))
        return opened[-1]

    yield open_
    for memory in opened:
        memory.close()


@pytest.fixture
def open_memory(tmp_path: Path, open_plain: Opener, backend: str) -> Opener:
    """Opens stores by name, with one vector index or the other."""

    def open_(name: str = "store", **options: Any) -> Memory:
        url = str(tmp_path / f"{name}-qdrant") if backend == "qdrant" else None
        return open_plain(name, url=url, **options)

    return open_
