"""Rows that hold several documents: each document is computed exactly as if it were alone."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models import forecasters
from tests.models.cases import KINDS, SEGMENT, VARIANTS, VOCAB, config, model, tokens
from titans import TitansForCausalLM
from titans.layers.packing import pack
from titans.models.classification import TitansForSequenceClassification
from titans.models.packing import restarts_of

every_kind = pytest.mark.parametrize("kind", KINDS)
every_variant = pytest.mark.parametrize("kind", VARIANTS)
TIME = 2 * SEGMENT + 2
ROWS = [[3, 9, 5, 1], [TIME], [1, TIME - 1]]  # lengths of the documents of each row
LONG_ROWS = [[1, 5, 9, 1, 17, 3, 8], [44], [3, 17, 1, 23]]


def starts_of(rows: list[list[int]], first: bool = True) -> Tensor:
    """(batch, time) bool, True where a document begins; ``first``: whether that holds for the first of a row too."""
    found = torch.zeros(len(rows), sum(rows[0]), dtype=torch.bool)
    for row, sizes in enumerate(rows):
        found[row, [0, *accumulate(sizes[:-1])]] = True
        found[row, 0] = first
    return found


def documents_of(rows: list[list[int]]) -> list[tuple[int, int, int]]:
    """Row, start and end of every document."""
    return [(row, a, b) for row, sizes in enumerate(rows) for a, b in pairwise([0, *accumulate(sizes)])]


def gradients(made: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    return found


def assert_near(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * max(1.0, float(wanted.detach().abs().max())))


def check_against_alone(rows: list[list[int]], kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Logits, gradients of every parameter, and the caches of the last documents, with a cache before and after."""
    made = model(kind, dtype)
    time = sum(rows[0])
    before, ids, after = tokens(5, 3, seed=3), tokens(time, 3), tokens(7, 3, seed=4)
    weights = torch.randn(3, time + 7, VOCAB, dtype=dtype, generator=torch.Generator().manual_seed(0))
    restart = starts_of(rows, first=False)
    restart[2, 0] = True  # this row does not go on from its cache
    cache = made(before, use_cache=True).past_key_values
    packed = made(ids, past_key_values=cache, use_cache=True, restart=restart)
    on = made(after, past_key_values=packed.past_key_values, use_cache=True)
    (torch.cat([packed.logits, on.logits], 1) * weights).sum().backward()
    got = gradients(made)
    for row, start, stop in documents_of(rows):
        cache = None
        if start == 0 and row != 2:
            cache = made(before[row : row + 1], use_cache=True).past_key_values
        alone = made(ids[row : row + 1, start:stop], past_key_values=cache, use_cache=True)
        assert_near(packed.logits[row : row + 1, start:stop], alone.logits, tolerance)
        total = (alone.logits * weights[row, start:stop]).sum()
        if stop == time:
            end = made(after[row : row + 1], past_key_values=alone.past_key_values).logits
            assert_near(on.logits[row : row + 1], end, tolerance)
            total = total + (end * weights[row, time:]).sum()
        total.backward()
    wanted = gradients(made)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_near(got[name], gradient, tolerance)


@pytest.mark.parametrize("kind", [*VARIANTS, "mac, chunked"])
def test_a_document_in_a_row_is_computed_as_if_it_were_alone(kind: str) -> None:
    check_against_alone(ROWS, kind, torch.float64, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@every_kind
def test_a_document_in_a_row_of_any_model_is_computed_as_if_it_were_alone(kind: str, dtype: torch.dtype) -> None:
    check_against_alone(LONG_ROWS, kind, dtype, 1e-9 if dtype == torch.float64 else 2e-5)


@every_variant
@torch.no_grad()
def test_in_single_precision_too(kind: str) -> None:
    torch.manual_seed(0)
    made = TitansForCausalLM(config(kind)).eval()
    ids = tokens(TIME, 3)
    logits = made(ids, restart=starts_of(ROWS)).logits
    for row, start, stop in documents_of(ROWS):
        assert_near(logits[row : row + 1, start:stop], made(ids[row : row + 1, start:stop]).logits, 1e-6)


MADE = {kind: model(kind) for kind in (*VARIANTS, "mac, chunked")}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(MADE)), data=st.data(), batch=st.integers(1, 3), time=st.integers(2, 3 * SEGMENT))
@torch.no_grad()
def test_any_documents_with_padding_anywhere_read_like_each_alone(
    kind: str, data: st.DataObject, batch: int, time: int
) -> None:
    made = MADE[kind]

    def bits(chance: int) -> Tensor:
        flags = st.lists(st.integers(0, chance), min_size=time, max_size=time)
        return torch.tensor(data.draw(st.lists(flags, min_size=batch, max_size=batch))) == 0

    restart, mask = bits(4), ~bits(3)
    before, ids = tokens(3, batch, seed=2), tokens(time, batch)
    cache = made(before, use_cache=True).past_key_values
    output = made(ids, mask, past_key_values=cache, use_cache=True, restart=restart)
    on = made(before, past_key_values=output.past_key_values).logits
    for row in range(batch):
        numbers = restart[row].cumsum(0)
        assert not output.logits[row, ~mask[row]].any()
        for number in range(int(numbers[-1]) + 1):
            alone = None if number else made(before[row : row + 1], use_cache=True).past_key_values
            places = (mask[row] & (numbers == number)).nonzero().flatten()
            if len(places):
                read = made(ids[row : row + 1, places], past_key_values=alone, use_cache=True)
                assert_near(output.logits[row, places], read.logits[0], 1e-9)
                alone = read.past_key_values
        assert_near(on[row : row + 1], made(before[row : row + 1], past_key_values=alone).logits, 1e-9)


@pytest.mark.parametrize(
    "kind", ["lmm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mac", "mag", "mal"))]
)
def test_checkpointing_gives_the_same_gradients_and_hidden_states_are_in_place(kind: str) -> None:
    made = model(kind).train()
    ids, restart = tokens(TIME, 3), starts_of(ROWS)
    plain = made(ids, restart=restart, output_hidden_states=True)
    plain.logits.square().sum().backward()
    wanted = gradients(made)
    for reentrant in (False, True):
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        made.enable_input_require_grads()
        made(ids, restart=restart).logits.square().sum().backward()
        for name, gradient in gradients(made).items():
            assert_near(gradient, wanted[name], 1e-9)
    for row, start, stop in documents_of(ROWS):
        alone = made.eval()(ids[row : row + 1, start:stop], output_hidden_states=True)
        for got, hidden in zip(plain.hidden_states, alone.hidden_states, strict=True):
            assert_near(got[row : row + 1, start:stop], hidden, 1e-9)


@every_variant
@torch.no_grad()
def test_rows_with_one_document_are_read_as_ever(kind: str) -> None:
    made = model(kind, torch.float32)
    ids = tokens(TIME)
    cache = made(ids, use_cache=True).past_key_values
    positions = torch.arange(TIME).expand(2, -1) + TIME
    plain = made(ids, past_key_values=cache.copy()).logits
    assert torch.equal(made(ids, past_key_values=cache.copy(), position_ids=positions).logits, plain)
    assert torch.equal(made(ids, past_key_values=cache.copy(), position_ids=positions[:1]).logits, plain)
    rows = torch.tensor([True, False])
    inside = torch.zeros(2, TIME, dtype=torch.bool)
    inside[:, 0] = rows
    anew = made(ids, past_key_values=cache.copy(), restart=rows).logits
    assert torch.equal(made(ids, past_key_values=cache.copy(), restart=inside).logits, anew)


@every_variant
def test_every_parameter_takes_part_in_packed_rows(kind: str) -> None:
    made = model(kind)
    ids = tokens(TIME, 3)
    cache = made(ids, use_cache=True).past_key_values.detach()
    for restart in (starts_of(ROWS, first=False), torch.zeros(3, TIME, dtype=torch.bool)):
        made(ids, past_key_values=cache.copy(), restart=restart).logits.square().sum().backward()
        assert [name for name, p in made.named_parameters() if p.grad is None] == []
        made.zero_grad()


def test_little_of_a_batch_of_documents_is_padding() -> None:
    sizes = torch.randint(1, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    packing = pack(starts_of([sizes]), None)
    assert len(packing.source) < 1.2 * sum(sizes)
    assert len(packing.batches) < 24


# the loss


def test_the_loss_is_that_of_the_documents_alone() -> None:
    made = model("mag")
    ids = tokens(TIME, 3)
    restart = starts_of(ROWS)
    sums = [
        made(ids[r : r + 1, a:b], labels=ids[r : r + 1, a:b]).loss * (b - a - 1)
        for r, a, b in documents_of(ROWS)
        if b - a > 1
    ]
    count = sum(b - a - 1 for _, a, b in documents_of(ROWS))
    torch.testing.assert_close(made(ids, labels=ids, restart=restart).loss, sum(sums) / count, rtol=1e-6, atol=0)
    summed = made(ids, labels=ids, restart=restart, num_items_in_batch=torch.tensor(count * 2)).loss
    torch.testing.assert_close(summed, sum(sums) / count / 2, rtol=1e-6, atol=0)


def test_shifted_labels_are_taken_as_they_are_with_labels_or_without() -> None:
    made = model("lmm")
    ids = tokens(TIME)
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    wanted = made(ids, labels=ids).loss
    assert torch.equal(made(ids, shift_labels=targets).loss, wanted)
    assert torch.equal(made(ids, labels=torch.zeros_like(ids), shift_labels=targets).loss, wanted)
    assert made(ids, shift_labels=None).loss is None


def test_hidden_states_come_if_the_config_says_so() -> None:
    made = model("mac")
    made.config.output_hidden_states = True
    ids = tokens(TIME)
    output = made(ids, use_cache=True)
    assert output.hidden_states is not None and len(output.hidden_states) == made.config.num_hidden_layers + 1
    assert made(ids[:, :1], past_key_values=output.past_key_values, use_cache=True).hidden_states is not None
    assert made(ids, output_hidden_states=False).hidden_states is None


# how documents are told


def told(shape: tuple[int, int], mask: Tensor | None = None, **given: Any) -> Any:
    found = restarts_of(shape, mask, **given)
    return None if found is None else found.int().tolist()


def test_where_documents_begin_may_be_said_in_several_ways() -> None:
    positions, numbers, ends = torch.tensor([[0, 1, 2, 0, 1, 0]]), torch.tensor([[4, 4, 4, 0, 0, 1]]), [0, 3, 5, 6]
    wanted = [[0, 0, 0, 1, 0, 1]]
    cuts = torch.tensor(ends, dtype=torch.int32)
    assert told((1, 6), position_ids=positions) == wanted
    assert told((1, 6), seq_idx=numbers) == wanted
    assert told((1, 6), cu_seq_lens_q=cuts, cu_seq_lens_k=cuts) == wanted
    assert told((1, 6), position_ids=positions, seq_idx=numbers, cu_seq_lens_q=cuts) == wanted
    restart = torch.tensor([[True, False, False, True, False, True]])
    assert told((1, 6), restart=restart, position_ids=positions) == [[1, 0, 0, 1, 0, 1]]
    assert told((1, 6), restart=torch.tensor([True]), position_ids=positions) == [[1, 0, 0, 1, 0, 1]]


def test_one_document_in_each_row_is_nothing_to_tell() -> None:
    assert told((2, 3)) is None
    assert told((2, 3), position_ids=torch.tensor([[7, 8, 9], [0, 1, 2]])) is None
    assert told((1, 3), seq_idx=torch.tensor([[5, 5, 5]]), cu_seq_lens_q=torch.tensor([0, 3])) is None
    assert told((2, 1), position_ids=torch.tensor([[0], [9]])) is None


def test_padding_has_no_position() -> None:
    left = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert told((2, 5), left, position_ids=torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]])) is None
    inside = torch.tensor([[1, 1, 0, 1, 1, 0, 1]])
    assert told((1, 7), inside, position_ids=torch.tensor([[3, 4, 0, 5, 0, 0, 1]])) == [[0, 0, 0, 0, 1, 0, 0]]
    # a document that begins with padding begins with the token after it, too
    restart = torch.tensor([[False, False, True, False, False, True, False]])
    assert told((1, 7), inside, restart=restart) == [[0, 0, 1, 1, 0, 1, 1]]
    longer = torch.cat([torch.ones(1, 4), inside], 1)  # a mask that covers the past
    assert told((1, 7), longer, position_ids=torch.tensor([[3, 4, 0, 5, 0, 0, 1]])) == [[0, 0, 0, 0, 1, 0, 0]]


def test_a_mask_may_number_the_documents() -> None:
    made, ids = model("mag"), tokens(6)
    mask = torch.tensor([[1, 1, 2, 2, 2, 0], [0, 1, 1, 1, 2, 3]])
    for numbers in (mask, mask.double()):
        assert told((2, 6), numbers) == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    output, separate = made(ids, mask, labels=ids), made(ids, mask != 0, seq_idx=mask, labels=ids)
    assert torch.equal(output.logits, separate.logits) and torch.equal(output.loss, separate.loss)
    assert told((1, 3), torch.full((1, 3), 2)) is None


@pytest.mark.parametrize("value", [-1, -torch.inf, 0.5, 1.5, torch.inf, torch.nan])
def test_a_mask_of_anything_else_is_refused(value: float) -> None:
    for time in (1, 3):
        with pytest.raises(ValueError, match=rf"attention_mask has {value}.*; expected 0 for padding, and 1 or a doc"):
            model("lmm")(tokens(time, 1), torch.full((1, time), value))


@pytest.mark.parametrize(
    ("shape", "given", "sentence"),
    [
        ((1, 4), {"position_ids": [[0, 1, 3, 4]]}, "position_ids has 3 after 1; expected 2, or 0 where a document"),
        ((1, 4), {"position_ids": [[0, 1, 1, 2]]}, "position_ids has 1 after 1; expected 2, or 0 where"),
        ((2, 4), {"position_ids": [[0, 1, 2]]}, "position_ids has shape (1, 3); expected (2, 4)"),
        ((1, 4), {"seq_idx": [[0, 1, 2]]}, "seq_idx has shape (1, 3); expected (1, 4)"),
        ((2, 4), {"cu_seq_lens_q": [0, 4, 8]}, "cu_seq_lens_q is given and the batch has 2 rows; expected one"),
        ((1, 4), {"cu_seq_lens_k": [0, 3]}, "cu_seq_lens_k is [0, 3]; expected rising numbers from 0 to 4"),
        ((1, 4), {"position_ids": [[0, 1, 0, 1]], "seq_idx": [[0, 0, 0, 1]]},
         "position_ids and seq_idx have documents begin at different tokens; expected the same"),
        ((1, 4), {"cu_seq_lens_q": [0, 2, 4], "cu_seq_lens_k": [0, 3, 4]}, "cu_seq_lens_q and cu_seq_lens_k have doc"),
    ],
)  # fmt: skip
def test_documents_that_make_no_sense_are_refused(shape: tuple[int, int], given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        restarts_of(shape, None, **{name: torch.tensor(value) for name, value in given.items()})


def test_a_restart_of_another_shape_or_kind_is_refused() -> None:
    made = model("lmm")
    for restart in (torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"restart has shape .*; expected \(2,\) or \(2, 4\), and bool"):
            made(tokens(4), restart=restart)


# what a call may have


def test_an_argument_that_no_model_has_is_refused_by_name() -> None:
    ids = tokens(4)
    classifier = TitansForSequenceClassification(config("lmm", num_labels=3))
    for made in (model("lmm"), model("lmm").model, classifier):
        name = type(made).__name__
        with pytest.raises(
            TypeError, match=f"{name}.forward has no argument past_key_value: did you mean past_key_values"
        ):
            made(ids, past_key_value=None)
        with pytest.raises(ValueError, match="output_attentions is True; expected False"):
            made(ids, output_attentions=True)
        made(ids, output_attentions=None)
    with pytest.raises(TypeError, match=r"forward has no argument past: did you mean past_values\?"):
        made = forecasters.model()
        made(torch.zeros(1, made.config.context_length, made.config.num_input_channels), past=None)


def test_a_classifier_has_one_document_in_each_row() -> None:
    made = TitansForSequenceClassification(config("lmm", num_labels=3)).eval()
    ids = tokens(4)
    assert torch.equal(made(ids, position_ids=torch.arange(4).expand(2, -1)).logits, made(ids).logits)
    with pytest.raises(ValueError, match="a row of the batch has several documents; expected one"):
        made(ids, position_ids=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]))
    with pytest.raises(ValueError, match="a row of the batch has several documents; expected one"):
        made(ids, torch.tensor([[1, 1, 1, 1], [1, 1, 2, 2]]))
