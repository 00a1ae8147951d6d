"""What the memory ops accept: shapes, ranges and the sentences that say what was wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titans.ops.network import MemoryMLP
from titans.ops.optimisers import Descent
from titans.ops.rule import Rule, Tokens
from titans.ops.state import MemoryState


def check_inputs(rule: Rule, tokens: Tokens, state: MemoryState) -> None:
    """Raises a ``ValueError`` of one sentence for the first thing that does not fit."""
    q, k, v, theta, alpha, eta, mask = tokens
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, heads, time, width)")
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}; expected a floating dtype")
        if x.shape[:3] != q.shape[:3]:
            raise ValueError(
                f"{name} has (batch, heads, time) {tuple(x.shape[:3])}, q has {tuple(q.shape[:3])}; expected the same"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has width {k.shape[-1]} and q has width {q.shape[-1]}; expected the same")
    gates = {name: gate for name, gate in (("theta", theta), ("alpha", alpha), ("eta", eta)) if gate is not None}
    for name, gate in gates.items():
        _check_gate(name, gate, q, v, state)
    if isinstance(rule.optimiser, Descent) != (eta is None):
        given, expected = ("None", "a gate") if eta is None else ("given", "None")
        raise ValueError(f"eta is {given}; expected {expected} for {type(rule.optimiser).__name__}")
    if mask is not None:
        if mask.shape != (q.shape[0], q.shape[2]):
            raise ValueError(f"mask has shape {tuple(mask.shape)}; expected (batch, time) = {(q.shape[0], q.shape[2])}")
        if mask.dtype != torch.bool:
            raise ValueError(f"mask has dtype {mask.dtype}; expected bool, True where a token counts")
    _check_state(state, q, v, rule.network)
    plain = isinstance(rule.network, MemoryMLP) and not rule.network.residual and rule.network.norm is None
    if any(gate.ndim == 4 for gate in gates.values()) and not plain:
        raise ValueError("gates per output channel need a memory without residual and norm")
    rest = rule.retention.to
    if rest is not None and [tuple(r.shape) for r in rest] != [tuple(w.shape) for w in state.weights]:
        raise ValueError(
            f"rest has shapes {[tuple(r.shape) for r in rest]}; "
            f"expected those of the weights, {[tuple(w.shape) for w in state.weights]}"
        )
    _check_position(rule, state)


def check_values_of(tokens: Tokens) -> None:
    """Raises a ``ValueError`` for numbers that are not finite, and for gates outside [0, 1]; not while compiling."""
    if torch.compiler.is_compiling():
        return
    given = tokens._asdict()
    del given["mask"]
    for name, numbers in given.items():
        if numbers is not None and numbers.numel():
            check_finite(name, numbers)
    for name in ("theta", "alpha", "eta"):
        if given[name] is not None and given[name].numel():
            low, high = (float(x) for x in torch.aminmax(given[name].detach()))
            if low < 0 or high > 1:
                raise ValueError(f"{name} has values from {low:.4g} to {high:.4g}; expected them in [0, 1]")


def _check_position(rule: Rule, state: MemoryState) -> None:
    """A state inside a chunk must come from a rule with the same chunks."""
    position = state.position
    if isinstance(position, Tensor):  # sequences at places of their own: the host has to look
        position = int(position.max())
    if position and state.rule not in (None, rule.grid):
        raise ValueError(f"state stands inside a chunk of a memory with {state.rule}; expected {rule.grid}")
    if rule.period is not None and position >= rule.period:
        raise ValueError(
            f"state stands at token {position} of its open chunk; expected less than {rule.period}: "
            "it comes from a memory with a larger chunk"
        )


def check_finite(name: str, x: Tensor) -> None:
    """Raises a ``ValueError`` that says where the first NaN or infinity stands; not in a graph that is compiled."""
    if torch.compiler.is_compiling() or bool(
        torch.isfinite(x.detach().sum())
    ):  # one cheap pass; a sum that overflows is looked at more closely
        return
    bad = torch.nonzero(~torch.isfinite(x.detach()))
    if len(bad):
        where = ", ".join(str(i) for i in bad[0].tolist())
        raise ValueError(f"{name} has {len(bad)} values that are NaN or infinite, the first at [{where}]")


def _check_gate(name: str, gate: Tensor, q: Tensor, v: Tensor, state: MemoryState) -> None:
    if not gate.is_floating_point():
        raise ValueError(f"{name} has dtype {gate.dtype}; expected a floating dtype")
    if gate.shape == q.shape[:3]:
        return
    if gate.shape == (*q.shape[:3], v.shape[-1]):
        if len(state.weights) > 1:
            raise ValueError(
                f"{name} has a value per output channel, but the memory has {len(state.weights)} layers; "
                "channel gates are for linear memory"
            )
        return
    raise ValueError(f"{name} has shape {tuple(gate.shape)}; expected (batch, heads, time) = {tuple(q.shape[:3])}")


def _check_state(state: MemoryState, q: Tensor, v: Tensor, network: object) -> None:
    first, last = state.weights[0], state.weights[-1]
    if first.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"state has (batch, heads) {tuple(first.shape[:2])}, q has {tuple(q.shape[:2])}; expected the same"
        )
    for name, group in (("momentum", state.momentum), ("anchor", state.anchor)):
        found, expected = ([(tuple(w.shape), w.dtype, w.device) for w in x] for x in (group, state.weights))
        if found != expected:
            raise ValueError(
                f"state.{name} is {_described(group)}; expected shapes, dtype and device of the weights, "
                f"{_described(state.weights)}"
            )
    if first.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"state has dtype {first.dtype}; expected float32 or float64")
    if len({(w.dtype, w.device) for w in state.weights}) > 1:
        raise ValueError(f"state.weights is {_described(state.weights)}; expected one dtype and one device")
    square = (*first.shape[:2], q.shape[-1], q.shape[-1])
    if state.gram is not None and (state.gram.shape != square or state.gram.dtype != first.dtype):
        raise ValueError(f"state.gram is {_described([state.gram])}; expected {square} {first.dtype}")
    if not isinstance(network, MemoryMLP):
        return
    bias = int(network.bias)
    inside = q.shape[-1]
    for index, weight in enumerate(state.weights):
        if weight.shape[-1] != inside + bias:
            raise ValueError(
                f"state.weights[{index}] takes {weight.shape[-1]} inputs; expected {inside + bias}"
                + (" (with bias)" if bias else "")
            )
        inside = weight.shape[-2]
    if last.shape[-2] != v.shape[-1]:
        raise ValueError(f"the memory's output has width {last.shape[-2]} and v has width {v.shape[-1]}")
    if network.residual and q.shape[-1] != v.shape[-1]:
        raise ValueError(f"a residual memory needs equal widths in and out; q has {q.shape[-1]}, v has {v.shape[-1]}")


def _described(group: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(w.shape)} {str(w.dtype).removeprefix('torch.')} on {w.device}" for w in group)
