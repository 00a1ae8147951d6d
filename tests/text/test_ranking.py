from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titans.bm25 import bm25, content_words
from titans.text.ranking import (
    Eviction,
    Ranking,
    choose_evicted,
    count_words,
    fuse,
    order_by,
    rarest,
)

WORDS = ["a", "b", "c", "d"]
TEXTS = st.lists(st.lists(st.sampled_from([*WORDS, "e", "f"]), min_size=1, max_size=9), min_size=1, max_size=12)


def textbook(texts: list[list[str]], question: list[str]) -> list[float]:
    """BM25 as it is written down, text by text."""
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        total = 0.0
        for word in question:
            n = sum(word in other for other in texts)
            f = Counter(text)[word]
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            total += idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(text) / mean))
        scores.append(total)
    return scores


@given(TEXTS, st.data())
def test_bm25_is_the_textbook_formula_over_the_allowed_texts(texts: list[list[str]], data: st.DataObject) -> None:
    places = np.array([7 + 3 * index for index in range(len(texts))])
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))))
    postings = [
        np.array([place for place, text in zip(places, texts, strict=True) for word in text if word == wanted])
        for wanted in WORDS
    ]
    lengths = np.array([len(text) for text in texts])
    counted = [count_words(posting.astype(np.int64), places, lengths, allowed) for posting in postings]
    found, scores = bm25(counted, int(allowed.sum()), int(lengths[allowed].sum()))
    may = [index for index in range(len(texts)) if allowed[index]]
    expected = dict(zip(places[may].tolist(), textbook([texts[i] for i in may], WORDS) if may else [], strict=True))
    assert dict(zip(found.tolist(), scores.tolist(), strict=True)) == pytest.approx(
        {place: score for place, score in expected.items() if score > 0}
    )
    assert list(scores) == sorted(scores, reverse=True)


def test_first_in_every_order_scores_one_and_more_orders_count_more() -> None:
    made = fuse({"bm25": [1, 2, 3], "cosine": [1, 3]}, Ranking(cosine=1, constant=60))
    assert made[0] == (1, pytest.approx(1.0))
    assert [candidate for candidate, _ in made] == [1, 3, 2]
    assert dict(made)[2] == pytest.approx(61 / 62 / 2)


def test_a_weight_of_zero_leaves_an_order_out() -> None:
    assert fuse({"bm25": [1, 2], "cosine": [2, 1]}, Ranking(bm25=0))[0][0] == 2
    assert fuse({"bm25": [1, 2], "cosine": [2, 1]}, Ranking(bm25=2))[0][0] == 1


def test_among_equals_the_newer_comes_first() -> None:
    assert [place for place, _ in fuse({"bm25": [1], "cosine": [5]}, Ranking(cosine=1))] == [5, 1]
    assert order_by([1, 2, 3], {1: 0.5, 2: 0.7, 3: 0.5}.__getitem__) == [2, 3, 1]


def test_the_rarest_words_are_looked_up_and_common_ones_only_if_there_is_room() -> None:
    frequencies = {"house": 4000, "cockatoo": 3, "day": 9000, "nowhere": 0, "gladys": 20}
    assert rarest(frequencies, most=5000) == ["cockatoo", "gladys", "house"]
    assert rarest({"the": 90_000}, most=5000) == ["the"]
    assert rarest({}) == []


def test_words_that_say_nothing_are_left_out_unless_there_are_no_others() -> None:
    assert content_words(["What", "is", "the", "time"]) == ["time"]
    assert content_words(["who", "is", "it"]) == ["who", "is", "it"]


ROWS = [
    (10, 0.9, 0, "How nice."),
    (11, 0.1, 0, "It took long, with much to do and nothing to tell."),
    (12, 0.1, 4, "That sounds great."),
    (13, 0.1, 0, "I met Anna Berg in Oslo."),
    (14, 0.2, 0, "You too."),
]


@pytest.mark.parametrize(
    ("eviction", "gone"),
    [
        (Eviction(), {11, 14}),
        (Eviction(surprise=0), {10, 14}),
        (Eviction(details=0), {11, 13}),
        (Eviction(uses=0), {11, 14}),
        (Eviction("fifo"), {10, 11}),
        (Eviction("longest"), {10, 14}),
    ],
)
def test_a_full_store_lets_go_of_what_the_policy_says(eviction: Eviction, gone: set[int]) -> None:
    assert set(choose_evicted(ROWS, 2, eviction)) == gone


def test_what_has_just_come_goes_last() -> None:
    assert set(choose_evicted(ROWS, 2, Eviction("longest"), frozenset([14]))) == {10, 12}
    assert len(choose_evicted(ROWS, 5, Eviction("fifo"), frozenset([13, 14]))) == 5


def test_a_large_batch_has_to_be_worth_its_place_but_for_the_newest_of_it() -> None:
    old = [(seq, 0.5, 0, "I met Anna Berg in Oslo.") for seq in range(32)]
    batch = [(seq, 0.5, 0, "How nice.") for seq in range(32, 64)]
    gone = choose_evicted(old + batch, 32, Eviction(), frozenset(range(32, 64)))
    assert set(range(64)) - set(gone) == {*range(4, 32), *range(60, 64)}


def test_the_random_policy_draws_the_same_lots_again() -> None:
    first = choose_evicted(ROWS, 2, Eviction("random", seed=3))
    assert first == choose_evicted(ROWS, 2, Eviction("random", seed=3))
    assert len({tuple(choose_evicted(ROWS, 2, Eviction("random", seed=seed))) for seed in range(20)}) > 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ranking(bm25=-1), "bm25 is -1"),
        (lambda: Ranking(cosine=math.nan), "cosine is nan"),
        (lambda: Ranking(bm25=0, cosine=0, neural=0), "all 0"),
        (lambda: Ranking(pool=0), "pool is 0"),
        (lambda: Eviction("oldest"), "policy is 'oldest'; expected one of informative, longest, fifo, random"),
        (lambda: Eviction(spare=1.0), "spare is 1.0"),
    ],
)
def test_wrong_settings_are_named(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
