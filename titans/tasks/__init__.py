"""What models are trained on and tested with: each task a small file, all of them known by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from titans.tasks.babi import Babi
from titans.tasks.babilong import Babilong
from titans.tasks.base import IGNORED, SPLITS, Answer, Example, Group, Task, WrongLengthError, example
from titans.tasks.language import Lambada
from titans.tasks.needle import NeedleEssay, NeedleNoise, NeedleWord
from titans.tasks.phonebook import Phonebook
from titans.tasks.recall import MQAR, Reassigned, Recall, Retention
from titans.tasks.tracking import S3, S5, ModularAddition, Parity

__all__ = [
    "IGNORED", "SPLITS", "TASKS", "Answer", "Example", "Group", "Task", "WrongLengthError", "deal_settings", "example",
    "make_task", "make_tasks", "settings_of",
]  # fmt: skip

_CLASSES: tuple[type[Task], ...] = (
    NeedleNoise, NeedleEssay, NeedleWord, Babi, Babilong, Lambada, Phonebook, Recall, Reassigned, Retention, MQAR,
    Parity, ModularAddition, S3, S5,
)  # fmt: skip
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}


def make_task(name: str, settings: dict[str, Any] | None = None) -> Task:
    """A task by its name, with fields other than their defaults; a ``ValueError`` lists what is known."""
    known = settings_of(name)
    fields = {}
    for field, value in (settings or {}).items():
        if field not in known:
            raise ValueError(f"{field} is not a setting of {name}; expected one of {', '.join(known)}")
        several = isinstance(getattr(TASKS[name], field), tuple)  # the default of a field is the class's attribute
        fields[field] = tuple(value) if isinstance(value, list) else (value,) if several else value
    try:
        return TASKS[name](**fields)
    except TypeError as error:  # words where numbers belong
        raise ValueError(f"{name} cannot be had with {fields}: {error}") from None


def make_tasks(names: Sequence[str], settings: Mapping[str, Any] | None = None) -> list[Task]:
    """Several tasks. A setting is given to all that have it; as ``TASK.SETTING`` to one of them."""
    dealt = deal_settings({name: settings_of(name) for name in names}, settings or {})
    return [make_task(name, own) for name, own in dealt.items()]


def deal_settings(known: Mapping[str, Sequence[str]], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each name is given: the settings that it knows, and those that bear its name, ``NAME.SETTING``."""
    dealt: dict[str, dict[str, Any]] = {name: {} for name in known}
    for key, value in settings.items():
        owner, dot, setting = key.partition(".")
        takers = [owner] if dot and owner in known else [name for name in known if key in known[name]]
        if not takers:
            raise ValueError(f"{key} is not a setting of {' or '.join(known)}")
        for name in takers:
            if dot and setting not in known[name] and key not in known[name]:
                raise ValueError(f"{setting} is not a setting of {name}; expected one of {', '.join(known[name])}")
            dealt[name][setting if dot else key] = value
    return dealt


def settings_of(name: str) -> list[str]:
    """The fields of a task; a ``ValueError`` lists the tasks that there are."""
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; expected one of {', '.join(TASKS)}")
    return [field.name for field in dataclasses.fields(TASKS[name])]  # type: ignore[arg-type]
