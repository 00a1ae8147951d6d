"""The chunked rule against its definition: outputs, final state and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import (
    CHOICES,
    CHUNKS,
    LENGTHS,
    ONE_AT_A_TIME,
    Case,
    assert_equals_the_definition,
    make,
    mixed,
)
from titans.ops import neural_memory_chunked

pytestmark = pytest.mark.usefixtures("either_way")


@pytest.mark.parametrize("case", ONE_AT_A_TIME, ids=str)
def test_every_option_equals_the_definition(case: Case) -> None:
    assert_equals_the_definition(neural_memory_chunked, case)


@pytest.mark.parametrize("case", mixed(24, 1, CHOICES), ids=str)
def test_mixed_options_equal_the_definition(case: Case) -> None:
    assert_equals_the_definition(neural_memory_chunked, case)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("time", LENGTHS[:4])
def test_every_length_equals_the_definition(time: int, chunk: int) -> None:
    assert_equals_the_definition(neural_memory_chunked, Case(time=time, chunk=chunk, depth=1 + time % 2, width=4))


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_long_sequence_equals_the_definition(chunk: int) -> None:
    assert_equals_the_definition(neural_memory_chunked, Case(time=257, chunk=chunk, width=4))


@pytest.mark.slow
@pytest.mark.parametrize("case", mixed(300, 1000, {**CHOICES, "time": (1, 5, 17, 63, 64, 100, 257)}), ids=str)
def test_many_mixed_options_equal_the_definition(case: Case) -> None:
    assert_equals_the_definition(neural_memory_chunked, case, allow_chaos=True)


def test_the_chunk_size_is_part_of_the_model() -> None:
    call = make(Case())
    assert not torch.allclose(call(neural_memory_chunked, 4)[0], call(neural_memory_chunked, 8)[0], rtol=1e-3)
