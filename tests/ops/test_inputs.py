"""What does not fit is refused in one sentence that names it, and leaves the caller's state as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import OPS, Call, Case, make, values
from titans.ops import MemoryMLP, MemoryState, neural_memory_chunked, neural_memory_exact

every_op = pytest.mark.parametrize("name", OPS)
TIME = 5


def put(field: str, index: tuple[int, ...], value: float) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        x = getattr(call, field).clone()
        x[index] = value
        return replace(call, **{field: x})

    return change


def on(field: str, function: Callable[[Tensor], Tensor]) -> Callable[[Call], Call]:
    return lambda call: replace(call, **{field: function(getattr(call, field))})


def option(**options: Any) -> Callable[[Call], Call]:
    return lambda call: replace(call, options={**call.options, **options})


def mask(value: Tensor) -> Callable[[Call], Call]:
    return lambda call: replace(call, mask=value)


REFUSED: dict[str, tuple[Callable[[Call], Call], str]] = {
    "q of three dimensions": (
        on("q", lambda x: x[0]),
        "q has shape (2, 5, 5); expected (batch, heads, time, width)",
    ),
    "v of five dimensions": (
        on("v", lambda x: x[None]),
        "v has shape (1, 2, 2, 5, 4); expected (batch, heads, time, width)",
    ),
    "k of another batch": (
        on("k", lambda x: x[:1]),
        "k has (batch, heads, time) (1, 2, 5), q has (2, 2, 5); expected the same",
    ),
    "v of other heads": (
        on("v", lambda x: x[:, :1]),
        "v has (batch, heads, time) (2, 1, 5), q has (2, 2, 5); expected the same",
    ),
    "k of another length": (
        on("k", lambda x: x[:, :, 1:]),
        "k has (batch, heads, time) (2, 2, 4), q has (2, 2, 5); expected the same",
    ),
    "k of another width": (on("k", lambda x: x[..., 1:]), "k has width 4 and q has width 5; expected the same"),
    "whole numbers": (on("k", lambda x: x.long()), "k has dtype torch.int64; expected a floating dtype"),
    "a gate of whole numbers": (
        on("theta", lambda x: x.long()),
        "theta has dtype torch.int64; expected a floating dtype",
    ),
    "a gate of another length": (
        on("alpha", lambda x: x[:, :, 1:]),
        "alpha has shape (2, 2, 4); expected (batch, heads, time) = (2, 2, 5)",
    ),
    "a channel gate for deep memory": (
        on("eta", lambda x: x.unsqueeze(-1).expand(-1, -1, -1, 4)),
        "eta has a value per output channel, but the memory has 2 layers; channel gates are for linear memory",
    ),
    "theta above 1": (put("theta", (0, 0, 0), 1.5), "to 1.5; expected them in [0, 1]"),
    "alpha below 0": (put("alpha", (0, 0, 0), -0.5), "alpha has values from -0.5 to"),
    "eta above 1": (put("eta", (0, 0, 0), 2), "to 2; expected them in [0, 1]"),
    "NaN": (
        put("k", (1, 0, 3, 2), float("nan")),
        "k has 1 values that are NaN or infinite, the first at [1, 0, 3, 2]",
    ),
    "infinity": (
        put("v", (0, 1, 2, 0), float("inf")),
        "v has 1 values that are NaN or infinite, the first at [0, 1, 2, 0]",
    ),
    "NaN in a gate": (
        put("eta", (0, 1, 2), float("nan")),
        "eta has 1 values that are NaN or infinite, the first at [0, 1, 2]",
    ),
    "a mask of another shape": (
        mask(torch.ones(2, 4, dtype=torch.bool)),
        "mask has shape (2, 4); expected (batch, time) = (2, 5)",
    ),
    "a mask of numbers": (
        mask(torch.ones(2, TIME)),
        "mask has dtype torch.float32; expected bool, True where a token counts",
    ),
    "an unknown loss": (option(loss="cubic"), "loss is 'cubic'; expected one of squared, dot, huber"),
    "a guard of zero": (option(max_norm=0.0), "max_norm is 0.0; expected a positive number or None"),
    "weights of another width": (
        on("weights", lambda w: (w[0][..., 1:], w[1])),
        "state.weights[0] takes 4 inputs; expected 5",
    ),
    "layers that do not fit": (
        on("weights", lambda w: (w[0][:, :, 1:], w[1])),
        "state.weights[1] takes 5 inputs; expected 4",
    ),
    "weights without their bias": (
        option(network=MemoryMLP(bias=True)),
        "state.weights[0] takes 5 inputs; expected 6 (with bias)",
    ),
    "another output width": (
        on("weights", lambda w: (w[0], w[1][:, :, 1:])),
        "the memory's output has width 3 and v has width 4",
    ),
    "a residual between unequal widths": (
        option(network=MemoryMLP(residual=True)),
        "a residual memory needs equal widths in and out; q has 5, v has 4",
    ),
    "a rest of another shape": (
        option(rest=[torch.zeros(2, 2, 5, 5)]),
        "rest has shapes [(2, 2, 5, 5)]; expected",
    ),
    "a state of another batch": (
        on("weights", lambda w: tuple(x[:1] for x in w)),
        "state has (batch, heads) (1, 2), q has (2, 2); expected the same",
    ),
}


@every_op
@pytest.mark.parametrize("wrong", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str, wrong: str) -> None:
    change, message = REFUSED[wrong]
    call = change(make(Case(time=TIME)))
    momentum = [torch.zeros_like(w) for w in call.weights]
    state = MemoryState.create(call.weights, momentum)
    before = [x.clone() for x in (*state.weights, state.positions)]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call(OPS[name], 4, state)
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip((*state.weights, state.positions), before, strict=True))


@every_op
@pytest.mark.parametrize("chunk_size", [0, -1, 2.5])
def test_a_chunk_has_at_least_one_token(name: str, chunk_size: Any) -> None:
    for max_norm in (None, 1.0):
        with pytest.raises(ValueError, match=f"chunk_size is {chunk_size}; expected a whole number of at least 1"):
            make(Case(time=TIME, max_norm=max_norm))(OPS[name], chunk_size)


@every_op
def test_nan_may_be_let_through_on_purpose(name: str) -> None:
    call = put("v", (0, 0, 3, 0), float("nan"))(make(Case(depth=1, time=TIME)))
    y, _ = call(OPS[name], 1, check_values=False)
    assert y[0, 0, 3:].isnan().any()
    assert y[1].isfinite().all(), "another sequence is not touched"


@every_op
def test_an_unknown_activation_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="activation is 'mish'; expected one of silu, gelu, gelu_tanh, relu"):
        replace(make(Case()), network={"activation": "mish"})(OPS[name], 4)


@every_op
@pytest.mark.parametrize("surprise", [False, True])
def test_an_empty_sequence_gives_an_empty_output_and_the_same_state(name: str, surprise: bool) -> None:
    call = make(Case(time=6, surprise=surprise))
    state = call(OPS[name], 4)[1]
    y, after, *rest = call.between(0, 0)(OPS[name], 4, state)
    assert y.shape == (2, 2, 0, 4) and y.dtype == torch.float64
    assert [tuple(x.shape) for s in rest for x in s] == [(2, 2, 0)] * 2 * surprise
    names = ("weights", "momentum", "anchor")
    pairs = [(a, b) for n in names for a, b in zip(getattr(after, n), getattr(state, n), strict=True)]
    assert all(torch.equal(a, b) for a, b in [*pairs, (after.positions, state.positions)])


@every_op
def test_an_empty_batch_gives_an_empty_output(name: str) -> None:
    call = make(Case()).map(lambda _, x: x[:0])
    y, state = call(OPS[name], 4)
    assert y.shape == (0, 2, 21, 4) and state.batch_size == 0


@pytest.mark.parametrize("masked", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("name", ["chunked", "recurrent"])
def test_a_state_inside_a_chunk_is_refused_by_another_rule(name: str, masked: bool) -> None:
    call = make(Case(time=6, masked=masked))
    state = call(OPS[name], 8)[1]
    for size in (4, 7, 16):
        with pytest.raises(
            ValueError, match=f"inside a chunk of a memory with chunk_size=8; expected chunk_size={size}"
        ):
            call(OPS[name], size, state)
    with pytest.raises(ValueError, match="a memory with chunk_size=8; expected chunk_size=8, bounded"):
        call(OPS[name], 8, state, bounded=True)
    with pytest.raises(ValueError, match="a memory with chunk_size=8; expected chunk_size=1"):
        call(neural_memory_exact, 8, state)
    call(OPS[name], 8, state, loss="dot", first_order=True)


def test_a_state_at_the_end_of_a_chunk_goes_anywhere() -> None:
    call = make(Case(time=8))
    for name in ("chunked", "recurrent"):
        state = call(OPS[name], 8)[1]
        for op in ("chunked", "recurrent", "exact"):
            call(OPS[op], 3, state)


def test_a_state_of_nobody_knows_whom_must_fit_into_the_chunk() -> None:
    call = make(Case(time=6))
    state = replace(call(neural_memory_chunked, 8)[1], rule=None)
    message = (
        "state stands at token 6 of its open chunk; expected less than 4: it comes from a memory with a larger chunk"
    )
    with pytest.raises(ValueError, match=message):
        call(neural_memory_chunked, 4, state)
    call(neural_memory_chunked, 8, state)


def test_a_state_from_a_longer_guard_is_refused() -> None:
    call = make(Case(time=6, max_norm=1.0))
    state = call(neural_memory_exact, 4, guard_every=8)[1]
    with pytest.raises(ValueError, match="with chunk_size=1, guard_every=8; expected chunk_size=1, guard_every=4"):
        call(neural_memory_exact, 4, state, guard_every=4)
    call(OPS["recurrent"], 1, state, guard_every=8)


@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_state_in_half_precision_is_refused(name: str, dtype: torch.dtype) -> None:
    call = make(Case(time=TIME))
    with pytest.raises(ValueError, match=f"state has dtype {dtype}; expected float32 or float64"):
        call(OPS[name], 4, call.start().to(dtype=dtype), rest=None)


@pytest.mark.parametrize("guard_every", [0, -2])
@pytest.mark.parametrize("name", ["exact", "exact by sweeps", "recurrent"])
def test_a_guard_comes_every_so_many_tokens(name: str, guard_every: int) -> None:
    with pytest.raises(ValueError, match=f"guard_every is {guard_every}; expected"):
        make(Case(max_norm=1.0))(OPS[name], 1, guard_every=guard_every)


def test_a_guard_must_fall_on_the_chunk_grid() -> None:
    with pytest.raises(ValueError, match="guard_every is 6; expected a multiple of chunk_size, 4"):
        make(Case(max_norm=1.0))(OPS["recurrent"], 4, guard_every=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sweeps": -1}, "sweeps is -1; expected a whole number of at least 0"),
        ({"tolerance": 0.0}, "tolerance is 0.0; expected a positive number"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0; expected a whole number of at least 1"),
    ],
    ids=str,
)
def test_settings_of_the_exact_rule_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Case())(neural_memory_exact, 4, **options)


@pytest.mark.parametrize("op", [neural_memory_chunked, neural_memory_exact])
@pytest.mark.parametrize("network", [{"residual": True}, {"norm": True}], ids=str)
def test_channel_gates_need_a_plain_network(op: Callable[..., Any], network: dict[str, bool]) -> None:
    call = make(Case(depth=1, channels=True, residual=True))
    call = replace(call, network={"residual": network.get("residual", False)})
    if "norm" in network:
        call = replace(call, norm=(torch.ones(2, 5).double(), torch.zeros(2, 5).double()))
    with pytest.raises(ValueError, match="gates per output channel need a memory without residual and norm"):
        call(op, 4)


@every_op
def test_a_call_changes_none_of_its_arguments(name: str) -> None:
    call = make(Case(masked=True, bounded=True, max_norm=0.3))
    state = call.between(0, 3)(OPS[name], 4)[1]
    before = {n: x.clone() for n, x in {**call.inputs(), **values((call.q, state))}.items()}
    call.between(3, 21)(OPS[name], 4, state)
    assert all(torch.equal(x, before[n]) for n, x in {**call.inputs(), **values((call.q, state))}.items())
