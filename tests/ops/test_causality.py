"""No token moves anything before it, no sequence another one, no head another one: not by a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.cases import OPS, Call, Case, assert_same, make, values
from titans.ops import MemoryState

TIME, CHUNK = 21, 8
FIRST, INSIDE, LAST = 8, 11, 15  # slots of the second chunk
RULES: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "recurrent": ("recurrent", Case(time=TIME), {}),
    "chunked, linear": ("chunked", Case(time=TIME, depth=1), {}),
    "chunked": ("chunked", Case(time=TIME), {}),
    "chunked, bounded and guarded": ("chunked", Case(time=TIME, bounded=True, max_norm=0.5), {}),
    "chunked, masked": ("chunked", Case(time=TIME, masked=True, surprise=True), {}),
    "exact, linear": ("exact", Case(time=TIME, depth=1), {}),
    "exact": ("exact", Case(time=TIME), {}),
    "exact, deeper": ("exact", Case(time=TIME, depth=3, bias=True, residual=True), {}),
    "exact, two sweeps": ("exact", Case(time=TIME), {"sweeps": 2}),
    "exact, bounded and guarded": ("exact", Case(time=TIME, bounded=True, max_norm=0.5), {"guard_every": 16}),
    "exact, masked": ("exact", Case(time=TIME, masked=True, surprise=True), {}),
    "exact by sweeps": ("exact by sweeps", Case(time=TIME, bias=True, residual=True), {}),
    "exact by sweeps, masked": ("exact by sweeps", Case(time=TIME, masked=True, surprise=True), {}),
    "exact, normed": ("exact", Case(time=TIME, norm=True), {}),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def run(rule: str, call: Call) -> dict[str, Tensor]:
    name, _, options = RULES[rule]
    return values(call(OPS[name], CHUNK, **options))


def disturb(call: Call, where: tuple[Any, ...]) -> Call:
    """Other tokens at ``where``, an index of (batch, heads, time), as tame as those they replace."""

    def change(name: str, x: Tensor) -> Tensor:
        if "." in name:
            return x
        x = x.clone()
        x[where] = 0.9 * x[where] + 0.01 if x.ndim == 3 else -x[where].flip(-1)
        return x

    return call.map(change)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("changed", [0, FIRST, INSIDE, LAST, TIME - 1])
def test_no_output_before_a_changed_token_moves_by_one_bit(rule: str, changed: int, dtype: torch.dtype) -> None:
    call = make(RULES[rule][1], dtype)
    before = run(rule, call)
    after = run(rule, disturb(call, (slice(None), slice(None), changed)))
    for name in before:
        if name == "y" or name.startswith("surprise"):
            assert torch.equal(after[name][:, :, :changed], before[name][:, :, :changed])
    if call.mask is None or call.mask[:, changed].any():
        assert not torch.equal(after["y"][:, :, changed], before["y"][:, :, changed])


@pytest.mark.parametrize("name", OPS)
def test_a_token_that_makes_the_memory_explode_leaves_those_before_it_alone(name: str) -> None:
    """A step so large that what follows overflows: zero times infinity must not bring it back to the past."""
    changed, width = 3, 5
    generator = torch.Generator().manual_seed(0)
    k = F.normalize(torch.randn(1, 1, CHUNK, width, generator=generator), dim=-1)
    v = torch.randn(1, 1, CHUNK, width, generator=generator)
    state = MemoryState.create([0.45 * torch.randn(1, 1, width, width, generator=generator) for _ in range(3)])
    theta, eta = torch.full((1, 1, CHUNK), 0.1), torch.full((1, 1, CHUNK), 0.5)
    chunk_size = 1 if name == "recurrent" else CHUNK
    before, _ = OPS[name](k, k, v, theta, None, eta, state, chunk_size)
    for size in (3.0, 10.0, 1e3, 1e8):
        large_k, large_theta = k.clone(), theta.clone()
        large_k[:, :, changed] *= size
        large_theta[:, :, changed] = 1
        after, _ = OPS[name](large_k, large_k, v, large_theta, None, eta, state, chunk_size)
        assert torch.equal(after[:, :, :changed], before[:, :, :changed]), size


HUGE: dict[str, tuple[str, dict[str, Any]]] = {
    "chunked": ("chunked", {}),
    "chunked, dual": ("chunked", {"engine": "dual"}),
    "exact": ("exact", {}),
    "exact by sweeps": ("exact by sweeps", {}),
    "exact by sweeps, huber": ("exact by sweeps", {"loss": "huber"}),
    "chunked, huber": ("chunked", {"loss": "huber"}),
}


@pytest.mark.parametrize("bounded", [False, True], ids=["plain", "bounded"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rule", HUGE)
def test_no_finite_number_however_large_moves_an_earlier_output(rule: str, depth: int, bounded: bool) -> None:
    """Zero times what overflowed is not zero: up to the largest float."""
    name, options = HUGE[rule]
    case = Case(time=16, depth=depth, bounded=bounded, surprise=True)
    changed, largest = 11, torch.finfo(torch.float32).max
    call = make(case, torch.float32)
    before = values(call(OPS[name], CHUNK, **options))
    for field, size in (("q", largest), ("k", 1e20), ("k", largest), ("v", largest)):

        def enlarge(at: str, x: Tensor, field: str = field, size: float = size) -> Tensor:
            if at != field:
                return x
            x = x.clone()
            x[:, :, changed] = size * x[:, :, changed].sign()
            return x

        after = values(call.map(enlarge)(OPS[name], CHUNK, **options))
        for part in ("y", "surprise.gradient_norm", "surprise.loss"):
            same = torch.equal(after[part][:, :, :changed], before[part][:, :, :changed])
            assert same, f"{part} of an earlier token moved with {field} = {size}"


@every_rule
def test_a_sequence_does_not_move_another_by_one_bit(rule: str) -> None:
    call = make(RULES[rule][1])
    before = run(rule, call)
    after = run(rule, disturb(call, (1,)))
    assert all(torch.equal(after[name][0], x[0]) for name, x in before.items())
    assert not torch.equal(after["y"][1], before["y"][1])


@every_rule
def test_a_head_does_not_move_another_by_one_bit(rule: str) -> None:
    call = make(RULES[rule][1])
    before = run(rule, call)
    after = run(rule, disturb(call, (slice(None), 1)))
    assert all(torch.equal(after[name][:, 0], x[:, 0]) for name, x in before.items() if x.ndim > 1)
    assert not torch.equal(after["y"][:, 1], before["y"][:, 1])


@every_rule
def test_a_sequence_alone_gives_what_it_gives_in_a_batch(rule: str) -> None:
    call = make(RULES[rule][1])
    together = run(rule, call)
    for row in range(2):
        alone = run(rule, call.row(row))
        assert_same(alone, {name: x[row : row + 1] for name, x in together.items()}, 1e-12)
