"""What the benchmarks share: checks of settings, the machine, peak memory in fresh processes, tables and pictures."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import gc
import importlib
import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titans.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

REFERENCE_VERSION = "0.5.5"
REFERENCE = "titans-pytorch"
# The coarse settings of titans-pytorch turn to NaN on random input with its default of 1.
REFERENCE_MAX_STEP = 1e-2

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what comes next


def check_at_least_one(settings: object, names: Iterable[str]) -> None:
    """Raises a ValueError that names the first of the fields that is below 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}.")


def check_lengths(name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths in order; a ValueError when there are none, or two alike, or one below 1."""
    if not lengths:
        raise ValueError(f"{name} must name at least one sequence length.")
    if min(lengths) < 1:
        raise ValueError(f"{name} must be at least 1, got {min(lengths)}.")
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"{name} must differ from each other, got " + ", ".join(map(str, lengths)) + ".")
    return tuple(sorted(lengths))


def check_names(name: str, chosen: Sequence[str], known: Collection[str], what: str = "contenders") -> None:
    """Raises a ValueError that lists what is known when something else was chosen."""
    unknown = [one for one in chosen if one not in known]
    if unknown:
        raise ValueError(f"{name} must name {what} among {', '.join(known)}, got {', '.join(unknown)}.")


def reference_version() -> str | None:
    """The version of titans-pytorch that is installed, None without it."""
    try:
        return importlib.metadata.version(REFERENCE)
    except importlib.metadata.PackageNotFoundError:
        return None


def choose_names(packages: Mapping[str, str], only: Sequence[str], version: str | None) -> tuple[list[str], list[str]]:
    """The contenders that can run, and one sentence for everything worth knowing about the choice.

    packages: the package of each contender
    only: the contenders that were asked for, all of them when empty
    version: of titans-pytorch, None when it is not installed
    """
    names = [name for name in packages if not only or name in only]
    wanted = [name for name in names if packages[name] == REFERENCE]
    if version is None and wanted:
        if only:
            raise ValueError(
                f"only names {', '.join(wanted)}, which needs {REFERENCE}: "
                f"pip install {REFERENCE}=={REFERENCE_VERSION}."
            )
        notice = (
            f"{REFERENCE} is not installed, so it is left out: "
            f"pip install {REFERENCE}=={REFERENCE_VERSION} adds the comparison."
        )
        return [name for name in names if name not in wanted], [notice]
    if version not in (None, REFERENCE_VERSION):
        return names, [f"{REFERENCE} is at {version}; the comparison was written for {REFERENCE_VERSION}."]
    return names, []


def reference_memory_options(heads: int, head_width: int) -> dict[str, Any]:
    """The arguments under which a memory of titans-pytorch comes closest to ours."""
    return {
        "heads": heads,
        "dim_head": head_width,
        "momentum": True,
        "post_rmsnorm": True,
        "qk_rmsnorm": True,
        "activation": torch.nn.SiLU(),
        "mem_model_norm_add_residual": False,
        "default_step_transform_max_lr": REFERENCE_MAX_STEP,
    }


def machine_info(threads: int) -> dict[str, Any]:
    """What the figures depend on: processor, threads, versions, and how busy the machine is."""
    try:
        load: list[float] | None = [round(value, 2) for value in os.getloadavg()]
    except (AttributeError, OSError):
        load = None
    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "cpu": processor or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "threads": threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_at_start": load,
    }


def machine_text(machine: dict[str, Any]) -> str:
    """The machine in a few words."""
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"{machine['cpu']}, {threads}, torch {machine['torch']}"


def busy_notices(machine: dict[str, Any]) -> list[str]:
    """One sentence when something else was running at the start."""
    load = machine["load_average_at_start"]
    if not load or load[0] <= 1:
        return []
    return [f"the load average was {load[0]} at the start: other work disturbs the figures."]


def timing(seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    """What a report says of the seconds of every round, each of which did `tokens` tokens."""
    best = min(seconds)
    return {
        "seconds": list(seconds),
        "best_seconds": best,
        "median_seconds": statistics.median(seconds),
        "tokens_per_second": tokens / best,
    }


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def release_free_memory() -> None:
    """Hand the allocator's free pages back to the system where it can: reuse of them would hide growth."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)


def resident_bytes() -> int:
    """The resident memory of this process, without what the allocator holds for nothing."""
    release_free_memory()
    try:
        return _status_bytes("VmRSS")
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


def _sampled_peak(call: Callable[[], object]) -> int:
    """Peak of resident memory during `call`, seen by a thread that looks every millisecond."""
    import psutil

    process = psutil.Process()
    peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = call()
        peak = max(peak, process.memory_info().rss)
        del result
    finally:
        done.set()
        watcher.join()
    return int(peak)


def peak_growth(call: Callable[[], object], before: int | None = None) -> tuple[int, str]:
    """Bytes of resident memory that `call` needed at its peak beyond those before it, and how they were seen.

    before: count from this many bytes instead, an earlier answer of `resident_bytes`.
    Linux keeps the peak of a process and lets it be reset, which is exact ("VmHWM"); elsewhere a thread
    samples the resident memory ("sampled"), which may miss a short peak.
    """
    now = resident_bytes()
    before = now if before is None else before
    try:
        Path("/proc/self/clear_refs").write_text("5")
        if _status_bytes("VmHWM") - now > 1 << 20:
            raise OSError("the peak was not reset")
    except (OSError, ValueError):
        return max(_sampled_peak(call) - before, 0), "sampled"
    result = call()
    growth = _status_bytes("VmHWM") - before
    del result
    return max(growth, 0), "VmHWM"


def available_memory() -> int | None:
    """Bytes that a new process could have without pushing others out, None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def limit_memory(count: int) -> None:
    """Let this process have `count` bytes more than it has, where the system can; beyond them allocations fail."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        bound = _status_bytes("VmData") + count
        resource.setrlimit(resource.RLIMIT_DATA, (bound, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def in_fresh_process(
    worker: Callable[[dict[str, Any]], dict[str, Any]],
    job: dict[str, Any],
    threads: int,
    seconds: float | None = None,
) -> dict[str, Any]:
    """What `worker`, a function of a module, answers to `job` in a process of its own; {"error"} when it failed.

    seconds: the process is ended when it takes longer.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    code = f"from {__name__} import _serve; _serve({worker.__module__!r}, {worker.__name__!r})"
    try:
        process = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=environment,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"ended after {seconds:.0f} s"}
    if process.returncode < 0:
        return {"error": f"ended by signal {-process.returncode} (out of memory?)"}
    if process.returncode:
        return {"error": (process.stderr.strip().splitlines() or ["no message"])[-1]}
    answer: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return answer


def _serve(module: str, worker: str) -> None:
    """Body of the fresh process: read one job as JSON from stdin, print the answer as the last line."""
    job = json.loads(sys.stdin.read())
    print("\n" + json.dumps(getattr(importlib.import_module(module), worker)(job)))


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report as JSON."""
    write_atomically(path, json.dumps(report, indent=2, allow_nan=False).encode() + b"\n")


def print_table(console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: the first column to the left, numbers to the right, nothing wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def times_text(ratio: float | None) -> str:
    """At most five characters: 0.04x, 0.93x, 2.3x, 21x."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 1 else f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def mebibytes_text(count: int | None) -> str:
    """Bytes as MiB, without the unit; empty for None."""
    if count is None:
        return ""
    return f"{count / 2**20:.1f}" if count < 100 * 2**20 else f"{count / 2**20:.0f}"


def seconds_text(seconds: float) -> str:
    """Seconds or milliseconds, with the unit."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def speed_axes(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure for `count` panels side by side, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(5.5 * count, 5), sharey=True, squeeze=False, layout="constrained")
    figure.suptitle("\n".join(textwrap.wrap(title, 75 * count)), fontsize=10)
    return figure, list(axes[0])


def finish_speed_axis(axis: Axes, title: str, label: str, ticks: Sequence[int]) -> None:
    """Both scales logarithmic, ticks at what was measured, whole numbers beside them."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    axis.set(xscale="log", yscale="log", title=title, xlabel=label)
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(which="major", color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)


def save_speed_figure(figure: Figure, axes: Sequence[Axes], path: Path) -> None:
    """Put one legend below the panels and write the figure in the format that `path` ends in."""
    from matplotlib import pyplot

    axes[0].set_ylabel("tokens per second (higher is better)")
    named: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=min(len(named), 6), frameon=False
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix.lstrip(".").lower())
    pyplot.close(figure)
    write_atomically(path, drawn.getvalue())
