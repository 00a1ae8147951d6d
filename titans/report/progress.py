"""The progress bar of everything that takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Move = Callable[[int, int | None, str], None]
Progress = Callable[[int, int, str], None]  # before every step, and at the end: steps done, in all, the next
COUNTED = 10_000  # a total up to which a bar counts; beyond it, a percentage says more


def silent(done: int, total: int, what: str) -> None:
    """Progress that nobody asked for."""


@contextmanager
def bar(start: str = "starting", total: int | None = None, console: Console | None = None) -> Iterator[Move]:
    """A bar on the terminal, moved by (done, total, what is being done); nothing where there is no terminal.

    Args:
        console: where lines are printed while the bar is shown; default: one on standard error.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24), TextColumn("{task.fields[figure]}"), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    screen = console or Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as shown:
        task = shown.add_task(start, total=total, figure="")

        def move(done: int, total: int | None, what: str) -> None:
            shown.update(task, completed=done, total=total, description=what, figure=_figure(done, total))

        yield move


def _figure(done: int, total: int | None) -> str:
    if not total:
        return f"{done:,}"
    return f"{done:,}/{total:,}" if total <= COUNTED else f"{done / total:.0%}"
