"""Everything that can be measured on a model, by name: tasks, perplexity, and tasks of lm-eval."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from titans.evaluation.harness import PREFIX, LmEval
from titans.evaluation.harness import TASKS as COMMON_SENSE
from titans.evaluation.language import Perplexity
from titans.evaluation.measure import Cell, Cells, Evaluation, Measure, default_settings
from titans.evaluation.retrieval import choose_count, keep_sentences, rank_sentences
from titans.report.statistics import bootstrap
from titans.tasks import Example, Group, Task, deal_settings, example, find_task, known_tasks, make_task, settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from titans.evaluation.score import Score


BM25 = "bm25"  # the control that searches
TUNED_ON = 32  # training sequences that tell how many sentences it should find


@dataclass(frozen=True)
class TaskMeasure:
    """How many answers of a task a model gets right."""

    task: Task

    @property
    def name(self) -> str:
        """The name of the task, under which its results are kept."""
        return self.task.name

    @property
    def reads_text(self) -> bool:
        """True unless the task consists of plain tokens."""
        return self.task.vocab_size is None

    def describe(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """As the task describes itself."""
        task = self.task
        return {
            "title": task.title,
            "source": task.source,
            "metric": task.metric,
            "unit": "",
            "better": "higher",
            "chance": task.chance,
            "axes": list(task.axes),
            "counted": "sequences",
            "settings": json.loads(json.dumps(task.settings())),
        }

    def defaults(self) -> dict[str, Any]:
        """Those of the task."""
        return default_settings(self.task)

    def groups(self) -> list[dict[str, Any]]:
        """The groups of the task, such as one per length."""
        return self.task.groups()

    def check(self, evaluation: Evaluation, tokenizer: Any) -> None:
        """Draws one sequence of every group."""
        for group in self.groups():
            drawn = example(self.task, "test", evaluation.seed, 0, group, tokenizer)
            if evaluation.control == BM25 and not len(drawn.sentences):
                raise ValueError(
                    f"control is {BM25!r} and {self.name} has no sentences; expected babilong or book-quote"
                )

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        group: Group,
        evaluation: Evaluation,
        controls: Sequence[str | None],
        before: Cells,
    ) -> Iterator[Cells]:
        """One cell, after every batch of sequences, see :meth:`_cell`."""
        from titans.evaluation.score import Score, rows_at_once, score_each  # tasks can be listed without torch

        def draw(number: int, split: str = "test") -> Example:
            drawn = example(self.task, split, evaluation.seed, number, group, tokenizer)
            return replace(drawn, tokens=array("i", drawn.tokens))  # a million whole numbers are 4 MB, not 40

        count = self.task.count(group)
        samples = evaluation.samples if count is None else min(count, evaluation.samples)
        scores: dict[str | None, list[list[Score]]] = {
            control: [
                [Score(**answer) for answer in answers]
                for cell in before.get(control, ())
                for answers in cell.get("scores", ())
            ]
            for control in controls
            if control != BM25
        }
        done = min(map(len, scores.values()), default=samples)
        while done < samples:
            first = draw(done)
            left, at_once = samples - done, rows_at_once(model, len(first.tokens))
            parts = max(1, min(-(-left // at_once), left // 2))  # even ones, as a sequence needs another to swap with
            stop = done + -(-left // parts)
            found = score_each(model, [first, *map(draw, range(done + 1, stop))], list(scores))
            scores = {control: [*scores[control][:done], *found[control]] for control in scores}
            done = stop
            yield {control: [self._cell(group, each, evaluation, samples - done)] for control, each in scores.items()}
        if BM25 in controls:
            yield {BM25: [self._searched(model, tokenizer, draw, group, evaluation, samples)]}

    def _searched(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        draw: Callable[..., Example],
        group: Group,
        evaluation: Evaluation,
        samples: int,
    ) -> Cell:
        """The cell of a model that reads what BM25 finds: as many sentences as serve it best in training sequences.

        It also says how many that are, and in which share of the sequences all that is needed was among them.
        """
        from titans.evaluation.score import score

        count = choose_count(model, [draw(number, "train") for number in range(TUNED_ON)], tokenizer)
        cut, whole = [], []
        for number in range(samples):  # long texts one at a time
            each = draw(number)
            kept = rank_sentences(each, tokenizer)[:count]
            cut.append(keep_sentences(each, kept))
            whole += [set(each.needed) <= set(kept)] if each.needed else []
        cell = self._cell(group, score(model, cut), evaluation, 0)
        return cell | {"sentences": count, "found": fmean(whole) if whole else None}

    def _cell(self, group: Group, scores: Sequence[Sequence[Score]], evaluation: Evaluation, missing: int) -> Cell:
        """The mean over the sequences with its interval, and the loss per token of the answers."""
        values = [fmean(answer.right for answer in answers) for answers in scores]
        losses = [answer.loss for answers in scores for answer in answers]
        loss = sum(losses) / sum(answer.tokens for answers in scores for answer in answers)
        low, high = bootstrap(values, evaluation.seed)
        diverged = not math.isfinite(loss)
        cell: Cell = {
            "group": dict(group),
            "value": None if diverged else fmean(values),
            "low": None if diverged else low,
            "high": None if diverged else high,
            "count": len(values),
            "loss": None if diverged else loss,
            "values": [round(value, 6) for value in values],
        }
        if not diverged and (more := self.task.more_figures(losses)):
            cell["whole"] = more
        if missing:
            cell |= {"missing": missing, "scores": [[asdict(answer) for answer in answers] for answers in scores]}
        return cell


class Kind(NamedTuple):
    """A measure before it has its settings.

    Attributes:
        name: under which its results are kept.
        about: what it is, in a few words.
        settings: their defaults by name.
        make: the measure with settings.
    """

    name: str
    about: str
    settings: Mapping[str, Any]
    make: Callable[[Mapping[str, Any]], Measure]


def find_kind(name: str) -> Kind:
    """What a name stands for; a ``ValueError`` suggests another name."""
    if name == Perplexity.name:
        return Kind(name, Perplexity.title, _defaults(Perplexity), lambda settings: Perplexity(**settings))
    if name in COMMON_SENSE or name.startswith(PREFIX):
        return Kind(name, "Common sense, through lm-eval", _defaults(LmEval), lambda settings: LmEval(name, **settings))
    task = find_task(name, (Perplexity.name, *COMMON_SENSE, f"{PREFIX}NAME"))
    about = f"{task.title}. {task.source}"
    return Kind(task.name, about, settings_of(name), lambda settings: TaskMeasure(make_task(name, settings)))


def known_kinds() -> list[Kind]:
    """All kinds with a name of their own: not those in Python files, nor the other tasks of lm-eval."""
    return [find_kind(name) for name in (*known_tasks(), Perplexity.name, *COMMON_SENSE)]


def make_measures(evaluation: Evaluation) -> list[Measure]:
    """What an evaluation measures, with its settings; a ``ValueError`` says what is wrong with them."""
    kinds = {kind.name: kind for kind in map(find_kind, evaluation.tasks)}
    dealt = deal_settings({name: kind.settings for name, kind in kinds.items()}, evaluation.settings)
    return [kinds[name].make(own) for name, own in dealt.items()]


def check_evaluation(evaluation: Evaluation, tokenizer: Any) -> None:
    """Raises a ``ValueError`` for an evaluation that cannot work, as far as that shows without a model."""
    for measure in make_measures(evaluation):
        measure.check(evaluation, tokenizer)


def _defaults(kind: type[Perplexity] | type[LmEval]) -> dict[str, Any]:
    return {each.name: each.default for each in fields(kind) if each.name != "name"}
