"""Packages that are installed for a test: a module and a dist-info with entry points, on the path."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from titans import plugins


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, points: Mapping[str, Mapping[str, str]], module: str
) -> None:
    """Installs a package into a folder that is put on the path until the test ends.

    Args:
        points: entry points by group and name.
        module: the code of its one module, whose name is the package's with underscores.
    """
    file = name.replace("-", "_")
    (folder / f"{file}.py").write_text(textwrap.dedent(module))
    info = folder / f"{file}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in own.items()) for group, own in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, file, raising=False)
    plugins._entries.cache_clear()
    plugins.say_once.cache_clear()
