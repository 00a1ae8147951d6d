"""Many runs of one experiment: one process per run, some side by side, and nothing done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from titans.evaluation.evaluate import evaluate
from titans.evaluation.kinds import check_evaluation
from titans.evaluation.measure import Evaluation
from titans.files import EVAL, EVAL_FOLDER, RESULT, RUN, write_atomically
from titans.models.configuration import VARIANTS
from titans.models.loading import changed_config, read_config
from titans.report.progress import Progress, silent
from titans.training.build import model_config
from titans.training.config import TrainConfig
from titans.training.run import Data, open_data

POLL = 0.2  # seconds between two looks at what is running
PATIENCE = 20.0  # seconds that runs have to save a checkpoint when they are told to end


@dataclass(frozen=True)
class Job:
    """A model to train, and what it is tested with afterwards."""

    config: TrainConfig
    tests: tuple[Evaluation, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.output)

    @property
    def name(self) -> str:
        """The name of the run, and of the files beside its folder."""
        return self.folder.name

    @property
    def results(self) -> Path:
        """The file of its test results, the same that ``titans eval`` writes."""
        return self.folder / EVAL_FOLDER / EVAL

    def beside(self, ending: str) -> Path:
        """A file next to the run's folder."""
        return self.folder.parent / f"{self.name}.{ending}"

    def is_trained(self) -> bool:
        """Whether there is nothing left to train."""
        return (self.folder / RESULT).is_file()

    def is_done(self) -> bool:
        """Whether there is nothing left to train or to test."""
        done = self.beside("done")
        return self.is_trained() and (not self.tests or (done.is_file() and done.read_text() == self._tests()))

    def _tests(self) -> str:
        return json.dumps([asdict(test) for test in self.tests], sort_keys=True)

    def run(self) -> None:
        """Trains what is left to train, then tests; a run that was interrupted goes on."""
        from titans.training.run import train

        if not self.is_trained():
            train(self.config, resume=(self.folder / RUN).is_file())
            if not self.is_trained():  # it was told to end, and has a checkpoint
                return
        old = self.folder / EVAL  # where earlier versions had them
        if old.is_file() and not self.results.is_file():
            self.results.parent.mkdir(exist_ok=True)
            old.replace(self.results)
        for tests in _sharing(self.tests):
            evaluate(str(self.folder), tests, self.results.parent, device=self.config.device)
        if self.tests:
            write_atomically(self.beside("done"), self._tests().encode())


def _sharing(tests: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """The tests, those together that differ in their control alone: they share the reading."""
    groups: list[list[Evaluation]] = []
    for test in tests:
        same = (group for group in groups if replace(test, control=group[0].control) == group[0])
        if (group := next(same, None)) is None:
            groups.append([test])
        else:
            group.append(test)
    return groups


def run_folder(out: Path, label: str, seed: int) -> Path:
    """The folder of one model and seed in the folder of an experiment."""
    name = "".join(c if c.isalnum() or c in "-+." else "-" for c in label)
    return out / "runs" / f"{name}-{seed}"


def fields_of(fields: Mapping[str, Any], label: str, name: str | None) -> dict[str, Any]:
    """Those of the changed fields that are for one model: ``LABEL.FIELD``, and if it is one of ours, ``FIELD``."""
    own = f"{label}."
    every = {key: value for key, value in fields.items() if "." not in key and name in VARIANTS}
    return every | {key.removeprefix(own): value for key, value in fields.items() if key.startswith(own)}


def require_each_once(**lists: Sequence[Any]) -> None:
    """Raises a ``ValueError`` if one of the lists has something twice."""
    for name, values in lists.items():
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"{name} has {value!r} more than once; expected each once")


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raises a ``ValueError`` for a model, data or a test that cannot work, or for a run that differs from its job.

    Better now than in a run after an hour.
    """
    opened: dict[str, Data] = {}
    checked: set[str] = set()
    for job in jobs:
        key = json.dumps(job.config.to_dict() | {"model": {}, "output": "", "seed": 0})  # most jobs have the same data
        if key not in opened:
            opened[key] = open_data(job.config)
        check_model(job, opened[key].vocab_size)
        if (job.folder / RUN).is_file():
            difference = job.config.other_than(job.folder, opened[key].fingerprint)
            if difference is not None:
                raise ValueError(f"{difference}; expected another --out")
        for test in job.tests:
            about = key + json.dumps(asdict(test))
            if about not in checked:
                check_evaluation(test, opened[key].tokenizer)
                checked.add(about)


def check_model(job: Job, vocab_size: int) -> None:
    """Raises a ``ValueError`` for a model that cannot be made, or that a test changes in a way it cannot be."""
    fields = dict(job.config.model)
    if start := fields.pop("pretrained", None):
        known = changed_config(read_config(Path(start) / "config.json"), fields).to_dict()
    else:
        known = model_config(job.config, vocab_size, None).to_dict()
    for test in job.tests:
        if test.fields:
            changed_config(known, test.fields)


def run_jobs(jobs: Sequence[Job], at_a_time: int, progress: Progress = silent) -> None:
    """Runs what is not done yet, ``at_a_time`` side by side with one thread each; a ``ValueError`` if one fails."""
    if at_a_time < 1:
        raise ValueError(f"at_a_time is {at_a_time}; expected at least 1")
    waiting = [job for job in jobs if not job.is_done()]
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    done = len(jobs) - len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                job = waiting.pop(0)
                running[job.name] = job, _start(job)
            for name, (job, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                done += 1
                if process.returncode or not job.is_done():
                    words = job.beside("log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    why = words[-1] if words else "it said nothing"
                    raise ValueError(f"the run {name} failed, see {job.beside('log')}: {why}")
            progress(done, len(jobs), ", ".join(running))
            time.sleep(POLL)
    finally:
        _stop([process for _, process in running.values()])


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes, with time for a checkpoint; those that take longer are killed, as all are by another Ctrl-C."""
    try:
        for process in processes:
            process.terminate()
        end = time.monotonic() + PATIENCE
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()


def _start(job: Job) -> subprocess.Popen[bytes]:
    file = job.beside("yaml")
    about = {"train": job.config.to_dict(), "tests": json.loads(job._tests())}
    write_atomically(file, yaml.safe_dump(about, sort_keys=False).encode())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"from {__name__} import main; main()", str(file)]
    with job.beside("log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)


def main() -> None:
    """What such a process does: the job in a file."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    about = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tests = (Evaluation(**test | {"tasks": tuple(test["tasks"])}) for test in about["tests"])
    Job(TrainConfig(**about["train"]), tuple(tests)).run()


def _end_with_the_parent() -> None:
    """Standard input ends when whoever started the process ends, in whatever way; the run can be resumed."""
    os.read(sys.stdin.fileno(), 1)  # not sys.stdin, whose lock, held by a thread, would abort the process at its end
    os._exit(1)
