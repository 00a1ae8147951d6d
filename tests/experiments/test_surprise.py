"""What tells a contradiction from ordinary talk, measured through a real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titans.experiments import surprise
from titans.experiments.surprise import CONTRADICTIONS, ORDINARY, PARTS, make_scene, run_surprise, summarize
from titans.text.encoder import TextEncoder


def test_a_scene_has_every_kind_of_talk_and_contradicts_only_what_it_told() -> None:
    told, said = make_scene(0)
    assert (told, said) == make_scene(0) != make_scene(1)
    assert {each.kind for each in said} == {*CONTRADICTIONS, *ORDINARY}
    again = [each for each in said if each.kind == ORDINARY[0]]
    assert [each.text for each in again] == told == [told[each.about or 0] for each in again]
    assert all(each.text not in told for each in said if each.kind != ORDINARY[0])


def make_row(seed: int, values: dict[str, float]) -> dict[str, object]:
    """A row in which every text of a kind has the same value in every part."""
    parts = {kind: [[values.get(kind, 0.0)] * len(PARTS)] * 2 for kind in (*CONTRADICTIONS, *ORDINARY)}
    return {"seed": seed, "parts": parts, "named": 0.5}


def test_areas_are_means_over_seeds() -> None:
    sure = dict.fromkeys(CONTRADICTIONS, 0.9)
    summary = summarize([make_row(0, sure), make_row(1, {CONTRADICTIONS[0]: 0.9, ORDINARY[0]: 0.4})])
    area = summary["areas"]["contradiction"]
    assert area["small talk"]["value"] == pytest.approx((1 + 0.75) / 2)
    assert area["the same again"]["value"] == pytest.approx((1 + 0.5) / 2)
    assert area["all"]["value"] == pytest.approx((1 + 0.7) / 2)
    assert [summary["taken"][kind]["value"] for kind in (*CONTRADICTIONS, ORDINARY[0])] == [1, 0.5, 0.5]
    assert summary["named"]["value"] == 0.5


def test_the_experiment_tells_contradictions_from_talk_and_measures_nothing_twice(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    report = run_surprise(tmp_path, lambda done, total, what: steps.append(f"{done} of {total}"), "", True, encoder)
    assert json.loads((tmp_path / "surprise.json").read_text()) == report
    areas = report["summary"]["areas"]
    assert areas["contradiction"]["all"]["value"] > 0.8 > areas["loss"]["all"]["value"]
    assert "| contradiction | " in (tmp_path / "surprise.md").read_text()
    assert (tmp_path / "report.html").is_file() and steps == ["0 of 1"]
    monkeypatch.setattr(surprise, "measure", None)
    assert run_surprise(tmp_path, quick=True, encoder=encoder)["summary"] == report["summary"]


@pytest.mark.slow
def test_the_figures_of_the_documentation(encoder: TextEncoder, tmp_path: Path) -> None:
    areas = run_surprise(tmp_path, encoder=encoder)["summary"]["areas"]
    assert areas["contradiction"]["all"]["low"] > 0.85
    assert areas["contradiction"]["the same in other words"]["low"] > 0.8
