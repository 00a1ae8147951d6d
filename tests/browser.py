"""A headless Chromium, where there is one, for tests of pages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-sync", "--disable-component-update", "--enable-logging=stderr", "--dump-dom",
)  # fmt: skip
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


def open_page(page: Path, profile: Path, *flags: str, milliseconds: int = 5000) -> str:
    """The document of a page after some time of its own, in which it had nothing to complain of."""
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, *flags, f"--user-data-dir={profile}", f"--virtual-time-budget={milliseconds}",
         page.as_uri()],
        capture_output=True, encoding="utf-8", timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    return done.stdout
