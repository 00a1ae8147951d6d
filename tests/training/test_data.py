"""Rows are a function of their number: every token comes where it should, whoever asks."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.training.conftest import store_of
from titans.tasks import IGNORED
from titans.tasks.prepared import TokenStore
from titans.training.data import CarriedRows, PackedRows, StreamedRows, collate


def documents(sizes: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different, so that a token tells where it is from."""
    ends = np.cumsum([0, *sizes])
    return [list(range(start, start + size)) for start, size in zip(ends, sizes, strict=False)]


def store(sizes: list[int]) -> TokenStore:
    return store_of(documents(sizes))


def test_a_store_reads_across_documents() -> None:
    made = store([3, 1, 5])
    assert (made.documents, made.tokens) == (3, 9)
    assert made.read(0, 9).tolist() == list(range(9))
    assert made.read(2, 6).tolist() == [2, 3, 4, 5]
    assert made.read(4, 4).tolist() == []
    assert made.starts.tolist() == [0, 3, 4, 9]


def test_a_store_reads_across_the_files_of_a_set(tmp_path: object) -> None:
    from datasets import Dataset, concatenate_datasets

    parts = [Dataset.from_dict({"input_ids": documents([4, 2, 7])[i : i + 1]}) for i in range(3)]
    parts = [part.cast_column("input_ids", part.features["input_ids"]) for part in parts]
    whole = concatenate_datasets(parts)
    made = TokenStore(whole)
    assert made.read(0, 13).tolist() == list(range(13))
    assert made.read(3, 7).tolist() == [3, 4, 5, 6]
    # a set that is a part of another
    assert TokenStore(whole.select(range(1, 3))).read(0, 9).tolist() == list(range(4, 13))


def test_targets_are_the_tokens_one_place_on() -> None:
    rows = PackedRows(store([40]), 8, 20, seed=3)
    for row in rows:  # type: ignore[attr-defined]
        assert torch.equal(row["labels"][:-1], row["input_ids"][1:])
        assert row["labels"][-1] == row["input_ids"][-1] + 1


@pytest.mark.parametrize("seed", [0, 1])
def test_an_epoch_of_packed_rows_has_every_window_once(seed: int) -> None:
    rows = PackedRows(store([100, 33]), 8, 48, seed)
    count = rows.per_epoch
    for epoch in range(3):
        tokens = torch.cat([rows[epoch * count + i]["input_ids"] for i in range(count)])
        assert len(set(tokens.tolist())) == count * 8


def test_packed_epochs_differ_and_so_do_seeds() -> None:
    rows = PackedRows(store([200]), 8, 100, seed=0)
    first = [rows[i]["input_ids"][0].item() for i in range(rows.per_epoch)]
    second = [rows[rows.per_epoch + i]["input_ids"][0].item() for i in range(rows.per_epoch)]
    other = [PackedRows(store([200]), 8, 100, seed=1)[i]["input_ids"][0].item() for i in range(rows.per_epoch)]
    assert first != second and first != other


def test_rows_for_validation_come_in_order_and_leave_nothing_out() -> None:
    rows = PackedRows(store([30, 35]), 8, None)
    assert torch.equal(torch.cat([row["input_ids"] for row in rows]), torch.arange(64))  # type: ignore[attr-defined]


def test_a_row_is_the_same_whoever_asks_and_whenever() -> None:
    made = store([50, 60, 70])
    for make in (lambda: PackedRows(made, 8, 64, 5), lambda: CarriedRows(made, 8, 4, 16, 5)):
        rows = make()
        forward = [rows[i] for i in range(len(rows))]
        again = make()
        for index in reversed(range(len(rows))):
            assert all(torch.equal(again[index][name], value) for name, value in forward[index].items())


def test_workers_bring_the_same_batches() -> None:
    rows = CarriedRows(store([50, 60, 7, 70]), 8, 4, 12, 5)
    batches = [list(DataLoader(rows, 2, collate_fn=collate, num_workers=workers)) for workers in (0, 2)]
    for one, other in zip(*batches, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda sizes: max(sizes) > 1),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 30),
)
def test_every_lane_reads_whole_documents_one_after_the_other(
    sizes: list[int], length: int, lanes: int, steps: int
) -> None:
    made = store(sizes)
    wanted = {d[0]: d for d in documents(sizes) if len(d) > 1}
    rows = CarriedRows(made, length, lanes, steps)
    assert len(rows) == steps * lanes
    assert rows.filled == 1
    begun = []
    for lane in range(lanes):
        whole = [rows[step * lanes + lane] for step in range(steps)]
        ids, targets, restart = (torch.cat([row[name] for row in whole]) for name in ("input_ids", "labels", "restart"))
        starts = restart.nonzero().flatten().tolist()
        assert starts[0] == 0
        for start, stop in pairwise([*starts, steps * length]):
            document = wanted[int(ids[start])]
            if stop < steps * length:
                assert stop - start == len(document) - 1
            assert ids[start:stop].tolist() == document[: stop - start]
            assert targets[start:stop].tolist() == document[1 : stop - start + 1]
            begun.append((start, int(ids[start])))
    # all documents of an epoch come before any of the next
    order = [first for _, first in sorted(begun, key=lambda item: item[0])]
    for start in range(0, len(order) - len(wanted) + 1, len(wanted)):
        group = order[start : start + len(wanted)]
        if len(set(group)) != len(wanted):
            # lanes that start at the same step may be listed in either order across the border of two epochs
            steps_of = [step for step, _ in sorted(begun)]
            assert len(set(steps_of)) < len(steps_of)


def test_a_pass_over_carried_rows_reads_every_token_once() -> None:
    sizes = [17, 3, 1, 40, 9, 2]
    rows = CarriedRows(store(sizes), 8, 3, None)
    assert rows.filled == sum(size - 1 for size in sizes) / (len(rows) * 8)
    targets = torch.cat([rows[i]["labels"] for i in range(len(rows))])
    firsts = {document[0] for document in documents(sizes)}
    assert sorted(targets[targets != IGNORED].tolist()) == sorted(set(range(sum(sizes))) - firsts)


def test_separate_documents_have_no_targets_beyond_their_ends() -> None:
    sizes = [5, 1, 9, 3, 14]
    whole, separate = (PackedRows(store(sizes), 6, None, separate=separate) for separate in (False, True))
    starts = np.cumsum([0, *sizes])
    for index in range(len(whole)):
        plain, row = whole[index], separate[index]
        assert torch.equal(row["input_ids"], plain["input_ids"])
        assert row["restart"].tolist() == [token in starts for token in row["input_ids"].tolist()]
        wanted = [IGNORED if token in starts else token for token in plain["labels"].tolist()]
        assert row["labels"].tolist() == wanted


def test_separate_streamed_documents_say_where_they_begin() -> None:
    from titans.models.tokenizer import byte_tokenizer

    texts = [{"text": "abc"}, {"text": ""}, {"text": "defghij"}]
    rows = list(islice(StreamedRows(texts, byte_tokenizer(), 4, separate=True), 6))
    begun = [place for place, new in enumerate(torch.cat([row["restart"] for row in rows]).tolist()) if new]
    untrained = [place for place, label in enumerate(torch.cat([row["labels"] for row in rows])) if label == IGNORED]
    assert begun == [0, 4, 12, 16]
    assert untrained == [3, 11, 15, 23]


def test_data_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the data has 9 tokens; expected more than length = 9"):
        PackedRows(store([9]), 9, 10)
    with pytest.raises(ValueError, match="at least 2"):
        CarriedRows(store([1]), 4, 1, 1)


def test_streamed_documents_are_packed_with_their_ends_and_begin_again() -> None:
    from titans.models.tokenizer import byte_tokenizer

    texts = [{"text": "abc"}, {"text": ""}, {"text": "defghij"}]
    rows = list(islice(StreamedRows(texts, byte_tokenizer(), 4), 6))
    read = [token for row in rows for token in row["input_ids"].tolist()]
    assert read == 2 * [*b"abc", 256, *b"defghij", 256]
    assert rows[2]["labels"].tolist() == [*b"ij", 256, ord("a")]
    assert list(StreamedRows([{"text": ""}], byte_tokenizer(), 4)) == []
