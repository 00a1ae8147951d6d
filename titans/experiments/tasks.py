"""Models that are trained on tasks and tested far beyond: one declaration per experiment, one way to run them all."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from titans.evaluation.kinds import make_measures
from titans.evaluation.measure import Evaluation
from titans.experiments.runs import Job, check_jobs, fields_of, require_each_once, run_folder, run_jobs
from titans.files import RESULT
from titans.models.baselines import NAMES
from titans.models.configuration import VARIANTS
from titans.report.outcome import read_figures, write_outcome
from titans.report.page import Section, Table, show
from titans.report.progress import Progress, silent
from titans.report.results import result_sections
from titans.training.config import TrainConfig
from titans.words import nearest

QUICK_STEPS = 4
OWN = ("model", "output", "seed")  # of a run's config, what differs from run to run


@dataclass(frozen=True)
class TaskExperiment:
    """What is trained on what, and tested with what.

    Attributes:
        name: of the experiment and its files.
        title: of its report.
        about: what is asked, in a few sentences.
        models: by their label: fields of ``TrainConfig.model``.
        train: fields of :class:`titans.training.config.TrainConfig`, the same for all models.
        tests: what each trained model is tested with.
        controls: what those of our models that write into a memory are tested with besides.
        seeds: one run of every model for each.
        start: folder of an experiment whose trained models these runs begin with, each with that of its label and
            seed; None: they begin at random.
        fields: fields of our models' configs to change, or, as ``LABEL.FIELD``, of one model's.
    """

    name: str
    title: str
    about: str
    models: Mapping[str, Mapping[str, Any]]
    train: Mapping[str, Any]
    tests: Sequence[Evaluation]
    controls: Sequence[Evaluation] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    start: Path | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.models or not self.seeds:
            raise ValueError("there is nothing to run; expected at least one model and one seed")
        require_each_once(seeds=self.seeds)
        known = [each.name for each in fields(TrainConfig) if each.name not in OWN]
        for name in self.train:
            if name not in known:
                raise ValueError(f"train has {name!r}: {nearest(name, known)}")
        for name in self.fields:
            label = name.partition(".")[0]
            if "." in name and label not in self.models:
                raise ValueError(f"field has {name!r}: {nearest(label, self.models)}")
        folders: dict[Path, str] = {}
        for label, model in self.models.items():
            if not isinstance(label, str):
                raise ValueError(f"models has {label!r}; expected a name")
            other = folders.setdefault(run_folder(Path(), label, 0), label)
            if other != label:
                raise ValueError(
                    f"models has {other!r} and {label!r}, whose runs would share a folder; expected others"
                )
            if model.get("name") not in NAMES:
                raise ValueError(
                    f"the name of {label} is {model.get('name')!r}: {nearest(str(model.get('name')), NAMES)}"
                )

    def only(self, labels: Sequence[str]) -> TaskExperiment:
        """The same experiment with only these models; all, if there are none."""
        require_each_once(models=labels)
        for label in labels:
            if label not in self.models:
                raise ValueError(f"models has {label!r}: {nearest(label, self.models)}")
        return replace(self, models={label: self.models[label] for label in labels}) if labels else self

    def quick(self) -> TaskExperiment:
        """A few steps, and few short sequences: shows that it works, not that it learns."""
        train = {**self.train, "steps": QUICK_STEPS, "warmup": 1, "eval_tokens": 1, "final_eval_tokens": 1}
        tests, controls = ([_shortened(test) for test in each] for each in (self.tests, self.controls))
        return replace(self, train=train, tests=tests, controls=controls, seeds=self.seeds[:1])

    def jobs(self, out: Path) -> list[Job]:
        """All runs, one seed of every model before the next seed."""
        made = []
        for seed in self.seeds:
            for label, model in self.models.items():
                folder = run_folder(out, label, seed)
                begun = dict(model) if self.start is None else {"pretrained": _trained(self.start, label, seed)}
                begun |= fields_of(self.fields, label, model["name"])
                config = TrainConfig(model=begun, output=str(folder), seed=seed, **self.train)
                writes = {**model, **begun}.get("memory_writes", True)
                tampered = self.controls if model["name"] in VARIANTS and writes else ()
                made.append(Job(config, (*self.tests, *tampered)))
        return made


def _trained(start: Path, label: str, seed: int) -> str:
    """The folder of a model that another experiment has trained."""
    folder = run_folder(start, label, seed)
    if not (folder / RESULT).is_file():
        raise ValueError(f"start is {start}, which has no trained {folder.name}; expected the folder of an experiment")
    return str(folder)


def _shortened(test: Evaluation) -> Evaluation:
    """The test with two sequences per cell, at the two shortest lengths and at two depths, where it has them."""
    few: dict[str, Any] = {}
    for measure in make_measures(test):
        own = measure.describe(())["settings"]
        few |= {f"{measure.name}.{name}": sorted(own[name])[:2] for name in ("lengths", "depths") if name in own}
    return replace(test, settings={**test.settings, **few}, samples=2)


def run_tasks(
    experiment: TaskExperiment, out: Path, at_a_time: int = 2, progress: Progress = silent, command: str = ""
) -> dict[str, Any]:
    """Trains and tests what is not done yet; writes NAME.json, NAME.md, the page and its figures into ``out``.

    Runs that were interrupted go on; those that are complete, and were made with the same settings, are kept. A
    ``ValueError`` says what is wrong before anything is trained.
    """
    jobs = experiment.jobs(out)
    check_jobs(jobs)
    run_jobs(jobs, at_a_time, progress)
    labels = [label for _ in experiment.seeds for label in experiment.models]
    results = [read_result(job, label) for job, label in zip(jobs, labels, strict=True)]
    report = {
        "name": experiment.name,
        "title": experiment.title,
        "about": experiment.about,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(experiment.seeds),
        "train": dict(experiment.train),
        "results": results,
    }
    seeds = f"Seeds: {', '.join(map(str, experiment.seeds))}."
    section = Section("How the models were trained", [experiment.about, seeds], [_training_table(results)])
    write_outcome(report, experiment.title, result_sections(results, [section]), out)
    return report


def read_result(job: Job, label: str) -> dict[str, Any]:
    """The results of a run, under the label of its model."""
    result: dict[str, Any] = json.loads(job.results.read_text(encoding="utf-8"))
    result["model"]["name"] = label
    result["training"] = read_figures(job.folder / RESULT)
    return result


def _training_table(results: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for label in dict.fromkeys(result["model"]["name"] for result in results):
        mine = [result["training"] for result in results if result["model"]["name"] == label]
        minutes = sum(run["cpu_seconds"] for run in mine) / len(mine) / 60
        accuracy = ", ".join(show(run["eval_accuracy"]) for run in mine)
        loss = ", ".join(show(run["eval_loss"]) for run in mine)
        figures = [f"{int(mine[0]['parameters']):,}", f"{int(mine[0]['tokens']):,}", f"{minutes:.1f}"]
        rows.append([label, *figures, accuracy, loss])
    header = ["model", "parameters", "training tokens", "CPU minutes", "validation accuracy, each seed", "loss"]
    return Table(header, rows, "Validation at the training length, by tokens of the answers.")
