"""What to measure on a model, and the interface of everything that can be measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from titans.tasks import Group
from titans.words import require_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTROLS = {
    "no-writes": "nothing is ever written into the memory",
    "reset": "the memory is back at its start when the question comes; attention keeps its window",
    "swap": "the question is asked with the memory of another sequence",
    "bm25": "of the text only the sentences are read that BM25 ranks best for the question: search instead of memory",
}
PIECE = 2048  # tokens per call, for models that can go on
# group, value, low, high, count, values, and what else a measure knows; one that is not complete says what is missing
Cell = dict[str, Any]
Cells = Mapping[str | None, Sequence[Cell]]  # by control


@dataclass(frozen=True)
class Evaluation:
    """What to measure, on any model.

    Attributes:
        tasks: names that :func:`titans.evaluation.kinds.find_kind` knows.
        settings: of the tasks: ``SETTING`` for every task that has it, or ``TASK.SETTING`` for one.
        samples: sequences per cell, at most.
        seed: of the sequences.
        control: a key of :data:`CONTROLS`; None: the memory is left alone.
        fields: fields of the model's config to change, such as ``memory_chunk_size``.
    """

    tasks: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    samples: int = 50
    seed: int = 0
    control: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks is empty; expected at least one")
        for name in self.tasks:
            if not isinstance(name, str):
                raise ValueError(f"tasks has {name!r}; expected names")
        for name in ("settings", "fields"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected fields, NAME: VALUE")
        require_whole(samples=self.samples)
        require_whole(0, seed=self.seed)
        if self.control is not None and self.control not in list(CONTROLS):
            raise ValueError(f"control is {self.control!r}; expected one of {', '.join(CONTROLS)}")


class Measure(Protocol):
    """Something to measure on a model, with its settings.

    Attributes:
        name: under which its results are kept.
        reads_text: whether it needs a tokenizer.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads_text(self) -> bool: ...

    def describe(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Title, source, metric, unit, better, chance, axes, counted and settings; they may depend on the cells."""

    def defaults(self) -> dict[str, Any]:
        """What its settings are where nobody has given them."""

    def groups(self) -> list[dict[str, Any]]:
        """What is measured at once, in order; a cell belongs to a group if it has all of the group's values."""

    def check(self, evaluation: Evaluation, tokenizer: Any) -> None:
        """Raises a ``ValueError`` for what cannot work, as far as that shows without a model."""

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        group: Group,
        evaluation: Evaluation,
        controls: Sequence[str | None],
        before: Cells,
    ) -> Iterable[Cells]:
        """The cells of a group for each control, again and again as they grow, at last complete.

        Args:
            before: cells that an interrupted call left incomplete.
        """


def default_settings(measure: Any) -> dict[str, Any]:
    """The defaults of the settings of a measure or task, a dataclass, that have one."""
    return {each.name: each.default for each in fields(measure) if each.default is not MISSING}


def changed_settings(measure: Any) -> dict[str, Any]:
    """The settings of a measure, a dataclass, that differ from their defaults."""
    defaults = default_settings(measure)
    return {name: value for name, default in defaults.items() if (value := getattr(measure, name)) != default}


def refuse_controls(name: str, evaluation: Evaluation) -> None:
    """Raises a ``ValueError`` if there is a control: those need a question at the end of a sequence."""
    if evaluation.control is not None:
        raise ValueError(f"control is {evaluation.control!r}; expected none, as {name} asks no question at the end")
