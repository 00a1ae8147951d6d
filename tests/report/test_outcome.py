from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.cases import PNG
from titans.report.outcome import read_figures, read_kept, write_figures, write_outcome
from titans.report.page import Figure, Section, Table

SECTIONS = [Section("Speed", ["Words."], [Table(["a"], [["1"]])], [Figure("speed", PNG, "Speed against length")])]


def test_an_outcome_is_everything_as_json_a_text_a_page_and_its_pictures(tmp_path: Path) -> None:
    report: dict[str, Any] = {"name": "lm", "command": "titans experiment lm", "date": "2026-11-16", "rows": [1.5]}
    page = write_outcome(report, "Language", SECTIONS, tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    assert sorted(path.name for path in page.parent.iterdir()) == ["lm.json", "lm.md", "report.html", "speed.png"]
    assert json.loads((page.parent / "lm.json").read_text()) == report
    text = (page.parent / "lm.md").read_text()
    assert text.startswith("# Language\n\ntitans experiment lm, 2026-11-16\n\n## Speed\n\nWords.\n")
    assert "titans experiment lm, 2026-11-16" in page.read_text()


def test_an_outcome_that_cannot_be_shown_leaves_nothing_behind(tmp_path: Path) -> None:
    bad = [*SECTIONS, Section("s", tables=[Table(["a", "b"], [["1"]])])]
    with pytest.raises(ValueError, match="a row has 1 cells"):
        write_outcome({"name": "x"}, "t", bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_are_kept_while_the_settings_are_the_same(tmp_path: Path) -> None:
    report = {"name": "x", "settings": {"lengths": (1, 2)}, "rows": [1]}
    write_figures(report, tmp_path)
    assert read_kept(tmp_path / "x.json", {"lengths": (1, 2)})["rows"] == [1]
    assert read_kept(tmp_path / "x.json", {"lengths": (1, 3)}) == {}
    assert read_kept(tmp_path / "y.json", {"lengths": (1, 2)}) == {}
    (tmp_path / "x.json").write_text("[")
    assert read_kept(tmp_path / "x.json", {"lengths": (1, 2)}) == {}


def test_what_is_not_a_number_is_none(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"loss": NaN, "best": -Infinity, "steps": 4}')
    assert read_figures(tmp_path / "result.json") == {"loss": None, "best": None, "steps": 4}
