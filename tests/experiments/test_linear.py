"""Is it secretly linear attention: what is trained and tested, how the inner loss is measured, and what tables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from titans import TitansConfig, TitansForCausalLM
from titans.experiments.linear import (
    CHANGES,
    FIELD,
    ROWS,
    TITANS,
    answer,
    inner_loss,
    inner_table,
    run_linear,
    task_experiment,
    task_jobs,
)
from titans.layers.binding import BINDINGS
from titans.training.prepare import prepare


def test_every_binding_is_trained_and_only_titans_is_changed_at_test_time() -> None:
    assert {row[FIELD] for row in ROWS.values() if FIELD in row} == {*BINDINGS}
    jobs = task_jobs(task_experiment("parity", (0, 1), steps=7), Path("out"))
    assert [label for label, _ in jobs] == [*ROWS, *ROWS]
    for label, job in jobs:
        fields = [test.fields for test in job.tests]
        assert fields == [{}, *({FIELD: name} for name in CHANGES if label == TITANS)]
        assert job.config.steps == 7 and job.config.model["hidden_size"] == 64
        assert job.config.model.get(FIELD) == ROWS[label].get(FIELD)


def model(binding: str | None, **fields: Any) -> TitansForCausalLM:
    torch.manual_seed(0)
    plain = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 2, "memory_heads": 2, "num_persistent_tokens": 2}
    config = TitansConfig(variant="lmm", memory_binding=binding, **{**plain, **fields})
    return TitansForCausalLM(config).eval()


def test_the_inner_loss_falls_with_every_step_and_rises_by_ascent() -> None:
    ids = torch.randint(7, (2, 20), generator=torch.Generator().manual_seed(0))
    found = {name: inner_loss(model(name), ids) for name in (None, "four_steps", "ascent")}
    assert found[None][0] > found[None][1] > found["four_steps"][1] > 0
    assert found["ascent"][1] > found["ascent"][0]


def test_the_inner_loss_is_that_of_each_tokens_own_key_before_and_after_its_write() -> None:
    plain = model("two_steps", num_hidden_layers=1, num_persistent_tokens=0)
    memory = plain.model.layers[0].memory
    ids = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(0))
    states, losses = [memory.init_state(2).detach()], []
    for stop in range(1, 10):  # every prefix, whose last token is the one that is asked about
        caught: list[Any] = []
        memory.observer = lambda tokens, state, _, caught=caught: caught.append((tokens, state))
        with torch.no_grad():
            plain(input_ids=ids[:, :stop])
        ((tokens, state),) = caught
        states.append(state)
        said = [memory.network(at.weights, tokens.k[:, :, -1:]) for at in states[-2:]]
        losses.append([(y - tokens.v[:, :, -1:]).square().sum(-1).mean() for y in said])
    assert inner_loss(plain, ids) == pytest.approx(torch.tensor(losses).mean(0).tolist(), rel=1e-5)


def result(label: str, seed: int, figures: dict[str, dict[int, float | None]]) -> dict[str, Any]:
    def entry(cells: dict[int, float | None]) -> dict[str, Any]:
        shown = [{"group": {"length": length}, "value": value, "count": 4} for length, value in cells.items()]
        return {"metric": "accuracy", "axes": ["length"], "cells": shown, "chance": 0.5, "trained_at": 4, "seed": 0}

    tasks = {key: entry(cells) for key, cells in figures.items()}
    return {"format": 1, "name": f"{label}-{seed}", "model": {"name": label, "seed": seed}, "tasks": tasks}


def report(**language: Any) -> dict[str, Any]:
    right: dict[int, float | None] = {4: 1.0, 8: 0.5}
    titans = {key: right for task in ("recall", "parity") for key in (task, *(f"{task} {FIELD}={n}" for n in CHANGES))}
    linear: dict[str, dict[int, float | None]] = {"recall": {8: None, 4: 1.0}, "parity": right}
    results = [result(label, seed, figures) for seed in (0, 1) for label, figures in
               ((TITANS, titans), ("linear memory", linear))]  # fmt: skip
    inner = {"recall": {TITANS: [(1.0, 0.5), (1.0, 0.25)]}, "parity": {"ascent": [(1.0, 2e24)]}}
    return {"seeds": [0, 1], "results": results, "inner": inner, "language": language or None}


def test_the_answer_has_near_and_far_and_each_seed() -> None:
    trained, tested = answer(report(), [TITANS, "linear memory"]).tables
    assert trained.header == ["model", "recall at 4", "recall at 8", "parity at 4", "parity at 8"]
    both = ["1.000 (1.000, 1.000)", "0.500 (0.500, 0.500)"]
    assert trained.rows[0] == [TITANS, *both, *both]
    assert trained.rows[1][2] == "0.000 (0.000, 0.000)"  # what diverged recalls nothing
    assert [row[0] for row in tested.rows] == [TITANS, *(f"{TITANS} ({name})" for name in CHANGES)]
    assert inner_table(report()["inner"]).rows == [
        [TITANS, "1 (1, 1)", "0.375 (0.5, 0.25)", "-", "-"],
        ["ascent", "-", "-", "1", "2e+24"],
    ]


def test_losses_on_text_stand_in_the_answer() -> None:
    losses = {TITANS: [1.0, 2.0], "linear memory": [None, 2.0]}
    made = report(table=[{"model": label, "losses": each} for label, each in losses.items()])
    for number, name in enumerate((None, *CHANGES)):
        key = "perplexity" if name is None else f"perplexity {FIELD}={name}"
        made["results"][0]["tasks"][key] = {"cells": [{"group": {}, "whole": {"loss": 3.0 + number}}]}
    trained, tested = answer(made, [TITANS, "linear memory"]).tables
    assert [row[-1] for row in trained.rows] == ["1.500 (1.000, 2.000)", "NaN (NaN, 2.000)"]
    assert [row[-1] for row in tested.rows] == ["3.000", "4.000", "5.000"]


@pytest.mark.slow
def test_the_experiment_trains_saves_and_reports_in_processes_of_its_own(tmp_path: Path) -> None:
    from titans.experiments.lm import LMExperiment

    files = [tmp_path / "train.txt", tmp_path / "validation.txt"]
    for file in files:
        file.write_text("To be, or not to be. " * 100)
    prepare([str(files[0])], tmp_path / "data", validation=[str(files[1])])
    language = LMExperiment(str(tmp_path / "data"), "", length=64, batch_tokens=256)
    chosen = (TITANS, "last layer only")
    for _ in range(2):  # the second time finds everything done
        made = run_linear(language, tmp_path / "out", (0,), chosen, at_a_time=2, quick=True)
    assert {label for found in made["inner"].values() for label in found} >= {*chosen, f"{TITANS} (two_steps)"}
    saved = json.loads((tmp_path / "out" / "language" / "runs" / "last-layer-only-0" / "config.json").read_text())
    assert saved[FIELD] == "last_layer"
    assert "last layer only" in (tmp_path / "out" / "linear.md").read_text()
    assert (tmp_path / "out" / "report.html").is_file()
