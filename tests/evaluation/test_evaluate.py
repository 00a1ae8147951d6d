"""Results grow cell by cell, are kept whatever happens, and are never mixed with others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titans import TitansConfig, TitansForCausalLM
from titans.evaluation import evaluate as module
from titans.evaluation.evaluate import Evaluation, changed, evaluate, measure
from titans.evaluation.harness import log_likelihoods
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


def of(saved: Path, out: Path, **fields: Any) -> Evaluation:
    return Evaluation(
        **{"model": str(saved), "tasks": ("recall",), "out": out, "settings": SETTINGS, "samples": 4} | fields
    )


def lengths(result: dict[str, Any], task: str = "recall") -> list[int]:
    return [cell["group"]["length"] for cell in result["tasks"][task]["cells"]]


def test_what_was_measured_before_an_interruption_is_kept(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = module.measure, []

    def counted(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(module, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(of(saved, tmp_path / "out"))
    assert lengths(json.loads((tmp_path / "out" / EVAL).read_text())) == [24, 32]
    result = evaluate(of(saved, tmp_path / "out"))
    assert len(calls) == 4 and lengths(result) == [24, 32, 40]
    monkeypatch.undo()
    whole = evaluate(of(saved, tmp_path / "whole"))
    assert whole["tasks"]["recall"]["cells"] == result["tasks"]["recall"]["cells"]


def test_lengths_can_be_added_and_other_settings_are_refused(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(of(saved, out, settings={"lengths": [24]}))
    assert lengths(evaluate(of(saved, out, settings={"lengths": [24, 32]}))) == [24, 32]
    with pytest.raises(ValueError, match="measured with samples 4, not 5; expected the same, or --overwrite"):
        evaluate(of(saved, out, samples=5))
    with pytest.raises(ValueError, match="measured with pairs 8, not 4"):
        evaluate(of(saved, out, settings={"pairs": 4}))
    before = (out / EVAL).read_bytes()
    torch.manual_seed(1)
    TitansForCausalLM(TitansConfig(**FIELDS)).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="has results of another model; expected another --out"):
        evaluate(of(tmp_path / "other", out))
    assert (out / EVAL).read_bytes() == before
    assert lengths(evaluate(of(saved, out, samples=5, settings={"lengths": [24]}), overwrite=True)) == [24]


def test_overwriting_a_task_leaves_the_others(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(of(saved, out, tasks=("reassigned",), settings={}))
    before = evaluate(of(saved, out))["tasks"]
    after = evaluate(of(saved, out, samples=5, settings={"lengths": [24]}), overwrite=True)["tasks"]
    assert after["reassigned"] == before["reassigned"]
    assert (after["recall"]["samples"], lengths({"tasks": after})) == (5, [24])
    torch.manual_seed(1)
    TitansForCausalLM(TitansConfig(**FIELDS)).save_pretrained(tmp_path / "other")
    assert list(evaluate(of(tmp_path / "other", out), overwrite=True)["tasks"]) == ["recall"]
    (out / EVAL).write_text("{")
    with pytest.raises(ValueError, match="cannot be read; expected results of `titans eval`, or --overwrite"):
        evaluate(of(saved, out))
    assert list(evaluate(of(saved, out), overwrite=True)["tasks"]) == ["recall"]


def test_each_task_says_what_call_made_it_and_all_its_lengths(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(of(saved, out, settings={"lengths": [24]}), command="first")
    evaluate(of(saved, out, tasks=("reassigned",), settings={}), command="second")
    evaluate(of(saved, out, settings={"lengths": [32]}), command="third")
    tasks = evaluate(of(saved, out, settings={"lengths": [24]}), command="nothing new")["tasks"]
    assert [call["command"] for call in tasks["recall"]["made"]] == ["first", "third"]
    assert [call["command"] for call in tasks["reassigned"]["made"]] == ["second"]
    assert tasks["recall"]["made"][0]["date"] and tasks["recall"]["made"][0]["versions"]["torch"] == torch.__version__
    assert tasks["recall"]["settings"]["lengths"] == [24, 32] == lengths({"tasks": tasks})


def test_depths_cannot_be_added_to_a_task_that_had_none(saved: Path, tmp_path: Path) -> None:
    evaluate(of(saved, tmp_path / "out"))
    with pytest.raises(ValueError, match=r"measured with axes \['length'\], not \['length', 'depth'\]; expected"):
        evaluate(of(saved, tmp_path / "out", settings={**SETTINGS, "depths": [0.0, 1.0]}))
    assert lengths(json.loads((tmp_path / "out" / EVAL).read_text())) == [24, 32, 40]


def test_wrong_settings_are_said_before_anything_is_measured(saved: Path, tmp_path: Path) -> None:
    for settings, said in (
        ({}, "perplexity needs text"),
        ({"perplexity.foo": 1, "data": "text"}, "foo is not a setting of perplexity"),
        ({"perplexity.length": "abc", "data": "text"}, "length is 'abc'; expected a whole number"),
        ({"data": 5}, "data is 5; expected the name of a file or folder"),
    ):
        with pytest.raises(ValueError, match=said):
            evaluate(of(saved, tmp_path / "out", tasks=("recall", "perplexity"), settings=settings))
    assert not (tmp_path / "out").exists()


def test_lambada_has_the_perplexity_of_its_words(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = TitansForCausalLM(TitansConfig(**FIELDS | {"vocab_size": 257})), byte_tokenizer()
    rows = [{"context": "She fed the", "continuation": "cat"}, {"context": "He stroked the", "continuation": "kitten"}]
    (tmp_path / "lambada.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Lambada(data=str(tmp_path / "lambada.jsonl"))
    cell = measure(model, task, {"set": "lambada"}, tokenizer, of(tmp_path, tmp_path))
    losses = log_likelihoods(model, tokenizer, [(row["context"], f" {row['continuation']}") for row in rows])
    assert cell["whole"]["perplexity"] == pytest.approx(math.exp(-sum(losses) / 2), rel=1e-5)


def test_controls_and_changed_fields_stand_beside_the_plain_results(saved: Path, tmp_path: Path) -> None:
    for fields in ({}, {"control": "reset"}, {"fields": {"memory_mode": "chunked", "memory_chunk_size": 4}}):
        result = evaluate(of(saved, tmp_path / "out", **fields))
    assert list(result["tasks"]) == ["recall", "recall reset", "recall memory_chunk_size=4 memory_mode=chunked"]
    losses = [entry["cells"][0]["loss"] for entry in result["tasks"].values()]
    assert len(set(losses)) == 3


def test_a_seed_decides_the_sequences(saved: Path, tmp_path: Path) -> None:
    first, again, other = (evaluate(of(saved, tmp_path / str(i), seed=seed)) for i, seed in enumerate((0, 0, 1)))
    cells = [result["tasks"]["recall"]["cells"][0]["loss"] for result in (first, again, other)]
    assert cells[0] == cells[1] != cells[2]


def test_a_changed_model_keeps_its_weights_and_an_impossible_change_is_refused(saved: Path) -> None:
    model = TitansForCausalLM.from_pretrained(saved)
    other = changed(model, {"memory_chunk_size": 4, "memory_mode": "chunked"})
    assert other.config.memory_chunk_size == 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="memory_size is not a field of the model's config"):
        changed(model, {"memory_size": 4})
    with pytest.raises(ValueError, match=r"the model cannot be had with \{'hidden_size': 32\}"):
        changed(model, {"hidden_size": 32})


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
