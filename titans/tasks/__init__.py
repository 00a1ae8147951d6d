"""What models are trained on and tested with: one small file per task, all of them known by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titans import plugins
from titans.tasks.babi import Babi
from titans.tasks.babilong import Babilong
from titans.tasks.base import IGNORED, SPLITS, Answer, Example, Group, Task, WrongLengthError, example
from titans.tasks.language import Lambada
from titans.tasks.needle import NeedleEssay, NeedleNoise, NeedleWord
from titans.tasks.phonebook import Phonebook
from titans.tasks.quote import BookQuote
from titans.tasks.recall import MQAR, Reassigned, Recall, Retention
from titans.tasks.tracking import S3, S5, ModularAddition, Parity
from titans.words import nearest

__all__ = [
    "IGNORED", "MEASURES", "SPLITS", "TASKS", "Answer", "Example", "Group", "Task", "WrongLengthError", "deal_settings",
    "example", "find_task", "known_tasks", "make_task", "make_tasks", "settings_of",
]  # fmt: skip

ENTRY_POINTS = "titans.tasks"  # a package adds a task by an entry point of this group, under the task's name
_CLASSES: tuple[type[Task], ...] = (
    NeedleNoise, NeedleEssay, NeedleWord, BookQuote, Babi, Babilong, Lambada, Phonebook, Recall, Reassigned, Retention,
    MQAR, Parity, ModularAddition, S3, S5,
)  # fmt: skip
# What else titans.evaluation measures, by name: no task may be called so.
MEASURES = (
    "perplexity", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa",
    "boolq",
)  # fmt: skip
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}  # those of this package


def find_task(name: str, others: Sequence[str] = ()) -> type[Task]:
    """The class of a task; a ``ValueError`` says what there is instead.

    Args:
        name: of a task of this package or of another one's entry point; or a Python file that defines one task, or
            ``FILE.py:CLASS``.
        others: names besides those of tasks that would have been possible.
    """
    if name in TASKS:
        return TASKS[name]
    file, _, chosen = name.partition(":")
    if file.endswith(".py"):
        return _checked(_task_of_file(Path(file), chosen), name)
    added = plugins.added(ENTRY_POINTS, (*TASKS, *MEASURES))
    if name in added:
        return _checked(plugins.load(added[name]), plugins.where(added[name]), expected=name)
    raise ValueError(f"task is {name!r}: {nearest(name, [*TASKS, *added, *others])}")


def known_tasks() -> dict[str, type[Task]]:
    """All tasks that have a name; stderr says which entry points cannot be used."""
    found = dict(TASKS)
    for name in plugins.added(ENTRY_POINTS, (*TASKS, *MEASURES)):
        try:
            found[name] = find_task(name)
        except ValueError as error:
            plugins.say_once(str(error))
    return found


def _task_of_file(path: Path, chosen: str) -> type[Task]:
    module = plugins.load_file(path)
    own = {
        name: each
        for name, each in vars(module).items()
        if inspect.isclass(each)
        and issubclass(each, Task)
        and each.__module__ == module.__name__
        and hasattr(each, "name")
    }
    if chosen and chosen not in own:
        raise ValueError(
            f"{path} has no task {chosen}: {nearest(chosen, own) if own else 'expected a subclass of Task'}"
        )
    if not chosen and len(own) != 1:
        raise ValueError(f"{path} has {len(own)} tasks; expected one, or {path}:CLASS")
    return own[chosen or next(iter(own))]


def _checked(task: Any, where: str, expected: str | None = None) -> type[Task]:
    """The class, if it is one of a task whose name is not another's."""
    if not (inspect.isclass(task) and issubclass(task, Task) and dataclasses.is_dataclass(task)):
        raise ValueError(f"{where} is {task!r}; expected a dataclass that is a subclass of titans.tasks.Task")
    for attribute in ("name", "title", "source", "axes"):
        if not hasattr(task, attribute):
            raise ValueError(f"{where} has no {attribute}; expected it as a class variable")
    if expected is not None and task.name != expected:
        raise ValueError(f"{where} has the name {task.name!r}; expected {expected!r}")
    if task.name in (*TASKS, *MEASURES):
        raise ValueError(f"{where} has the name {task.name!r}, which is taken; expected a name of its own")
    return task


def make_task(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """A task by its name, with fields other than their defaults; a ``ValueError`` lists what is known."""
    task = find_task(name)
    known = settings_of(name)
    fields = {}
    for field, value in (settings or {}).items():
        if field not in known:
            raise ValueError(f"{field} is not a setting of {task.name}; expected one of {', '.join(known)}")
        several = isinstance(known[field], tuple)
        fields[field] = tuple(value) if isinstance(value, list) else (value,) if several else value
    try:
        return task(**fields)
    except TypeError as error:  # words where numbers belong
        raise ValueError(f"{task.name} cannot be made with {fields}: {error}") from None


def make_tasks(names: Sequence[str], settings: Mapping[str, Any] | None = None) -> list[Task]:
    """Several tasks. A setting is given to every task that has it; as ``TASK.SETTING``, to that task alone."""
    named = {find_task(name).name: name for name in names}
    dealt = deal_settings({task: settings_of(name) for task, name in named.items()}, settings or {})
    return [make_task(named[task], own) for task, own in dealt.items()]


def deal_settings(known: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each name is given: the settings that it knows, and those that bear its name, ``NAME.SETTING``."""
    dealt: dict[str, dict[str, Any]] = {name: {} for name in known}
    for key, value in settings.items():
        owner, dot, setting = str(key).partition(".")
        takers = [owner] if dot and owner in known else [name for name in known if key in known[name]]
        if not takers:
            raise ValueError(f"{key} is not a setting of {' or '.join(known)}")
        for name in takers:
            if dot and setting not in known[name] and key not in known[name]:
                raise ValueError(f"{setting} is not a setting of {name}; expected one of {', '.join(known[name])}")
            dealt[name][setting if dot else key] = value
    return dealt


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a task, with their defaults; a ``ValueError`` lists the tasks that there are."""
    return {field.name: field.default for field in dataclasses.fields(find_task(name))}  # type: ignore[arg-type]
