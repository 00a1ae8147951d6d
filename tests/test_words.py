"""Words for mistakes name what was wrong and what was expected."""

from __future__ import annotations

import pytest

from titans.words import nearest, require_whole, sentence


def test_a_mistyped_name_gets_the_nearest_one_and_a_strange_one_gets_them_all():
    assert nearest("lenght", ["length", "steps"]) == "did you mean length?"
    assert nearest("zzz", ["length", "steps"]) == "expected one of length, steps"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "count is 0; expected at least 1"),
        (1.0, "count is 1.0; expected a whole number"),
        (True, "count is True; expected a whole number"),
        ("3", "count is '3'; expected a whole number"),
    ],
)
def test_a_number_that_is_not_whole_or_too_small_is_named(value, words):
    require_whole(seed=1, count=3)
    with pytest.raises(ValueError, match=words):
        require_whole(seed=1, count=value)


def test_an_error_is_one_line_and_never_empty():
    assert sentence(OSError("no\n  room")) == "no room"
    assert sentence(KeyError()) == "KeyError"
