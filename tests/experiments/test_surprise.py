"""What surprise means: less for what was said before, more for what contradicts it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from titans.experiments import surprise
from titans.experiments.surprise import generate_triples, measure_surprise, run_surprise, summarize
from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.facts import generate_facts
from titans.text.neural import NeuralTextMemory


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    """The packaged encoder."""
    return CachedEncoder(TextEncoder.load())


def encode_triples(encoder: TextEncoder, count: int) -> Tensor:
    triples = generate_triples(count, random.Random(0))
    return torch.from_numpy(encoder.encode([text for triple in triples for text in triple])).view(count, 3, -1)


def test_a_contradiction_surprises_more_than_a_paraphrase_and_a_repetition_least(encoder: TextEncoder) -> None:
    found = measure_surprise(NeuralTextMemory.default(), encode_triples(encoder, 24), torch.zeros(0, 384))
    before, after, another = found.unbind(1)
    text, paraphrase, contradiction = after.unbind(-1)
    assert bool((text < before[:, 0]).all())
    assert float((contradiction > paraphrase).float().mean()) > 0.9
    assert bool((contradiction > text).all())
    assert float(contradiction.mean() - paraphrase.mean()) > 0.002
    assert float((another[:, 2] > another[:, 1]).float().mean()) < 0.6  # told something else


def test_in_a_memory_that_knows_other_things_the_paraphrase_loses_more_of_its_surprise(encoder: TextEncoder) -> None:
    known = [fact.text for fact in generate_facts(20, random.Random(1))]
    context = torch.from_numpy(encoder.encode(known))
    found = measure_surprise(NeuralTextMemory.default(), encode_triples(encoder, 24), context)
    fall = found[:, 0] - found[:, 1]
    assert bool((fall[:, 0] > 0).all())
    assert float((fall[:, 1] > fall[:, 2]).float().mean()) > 0.6


def test_no_triple_says_the_same_of_the_same_person_twice() -> None:
    triples = generate_triples(200, random.Random(0))
    texts = [text for triple in triples for text in triple]
    assert len(set(texts)) == 600
    assert triples == generate_triples(200, random.Random(0)) != generate_triples(200, random.Random(1))
    with pytest.raises(ValueError, match="part is 'all'; expected one of train, test"):
        generate_triples(2, random.Random(0), "all")


def test_shares_are_means_over_seeds_with_an_interval_over_triples() -> None:
    rows = [
        {"known": 5, "seed": seed, "repeated": [1, 1], "before": [0, 0], "after": after, "another": [0, 1]}
        for seed, after in enumerate(([1, 0], [1, 1]))
    ]
    (row,) = summarize(rows)
    assert row["known"] == 5 and row["after"]["value"] == 0.75
    assert row["after"]["low"] == 0.5 and row["after"]["high"] == 1.0
    assert row["repeated"]["value"] == 1 and row["before"]["value"] == 0


def test_the_experiment_writes_its_figures_and_measures_nothing_twice(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    report = run_surprise(tmp_path, lambda done, total, what: steps.append(f"{done} of {total}"), "", True, encoder)
    assert json.loads((tmp_path / "surprise.json").read_text()) == report
    assert [row["known"] for row in report["summary"]] == [0, 1]
    assert report["summary"][0]["after"]["value"] > 0.9 and report["summary"][0]["repeated"]["value"] == 1.0
    assert "| 0 | 100.0% (" in (tmp_path / "surprise.md").read_text()
    assert (tmp_path / "report.html").is_file() and steps == ["0 of 2", "1 of 2"]
    monkeypatch.setattr(surprise, "measure_surprise", None)
    assert run_surprise(tmp_path, quick=True, encoder=encoder)["summary"] == report["summary"]


@pytest.mark.slow
def test_the_figure_of_the_documentation(encoder: TextEncoder) -> None:
    found = measure_surprise(NeuralTextMemory.default(), encode_triples(encoder, 200), torch.zeros(0, 384))
    assert float((found[:, 1, 2] > found[:, 1, 1]).float().mean()) == pytest.approx(0.975)
