from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titans.models.tokenizer import byte_tokenizer
from titans.tasks.babi import ANSWERS, PERSONS, PLACES, THINGS, Babi, Story, answered, read_stories, tell
from titans.tasks.background import split_of
from titans.tasks.base import SPLITS, WrongLengthError, example

BYTES = byte_tokenizer()
LINE = re.compile(rf" ((?:{'|'.join(PERSONS)}) [a-z ]+\.)|\nQuestion: (.*\?)\nAnswer: ([A-Za-z]+)")

STORY = """\
1 Mary went to the kitchen.
2 John moved to the office.
3 Where is Mary? \tkitchen\t1
4 Mary journeyed to the garden.
5 Where is John? \toffice\t2
6 Where is Mary? \tgarden\t4
"""


def write_files_with_a_common_story(folder: Path) -> None:
    """The test asks for John after the first two facts of the training story."""
    (folder / "qa1_a_train.txt").write_text(STORY, encoding="utf-8")
    (folder / "qa1_a_test.txt").write_text(
        "1 Mary went to the kitchen.\n2 John moved to the office.\n3 Where is John?\toffice\t2\n", encoding="utf-8"
    )


def answer_to(facts: list[str], question: str) -> str:
    """What is where by the words of the facts alone: a second telling, from the reader's side."""
    where: dict[str, str] = {}
    has: dict[str, set[str]] = {}
    for fact in facts:
        words = fact.rstrip(".").split()
        person, target = words[0], words[-1]
        if target in PLACES:
            where.update(dict.fromkeys({person, *has.get(person, ())}, target))
        elif words[1] in ("got", "took", "grabbed", "picked"):
            assert where.get(target, where[person]) == where[person] and not any(
                target in held for held in has.values()
            )
            has.setdefault(person, set()).add(target)
            where[target] = where[person]
        else:
            has[person].remove(target)
    asked = question.rstrip("?").split()[-1]
    if question.startswith("Who has"):
        return next(person for person, held in has.items() if asked in held)
    return where[asked]


@given(st.sampled_from(["qa1", "qa2"]), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_our_own_stories_are_answered_by_their_facts(task: str, seed: int) -> None:
    story = tell(random.Random(seed), task)
    assert story.answer == answer_to([*story.facts], story.question)
    assert story.answer in ANSWERS[task]


@given(st.sampled_from(["qa1", "qa2"]), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_every_question_that_facts_answer_is_found(task: str, seed: int) -> None:
    story = tell(random.Random(seed), task)
    found = answered(story.facts, task)
    assert story in found
    assert all(other.answer == answer_to([*story.facts], other.question) for other in found)
    told = " ".join(story.facts)
    named = [name for name in (PERSONS if task == "qa1" else THINGS) if name in told]
    assert [other.question.rstrip("?").split()[-1] for other in found] == named


def test_things_that_somebody_has_go_along_and_stay_where_they_are_left() -> None:
    facts = ["Mary got the milk there.", "John moved to the office.", "Mary went to the kitchen.", "Nothing happens."]
    assert [story.answer for story in answered(facts, "qa2")] == ["kitchen"]
    facts += ["Mary put down the milk.", "Mary went back to the garden.", "John travelled to the kitchen."]
    assert [story.answer for story in answered(facts, "qa2")] == ["kitchen"]
    facts += ["John picked up the milk there.", "John journeyed to the bedroom."]
    assert [story.answer for story in answered(facts, "qa2")] == ["bedroom"]
    assert {story.question: story.answer for story in answered(facts, "qa1")} == {
        "Where is John?": "bedroom",
        "Where is Mary?": "garden",
    }
    assert answered(facts, "qa3") == []


def test_our_own_stories_are_of_many_kinds() -> None:
    stories = [tell(random.Random(seed), "qa2") for seed in range(500)]
    words = {word for story in stories for fact in story.facts for word in fact.split()}
    assert {"got", "grabbed", "dropped", "discarded", "journeyed"} <= words
    assert {story.answer for story in stories} == set(PLACES)
    lengths = [len(story.facts) for story in stories]
    assert min(lengths) == 3 and max(lengths) >= 20
    moved_on = [story for story in stories if not any(story.answer in fact for fact in story.facts[-2:])]
    assert len(moved_on) > 50  # the last place said is not always the answer


def test_a_story_is_told_up_to_each_of_its_questions(tmp_path: Path) -> None:
    file = tmp_path / "qa1_a_train.txt"
    file.write_text(STORY + "1 Sandra moved to the hallway.\n2 Where is Sandra?\thallway\t1\n", encoding="utf-8")
    mary, john, again = "Mary went to the kitchen.", "John moved to the office.", "Mary journeyed to the garden."
    assert read_stories(file) == [
        [
            Story((mary, john), "Where is Mary?", "kitchen", (0,)),
            Story((mary, john, again), "Where is John?", "office", (1,)),
            Story((mary, john, again), "Where is Mary?", "garden", (2,)),
        ],
        [Story(("Sandra moved to the hallway.",), "Where is Sandra?", "hallway", (0,))],
    ]


@pytest.mark.parametrize(
    "text", ["Mary went to the kitchen.\n", "2 Mary went to the kitchen.\n", STORY + "\nno number\n"]
)
def test_a_file_that_is_not_of_babi_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "qa1_a_train.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"line \d of .* is '.*'; expected a number"):
        read_stories(file)


@given(st.sampled_from(["qa1", "qa2"]), st.integers(150, 800), st.sampled_from(SPLITS), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_in_training_every_fact_may_be_followed_by_a_question(task: str, length: int, split: str, seed: int) -> None:
    drawn = example(Babi(task=task), split, seed, 0, length, BYTES)
    assert len(drawn.tokens) <= length
    text = BYTES.decode(drawn.tokens)
    lines = LINE.findall(text)
    assert "".join(f" {fact}" if fact else f"\nQuestion: {q}\nAnswer: {a}" for fact, q, a in lines) == text
    facts: list[str] = []
    asked = iter(drawn.answers)
    for fact, question, answer in lines:
        if fact:
            facts.append(fact)
            continue
        assert answer == answer_to(facts, question)
        assert split_of(" ".join([*facts, question])) == split
        found = next(asked)
        assert BYTES.decode(found.wanted) == f" {answer}"
        assert drawn.tokens[found.place : found.place + len(found.wanted)] == [*found.wanted]
    assert next(asked, None) is None
    assert BYTES.decode(drawn.tokens[drawn.boundary :]).startswith("\nQuestion: ")


@pytest.mark.parametrize("task", ["qa1", "qa2"])
def test_many_facts_are_followed_by_a_question(task: str) -> None:
    drawn = [example(Babi(task=task), "train", 0, number, 600, BYTES) for number in range(40)]
    assert sum(len(each.answers) for each in drawn) > 100
    assert example(Babi(task=task), "train", 0, 3, 600, BYTES) == drawn[3]


@pytest.mark.parametrize("task", ["qa1", "qa2"])
def test_every_number_of_facts_of_a_task_can_be_tested(task: str) -> None:
    groups = Babi(task=task).groups()
    assert len(groups) == 5
    for group in groups:
        example(Babi(task=task), "test", 0, 0, group, BYTES)


def test_numbers_of_facts_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "qa1_a_train.txt").write_text(STORY, encoding="utf-8")
    assert Babi(data=str(tmp_path)).facts == (2, 3)
    with pytest.raises(ValueError, match=r"^facts is 4; expected a number that stories of qa1 have$"):
        Babi(data=str(tmp_path), facts=(2, 4))


def test_no_question_of_the_test_is_asked_in_training(tmp_path: Path) -> None:
    write_files_with_a_common_story(tmp_path)
    drawn = [example(Babi(data=str(tmp_path)), "train", 0, number, 400, BYTES) for number in range(40)]
    asked = [LINE.findall(BYTES.decode(each.tokens)) for each in drawn]
    after_two = [lines[i + 1][1] for lines in asked for i in range(len(lines) - 1) if "office" in lines[i][0]]
    assert "Where is Mary?" in after_two
    assert "Where is John?" not in after_two


def test_files_with_other_words_are_asked_what_they_ask(tmp_path: Path) -> None:
    (tmp_path / "qa1_a_train.txt").write_text(
        "1 John went to the kitchen.\n2 John hurried to the garden.\n3 Where is John?\tgarden\t2\n", encoding="utf-8"
    )
    text = BYTES.decode(example(Babi(data=str(tmp_path)), "train", 0, 0, 400, BYTES).tokens)
    assert text == " John went to the kitchen. John hurried to the garden.\nQuestion: Where is John?\nAnswer: garden"


@pytest.mark.parametrize("task", ["qa1", "qa2"])
def test_a_test_asks_once_after_so_many_facts(task: str) -> None:
    for number, group in enumerate(Babi(task=task, facts=(3, 7)).groups()):
        drawn = example(Babi(task=task), "test", 0, number, group, BYTES)
        lines = LINE.findall(BYTES.decode(drawn.tokens))
        assert [bool(fact) for fact, _, _ in lines] == [True] * group["facts"] + [False]
        assert len(drawn.answers) == 1
        assert drawn.answers[0].place + len(drawn.answers[0].wanted) == len(drawn.tokens)


def test_questions_that_cannot_be_worked_out_are_asked_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "qa5_a_train.txt").write_text(
        "1 Bill took the milk there.\n2 Bill gave the milk to Mary.\n3 Who gave the milk to Mary?\tBill\t2\n" * 10
    )
    text = BYTES.decode(example(Babi(data=str(tmp_path), task="qa5"), "train", 0, 0, 300, BYTES).tokens)
    assert text == (
        " Bill took the milk there. Bill gave the milk to Mary.\nQuestion: Who gave the milk to Mary?\nAnswer: Bill"
    )


@given(st.sampled_from(["qa1", "qa2"]), st.integers(150, 800), st.sampled_from(SPLITS), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_all_may_be_asked_at_the_end_each_question_once(task: str, length: int, split: str, seed: int) -> None:
    also = ("qa1", "who") if task == "qa2" else ()
    drawn = example(Babi(task=task, ask="end", also=also), split, seed, 0, length, BYTES)
    assert len(drawn.tokens) <= length
    lines = LINE.findall(BYTES.decode(drawn.tokens))
    facts = [fact for fact, _, _ in lines if fact]
    questions = [(question, answer) for _, question, answer in lines if question]
    assert [bool(fact) for fact, _, _ in lines] == [True] * len(facts) + [False] * len(questions)
    assert len(dict(questions)) == len(questions) == len(drawn.answers)
    assert all(answer == answer_to(facts, question) for question, answer in questions)
    assert all(split_of(" ".join([*facts, question])) == split for question, _ in questions)
    assert BYTES.decode(drawn.tokens[drawn.boundary :]).startswith("\nQuestion: ")


def test_questions_at_the_end_are_many_and_of_all_kinds(tmp_path: Path) -> None:
    task = Babi(task="qa2", ask="end", also=("qa1", "who"))
    drawn = [example(task, "train", 0, number, 600, BYTES) for number in range(40)]
    assert sum(len(each.answers) for each in drawn) > 100
    words = " ".join(BYTES.decode(each.tokens) for each in drawn)
    assert all(question in words for question in ("Where is Mary?", "Where is the milk?", "Who has the milk?"))
    (tmp_path / "qa5_a_train.txt").write_text("1 Bill gave the milk to Mary.\n2 Who has it?\tMary\t1\n" * 10)
    other = example(Babi(data=str(tmp_path), task="qa5", ask="end"), "train", 0, 0, 300, BYTES)
    assert BYTES.decode(other.tokens) == " Bill gave the milk to Mary.\nQuestion: Who has it?\nAnswer: Mary"
    with pytest.raises(ValueError, match=r"^ask is 'never'; expected one of throughout, end$"):
        Babi(ask="never")


def test_who_has_a_thing_follows_from_the_facts() -> None:
    facts = ["Mary went to the kitchen.", "Mary got the milk there.", "John took the apple."]
    assert [story.answer for story in answered(facts, "who")] == ["John", "Mary"]
    assert [story.answer for story in answered([*facts, "Mary dropped the milk."], "who")] == ["John"]


def test_stories_of_qa2_may_be_asked_about_people_too_in_training_alone() -> None:
    both = Babi(task="qa2", also=("qa1",))
    texts = [BYTES.decode(example(both, "train", 0, number, 600, BYTES).tokens) for number in range(20)]
    for text in texts:
        facts: list[str] = []
        for fact, question, answer in LINE.findall(text):
            facts += [fact] if fact else []
            assert fact or answer == answer_to(facts, question)
    questions = [question for text in texts for _, question, _ in LINE.findall(text) if question]
    assert 0 < sum("the" in question for question in questions) < len(questions)
    tested = [BYTES.decode(example(both, "test", 0, number, {"facts": 8}, BYTES).tokens) for number in range(10)]
    assert all("Where is the" in text for text in tested)
    assert Babi(task="qa2", also=("who", "qa1")).most_questions == 10
    for task, also in (("qa2", ("qa3",)), ("qa2", ("qa1", "qa1")), ("qa2", "qa1"), ("qa1", ("qa2",))):
        with pytest.raises(ValueError, match=r"^also is .* and task is .*; expected \('qa1', 'who'\) or one of them"):
            Babi(task=task, also=also)  # type: ignore[arg-type]


def test_lengths_and_numbers_that_no_story_has_are_refused() -> None:
    with pytest.raises(WrongLengthError, match=r"^length is 20; expected room for a fact of qa1 and a question$"):
        example(Babi(), "train", 0, 0, 20, BYTES)
    with pytest.raises(WrongLengthError, match=r"^length is 300; expected at most 256, the longest of babi$"):
        example(Babi(longest=256), "train", 0, 0, 300, BYTES)
    with pytest.raises(ValueError, match=r"^facts is 99; expected a number that stories of qa1 have$"):
        example(Babi(), "test", 0, 0, {"facts": 99}, BYTES)
    for longest in (0, -3, 2.5, "x", True):
        with pytest.raises(ValueError, match=r"^longest is .*; expected a whole number of at least 1, or none$"):
            Babi(longest=longest)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^facts is \(0,\); expected one or more whole numbers of at least 1$"):
        Babi(facts=(0,))
