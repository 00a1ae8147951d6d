"""A command in this process, for the tests of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from titans.cli import main


def run(*arguments: str) -> int:
    """The exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def assert_refused(arguments: Sequence[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says ``words`` in one sentence, ends with 2, and leaves ``folder`` as it was."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.startswith("titans: ")
    assert captured.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
