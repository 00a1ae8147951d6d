from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks.test_babi import STORY, answer_to, write_files_with_a_common_story
from titans.models.text import encode
from titans.models.tokenizer import byte_tokenizer, train_tokenizer
from titans.tasks.babi import MOVES, PERSONS
from titans.tasks.babilong import EXAMPLES, Babilong
from titans.tasks.background import OWN, split_of, split_sentences
from titans.tasks.base import SPLITS, Example, example

BYTES = byte_tokenizer()
WORDS = train_tokenizer([OWN] * 3, 700)
FACT = re.compile(rf"(?:{'|'.join(PERSONS)}) [a-z ]+\.")


def _text(drawn: Example, tokenizer: Any = BYTES) -> tuple[str, str, str]:
    """What stands before the context, the context, and what follows it."""
    before, _, context = tokenizer.decode(drawn.tokens[: drawn.boundary]).partition("<context>\n")
    return before, context, tokenizer.decode(drawn.tokens[drawn.boundary :])


def _data(path: Path, stories: int = 20, task: str = "qa1") -> str:
    """Files whose stories can be told apart: the train and test stories of each number have a place to themselves."""
    path.mkdir(exist_ok=True)
    for ending in ("train", "test"):
        lines = (f"1 Mary went to the {ending}{n}.\n2 Where is Mary?\t{ending}{n}\t1\n" for n in range(stories))
        (path / f"{task}_made-up_{ending}.txt").write_text("".join(lines), encoding="utf-8")
    return str(path)


def _books(path: Path, sentences: int = 1000) -> str:
    path.mkdir(exist_ok=True)
    half = sentences // 2
    for name, numbers in (("a", range(half)), ("b", range(half, sentences))):
        (path / f"{name}.txt").write_text(" ".join(f"Line {n:04} of the book." for n in numbers), encoding="utf-8")
    return str(path)


@given(
    task=st.sampled_from(["qa1", "qa2"]),
    tokenizer=st.sampled_from([BYTES, WORDS]),
    length=st.integers(1300, 3000),
    split=st.sampled_from(SPLITS),
    examples=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_a_sequence_has_its_length_its_facts_and_the_right_answer(
    task: str, tokenizer: Any, length: int, split: str, examples: int, seed: int
) -> None:
    drawn = Babilong(task=task, examples=examples).draw(random.Random(seed), {"length": length}, split, tokenizer)
    assert len(drawn.tokens) == length
    before, context, after = _text(drawn, tokenizer)
    assert before.count("Example: ") == examples
    facts = FACT.findall(context)
    question, answer = re.fullmatch(r"\n</context>\nQuestion: (Where is .*\?)\nAnswer: ([a-z]+)", after).groups()  # type: ignore[union-attr]
    assert answer == answer_to(facts, question)
    assert tokenizer.decode(drawn.answers[0].wanted) == f" {answer}"
    assert [*drawn.answers[0].wanted] == drawn.tokens[drawn.answers[0].place :]
    assert split_of(" ".join([*facts, question])) == split

    rest = split_sentences(FACT.sub("", context))  # without the facts it is the background, undisturbed
    own = split_sentences(OWN)
    first = own.index(rest[0])
    assert rest[:-1] == [own[(first + i) % len(own)] for i in range(len(rest) - 1)]
    assert own[(first + len(rest) - 1) % len(own)].startswith(rest[-1])


@given(task=st.sampled_from(["qa1", "qa2"]), length=st.integers(900, 2000), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_training_sequence_may_ask_several_questions(task: str, length: int, seed: int) -> None:
    drawn = example(Babilong(task=task, questions=3), "train", seed, 0, length, BYTES)
    assert len(drawn.tokens) == length
    _, context, after = _text(drawn)
    facts = FACT.findall(context)
    pairs = re.findall(r"\nQuestion: (Where is .*\?)\nAnswer: ([a-z]+)", after)
    assert 1 <= len(pairs) == len(drawn.answers) <= 3 and len({question for question, _ in pairs}) == len(pairs)
    for (question, answer), asked in zip(pairs, drawn.answers, strict=True):
        assert answer == answer_to(facts, question)
        wanted = [*asked.wanted]
        assert BYTES.decode(wanted) == f" {answer}"
        assert drawn.tokens[asked.place : asked.place + len(wanted)] == wanted
        assert split_of(" ".join([*facts, question])) == "train"


def test_several_questions_are_the_rule_and_a_test_asks_one() -> None:
    task = Babilong(questions=4)
    drawn = [example(task, "train", 0, number, 1500, BYTES) for number in range(40)]
    assert sum(len(each.answers) for each in drawn) > 80
    assert len(example(task, "test", 0, 0, {"length": 1500}, BYTES).answers) == 1


def test_no_question_of_the_test_is_asked_in_training(tmp_path: Path) -> None:
    write_files_with_a_common_story(tmp_path)
    task = Babilong(data=str(tmp_path), questions=4)
    asked = {_text(example(task, "train", 0, number, 1500, BYTES))[2] for number in range(60)}
    assert any("garden" in text and "office" in text for text in asked)
    assert any("kitchen" in text for text in asked)
    assert not any("kitchen" in text and "office" in text for text in asked)


def test_facts_stand_anywhere() -> None:
    shares = []
    for number in range(60):
        context = _text(example(Babilong(), "train", 0, number, 2000, BYTES))[1]
        shares += [found.start() / len(context) for found in FACT.finditer(context)]
    assert min(shares) < 0.05 and max(shares) > 0.95
    assert 0.4 < sum(shares) / len(shares) < 0.6


def test_question_and_answer_are_cut_as_in_the_whole_text() -> None:
    for number in range(20):
        drawn = example(Babilong(), "train", 0, number, 900, WORDS)
        whole = encode(WORDS, WORDS.decode(drawn.tokens))
        assert whole[drawn.boundary - len(drawn.tokens) :] == drawn.tokens[drawn.boundary :]
        assert whole[:300] == drawn.tokens[:300]


def test_every_fact_of_a_story_of_files_is_there(tmp_path: Path) -> None:
    (tmp_path / "qa3_a_test.txt").write_text(STORY, encoding="utf-8")
    task = Babilong(data=str(tmp_path), task="qa3")
    seen = set()
    for number in range(30):
        _, context, after = _text(example(task, "test", 0, number, {"length": 1500}, BYTES))
        seen.add((*FACT.findall(context), after.partition("Question: ")[2]))
    mary, john, again = "Mary went to the kitchen.", "John moved to the office.", "Mary journeyed to the garden."
    assert seen == {
        (mary, john, "Where is Mary?\nAnswer: kitchen"),
        (mary, john, again, "Where is John?\nAnswer: office"),
        (mary, john, again, "Where is Mary?\nAnswer: garden"),
    }


def test_splits_have_stories_of_their_own(tmp_path: Path) -> None:
    task = Babilong(data=_data(tmp_path))
    seen = {
        split: {
            BYTES.decode(example(task, split, 0, number, 600, BYTES).answers[0].wanted).strip() for number in range(300)
        }
        for split in SPLITS
    }
    assert seen["test"] == {f"test{n}" for n in range(20)}
    assert seen["validation"] == {"train18", "train19"}
    assert seen["train"] == {f"train{n}" for n in range(18)}


def test_splits_have_parts_of_the_books_of_their_own(tmp_path: Path) -> None:
    task = Babilong(background=_books(tmp_path))
    seen: dict[str, set[int]] = {}
    for split in SPLITS:
        contexts = (_text(example(task, split, 0, number, 1500, BYTES))[1] for number in range(100))
        seen[split] = {int(n) for context in contexts for n in re.findall(r"Line (\d{4}) of", context)}
    assert seen["train"] <= set(range(800)) and len(seen["train"]) > 600
    assert seen["validation"] <= set(range(800, 900)) and len(seen["validation"]) > 60
    assert seen["test"] <= set(range(900, 1000)) and len(seen["test"]) > 60


def test_books_that_are_too_short_are_refused(tmp_path: Path) -> None:
    task = Babilong(background=_books(tmp_path, 100))
    with pytest.raises(ValueError, match=r"^background has 2\d\d tokens; expected at least 2,\d\d\d$"):
        example(task, "test", 0, 0, {"length": 3000}, BYTES)


def test_stories_that_are_too_long_are_passed_over_while_there_are_others(tmp_path: Path) -> None:
    facts = "".join(f"{n} Mary {MOVES[n % 5]} the office.\n" for n in range(1, 41))
    long = f"{facts}41 Where is Mary?\toffice\t40\n"
    (tmp_path / "qa2_a_test.txt").write_text(f"{long}1 Mary went to the kitchen.\n2 Where is Mary?\tkitchen\t1\n")
    task = Babilong(data=str(tmp_path), task="qa2")
    answers = {
        length: {
            BYTES.decode(example(task, "test", 0, n, {"length": length}, BYTES).answers[0].wanted) for n in range(20)
        }
        for length in (900, 2000)
    }
    assert answers == {900: {" kitchen"}, 2000: {" kitchen", " office"}}


def test_a_length_that_no_story_fits_in_is_refused_with_one_that_does(tmp_path: Path) -> None:
    (tmp_path / "qa1_a_test.txt").write_text(STORY, encoding="utf-8")
    task = Babilong(data=str(tmp_path))
    with pytest.raises(ValueError, match=r"^length is 100; expected at least \d+ for the facts of qa1$") as error:
        example(task, "test", 0, 0, {"length": 100}, BYTES)
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert len(example(task, "test", 0, 0, {"length": least}, BYTES).tokens) == least
    with pytest.raises(ValueError, match=f"length is {least - 1}"):
        example(task, "test", 0, 0, {"length": least - 1}, BYTES)


def test_split_seed_and_number_decide_a_sequence() -> None:
    first = example(Babilong(), "test", 0, 0, {"length": 900}, BYTES)
    assert example(Babilong(), "test", 0, 0, {"length": 900}, byte_tokenizer()) == first
    assert example(Babilong(), "test", 0, 1, {"length": 900}, BYTES) != first


def test_groups_are_lengths_and_chance_is_one_answer_of_all() -> None:
    assert Babilong(lengths=(500, 1000)).groups() == [{"length": 500}, {"length": 1000}]
    assert Babilong().training_group(random.Random(0), 700) == {"length": 700}
    assert Babilong(task="qa2").chance == pytest.approx(1 / 6)


def test_examples_are_answered_by_a_word_of_theirs() -> None:
    for examples in EXAMPLES.values():
        for text in examples:
            facts, answer = text.rsplit("? ", 1)
            assert re.fullmatch(r"\w+", answer) and answer in facts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "qa6"}, "task is 'qa6'; expected one of qa1, qa2, qa3, qa4, qa5"),
        ({"task": "qa3"}, "task is 'qa3' without data; expected a folder of bAbI files, or one of qa1, qa2"),
        ({"data": "nowhere"}, "nowhere has no files of qa1; expected qa1_..._train.txt and _test.txt"),
        ({"background": "nowhere"}, "nowhere has no text; expected"),
        ({"lengths": ()}, r"lengths is \(\); expected"),
        ({"examples": 9}, "examples is 9; expected 0 to 2"),
        ({"questions": 0}, "questions is 0; expected 1 to 4 for qa1"),
        ({"questions": 4, "task": "qa2"}, "questions is 4; expected 1 to 3 for qa2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Babilong(**settings)


def test_a_split_without_stories_is_refused(tmp_path: Path) -> None:
    (tmp_path / "qa1_a_train.txt").write_text(STORY, encoding="utf-8")
    task = Babilong(data=str(tmp_path))
    with pytest.raises(ValueError, match=r"has 0 files qa1_..._test.txt; expected one"):
        example(task, "test", 0, 0, {"length": 900}, BYTES)
    with pytest.raises(ValueError, match="has no questions for validation; expected at least one"):
        example(task, "validation", 0, 0, {"length": 900}, BYTES)


def test_a_sequence_says_where_its_sentences_are_and_which_are_needed(tmp_path: Path) -> None:
    task = Babilong(data=_data(tmp_path / "data"), background=_books(tmp_path / "books"))
    drawn = example(task, "test", 0, 0, {"length": 1200}, BYTES)
    ends = [*drawn.sentences[1:], drawn.boundary]
    sentences = [BYTES.decode(drawn.tokens[a:b]).strip() for a, b in zip(drawn.sentences, ends, strict=True)]
    (needed,) = drawn.needed
    assert sentences[needed].startswith("Mary went to the test")
    assert all("Line ".startswith(line[:5]) for number, line in enumerate(sentences) if number != needed)
    assert BYTES.decode(drawn.tokens[: drawn.sentences[0]]).endswith("<context>\n")


def test_a_text_that_is_too_short_is_repeated_only_where_that_is_asked_for(tmp_path: Path) -> None:
    task = Babilong(data=_data(tmp_path / "data"), background=_books(tmp_path / "books"))
    again = replace(task, repeat=True)
    assert len(example(again, "test", 0, 0, {"length": 20_000}, BYTES).tokens) == 20_000
    with pytest.raises(ValueError, match=r"background has .* tokens; expected at least"):
        example(task, "test", 0, 0, {"length": 20_000}, BYTES)
    short = {"length": 1200}
    assert example(again, "test", 0, 0, short, BYTES) == example(task, "test", 0, 0, short, BYTES)
