"""Experiments on tasks: all runs and tests are made once, and what they report is what the runs say."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from titans.cli import main as command
from titans.evaluation.kinds import make_measures
from titans.evaluation.measure import Evaluation
from titans.experiments import runs
from titans.experiments.runs import Job, main, run_jobs
from titans.experiments.tasks import TaskExperiment, run_tasks
from titans.files import EVAL, RESULT, locked
from titans.training.config import TrainConfig

FIELDS: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "memory_heads": 1, "segment_size": 8,
    "window_size": 8, "num_persistent_tokens": 2, "intermediate_size": 16,
}  # fmt: skip
SETTINGS = {"pairs": 2}
EXPERIMENT = TaskExperiment(
    "small",
    "A small experiment",
    "Two models.",
    {"MAC": {"name": "mac", **FIELDS}, "window": {"name": "sliding-window", **FIELDS}},
    {"data": "task:recall", "task": SETTINGS, "length": 16, "batch_tokens": 64, "steps": 4, "trackers": []},
    [Evaluation(("recall",), {**SETTINGS, "lengths": [16, 32]}, samples=4)],
    [Evaluation(("recall",), {**SETTINGS, "lengths": [16]}, samples=4, control="swap")],
).quick()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are made in this process, one after the other; the names of those that were started."""
    started = []

    class Done:
        returncode = 0

        def poll(self) -> int:
            return 0

    def start(job: Job) -> Done:
        started.append(job.name)
        job.run()
        return Done()

    monkeypatch.setattr(runs, "_start", start)
    monkeypatch.setattr(runs, "POLL", 0.0)
    return started


def test_an_experiment_trains_tests_and_reports_and_does_nothing_twice(here: list[str], tmp_path: Path) -> None:
    report = run_tasks(EXPERIMENT, tmp_path, command="titans experiment small")
    assert here == ["MAC-0", "window-0"]
    mac, window = report["results"]
    assert (mac["model"]["name"], window["model"]["name"]) == ("MAC", "window")
    assert list(mac["tasks"]) == ["recall", "recall swap"] and list(window["tasks"]) == ["recall"]
    assert [cell["group"]["length"] for cell in mac["tasks"]["recall"]["cells"]] == [16, 32]
    assert mac["training"]["steps"] == 4
    assert json.loads((tmp_path / "small.json").read_text())["results"] == report["results"]
    text = (tmp_path / "small.md").read_text()
    assert "titans experiment small" in text and "| MAC |" in text
    assert (tmp_path / "report.html").is_file() and (tmp_path / "recall.png").is_file()

    again = run_tasks(EXPERIMENT, tmp_path)
    assert here == ["MAC-0", "window-0"] and again["results"] == report["results"]
    longer = replace(EXPERIMENT, tests=[Evaluation(("recall",), {**SETTINGS, "lengths": [16, 32, 64]}, samples=2)])
    grown = run_tasks(longer, tmp_path)
    assert len(here) == 4 and len(grown["results"][0]["tasks"]["recall"]["cells"]) == 3
    with pytest.raises(ValueError, match=r"has batch_tokens 64, this one 32; expected another --out"):
        run_tasks(replace(EXPERIMENT, train={**EXPERIMENT.train, "batch_tokens": 32}), tmp_path)


def test_tests_that_differ_in_their_control_alone_share_the_reading() -> None:
    plain = Evaluation(("recall",), SETTINGS)
    swap, more = replace(plain, control="swap"), replace(plain, samples=3)
    assert runs._sharing([plain, more, swap]) == [[plain, swap], [more]]


def test_an_experiment_can_begin_with_the_models_of_another(here: list[str], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begun = replace(EXPERIMENT.only(["window"]), start=first, train={**EXPERIMENT.train, "learning_rate": 1e-9})
    said = r"^start is .*first, which has no trained window-0; expected the folder of an experiment$"
    with pytest.raises(ValueError, match=said):
        run_tasks(begun, second)
    before = run_tasks(EXPERIMENT.only(["window"]), first)["results"][0]
    wrong = [Evaluation(("recall",), SETTINGS, fields={"window_siz": 4})]
    with pytest.raises(ValueError, match="window_siz is not a field of the model's config"):
        run_tasks(replace(begun, tests=wrong), second)
    after = run_tasks(begun, second)["results"][0]
    assert after["model"]["name"] == "window"
    assert after["training"]["eval_loss"] == pytest.approx(before["training"]["eval_loss"], rel=1e-4)


def test_fields_of_the_models_can_be_changed_at_the_start_and_later(here: list[str], tmp_path: Path) -> None:
    first = replace(EXPERIMENT, fields={"memory_gate_cutoff": 0.1, "window.window_size": 4})
    assert [job.config.model.get("memory_gate_cutoff") for job in first.jobs(tmp_path)] == [0.1, None]
    assert [job.config.model["window_size"] for job in first.jobs(tmp_path)] == [8, 4]
    run_tasks(EXPERIMENT.only(["MAC"]), tmp_path / "first")
    later = replace(EXPERIMENT.only(["MAC"]), start=tmp_path / "first", fields={"memory_cache_segment_size": 8})
    with pytest.raises(ValueError, match="memory_cach is not a field of the model's config"):
        run_tasks(replace(later, fields={"memory_cach": 8}), tmp_path / "second")
    assert run_tasks(later, tmp_path / "second")["results"][0]["model"]["fields"]["memory_cache_segment_size"] == 8
    with pytest.raises(ValueError, match=r"^field has 'MCA.window_size': .*MAC"):
        replace(EXPERIMENT, fields={"MCA.window_size": 4})
    assert len(replace(EXPERIMENT, fields={"memory_writes": False}).jobs(tmp_path)[0].tests) == 1


def test_a_run_that_diverged_does_not_cost_the_report(here: list[str], tmp_path: Path) -> None:
    one = EXPERIMENT.only(["window"])
    (job,) = one.jobs(tmp_path)
    job.run()
    figures = json.loads((job.folder / RESULT).read_text()) | {"eval_loss": math.nan, "eval_accuracy": math.inf}
    (job.folder / RESULT).write_text(json.dumps(figures))
    report = run_tasks(one, tmp_path)
    assert not here and report["results"][0]["training"]["eval_loss"] is None
    assert "| NaN | NaN |" in (tmp_path / "small.md").read_text()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train": {**EXPERIMENT.train, "task": {"pairs": 99}}}, "pairs is 99; expected at most num_keys"),
        ({"tests": [Evaluation(("needle-essay",), {"haystack": "nowhere"})]}, "nowhere has no text"),
        ({"tests": [Evaluation(("recall",), {"lengths": [4]})]}, "lengths"),
        ({"tests": [Evaluation(("needle-noise",), {"lengths": [512]})]}, "tokenizer is None; expected one"),
        ({"tests": [Evaluation(("perplexity",), {})]}, "perplexity needs text"),
        (
            {"tests": [Evaluation(("perplexity",), {"data": __file__}, control="swap")]},
            "control is 'swap'; expected none",
        ),
        (
            {"tests": [Evaluation(("recall",), SETTINGS, fields={"window_siz": 4})]},
            r"window_siz is not a field of the model's config: did you mean window_size\?",
        ),
        (
            {"controls": [Evaluation(("recall",), SETTINGS, fields={"memory_mode": "chunkd"})]},
            "the model cannot be changed to {'memory_mode': 'chunkd'}: ",
        ),
        ({"models": {"MAC": {"name": "mac", "memory_dept": 2}}}, "memory_dept is not a field of mac: did you mean mem"),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anything_is_trained(
    fields: dict[str, Any], said: str, here: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        run_tasks(replace(EXPERIMENT, **fields), tmp_path)
    assert not here and not list(tmp_path.iterdir())


def test_results_of_a_run_are_where_titans_eval_has_them_and_are_moved_there(here: list[str], tmp_path: Path) -> None:
    one = EXPERIMENT.only(["window"])
    report = run_tasks(one, tmp_path)
    (job,) = one.jobs(tmp_path)
    assert job.results == job.folder / "eval" / EVAL
    job.results.replace(job.folder / EVAL)  # as an earlier version left them
    job.beside("done").unlink()
    assert run_tasks(one, tmp_path)["results"] == report["results"]
    assert not (job.folder / EVAL).exists()


def test_a_second_process_is_told_that_the_folder_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path, "titans experiment recall"), pytest.raises(SystemExit) as end:
        command(["experiment", "recall", "--out", str(tmp_path), "--models", "none"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"{tmp_path} is in use by another process (titans experiment recall, process" in said


def test_a_seed_or_a_model_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^seeds has 1 more than once; expected each once$"):
        replace(EXPERIMENT, seeds=(1, 0, 1))
    with pytest.raises(ValueError, match=r"^models has 'MAC' more than once; expected each once$"):
        EXPERIMENT.only(["MAC", "MAC"])
    with pytest.raises(ValueError, match=r"^models has 'MOC': did you mean MAC\?$"):
        EXPERIMENT.only(["MOC"])


def test_models_whose_runs_would_share_a_folder_are_refused() -> None:
    mac = EXPERIMENT.models["MAC"]
    with pytest.raises(ValueError, match=r"^models has 'a/b' and 'a b', whose runs would share a folder"):
        replace(EXPERIMENT, models={"a/b": mac, "a b": mac})


def test_a_field_of_the_training_that_is_unknown_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^train has 'step': did you mean steps\?$"):
        replace(EXPERIMENT, train={**EXPERIMENT.train, "step": 3})
    with pytest.raises(ValueError, match=r"^the name of MAC is 'mak': did you mean ma[cgl]\?$"):
        replace(EXPERIMENT, models={"MAC": {"name": "mak"}})


def test_a_quick_experiment_tests_two_short_lengths_and_two_depths() -> None:
    depths = [0.0, 0.25, 0.5, 1.0]
    test = Evaluation(
        ("needle-noise", "recall", "mqar"), {"lengths": [2048, 512, 1024], "recall.depths": depths}, samples=9
    )
    (quick,) = replace(EXPERIMENT, tests=[test], controls=[]).quick().tests
    needle, recall, mqar = (measure.describe(())["settings"] for measure in make_measures(quick))
    assert quick.samples == 2
    assert needle["lengths"] == recall["lengths"] == [512, 1024]
    assert needle["depths"] == recall["depths"] == [0.0, 0.25]
    assert len(mqar["cells"]) == 5


def test_a_quick_experiment_goes_to_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(experiment: TaskExperiment, out: Path, *options: Any) -> dict[str, Any]:
        asked.append(out)
        return {"name": "recall", "results": []}

    monkeypatch.setattr("titans.experiments.tasks.run_tasks", run)
    for words in (["--quick"], []):
        with pytest.raises(SystemExit):
            command(["experiment", "recall", "--out", str(tmp_path), *words])
    assert asked == [tmp_path / "quick", tmp_path]


def test_a_job_file_is_all_that_a_process_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = EXPERIMENT.jobs(tmp_path)[0]
    about = {"train": job.config.to_dict(), "tests": json.loads(job._tests())}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(about))
    monkeypatch.setattr("sys.argv", ["job", str(tmp_path / "job.yaml")])
    monkeypatch.setattr(runs, "_end_with_the_parent", lambda: None)  # whose input is not this one's
    assert not job.is_done()
    main()
    assert job.is_done()
    with_more = Job(job.config, (*job.tests, Evaluation(("recall",), SETTINGS, samples=3)))
    assert with_more.is_trained() and not with_more.is_done()


@pytest.mark.parametrize("stubborn", [False, True])
def test_runs_that_are_interrupted_may_save_before_they_are_killed(
    stubborn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = "pass" if stubborn else f"open({str(tmp_path / 'saved')!r}, 'w'), sys.exit()"
    code = (
        f"import signal, sys, time\ndef end(*_): {saving}\n"
        "signal.signal(signal.SIGTERM, end)\nprint(flush=True)\nwhile True: time.sleep(0.01)"
    )
    started = []

    def start(job: Job) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()  # it listens
        started.append(process)
        return process

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_start", start)
    monkeypatch.setattr(runs, "PATIENCE", 0.2 if stubborn else 20.0)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(EXPERIMENT.jobs(tmp_path / "out"), 1, interrupt)
    (process,) = started
    assert process.wait(5) == (-signal.SIGKILL if stubborn else 0)
    assert (tmp_path / "saved").exists() is not stubborn


@pytest.mark.slow
def test_a_run_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    config = TrainConfig(**{**EXPERIMENT.train, "task": {"pairs": 99}}, output=str(tmp_path / "runs" / "bad-0"))
    with pytest.raises(ValueError, match=r"the run bad-0 failed, see .*bad-0.log: ValueError: .*pairs is 99"):
        run_jobs([Job(config)], 1)


@pytest.mark.slow
def test_runs_end_with_whoever_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titans", "experiment", "recall", "--models", "LMM", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        try:
            children = _wait_for(lambda: psutil.Process(parent.pid).children(recursive=True))
        finally:
            parent.kill()
    assert children
    _wait_for(lambda: not any(child.is_running() for child in children))


def _wait_for(condition: Callable[[], Any]) -> Any:
    for _ in range(600):
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come about in a minute")
