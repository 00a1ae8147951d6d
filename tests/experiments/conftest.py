"""A real encoder that is loaded once."""

from __future__ import annotations

import pytest

from titans.text.encoder import CachedEncoder, TextEncoder


@pytest.fixture(scope="session")
def encoder() -> TextEncoder:
    """The packaged encoder, which encodes each text once."""
    return CachedEncoder(TextEncoder.load())
