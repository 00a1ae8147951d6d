"""Experiments on text: what they are told is checked, what diverged is shown, and texts say what was run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.finished import finish, text
from titans.experiments.ablation import PAPER, about_ablation, language_models, paper_table, table_rows
from titans.experiments.catalogue import find_experiment
from titans.experiments.depth import depth_table
from titans.experiments.lm import LMExperiment, equal_budgets, lm_section, run_experiment, summarise_runs


def experiment(**fields: Any) -> LMExperiment:
    return LMExperiment(**{"data": "data", "out": "out", "models": ("lmm", "mac"), **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seeds": (0, 0)}, "seeds has 0 more than once; expected each once"),
        ({"models": ("mac", "lmm", "mac")}, "models has 'mac' more than once; expected each once"),
        ({"length": 0}, "length is 0; expected at least 1"),
        ({"batch_tokens": 0}, "batch_tokens is 0; expected at least 1"),
        ({"tokens": -1}, "tokens is -1; expected at least 1"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        experiment(**fields)


def test_a_batch_that_is_shorter_than_a_sequence_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^batch_tokens is 64; expected a multiple of 256"):
        experiment(batch_tokens=64).config("mac", 0)


def test_a_quick_experiment_is_a_few_steps_of_one_seed() -> None:
    quick = experiment().quick()
    config = quick.config("mac", 0)
    assert (quick.seeds, config.steps, quick.tokens) == ((0,), 4, 4 * 1024)
    assert config.eval_tokens == config.final_eval_tokens == 1024 and config.eval_every == 4


def run(model: str, seed: int, loss: float | None) -> dict[str, Any]:
    curve = [(1024, 5.0), (2048, loss)]
    figures = {"eval_loss": loss, "parameters": 1000.0, "cpu_seconds": 60.0, "learning_rate": 0.001, "tokens": 2048}
    return {"model": model, "seed": seed, "curve": curve, **figures}


def test_a_model_that_diverged_is_last_and_has_no_mean() -> None:
    all_runs = [run("a", 0, None), run("a", 1, 1.0), run("b", 0, 3.0), run("b", 1, 2.0), run("c", 0, 900.0)]
    rows = summarise_runs(all_runs)
    assert [(row["model"], row["loss"]) for row in rows] == [("b", 2.5), ("c", 900.0), ("a", None)]
    about = {"experiment": {"seeds": [0, 1], "length": 256, "batch_tokens": 1024}, "data": {"vocabulary": 512}}
    section = lm_section({**about, "runs": all_runs, "table": rows})
    assert section.tables[0].rows[-1][:6] == ["a", "1,000", "NaN", "", "NaN, 1.000", "NaN"]
    assert "after 2,048 training tokens" in section.paragraphs[0] and "seeds 0, 1" in section.paragraphs[0]
    results = [{"model": {"name": "a"}, "tasks": {"perplexity": {"cells": [{"value": None}]}}}]
    assert depth_table(rows[-1:], results).rows == [["a", "1,000", "NaN", "NaN", "1.0"]]


def test_equal_times_are_whole_batches_in_the_median_time() -> None:
    table = [{"model": name, "cpu_minutes": minutes} for name, minutes in (("lmm", 4.0), ("mac", 8.0), ("x", 5.0))]
    asked = experiment(tokens=10 * 1024)
    assert equal_budgets(asked, table) == {"lmm": 12 * 1024, "mac": 6 * 1024, "x": 10 * 1024}
    assert replace(asked, budgets=equal_budgets(asked, table)).config("mac", 0).steps == 6


def test_a_run_that_diverged_does_not_cost_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(monkeypatch, lambda job: math.nan if job.name == "mac-0" else 3.0)
    asked = experiment(data=text(tmp_path), out=str(tmp_path / "out"), seeds=(0,), length=64, batch_tokens=256)
    report = run_experiment(asked, command="titans experiment lm", equal_time=True)
    assert [row["loss"] for row in report["table"]] == [3.0, None]
    assert json.loads((tmp_path / "out" / "lm.json").read_text(), parse_constant=pytest.fail)["table"]
    assert [row["loss"] for row in report["equal_time"]["table"]] == [3.0, None]
    assert "titans experiment lm" in (tmp_path / "out" / "lm.md").read_text()
    for file in ("report.html", "lm-training.png", "lm-final.png"):
        assert (tmp_path / "out" / file).is_file()


def recalled(label: str, seed: int, values: dict[int, float | None]) -> dict[str, Any]:
    cells = [{"group": {"length": length}, "value": value} for length, value in values.items()]
    entry = {"settings": {"pairs": 8}, "trained_at": 64, "cells": cells}
    return {"model": {"name": label, "seed": seed}, "tasks": {"recall": entry}}


def test_the_table_of_the_ablation_says_what_was_run_and_what_diverged() -> None:
    recall = find_experiment("recall")
    labels = [*recall.models]
    results = [recalled(label, seed, {128: None if seed else 0.5, 64: 1.0}) for seed in (0, 1) for label in labels]
    rows = table_rows(summarise_runs([run("LMM", 0, None)]), results)
    table = paper_table(rows)
    assert table.header[1:5] == ["perplexity", "loss ±", "recall at 64", "recall at 128"]
    assert table.rows[0][:5] == ["LMM", "NaN", "NaN", "1.000 (1.00, 1.00)", "0.250 (0.50, NaN)"]

    language, tasks = experiment(seeds=(3, 4)).quick(), replace(recall, seeds=(3, 4)).quick()
    text = about_ablation(language, tasks, results)
    assert "after 4,096 tokens" in text and "Both with seed 3." in text and "8 pairs, trained at 64 tokens" in text
    assert "swap: the question is asked with the memory of another sequence" in text and "chunks of 4, 16, 64" in text
    assert "tampered with (reset: " in about_ablation(language, replace(tasks, controls=tasks.controls[1:2]), results)


def test_the_ablation_on_text_has_the_models_of_the_table() -> None:
    models = language_models()
    assert models.keys() == PAPER.keys()
    shape: dict[str, Any] = {"hidden_size": 192, "memory_heads": 4, "memory_head_dim": 64, "memory_depth": 2}
    shape |= {"token_skip": False, "gate": None, "memory_momentum": True}  # the paper's blocks, all alike
    lmm, mac = shape | {"name": "lmm", "num_hidden_layers": 3}, shape | {"name": "mac", "num_hidden_layers": 2}
    assert (models["LMM"], models["MAC"], models["without momentum"]) == (lmm, mac, lmm | {"memory_momentum": False})
    assert models["linear memory"] == lmm | {"memory_depth": 1}
