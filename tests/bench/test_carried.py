"""Documents that ask for a fact after more than one training length, with memory carried and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from titans.bench import carried
from titans.bench.carried import (
    KEYS,
    LENGTH,
    PAIRS,
    PIECES,
    QUICK,
    ROUNDS,
    document,
    figures,
    run_carried_benchmark,
    sections,
)
from titans.bench.settings import CarriedBenchmarkSettings


def test_a_fact_returns_after_more_than_one_training_length() -> None:
    text = document(random.Random(0))
    assert len(text) == PIECES * LENGTH
    for key in KEYS[:PAIRS]:
        places = [place for place, letter in enumerate(text) if letter == key]
        assert len(places) == 2 * ROUNDS and len({text[place + 1] for place in places}) == 1
        assert places[ROUNDS] - places[ROUNDS - 1] > LENGTH


@pytest.mark.slow
def test_both_ways_are_trained_and_what_is_finished_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "answer_of", lambda worker, job, threads: worker(job))
    monkeypatch.setattr(carried, "VALIDATION", 32)
    settings = CarriedBenchmarkSettings(**QUICK | {"steps": 2, "documents": 100})
    report = run_carried_benchmark(settings, out=tmp_path)
    assert [(row["memory"], row["seed"]) for row in report["rows"]] == [("carried", 0), ("not carried", 0)]
    assert all(0 <= row[kind] <= 1 for row in report["rows"] for kind in ("returning", "repeated"))
    shown = sections(report)[0]
    assert [row[0] for row in shown.tables[0].rows] == ["carried, seed 0", "not carried, seed 0"]
    assert figures(report)[shown.title][0].png.startswith(b"\x89PNG")
    models = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model.safetensors")}
    assert run_carried_benchmark(settings, out=tmp_path)["rows"] == report["rows"]
    assert {path: path.stat().st_mtime_ns for path in models} == models and len(models) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"documents": 5}, "documents is 5; expected at least 32"),
        ({"seeds": ()}, r"seeds is \[\]; expected one or more different numbers of at least 0"),
        ({"seeds": (1, 1)}, r"seeds is \[1, 1\]; expected"),
    ],
)
def test_a_wrong_setting_is_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CarriedBenchmarkSettings(**fields)
