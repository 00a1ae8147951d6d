"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import uuid

import pytest

from titans.ops.native import library

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as titans.text.encoder sets it, before the first product of any test


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the memories of whoever runs it; each has a data folder of its own."""
    monkeypatch.delenv("TITANS_MEMORY", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "data" / uuid.uuid4().hex))


@pytest.fixture
def only_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled loops are out of reach, as on a machine without a compiler."""
    monkeypatch.setattr(library, "library", lambda dtype: None)


@pytest.fixture(params=["compiled", "pytorch"])
def either_way(request: pytest.FixtureRequest) -> str:
    """Runs a test twice: with the compiled loops where they apply, and without them."""
    if request.param == "pytorch":
        request.getfixturevalue("only_pytorch")
    name: str = request.param
    return name
