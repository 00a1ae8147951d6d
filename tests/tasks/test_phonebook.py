"""A phone book asks for every number once, in another order, and its answers are in the book."""

from __future__ import annotations

from typing import Any

import pytest

from titans.models.tokenizer import byte_tokenizer
from titans.tasks import example, make_task

BYTES = byte_tokenizer()


def text_of(tokens: Any) -> str:
    return str(BYTES.decode(list(tokens)))


@pytest.mark.parametrize("entries", [1, 5, 32])
def test_every_name_is_asked_for_once_and_its_number_is_the_one_in_the_book(entries: int) -> None:
    drawn = example(make_task("phonebook"), "test", 0, entries, {"entries": entries}, BYTES)
    book, questions = text_of(drawn.tokens[: drawn.boundary]), text_of(drawn.tokens[drawn.boundary :])
    lines = book.strip().split("\n")
    assert len(lines) == len(drawn.answers) == entries
    assert len({line.split(":")[0] for line in lines}) == entries
    assert sorted(lines) == sorted(questions.strip().split("\n"))
    for answer in drawn.answers:
        assert tuple(drawn.tokens[answer.place : answer.place + len(answer.wanted)]) == answer.wanted
        assert text_of(answer.wanted).strip().isdigit()


def test_training_books_fit_and_splits_share_no_number() -> None:
    task = make_task("phonebook")
    numbers: dict[str, set[str]] = {}
    sizes = set()
    for split in ("train", "validation", "test"):
        found = numbers.setdefault(split, set())
        for number in range(40):
            drawn = example(task, split, 0, number, 256, BYTES)
            assert len(drawn.tokens) <= 256
            sizes.add(len(drawn.answers))
            found |= {text_of(answer.wanted) for answer in drawn.answers}
    assert len(sizes) > 3
    assert not numbers["train"] & numbers["test"] and not numbers["train"] & numbers["validation"]


def test_values_may_be_words_and_a_book_has_one_kind() -> None:
    task = make_task("phonebook", {"values": ["number", "word"]})
    kinds = set()
    for number in range(40):
        drawn = example(task, "train", 0, number, 64, BYTES)
        assert len(drawn.tokens) <= 64
        book = text_of(drawn.tokens[: drawn.boundary]).strip().split("\n")
        values = [line.split(": ")[1] for line in book]
        kinds.add(tuple(sorted({value.isdigit() for value in values})))
        assert all(value.isdigit() or value.count("-") == 1 for value in values)
    assert kinds == {(True,), (False,)}
    with pytest.raises(ValueError, match=r"values is .*; expected one or more of number, word"):
        make_task("phonebook", {"values": ["uuid"]})


def test_the_same_seed_gives_the_same_book_and_bad_settings_are_one_sentence() -> None:
    task = make_task("phonebook", {"digits": 4})
    books = [example(task, "train", seed, 3, {"entries": 4}, BYTES).tokens for seed in (0, 0, 1)]
    assert books[0] == books[1] != books[2]
    with pytest.raises(ValueError, match="length is 20; expected room for one name and number, twice"):
        example(task, "train", 0, 0, 20, BYTES)
    with pytest.raises(ValueError, match="entries is"):
        make_task("phonebook", {"entries": [0]})
