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

from titans.evaluation.evaluate import changed, key_of
from titans.evaluation.measure import Evaluation
from titans.experiments.catalogue import find_experiment
from titans.experiments.lm import LMExperiment, lm_section, summarise_runs, train_models
from titans.experiments.runs import Job, check_jobs, run_jobs
from titans.experiments.tasks import TaskExperiment, read_result
from titans.layers.binding import bind
from titans.layers.memory import NeuralMemory
from titans.layers.record import memories_of
from titans.models.loading import load_model
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
    texts, jobs = None, {}
    if language is not None:  # its data is checked before anything is trained
        texts, jobs["language"] = run_language(language, progress)
    for task, experiment in zip(RECIPES, experiments, strict=True):
        jobs[task] = task_jobs(experiment, out / task)
        check_jobs([job for _, job in jobs[task]])
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


def run_language(language: LMExperiment, progress: Progress) -> tuple[dict[str, Any], list[tuple[str, Job]]]:
    """The runs on text: their report, and each with its label; Titans is also read with more steps."""
    settings = {"data": language.data, "context": "sliding", "length": language.length, "batch_size": 8}
    plain = Evaluation(("perplexity",), settings | {"limit": min(LIMIT, language.tokens)})
    tests = {TITANS: (plain, *changes([plain]))}
    others = tuple(label for label in language.models if label != TITANS)
    parts = [
        train_models(replace(language, models=models, tests=tests.get(models[0], ())), progress)
        for models in ((TITANS,) if TITANS in language.models else (), others)
        if models
    ]
    runs = [run for part in parts for run in part["runs"]]
    report = parts[0] | {"experiment": asdict(language), "runs": runs, "table": summarise_runs(runs)}
    pairs = [(label, seed) for seed in language.seeds for label in language.models]
    return report, [(label, Job(language.config(label, seed), tests.get(label, ()))) for label, seed in pairs]


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
    """||M(k_t) - v_t||^2 at M_{t-1} and at M_t: means over tokens, heads, sequences and layers."""
    before, after = [], []
    states: dict[NeuralMemory, MemoryState] = {}

    def listen(memory: NeuralMemory) -> None:
        run = bind(memory.binding, partial(run_memory, check_values=False))  # under ascent theta is negative

        def observe(tokens: Tokens, state: MemoryState, surprise: Any) -> None:
            start = states[memory] if memory in states else memory.init_state(len(tokens.q))
            y, *_ = run(memory.rule(start), tokens._replace(q=tokens.k), start)
            before.append(surprise.loss.mean())
            after.append((y - tokens.v).square().sum(-1).mean())
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
        "||M(k) - v||^2 before and after a token is written, on validation sequences; means over tokens, heads and "
        "layers. The inner steps lower what it is after the write. Names in brackets: a change at test time only."
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
    tables = [Table(*summary(report, dict.fromkeys(labels), "model"), caption)]
    if TITANS in labels:
        caption = (
            "Trained without a change, and changed when it was tested. The loss on text is that of the first "
            f"{LIMIT:,} validation tokens."
        )
        tested: dict[str, str | None] = {TITANS: None, **{f"{TITANS} ({name})": name for name in CHANGES}}
        tables.append(Table(*summary(report, tested, "at test time"), caption))
    return Section("The answer", [ABOUT, seeds], tables)


def summary(report: Mapping[str, Any], rows: Mapping[str, str | None], first: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what models, or Titans with these bindings, reach near and far on each task and on text."""
    header, columns = [first], []
    for task in RECIPES:
        entries = {
            label: [
                result["tasks"][key]["cells"]
                for result in report["results"]
                if result["model"]["name"] == (TITANS if binding else label)
                and (key := key_of(task, Evaluation((task,), fields={FIELD: binding} if binding else {})))
                in result["tasks"]
            ]
            for label, binding in rows.items()
        }
        for which in (min, max):
            cells = {
                label: [which(each, key=lambda cell: cell["group"]["length"]) for each in found]
                for label, found in entries.items()
            }
            lengths = [cell["group"]["length"] for found in cells.values() for cell in found]
            header.append(f"{task} at {which(lengths):,}")
            columns.append({label: [cell["value"] or 0.0 for cell in found] for label, found in cells.items()})
    if report["language"] is not None:
        header.append("loss on text")
        columns.append({label: _text_losses(report, label, binding, first) for label, binding in rows.items()})
    return header, [[label, *(_mean(column[label]) for column in columns)] for label in rows]


def _text_losses(report: Mapping[str, Any], label: str, binding: str | None, first: str) -> list[float | None]:
    """The loss on text of each seed: at the end of the training, or as read by a model that is changed at test time."""
    if first == "model":
        return [loss for row in report["language"]["table"] if row["model"] == label for loss in row["losses"]]
    key = key_of("perplexity", Evaluation(("perplexity",), fields={FIELD: binding} if binding else {}))
    found = [result["tasks"][key]["cells"][0] for result in report["results"] if key in result["tasks"]]
    return [cell["whole"]["loss"] for cell in found]


def inner_table(inner: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Table:
    """The inner loss before and after a write, by model and task."""
    labels = dict.fromkeys(label for found in inner.values() for label in found)
    header = ["model", *(f"{task}, {when}" for task in inner for when in ("before", "after"))]
    rows = [
        [label, *(_mean([pair[i] for pair in found.get(label, ())]) for found in inner.values() for i in (0, 1))]
        for label in labels
    ]
    return Table(header, rows, "Means over the seeds, each seed in brackets.")


def _mean(values: Sequence[float | None]) -> str:
    """The mean, and each value where there are several; a run that diverged has none."""
    if not values:
        return "-"
    known = [value for value in values if value is not None]
    mean = show(statistics.fmean(known) if len(known) == len(values) else None)
    return f"{mean} ({', '.join(show(value, '.2f') for value in values)})" if len(values) > 1 else mean
