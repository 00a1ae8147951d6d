"""What other packages add: entry points, found without importing anything and loaded when they are asked for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Container
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from titans.words import sentence

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def added(group: str, taken: Container[str]) -> dict[str, EntryPoint]:
    """The entry points of a group by name; one whose name is taken is left out, which stderr says once."""
    found: dict[str, EntryPoint] = {}
    for entry in _entries(group):
        if entry.name in taken or entry.name in found:
            say_once(f"{where(entry)} is left out: there is another {entry.name}; expected a name of its own")
        else:
            found[entry.name] = entry
    return found


def load(entry: EntryPoint) -> Any:
    """What an entry point names; a ``ValueError`` says why it cannot be had."""
    try:
        return entry.load()
    except Exception as error:  # the package may raise anything
        raise ValueError(f"{where(entry)} cannot be imported: {type(error).__name__}: {sentence(error)}") from error


def where(entry: EntryPoint) -> str:
    """An entry point and its package, for words about what is wrong with it."""
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    return f"the entry point {entry.name} = {entry.value} of {package}"


def load_file(path: Path) -> ModuleType:
    """The module of a Python file, which is run once; a ``ValueError`` says why it cannot be had."""
    path = path.expanduser().resolve()
    name = f"titans.plugins:{path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{path} is not a file; expected one with Python code")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {sentence(error)}") from error
    return module


@cache
def say_once(words: str) -> None:
    """Writes a sentence to stderr, the first time."""
    print(f"titans: {words}.", file=sys.stderr)


@cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # here, since every command loads this module

    return tuple(entry_points(group=group))
