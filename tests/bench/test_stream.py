"""For any finite input, for as long as it lasts: everything finite, norms bounded, and the memory still learns."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from titans import NeuralMemory
from titans.bench.stream import RULES, SETTINGS, STREAMS, make_memory, relearn, run_bounds

SHORT, LONG = 4096, 1_000_000
MEMORIES = [(setting, mode, depth) for setting in SETTINGS for mode, depth in RULES]
each_memory = pytest.mark.parametrize(("setting", "mode", "depth"), MEMORIES)
# stale gradients at the gates' extremes oscillate: there the chunked rule promises bounds, not quick learning
LEARNERS = [memory for memory in MEMORIES if memory[0] == "default" or memory[1] == "exact"]
each_learner = pytest.mark.parametrize(("setting", "mode", "depth"), LEARNERS)
each_stream = pytest.mark.parametrize("stream", STREAMS)


@cache
def after(tokens: int, setting: str, mode: str, depth: int) -> dict[str, Any]:
    """What each stream did to a small memory; all streams are read at once."""
    return run_bounds(make_memory(setting, mode, depth, dim=16), tokens)["streams"]


def check(figures: dict[str, Any]) -> None:
    # no row of M - M_0 or S is longer than max_norm = 10 where a chunk ends; ||M_0|| is at most 3 * 4 here
    limit = 10.0 * 16**0.5 * (1 + 1e-5) + 12.0
    assert figures["finite"]
    assert figures["weights"] <= limit
    assert figures["momentum"] <= limit


@each_stream
@each_memory
def test_norms_stay_bounded(setting: str, mode: str, depth: int, stream: str) -> None:
    check(after(SHORT, setting, mode, depth)[stream])


@each_stream
@each_learner
def test_a_fresh_token_is_learned_after_the_stream(setting: str, mode: str, depth: int, stream: str) -> None:
    figures = after(SHORT, setting, mode, depth)[stream]
    assert figures["learns"], figures["missing"]


@pytest.mark.slow
@each_memory
def test_a_million_tokens_leave_a_memory_that_learns(setting: str, mode: str, depth: int) -> None:
    streams = after(LONG, setting, mode, depth)
    for figures in streams.values():
        check(figures)
    if (setting, mode, depth) in LEARNERS:
        assert {name: figures["missing"] for name, figures in streams.items() if not figures["learns"]} == {}


@pytest.mark.parametrize(("mode", "depth"), RULES)
def test_a_memory_that_writes_nothing_does_not_pass_for_one_that_learns(mode: str, depth: int) -> None:
    memory = make_memory("default", mode, depth, dim=16)
    state = memory.init_state(2).detach()
    assert [row["learns"] for row in relearn(memory, state)["rows"]] == [True, True]
    memory.writes = False
    assert [row["learns"] for row in relearn(memory, state)["rows"]] == [False, False]


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e15, 1e30, 1e38])
@pytest.mark.parametrize(("mode", "depth"), RULES)
def test_outputs_are_finite_for_inputs_of_any_size(mode: str, depth: int, scale: float) -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(16, heads=2, depth=depth, mode=mode)
    x = scale * torch.randn(2, 200, 16).clamp(-3, 3)
    x[:, 100:] /= scale
    y, state = memory(x)
    assert y.isfinite().all()
    assert all(norm.isfinite().all() for norm in state.norms().values())
