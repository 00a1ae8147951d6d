"""What several verbs need: lists as options, a bar of progress, and where to write."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


def require(verb: str, package: str, extra: str) -> None:
    """Says which extra installs a package that a verb needs, if it is not there."""
    if importlib.util.find_spec(package) is None:
        raise typer.BadParameter(f"{verb} needs {package}: pip install 'titan-memory[{extra}]'.")


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} takes whole numbers with commas between them, got '{text}'.") from None


def names(text: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def pairs(items: list[str], option: str) -> dict[str, Any]:
    """NAME=VALUE, the value as in YAML; a,b,c without brackets is a list, too."""
    import yaml

    made: dict[str, Any] = {}
    for item in items:
        name, given, text = item.partition("=")
        if not given or not name:
            raise typer.BadParameter(f"{option} takes NAME=VALUE, got '{item}'.")
        try:
            value = yaml.safe_load(f"[{text}]" if "," in text and text[:1] not in "[{\"'" else text)
        except yaml.YAMLError:
            raise typer.BadParameter(f"{option} takes NAME=VALUE, got '{item}', whose value cannot be read.") from None
        made[name] = value
    return made


@contextmanager
def bar(start: str = "starting", total: int | None = None) -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar on the terminal, moved by (done, total, what is being done); nothing where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as shown:
        task = shown.add_task(start, total=total)
        yield lambda done, total, what: shown.update(task, completed=done, total=total, description=what)


def check_output(path: Path) -> Path:
    """The path, if a file can be written there; said before the work, not after it."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory, a file name is needed.")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: {existing} is not a directory to write in.")
    return path
