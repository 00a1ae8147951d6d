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
from titans.text.versions import (
    ALIKE,
    LEAST_COSINE,
    asked_for,
    contradiction,
    find_newest,
    find_older_version,
    likeness,
)  # fmt: skip

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
        ("I like black tea.", "I like green tea."),
    ],
)
def test_what_is_about_another_subject_or_may_be_true_beside_it_or_is_no_statement_is_not_alike(
    new: str, old: str
) -> None:
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
    assert likeness("Anna drives a red car.", "The car Anna has is blue.", 0.5) == pytest.approx(0.5 + 0.25 * 1 / 4)
    assert likeness("Anna has tea.", "Anna has tea.", LEAST_COSINE) == pytest.approx(ALIKE)


def test_the_same_words_but_for_one_place_are_enough() -> None:
    assert likeness("I live in Lima.", "I live in Oslo.", 0.4) == ALIKE
    assert likeness("I live in Lima.", "You live in Oslo.", 0.4) == 0
    assert likeness("I run.", "I sing.", 0.4) < ALIKE


def test_a_version_stands_out_from_what_else_is_said_of_its_subject() -> None:
    new, old = Record("new", "Petra works as a lawyer."), Record("old", "Petra was born in May.")
    others = [Record("a", "Petra lives in Boston."), Record("b", "Petra is learning Greek.")]
    assert find_older_version(new, [(old, 0.66)]) is old
    assert find_older_version(new, [(old, 0.66), *((each, 0.6) for each in others)]) is None
    assert find_older_version(new, [(old, 0.66), *((each, 0.4) for each in others)]) is old


def test_of_the_first_hits_the_newest_that_says_nearly_the_same_goes_first() -> None:
    home = Record("1", "Anna lives in Oslo.", created="2024-01-01")
    moved = Record("2", "Anna's home is in Rome.", created="2024-02-01")
    job = Record("3", "Anna works as a judge.", created="2024-03-01")
    vectors = np.array([[1, 0, 0], [0.6, 0.8, 0], [0.5, 0, 0.866]])

    def newest(hits: list[tuple[Record, float]], places: list[int], query: str = "Where is Anna's home?") -> int:
        return find_newest(hits, vectors[places], query, lambda record: record.created)

    assert newest([(home, 0.8), (moved, 0.72), (job, 0.72)], [0, 1, 2]) == 1
    assert newest([(home, 0.8), (moved, 0.6), (job, 0.72)], [0, 1, 2]) == 0  # does not answer as well
    assert newest([(moved, 0.8), (home, 0.8)], [1, 0]) == 0  # is older
    assert newest([(home, 0.8), (job, 0.8), (job, 0.8), (moved, 0.8)], [0, 2, 2, 1]) == 0  # is too far down
    assert newest([(home, 0.8), (replace(moved, session="another"), 0.8)], [0, 1]) == 0
    assert newest([(home, 0.8)], [0]) == 0
    bonn = replace(moved, text="Anna lives in Bonn.")
    assert newest([(home, 0.8), (bonn, 0.8)], [0, 1]) == 1
    assert newest([(home, 0.8), (bonn, 0.8)], [0, 1], "When was Anna in Oslo?") == 0  # asks for the first by name


@pytest.mark.parametrize(
    ("query", "one", "other", "words"),
    [
        ("Where is the key of locker 3?", "The key of locker 3 is here.", "The key of locker 7 is here.", {"3"}),
        ("What is the code of door A?", "The code of door A is 4711.", "The code of door B is 9002.", {"a"}),
        ("What do I take in the morning?", "I take zinc in the morning.", "I take iron in the evening.", {"morning"}),
        ("Where did I live in 2021?", "In 2021 I lived in Rome.", "In 2023 I lived in Bonn.", {"2021"}),
        ("Where do I live?", "I live in Rome.", "I live in Bonn.", set()),
        ("Where is Jack's home?", "Jack's home is in Seoul.", "Jack lives in Oslo.", set()),  # in other words
        ("Do I have a pet?", "I have a dog.", "I have the cat.", set()),
    ],
)
def test_a_question_may_ask_for_one_of_two_statements_that_are_built_alike(
    query: str, one: str, other: str, words: set[str]
) -> None:
    assert asked_for(query, one, other) == words


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("The key of locker 7 is in the blue box.", "The key of locker 3 is in the blue box."),
        ("My gate at Gatwick is B22.", "My gate at Heathrow is A10."),
        ("My son Max is nine.", "My son Leo is six."),
        ("Our Tuesday meeting is at nine.", "Our Monday meeting is at ten."),
    ],
)
def test_statements_about_other_things_are_no_versions(new: str, old: str) -> None:
    assert likeness(new, old, 0.95) == 0


def test_another_value_contradicts_and_other_words_do_less() -> None:
    assert contradiction("Anna drives a red car.", "Anna drives a blue car.", 0.9) == 1
    assert contradiction("The rent rose to 900.", "The rent is 850 a month.", 0.8) == 1
    assert contradiction("Anna's home is in Oslo.", "Anna lives in Oslo.", 0.9) == pytest.approx(0.1)
    assert contradiction("Anna's home is in Rome.", "Anna lives in Oslo.", 0.7) == pytest.approx(0.3)
    assert contradiction("Anna lives in Oslo.", "Anna lives in Oslo.", 1.0) == 0
    assert contradiction("Anna likes fish.", "Bruno likes fish.", 0.9) == 0


def test_changed_facts_contradict_more_than_facts_in_other_words(encoder: TextEncoder) -> None:
    cosines = (encoder.encode([old for _, old, _ in PAIRS]) * encoder.encode([new for *_, new in PAIRS])).sum(1)
    values = [contradiction(new, old, float(c)) for (_, old, new), c in zip(PAIRS, cosines, strict=True)]
    changed, others = (
        np.array([value for value, (kind, _, _) in zip(values, PAIRS, strict=True) if kind in kinds])
        for kinds in (["changed"], ["restated", "other"])
    )
    above = changed[:, None] - others[None, :]
    assert float(((above > 0) + 0.5 * (above == 0)).mean()) > 0.8


@given(st.text(), st.text(), st.floats(-1, 1))
def test_any_texts_can_be_compared(new: str, old: str, cosine: float) -> None:
    assert likeness(new, old, cosine) == likeness(old, new, cosine) <= cosine + 0.25 + (cosine < 0)
    assert 0 <= contradiction(new, old, cosine) <= 1


def test_the_most_similar_statement_of_the_same_speaker_is_replaced() -> None:
    new = Record("0", "Anna lives in Rome now.")
    home, food, said = Record("1", "Anna lives in Oslo."), Record("2", "Anna likes fish."), Record("3", new.text)
    assert find_older_version(new, [(food, 0.5), (home, 0.6)]) is home
    assert find_older_version(new, [(food, 0.5)]) is None
    assert find_older_version(new, [(replace(said, role="assistant"), 0.9)]) is None
    assert find_older_version(new, []) is None
