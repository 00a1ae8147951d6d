"""`titans experiment memory-benchmarks`: what it prints, and what it refuses before it writes anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import assert_refused, run

HISTORY = {
    "question_id": "q1", "question_type": "multi-session", "question": "Which tree did I plant?", "answer": "plum",
    "question_date": "2023/06/01 (Thu) 10:00", "haystack_session_ids": ["a"],
    "haystack_dates": ["2023/05/20 (Sat) 02:21"], "answer_session_ids": ["a"],
    "haystack_sessions": [[{"role": "user", "content": "I planted a plum tree.", "has_answer": True}]],
}  # fmt: skip


def test_a_quick_run_prints_its_tables_and_writes_out_of_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "histories.json", tmp_path / "out"
    file.write_text(json.dumps([HISTORY]))
    assert run("experiment", "memory-benchmarks", str(file), "--out", str(out), "--limit", "1", "--quick") == 0
    shown = capsys.readouterr().out
    assert "| as shipped | 1.000 | 1.000 | 1.000 | 1.000 | 6 | 0 | " in shown
    assert "| whole context | 1 | 1 | 1 | - | 6 | 0 | - |" in shown
    assert [path.name for path in out.iterdir()] == ["quick"]


def test_wrong_data_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps([HISTORY]))
    bad.write_text(json.dumps([HISTORY, {**HISTORY, "question_id": "q2", "haystack_dates": ["May"]}]))
    command = ["experiment", "memory-benchmarks", "--out", str(tmp_path / "out")]
    words = 'conversation 2, session 1: its date is "May"; expected one such as 2023/05/20 (Sat) 02:21'
    assert_refused([*command, str(good), str(bad)], words, tmp_path, capsys)
    assert_refused([*command, str(tmp_path / "none.json")], "No such file", tmp_path, capsys)
    assert_refused([*command, str(tmp_path)], "expected a folder of BEAM", tmp_path, capsys)
    assert_refused([*command, str(good), str(good)], "each once", tmp_path, capsys)
