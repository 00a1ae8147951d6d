"""The paper's Table 4: DNA classified by our models and others at equal size, and what the memory adds to it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from titans.experiments.genomics_report import genomics_sections
from titans.experiments.genomics_runs import Fit, Run, do_run, load_data
from titans.experiments.runs import require_each_once
from titans.experiments.workers import do_and_report, require_some
from titans.report.outcome import write_outcome
from titans.report.progress import Progress, silent
from titans.tasks.dna import TRAIN, DNASet
from titans.words import nearest, require_whole

# As its authors train it: plain Adam with its default rate, one strand.
CNN_FIT = {
    "epochs": 10, "batch_size": 32, "learning_rate": 1e-3, "one_cycle": False, "smoothing": 0.0, "both_strands": False,
}  # fmt: skip
# All models, and how their training differs from that of the others.
MODELS: dict[str, dict[str, Any]] = {
    "lmm": {},
    "mac": {},
    "mag": {},
    "mal": {},
    "mamba2": {},
    "llama": {},
    "cnn": CNN_FIT,
    "cnn-strands": CNN_FIT | {"both_strands": True},
    "word-counts": {"epochs": 10, "learning_rate": 1e-2, "both_strands": False},
    "lmm-memory-off": {},
    "lmm-linear": {},
    "lmm-no-momentum": {},
    "lmm-pretrained": {"pretraining": 2},
    "lmm-shuffled": {},
}
CONTROLS = ("lmm-memory-off", "lmm-linear", "lmm-no-momentum", "lmm-pretrained", "lmm-shuffled")
QUICK = {"epochs": 1}
QUICK_SEQUENCES = 96


@dataclass(frozen=True)
class GenomicsExperiment:
    """What is trained on what.

    Attributes:
        data: a file or folder, see :func:`titans.tasks.dna.read_dna`.
        models: of ``MODELS``.
        folds: of data that does not come with any.
        only_folds: how many of the folds are tested, from the first on; None: all of them.
        control_folds: how many of them at most with LMMs that are changed, pre-trained or trained on shuffled labels.
        seeds: one run of every model and fold for each.
        word, stride, hidden_size: of all sequence models, see :class:`titans.experiments.genomics_runs.Run`.
        fit: fields of :class:`titans.experiments.genomics_runs.Fit`, for all models.
        drop_shared: whether sequences that several folds have are left out, instead of refusing the data.
        limit: training and test sequences of a run at most; None: all.
        at_a_time: runs side by side.
    """

    data: str
    models: Sequence[str] = tuple(MODELS)
    folds: int = 5
    only_folds: int | None = None
    control_folds: int = 3
    seeds: Sequence[int] = (0,)
    word: int = 4
    stride: int = 8
    hidden_size: int = 64
    fit: Mapping[str, Any] = field(default_factory=dict)
    drop_shared: bool = False
    limit: int | None = None
    at_a_time: int = 2

    def __post_init__(self) -> None:
        lists = {"models": self.models, "seeds": self.seeds}
        require_some({"models": MODELS}, **lists)
        require_each_once(**lists)
        require_whole(least=2, folds=self.folds)
        require_whole(word=self.word, stride=self.stride, hidden_size=self.hidden_size, at_a_time=self.at_a_time)
        require_whole(least=0 if set(self.models) - set(CONTROLS) else 1, control_folds=self.control_folds)
        for name in ("only_folds", "limit"):
            if getattr(self, name) is not None:
                require_whole(**{name: getattr(self, name)})
        for name in self.fit:
            if name not in (known := [each.name for each in fields(Fit)]):
                raise ValueError(f"fit has {name!r}: {nearest(name, known)}")
        Fit(**self.fit).check()

    def quick(self) -> GenomicsExperiment:
        """One epoch on a few sequences of one fold."""
        return replace(self, only_folds=1, seeds=self.seeds[:1], fit={**self.fit, **QUICK}, limit=QUICK_SEQUENCES)


def run_genomics(
    experiment: GenomicsExperiment, out: Path, progress: Progress = silent, command: str = ""
) -> dict[str, Any]:
    """Trains what is not trained yet; writes genomics.json, genomics.md, the page and its figures into ``out``.

    Runs that are done, and were made with the same settings, are kept. A ``ValueError`` says what is wrong before
    anything is trained, or, when all else is done and reported, which runs failed.
    """

    def write(report: dict[str, Any]) -> None:
        sets = load_data(experiment.data, experiment.folds, experiment.drop_shared)
        report["data"] = {name: _facts(data) for name, data in sets.items()}
        report["summary"] = summarize(report["runs"], experiment.models)
        write_outcome(report, "Classifying DNA", genomics_sections(report), out)

    about = {"name": "genomics", "command": command, "experiment": asdict(experiment)}
    return do_and_report(plan(experiment), do_run, out, experiment.at_a_time, progress, about, write)


def _facts(data: DNASet) -> dict[str, Any]:
    return {
        "protocol": data.protocol,
        "classes": data.classes,
        "sequences": len(data.sequences),
        "longest": max(map(len, data.sequences)),
        "folds": len({*data.folds} - {TRAIN}),
        "copies": data.copies,
        "majority": max(data.labels.count(label) for label in set(data.labels)) / len(data.labels),
    }


def plan(experiment: GenomicsExperiment) -> list[Run]:
    """All runs: one fold of every model and data set before the next."""
    sets = load_data(experiment.data, experiment.folds, experiment.drop_shared)
    tested = {name: sorted({*data.folds} - {TRAIN})[: experiment.only_folds] for name, data in sets.items()}
    return [
        Run(
            experiment.data, name, experiment.folds, experiment.drop_shared, model, tested[name][place], seed,
            experiment.word, experiment.stride, experiment.hidden_size, {**MODELS[model], **experiment.fit},
            model == "lmm-shuffled", experiment.limit,
        )
        for seed in experiment.seeds
        for place in range(max(map(len, tested.values())))
        for model in experiment.models
        for name in sets
        if place < min(len(tested[name]), experiment.control_folds if model in CONTROLS else len(tested[name]))
    ]  # fmt: skip


def summarize(runs: Sequence[Mapping[str, Any]], models: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each data set and model: the figures of its runs, and their confusion matrices added up."""
    rows = []
    for name in dict.fromkeys(run["data"] for run in runs):
        for model in models:
            mine = [run for run in runs if run["data"] == name and run["model"] == model]
            if not mine:
                continue
            confusion = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in _by_row(mine)]
            rows.append(
                {
                    "data": name, "model": model, "runs": len(mine), "parameters": mine[0]["parameters"],
                    "accuracies": {f"{run['fold']}/{run['seed']}": run["accuracy"] for run in mine},
                    "one_strand": [run["one_strand"] for run in mine],
                    "mcc": [correlation(run["confusion"]) for run in mine],
                    "test": sum(run["test"] for run in mine), "confusion": confusion,
                    "seconds": statistics.fmean(run["seconds"] for run in mine),
                }
            )  # fmt: skip
    return rows


def _by_row(runs: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], ...]]:
    return list(zip(*(run["confusion"] for run in runs), strict=True))


def correlation(confusion: Sequence[Sequence[int]]) -> float:
    """Matthews' correlation coefficient of truth (rows) and guess (columns), of any number of classes; 0 is chance."""
    total = sum(map(sum, confusion))
    truth, guess = [sum(row) for row in confusion], [sum(column) for column in zip(*confusion, strict=True)]
    right = sum(confusion[i][i] for i in range(len(confusion)))
    spread = [total**2 - sum(count**2 for count in counts) for counts in (truth, guess)]
    covariance = right * total - sum(t * g for t, g in zip(truth, guess, strict=True))
    return covariance / (spread[0] * spread[1]) ** 0.5 if all(spread) else 0.0
