"""Compiles and loads the C loops of this folder: used on a CPU when a compiler is at hand, never required.

They are compiled on first use (a few seconds), kept in the user's cache folder, and loaded through ctypes. Without a
compiler, or with ``TITANS_NATIVE=0``, everything runs in PyTorch.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from titans.ops.dual import Rule

FOLDER = Path(__file__).parent
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros")
TYPES = {torch.float32: ("-DREAL=float", "-DSINGLE"), torch.float64: ("-DREAL=double",)}


def _cache_folder() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache") / "titan-memory"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "titan-memory"


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.node()


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled loops for a dtype, or None if they cannot be had."""
    compiler = shlex.split(
        os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""
    )
    if not compiler or os.environ.get("TITANS_NATIVE") == "0" or dtype not in TYPES:
        return None
    command = [*compiler, *FLAGS, "-shared", "-fPIC", *TYPES[dtype]]
    sources = sorted(FOLDER.glob("*.c"))
    texts = [path.read_text() for path in [*sources, *sorted(FOLDER.glob("*.h"))]]
    key = hashlib.sha256("\0".join([*command, *texts, _processor()]).encode()).hexdigest()[:16]
    try:
        folder = _cache_folder()
        target = folder / f"native-{key}.so"
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                built = Path(work) / "native.so"
                for extra in (["-fopenmp"], []):
                    call = [*command, *extra, *map(str, sources), "-o", str(built), "-lm"]
                    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
                    if done.returncode == 0:
                        break
                else:
                    raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message")
                os.replace(built, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(f"the compiled memory is not available ({error}); using PyTorch", stacklevel=2)
        return None


def takes(*tensors: Tensor | None) -> bool:
    """Whether C can read these: plain tensors with data, all on a CPU, all float32 or all float64."""
    there = [x for x in tensors if x is not None]
    dtype = there[0].dtype
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, Parameter) and x.device.type == "cpu" and x.dtype == dtype for x in there)
        and not any(is_functorch_wrapped_tensor(x) for x in there)
        and library(dtype) is not None
    )


def call(name: str, dtype: torch.dtype, *arguments: object) -> None:
    """Calls a function of the library; each returns 0, or 1 if it could not allocate its buffers."""
    loaded = library(dtype)
    assert loaded is not None
    if getattr(loaded, name)(*arguments):
        raise MemoryError(f"{name} could not allocate its buffers")


def address(x: Tensor | None) -> ctypes.c_void_p:
    """A tensor's data for C, or NULL."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def addresses(group: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p] | None:
    """An array of pointers for C, or NULL for an empty group."""
    return (ctypes.c_void_p * len(group))(*(x.data_ptr() for x in group)) if group else None


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    """An array of int for C."""
    return (ctypes.c_int * len(values))(*values)


def plain(tensors: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """The same tensors, detached and contiguous."""
    return (None if x is None else x.detach().contiguous() for x in tensors)


def split_results(rule: Rule, results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a rule's loop returned, as ``run_tiles`` would: (y,) or (y, ||u||^2, l), and the state's tensors."""
    if not rule.surprise:
        return results[:1], results[1:]
    y, gradient, loss, *state = results
    return (y, rule.scale**2 * gradient, loss), tuple(state)
