"""Which statement is a newer version of which, on pairs that nothing was chosen on."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titans.text.encoder import TextEncoder
from titans.text.records import Record
from titans.text.versions import ALIKE, LEAST_COSINE, find_older_version, likeness

with Path(__file__).with_name("versions.tsv").open(encoding="utf-8") as stream:
    PAIRS = list(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))  # changed, restated or other; old; new


@pytest.fixture(scope="module")
def found(encoder: TextEncoder) -> dict[str, float]:
    """The share of the pairs of each kind that are taken for two versions."""
    cosines = (encoder.encode([old for _, old, _ in PAIRS]) * encoder.encode([new for *_, new in PAIRS])).sum(1)
    alike = [likeness(new, old, float(c)) >= ALIKE for (_, old, new), c in zip(PAIRS, cosines, strict=True)]
    kinds = np.array([kind for kind, _, _ in PAIRS])
    return {kind: float(np.mean(np.array(alike)[kinds == kind])) for kind in ("changed", "restated", "other")}


def test_most_changed_facts_are_found_and_few_others(found: dict[str, float]) -> None:
    assert found["changed"] > 0.8
    assert found["restated"] > 0.95
    assert found["other"] < 0.15


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("Anna lives in Oslo.", "Bruno lives in Oslo."),
        ("My sister lives in Oslo.", "My uncle lives in Oslo."),
        ("Anna: I live in Oslo.", "Bruno: I live in Oslo."),
        ("Do I live in Oslo?", "I live in Oslo."),
        ("I live in Oslo. I like it there.", "I live in Oslo."),
        ("", "I live in Oslo."),
    ],
)
def test_another_subject_another_speaker_and_what_is_no_statement_are_not_alike(new: str, old: str) -> None:
    assert likeness(new, old, 0.99) == likeness(old, new, 0.99) == 0


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("On Sundays Anna goes rowing.", "Anna is out running on Sundays."),
        ("The price of the house is down.", "The house costs a fortune."),
        ("Berlin is where I live now.", "We have a flat in Hamburg."),
        ("Anna: My job is at a bank.", "Anna: I work at a school."),
    ],
)
def test_the_same_subject_is_recognised_wherever_it_stands(new: str, old: str) -> None:
    assert likeness(new, old, 0.7) >= 0.7


def test_the_same_words_add_to_the_cosine() -> None:
    assert likeness("Anna drives a red car.", "Anna drives a blue car.", 0.5) == pytest.approx(0.5 + 0.25 * 2 / 4)
    assert likeness("Anna has tea.", "Anna has tea.", LEAST_COSINE) == pytest.approx(ALIKE)


@given(st.text(), st.text(), st.floats(-1, 1))
def test_any_texts_can_be_compared(new: str, old: str, cosine: float) -> None:
    assert likeness(new, old, cosine) == likeness(old, new, cosine) <= cosine + 0.25 + (cosine < 0)


def test_the_most_similar_statement_of_the_same_speaker_is_replaced() -> None:
    new = Record("0", "Anna lives in Rome now.")
    home, food, said = Record("1", "Anna lives in Oslo."), Record("2", "Anna likes fish."), Record("3", new.text)
    assert find_older_version(new, [(food, 0.5), (home, 0.6)]) is home
    assert find_older_version(new, [(food, 0.5)]) is None
    assert find_older_version(new, [(replace(said, role="assistant"), 0.9)]) is None
    assert find_older_version(new, []) is None
