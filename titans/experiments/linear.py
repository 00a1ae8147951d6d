"""Is it secretly linear attention? What arXiv 2602.21204 found on other test-time training, asked of Titans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titans.evaluation.evaluate import key_of
from titans.evaluation.measure import Evaluation
from titans.experiments.catalogue import find_experiment
from titans.experiments.lm import LMExperiment, lm_section, summarise_runs, train_models
from titans.experiments.runs import Job, check_jobs, run_jobs
from titans.experiments.tasks import TaskExperiment, read_result
from titans.layers.binding import bind
from titans.layers.memory import NeuralMemory
from titans.layers.record import memories_of
from titans.models.loading import changed, load_model
from titans.ops import MemoryState, Tokens, run_memory
from titans.report.outcome import write_outcome
from titans.report.page import Section, Table, show
from titans.report.progress import Progress, silent
from titans.report.results import result_sections
from titans.training.config import TrainConfig
from titans.training.data import collate
from titans.training.run import make_validation_rows, open_data

TITLE = "Is it secretly linear attention?"
TITANS = "Titans"
FIELD = "memory_binding"
CHANGES = ("two_steps", "four_steps")  # also tried at test time alone
ROWS: dict[str, dict[str, Any]] = {
    TITANS: {"name": "lmm"},
    "two steps": {"name": "lmm", FIELD: "two_steps"},
    "four steps": {"name": "lmm", FIELD: "four_steps"},
    "ascent": {"name": "lmm", FIELD: "ascent"},
    "keys as queries": {"name": "lmm", FIELD: "key_queries"},
    "last layer only": {"name": "lmm", FIELD: "last_layer"},
    # Theirs descend on the dot product, whose gradient does not depend on what the memory says.
    "dot product": {"name": "lmm", "memory_loss": "dot"},
    "dot product, ascent": {"name": "lmm", "memory_loss": "dot", FIELD: "ascent"},
    "linear memory": {"name": "lmm", "memory_depth": 1},
    "gated-deltanet": {"name": "gated-deltanet"},
    "memory off": {"name": "lmm", "memory_writes": False},
}
RECIPES = {"recall": "recall", "parity": "tracking-parity"}  # by task
SIZE = "1m"  # of the models of language
LIMIT = 32768  # tokens of text that a model is read with where it is changed at test time
JUDGED_ROWS = 8  # of validation, on which the inner loss is measured
ABOUT = (
    "arXiv 2602.21204 holds that test-time training that binds values to keys is linear attention in disguise: more "
    "inner steps lower the inner loss and hurt the model, ascent does as well as descent, the key can take the place "
    "of the query, and updating the last layer alone is as good. Here each change is trained from the start on Titans "
    "(LMM with a memory of depth 2, momentum, forgetting, and the exact rule), beside a linear memory, Gated DeltaNet, "
    "and a memory that is never written."
)


def run_linear(
    language: LMExperiment | None,
    out: Path,
    seeds: tuple[int, ...] = (0, 1, 2),
    models: Sequence[str] = (),
    steps: int | None = None,
    at_a_time: int = 2,
    progress: Progress = silent,
    command: str = "",
    quick: bool = False,
) -> dict[str, Any]:
    """Runs what is not done yet; writes linear.json, linear.md, the page and its figures into ``out``.

    Args:
        language: the runs on text, whose models are replaced; None: recall and parity alone.
        out: folder of the experiment, with one folder per task in it.
        models: labels of :data:`ROWS`; none: all.
        steps: of training on recall and on parity; None: those of their recipes.
        quick: a few steps of one seed only.
    """
    experiments = [task_experiment(task, seeds, steps).only(models) for task in RECIPES]
    rows = {label: ROWS[label] for label in models or ROWS}
    if language is not None:
        language = replace(language, seeds=seeds, size=SIZE, models=tuple(rows), rows=rows, out=str(out / "language"))
        language = language.judged_at_the_end()
    if quick:
        experiments, language = [each.quick() for each in experiments], language and language.quick()
        seeds = seeds[:1]
    jobs = {task: task_jobs(each, out / task) for task, each in zip(RECIPES, experiments, strict=True)}
    if language is not None:
        jobs["language"] = language_jobs(language)
    check_jobs([job for task in jobs for _, job in jobs[task]])
    texts = None if language is None else run_language(language, progress)
    for task in RECIPES:
        run_jobs([job for _, job in jobs[task]], at_a_time, progress)
    results = [read_result(job, label) for task in jobs for label, job in jobs[task] if job.tests]
    report = {
        "name": "linear",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(seeds),
        "inner": {task: inner_losses(jobs[task]) for task in jobs},
        "language": texts,
        "results": results,
    }
    write_outcome(report, TITLE, linear_sections(report, list(rows)), out)
    return report


def task_experiment(task: str, seeds: tuple[int, ...], steps: int | None = None) -> TaskExperiment:
    """The experiment on a task by its recipe, with the models of :data:`ROWS`."""
    experiment = find_experiment(RECIPES[task])
    models = {label: {**experiment.models["LMM"], **row} for label, row in ROWS.items()}
    train = {**experiment.train, **({} if steps is None else {"steps": steps})}
    return replace(experiment, models=models, train=train, controls=(), seeds=seeds)


def changes(tests: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """The tests with more steps, in a model that was trained without."""
    return tuple(replace(test, fields={FIELD: name}) for test in tests for name in CHANGES)


def task_jobs(experiment: TaskExperiment, out: Path) -> list[tuple[str, Job]]:
    """The runs on a task with their labels; Titans is also tested with more steps."""
    labels = [label for _ in experiment.seeds for label in experiment.models]
    jobs = zip(labels, experiment.jobs(out), strict=True)
    return [
        (label, replace(job, tests=(*job.tests, *changes(job.tests))) if label == TITANS else job)
        for label, job in jobs
    ]


def language_jobs(language: LMExperiment) -> list[tuple[str, Job]]:
    """The runs on text with their labels."""
    pairs = [(label, seed) for seed in language.seeds for label in language.models]
    return [(label, Job(language.config(label, seed), language_tests(language, label))) for label, seed in pairs]


def language_tests(language: LMExperiment, label: str) -> tuple[Evaluation, ...]:
    """Titans reads some text as it is and with more steps; the others are only validated."""
    settings = {"data": language.data, "context": "sliding", "length": language.length, "batch_size": 8}
    plain = Evaluation(("perplexity",), settings | {"limit": min(LIMIT, language.tokens)})
    return (plain, *changes([plain])) if label == TITANS else ()


def run_language(language: LMExperiment, progress: Progress) -> dict[str, Any]:
    """Trains what is not trained yet; the report of :func:`titans.experiments.lm.train_models`."""
    groups = [[label for label in language.models if (label == TITANS) is first] for first in (True, False)]
    parts = [
        train_models(replace(language, models=tuple(group), tests=language_tests(language, group[0])), progress)
        for group in groups
        if group
    ]
    runs = [run for part in parts for run in part["runs"]]
    return parts[0] | {"experiment": asdict(language), "runs": runs, "table": summarise_runs(runs)}


def inner_losses(jobs: Sequence[tuple[str, Job]]) -> dict[str, list[tuple[float, float]]]:
    """The inner loss before and after a token's write, by label and seed; of Titans also with more steps."""
    found: dict[str, list[tuple[float, float]]] = {}
    for label, job in jobs:
        row = ROWS[label]
        if row["name"] != "lmm" or not row.get("memory_writes", True):
            continue
        model = load_model(str(job.folder), "cpu")[0]
        batch = validation_batch(job.config)
        found.setdefault(label, []).append(inner_loss(model, batch))
        if label == TITANS:
            for name in CHANGES:
                found.setdefault(f"{TITANS} ({name})", []).append(inner_loss(changed(model, {FIELD: name}), batch))
    return found


def validation_batch(config: TrainConfig) -> torch.Tensor:
    """The first rows that a run is validated on, (batch, time)."""
    rows = make_validation_rows(config, open_data(config), 1)
    return collate([rows[index] for index in range(min(JUDGED_ROWS, len(rows)))])["input_ids"]


@torch.no_grad()
def inner_loss(model: torch.nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    """The memory's own loss, l(M; k_t, v_t), at M_{t-1} and at M_t: means over tokens, heads, sequences and layers."""
    before, after = [], []
    states: dict[NeuralMemory, MemoryState] = {}

    def listen(memory: NeuralMemory) -> None:
        run = bind(memory.binding, partial(run_memory, check_values=False))  # under ascent theta is negative

        def observe(tokens: Tokens, state: MemoryState, surprise: Any) -> None:
            start = states[memory] if memory in states else memory.init_state(len(tokens.q))
            rule = memory.rule(start)
            y, *_ = run(rule, tokens._replace(q=tokens.k), start)
            before.append(surprise.loss.mean())
            after.append(rule.loss.value(y, tokens.v).mean())
            states[memory] = state

        memory.observer = observe

    try:
        for memory in memories_of(model):
            listen(memory)
        model(input_ids=ids)
    finally:
        for memory in memories_of(model):
            memory.observer = None
    return float(torch.stack(before).mean()), float(torch.stack(after).mean())


def linear_sections(report: Mapping[str, Any], labels: Sequence[str]) -> list[Section]:
    """The answer first, then what stands behind it."""
    inner = (
        "What the memory descends on (||M(k) - v||^2, or minus the dot product) before and after a token is written, "
        "on validation sequences; means over tokens, heads and layers. Names in brackets: a change at test time only."
    )
    more = [answer(report, labels), Section("The inner loss", [inner], [inner_table(report["inner"])])]
    more += [] if report["language"] is None else [lm_section(report["language"])]
    return result_sections(report["results"], more)


def answer(report: Mapping[str, Any], labels: Sequence[str]) -> Section:
    """What was asked, and the figures of every model, trained with a change or changed at test time."""
    seeds = f"Seeds: {', '.join(map(str, report['seeds']))}."
    caption = (
        "Each model trained as it is named; means over the seeds, each seed in brackets. Accuracy by length in tokens; "
        "nats per token of text."
    )
    texts, results = report["language"], report["results"]
    losses = None if texts is None else {row["model"]: row["losses"] for row in texts["table"]}
    tables = [Table(*summary("model", dict.fromkeys(labels), results, losses), caption)]
    if TITANS in labels:
        caption = (
            "Trained without a change, and changed when it was tested. The loss on text is that of the first "
            f"{LIMIT:,} validation tokens."
        )
        tested: dict[str, str | None] = {TITANS: None, **{f"{TITANS} ({name})": name for name in CHANGES}}
        losses = None
        if texts is not None:
            read = {label: find_cells(results, TITANS, "perplexity", binding) for label, binding in tested.items()}
            losses = {label: [cells[0]["whole"]["loss"] for cells in found] for label, found in read.items()}
        tables.append(Table(*summary("at test time", tested, results, losses), caption))
    return Section("The answer", [ABOUT, seeds], tables)


def summary(
    first: str,
    rows: Mapping[str, str | None],
    results: Sequence[Mapping[str, Any]],
    losses: Mapping[str, Sequence[float | None]] | None,
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: how right models are at the shortest and the longest sequences of each task, and their losses.

    Args:
        first: heading of the labels.
        rows: labels of models, or of Titans with the bindings that it was tested with.
        losses: on text, by label and seed; None: there are none.
    """
    header, columns = [first], []
    for task in RECIPES:
        cells = {label: find_cells(results, TITANS if name else label, task, name) for label, name in rows.items()}
        lengths = sorted({cell["group"]["length"] for found in cells.values() for run in found for cell in run})
        for length in dict.fromkeys((lengths[0], lengths[-1])):
            header.append(f"{task} at {length:,}")
            columns.append({label: _accuracies(found, length) for label, found in cells.items()})
    if losses is not None:
        header.append("loss on text")
        columns.append({label: list(losses.get(label, ())) for label in rows})
    return header, [[label, *(_mean(column[label]) for column in columns)] for label in rows]


def find_cells(
    results: Sequence[Mapping[str, Any]], label: str, task: str, binding: str | None
) -> list[list[dict[str, Any]]]:
    """The cells of a task for each seed of a model, as it was trained or tested with a binding."""
    key = key_of(task, Evaluation((task,), fields={FIELD: binding} if binding else {}))
    mine = [result["tasks"] for result in results if result["model"]["name"] == label]
    return [tasks[key]["cells"] for tasks in mine if key in tasks]


def _accuracies(runs: Sequence[Sequence[Mapping[str, Any]]], length: int) -> list[float | None]:
    """Of each run at a length; one that diverged is never right."""
    return [cell["value"] or 0.0 for cells in runs for cell in cells if cell["group"]["length"] == length]


def inner_table(inner: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Table:
    """The inner loss before and after a write, by model and task."""
    labels = dict.fromkeys(label for found in inner.values() for label in found)
    header = ["model", *(f"{task}, {when}" for task in inner for when in ("before", "after"))]
    rows = [
        [label, *(_mean([pair[i] for pair in found.get(label, ())], ".3g") for found in inner.values() for i in (0, 1))]
        for label in labels  # ascent reaches any size
    ]
    return Table(header, rows, "Means over the seeds, each seed in brackets.")


def _mean(values: Sequence[float | None], form: str = ".3f") -> str:
    """The mean, and each value where there are several; a run that diverged has none."""
    if not values:
        return "-"
    known = [value for value in values if value is not None]
    mean = show(statistics.fmean(known) if len(known) == len(values) else None, form)
    return f"{mean} ({', '.join(show(value, form) for value in values)})" if len(values) > 1 else mean
