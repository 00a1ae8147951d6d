"""The compiled exact rule where its blocks, vectors and kept states meet: all against the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.cases import (
    GUARD,
    Case,
    assert_equals_the_definition,
    assert_identical,
    assert_same,
    in_pieces,
    make,
    values_and_gradients,
)
from titans.ops import neural_memory_exact, neural_memory_recurrent
from titans.ops.native.exact import BLOCK, KEPT_NUMBERS, choose_segment
from titans.ops.native.library import library

pytestmark = pytest.mark.skipif(library(torch.float64) is None, reason="the compiled loops are switched off")


@pytest.mark.parametrize("time", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_any_number_of_blocks_equals_the_definition(time: int) -> None:
    assert_equals_the_definition(neural_memory_exact, Case(time=time, bounded=True, rest=True))


# Linear memory goes in bands of vectors: one, several, a broken one at the end, with and without what moves a state.
BANDS = [
    Case(depth=1, width=8, bounded=True, rest=True),
    Case(depth=1, width=24, bias=True, rest=True, surprise=True),
    Case(depth=1, width=50, masked=True, bounded=True, time=41, max_norm=0.3, rest=True),
    Case(depth=1, width=59, residual=True, momentum=False, max_norm=0.3, time=41),
    Case(depth=1, width=90, momentum=False, decay_first=True, surprise=True),
    Case(depth=1, width=100, loss="dot", bias=True, surprise=True, checkpoint_every=2),
    Case(depth=1, width=9, expansion=2, forgetting=False, masked=True),
]


@pytest.mark.parametrize("case", BANDS, ids=str)
def test_bands_of_linear_memory_equal_the_definition(case: Case) -> None:
    assert_equals_the_definition(neural_memory_exact, case)


WIDE = [
    Case(width=32, bounded=True, rest=True),
    Case(width=33, bias=True),
    Case(width=41, residual=True, momentum=False),
    Case(width=24, expansion=3, rest=True, momentum=False, depth=3),
    Case(width=17, expansion=2, loss="dot", surprise=True),
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_widths_of_whole_and_broken_vectors_equal_the_definition(case: Case) -> None:
    assert_equals_the_definition(neural_memory_exact, case)


@pytest.mark.parametrize("rest", [False, True])
def test_a_guard_that_clips_inside_a_block_equals_the_definition(rest: bool) -> None:
    assert_equals_the_definition(neural_memory_exact, Case(time=41, max_norm=0.3, bounded=True, masked=True, rest=rest))


@pytest.mark.parametrize("depth, width", [(1, 12), (2, 5)])
def test_a_guard_acts_after_a_call_that_ends_in_the_middle_of_a_tile(depth: int, width: int) -> None:
    call = make(Case(depth=depth, width=width, time=GUARD, bounded=True, max_norm=0.2))
    pieces = in_pieces(neural_memory_exact, call, 3, [1], guard_every=GUARD)
    assert_same(pieces, in_pieces(neural_memory_recurrent, call, 1, [1], guard_every=GUARD))


@pytest.mark.parametrize("every", [1, 3, 10, 10**6, 2**40])
def test_any_spacing_of_kept_states_gives_the_same_gradients(every: int) -> None:
    call = make(Case(time=3 * BLOCK + 5, chunk=8, bounded=True, rest=True))
    usual = values_and_gradients(neural_memory_exact, call, 8)
    assert_same(values_and_gradients(neural_memory_exact, call, 8, checkpoint_every=every), usual)


@pytest.mark.parametrize("every", [1, 6])
def test_the_spacing_asked_for_is_the_one_kept(every: int) -> None:
    call, tile, time = make(Case(time=96)), 8, 96
    kept: list[torch.Size] = []

    def see(x: Tensor) -> Tensor:
        kept.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        call.map(lambda name, x: x.requires_grad_())(neural_memory_exact, tile, checkpoint_every=every)
    states = {shape for shape in kept if len(shape) == 4 and shape[2:] == call.weights[0].shape[2:]}
    assert {shape[1] for shape in states} == {time // (every * tile)}


@pytest.mark.parametrize("heads, width, slots", [(4, 64, 2048), (4, 64, 1 << 20), (1, 768, 256), (64, 128, 8192)])
def test_states_are_kept_within_a_budget(heads: int, width: int, slots: int) -> None:
    state = [torch.empty(heads, width, width, device="meta") for _ in range(4)]
    segment = choose_segment(state, slots)
    size = sum(x.numel() for x in state)
    assert segment % BLOCK == 0
    assert -(-slots // segment) * size <= max(KEPT_NUMBERS, size)
    assert segment == BLOCK or -(-slots // (segment // 2)) * size > KEPT_NUMBERS


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("repetitions", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_repetitions_agree_to_the_bit(threads: int, repetitions: int) -> None:
    call = make(Case(width=16, time=BLOCK + 8, bounded=True, rest=True), torch.float32)

    def run() -> dict[str, Tensor]:
        return values_and_gradients(neural_memory_exact, call, 8)

    first = run()
    for _ in range(repetitions - 1):
        assert_identical(run(), first)
