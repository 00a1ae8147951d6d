"""Where a verb may write."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def check_output(path: Path) -> Path:
    """The path, if a file can be written there; said before the work, not after it."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory, a file name is needed.")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: {existing} is not a directory to write in.")
    return path
