"""torch.compile and torch.export: the models are one graph each, with the results of eager PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from timeit import timeit
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.models.cases import CHUNKED, VARIANTS, model, tokens
from titans import TitansForCausalLM

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TITANS_NATIVE") == "0",
        reason="in PyTorch, deep memory asks its values when it has swept enough",
    ),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
        reason="torch 2.6 cannot trace dataclasses, in which the rule of a memory is written; 2.13 can",
    ),
]
Run = Callable[[Tensor], Tensor]
MODES: dict[str, dict[str, Any]] = {"exact": {"memory_mode": "exact"}, "chunked": CHUNKED}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before counts, and nothing stays."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def reader(made: TitansForCausalLM) -> Run:
    def read(ids: Tensor) -> Tensor:
        logits: Tensor = made(ids, use_cache=False).logits
        return logits

    return read


def with_gradients(run: Run, made: TitansForCausalLM, ids: Tensor) -> list[Tensor]:
    logits = run(ids)
    return [logits, *torch.autograd.grad(logits.square().mean(), list(made.parameters()))]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).norm() <= tolerance * other.norm()


def best_seconds(runs: Sequence[Callable[[], object]], rounds: int = 15) -> list[float]:
    """The shortest of several calls of each, in turns."""
    seconds = [[timeit(run, number=1) for run in runs] for _ in range(rounds)]
    return [min(column) for column in zip(*seconds, strict=True)]


def test_a_model_is_one_graph() -> None:
    made, ids = model("lmm", num_hidden_layers=1, memory_mode="exact"), tokens(8)
    compiled = torch.compile(reader(made), backend="eager", fullgraph=True)
    assert_same(with_gradients(compiled, made, ids), with_gradients(reader(made), made, ids), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", VARIANTS)
def test_every_model_is_one_graph_with_the_same_gradients(kind: str, mode: str) -> None:
    made, ids = model(kind, **MODES[mode]), tokens(16)
    compiled = torch.compile(reader(made), backend="aot_eager", fullgraph=True)
    assert_same(with_gradients(compiled, made, ids), with_gradients(reader(made), made, ids), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", VARIANTS)
def test_an_exported_model_gives_the_same_results(kind: str, mode: str) -> None:
    made, ids = model(kind, num_hidden_layers=1, **MODES[mode]), tokens(16)
    exported = torch.export.export(made, (ids,), {"use_cache": False})
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, GraphModule)]
    names = {str(node.target) for graph in graphs for node in graph.nodes}
    assert {f"titans.{name}.default" for name in ("rms_norm", "project", mode, "gate")} <= names
    assert_same([exported.module()(ids, use_cache=False).logits], [reader(made)(ids)], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_compiled_model_is_not_slower(kind: str) -> None:
    made, ids = model(kind, torch.float32, num_hidden_layers=1), tokens(16)
    compiled, eager = torch.compile(reader(made), fullgraph=True), reader(made)
    assert_same(with_gradients(compiled, made, ids), with_gradients(eager, made, ids), 1e-4)
    fast, slow = best_seconds([lambda: with_gradients(compiled, made, ids), lambda: with_gradients(eager, made, ids)])
    assert fast <= 1.1 * slow


@pytest.mark.slow
def test_a_compiled_model_goes_on_from_its_cache() -> None:
    made, ids = model("mac", num_hidden_layers=1), tokens(16)
    compiled = torch.compile(made, backend="eager")
    with torch.no_grad():
        cache = compiled(ids[:, :8]).past_key_values
        rest = compiled(ids[:, 8:], past_key_values=cache).logits
        assert_same([rest], [made(ids).logits[:, 8:]], 1e-9)
