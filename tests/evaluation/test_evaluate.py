"""Results grow cell by cell, are kept whatever happens, and are never mixed with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titans import TitansConfig, TitansForCausalLM
from titans.evaluation import evaluate as module
from titans.evaluation.evaluate import EVAL, Evaluation, changed, evaluate
from titans.evaluation.statistics import bootstrap

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
        hits += low <= 0 <= high
    assert 176 <= hits <= 200
    assert bootstrap([0.5, 0.5]) == (0.5, 0.5)
    assert bootstrap([1.0] * 50) == pytest.approx((0.9287, 1.0), abs=1e-4)  # Wilson's
    assert bootstrap([0.0] * 50) == pytest.approx((0.0, 0.0713), abs=1e-4)
    assert bootstrap([0.0, 1.0, 0.5], seed=3) == bootstrap([0.0, 1.0, 0.5], seed=3)
    with pytest.raises(ValueError, match="values is empty"):
        bootstrap([])
