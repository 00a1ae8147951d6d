"""Tests of a text memory in use: what each of them measures."""

from __future__ import annotations

import pytest
import torch

from titans.experiments import text_tests
from titans.experiments.conversations import Conversation, Question, Utterance
from titans.experiments.text_tests import Facts, area_under_curve, make_facts, surprises
from titans.text.encoder import TextEncoder
from titans.text.ranking import Eviction, Ranking

DIALOGUE = [
    "Ann: The tomatoes need more water.",
    "Bo: I watered them twice today.",
    "Ann: Then it is the soil, let us try compost.",
    "Bo: The compost from the garden is ready.",
    "Cy: My guitar has a broken string.",
]


def test_the_area_under_the_curve_counts_pairs() -> None:
    assert area_under_curve([1, 2, 3, 4], [False, False, True, True]) == 1.0
    assert area_under_curve([4, 3, 2, 1], [False, False, True, True]) == 0.0
    assert area_under_curve([1, 1, 1], [True, False, False]) == 0.5


def test_a_fact_that_changes_is_told_as_often_as_it_has_versions() -> None:
    facts = make_facts(0, "test")
    assert facts == make_facts(0, "test") != make_facts(1, "test")
    assert len(facts.questions) == text_tests.CHANGED
    assert all(len(each) == text_tests.VERSIONS and each == sorted(each) for each in facts.versions)
    assert len(set(facts.texts)) == len(facts.texts)


def test_the_latest_version_is_first_only_where_versions_are_linked(encoder: TextEncoder) -> None:
    texts = ["Anna's car is blue.", "Bruno has a dog.", "The car that Anna drives is red.", "Bruno plays the harp."]
    facts = Facts(texts, ["What is Anna's car like?"], [[0, 2]])
    for linked, latest in ((True, 1.0), (False, 0.0)):
        assert text_tests._first_hits(facts, encoder, [Ranking()], linked) == [(latest, 1.0)]


def test_a_full_store_that_lets_the_oldest_go_keeps_the_evidence_of_the_end(encoder: TextEncoder) -> None:
    turns = tuple(
        Utterance(
            f"D{session}:{turn}", "Ann", f"On day {session}{turn} I bought the book number {turn * session}.", session
        )
        for session in (1, 2, 3)
        for turn in range(1, 6)
    )
    questions = (Question(turns[-1].text, 1, (14,)), Question(turns[-1].text, 1, (0,)))
    conversation = Conversation("books", turns, questions)
    assert text_tests._keep(conversation, encoder, Eviction("fifo")) == (0.5, 0.5)


def test_each_text_is_compared_with_those_before_it(encoder: TextEncoder) -> None:
    found = surprises(DIALOGUE, torch.from_numpy(encoder.encode(DIALOGUE)))
    assert found[0].drift == found[0].novelty == 1 and found[0].loss == pytest.approx(1, abs=0.01)
    assert max(found[1:], key=lambda each: each.drift) is found[4]
    assert all(each.novelty <= each.drift + 1e-6 for each in found)


def test_two_conversations_alternate_block_by_block() -> None:
    order, starts = text_tests._alternate(60, 50)
    assert order[:24] == [*range(24)] and order[24:48] == [*range(60, 84)] and order[48] == 24
    assert [place for place, first in enumerate(starts) if first] == [0, 24, 48, 72]
    assert text_tests._alternate(3, 2) == ([0, 1, 2, 3, 4], [True, False, False, True, False])
