"""What several commands need: lists as options, a progress bar, a device, and where to write."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from titans.report.progress import bar as bar

Number = TypeVar("Number", int, float)

DEVICE = "Where to run: auto (CUDA if there is any, else MPS, else the CPU), cpu, cuda, cuda:N or mps."
Device = Annotated[str, typer.Option(help=DEVICE)]
SHOWN = 60  # characters of a wrong value in a sentence


def require(verb: str, package: str, extra: str) -> None:
    """Refuses a command whose package is not installed, and says which extra installs it."""
    if importlib.util.find_spec(package) is None:
        raise typer.BadParameter(f"{verb} needs {package}: pip install 'titan-memory[{extra}]'.")


@contextmanager
def one_sentence(kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """An error that says what is wrong with the input becomes one sentence and exit code 2."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error)) from error


def this_command() -> str:
    """What was typed, for the results to say what they were made with; passwords are hidden."""
    from titans.text.location import hide_password

    return shlex.join(["titans", *map(hide_password, sys.argv[1:])])


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return _listed(text, option, int, "whole numbers")


def decimals(text: str, option: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    return _listed(text, option, float, "numbers")


def _listed(text: str, option: str, kind: Callable[[str], Number], expected: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} takes {expected} with commas between them, got '{text}'.") from None


def names(text: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def read_yaml_value(text: str) -> Any:
    """A value written as YAML; a,b,c is a list even without brackets."""
    import yaml

    try:
        return yaml.safe_load(f"[{text}]" if "," in text and text[:1] not in "[{\"'" else text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text} cannot be read as YAML") from error


def read_json_value(text: str) -> Any:
    """A value written as JSON, or the text as it is; what begins as a list or an object must be one."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        if text.startswith(("[", "{")):
            raise
        return text


def pairs(items: list[str], option: str, read: Callable[[str], Any] = read_yaml_value) -> dict[str, Any]:
    """The values of NAME=VALUE options."""
    made: dict[str, Any] = {}
    for item in items:
        name, given, text = item.partition("=")
        shown = item if len(item) <= SHOWN else f"{item[:SHOWN]}..."
        if not given or not name:
            raise typer.BadParameter(f"{option} takes NAME=VALUE, got '{shown}'.")
        try:
            made[name] = read(text)
        except (ValueError, RecursionError):
            raise typer.BadParameter(f"{option} takes NAME=VALUE, got '{shown}', whose value cannot be read.") from None
    return made


def single_command(name: str, help: str, function: Callable[..., None]) -> Any:
    """A command for a group that makes its commands when they are needed."""
    made = typer.Typer(add_completion=False)
    made.command(name, help=help)(function)
    return typer.main.get_command(made)


def check_output(path: Path) -> Path:
    """The path, if a file can be written there; refused before the work, not after it."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory, a file name is needed.")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: {existing} is not a directory to write in.")
    return path
