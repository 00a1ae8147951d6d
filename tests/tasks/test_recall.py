from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titans.tasks import SPLITS, Example, Task, example
from titans.tasks.recall import MQAR, Reassigned, Recall, Retention, in_split

SMALL = {"num_keys": 12, "num_values": 7, "num_fillers": 3}
MQAR_SMALL = MQAR(cells=((32, 4), (64, 16)), vocabulary=64)
TASKS: list[Task] = [
    Recall(),
    Recall(pairs=3, lengths=(9, 40), vary=True, **SMALL),
    Recall(pairs=3, lengths=(9, 40), vary=True, depths=(0.0, 0.4, 1.0), **SMALL),
    Reassigned(),
    Reassigned(pairs=4, length=40, share=0.75, times=2, **SMALL),
    Retention(distances=(0, 7, 64)),
    Retention(pairs=5, distances=(0, 7, 64), between="pairs", **SMALL),
    MQAR(cells=((64, 4), (128, 32))),
    MQAR_SMALL,
    MQAR(cells=((32, 4), (64, 16)), vocabulary=64, fill="random"),
]
some_task = st.sampled_from(TASKS)


def draw(task: Task, group: dict[str, Any], number: int = 0, split: str = "test") -> Example:
    return example(task, split, 0, number, group)


def read(task: Task, made: Example) -> list[tuple[int, int]]:
    """All (key, value) that stand side by side before the questions, in order."""
    if isinstance(task, MQAR):
        keys, values = range(1, task.vocabulary // 2), range(task.vocabulary // 2, task.vocabulary)
    else:
        keys, values = range(task.num_keys), range(task.num_keys, task.num_keys + task.num_values)
    told = list(made.tokens[: made.boundary])
    return [(a, b) for a, b in pairwise(told) if a in keys and b in values]


@settings(max_examples=200, deadline=None)
@given(task=some_task, number=st.integers(0, 10**6), split=st.sampled_from(SPLITS), data=st.data())
def test_who_keeps_the_last_value_of_every_key_answers_everything(
    task: Task, number: int, split: str, data: st.DataObject
) -> None:
    group = data.draw(st.sampled_from([*task.groups(), 48, 64, 65]))
    made = example(task, split, 0, number, group)
    known = dict(read(task, made))
    assert made.answers
    for answer in made.answers:
        assert made.boundary < answer.place <= len(made.tokens)
        assert answer.wanted == (known[made.tokens[answer.place - 1]],)
    places = [answer.place for answer in made.answers]
    assert places == sorted(set(places))
    assert task.vocab_size is not None
    assert all(0 <= token < task.vocab_size for token in made.tokens)
    if isinstance(group, int):
        assert len(made.tokens) <= group
    else:
        assert len(made.tokens) == group.get("length", len(made.tokens))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_split_seed_and_number_decide_a_sequence(task: Task) -> None:
    group = task.groups()[0]
    streams = [
        [example(task, split, seed, number, group) for number in range(3)] for split in SPLITS for seed in range(2)
    ]
    assert streams[0] == [example(task, "train", 0, number, group) for number in range(3)]
    sequences = [tuple(made.tokens) for stream in streams for made in stream]
    assert len(set(sequences)) == len(sequences)
    json.dumps([task.settings(), task.groups()])


@pytest.mark.parametrize(
    ("task", "group"),
    [
        (Recall(pairs=1, num_keys=40, num_values=30), {"length": 8}),
        (Reassigned(pairs=2, num_keys=10, num_values=10), {"length": 32, "rewrites": 1}),
        (Retention(pairs=1, num_keys=40, num_values=30), {"distance": 4}),
        (MQAR(cells=((8, 1),), vocabulary=72), {"length": 8, "pairs": 1}),
    ],
    ids=lambda x: x.name if isinstance(x, Task) else "",
)
def test_no_pairs_that_are_trained_with_are_tested(task: Task, group: dict[str, Any]) -> None:
    seen = {split: set[Any]() for split in SPLITS}
    for split in SPLITS:
        for number in range(400):
            seen[split].add(tuple(sorted(dict(reversed(read(task, draw(task, group, number, split)))).items())))
    assert all(len(pairs) > 30 for pairs in seen.values())
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]


def test_the_rule_gives_a_tenth_to_the_test_and_stays_as_it_is() -> None:
    counts = Counter(split for content in range(5000) for split in SPLITS if in_split(content, split))
    assert sum(counts.values()) == 5000
    assert counts["test"] == pytest.approx(500, abs=80)
    assert counts["validation"] == pytest.approx(500, abs=80)
    assert all(in_split([(key, 0)], split) for key, split in zip((0, 22, 19), SPLITS, strict=True))


def test_too_few_pairs_for_a_split_of_their_own_are_shared() -> None:
    task = Recall(pairs=1, num_keys=2, num_values=2, lengths=(8,))
    for split in SPLITS:
        assert len({tuple(draw(task, {"length": 8}, number, split).tokens[:2]) for number in range(100)}) == 4


@pytest.mark.parametrize("length", [24, 25, 64, 1024])
def test_the_first_question_can_stand_at_the_boundary_and_none_before_it(length: int) -> None:
    task = Recall(lengths=(length,))
    drawn = [draw(task, {"length": length}, number) for number in range(60)]
    assert {made.boundary for made in drawn} == {max(16, length - 16)}
    assert min(made.answers[0].place - 1 for made in drawn) == max(16, length - 16)


def test_the_order_of_the_questions_says_nothing_about_the_order_of_the_pairs() -> None:
    task = Recall()
    same = 0
    for number in range(1000):
        made = draw(task, {"length": 64}, number)
        asked = [made.tokens[answer.place - 1] for answer in made.answers]
        same += sum(a == b for a, b in zip(asked, made.tokens[0:16:2], strict=True))
    assert same / 8000 == pytest.approx(1 / 8, abs=0.02)


def test_values_are_drawn_evenly_so_that_guessing_is_right_as_often_as_the_task_says() -> None:
    task = Recall(num_values=5)
    counts = Counter(answer.wanted for n in range(500) for answer in draw(task, {"length": 64}, n).answers)
    assert len(counts) == 5
    assert all(count / 4000 == pytest.approx(task.chance, abs=0.03) for count in counts.values())


def test_recall_trains_with_all_pairs_or_with_any_number_that_fits() -> None:
    assert Recall().training_group(random.Random(0), 64) == {"length": 64, "pairs": 8}
    task = Recall(vary=True)
    assert {task.training_group(random.Random(n), 17)["pairs"] for n in range(100)} == {1, 2, 3, 4, 5}
    assert {len(example(task, "train", 0, n, 64).answers) for n in range(200)} == set(range(1, 9))


@settings(max_examples=100, deadline=None)
@given(pairs=st.integers(1, 8), more=st.integers(0, 60), depth=st.floats(0, 1), number=st.integers(0, 10**6))
def test_the_pairs_begin_at_the_depth_asked_for(pairs: int, more: int, depth: float, number: int) -> None:
    length = 3 * pairs + more
    task = Recall(pairs=pairs, lengths=(length,), depths=(depth,))
    made = draw(task, {"length": length, "depth": depth}, number)
    start = next(place for place, token in enumerate(made.tokens) if token < task.num_keys)
    assert made.boundary == max(2 * pairs, length - 2 * pairs)
    assert start == round(depth * (made.boundary - 2 * pairs))
    assert len(read(task, Example(made.tokens[start : start + 2 * pairs], (), 2 * pairs))) == pairs
    outside = [*made.tokens[:start], *made.tokens[start + 2 * pairs : made.boundary]]
    assert all(token >= task.num_keys + task.num_values for token in outside)


def test_depths_are_an_axis_of_the_test_and_any_depth_is_trained_with() -> None:
    task = Recall(lengths=(64, 128), depths=(0.0, 1.0))
    assert task.axes == ("length", "depth")
    assert Recall(lengths=(64, 128)).axes == Recall.axes == ("length",)
    cells = [{"length": length, "depth": depth} for length in (64, 128) for depth in (0.0, 1.0)]
    assert task.groups() == cells
    starts = Counter(
        next(p for p, t in enumerate(example(task, "train", 0, n, 64).tokens) if t < 64) for n in range(900)
    )
    assert set(starts) == set(range(33))  # 64 tokens without 16 of the pairs and 16 for the questions


def test_without_depths_the_sequences_are_those_with_depth_zero() -> None:
    plain, deep = Recall(), Recall(depths=(0.0,))
    for number in range(20):
        first, second = random.Random(number), random.Random(number)
        group = {"length": 64}
        assert plain.draw(first, group, "test", None) == deep.draw(second, group | {"depth": 0.0}, "test", None)


@pytest.mark.parametrize("rewrites", [0, 1, 2, 3])
def test_the_keys_judged_were_rewritten_as_often_as_the_group_says(rewrites: int) -> None:
    task = Reassigned()
    for number in range(50):
        made = draw(task, {"length": 128, "rewrites": rewrites}, number)
        told = read(task, made)
        times = Counter(key for key, _ in told)
        assert len(made.answers) == 4
        assert sum(count > 1 for count in times.values()) == 4
        assert {times[made.tokens[answer.place - 1]] for answer in made.answers} == {rewrites + 1}
        assert len(set(told)) == len(told)  # a value that was replaced does not come back


def test_training_with_rewritten_keys_mixes_them_with_others_and_judges_all() -> None:
    task = Reassigned()
    times, pairs = Counter[int](), set[int]()
    for number in range(200):
        made = example(task, "train", 0, number, 64)
        counts = Counter(key for key, _ in read(task, made))
        asked = [made.tokens[answer.place - 1] for answer in made.answers]
        assert sorted(asked) == sorted(counts)
        times.update(counts.values())
        pairs.add(len(counts))
    assert pairs == set(range(1, 9))
    assert set(times) == {1, 2, 3, 4}
    assert times[1] / times.total() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("between", ["fillers", "pairs"])
@pytest.mark.parametrize("distance", [0, 1, 64, 1025])
def test_the_questions_come_after_exactly_the_distance(between: str, distance: int) -> None:
    task = Retention(between=between)
    made = draw(task, {"distance": distance})
    asked = [made.tokens[answer.place - 1] for answer in made.answers]
    assert [answer.place - 1 for answer in made.answers] == [16 + distance + 2 * i for i in range(8)]
    assert made.boundary == 16 + distance
    assert sorted(asked) == sorted(made.tokens[0:16:2])
    middle = made.tokens[16 : 16 + distance]
    assert not set(asked) & set(middle)
    if between == "fillers":
        assert all(token >= 128 for token in middle)
    else:
        assert len(read(task, made)) == 8 + distance // 2


def test_retention_trains_at_any_distance_that_fits() -> None:
    distances = [Retention().training_group(random.Random(n), 48)["distance"] for n in range(300)]
    assert set(distances) == set(range(17))


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_questions_come_soon_by_the_power_law(power: float) -> None:
    task = MQAR(cells=((34, 1),), vocabulary=256, power=power)
    slots = Counter((draw(task, {"length": 34, "pairs": 1}, n).answers[0].place - 3) / 2 for n in range(3000))
    weights = [(slot + 1) ** (power - 1) for slot in range(16)]
    assert set(slots) == set(range(16))
    for slot, weight in enumerate(weights):
        assert slots[slot] / 3000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_the_keys_and_values_of_a_sequence_are_distinct_and_its_random_tokens_are_none_of_its_keys() -> None:
    task = MQAR(cells=((128, 16),), vocabulary=64, fill="random")
    zeros = MQAR(cells=((128, 16),), vocabulary=64)
    for number in range(30):
        made = draw(task, {"length": 128, "pairs": 16}, number)
        keys, values = made.tokens[0:32:2], made.tokens[1:32:2]
        assert len(set(keys)) == len(set(values)) == len(made.answers) == 16
        assert all(1 <= key < 32 <= value < 64 for key, value in zip(keys, values, strict=True))
        asked = {answer.place - 1 for answer in made.answers}
        rest = [token for place, token in enumerate(made.tokens) if place >= 32 and place not in asked]
        assert not set(rest) & set(keys)
        made = draw(zeros, {"length": 128, "pairs": 16}, number)
        assert sum(token == 0 for token in made.tokens) == 128 - 3 * 16


def test_mqar_trains_with_few_pairs_as_often_as_with_many() -> None:
    counts = [MQAR().training_group(random.Random(n), 256)["pairs"] for n in range(600)]
    assert min(counts) == 1
    assert max(counts) == 64
    assert sum(count <= 8 for count in counts) / 600 == pytest.approx(0.5, abs=0.08)
    assert max(MQAR(cells=((64, 4),)).training_group(random.Random(n), 256)["pairs"] for n in range(99)) == 4


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        (Recall, {"pairs": 0}, "pairs is 0; expected at least 1"),
        (Recall, {"pairs": 9, "num_keys": 8}, "pairs is 9; expected at most num_keys, 8"),
        (Recall, {"lengths": (64, 23)}, r"lengths is \(64, 23\); expected one or more whole numbers of at least 24"),
        (Recall, {"lengths": ()}, r"lengths is \(\); expected one or more"),
        (Recall, {"depths": (0.5, 1.5)}, r"depths is \(0.5, 1.5\); expected numbers from 0 to 1, or none"),
        (Reassigned, {"share": 0.05}, "share is 0.05 of 8 pairs; expected it to leave some rewritten and some not"),
        (Reassigned, {"share": 1.0}, "share is 1.0 of 8 pairs; expected"),
        (Reassigned, {"times": 0}, "times is 0; expected 1 to 63"),
        (Reassigned, {"length": 47}, "length is 47; expected at least 48"),
        (Retention, {"between": "books"}, "between is 'books'; expected one of fillers, pairs"),
        (Retention, {"between": "pairs", "pairs": 64}, "pairs is 64; expected less than num_keys, 64"),
        (Retention, {"distances": (-1,)}, r"distances is \(-1,\); expected one or more whole numbers of at least 0"),
        (MQAR, {"cells": ()}, "cells is empty; expected at least one"),
        (MQAR, {"cells": ((64, 17),)}, "cells has 17 pairs at length 64; expected 1 to 16"),
        (MQAR, {"cells": ((64, 4), (128, 4))}, r"cells has the numbers of pairs \[4, 4\]; expected each once"),
        (MQAR, {"vocabulary": 256}, "vocabulary is 256; expected at least 258"),
        (MQAR, {"power": 0.0}, "power is 0.0; expected more than 0 and at most 1"),
        (MQAR, {"fill": "ones"}, "fill is 'ones'; expected one of zeros, random"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(task: type[Task], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**wrong)


@pytest.mark.parametrize(
    ("task", "group", "message"),
    [
        (Recall(), {"length": 23}, "length is 23; expected at least 24, 3 for each pair"),
        (Recall(), 23, "length is 23; expected at least 24, 3 for each pair"),
        (Recall(depths=(0.0,)), {"length": 64, "depth": -0.1}, "depth is -0.1; expected 0 to 1"),
        (Reassigned(), {"length": 40, "rewrites": 1}, "length is 40; expected at least 48 with pairs 8"),
        (Reassigned(), {"length": 128, "rewrites": 4}, "rewrites is 4; expected 0 to 3"),
        (Reassigned(), 2, "length is 2; expected at least 3 with pairs 1"),
        (Retention(), {"distance": -1}, "distance is -1; expected at least 0"),
        (Retention(), 31, "length is 31; expected at least 32, 4 for each pair"),
        (MQAR(), {"length": 15, "pairs": 4}, "length is 15; expected at least 16, 4 for each pair"),
        (MQAR_SMALL, {"length": 512, "pairs": 32}, "pairs is 32; expected at most 31, the number of keys"),
        (MQAR(), 3, "length is 3; expected at least 4"),
    ],
)
def test_sequences_that_cannot_be_are_refused_in_one_sentence(task: Task, group: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example(task, "test", 0, 0, group)
