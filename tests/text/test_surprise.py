"""The parts of a text's surprise, each of which tells something else."""

from __future__ import annotations

import numpy as np
import pytest

from titans.text.encoder import TextEncoder
from titans.text.records import Record
from titans.text.surprise import Surprise, assess

KNOWN = ["Anna lives in Oslo.", "Anna's dog is called Rex.", "The tomatoes need more water.", "I planted beans today."]


def assess_after(known: list[str], text: str, encoder: TextEncoder) -> Surprise:
    *vectors, vector = encoder.encode([*known, text])
    records = [(Record(str(index), each), float(vectors[index] @ vector)) for index, each in enumerate(known)]
    return assess(text, vector, 0.5, np.array(vectors[-2:]).reshape(-1, len(vector)), records)


def test_a_change_of_topic_drifts_and_what_goes_on_does_not(encoder: TextEncoder) -> None:
    assert assess_after(KNOWN, "My car broke down on the motorway.", encoder).drift > 0.7
    assert assess_after(KNOWN, "The beans need more water, too.", encoder).drift < 0.5


def test_what_was_said_before_is_not_new(encoder: TextEncoder) -> None:
    again = assess_after(KNOWN, KNOWN[0], encoder)
    assert again.novelty == pytest.approx(0, abs=1e-6) and again.contradiction == 0 and again.contradicts is None
    assert assess_after(KNOWN, "My car broke down on the motorway.", encoder).novelty > 0.6


def test_another_value_names_the_record_that_it_contradicts(encoder: TextEncoder) -> None:
    found = assess_after(KNOWN, "Anna lives in Rome.", encoder)
    assert found.contradiction == 1 and found.contradicts == "0"
    moved = [*KNOWN, "Anna lives in Rome."]
    assert (
        assess_after(moved, "Anna's home is in Rome.", encoder).contradiction < 0.25
    )  # it is the old one that differs


def test_a_scope_without_texts_contradicts_nothing(encoder: TextEncoder) -> None:
    assert assess_after([], "Anna lives in Rome.", encoder) == Surprise(0.5, 1.0, 1.0, 0.0, None)
