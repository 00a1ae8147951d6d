"""A real encoder that is loaded once, and stores that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titans.text.encoder import TextEncoder
from titans.text.memory import Memory


class OnceEncoder(TextEncoder):
    """The real encoder, which encodes every text once: the vector of a text depends on nothing else."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        known: dict[str, np.ndarray] = self.__dict__.setdefault("known", {})
        new = list(dict.fromkeys(text for text in texts if text not in known))
        if new:
            known.update(zip(new, super().encode(new), strict=True))
        return np.stack([known[text] for text in texts]) if texts else np.empty((0, self.width), dtype=np.float32)


@pytest.fixture(scope="session")
def encoder() -> TextEncoder:
    """The packaged encoder."""
    return OnceEncoder.load()


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
