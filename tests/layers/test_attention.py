"""Attention layers: a sequence may come in any pieces, batches and paddings, and the past never sees the future."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import assert_same, draw
from titans.layers import attention
from titans.layers.attention import SegmentAttention, SegmentState, WindowAttention, WindowState
from titans.ops.attention import attention_dense, rotate, segment_visible, turning, window_visible

DIM, HEADS, WINDOW, SEGMENT = 12, 3, 7, 9
TOLERANCE = 1e-10


def window_layer(window: int | None = WINDOW, dtype: torch.dtype = torch.float64, **options: Any) -> WindowAttention:
    torch.manual_seed(0)
    return WindowAttention(DIM, HEADS, window, **options).to(dtype)


def segment_layer(size: int = SEGMENT, dtype: torch.dtype = torch.float64, **options: Any) -> SegmentAttention:
    torch.manual_seed(0)
    return SegmentAttention(DIM, HEADS, size, **options).to(dtype)


def tokens(time: int, batch: int = 2, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(batch, time, DIM, seed=seed, dtype=dtype)


def persistent(count: int | None, dtype: torch.dtype = torch.float64) -> Tensor | None:
    return None if count is None else draw(count, DIM, seed=7, dtype=dtype)


def padding(counts: Sequence[int], time: int) -> Tensor:
    return torch.arange(time) < torch.tensor(counts).unsqueeze(1)


def live(state: WindowState | SegmentState, row: int) -> dict[str, Tensor]:
    """What of a row's state means anything."""
    length = int(state.lengths[row])
    if isinstance(state, WindowState):
        used = min(length, state.k.shape[2])
        parts = {name: getattr(state, name)[row, :, state.k.shape[2] - used :] for name in ("k", "v")}
    else:
        parts = {name: getattr(state, name)[row, :, :length] for name in ("k", "v", "h_k", "h_v")}
    return parts | {"length": state.lengths[row].double()}


def stream(layer: WindowAttention, x: Tensor, cuts: Sequence[int], prefix: Tensor | None) -> tuple[Tensor, WindowState]:
    state, outputs = layer.init_state(len(x)), []
    for start, stop in pairwise([0, *sorted(cuts), x.shape[1]]):
        y, state = layer(x[:, start:stop], state, prefix)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def project(layer: WindowAttention | SegmentAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of x (batch, time, dim), head by head."""
    inner = layer.heads * layer.head_dim
    weights = (layer.to_q.weight, layer.to_kv.weight[:inner], layer.to_kv.weight[inner:])
    q, k, v = ((x @ w.mT).unflatten(-1, (layer.heads, layer.head_dim)).transpose(1, 2) for w in weights)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    return q, k, v


def merge(layer: WindowAttention | SegmentAttention, y: Tensor) -> Tensor:
    return layer.to_out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("prefix", [None, 0, 3])
@pytest.mark.parametrize("window", [1, 7, 40, None])
def test_window_attention_is_the_definition(window: int | None, prefix: int | None, qk_norm: bool) -> None:
    layer, x, front = window_layer(window, qk_norm=qk_norm), tokens(100), persistent(prefix)
    q, k, v = project(layer, x)
    place = torch.arange(100)
    q, k = rotate(q, place), rotate(k, place)
    if front is not None:
        _, front_k, front_v = project(layer, front.expand(2, -1, -1))
        front_k = front_k * ~turning(front_k.shape[-1]).repeat(2)  # no position, so only in channels that have none
        k, v = torch.cat([front_k, k], dim=2), torch.cat([front_v, v], dim=2)
    expected = merge(layer, attention_dense(q, k, v, window_visible(100, window, prefix or 0)))
    assert_same({"y": layer(x, prefix=front)[0]}, {"y": expected}, TOLERANCE)


@pytest.mark.parametrize("prefix", [None, 3])
@pytest.mark.parametrize("history", [True, False])
def test_segment_attention_is_the_definition(history: bool, prefix: int | None) -> None:
    layer, x, h, front = segment_layer(), tokens(SEGMENT), tokens(SEGMENT, seed=2), persistent(prefix)
    q, k, v = project(layer, x)
    place = torch.arange(SEGMENT)
    q, k = rotate(q, place), rotate(k, place)
    if history:
        _, h_k, h_v = project(layer, h)
        k, v = torch.cat([rotate(h_k, place), k], dim=2), torch.cat([h_v, v], dim=2)
    if front is not None:
        _, front_k, front_v = project(layer, front.expand(2, -1, -1))
        front_k = front_k * ~turning(front_k.shape[-1]).repeat(2)  # no position, so only in channels that have none
        k, v = torch.cat([front_k, k], dim=2), torch.cat([front_v, v], dim=2)
    visible = segment_visible(SEGMENT, SEGMENT, prefix or 0, history=history)
    expected = merge(layer, attention_dense(q, k, v, visible))
    assert_same({"y": layer(x, h if history else None, prefix=front)[0]}, {"y": expected}, TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(
    window=st.sampled_from([1, 2, 7, 40, None]),
    cuts=st.lists(st.integers(0, 110), max_size=8),
    prefix=st.sampled_from([None, 2]),
)
def test_any_split_of_a_sequence_into_calls_gives_the_same(
    window: int | None, cuts: list[int], prefix: int | None
) -> None:
    layer, x, front = window_layer(window), tokens(110), persistent(prefix)
    whole, end = stream(layer, x, [], front)
    found, state = stream(layer, x, cuts, front)
    assert_same({"y": found, "k": state.k, "v": state.v}, {"y": whole, "k": end.k, "v": end.v}, TOLERANCE)
    assert state.length == end.length == x.shape[1]


def test_gradients_flow_through_the_state() -> None:
    layer, x = window_layer(), tokens(30).requires_grad_()
    weight = draw(2, 30, DIM, seed=3)
    gradients = []
    for cuts in ([], [4, 11, 20]):
        y, _ = stream(layer, x, cuts, persistent(2))
        found = torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])
        gradients.append({str(index): g for index, g in enumerate(found)})
    assert_same(gradients[1], gradients[0], TOLERANCE)


def test_every_parameter_gets_a_gradient() -> None:
    front = torch.nn.Parameter(torch.randn(2, DIM, dtype=torch.float64))
    window, segment = window_layer(), segment_layer()
    for layer, y in (
        (window, window(tokens(20), prefix=front)[0]),
        (segment, segment(tokens(9), tokens(9, seed=2), prefix=front)[0]),
    ):
        (y * draw(*y.shape, seed=3)).sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in [*layer.parameters(), front])
        front.grad = None


def test_one_token_at_a_time_far_past_the_window_equals_one_call() -> None:
    layer, x = window_layer(), tokens(20 * WINDOW + 3)
    whole, end = layer(x, prefix=persistent(3))
    found, state = stream(layer, x, range(1, x.shape[1]), persistent(3))
    assert_same({"y": found, "k": state.k, "v": state.v}, {"y": whole, "k": end.k, "v": end.v}, TOLERANCE)
    assert state.k.shape[2] == WINDOW - 1


def test_a_far_position_changes_nothing_but_the_angle() -> None:
    layer, x = window_layer(), tokens(30)
    near, _ = layer(x)
    start = replace(layer.init_state(2), length=torch.tensor([0, 30_000_000]))
    far, state = layer(x, start)
    assert_same({"y": far}, {"y": near}, 1e-8)
    assert state.length.tolist() == [30, 30_000_030]


@pytest.mark.parametrize("masked", [False, True])
def test_a_long_sequence_is_worked_on_in_pieces_that_give_the_same(
    monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    layer, x, front = window_layer(), tokens(200), persistent(2)
    mask = padding([200, 90], 200) if masked else None
    whole, end = layer(x, prefix=front, mask=mask)
    monkeypatch.setattr(attention, "PIECE", 10)
    found, state = layer(x, prefix=front, mask=mask)
    assert_same({"y": found}, {"y": whole}, TOLERANCE)
    for row in range(2):
        assert_same(live(state, row), live(end, row), TOLERANCE)


COUNTS = [[5, 0, 12], [3, 12, 1], [0, 0, 7], [12, 2, 12]]


@pytest.mark.parametrize("window", [1, 2, 7, 40, None])
@pytest.mark.parametrize("prefix", [None, 2])
def test_padded_rows_of_a_batch_give_what_each_gives_alone(window: int | None, prefix: int | None) -> None:
    layer, front = window_layer(window), persistent(prefix)
    calls = [(tokens(12, 3, seed=seed), counts) for seed, counts in enumerate(COUNTS)]
    state, alone = None, [None] * 3
    for x, counts in calls:
        padded = x.masked_fill(~padding(counts, 12).unsqueeze(-1), float("nan"))
        y, state = layer(padded, state, front, padding(counts, 12))
        for row, count in enumerate(counts):
            expected, alone[row] = layer(x[row : row + 1, :count], alone[row], front)
            assert_same({"y": y[row : row + 1, :count]}, {"y": expected}, TOLERANCE)
            assert not y[row, count:].any()
            assert_same(live(state, row), live(alone[row], 0), TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, SEGMENT), max_size=5), prefix=st.sampled_from([None, 2]), history=st.booleans())
def test_any_split_of_a_segment_into_calls_gives_the_same(cuts: list[int], prefix: int | None, history: bool) -> None:
    layer, x, h, front = segment_layer(), tokens(SEGMENT), tokens(SEGMENT, seed=2), persistent(prefix)
    whole, end = layer(x, h if history else None, prefix=front)
    state, outputs = layer.init_state(2, history), []
    for start, stop in pairwise([0, *sorted(cuts), SEGMENT]):
        y, state = layer(x[:, start:stop], h[:, start:stop] if history else None, state, front)
        outputs.append(y)
    assert_same({"y": torch.cat(outputs, 1), "k": state.k, "v": state.v}, {"y": whole, "k": end.k, "v": end.v}, 1e-10)
    if history:
        assert_same({"k": state.h_k, "v": state.h_v}, {"k": end.h_k, "v": end.h_v}, TOLERANCE)


@pytest.mark.parametrize("prefix", [None, 2])
def test_rows_that_stand_at_different_places_of_their_segments_give_what_each_gives_alone(prefix: int | None) -> None:
    layer, front = segment_layer(), persistent(prefix)
    state: SegmentState | None = None
    alone: list[SegmentState | None] = [None] * 3
    for seed, counts in enumerate([[5, 0, 9], [4, 6, 3], [2, 3, 6], [1, 9, 9], [6, 0, 1]]):
        x, h = tokens(9, 3, seed=seed), tokens(9, 3, seed=50 + seed)
        hidden = ~padding(counts, 9).unsqueeze(-1)
        y, state = layer(
            x.masked_fill(hidden, float("nan")), h.masked_fill(hidden, float("nan")), state, front, padding(counts, 9)
        )
        for row, count in enumerate(counts):
            rows = slice(row, row + 1)
            expected, alone[row] = layer(x[rows, :count], h[rows, :count], alone[row], front)
            assert_same({"y": y[rows, :count]}, {"y": expected}, TOLERANCE)
            assert not y[row, count:].any()
            assert_same(live(state, row), live(alone[row], 0), TOLERANCE)
        full = state.lengths == SEGMENT
        state = state.reset(full)
        alone = [None if full[row] else alone[row] for row in range(3)]


def test_a_reset_row_starts_a_new_segment_and_the_others_go_on() -> None:
    layer = segment_layer()
    _, state = layer(tokens(5), tokens(5, seed=2))
    assert state.reset(torch.tensor([True, True])).k.shape[2] == 0
    mixed = state.reset(torch.tensor([True, False]))
    assert mixed.length.tolist() == [0, 5]
    x, h = tokens(4, seed=3), tokens(4, seed=4)
    y, after = layer(x, h, mixed)
    assert_same({"y": y[:1]}, {"y": layer(x[:1], h[:1])[0]}, TOLERANCE)
    assert_same({"y": y[1:]}, {"y": layer(x, h, state)[0][1:]}, TOLERANCE)
    assert after.length.tolist() == [4, 9]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("changed", [0, 6, 7, 31, 64, 99])
def test_no_output_before_a_changed_token_moves_by_one_bit(changed: int, dtype: torch.dtype) -> None:
    layer, x, front = window_layer(dtype=dtype), tokens(100, dtype=dtype), persistent(3, dtype)
    before, _ = layer(x, prefix=front)
    x[:, changed] = -5 * x[:, changed].flip(-1) + 1
    after, _ = layer(x, prefix=front)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("changed", [0, 3, 8])
@pytest.mark.parametrize("what", ["x", "h"])
def test_no_output_of_a_segment_before_a_changed_token_moves_by_one_bit(
    what: str, changed: int, dtype: torch.dtype
) -> None:
    layer, front = segment_layer(dtype=dtype), persistent(3, dtype)
    inputs = {"x": tokens(9, dtype=dtype), "h": tokens(9, seed=2, dtype=dtype)}
    before, _ = layer(**inputs, prefix=front)
    inputs[what][:, changed] = -5 * inputs[what][:, changed].flip(-1) + 1
    after, _ = layer(**inputs, prefix=front)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_rows_do_not_influence_each_other() -> None:
    window, segment = window_layer(), segment_layer()
    x, h = tokens(9), tokens(9, seed=2)
    other = torch.stack([x[0] + 1, x[1]])
    _, state = window(x)
    assert torch.equal(window(x, state)[0][1], window(other, window(other)[1])[0][1])
    assert torch.equal(segment(x, h)[0][1], segment(other, h + 0)[0][1])


def test_beams_may_be_reordered_and_repeated() -> None:
    index = torch.tensor([2, 0, 0])
    window, x, more = window_layer(), tokens(10, 3), tokens(5, 3, seed=5)
    _, state = window(x, mask=padding([10, 4, 2], 10))
    _, expected = window(x[index], mask=padding([2, 10, 10], 10))
    assert_same({"y": window(more, state.reorder(index))[0]}, {"y": window(more, expected)[0]}, TOLERANCE)
    segment, x, h, more = segment_layer(), tokens(4, 3), tokens(4, 3, seed=2), tokens(3, 3, seed=5)
    _, opened = segment(x, h, mask=padding([4, 1, 2], 4))
    _, wanted = segment(x[index], h[index], mask=padding([2, 4, 4], 4))
    assert_same({"y": segment(more, more, opened.reorder(index))[0]}, {"y": segment(more, more, wanted)[0]}, TOLERANCE)


def test_a_call_does_not_change_the_state_it_was_given() -> None:
    window, segment, x = window_layer(), segment_layer(), tokens(3)
    _, state = window(tokens(10))
    _, opened = segment(tokens(4), tokens(4))
    assert torch.equal(window(x, state)[0], window(x, state)[0])
    assert torch.equal(segment(x, x, opened)[0], segment(x, x, opened)[0])


def test_states_can_be_detached_and_moved_to_another_dtype() -> None:
    _, state = window_layer()(tokens(10))
    _, opened = segment_layer()(tokens(4), None)
    assert state.k.requires_grad
    assert not state.detach().k.requires_grad
    assert state.to(dtype=torch.float32).k.dtype == torch.float32
    ragged = replace(opened, length=torch.tensor([3, 4]))
    assert ragged.to(dtype=torch.float32).lengths.dtype == torch.int64
    assert opened.detach().h_k is None


def test_the_state_keeps_no_more_than_the_window_alive() -> None:
    _, state = window_layer()(tokens(500))
    assert state.k.untyped_storage().nbytes() == state.k.numel() * state.k.element_size()


def test_nothing_in_gives_nothing_out() -> None:
    window, segment = window_layer(), segment_layer()
    for x in (tokens(0), tokens(3, batch=0)):
        for y, state in (window(x), segment(x, x)):
            assert y.shape == x.shape
            assert state.batch_size == len(x)


def test_bfloat16_autocast_runs_and_streams() -> None:
    layer, x, front = window_layer(dtype=torch.float32), tokens(40, dtype=torch.float32), persistent(2, torch.float32)
    whole, _ = layer(x, prefix=front)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, state = layer(x[:, :25], prefix=front)
        second, _ = layer(x[:, 25:], state, front)
    torch.testing.assert_close(torch.cat([first, second], 1).float(), whole, atol=0.1, rtol=0.1)


def test_decoding_a_token_costs_the_same_at_any_position() -> None:
    layer = WindowAttention(64, 2, 256)
    x = torch.randn(1, 1, 64)
    with torch.no_grad():
        _, state = layer(torch.randn(1, 300, 64))
        far = replace(state, length=state.length + 10_000_000)
        times: dict[str, list[float]] = {"near": [], "far": []}
        for _ in range(50):
            for name, given_state in (("near", state), ("far", far)):
                start = time.perf_counter()
                _, after = layer(x, given_state)
                times[name].append(time.perf_counter() - start)
                assert after.k.shape == state.k.shape
    assert min(times["far"]) <= 2 * min(times["near"])


@pytest.mark.parametrize("kind", [WindowAttention, SegmentAttention])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": 5}, "dim is 12 and heads is 5; expected heads to divide dim, or give head_dim"),
        ({"heads": 0}, "heads is 0; expected a whole number of at least 1"),
        ({"dim": 0}, "dim is 0; expected a whole number of at least 1"),
        ({"heads": 4}, "head_dim is 3; expected an even number, for the rotary position embedding"),
        ({"head_dim": 0}, "head_dim is 0; expected an even number, for the rotary position embedding"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_in_one_sentence(
    kind: type[WindowAttention | SegmentAttention], options: dict[str, int], sentence: str
) -> None:
    size = {"window": 4} if kind is WindowAttention else {"segment_size": 4}
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        kind(**{"dim": DIM, "heads": HEADS, **size, **options})


def test_a_window_or_segment_below_one_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^window is 0; expected a whole number of at least 1, or None for no limit$"):
        window_layer(0)
    with pytest.raises(ValueError, match=r"^segment_size is 0; expected a whole number of at least 1$"):
        segment_layer(0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"x": torch.zeros(2, 3, 5)}, "x has shape (2, 3, 5); expected (batch, time, 12)"),
        ({"prefix": torch.zeros(3, 5)}, "prefix has shape (3, 5); expected (tokens, 12)"),
        (
            {"mask": torch.ones(2, 4, dtype=torch.bool)},
            "mask has shape (2, 4) and dtype torch.bool; expected (batch, time) = (2, 3) and bool",
        ),
        (
            {"mask": torch.tensor([[False, True, True]] * 2)},
            "mask has a token after padding; expected each row's padding after all of its tokens",
        ),
        (
            {"state": WindowState.create(3, HEADS, 4)},
            "state has k of shape (3, 3, 0, 4); expected (2, 3, slots, 4)",
        ),
        (
            {"state": replace(WindowState.create(2, HEADS, 4), length=torch.zeros(3, dtype=torch.int64))},
            "state has length of shape (3,); expected (2,)",
        ),
        (
            {"state": replace(WindowState.create(2, HEADS, 4), v=torch.zeros(2, HEADS, 1, 4))},
            "state has v of shape (2, 3, 1, 4); expected (2, 3, slots, 4)",
        ),
        (
            {"state": WindowState(torch.zeros(2, dtype=torch.int64), *[torch.zeros(2, HEADS, WINDOW, 4)] * 2)},
            "state holds 7 tokens of each sequence; expected at most 6",
        ),
    ],
)
def test_bad_input_to_a_window_is_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    layer = window_layer(dtype=torch.float32)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        layer(**{"x": torch.zeros(2, 3, DIM), **options})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"h": torch.zeros(2, 4, DIM)}, "h has shape (2, 4, 12); expected that of x, (2, 3, 12)"),
        (
            {"state": SegmentState.create(1, HEADS, 4)},
            "state has k of shape (1, 3, 0, 4); expected (2, 3, slots, 4)",
        ),
        (
            {"state": SegmentState.create(2, HEADS, 4, history=False)},
            "state was made with no h; expected one with h",
        ),
        (
            {"state": SegmentState.create(2, HEADS, 4), "h": None},
            "state was made with h; expected one without, as h is None",
        ),
        (
            {"x": torch.zeros(2, 10, DIM), "h": torch.zeros(2, 10, DIM)},
            "the segment would hold 10 tokens; expected at most segment_size = 9: "
            "cut the call at the segment's end and reset the state",
        ),
    ],
)
def test_bad_input_to_a_segment_is_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    layer = segment_layer(dtype=torch.float32)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        layer(**{"x": torch.zeros(2, 3, DIM), "h": torch.zeros(2, 3, DIM), **options})


def test_bad_rows_and_beams_are_refused_in_one_sentence() -> None:
    state = SegmentState.create(2, HEADS, 4)
    with pytest.raises(ValueError, match=r"^rows has shape \(3,\) and dtype torch.bool; expected \(batch,\) = \(2,\)"):
        state.reset(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^indices has shape \(1, 2\) and dtype torch.int64; expected a vector"):
        state.reorder(torch.zeros(1, 2, dtype=torch.int64))


def test_the_prefix_is_seen_alike_from_every_position() -> None:
    torch.manual_seed(0)
    layer = WindowAttention(16, 2, window=1).double()  # a token sees itself and the prefix
    prefix = torch.randn(3, 16, dtype=torch.float64)
    x = torch.randn(1, 1, 16, dtype=torch.float64).expand(1, 4000, 16)
    y, _ = layer(x, prefix=prefix)
    torch.testing.assert_close(y, y[:, :1].expand_as(y), rtol=1e-9, atol=1e-9)
