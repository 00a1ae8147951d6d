"""Compiles and loads the C loops of this folder: used on a CPU when a compiler is at hand, never required.

They are compiled on first use (a few seconds), kept in the user's cache folder, and loaded through ctypes. Without a
compiler, or with ``TITANS_NATIVE=0``, everything runs in PyTorch.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from titans.ops.flat import FlatRule

ORDINARY = (Tensor, Parameter, FakeTensor, FunctionalTensor)
FOLDER = Path(__file__).parent
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-shared", "-fPIC")
OPTIONS = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())  # the first that the compiler takes
TYPES = {torch.float32: ("-DREAL=float", "-DSINGLE"), torch.float64: ("-DREAL=double",)}


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled loops for a dtype, or None if they cannot be had."""
    if os.environ.get("TITANS_NATIVE") == "0" or dtype not in TYPES or os.name != "posix":
        return None
    compiler = _find_compiler()
    if not compiler:
        return None
    command = [*compiler, *FLAGS, *TYPES[dtype]]
    texts = [path.read_text() for path in sorted(FOLDER.glob("*.[ch]"))]
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=20, check=False)
        key = "\0".join([*command, str(OPTIONS), *texts, version.stdout, _processor()])
        name = f"native-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        try:
            return _load(_cache_folder(), name, command)
        except OSError as error:
            reason = f"compiled code cannot be kept ({error}); it is compiled again in every process"
            warnings.warn(reason, stacklevel=2)
            return _load(_temporary_folder(), name, command)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(f"the compiled memory is not available ({error}); using PyTorch", stacklevel=2)
        return None


@functools.cache
def _find_compiler() -> tuple[str, ...]:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not found:
        warnings.warn("no C compiler was found (CC, cc, gcc or clang); using PyTorch, which is slower", stacklevel=3)
    return tuple(shlex.split(found or ""))


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.node()


def _cache_folder() -> Path:
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "titan-memory"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise OSError(str(error)) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    return folder


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="titan-memory-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _check_owner(path: Path) -> None:
    """Code that somebody else may have put there is not run."""
    found = path.lstat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if found.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others")


def _load(folder: Path, name: str, command: Sequence[str]) -> ctypes.CDLL:
    """The library of that name; compiled first if it is not there, not the user's own, or broken."""
    target = folder / name
    try:
        _check_owner(target)
        return ctypes.CDLL(str(target))
    except OSError:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work) / name
            _compile(command, built)
            built.chmod(0o700)
            os.replace(built, target)
        return ctypes.CDLL(str(target))


def _compile(command: Sequence[str], target: Path) -> None:
    sources = [str(path) for path in sorted(FOLDER.glob("*.c"))]
    for options in OPTIONS:
        call = [*command, *options, *sources, "-o", str(target), "-lm"]
        done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == 0:
            return
    raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message")


def can_run_native(*tensors: Tensor | None) -> bool:
    """Whether the compiled loops take these: ordinary tensors, all on a CPU, all float32 or all float64."""
    there = [x for x in tensors if x is not None]
    dtype = there[0].dtype
    if any(x.device.type != "cpu" or x.dtype != dtype for x in there):
        return False
    if not torch.compiler.is_compiling() and not all(
        type(x) in ORDINARY and not is_functorch_wrapped_tensor(x) for x in there
    ):
        return False
    return _is_loaded(dtype)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is at work on one of these."""
    return not torch.compiler.is_compiling() and any(map(is_functorch_wrapped_tensor, tensors))


def is_traced() -> bool:
    """Whether PyTorch records or intercepts what runs: a compiled loop must then be called as an operator."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _is_loaded(dtype: torch.dtype) -> bool:
    return library(dtype) is not None


# What torch.compiler.assume_constant_result does, which also imports the whole compiler: a second of every start.
_is_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def call(name: str, dtype: torch.dtype, *arguments: object) -> None:
    """Calls a function of the library; each returns 0, or 1 if it could not allocate its buffers.

    A tensor becomes a pointer to its numbers, one after the other; what the function fills must be contiguous already.
    """
    loaded = library(dtype)
    assert loaded is not None
    held = [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]
    if getattr(loaded, name)(*(address(x) if x is None or isinstance(x, Tensor) else x for x in held)):
        raise MemoryError(f"{name} could not allocate its buffers")


def address(x: Tensor | None) -> ctypes.c_void_p:
    """A contiguous tensor's data for C, or NULL."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def addresses(group: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p] | None:
    """An array of pointers for C, or NULL for an empty group."""
    return (ctypes.c_void_p * len(group))(*(x.data_ptr() for x in group)) if group else None


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    """An array of int for C."""
    return (ctypes.c_int * len(values))(*values)


def empty(x: Tensor) -> Tensor:
    """Room for a contiguous tensor of the same shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def zeros(x: Tensor) -> Tensor:
    """The same, filled with zeros."""
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def split_results(rule: FlatRule, results: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a rule's loop returned, as ``run_tiles`` would: (y,) or (y, ||u||^2, l), and the state's tensors."""
    if not rule.surprise:
        return tuple(results[:1]), tuple(results[1:])
    y, gradient, loss, *state = results
    return (y, rule.scale**2 * gradient, loss), tuple(state)
