"""Attention in windows and segments against the definition with a dense mask: outputs, gradients, causality, cost."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import assert_same, draw
from titans.ops.attention import (
    MIN_BLOCK,
    SEGMENT_BLOCK,
    attention_dense,
    rotate,
    segment_attention,
    segment_visible,
    window_attention,
    window_visible,
)

BATCH, HEADS, WIDTH = 2, 2, 4
TOLERANCE = 1e-10
WINDOWS = (1, 2, 5, 32, 33, 64, 70, 129, 1000)
TIMES = (1, 7, 64, 96, 97, 128, 203, 257)


def heads(time: int, seed: int, batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(batch, HEADS, time, WIDTH, seed=seed, dtype=dtype)


def window_inputs(time: int, prefix: int | None, past: int | None) -> dict[str, Tensor]:
    inputs = {name: heads(time, seed) for seed, name in enumerate("qkv")}
    if prefix is not None:
        inputs |= {"prefix_k": heads(prefix, 3, batch=1), "prefix_v": heads(prefix, 4, batch=1)}
    if past is not None:
        inputs |= {"past_k": heads(past, 5), "past_v": heads(past, 6)}
    return inputs


def window_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    past_length: Tensor | None = None,
) -> Tensor:
    prefix, past = (0 if x is None else x.shape[2] for x in (prefix_k, past_k))
    visible = window_visible(q.shape[2], window, prefix, past, past_length)
    parts = [
        [x if len(x) == len(q) else x.expand(len(q), -1, -1, -1) for x in group if x is not None]
        for group in ((prefix_k, past_k, k), (prefix_v, past_v, v))
    ]
    return attention_dense(q, *(torch.cat(part, dim=2) for part in parts), visible)


def segment_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h_k: Tensor | None,
    h_v: Tensor | None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    start: int | Tensor = 0,
) -> Tensor:
    prefix = 0 if prefix_k is None else prefix_k.shape[2]
    visible = segment_visible(q.shape[2], k.shape[2], prefix, start, history=h_k is not None)
    parts = [
        [x if len(x) == len(q) else x.expand(len(q), -1, -1, -1) for x in group if x is not None]
        for group in ((prefix_k, h_k, k), (prefix_v, h_v, v))
    ]
    return attention_dense(q, *(torch.cat(part, dim=2) for part in parts), visible)


def with_gradients(function: Callable[..., Tensor], inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The output and the gradients in every input."""
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    y = function(**inputs, **options)
    names = list(inputs)
    gradients = torch.autograd.grad((y * draw(*y.shape, seed=9)).sum(), [inputs[n] for n in names], allow_unused=True)
    zeros = {name: torch.zeros_like(inputs[name]) for name in names}
    return {"y": y} | {n: zeros[n] if g is None else g for n, g in zip(names, gradients, strict=True)}


def by_hand(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """One query of one head at a time, without a mask: only the keys that it sees."""
    y = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        seen = [j for j in range(k.shape[2]) if visible[b, h, i, j]]
        if seen:
            score = [math.exp(float(q[b, h, i] @ k[b, h, j]) / WIDTH**0.5) for j in seen]
            y[b, h, i] = torch.stack([s / sum(score) * v[b, h, j] for s, j in zip(score, seen, strict=True)]).sum(0)
    return y


def test_the_definition_is_a_softmax_over_what_is_visible() -> None:
    q, k, v = heads(5, 0), heads(6, 1), heads(6, 2)
    visible = draw(BATCH, HEADS, 5, 6, seed=3) > 0
    visible[0, 0, 2] = False
    y = attention_dense(q, k, v, visible)
    assert_same({"y": y}, {"y": by_hand(q, k, v, visible)}, TOLERANCE)
    assert not y[0, 0, 2].any()


def test_gradients_of_a_query_that_sees_nothing_are_zero() -> None:
    visible = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    inputs = {name: heads(3, seed) for seed, name in enumerate("qkv")}
    found = with_gradients(attention_dense, inputs, visible=visible)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["q"][:, :, 0].any()


def test_the_masks_drawn_as_pictures() -> None:
    def picture(visible: Tensor) -> list[str]:
        return ["".join(".#"[int(seen)] for seen in row) for row in visible]

    assert picture(window_visible(4, 2)) == ["#...", "##..", ".##.", "..##"]
    assert picture(window_visible(3, None, prefix=1)) == ["##..", "###.", "####"]
    assert picture(window_visible(2, 3, prefix=1, past=2)) == ["####.", "#.###"]
    ragged = window_visible(2, 3, past=2, past_length=torch.tensor([0, 1]))
    assert [picture(row[0]) for row in ragged] == [["..#.", "..##"], [".##.", ".###"]]
    assert picture(segment_visible(3, 3, prefix=1)) == ["##..#..", "###.##.", "#######"]
    assert picture(segment_visible(2, 3, history=False)) == ["#..", "##."]
    later = segment_visible(1, 3, start=torch.tensor([0, 1]))
    assert [picture(row[0]) for row in later] == [["#..#.."], ["##.##."]]


@pytest.mark.parametrize("prefix", [None, 0, 3])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("time", TIMES)
def test_a_window_equals_the_definition(time: int, window: int, prefix: int | None) -> None:
    inputs = window_inputs(time, prefix, None)
    found = with_gradients(window_attention, inputs, window=window)
    assert_same(found, with_gradients(window_dense, inputs, window=window), TOLERANCE)


@pytest.mark.parametrize("lengths", [None, "ragged"])
@pytest.mark.parametrize("prefix", [None, 3])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("time", TIMES)
def test_a_window_with_a_past_equals_the_definition(
    time: int, window: int, prefix: int | None, lengths: str | None
) -> None:
    past = min(window - 1, 75)
    past_length = None if lengths is None else torch.tensor([0, past // 2])
    inputs = window_inputs(time, prefix, past)
    found = with_gradients(window_attention, inputs, window=window, past_length=past_length)
    expected = with_gradients(window_dense, inputs, window=window, past_length=past_length)
    assert_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("prefix", [None, 3])
@pytest.mark.parametrize("past", [None, 9])
def test_without_a_window_every_token_before_is_seen(prefix: int | None, past: int | None) -> None:
    inputs = window_inputs(100, prefix, past)
    found = with_gradients(window_attention, inputs, window=None)
    assert_same(found, with_gradients(window_dense, inputs, window=None), TOLERANCE)


def test_a_window_that_would_see_one_token_more_is_another_function() -> None:
    inputs = window_inputs(203, None, None)
    found, other = window_attention(**inputs, window=40), window_dense(**inputs, window=41)
    assert torch.allclose(found[:, :, :40], other[:, :, :40])
    assert ((found - other)[:, :, 40:].abs().amax(-1) > 1e-6).all()


SEGMENTS = (1, 6, SEGMENT_BLOCK, SEGMENT_BLOCK + 1, 2 * SEGMENT_BLOCK + 40)


def segment_inputs(time: int, segment: int, prefix: int | None, history: bool) -> dict[str, Tensor]:
    inputs = {"q": heads(time, 0), "k": heads(segment, 1), "v": heads(segment, 2)}
    if history:
        inputs |= {"h_k": heads(segment, 3), "h_v": heads(segment, 4)}
    if prefix is not None:
        inputs |= {"prefix_k": heads(prefix, 5, batch=1), "prefix_v": heads(prefix, 6, batch=1)}
    return inputs


@pytest.mark.parametrize("history", [True, False], ids=["memory", "no memory"])
@pytest.mark.parametrize("prefix", [None, 0, 3])
@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_segment_equals_the_definition(segment: int, prefix: int | None, history: bool) -> None:
    inputs = segment_inputs(segment, segment, prefix, history)
    options = {} if history else {"h_k": None, "h_v": None}
    found = with_gradients(segment_attention, inputs, **options)
    assert_same(found, with_gradients(segment_dense, inputs, **options), TOLERANCE)


@pytest.mark.parametrize("history", [True, False], ids=["memory", "no memory"])
@pytest.mark.parametrize("prefix", [None, 3])
@pytest.mark.parametrize(("time", "segment"), [(1, 6), (4, 9), (9, 4), (300, 600)])
def test_a_segment_entered_half_way_equals_the_definition(
    time: int, segment: int, prefix: int | None, history: bool
) -> None:
    inputs = segment_inputs(time, segment, prefix, history)
    options: dict[str, Any] = {} if history else {"h_k": None, "h_v": None}
    options["start"] = torch.tensor([0, 3])
    found = with_gradients(segment_attention, inputs, **options)
    assert_same(found, with_gradients(segment_dense, inputs, **options), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changed", [0, 17, 32, 79, 80, 81, 120, 159, 202])
def test_no_output_of_a_window_before_a_changed_token_moves_by_one_bit(changed: int, dtype: torch.dtype) -> None:
    inputs = {name: x.to(dtype) for name, x in window_inputs(203, 3, 20).items()}
    before = window_attention(**inputs, window=80)
    for name in "qkv":
        inputs[name][:, :, changed] = -3 * inputs[name][:, :, changed].flip(-1) + 100
    after = window_attention(**inputs, window=80)
    assert torch.equal(before[:, :, :changed], after[:, :, :changed])
    assert torch.equal(before[:, :, changed + 80 :], after[:, :, changed + 80 :])  # nor one behind the window
    assert not torch.equal(before[:, :, changed], after[:, :, changed])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [None, (2, 5)])
@pytest.mark.parametrize("place", [0, 5, 255, 256, 299])
def test_no_output_of_a_segment_before_a_changed_place_moves_by_one_bit(
    place: int, start: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    inputs = {name: x.to(dtype) for name, x in segment_inputs(300, 310, 3, True).items()}
    options = {} if start is None else {"start": torch.tensor(start)}
    before = segment_attention(**inputs, **options)
    for name in ("k", "v", "h_k", "h_v"):
        inputs[name][:, :, place] = -3 * inputs[name][:, :, place].flip(-1) + 100
    after = segment_attention(**inputs, **options)
    for row, first in enumerate(start or (0, 0)):
        assert torch.equal(before[row, :, : max(0, place - first)], after[row, :, : max(0, place - first)])
        if place >= first:
            assert not torch.equal(before[row, :, place - first], after[row, :, place - first])


def test_rows_do_not_influence_each_other() -> None:
    inputs = window_inputs(203, 3, 20)
    length = torch.tensor([7, 20])
    before = window_attention(**inputs, window=50, past_length=length)
    for name in ("q", "k", "v", "past_k", "past_v"):
        inputs[name][0] += 1
    after = window_attention(**inputs, window=50, past_length=length)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


def test_slots_of_the_past_that_are_not_real_are_not_read() -> None:
    inputs = window_inputs(100, 3, 20)
    before = window_attention(**inputs, window=50, past_length=torch.tensor([7, 0]))
    inputs["past_k"][0, :, :13] += 5
    inputs["past_v"][1] += 5
    assert torch.equal(window_attention(**inputs, window=50, past_length=torch.tensor([7, 0])), before)


def test_rotated_scores_depend_on_the_distance_alone_even_after_millions_of_tokens() -> None:
    q, k = heads(3, 0), heads(3, 1)
    place = torch.tensor([0, 5, 9])
    near = rotate(q, place) @ rotate(k, place).mT
    far = rotate(q, place + 50_000_000) @ rotate(k, place + 50_000_000).mT
    assert_same({"scores": far}, {"scores": near}, 1e-8)
    single = rotate(q.float(), place + 50_000_000) @ rotate(k.float(), place + 50_000_000).mT
    assert_same({"scores": single.double()}, {"scores": near}, 1e-6)


def test_rows_may_stand_at_different_positions() -> None:
    x = heads(3, 0)
    position = torch.tensor([[0, 1, 2], [7, 8, 9]])
    both = rotate(x, position)
    for row in range(BATCH):
        assert torch.equal(both[row : row + 1], rotate(x[row : row + 1], position[row]))
    assert torch.equal(both[0, :, 0], x[0, :, 0])
    torch.testing.assert_close(both.norm(dim=-1), x.norm(dim=-1))


def test_an_empty_sequence_gives_an_empty_output() -> None:
    assert window_attention(**window_inputs(0, 3, 2), window=4).shape == (BATCH, HEADS, 0, WIDTH)
    assert segment_attention(**segment_inputs(0, 2, 3, True)).shape == (BATCH, HEADS, 0, WIDTH)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"window": 0}, "window is 0; expected a whole number of at least 1, or None for no limit"),
        ({"k": heads(8, 0), "v": heads(8, 0)}, "k has shape (2, 2, 8, 4); expected that of q, (2, 2, 9, 4)"),
        ({"k": heads(9, 0, 1)}, "k has shape (1, 2, 9, 4); expected batch, heads and width of q, (2, 2, 9, 4)"),
        ({"v": heads(8, 0)}, "v has shape (2, 2, 8, 4); expected that of k, (2, 2, 9, 4)"),
        ({"q": torch.zeros(2, 9)}, "q has shape (2, 9); expected (batch, heads, time, width)"),
        ({"prefix_k": heads(2, 0)}, "prefix_k is given and prefix_v is None; expected both or neither"),
        ({"past_v": heads(2, 0)}, "past_v is given and past_k is None; expected both or neither"),
        (
            {"prefix_k": heads(2, 0, 3), "prefix_v": heads(2, 0, 3)},
            "prefix_k has shape (3, 2, 2, 4); expected (1 or 2, 2, slots, 4) to go with q",
        ),
        (
            {"past_k": heads(2, 0, 1), "past_v": heads(2, 0, 1)},
            "past_k has shape (1, 2, 2, 4); expected (2, 2, slots, 4) to go with q",
        ),
        (
            {"past_k": heads(2, 0), "past_v": heads(1, 0)},
            "past_v has shape (2, 2, 1, 4); expected that of past_k, (2, 2, 2, 4)",
        ),
        ({"past_k": heads(5, 0), "past_v": heads(5, 0)}, "past_k has 5 slots; expected at most window - 1 = 4"),
        (
            {"past_length": torch.zeros(3, dtype=torch.int64)},
            "past_length has shape (3,) and dtype torch.int64; expected (batch,) = (2,) whole numbers",
        ),
    ],
)
def test_bad_input_to_a_window_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    inputs: dict[str, Any] = {**window_inputs(9, None, None), "window": 5}
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        window_attention(**inputs | change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"h_v": None}, "h_k is given and h_v is None; expected both or neither"),
        (
            {"h_k": heads(8, 0), "h_v": heads(8, 0)},
            "h_k has shape (2, 2, 8, 4); expected that of k, (2, 2, 9, 4)",
        ),
        (
            {"start": torch.zeros(2)},
            "start has shape (2,) and dtype torch.float32; expected (batch,) = (2,) whole numbers",
        ),
    ],
)
def test_bad_input_to_a_segment_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    inputs: dict[str, Any] = segment_inputs(9, 9, None, True)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        segment_attention(**inputs | change)


def test_bad_positions_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"position has shape \(4,\); expected \(time,\) = \(3,\) or \(batch, time\)"):
        rotate(heads(3, 0), torch.arange(4))
    with pytest.raises(ValueError, match=r"x has shape \(1, 1, 2, 3\); expected .* an even width"):
        rotate(torch.zeros(1, 1, 2, 3), torch.arange(2))


@pytest.mark.parametrize("grows", [False, True], ids=["forward", "forward and backward"])
def test_the_efficient_kernel_is_used(grows: bool) -> None:
    """Without it, a block's scores would be stored: more memory, and slower."""
    inputs = {name: x.float().requires_grad_(grows) for name, x in window_inputs(4 * MIN_BLOCK + 5, 3, 20).items()}
    with torch.profiler.profile() as profile:
        y = window_attention(**inputs, window=2 * MIN_BLOCK, past_length=torch.tensor([3, 20]))
        if grows:
            y.sum().backward()
    kernels = {event.key: event.count for event in profile.key_averages()}
    assert (
        kernels["aten::_scaled_dot_product_flash_attention_for_cpu"] == 4
    )  # two blocks that see the past, the others, last tokens
    assert "aten::_scaled_dot_product_attention_math" not in kernels


COST = """
import json, statistics, time, torch
from titans.bench.memory import peak_growth
from titans.layers.attention import WindowAttention
torch.set_num_threads(1)
layer = WindowAttention(256, 4, 512)
prefix = torch.nn.Parameter(torch.randn(16, 256))
def run(length):
    x = torch.randn(1, length, 256, requires_grad=True)
    layer(x, prefix=prefix)[0].sum().backward()
def seconds(length):
    start = time.process_time()
    run(length)
    return time.process_time() - start
run(2048)
peaks = [peak_growth(lambda: run(length))[0] for length in (4096, 16384)]
ratios = []
for _ in range(5):
    short = [seconds(4096) for _ in range(4)]
    ratios.append(seconds(16384) / statistics.median(short))
print(json.dumps({"time": statistics.median(ratios), "memory": peaks[1] / peaks[0]}))
"""


@pytest.mark.slow
def test_four_times_the_length_costs_at_most_4_4_times_the_time_and_memory() -> None:
    answer = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True)
    ratios = json.loads(answer.stdout.strip().splitlines()[-1])
    assert ratios["time"] <= 4.4, ratios
    assert ratios["memory"] <= 4.4, ratios
