"""Fixtures that several folders of tests share."""

from __future__ import annotations

import pytest

from titans.ops.native import chunked, exact, project


@pytest.fixture
def only_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled loops are out of reach, as on a machine without a compiler."""
    for module in (chunked, exact, project):
        monkeypatch.setattr(module, "available", lambda *args: False)
