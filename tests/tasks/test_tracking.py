from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titans.tasks import IGNORED, SPLITS, Example, example
from titans.tasks.tracking import S3, S5, ModularAddition, Parity, Tracking

TASKS: list[Tracking] = [Parity(), ModularAddition(), ModularAddition(modulus=7), S3(), S5()]
ids = [task.name for task in TASKS]


def draw(task: Tracking, length: int, number: int = 0, split: str = "test") -> Example:
    return example(task, split, 0, number, {"length": length})


def state_after(task: Tracking, tokens: list[int]) -> int:
    """Without a table: count, or move things about."""
    if isinstance(task, S3 | S5):
        size = 3 if isinstance(task, S3) else 5
        ways = list(permutations(range(size)))
        things = list(range(size))
        for token in tokens:
            things = [things[place] for place in ways[token]]
        return ways.index(tuple(things))
    return sum(tokens) % (task.modulus if isinstance(task, ModularAddition) else 2)


@settings(max_examples=60, deadline=None)
@given(task=st.sampled_from(TASKS), length=st.integers(1, 40), number=st.integers(0, 10**6))
def test_every_token_is_followed_by_the_state_it_leads_to(task: Tracking, length: int, number: int) -> None:
    made = draw(task, length, number)
    assert len(made.tokens) == length
    assert [answer.place for answer in made.answers] == list(range(1, length + 1))
    wanted = [state_after(task, list(made.tokens[:place])) for place in range(1, length + 1)]
    assert made.labels() == wanted
    assert all(0 <= token < task.vocab_size for token in [*made.tokens, *wanted])


@pytest.mark.parametrize("task", TASKS, ids=ids)
def test_a_table_is_a_group_s(task: Tracking) -> None:
    table, elements = task.table, range(task.vocab_size)
    assert list(table[0]) == [row[0] for row in table] == list(elements)
    assert all(sorted(row) == list(elements) for row in table)
    some = elements[:8]
    assert all(table[table[a][b]][c] == table[a][table[b][c]] for a, b, c in product(some, some, some))


def test_order_matters_for_permutations_and_not_for_sums() -> None:
    commutes = [all(t[a][b] == t[b][a] for a in range(len(t)) for b in range(len(t))) for t in (x.table for x in TASKS)]
    assert commutes == [True, True, True, False, False]
    assert [task.vocab_size for task in TASKS] == [2, 5, 7, 6, 120]
    assert [task.chance for task in TASKS] == [1 / 2, 1 / 5, 1 / 7, 1 / 6, 1 / 120]


@pytest.mark.parametrize(("task", "length"), [(Parity(), 11), (ModularAddition(), 5), (S3(), 4), (S5(), 2)])
def test_splits_share_no_sequence_of_a_length_that_has_many(task: Tracking, length: int) -> None:
    seen = {split: {tuple(draw(task, length, number, split).tokens) for number in range(800)} for split in SPLITS}
    assert all(len(sequences) > 40 for sequences in seen.values())
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]


def test_short_sequences_are_in_every_split() -> None:
    for split in SPLITS:
        assert len({tuple(draw(Parity(), 3, number, split).tokens) for number in range(200)}) == 8


@pytest.mark.parametrize("task", [Parity(last=True), S5(last=True)], ids=["parity", "s5"])
def test_only_the_product_of_all_is_judged_if_asked_for(task: Tracking) -> None:
    made = draw(task, 20)
    assert made.labels() == [IGNORED] * 19 + [state_after(task, list(made.tokens))]
    assert made.boundary == 19


@pytest.mark.parametrize("task", TASKS, ids=ids)
def test_training_takes_every_length_up_to_its_own_and_the_test_longer_ones(task: Tracking) -> None:
    assert {len(example(task, "train", 0, number, 16).tokens) for number in range(300)} == set(range(1, 17))
    assert task.groups() == [{"length": length} for length in (32, 64, 128, 256, 512)]
    assert task.axes == ("length",)
    json.dumps(task.settings())


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        (Parity, {"lengths": (0,)}, r"lengths is \(0,\); expected one or more whole numbers of at least 1"),
        (S5, {"lengths": ()}, r"lengths is \(\); expected one or more whole numbers of at least 1"),
        (ModularAddition, {"modulus": 1}, "modulus is 1; expected at least 2"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(task: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**wrong)
    with pytest.raises(ValueError, match="length is 0; expected at least 1"):
        draw(Parity(), 0)
