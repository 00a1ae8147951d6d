"""Which texts tell more that somebody may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titans.text.details import details


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ("I moved to Oslo in May.", "I moved to another city."),
        ("We paid 850 for it.", "We paid too much for it."),
        ("I went there last week.", "I went there."),
        ("I am so glad.", "You are so glad."),
        ("My sister met Tom Baker.", "That sounds great! Tell me more! Wow! What happened?"),
    ],
)
def test_names_numbers_times_and_what_is_ones_own_count(more: str, less: str) -> None:
    assert details(more) > details(less)


def test_the_speaker_and_the_first_word_of_a_sentence_are_no_names() -> None:
    assert details("Anna: It rained. Nothing else happened.") == details("it rained. nothing else happened.") == 0


@given(st.text())
def test_any_text_can_be_judged_and_blanks_do_not_count(text: str) -> None:
    assert details(text) == details(text + " ")
