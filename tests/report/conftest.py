from __future__ import annotations

from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every figure that is saved."""
    seen: list[Axes] = []
    save = Canvas.savefig

    def remember(self: Canvas, *args: Any, **kwargs: Any) -> None:
        seen.append(self.axes[0])
        save(self, *args, **kwargs)

    monkeypatch.setattr(Canvas, "savefig", remember)
    return seen
