from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titans.evaluation.retrieval import rank_sentences
from titans.models.tokenizer import byte_tokenizer, train_tokenizer
from titans.tasks import WrongLengthError, example, make_task
from titans.tasks.background import split_sentences
from titans.tasks.base import SPLITS
from titans.tasks.needle import ADJECTIVES, NOUNS
from titans.tasks.quote import MOST, Quote, find_quotes

ENDINGS = ("ane", "ell", "ick", "ood", "ume", "yle", "orn", "ast", "ipp", "eth")


def book(sentences: int, names: bool = True) -> str:
    """Sentences that can be told apart, every third of which has a name that no other has."""
    rng = random.Random(7)
    made = []
    for number in range(sentences):
        one, other = (f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(2))
        if names and number % 3 == 1:
            name = f"{'BCDFGHKLMN'[number // 3 % 10]}{ENDINGS[number // 30 % 10]}{ENDINGS[number // 300 % 10]}"
            made.append(f"Near {one} and {other} there lived {name}, who was old.")
        else:
            made.append(f"Not far from {one} stood {other} and nobody knew why.")
    return " ".join(made)


BYTES = byte_tokenizer()
TOKENIZERS = {"bytes": BYTES, "words": train_tokenizer([book(300)], 600)}
LONGEST = {
    each: max(len(each(sentence).input_ids) for sentence in split_sentences(book(300))) for each in TOKENIZERS.values()
}
ASKED = re.compile(r'\nQuestion: In the text above, which name follows the words "(.*)"\?\nAnswer: (\w+)$')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("books")
    (path / "a.txt").write_text(book(2400))
    return str(path)


@given(
    tokenizer=st.sampled_from([*TOKENIZERS.values()]),
    length=st.integers(700, 3000),
    depth=st.floats(0, 1),
    split=st.sampled_from(SPLITS),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_a_name_stands_once_in_what_is_read_at_its_depth_after_the_words_that_are_quoted(
    folder: str, tokenizer: Any, length: int, depth: float, split: str, seed: int
) -> None:
    task = make_task("book-quote", {"haystack": folder})
    drawn = task.draw(random.Random(seed), {"length": length, "depth": depth}, split, tokenizer)
    assert len(drawn.tokens) == length
    (answer,) = drawn.answers
    assert list(answer.wanted) == drawn.tokens[answer.place :]
    context, question = (tokenizer.decode(part) for part in (drawn.tokens[: drawn.boundary], drawn.tokens))
    asked = ASKED.search(question)
    assert asked is not None and tokenizer.decode(answer.wanted) == f" {asked[2]}"
    assert tokenizer.decode(drawn.tokens[: answer.place]).lower().count(asked[2].lower()) == 1
    assert context.count(f"{asked[1]} {asked[2]}") == 1
    assert 6 <= len(asked[1].split()) <= MOST
    begin, end = (*drawn.sentences, drawn.boundary)[drawn.needed[0] :][:2]
    assert f"{asked[1]} {asked[2]}" in tokenizer.decode(drawn.tokens[begin:end])
    assert abs(begin - depth * (drawn.boundary - (end - begin))) <= 0.05 * drawn.boundary + LONGEST[tokenizer]


def test_nothing_is_inserted_and_each_split_has_a_part_of_its_own(folder: str) -> None:
    whole, seen = book(2400), {}
    for split in SPLITS:
        task = make_task("book-quote", {"haystack": folder})
        drawn = [example(task, split, 0, number, {"length": 900, "depth": 0.3}, BYTES) for number in range(30)]
        texts = [BYTES.decode(each.tokens[: each.boundary]).strip() for each in drawn]
        assert all(text in whole for text in texts)
        seen[split] = [whole.index(text) / len(whole) for text in texts]
    assert max(seen["train"]) < 0.8 < min(seen["validation"]) < max(seen["validation"]) < 0.9 < min(seen["test"])
    undivided = make_task("book-quote", {"haystack": folder, "divide": False})
    drawn = [example(undivided, "test", 0, number, {"length": 900, "depth": 0.3}, BYTES) for number in range(30)]
    assert min(whole.index(BYTES.decode(each.tokens[: each.boundary]).strip()) for each in drawn) < 0.5 * len(whole)


def test_split_seed_and_number_decide_a_sequence(folder: str) -> None:
    task, group = make_task("book-quote", {"haystack": folder}), {"length": 900, "depth": 0.5}
    first = example(task, "train", 0, 0, group, BYTES)
    assert example(task, "train", 0, 0, group, byte_tokenizer()) == first
    assert example(task, "train", 0, 1, group, BYTES) != first
    assert example(task, "train", 1, 0, group, BYTES) != first


def test_the_sentence_that_is_needed_is_the_one_that_search_finds(folder: str) -> None:
    task = make_task("book-quote", {"haystack": folder})
    for number in range(5):
        drawn = example(task, "test", 0, number, {"length": 1500, "depth": 0.4}, BYTES)
        assert rank_sentences(drawn, BYTES)[0] == drawn.needed[0]


def test_training_has_any_depth_and_tests_have_lengths_by_depths(folder: str) -> None:
    task = make_task("book-quote", {"haystack": folder, "lengths": [500, 900], "depths": [0.0, 0.5]})
    assert [(group["length"], group["depth"]) for group in task.groups()] == [
        (500, 0.0), (500, 0.5), (900, 0.0), (900, 0.5),
    ]  # fmt: skip
    depths = [task.training_group(random.Random(seed), 700)["depth"] for seed in range(50)]
    assert min(depths) < 0.1 and max(depths) > 0.9


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        (
            "On the way to the mill he met Anna, who sang.",
            [Quote("On the way to the mill he met", "Anna")],
        ),
        ("He met Anna on the way to the mill.", []),
        ("So all five walked with Anna.", []),
        ("So all five have walked with Anna.", [Quote("So all five have walked with", "Anna")]),
        ("On the way to the mill he met Mr. Fox.", [Quote("On the way to the mill he met Mr.", "Fox")]),
        ("On the way to the mill he met Madame.", []),
        ("On the way to the mill in the first days of May.", []),
        ("On the way to the mill he met an old man: Anna was gone.", []),
        ("On the way to the mill he saw what IBM was and I am.", []),
        ("On the way to the mill he cried, “Come and see the old house of Anna.”", []),
        (
            "“Yes,” said he, and went on to the old house of Anna and Conrad.",
            [
                Quote("said he, and went on to the old house of", "Anna"),
                Quote("said he, and went on to the old house of Anna and", "Conrad"),
            ],
        ),
        (
            f"One {'and one ' * 10}met Anna.",
            [Quote(f"{'and one ' * 7}met", "Anna")],
        ),
    ],
    ids=[
        "comma",
        "first",
        "five",
        "six",
        "title",
        "no name",
        "month",
        "colon",
        "capitals",
        "in quotation",
        "after it",
        "long",
    ],
)
def test_a_name_has_enough_words_before_it_and_is_written_large_for_no_other_reason(
    sentence: str, found: list[Quote]
) -> None:
    assert find_quotes(sentence) == found


def test_a_name_that_comes_again_in_any_form_is_not_asked_for(tmp_path: Path) -> None:
    filler = "It was a long way and nobody knew why. " * 12
    (tmp_path / "a.txt").write_text(
        f"In the old house by the river lived Anna. {filler}Hannah laughed. {filler}"
        f"In the new house by the river lived Bruno. {filler}There were brunos. {filler}"
    )
    task = make_task("book-quote", {"haystack": str(tmp_path), "divide": False})
    with pytest.raises(ValueError, match=r"^haystack has no name after 6 words or more that stands once in 700 tokens"):
        example(task, "test", 0, 0, {"length": 700, "depth": 0.0}, BYTES)
    drawn = [example(task, "test", 0, number, {"length": 500, "depth": 0.0}, BYTES) for number in range(9)]
    assert {BYTES.decode(each.answers[0].wanted) for each in drawn} == {" Anna", " Bruno"}


def test_a_name_that_the_book_has_as_a_common_word_is_not_asked_for(tmp_path: Path) -> None:
    filler = "It was a long way and nobody knew why. " * 30
    (tmp_path / "a.txt").write_text(
        f"In the old house by the river lived Death. In the new house by the river lived Conrad. {filler}"
        f"{filler}And there was no death."
    )
    task = make_task("book-quote", {"haystack": str(tmp_path), "divide": False})
    drawn = [example(task, "test", 0, number, {"length": 500, "depth": 0.0}, BYTES) for number in range(9)]
    assert {BYTES.decode(each.answers[0].wanted) for each in drawn} == {" Conrad"}


@pytest.mark.parametrize(
    ("text", "divide", "length", "message"),
    [
        (book(300), False, 100, r"^length is 100; expected at least \d{3}$"),
        (book(30), False, 9000, r"^haystack has 2,\d{3} tokens for test; expected at least 9,000$"),
        (book(3), True, 900, r"^haystack has 0 tokens for test; expected at least 900$"),
        (
            book(300, names=False),
            False,
            900,
            r"^haystack has no name .* in 900 tokens of test, at depth 0.50; expected the",
        ),
    ],
    ids=["short", "small", "no sentences", "no names"],
)
def test_a_text_without_such_a_sentence_is_refused(
    tmp_path: Path, text: str, divide: bool, length: int, message: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    task = make_task("book-quote", {"haystack": str(tmp_path), "divide": divide})
    with pytest.raises(ValueError, match=message) as error:
        example(task, "test", 0, 0, {"length": length, "depth": 0.5}, BYTES)
    assert isinstance(error.value, WrongLengthError) == (length == 100)


def test_training_takes_another_depth_where_a_text_has_no_name_at_the_first(tmp_path: Path) -> None:
    before, after = book(40, names=False), book(60, names=False)
    (tmp_path / "a.txt").write_text(f"{before} Near the old mill and the river lived Conrad, who was old. {after}")
    task = make_task("book-quote", {"haystack": str(tmp_path), "divide": False})
    with pytest.raises(ValueError, match=r"^haystack has no name .* at depth 0.90; expected the text of books"):
        example(task, "train", 0, 0, {"length": 6000, "depth": 0.9}, BYTES)
    drawn = [example(task, "train", 0, number, 6000, BYTES) for number in range(8)]
    assert {BYTES.decode(each.answers[0].wanted) for each in drawn} == {" Conrad"}
    assert drawn == [example(task, "train", 0, number, 6000, BYTES) for number in range(8)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "haystack is None; expected a file, or a folder with .txt files: the text of books"),
        ({"haystack": "nowhere"}, "nowhere has no text; expected a file or a folder with .txt files"),
        ({"lengths": []}, r"lengths is \(\); expected one or more"),
        ({"depths": [0.5, 1.5]}, r"depths is \(0.5, 1.5\); expected one or more numbers from 0 to 1"),
        ({"repeat": True}, "repeat is not a setting of book-quote; expected one of lengths, depths, haystack, divide"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder: str, fields: dict[str, Any], message: str) -> None:
    given = {"haystack": folder} | fields if fields else {}
    with pytest.raises(ValueError, match=message):
        make_task("book-quote", given)
