"""The compiled loops where PyTorch code would have shrugged: odd states, odd settings, odd tensors, odd machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titans import NeuralMemory
from titans.layers.norm import RMSNorm
from titans.ops.native import library
from titans.ops.project import gate_output, project_heads


def memory(mode: str, **options: object) -> NeuralMemory:
    torch.manual_seed(0)
    return NeuralMemory(16, heads=2, depth=2, mode=mode, **{"chunk_size": 4} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["chunked", "exact"])
@pytest.mark.parametrize("part", ["momentum", "anchor"])
def test_a_state_whose_parts_do_not_fit_is_refused(mode: str, part: str) -> None:
    layer, x = memory(mode), torch.randn(2, 16, 16)
    state = layer.init_state(2)
    for spoil in (lambda w: w[:1], lambda w: w.double()):
        bad = replace(state, **{part: tuple(spoil(w) for w in getattr(state, part))})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"state.{part} is .*; expected shapes, dtype and device of the weights"):
            layer(x, bad)


@pytest.mark.parametrize("every", [1, 3, 10**6, 2**40])
def test_any_spacing_of_kept_states_gives_the_same_gradients(every: int) -> None:
    x = torch.randn(1, 40, 16)
    found = []
    for layer in (memory("chunked"), memory("chunked", checkpoint_every=every)):
        leaf = x.clone().requires_grad_()
        layer(leaf)[0].square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def gradients_of_memories() -> list[Tensor]:
    """Through every compiled loop of a memory, and PyTorch's own matrix products."""
    torch.manual_seed(0)
    x, found = torch.randn(3, 24, 16), list[Tensor]()
    for layer in (memory("chunked"), memory("exact")):
        found += torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    return found


def gradients_of_loops() -> list[Tensor]:
    """Of loops that sum over rows: each has one order of summation."""
    torch.manual_seed(0)
    norm, rows = RMSNorm(16), torch.randn(1000, 16, requires_grad=True)
    qkv, past, kernel = (torch.randn(*size, 48, requires_grad=True) for size in ((3, 24), (3, 3), (4,)))
    y, weight, gate = (torch.randn(size, requires_grad=True) for size in ((3, 2, 24, 8), (8,), (3, 24, 16)))
    heads = project_heads(qkv, past, kernel, 2, (1.0, 1.0, 1.0))
    gated = gate_output(y, weight, gate, 1e-6)
    result = norm(rows).pow(3).sum() + heads.pow(3).sum() + gated.pow(3).sum()
    return list(torch.autograd.grad(result, [rows, norm.weight, qkv, past, kernel, y, weight, gate]))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_do_not_depend_on_threads_bit_for_bit(count: int, threads: None) -> None:
    torch.set_num_threads(1)
    expected = gradients_of_loops()
    torch.set_num_threads(count)
    for _ in range(100):
        assert all(map(torch.equal, gradients_of_loops(), expected))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_of_memories_are_the_same_in_every_run(count: int, threads: None) -> None:
    torch.set_num_threads(count)
    expected = gradients_of_memories()
    for _ in range(100):
        assert all(map(torch.equal, gradients_of_memories(), expected))


@pytest.mark.parametrize("mode", ["chunked", "exact"])
def test_half_precision_parameters_work(mode: str) -> None:
    x = torch.randn(1, 9, 16)
    expected, state = memory(mode)(x)
    found, half = memory(mode).half()(x.half())
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    assert half.weights[0].dtype == state.weights[0].dtype == torch.float32


def test_tensors_without_data_never_reach_the_compiled_loops() -> None:
    with FakeTensorMode():
        assert not library.takes(torch.zeros(3))
    assert not torch.vmap(lambda x: x if library.takes(x) else x + 1)(torch.zeros(3)).eq(0).any()
    assert not library.takes(torch.zeros(3, device="meta"))
    assert not library.takes(torch.zeros(3), torch.zeros(3, dtype=torch.float64))


def test_without_a_home_the_cache_lies_among_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert library._cache_folder() == tmp_path / "titan-memory"


def test_a_compiler_that_fails_is_named_and_not_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false --quietly")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="the compiled memory is not available"):
        assert library.library.__wrapped__(torch.float32) is None
