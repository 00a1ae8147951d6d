"""What the benchmarks share: checks of settings, the machine, peak memory, fresh processes, and parts of a page."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import dataclasses
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import titans
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, Values, plot_bars, plot_lines

REFERENCE_VERSION = "0.5.5"
REFERENCE = "titans-pytorch"
# The coarse settings of titans-pytorch turn to NaN on random input with its default of 1.
REFERENCE_MAX_STEP = 1e-2


def reference_version() -> str | None:
    """The version of titans-pytorch that is installed; None: it is not."""
    try:
        return importlib.metadata.version(REFERENCE)
    except importlib.metadata.PackageNotFoundError:
        return None


def choose_names(packages: Mapping[str, str], only: Sequence[str], version: str | None) -> tuple[list[str], list[str]]:
    """The contenders that can run, and one sentence for everything worth knowing about the choice.

    Args:
        packages: the package of each contender.
        only: the contenders that were asked for; empty: all of them.
        version: of titans-pytorch; None: it is not installed.
    """
    names = [name for name in packages if not only or name in only]
    wanted = [name for name in names if packages[name] == REFERENCE]
    if version is None and wanted:
        if only:
            raise ValueError(
                f"only has {', '.join(wanted)}, which needs {REFERENCE}: pip install {REFERENCE}=={REFERENCE_VERSION}"
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


def new_report(name: str, settings: Any, threads: int | None = None) -> dict[str, Any]:
    """What every report begins with; the rest of it is the benchmark's own.

    Args:
        settings: a dataclass.
        threads: CPU threads that the benchmark uses; None: nothing is measured.
    """
    report = {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "version": titans.__version__,
        "settings": dataclasses.asdict(settings),
        "notices": [],
    }
    if threads is None:
        return report
    machine = machine_info(threads)
    return report | {"machine": machine, "notices": busy_notices(machine)}


def about(report: dict[str, Any], *tables: Table) -> Section:
    """The last part of a page: the machine, what the reader should know, the settings, and other tables."""
    words = [notice[0].upper() + notice[1:] for notice in report["notices"]]
    if "machine" in report:
        words.insert(0, f"Measured on {machine_text(report['machine'])}; titan-memory {report['version']}.")
    rows = [[name, _setting_text(value)] for name, value in report["settings"].items()]
    return Section("Settings", words, [Table(["setting", "value"], rows), *tables])


def dense(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table without the columns in which no contender has a figure."""
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] not in ("", "-") for row in rows)]
    return Table([header[i] for i in kept], [[row[i] for i in kept] for row in rows], caption)


def _setting_text(value: Any) -> str:
    if value is None or value == ():
        return "default"
    if isinstance(value, list | tuple):
        return ", ".join(map(_setting_text, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def speed_figure(
    name: str, title: str, speeds: Mapping[str, Mapping[int, float]], places: Sequence[int], axis: str
) -> Figure:
    """Tokens per second of every contender along an axis; what was not measured is a gap."""
    curves = [
        Curve(contender, [speed.get(place) for place in places], style=index)
        for index, (contender, speed) in enumerate(speeds.items())
    ]
    return Figure(name, plot_lines(places, curves, title, axis, "tokens per second"), title)


def bar_figure(
    name: str, title: str, words: Sequence[str], bars: Mapping[str, Values], x_label: str, y_label: str
) -> Figure:
    """A group of bars for each word."""
    curves = [Curve(label, values, style=index) for index, (label, values) in enumerate(bars.items())]
    return Figure(name, plot_bars(words, curves, title, x_label, y_label), title)


@contextlib.contextmanager
def work_folder(out: Path | None) -> Iterator[Path]:
    """Where a benchmark keeps what it makes on the way: the folder it is given, or one that is gone afterwards."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def timing(seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    """What a report says about the seconds of every round; each round processed ``tokens`` tokens."""
    best = min(seconds)
    return {
        "seconds": list(seconds),
        "best_seconds": best,
        "median_seconds": statistics.median(seconds),
        "tokens_per_second": tokens / best,
    }


def over(a: float | None, b: float | None) -> float | None:
    """a / b where both are known."""
    return a / b if b and a is not None else None


def ratios(
    results: Sequence[dict[str, Any]], ours: Collection[str], others: Sequence[str], place: Sequence[str]
) -> list[dict[str, Any]]:
    """Speed and memory of our contenders against others where both ran; above 1, ours is better.

    Args:
        place: the keys of a result that say where it was measured.
    """
    found = {(r["contender"], *(r[key] for key in place)): r for r in results}
    made = []
    for mine in (r for r in results if r["contender"] in ours):
        where = {key: mine[key] for key in place}
        for other in others:
            its = found.get((other, *where.values()))
            if its is not None:
                speed = its["best_seconds"] / mine["best_seconds"]
                memory = over(its["peak_growth_bytes"], mine["peak_growth_bytes"])
                pair = {"contender": mine["contender"], "against": other}
                made.append({**pair, **where, "speed": speed, "memory": memory})
    return made


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def resident_bytes() -> int:
    """The resident memory of this process."""
    try:
        return _status_bytes("VmRSS")
    except OSError:  # not Linux
        import psutil

        return int(psutil.Process().memory_info().rss)


def settled_bytes() -> int:
    """The same once the allocator has handed its free pages back to the system: reuse of them would hide growth."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)
    return resident_bytes()


def _sampled_peak(call: Callable[[], object]) -> int:
    """Peak of resident memory during ``call``, seen by a thread that looks every millisecond."""
    peak = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = call()
        peak = max(peak, resident_bytes())
        del result
    finally:
        done.set()
        watcher.join()
    return peak


def peak_growth(call: Callable[[], object], before: int | None = None) -> tuple[int, str]:
    """Bytes of resident memory that ``call`` needed at its peak beyond those before it, and how they were seen.

    Linux keeps the peak of a process and lets it be reset, which is exact ("VmHWM"); elsewhere a thread
    samples the resident memory ("sampled"), which may miss a short peak.

    Args:
        before: count from this many bytes instead, an earlier answer of ``settled_bytes``.
    """
    now = settled_bytes()
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
    """Bytes that a new process could take without pushing others out; None: the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def limit_memory(count: int) -> None:
    """Let this process take at most ``count`` bytes more, where the system can; beyond them allocations fail."""
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
    """What ``worker``, a function of a module, answers to ``job`` in a process of its own; {"error"} if it failed.

    Args:
        seconds: the process is ended if it takes longer.
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


def answer_of(worker: Callable[[dict[str, Any]], dict[str, Any]], job: dict[str, Any], threads: int) -> dict[str, Any]:
    """The same; a ValueError says why it failed."""
    answer = in_fresh_process(worker, job, threads)
    if "error" in answer:
        raise ValueError(answer["error"].removeprefix("ValueError: "))
    return answer


def _serve(module: str, worker: str) -> None:
    """Body of the fresh process: read one job as JSON from stdin, print the answer as the last line."""
    job = json.loads(sys.stdin.read())
    print("\n" + json.dumps(getattr(importlib.import_module(module), worker)(job)))


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


def milliseconds_text(seconds: float) -> str:
    """Seconds as ms, without the unit."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.1f}"
