"""The definition against the paper's equations, written out once more for one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import (
    BATCH,
    HEADS,
    Call,
    Case,
    assert_same,
    draw,
    make,
    values,
    values_and_gradients,
)
from titans.ops import MemoryState, neural_memory_recurrent
from titans.ops.recurrent import clip_rows

Network = Callable[[Sequence[Tensor], Tensor], Tensor]


def two_layers(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """The network of ``Case()``, for one vector."""
    return weights[1] @ torch.nn.functional.silu(weights[0] @ x)


def by_hand(
    network: Network,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    weights: list[Tensor],
    momentum: list[Tensor],
    chunk_size: int = 1,
    loss: str = "squared",
    first_order: bool = False,
    decay_first: bool = False,
    rest: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
    """One sequence, one head: y, M, S, and each token's gradient norm and loss."""
    outputs, norms, losses = [], [], []
    home = [torch.zeros_like(w) for w in weights] if rest is None else rest
    for t in range(len(q)):
        if t % chunk_size == 0:
            start = weights
        keep = 1 if alpha is None else 1 - alpha[t]
        at = [keep * (w - r) + r for w, r in zip(start, home, strict=True)] if decay_first else start
        at = [(w.detach() if first_order else w * 1).requires_grad_() for w in at]
        answer = network(at, k[t])
        l = ((answer - v[t]) ** 2).sum() if loss == "squared" else -(answer * v[t]).sum()  # Eq. 12
        u = torch.autograd.grad(l, at, create_graph=True)
        if eta is None:
            surprise = [-theta[t] * g for g in u]  # Eq. 8
        else:
            momentum = surprise = [eta[t] * s - theta[t] * g for s, g in zip(momentum, u, strict=True)]  # Eq. 14
        kept = [keep * (w - r) + r for w, r in zip(weights, home, strict=True)]
        weights = [w + s for w, s in zip(kept, surprise, strict=True)]  # Eq. 13
        outputs.append(network(weights, q[t]))  # Eq. 15
        norms.append(torch.cat([g.flatten() for g in u]).norm())
        losses.append(l)
    return torch.stack(outputs), weights, momentum, torch.stack(norms), torch.stack(losses)


def written_out(network: Network, *tensors: Any, rest: Sequence[Tensor] | None, **options: Any) -> tuple[Any, ...]:
    """``by_hand`` with the op's signature: every sequence and head on its own."""
    q, k, v, theta, alpha, eta, state, chunk_size = tensors
    cells = []
    for b in range(BATCH):
        for h in range(HEADS):
            gates = (None if g is None else g[b, h] for g in (theta, alpha, eta))
            weights, momentum = ([w[b, h] for w in group] for group in (state.weights, state.momentum))
            home = None if rest is None else [r[b, h] for r in rest]
            tokens = (x[b, h] for x in (q, k, v))
            cells.append(by_hand(network, *tokens, *gates, weights, momentum, chunk_size, rest=home, **options))

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)).unflatten(0, (BATCH, HEADS))

    y, weights, momentum, norms, losses = zip(*cells, strict=True)
    memory = tuple(join(layer) for layer in zip(*weights, strict=True))
    return join(y), memory, tuple(join(layer) for layer in zip(*momentum, strict=True)), join(norms), join(losses)


def recurrent(network: Network, *tensors: Any, **options: Any) -> tuple[Any, ...]:
    """The op itself, returning what ``written_out`` returns."""
    y, state, surprise = neural_memory_recurrent(*tensors, network=network, return_surprise=True, **options)
    return y, state.weights, state.momentum, *surprise


def assert_same_rule(call: Call, chunk_size: int, hand: Network, network: Network, **options: Any) -> None:
    """Values and gradients of the op and of ``by_hand``; ``hand`` maps one vector, ``network`` many."""
    found = []
    for run, m in ((recurrent, network), (written_out, hand)):
        leaves = call.map(lambda name, x: x.detach().clone().requires_grad_())
        tokens = (leaves.q, leaves.k, leaves.v, leaves.theta, leaves.alpha, leaves.eta)
        y, weights, momentum, norms, losses = run(
            m, *tokens, leaves.start(), chunk_size, rest=leaves.rest or None, **options
        )
        outputs = [y, *weights, *(momentum if call.eta is not None else ()), norms, losses]
        cotangents = [draw(*x.shape, seed=i) for i, x in enumerate(outputs)]
        named = leaves.inputs()
        gradients = torch.autograd.grad(outputs, list(named.values()), cotangents, materialize_grads=True)
        found.append({str(i): x.detach() for i, x in enumerate(outputs)} | dict(zip(named, gradients, strict=True)))
    assert_same(*found)


def batched(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ weights[0].mT) @ weights[1].mT


@pytest.mark.parametrize("momentum", [True, False], ids=["momentum", "no momentum"])
@pytest.mark.parametrize("forgetting", [True, False], ids=["forgetting", "no forgetting"])
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_it_is_equations_12_to_15(chunk_size: int, forgetting: bool, momentum: bool) -> None:
    call = make(Case(time=7, momentum=momentum, forgetting=forgetting))
    assert_same_rule(call, chunk_size, two_layers, batched)


@pytest.mark.parametrize("options", [{"loss": "dot"}, {"first_order": True}, {"decay_first": True}], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_its_variants_are_what_they_say(chunk_size: int, options: dict[str, Any]) -> None:
    assert_same_rule(make(Case(time=7)), chunk_size, two_layers, batched, **options)


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_what_is_forgotten_returns_to_where_the_memory_rests(chunk_size: int) -> None:
    assert_same_rule(make(Case(time=7, rest=True)), chunk_size, two_layers, batched)
    assert_same_rule(make(Case(time=7, rest=True)), chunk_size, two_layers, batched, decay_first=True)


def test_any_callable_is_a_memory() -> None:
    """A gated layer, whose weights are not applied one after another and have three dimensions too many for an MLP."""

    def gated(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        gate, value = weights
        return torch.tanh(x @ gate.mT) * (x @ value.mT)

    def gated_vector(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        gate, value = weights
        return torch.tanh(gate @ x) * (value @ x)

    call = make(Case(time=6, depth=1))
    call = replace(call, weights=(call.weights[0], call.weights[0] + 1), momentum=call.momentum * 2)
    assert_same_rule(call, 1, gated_vector, gated)


def test_one_token_is_one_step_of_gradient_descent() -> None:
    call = make(Case(depth=1, time=1, momentum=False, forgetting=False))
    y, state = call(neural_memory_recurrent, 1)
    k, v, w = call.k.mT, call.v.mT, call.weights[0]
    expected = w - 2 * call.theta.unsqueeze(-1) * (w @ k - v) @ k.mT
    torch.testing.assert_close(state.weights[0], expected)
    torch.testing.assert_close(y, call.q @ expected.mT)


def test_full_forgetting_leaves_the_last_step_alone() -> None:
    call = make(Case(depth=1))
    assert call.alpha is not None and call.eta is not None
    call.alpha[:, :, -1] = 1
    _, state = call(neural_memory_recurrent, 1)
    torch.testing.assert_close(state.weights[0], state.momentum[0])


def test_without_momentum_the_states_momentum_passes_through() -> None:
    call = make(Case(momentum=False, max_norm=0.01))
    assert any(float(s.norm(dim=-1).max()) > 0.01 for s in call.momentum)
    _, state = call(neural_memory_recurrent, 4)
    assert all(torch.equal(a, b) for a, b in zip(state.momentum, call.momentum, strict=True))


@pytest.mark.parametrize(
    "case", [Case(), Case(depth=1), Case(bounded=True), Case(max_norm=0.5, surprise=True)], ids=str
)
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_masked_token_is_not_there(chunk_size: int, case: Case) -> None:
    call = make(replace(case, masked=True))
    assert call.mask is not None
    found = values(call(neural_memory_recurrent, chunk_size))
    for row in range(BATCH):
        present = call.mask[row]
        kept = replace(call.row(row), mask=None).tokens(lambda x, p=present: x[:, :, p])
        expected = values(kept(neural_memory_recurrent, chunk_size))
        own = {name: x[row : row + 1] for name, x in found.items()}
        skipped = own["y"][:, :, ~present]
        assert torch.equal(skipped, torch.zeros_like(skipped))
        own |= {n: own[n][:, :, present] for n in own if n == "y" or n.startswith("surprise")}
        assert_same(own, expected, 1e-12)


@pytest.mark.parametrize("gates", ["theta", "alpha", "eta", "all"])
def test_a_gate_per_channel_makes_every_output_row_a_memory_of_its_own(gates: str) -> None:
    call, per_head = make(Case(depth=1, channels=True)), make(Case(depth=1))
    kept = {g: getattr(per_head, g) for g in ("theta", "alpha", "eta") if gates not in (g, "all")}
    call = replace(call, **kept)
    y, state = call(neural_memory_recurrent, 4)
    for channel in range(call.v.shape[-1]):
        at = slice(channel, channel + 1)

        def pick(name: str, x: Tensor, at: slice = at) -> Tensor:
            if name == "v":
                return x[..., at]
            if "." in name:
                return x[:, :, at]
            return x[..., at].squeeze(-1) if name in ("theta", "alpha", "eta") and x.ndim == 4 else x

        alone, alone_state = call.map(pick)(neural_memory_recurrent, 4)
        torch.testing.assert_close(y[..., at], alone)
        torch.testing.assert_close(state.weights[0][:, :, at], alone_state.weights[0])
        torch.testing.assert_close(state.momentum[0][:, :, at], alone_state.momentum[0])


def test_a_bounded_step_is_divided_by_the_tangent_kernel() -> None:
    call = make(Case(time=1))
    _, _, surprise = call(neural_memory_recurrent, 1, return_surprise=True)
    kappa = surprise.gradient_norm.square() / (4 * surprise.loss)
    divided = replace(call, theta=call.theta / (1 + kappa))
    actual = values(call(neural_memory_recurrent, 1, bounded=True))
    assert_same(actual, values(divided(neural_memory_recurrent, 1)))


@pytest.mark.parametrize("chunk_size", [3, 8])
def test_a_bounded_step_is_divided_by_the_square_of_how_often_its_key_came(chunk_size: int) -> None:
    call = make(Case(depth=1, time=8))
    call = call.map(lambda name, x: x[:, :, :1].expand_as(x) if name == "k" else x)
    crowd = 1 + torch.arange(8, dtype=torch.float64) % chunk_size
    divided = replace(call, theta=call.theta / (2 * crowd.square()))  # a unit key: kappa is 1
    actual = values(call(neural_memory_recurrent, chunk_size, bounded=True))
    assert_same(actual, values(divided(neural_memory_recurrent, chunk_size)))


def test_no_row_stays_longer_than_the_guard_allows() -> None:
    call = make(Case(time=12))
    _, free = call(neural_memory_recurrent, 4)
    _, guarded = call(neural_memory_recurrent, 4, max_norm=0.3)
    assert max(float(w.norm(dim=-1).max()) for w in free.weights) > 0.3
    assert all((w.norm(dim=-1) <= 0.3 + 1e-12).all() for w in guarded.weights + guarded.momentum)


def test_a_guard_that_is_never_met_changes_nothing() -> None:
    call = make(Case(time=12))
    assert_same(values(call(neural_memory_recurrent, 4, max_norm=1e6)), values(call(neural_memory_recurrent, 4)), 0)


def test_the_guard_waits_for_its_turn() -> None:
    call = make(Case(time=11))
    free, guarded = (call(neural_memory_recurrent, 1, max_norm=m, guard_every=6)[0] for m in (None, 0.3))
    assert torch.equal(free[:, :, :6], guarded[:, :, :6])
    assert not torch.equal(free[:, :, 6], guarded[:, :, 6])


def test_clipping_scales_long_rows_and_leaves_short_ones() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert torch.equal(clip_rows(weight, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_a_first_order_gradient_differs_while_its_value_does_not() -> None:
    call = make(Case())
    second, first = (values_and_gradients(neural_memory_recurrent, call, 1, first_order=f) for f in (False, True))
    assert torch.equal(first["y"], second["y"])
    assert not torch.allclose(first["gradient of k"], second["gradient of k"], rtol=1e-3)


def test_the_callers_tensors_and_state_are_not_changed() -> None:
    call = make(Case(masked=True, bounded=True, max_norm=0.3))
    before = {name: x.clone() for name, x in call.inputs().items()}
    state = MemoryState.create(call.weights, call.momentum)
    call(neural_memory_recurrent, 4, state)
    assert all(torch.equal(x, before[name]) for name, x in call.inputs().items())
    assert torch.equal(state.positions, torch.zeros(BATCH, dtype=torch.int64))
