"""Files that matter are written whole or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name beside `path`, then rename: `path` is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        if error.filename == str(temporary):  # whoever reads the message knows the other name
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
