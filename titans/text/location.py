"""Where a store is: in a folder, in a file, or on a PostgreSQL server; and where it is if nobody says."""

from __future__ import annotations

import os
import re
from pathlib import Path

from titans.text.database import locate
from titans.text.records import StoreError

NAME = "titans-memory"  # of the folder in the user's data folder
SCHEMES = ("postgresql://", "postgres://")


def default_store() -> str | Path:
    """What ``TITANS_MEMORY`` says, else a folder in the user's data folder.

    Earlier versions had the default store in the current folder. While there is one, and none in the new place, a
    :class:`StoreError` says how to go on with it.
    """
    import platformdirs

    named = os.environ.get("TITANS_MEMORY")
    if named:
        return named
    place = platformdirs.user_data_path(NAME, appauthor=False)
    if locate(NAME).is_file() and not locate(place).is_file():
        raise StoreError(
            f"the default store is now in {place}, where there is none, and {NAME} in this folder holds one; "
            f"use that by its name (`--store {NAME}`) or move it there"
        )
    return place


def is_server(store: str | Path) -> bool:
    """Whether a store is given by the URL of a server, not by a path."""
    return isinstance(store, str) and store.startswith(SCHEMES)


def hide_password(url: str) -> str:
    """A URL with *** for every password in it, even if the URL cannot be parsed."""
    hidden = re.sub(r"(://[^:@]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    return re.sub(r"([?&]\w*password=)[^&]*", r"\1***", hidden, flags=re.IGNORECASE)
