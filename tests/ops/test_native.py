"""The compiled loops where PyTorch code would have shrugged: odd states, odd settings, odd tensors, odd machines."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from titans import NeuralMemory
from titans.layers.norm import RMSNorm
from titans.ops.native import library
from titans.ops.project import gate_output, project_heads

needs_loops = pytest.mark.skipif(os.environ.get("TITANS_NATIVE") == "0", reason="the compiled loops are switched off")


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


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 4])
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


@needs_loops
def test_only_ordinary_tensors_reach_the_compiled_loops() -> None:
    assert library.can_run_native(torch.zeros(3), None, torch.zeros(3))
    assert not torch.vmap(lambda x: x if library.can_run_native(x) else x + 1)(torch.zeros(3)).eq(0).any()
    assert not library.can_run_native(torch.zeros(3, device="meta"))
    assert not library.can_run_native(torch.zeros(3), torch.zeros(3, dtype=torch.float64))


class Operators(TorchDispatchMode):
    """Collects the operators of this package that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[OpOverload, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "titans":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


def operators_of(layer: NeuralMemory, x: Tensor) -> dict[OpOverload, tuple[Any, ...]]:
    norm = RMSNorm(16)
    with Operators() as seen:
        found = torch.autograd.grad(layer(norm(x))[0].square().sum(), [norm.weight, *layer.parameters()])
    expected = torch.autograd.grad(layer(norm(x))[0].square().sum(), [norm.weight, *layer.parameters()])
    assert all(map(torch.equal, found, expected))
    return seen.calls


@needs_loops
@pytest.mark.parametrize("mode", ["chunked", "exact"])
def test_a_dispatch_mode_sees_every_loop_and_gets_the_same_results(mode: str) -> None:
    calls = operators_of(memory(mode), torch.randn(2, 8, 16))
    names = {operator.__name__.removesuffix(".default") for operator in calls}
    forward = {"rms_norm", "project", mode, "gate"}
    assert names == forward | {f"{name}_backward" for name in forward}
    for operator, args in calls.items():
        detached = tree_map_only(Tensor, Tensor.detach, args)
        opcheck(operator, detached, test_utils=("test_schema", "test_faketensor"))


@needs_loops
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"momentum": False}, {"first_order": True, "conv_kernel": 0}], ids=str)
@pytest.mark.parametrize("mode", ["chunked", "exact"])
def test_the_loops_are_proper_operators(mode: str, options: dict[str, Any]) -> None:
    for operator, args in operators_of(memory(mode, **options), torch.randn(2, 8, 16)).items():
        opcheck(operator, tree_map_only(Tensor, Tensor.detach, args))
        if not operator.__name__.endswith("_backward.default"):
            leaves = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), args)
            opcheck(operator, leaves, test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic"))


@needs_loops
def test_tensors_without_data_go_through_the_operators() -> None:
    with FakeTensorMode(), Operators() as seen:
        y = gate_output(torch.randn(2, 3, 8, 4), torch.ones(4), torch.randn(2, 8, 12), 1e-6)
        assert y.shape == RMSNorm(12)(y).shape == (2, 8, 12)
    assert set(seen.calls) == {torch.ops.titans.gate.default, torch.ops.titans.rms_norm.default}


@dataclass(frozen=True)
class Compiler:
    """A script that passes for a compiler: what it "compiles" is a copy of the library that a real one made."""

    cache: Path
    calls: Path
    script: Path

    def write(self, version: str = "1", refuses: str = "nothing") -> None:
        finished = library.library(torch.float32)
        assert finished is not None, "these tests need a C compiler"
        self.script.write_text(f"""#!/bin/sh
[ "$1" = --version ] && echo {version} && exit
case "$*" in *{refuses}*) exit 1;; esac
echo "$@" >> {self.calls}
while [ "$1" != -o ]; do shift; done
cp {finished._name} "$2"
""")
        self.script.chmod(0o755)

    def load(self) -> ctypes.CDLL | None:
        """What a new process would."""
        return library.library.__wrapped__(torch.float32)

    def built(self) -> list[Path]:
        return sorted((self.cache / "titan-memory").glob("*"))

    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    if os.environ.get("TITANS_NATIVE") == "0":
        pytest.skip("the compiled loops are switched off")
    made = Compiler(tmp_path / "cache", tmp_path / "calls", tmp_path / "compiler")
    made.write()
    monkeypatch.setenv("CC", str(made.script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library._find_compiler.cache_clear()
    library._temporary_folder.cache_clear()
    yield made
    library._find_compiler.cache_clear()
    library._temporary_folder.cache_clear()


def test_compiled_code_is_kept_where_only_its_user_can_write(compiler: Compiler) -> None:
    assert compiler.load() is not None and compiler.load() is not None
    (built,) = compiler.built()
    assert compiler.count() == 1
    assert stat.S_IMODE(built.stat().st_mode) == stat.S_IMODE(built.parent.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.load()
    monkeypatch.setattr(os, "geteuid", lambda: compiler.cache.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        library._cache_folder()


def test_a_folder_that_others_can_write_is_not_used(compiler: Compiler, tmp_path: Path) -> None:
    compiler.load()
    (built,) = compiler.built()
    built.parent.chmod(0o777)
    with pytest.warns(UserWarning, match=r"titan-memory can be written by others\); it is compiled again in every"):
        loaded = compiler.load()
    assert loaded is not None and compiler.count() == 2
    folder = Path(loaded._name).parent
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(("text", "mode"), [("broken", 0o700), (None, 0o777)])
def test_a_file_that_is_broken_or_open_to_others_is_compiled_again(
    text: str | None, mode: int, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler.load()
    (built,) = compiler.built()
    other = tmp_path / "other"  # a process never loads the same path twice
    shutil.copytree(compiler.cache, other)
    file = other / "titan-memory" / built.name
    if text is not None:
        file.write_text(text)
    file.chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    loaded = compiler.load()
    assert loaded is not None and Path(loaded._name) == file
    assert compiler.count() == 2 and stat.S_IMODE(file.stat().st_mode) == 0o700


def test_a_new_version_of_the_compiler_compiles_again(compiler: Compiler) -> None:
    compiler.load()
    compiler.write(version="2")
    compiler.load()
    assert len(compiler.built()) == compiler.count() == 2


@pytest.mark.parametrize(
    ("unknown", "kept"), [("-march", "-fopenmp"), ("-fopenmp", "-march"), ("-[mf][ao][rp]", "-O3")]
)
def test_an_option_that_the_compiler_does_not_know_is_left_out(unknown: str, kept: str, compiler: Compiler) -> None:
    compiler.write(refuses=unknown)
    assert compiler.load() is not None
    assert kept in compiler.calls.read_text()


@pytest.mark.parametrize("home", ["a file", "none"])
def test_without_a_home_to_write_to_each_process_has_a_folder_of_its_own(
    home: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if home == "none":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    else:
        compiler.cache.write_text("")
    with pytest.warns(UserWarning, match="compiled code cannot be kept"):
        loaded = compiler.load()
    assert loaded is not None
    folder = Path(loaded._name).parent
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.slow
def test_the_folder_of_a_process_is_removed_when_it_ends(compiler: Compiler, tmp_path: Path) -> None:
    code = "import torch; from titans.ops.native.library import library; print(library(torch.float32)._name)"
    environment = {**os.environ, "XDG_CACHE_HOME": os.devnull, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip()).parent
    assert folder.parent == tmp_path and not folder.exists()


def test_without_a_compiler_there_is_one_warning(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match="no C compiler was found") as said:
        assert library.library.__wrapped__(torch.float32) is library.library.__wrapped__(torch.float64) is None
    assert len(said) == 1


def test_a_compiler_that_fails_is_named_and_not_needed(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false --quietly")
    with pytest.warns(UserWarning, match="the compiled memory is not available"):
        assert compiler.load() is None
