"""A command in this process, for the tests of all of them."""

from __future__ import annotations

import pytest

from titans.cli import main


def run(*arguments: str) -> int:
    """The exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code
