"""The search for shapes: as many runs for every model, the best at every rate, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.experiments.finished import finish, text
from titans.experiments.lm import LMExperiment
from titans.experiments.runs import Job
from titans.experiments.shapes import BYTE_CANDIDATES, CANDIDATES, SIZE, candidates_for, run_shapes
from titans.models.baselines import config_for


def search(folder: Path, *models: str) -> LMExperiment:
    return LMExperiment(
        data=text(folder), out=str(folder / "out"), models=models, seeds=(0,), length=64, batch_tokens=256
    )


def test_the_best_shape_is_trained_at_every_rate_and_the_best_of_all_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(job: Job) -> float:
        model = job.config.model
        best = model["num_hidden_layers"] == 4
        return (0.0 if best else math.nan) + 100 * job.config.learning_rate

    finish(monkeypatch, loss)
    report = run_shapes(search(tmp_path, "lmm", "sliding-window"), command="titans experiment shapes")
    for model, chosen in report["chosen"].items():
        assert chosen["shape"]["num_hidden_layers"] == 4 and chosen["learning_rate"] == 2e-3
        assert len([row for row in report["found"] if row["model"] == model]) == len(BYTE_CANDIDATES[model]) + 2
    lines = (tmp_path / "out" / "shapes.md").read_text().splitlines()
    assert [line.split("|")[2].strip() for line in lines if "chosen" in line] == [
        "memory_depth 1, num_hidden_layers 4, hidden_size 192, memory_heads 4, memory_head_dim 80",
        "num_hidden_layers 4, hidden_size 192, num_attention_heads 4",
    ]


def test_every_model_has_as_many_candidates() -> None:
    assert len({len(shapes) for table in (CANDIDATES, BYTE_CANDIDATES) for shapes in table.values()}) == 1
    assert candidates_for(258) is BYTE_CANDIDATES and candidates_for(2048) is CANDIDATES


@pytest.mark.parametrize("vocab_size", [258, 2048])
@pytest.mark.parametrize("model", ["lmm", *(pytest.param(name, marks=pytest.mark.slow) for name in CANDIDATES)])
def test_every_candidate_meets_the_size(model: str, vocab_size: int) -> None:
    for shape in candidates_for(vocab_size)[model]:
        config_for(model, SIZE, vocab_size=vocab_size, **shape)


def test_what_cannot_be_searched_is_one_sentence(tmp_path: Path) -> None:
    asked = search(tmp_path, "gla")
    with pytest.raises(ValueError, match=r"^models has 'gla': "):
        run_shapes(asked)
    with pytest.raises(ValueError, match=r"^rates is \[0.1, 0.2\]; expected an odd number of positive numbers$"):
        run_shapes(replace(asked, models=("lmm",)), (0.1, 0.2))
