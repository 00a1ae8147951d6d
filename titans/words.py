"""Words for mistakes that several packages find: a wrong name, a wrong number, an error of a library."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggests the known name that is most like ``name``, or lists them all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"


def require_whole(least: int = 1, **numbers: Any) -> None:
    """Raises a ``ValueError`` for the first number that is not whole or is less than ``least``."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected a whole number")
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")


def sentence(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
