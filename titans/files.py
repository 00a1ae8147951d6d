"""Files that matter are written whole or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

RUN = "train.yaml"  # in the folder of a run: its config,
METRICS = "metrics.jsonl"  # what was logged along the way,
RESULT = "result.json"  # its last figures: a run that has them is complete;
EVAL = "eval.json"  # in that of an evaluation: its results


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


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds fields; a ``ValueError`` says what is wrong with any other."""
    import yaml

    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a YAML file with the fields of a training run")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{path} holds no fields; expected lines such as 'length: 512'")
    return values
