"""Which engine runs a rule: what each takes, who is chosen, who can be asked for, and what is said about it."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.cases import Case, assert_same, make, values
from titans import NeuralMemory
from titans.ops import (
    Forgetting,
    Huber,
    MemoryMLP,
    MemoryState,
    NewtonSchulz,
    Options,
    Rule,
    Tokens,
    engines,
    explain,
    neural_memory_chunked,
    neural_memory_exact,
    neural_memory_recurrent,
    run_memory,
)
from titans.ops.native.library import library

compiled = pytest.mark.skipif(library(torch.float64) is None, reason="the compiled loops are switched off")


def state(depth: int = 2, dtype: torch.dtype = torch.float64, device: str = "cpu") -> MemoryState:
    return MemoryState.create([torch.zeros(1, 1, 3, 3, dtype=dtype, device=device)] * depth)


@compiled
@pytest.mark.parametrize(
    ("rule", "depth", "expected"),
    [
        (Rule(), 2, "native (the fastest)"),
        (Rule(chunk_size=8), 1, "native (the fastest)"),
        (Rule(), 1, "native (the fastest)"),
        (Rule(loss=Huber()), 2, "dual (not native: loss is Huber, expected Squared or Dot)"),
        (
            Rule(MemoryMLP(norm=(torch.ones(1, 3), torch.zeros(1, 3))), chunk_size=8),
            2,
            "dual (not native: the memory network has a LayerNorm)",
        ),
        (
            Rule(optimiser=NewtonSchulz()),
            2,
            "definition (not native: optimiser is NewtonSchulz, expected Momentum or Descent; "
            "not dual: optimiser is NewtonSchulz, expected Momentum or Descent)",
        ),
    ],
    ids=["deep", "chunked", "linear", "huber", "norm", "newton-schulz"],
)
def test_it_says_which_engine_runs_and_why(rule: Rule, depth: int, expected: str) -> None:
    assert explain(rule, state(depth)) == expected


def test_elsewhere_and_in_other_dtypes_pytorch_runs() -> None:
    assert explain(Rule(), state(device="meta")).startswith(
        "dual (not native: no compiled loop for float64 tensors on meta"
    )
    assert explain(Rule(), state(dtype=torch.bfloat16)).startswith("dual (not native: no compiled loop for bfloat16")


@pytest.mark.parametrize("engine", ["native", "dual", "definition"])
@pytest.mark.parametrize("op", [neural_memory_chunked, neural_memory_exact], ids=["chunked", "exact"])
def test_every_engine_that_takes_a_rule_gives_the_same(op: Any, engine: str) -> None:
    if engine == "native" and library(torch.float64) is None:
        pytest.skip("the compiled loops are switched off")
    call = make(Case(bounded=True, max_norm=0.5, masked=True, rest=True, surprise=True))
    expected = call(neural_memory_recurrent, 8 if op is neural_memory_chunked else 1, **_guard(op, 64))
    assert_same(values(call(op, 8, engine=engine)), values(expected))


def _guard(op: Any, every: int) -> dict[str, int]:
    return {"guard_every": every} if op is neural_memory_exact else {}


def test_an_engine_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="engine is 'cuda'; expected one of native, dual, definition"):
        make(Case())(neural_memory_exact, 8, engine="cuda")
    with pytest.raises(ValueError, match="engine is 'cuda'; expected one of native, dual, definition"):
        NeuralMemory(8, engine="cuda")
    monkeypatch.setenv("TITANS_ENGINE", "cuda")
    with pytest.raises(ValueError, match="TITANS_ENGINE is 'cuda'; expected one of native, dual, definition"):
        make(Case())(neural_memory_exact, 8)


REFUSED: dict[str, tuple[str, Rule, Options, str]] = {
    "a network": ("dual", Rule(lambda w, x: x), Options(), "network is a function, expected a MemoryMLP"),
    "an optimiser": (
        "native",
        Rule(optimiser=NewtonSchulz()),
        Options(),
        "optimiser is NewtonSchulz, expected Momentum",
    ),
    "forgetting first": (
        "dual",
        Rule(retention=Forgetting(first=True), chunk_size=4),
        Options(),
        "retention forgets first",
    ),
    "a guard": ("dual", Rule(chunk_size=4, guard_every=8), Options(), "guard_every is 8, expected chunk_size, 4"),
    "sweeps": ("definition", Rule(), Options(sweeps=3), "it has no sweeps"),
}


@pytest.mark.parametrize("part", REFUSED)
def test_an_engine_that_declines_says_which_part(part: str) -> None:
    engine, rule, options, message = REFUSED[part]
    call = make(Case())
    tokens = Tokens(call.q, call.k, call.v, call.theta, call.alpha, call.eta)
    before = [w.clone() for w in call.weights]
    with pytest.raises(ValueError, match=f"engine is '{engine}', which does not take this memory: {message}") as error:
        run_memory(rule, tokens, call.start(), engine, options)
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, call.weights, strict=True))


def test_what_the_fast_engines_decline_the_definition_runs_and_says_so_once() -> None:
    call = make(Case(depth=1))
    tokens = Tokens(call.q, call.k, call.v, call.theta, call.alpha, call.eta)
    rule = Rule(lambda weights, x: x @ weights[0].mT)
    engines._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="the memory runs by its definition, token by token, which is slow"):
        found = run_memory(rule, tokens, call.start())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_memory(rule, tokens, call.start())
    assert_same(values(found), values(call(neural_memory_recurrent, 1)))


def test_the_environment_is_a_wish_not_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANS_ENGINE", "dual")
    assert explain(Rule(), state()) == "dual (as asked)"
    monkeypatch.setenv("TITANS_ENGINE", "native")
    assert explain(Rule(loss=Huber()), state()).startswith("dual (not native: ")
    monkeypatch.setenv("TITANS_ENGINE", "definition")
    assert explain(Rule(), state()) == "definition (as asked)"
    assert explain(Rule(), state(), "dual") == "dual (as asked)", "an argument comes first"


def test_a_memory_says_what_runs_it() -> None:
    assert "engine=dual (as asked)" in repr(NeuralMemory(8, 2, engine="dual"))
    assert "engine=definition (as asked)" in repr(NeuralMemory(8, 2, mode="recurrent"))
    assert "not native: sweeps are asked for" in repr(NeuralMemory(8, 2, sweeps=2))


def test_sweeps_on_another_device_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "run_flat", lambda *args: (None, None, None))
    engines._warn_once.cache_clear()
    call = make(Case())
    far = call.start().to("meta")
    with pytest.warns(UserWarning, match="deep memory under the exact rule runs by sweeps on this device"):
        engines.ENGINES["dual"].run(Rule(), call, far, Options())  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule, where in ((Rule(), far), (Rule(chunk_size=8), far), (Rule(), call.start())):
            engines.ENGINES["dual"].run(rule, call, where, Options())  # type: ignore[arg-type]
    engines._warn_once.cache_clear()


RULE_AND_TOKENS = {"network", "loss", "rest", "decay_first", "optimiser", "bounded", "max_norm", "guard_every"} | {
    "first_order", "q", "k", "v", "theta", "alpha", "eta", "mask",
}  # fmt: skip


@pytest.mark.parametrize("function", [neural_memory_recurrent, neural_memory_chunked, neural_memory_exact, run_memory])
def test_no_function_takes_more_than_ten_things_besides_the_rule_and_the_tokens(function: Any) -> None:
    assert len(set(inspect.signature(function).parameters) - RULE_AND_TOKENS) <= 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0; expected a whole number of at least 1"),
        ({"max_norm": -1.0}, "max_norm is -1.0; expected a positive number or None"),
        ({"guard_every": 0}, "guard_every is 0; expected a whole number of at least 1"),
        ({"guard_every": 6, "chunk_size": 4}, "guard_every is 6; expected a multiple of chunk_size, 4"),
    ],
    ids=str,
)
def test_a_rule_is_checked_where_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(**fields)
    with pytest.raises(ValueError, match=message):
        replace(Rule(), **fields)
