"""A sequence may be read in any number of calls, with any padding, in any floating dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import (
    OPS,
    Call,
    Case,
    assert_identical,
    assert_same,
    in_pieces,
    make,
    values,
    values_and_gradients,
)
from titans.ops import MemoryState, Surprise

TIME = 29
SPLITS = st.lists(st.integers(0, TIME), max_size=6)
ALL_SINGLE = list(range(1, TIME))

STREAMS: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "chunked, linear": ("chunked", Case(depth=1), {}),
    "chunked, deep": ("chunked", Case(bias=True, surprise=True), {}),
    "chunked, masked": ("chunked", Case(masked=True), {}),
    "chunked, bounded and guarded": ("chunked", Case(bounded=True, max_norm=0.5), {}),
    "chunked, bounded and guarded, masked": ("chunked", Case(bounded=True, max_norm=0.5, masked=True, rest=True), {}),
    "chunked, channel gates": ("chunked", Case(depth=1, channels=True, bounded=True, masked=True), {}),
    "exact, linear": ("exact", Case(depth=1), {}),
    "exact, deep": ("exact", Case(bias=True, surprise=True), {}),
    "exact, masked": ("exact", Case(masked=True), {}),
    "exact by sweeps": ("exact by sweeps", Case(bias=True, surprise=True), {}),
    "exact by sweeps, bounded and guarded, masked": (
        "exact by sweeps",
        Case(bounded=True, max_norm=0.5, masked=True, rest=True),
        {"guard_every": 6},
    ),
    "exact, linear, guarded, masked": ("exact", Case(depth=1, max_norm=0.5, masked=True), {"guard_every": 6}),
    "exact, bounded and guarded": ("exact", Case(bounded=True, max_norm=0.5), {"guard_every": 12}),
    "exact, bounded and guarded, masked": (
        "exact",
        Case(bounded=True, max_norm=0.5, masked=True, rest=True),
        {"guard_every": 6},
    ),
    "recurrent, in chunks": ("recurrent", Case(bounded=True, max_norm=0.5, masked=True, rest=True), {}),
}
every_stream = pytest.mark.parametrize("stream", STREAMS)


@every_stream
@settings(max_examples=12, deadline=None)
@given(cuts=SPLITS)
def test_any_split_gives_the_same_outputs_and_state(stream: str, cuts: list[int]) -> None:
    name, case, options = STREAMS[stream]
    call = make(replace(case, time=TIME))
    assert_same(in_pieces(OPS[name], call, 8, cuts, **options), values(call(OPS[name], 8, **options)))


@every_stream
def test_one_token_at_a_time_gives_the_same_outputs_and_state(stream: str) -> None:
    name, case, options = STREAMS[stream]
    call = make(replace(case, time=TIME))
    assert_same(in_pieces(OPS[name], call, 8, ALL_SINGLE, **options), values(call(OPS[name], 8, **options)))


@pytest.mark.parametrize("stream", [s for s in STREAMS if "recurrent" not in s])
def test_a_split_gives_the_same_gradients(stream: str) -> None:
    name, case, options = STREAMS[stream]
    call = make(replace(case, time=TIME))

    def split(*tensors: Any, **all_options: Any) -> Any:
        """The op in three calls, the second inside a chunk."""
        *tokens, state, chunk_size = tensors
        mask = all_options.pop("mask")
        parts = []
        for start, stop in ((0, 3), (3, 6), (6, TIME)):
            part = (x if x is None else x[:, :, start:stop] for x in tokens)
            here = None if mask is None else mask[:, start:stop]
            y, state, *surprise = OPS[name](*part, state, chunk_size, mask=here, **all_options)
            parts.append((y, *(x for s in surprise for x in s)))
        y, *surprise = (torch.cat(group, dim=2) for group in zip(*parts, strict=True))
        return (y, state, Surprise(*surprise)) if surprise else (y, state)

    assert_same(values_and_gradients(split, call, 8, **options), values_and_gradients(OPS[name], call, 8, **options))


@every_stream
def test_a_saved_and_loaded_state_goes_on_identically(stream: str, tmp_path: Path) -> None:
    name, case, options = STREAMS[stream]
    call = make(replace(case, time=TIME))
    state = call.between(0, 11)(OPS[name], 8, **options)[1]
    state.save(tmp_path / "state.safetensors")
    rest = call.between(11, TIME)
    went_on = rest(OPS[name], 8, state, **options)
    resumed = rest(OPS[name], 8, MemoryState.load(tmp_path / "state.safetensors"), **options)
    assert_identical(values(resumed), values(went_on))


@pytest.mark.parametrize("name", OPS)
def test_a_sequence_of_which_nothing_is_left_changes_nothing(name: str) -> None:
    call = make(Case(time=11, masked=True, max_norm=5.0, bounded=True))
    assert call.mask is not None
    state = call.between(0, 3)(OPS[name], 4)[1]
    nothing = replace(call.between(3, 11), mask=torch.zeros(2, 8, dtype=torch.bool))
    y, after, *_ = nothing(OPS[name], 4, state)
    assert torch.equal(y, torch.zeros_like(y))
    for group in ("weights", "momentum"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(after, group), getattr(state, group), strict=True))
    assert torch.equal(after.positions, state.positions)


def poisoned(call: Call, by: float) -> Call:
    """The call with its masked tokens' queries, keys and values set to ``by``, their gates to 1."""
    assert call.mask is not None
    masked = ~call.mask[:, None, :]

    def poison(name: str, x: Tensor) -> Tensor:
        if "." in name:
            return x
        return torch.where(masked if x.ndim == 3 else masked.unsqueeze(-1), by if x.ndim == 4 else 1.0, x)

    return call.map(poison)


@pytest.mark.parametrize(("dtype", "by"), [(torch.float64, 1e30), (torch.float32, 1e30)], ids=["float64", "float32"])
@pytest.mark.parametrize("case", [Case(depth=1), Case(), Case(bounded=True), Case(loss="dot", bias=True)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_what_is_masked_does_not_matter(name: str, case: Case, dtype: torch.dtype, by: float) -> None:
    call = make(replace(case, masked=True), dtype)
    found = values_and_gradients(OPS[name], poisoned(call, by), 8)
    assert_same(found, values_and_gradients(OPS[name], call, 8), 1e-9 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("bounded", [False, True], ids=["plain", "bounded"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", OPS)
def test_float32_stays_near_float64(name: str, depth: int, bounded: bool) -> None:
    case = Case(depth=depth, time=41, bounded=bounded)  # the last chunk stays open
    expected = values_and_gradients(OPS[name], make(case), 16)
    found = values_and_gradients(OPS[name], make(case, torch.float32), 16)
    assert found["y"].dtype == found["weights.0"].dtype == torch.float32
    assert_same(found, expected, 1e-4)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", OPS)
def test_bfloat16_tokens_leave_the_state_in_float32(name: str, depth: int) -> None:
    case = Case(depth=depth, time=64)
    call = make(case, torch.float32).tokens(lambda x: x.bfloat16())
    found = values(call(OPS[name], 16))
    assert found["y"].dtype == torch.bfloat16
    assert {x.dtype for n, x in found.items() if "." in n} == {torch.float32}
    assert_same(found, values(make(case)(OPS[name], 16)), 3e-2)
