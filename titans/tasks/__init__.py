"""What models are trained on and tested with: each task a small file, all of them known by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from titans.tasks.babilong import Babilong
from titans.tasks.base import IGNORED, SPLITS, Answer, Example, Group, Task, example
from titans.tasks.needle import NeedleEssay, NeedleNoise, NeedleWord
from titans.tasks.phonebook import Phonebook
from titans.tasks.recall import MQAR, Reassigned, Recall, Retention
from titans.tasks.tracking import S3, S5, ModularAddition, Parity

__all__ = ["IGNORED", "SPLITS", "TASKS", "Answer", "Example", "Group", "Task", "example", "make_task", "make_tasks"]

_CLASSES: tuple[type[Task], ...] = (
    NeedleNoise, NeedleEssay, NeedleWord, Babilong, Phonebook, Recall, Reassigned, Retention, MQAR, Parity,
    ModularAddition, S3, S5,
)  # fmt: skip
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}


def make_task(name: str, settings: dict[str, Any] | None = None) -> Task:
    """A task by its name, with fields other than their defaults; a ``ValueError`` lists what is known."""
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; expected one of {', '.join(TASKS)}")
    known = _settings(name)
    for field in settings or {}:
        if field not in known:
            raise ValueError(f"{field} is not a setting of {name}; expected one of {', '.join(known)}")
    return TASKS[name](**{field: _plain(value) for field, value in (settings or {}).items()})


def make_tasks(names: Sequence[str], settings: Mapping[str, Any] | None = None) -> list[Task]:
    """Several tasks. A setting is given to all that have it; as ``TASK.SETTING`` to one of them."""
    given = dict(settings or {})
    made, used = [], set[str]()
    for name in names:
        own = {}
        known = _settings(name) if name in TASKS else []
        for key, value in given.items():
            owner, dot, field = key.partition(".")
            if owner == name if dot else key in known:
                own[field if dot else key] = value
                used.add(key)
        made.append(make_task(name, own))
    for key in given:
        if key not in used:
            raise ValueError(f"{key} is not a setting of {' or '.join(names)}")
    return made


def _settings(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(TASKS[name])]  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
