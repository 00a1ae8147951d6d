"""Results grow cell by cell, are kept whatever happens, and are never mixed with others."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.evaluation.choices import log_likelihoods
from titans import TitansConfig, TitansForCausalLM
from titans.evaluation import score
from titans.evaluation.evaluate import evaluate, results_folder
from titans.evaluation.kinds import TaskMeasure
from titans.evaluation.measure import Evaluation
from titans.files import EVAL
from titans.models.tokenizer import byte_tokenizer
from titans.report.statistics import bootstrap
from titans.tasks.language import Lambada

FIELDS: dict[str, Any] = {
    "variant": "mac", "vocab_size": 192, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "memory_heads": 1, "segment_size": 8, "num_persistent_tokens": 2, "intermediate_size": 16,
}  # fmt: skip
SETTINGS = {"lengths": [24, 32, 40]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    TitansForCausalLM(TitansConfig(**FIELDS)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def asked(**fields: Any) -> Evaluation:
    return Evaluation(**{"tasks": ("recall",), "settings": SETTINGS, "samples": 4} | fields)


def lengths(result: dict[str, Any], task: str = "recall") -> list[int]:
    return [cell["group"]["length"] for cell in result["tasks"][task]["cells"]]


def test_what_was_measured_before_an_interruption_is_kept(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = TaskMeasure.measure, []

    def counted(self: TaskMeasure, *arguments: Any) -> Any:
        calls.append(arguments[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    monkeypatch.setattr(TaskMeasure, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(str(saved), asked(), tmp_path / "out")
    assert lengths(json.loads((tmp_path / "out" / EVAL).read_text())) == [24, 32]
    result = evaluate(str(saved), asked(), tmp_path / "out")
    assert len(calls) == 4 and lengths(result) == [24, 32, 40]
    monkeypatch.undo()
    whole = evaluate(str(saved), asked(), tmp_path / "whole")
    assert whole["tasks"]["recall"]["cells"] == result["tasks"]["recall"]["cells"]


def test_a_batch_that_was_read_before_an_interruption_is_not_read_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    inner = score.score_each

    def counted(model: Any, examples: Any, controls: Any) -> Any:
        read.append(len(examples))
        if len(read) == 2:
            raise KeyboardInterrupt
        return inner(model, examples, controls)

    monkeypatch.setattr(score, "score_each", counted)
    monkeypatch.setattr(score, "rows_at_once", lambda *_: 2)
    both = [asked(settings={"lengths": [24]}), asked(settings={"lengths": [24]}, control="swap")]
    with pytest.raises(KeyboardInterrupt):
        evaluate(str(saved), both, tmp_path / "out")
    half = json.loads((tmp_path / "out" / EVAL).read_text())["tasks"]
    assert [(half[key]["cells"][0]["count"], half[key]["cells"][0]["missing"]) for key in half] == [(2, 2), (2, 2)]
    result = evaluate(str(saved), both, tmp_path / "out")["tasks"]
    assert read == [2, 2, 2]
    monkeypatch.undo()
    whole = evaluate(str(saved), asked(settings={"lengths": [24]}), tmp_path / "whole")["tasks"]
    assert result["recall"]["cells"] == whole["recall"]["cells"] and "missing" not in result["recall swap"]["cells"][0]
    (cost,) = result["recall"]["reading"]
    assert cost["group"] == {"length": 24} and cost["seconds"] > 0 and cost["peak_memory"] > 1 << 20
    with pytest.raises(ValueError, match="differ in more than their control; expected one call for each"):
        evaluate(str(saved), [asked(), asked(seed=1)], tmp_path / "other")


def test_lengths_can_be_added_and_other_settings_are_refused(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(str(saved), asked(settings={"lengths": [24]}), out)
    assert lengths(evaluate(str(saved), asked(settings={"lengths": [24, 32]}), out)) == [24, 32]
    with pytest.raises(ValueError, match="measured with samples 4, not 5; expected the same, or --overwrite"):
        evaluate(str(saved), asked(samples=5), out)
    with pytest.raises(ValueError, match="measured with pairs 8, not 4"):
        evaluate(str(saved), asked(settings={"pairs": 4}), out)
    before = (out / EVAL).read_bytes()
    torch.manual_seed(1)
    TitansForCausalLM(TitansConfig(**FIELDS)).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="has results of another model; expected another --out"):
        evaluate(str(tmp_path / "other"), asked(), out)
    assert (out / EVAL).read_bytes() == before
    assert lengths(evaluate(str(saved), asked(samples=5, settings={"lengths": [24]}), out, overwrite=True)) == [24]


def test_a_setting_that_older_results_do_not_have_was_at_its_default(saved: Path, tmp_path: Path) -> None:
    evaluate(str(saved), asked(settings={"lengths": [24]}), tmp_path)
    kept = json.loads((tmp_path / EVAL).read_text())
    del kept["tasks"]["recall"]["settings"]["pairs"]
    (tmp_path / EVAL).write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="measured with pairs 8, not 4"):
        evaluate(str(saved), asked(settings={"pairs": 4}), tmp_path)
    assert lengths(evaluate(str(saved), asked(settings={"lengths": [24, 32]}), tmp_path)) == [24, 32]


def test_a_task_in_a_file_of_its_own_goes_on_where_it_was(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom titans.tasks.recall import Recall\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Recall):\n    name = 'mine'\n"
    )
    for each in ([24], [24, 32]):
        result = evaluate(str(saved), asked(tasks=(str(file),), settings={"lengths": each}), tmp_path / "out")
    assert [cell["group"]["length"] for cell in result["tasks"]["mine"]["cells"]] == [24, 32]


def test_overwriting_a_task_leaves_the_others(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(str(saved), asked(tasks=("reassigned",), settings={}), out)
    before = evaluate(str(saved), asked(), out)["tasks"]
    after = evaluate(str(saved), asked(samples=5, settings={"lengths": [24]}), out, overwrite=True)["tasks"]
    assert after["reassigned"] == before["reassigned"]
    assert (after["recall"]["samples"], lengths({"tasks": after})) == (5, [24])
    torch.manual_seed(1)
    TitansForCausalLM(TitansConfig(**FIELDS)).save_pretrained(tmp_path / "other")
    assert list(evaluate(str(tmp_path / "other"), asked(), out, overwrite=True)["tasks"]) == ["recall"]
    (out / EVAL).write_text("{")
    with pytest.raises(ValueError, match="cannot be read; expected results of `titans eval`, or --overwrite"):
        evaluate(str(saved), asked(), out)
    assert list(evaluate(str(saved), asked(), out, overwrite=True)["tasks"]) == ["recall"]


def test_each_task_says_what_call_made_it_and_all_its_lengths(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(str(saved), asked(settings={"lengths": [24]}), out, command="first")
    evaluate(str(saved), asked(tasks=("reassigned",), settings={}), out, command="second")
    evaluate(str(saved), asked(settings={"lengths": [32]}), out, command="third")
    tasks = evaluate(str(saved), asked(settings={"lengths": [24]}), out, command="nothing new")["tasks"]
    assert [call["command"] for call in tasks["recall"]["made"]] == ["first", "third"]
    assert [call["command"] for call in tasks["reassigned"]["made"]] == ["second"]
    assert tasks["recall"]["made"][0]["date"] and tasks["recall"]["made"][0]["versions"]["torch"] == torch.__version__
    assert tasks["recall"]["settings"]["lengths"] == [24, 32] == lengths({"tasks": tasks})


def test_depths_cannot_be_added_to_a_task_that_had_none(saved: Path, tmp_path: Path) -> None:
    evaluate(str(saved), asked(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"measured with axes \['length'\], not \['length', 'depth'\]; expected"):
        evaluate(str(saved), asked(settings={**SETTINGS, "depths": [0.0, 1.0]}), tmp_path / "out")
    assert lengths(json.loads((tmp_path / "out" / EVAL).read_text())) == [24, 32, 40]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"settings": {}}, "perplexity needs text"),
        ({"settings": {"perplexity.foo": 1, "data": "text"}}, "foo is not a setting of perplexity"),
        ({"settings": {"perplexity.length": "abc", "data": "text"}}, "length is 'abc'; expected a whole number"),
        ({"settings": {"data": 5}}, "data is 5; expected the name of a file or folder"),
        ({"settings": {"data": "nowhere"}}, "nowhere has no text"),
        ({"tasks": ("needle-noise",), "settings": {"lengths": [2048, 16]}}, "length is 16; expected at least"),
        (
            {"tasks": ("perplexity",), "settings": {"data": __file__}, "control": "swap"},
            "as perplexity asks no question",
        ),
        (
            {"tasks": ("piqa",), "settings": {}, "control": "reset"},
            "control is 'reset'; expected none, as piqa asks no",
        ),
        ({"tasks": ("recal",)}, "^task is 'recal': did you mean recall[?]$"),
        ({"tasks": ("perplexityy",)}, "did you mean perplexity[?]$"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    TitansForCausalLM(TitansConfig(**FIELDS | {"vocab_size": 257})).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=said):
        evaluate(str(tmp_path / "model"), asked(**{"tasks": ("recall", "perplexity")} | fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_evaluation_checks_what_it_is_asked() -> None:
    for fields, said in (
        ({"tasks": ()}, "tasks is empty"),
        ({"samples": 0}, "samples is 0; expected at least 1"),
        ({"seed": -1}, "seed is -1; expected at least 0"),
        ({"control": "off"}, "control is 'off'; expected one of no-writes, reset, swap"),
    ):
        with pytest.raises(ValueError, match=said):
            asked(**fields)


def test_results_are_in_the_folder_of_the_model(saved: Path) -> None:
    evaluate(str(saved), asked(settings={"lengths": [24]}))
    assert (saved / "eval" / EVAL).is_file()
    assert results_folder("owner/model") == Path("eval/model")


def test_results_of_an_earlier_version_are_gone_on_with(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 9)
    torch.manual_seed(0)
    TitansForCausalLM(TitansConfig(**FIELDS | {"vocab_size": 257})).save_pretrained(saved)
    names, settings = ("recall", "perplexity"), {"recall.lengths": [24], "data": str(tmp_path / "text.txt")}
    out = tmp_path / "out"
    evaluate(str(saved), asked(tasks=names, settings=settings), out)
    old = json.loads((out / EVAL).read_text())
    assert old["tasks"]["perplexity"]["settings"] == {"data": str(tmp_path / "text.txt")}  # what was given, as ever
    for entry in old["tasks"].values():
        del entry["made"]
    (out / EVAL).write_text(json.dumps(old))
    result = evaluate(str(saved), asked(tasks=names, settings=settings | {"recall.lengths": [24, 32]}), out)
    assert lengths(result) == [24, 32]
    assert result["tasks"]["perplexity"]["cells"] == old["tasks"]["perplexity"]["cells"]


def test_what_another_evaluation_adds_meanwhile_is_kept(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = TaskMeasure.measure

    def interrupted(self: TaskMeasure, *arguments: Any) -> Any:
        if self.name == "recall":  # all of another evaluation while a cell of this one is being measured
            evaluate(str(saved), asked(tasks=("reassigned",), settings={}), tmp_path / "out")
        return measure(self, *arguments)

    monkeypatch.setattr(TaskMeasure, "measure", interrupted)
    result = evaluate(str(saved), asked(), tmp_path / "out")
    assert {name: len(entry["cells"]) for name, entry in result["tasks"].items()} == {"recall": 3, "reassigned": 4}
    assert result == json.loads((tmp_path / "out" / EVAL).read_text())


@pytest.mark.slow
def test_two_evaluations_at_once_keep_both_results(saved: Path, tmp_path: Path) -> None:
    def start(task: str, *settings: str) -> subprocess.Popen[bytes]:
        words = ["eval", str(saved), "--tasks", task, "--samples", "1", "--out", str(tmp_path / "out")]
        return subprocess.Popen([sys.executable, "-m", "titans", *words, *settings], stdout=subprocess.DEVNULL)

    lengths = ",".join(map(str, range(24, 64)))
    started = [start("recall", "--set", f"lengths={lengths}"), start("parity", "--set", f"lengths={lengths}")]
    assert [process.wait(300) for process in started] == [0, 0]
    result = json.loads((tmp_path / "out" / EVAL).read_text())
    assert {name: len(entry["cells"]) for name, entry in result["tasks"].items()} == {"recall": 40, "parity": 40}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Parity" in page and "Associative recall" in page


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_measured(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="cannot be written to"):
        evaluate(str(saved), asked(), tmp_path / "out")


def test_lambada_has_the_perplexity_of_its_words(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = TitansForCausalLM(TitansConfig(**FIELDS | {"vocab_size": 257})), byte_tokenizer()
    rows = [{"context": "She fed the", "continuation": "cat"}, {"context": "He stroked the", "continuation": "kitten"}]
    (tmp_path / "lambada.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Lambada(data=str(tmp_path / "lambada.jsonl"))
    (grown,) = TaskMeasure(task).measure(model, tokenizer, {"set": "lambada"}, asked(), [None], {})
    (cell,) = grown[None]
    losses = log_likelihoods(model, tokenizer, [(row["context"], f" {row['continuation']}") for row in rows])
    assert cell["whole"]["perplexity"] == pytest.approx(math.exp(-sum(losses) / 2), rel=1e-5)


def test_controls_and_changed_fields_stand_beside_the_plain_results(saved: Path, tmp_path: Path) -> None:
    for fields in ({}, {"control": "reset"}, {"fields": {"memory_mode": "chunked", "memory_chunk_size": 4}}):
        result = evaluate(str(saved), asked(**fields), tmp_path / "out")
    assert list(result["tasks"]) == ["recall", "recall reset", "recall memory_chunk_size=4 memory_mode=chunked"]
    losses = [entry["cells"][0]["loss"] for entry in result["tasks"].values()]
    assert len(set(losses)) == 3


def test_a_seed_decides_the_sequences(saved: Path, tmp_path: Path) -> None:
    first, again, other = (
        evaluate(str(saved), asked(seed=seed), tmp_path / str(i)) for i, seed in enumerate((0, 0, 1))
    )
    cells = [result["tasks"]["recall"]["cells"][0]["loss"] for result in (first, again, other)]
    assert cells[0] == cells[1] != cells[2]


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for number in range(200):
        low, high = bootstrap(random.normal(size=40).tolist(), seed=number)
        assert low is not None and high is not None
        hits += low <= 0 <= high
    assert 176 <= hits <= 200
    assert bootstrap([0.5, 0.5]) == (0.5, 0.5)
    assert bootstrap([1.0] * 50) == pytest.approx((0.9287, 1.0), abs=1e-4)  # Wilson's
    assert bootstrap([0.0] * 50) == pytest.approx((0.0, 0.0713), abs=1e-4)
    assert bootstrap([0.0, 1.0, 0.5], seed=3) == bootstrap([0.0, 1.0, 0.5], seed=3)
    assert bootstrap([0.7]) == bootstrap([1.0]) == (None, None)  # one value says nothing about how sure it is
    with pytest.raises(ValueError, match="values is empty"):
        bootstrap([])
