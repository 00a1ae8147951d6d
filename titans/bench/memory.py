"""Speed, peak memory and arithmetic efficiency of the neural memory, side by side with titans-pytorch.

    titans bench memory --out runs/bench-memory

Every contender does the same job, (batch, time, dim) in and out, forward and forward+backward. Timings are interleaved:
each round runs every contender once, so that a busy minute hits all of them. Peak memory is measured in a fresh process
for every figure. Nothing is extrapolated: where a length did not run, there is no figure.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from titans.bench.flops import MemoryShape, memory_flops, rule_flops
from titans.bench.settings import MemoryBenchmarkSettings
from titans.bench.timing import (
    REFERENCE,
    REFERENCE_MAX_STEP,
    about,
    choose_names,
    dense,
    in_fresh_process,
    mebibytes_text,
    milliseconds_text,
    new_report,
    peak_growth,
    ratios,
    reference_memory_options,
    reference_version,
    speed_figure,
    times_text,
    timing,
)
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent

QUICK: dict[str, Any] = {
    "lengths": (128, 256), "repeats": 1, "recurrent_max_length": 128, "gemm_size": 256, "peak_memory": False,
}  # fmt: skip
COARSE = f"{REFERENCE}-coarse"
FORWARD, BOTH = "forward", "forward+backward"
PASSES = (FORWARD, BOTH)
SCALING_LENGTH = 2048


@dataclass(frozen=True)
class Subject:
    """A contender made ready to run: inputs for a length, the call on them, and what else gets gradients."""

    make_inputs: Callable[[int], tuple[Tensor, ...]]
    forward: Callable[..., Tensor]
    parameters: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True)
class Contender:
    """One way to compute a neural memory: what it is, and how it is built."""

    name: str
    package: str
    rule: str
    build: Callable[[MemoryBenchmarkSettings], Subject]
    notes: tuple[str, ...] = ()


def _module_subject(module: nn.Module, settings: MemoryBenchmarkSettings) -> Subject:
    def make_inputs(length: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(length)
        return (torch.randn(settings.batch, length, settings.dim, generator=generator).requires_grad_(),)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = module(x)[0]
        return y

    return Subject(make_inputs, forward, tuple(p for p in module.parameters() if p.requires_grad))


def _build_module(settings: MemoryBenchmarkSettings, mode: str) -> Subject:
    from titans import NeuralMemory

    torch.manual_seed(0)
    chunk_size = {"chunked": settings.chunk_size, "exact": None, "recurrent": 1}[mode]
    module = NeuralMemory(
        dim=settings.dim, heads=settings.heads, depth=settings.depth, chunk_size=chunk_size, mode=mode
    )
    return _module_subject(module, settings)


def _build_op(settings: MemoryBenchmarkSettings) -> Subject:
    from titans.ops import MemoryState, neural_memory_chunked

    torch.manual_seed(0)
    width = settings.head_width
    weights = tuple(
        nn.Parameter(torch.randn(settings.batch, settings.heads, width, width) / width**0.5)
        for _ in range(settings.depth)
    )

    def make_inputs(length: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(length)
        shape = (settings.batch, settings.heads, length)
        q, k, v = (torch.randn(*shape, width, generator=generator) for _ in range(3))
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        uniform = torch.rand(3, *shape, generator=generator)
        theta, alpha, eta = 0.01 * uniform[0], 0.01 * uniform[1], 0.5 * uniform[2]
        return tuple(t.requires_grad_() for t in (q, k, v, theta, alpha, eta))

    def forward(q: Tensor, k: Tensor, v: Tensor, theta: Tensor, alpha: Tensor, eta: Tensor) -> Tensor:
        state = MemoryState.create(weights)
        return neural_memory_chunked(q, k, v, theta, alpha, eta, state, chunk_size=settings.chunk_size)[0]

    return Subject(make_inputs, forward, weights)


def _build_reference(settings: MemoryBenchmarkSettings, chunk_size: int) -> Subject:
    from titans_pytorch import NeuralMemory
    from titans_pytorch.memory_models import MemoryMLP

    torch.manual_seed(0)
    module = NeuralMemory(
        dim=settings.dim,
        chunk_size=chunk_size,
        batch_size=settings.chunk_size,
        model=MemoryMLP(settings.head_width, depth=settings.depth, expansion_factor=1.0),
        pre_rmsnorm=False,
        **reference_memory_options(settings.heads, settings.head_width),
    )
    return _module_subject(module, settings)


_REFERENCE_NOTES = (
    "alike: projections with SiLU, memory MLP without bias, norm or residual, RMSNorm of the reads, momentum",
    "memory MLP with GELU (ours: SiLU)",
    "inner loss is the mean over the width (ours: the sum, Eq. 12)",
    "queries and keys pass an RMSNorm with a learned scale (ours: L2 normalisation)",
    "no convolution of queries, keys and values (ours: causal, depthwise, width 4)",
    "reads are gated by one sigmoid per head (ours: a SiLU gate of full width, one more dim x dim projection)",
    "steps are not bounded for any input (ours: divided by what a chunk's keys and gradients allow)",
    f"step gate at most {REFERENCE_MAX_STEP} (its default of 1 gives NaN on this input in the coarse setting)",
)

MODULES = {
    "chunked": "gradient at the start of the token's chunk, every token writes and reads its own weights",
    "exact": "gradient at the weights of the token before (sequential), computed in parallel",
    "recurrent": "gradient at the weights of the token before (sequential), token by token: the definition",
}
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        *(Contender(mode, "titan-memory", rule, partial(_build_module, mode=mode)) for mode, rule in MODULES.items()),
        Contender(
            "chunked-op",
            "titan-memory",
            "the rule of 'chunked', the op alone: no projections, convolutions, norms or gates",
            _build_op,
        ),
        Contender(
            REFERENCE,
            REFERENCE,
            "the rule of 'chunked' (chunk_size=1, batch_size=chunk)",
            partial(_build_reference, chunk_size=1),
            _REFERENCE_NOTES,
        ),
        Contender(
            COARSE,
            REFERENCE,
            "one step per chunk, reads use the weights before the chunk (chunk_size=chunk, batch_size=chunk)",
            lambda settings: _build_reference(settings, settings.chunk_size),
            (*_REFERENCE_NOTES, "momentum and decay gates are averaged over a chunk"),
        ),
    )
}


def lengths_of(settings: MemoryBenchmarkSettings, contender: Contender) -> tuple[int, ...]:
    """The lengths at which a contender runs."""
    limit = max(settings.lengths)
    if contender.package == REFERENCE:
        limit = settings.reference_max_length
    elif contender.name == "recurrent":
        limit = settings.recurrent_max_length
    return tuple(length for length in settings.lengths if length <= limit)


def choose_contenders(settings: MemoryBenchmarkSettings) -> tuple[list[Contender], list[str]]:
    """The contenders that will run, and one sentence for everything worth knowing about the choice."""
    packages = {name: contender.package for name, contender in CONTENDERS.items()}
    names, notices = choose_names(packages, settings.only, reference_version())
    chosen = []
    for contender in (CONTENDERS[name] for name in names):
        if lengths_of(settings, contender):
            chosen.append(contender)
        else:
            limit = "recurrent" if contender.name == "recurrent" else "reference"
            notices.append(f"{contender.name} is left out: no length is within {limit}_max_length.")
    if not chosen:
        raise ValueError(
            f"lengths is {', '.join(map(str, settings.lengths))}; expected one within the maximum of a chosen contender"
        )
    return chosen, notices


def needed_flops(name: str, settings: MemoryBenchmarkSettings, length: int, which: str) -> int | None:
    """Operations that a pass of a contender needs, without what it recomputes; None: there is no formula for it."""
    widths = (settings.head_width,) * (settings.depth + 1)
    shape = MemoryShape(settings.dim, settings.heads, widths, settings.chunk_size)
    if name == "chunked":
        parts = list(memory_flops(shape, length, settings.batch).values())
    elif name == "chunked-op":
        parts = [rule_flops(dataclasses.replace(shape, bounded=False, forget_to="zero"), length, settings.batch)]
    else:
        return None
    return sum(part.forward + (part.backward if which == BOTH else 0) for part in parts)


def run_pass(subject: Subject, inputs: tuple[Tensor, ...], which: str) -> Tensor:
    """The output of one call; ``which`` is "forward" or "forward+backward"."""
    if which == FORWARD:
        with torch.no_grad():
            return subject.forward(*inputs)
    y = subject.forward(*inputs)
    y.square().mean().backward()
    return y


def _clear_gradients(subject: Subject, inputs: tuple[Tensor, ...]) -> None:
    for tensor in (*subject.parameters, *inputs):
        tensor.grad = None


def _warm_up(subject: Subject, length: int, passes: Sequence[str]) -> None:
    inputs = subject.make_inputs(length)
    for which in passes:
        run_pass(subject, inputs, which)
    _clear_gradients(subject, inputs)


def _time_pass(subject: Subject, inputs: tuple[Tensor, ...], which: str) -> float:
    start = time.perf_counter()
    y = run_pass(subject, inputs, which)
    seconds = time.perf_counter() - start
    finite = bool(y.isfinite().all())
    _clear_gradients(subject, inputs)
    if not finite:
        raise FloatingPointError("the output is not finite")
    return seconds


def gemm_flops_per_second(size: int, repeats: int = 3) -> float:
    """The best measured rate of a float32 product of two size x size matrices, on torch's current threads."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _memory_worker(job: dict[str, Any]) -> dict[str, Any]:
    settings = MemoryBenchmarkSettings(**{**job["settings"], "only": ()})
    torch.set_num_threads(settings.threads)
    subject = CONTENDERS[job["contender"]].build(settings)
    # Libraries, thread pools and autograd come alive at a short length, before the count starts.
    _warm_up(subject, min(job["length"], 2 * settings.chunk_size), (job["pass"],))
    inputs = subject.make_inputs(job["length"])
    growth, method = peak_growth(lambda: run_pass(subject, inputs, job["pass"]))
    return {"bytes": growth, "method": method}


def measure_peak_memory(settings: MemoryBenchmarkSettings, name: str, length: int, which: str) -> dict[str, Any]:
    """Peak growth of one call in a fresh process: {"bytes", "method"}, or {"error"} if it failed."""
    job = {"settings": dataclasses.asdict(settings), "contender": name, "length": length, "pass": which}
    return in_fresh_process(_memory_worker, job, settings.threads)


Key = tuple[str, int, str]  # contender, length, pass


class _Run:
    """A benchmark under way: the plan, how far it is, what failed, and what the reader should know."""

    def __init__(self, settings: MemoryBenchmarkSettings, progress: Progress) -> None:
        self.settings, self.progress = settings, progress
        self.contenders, self.notices = choose_contenders(settings)
        self.plan = [(c, n) for n in settings.lengths for c in self.contenders if n in lengths_of(settings, c)]
        self.failed: dict[str, int] = {}
        self.total = sum(len(PASSES) * (self.rounds(c) + settings.peak_memory) for c, _ in self.plan)
        self.done = 0

    def rounds(self, contender: Contender) -> int:
        return min(self.settings.repeats, 2) if contender.name == "recurrent" else self.settings.repeats

    def step(self, what: str, contender: Contender, length: int, which: str) -> bool:
        """Report the next step; False if the contender has failed at this length or a shorter one."""
        self.progress(self.done, self.total, f"{what} {contender.name}, {length:,} tokens, {which}")
        self.done += 1
        return length < self.failed.get(contender.name, length + 1)

    def fail(self, contender: Contender, length: int, which: str, why: object) -> None:
        self.failed[contender.name] = length
        self.notices.append(f"{contender.name} failed at {length} tokens, {which}: {why}.")

    def measure_memory(self) -> dict[Key, dict[str, Any]]:
        peaks = {}
        for contender, length in self.plan:
            for which in PASSES:
                if not self.step("memory of", contender, length, which):
                    continue
                answer = measure_peak_memory(self.settings, contender.name, length, which)
                if "error" in answer:
                    self.fail(contender, length, which, answer["error"])
                else:
                    peaks[contender.name, length, which] = answer
        return peaks

    def measure_times(self, subjects: dict[str, Subject]) -> tuple[dict[Key, list[float]], float]:
        """Seconds of every round, and the best rate of the matrix product between the rounds."""
        seconds: dict[Key, list[float]] = {}
        gemm = 0.0
        for length in self.settings.lengths:
            here = [c for c, n in self.plan if n == length]
            inputs = {c.name: subjects[c.name].make_inputs(length) for c in here}
            for contender in here:
                _warm_up(subjects[contender.name], min(length, 2 * self.settings.chunk_size), PASSES)
            for number in range(self.settings.repeats):
                gc.collect()
                gemm = max(gemm, gemm_flops_per_second(self.settings.gemm_size))
                turn = number % max(len(here), 1)
                for contender in here[turn:] + here[:turn]:
                    if number >= self.rounds(contender):
                        continue
                    for which in PASSES:
                        if not self.step(f"round {number + 1}:", contender, length, which):
                            continue
                        try:
                            taken = _time_pass(subjects[contender.name], inputs[contender.name], which)
                        except FloatingPointError as error:
                            self.fail(contender, length, which, error)
                        else:
                            seconds.setdefault((contender.name, length, which), []).append(taken)
        return seconds, gemm


def run_memory_benchmark(settings: MemoryBenchmarkSettings, progress: Progress = silent) -> dict[str, Any]:
    """Measure everything that the settings ask for; returns the report, a dict that is ready for JSON."""
    run = _Run(settings, progress)
    report = new_report("memory", settings, settings.threads)

    # Memory comes first, so that a length that does not fit ends a child process and not this one.
    peaks = run.measure_memory() if settings.peak_memory else {}
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        subjects = {contender.name: contender.build(settings) for contender in run.contenders}
        seconds, gemm = run.measure_times(subjects)
    finally:
        torch.set_num_threads(previous_threads)
    progress(run.total, run.total, "done")

    results = []
    for key, times in seconds.items():
        name, length, which = key
        times_of = timing(times, settings.batch * length)
        flops = needed_flops(name, settings, length, which)
        peak = peaks.get(key, {})
        results.append(
            {
                "contender": name,
                "length": length,
                "pass": which,
                **times_of,
                "peak_growth_bytes": peak.get("bytes"),
                "peak_method": peak.get("method"),
                "needed_flops": flops,
                "fraction_of_gemm": None if flops is None else flops / times_of["best_seconds"] / gemm,
            }
        )
    return report | {
        "reference_version": reference_version(),
        "contenders": [
            {
                "name": c.name,
                "package": c.package,
                "rule": c.rule,
                "notes": list(c.notes),
                "parameters": sum(p.numel() for p in subjects[c.name].parameters),
            }
            for c in run.contenders
        ],
        "gemm": {"size": settings.gemm_size, "dtype": "float32", "flops_per_second": gemm},
        "results": results,
        "ratios": ratios(results, MODULES, (REFERENCE, COARSE), ("length", "pass")),
        "scaling": _scaling(results, settings.batch),
        "notices": run.notices + report["notices"],
    }


def _scaling(results: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """For each contender and pass: speed at the longest length over that at 2048, and memory per token.

    ``bytes_per_token`` is the slope of peak memory between the two longest lengths; ``memory_growth`` compares it
    with the slope before: linear (2/3 to 3/2 of it), sublinear or superlinear; None with fewer than three lengths.
    """
    rows = []
    for name in dict.fromkeys(r["contender"] for r in results):
        for which in PASSES:
            runs = [r for r in results if r["contender"] == name and r["pass"] == which]
            if len(runs) < 2:
                continue
            start = next((r for r in runs[:-1] if r["length"] == SCALING_LENGTH), runs[0])
            row: dict[str, Any] = {
                "contender": name,
                "pass": which,
                "from_length": start["length"],
                "to_length": runs[-1]["length"],
                "speed_retained": runs[-1]["tokens_per_second"] / start["tokens_per_second"],
                "bytes_per_token": None,
                "memory_growth": None,
            }
            if all(r["peak_growth_bytes"] is not None for r in runs):
                slopes = [
                    (b["peak_growth_bytes"] - a["peak_growth_bytes"]) / (b["length"] - a["length"]) / batch
                    for a, b in pairwise(runs)
                ]
                row["bytes_per_token"] = slopes[-1]
                if len(slopes) > 1 and slopes[-2] > 0:
                    steeper = slopes[-1] / slopes[-2]
                    row["memory_growth"] = (
                        "sublinear" if steeper < 2 / 3 else "superlinear" if steeper > 3 / 2 else "linear"
                    )
            rows.append(row)
    return rows


def sections(report: dict[str, Any]) -> list[Section]:
    """Times, peak memory and scaling of a report, as text and tables."""
    found = {(r["contender"], r["length"], r["pass"]): r for r in report["results"]}
    pairs = {(r["contender"], r["against"], r["length"], r["pass"]): r for r in report["ratios"]}
    places = list(dict.fromkeys((name, length) for name, length, _ in found))

    def against(name: str, length: int, which: str, what: str) -> str:
        pair = [pairs.get((name, other, length, which)) for other in (REFERENCE, COARSE)]
        return "" if pair == [None, None] else " / ".join(times_text(r[what] if r else None) for r in pair)

    def time_rows(which: str) -> list[list[str]]:
        return [
            [
                name,
                f"{length:,}",
                milliseconds_text(result["best_seconds"]),
                milliseconds_text(result["median_seconds"]),
                f"{result['tokens_per_second']:,.0f}",
                against(name, length, which, "speed"),
            ]
            for name, length in places
            if (result := found.get((name, length, which))) is not None
        ]

    header = ["contender", "tokens", "best, ms", "median, ms", "tokens/s", "faster"]
    compared = f"Faster: than {REFERENCE} with chunk_size=1 (the rule of 'chunked') / than its coarse setting."
    made = [
        Section(
            "Speed",
            [compared] if pairs else [],
            [dense(header, time_rows(which), f"Time of one call, {which}.") for which in PASSES],
        )
    ]
    if report["settings"]["peak_memory"]:
        rows = [
            [name, f"{length:,}"]
            + [
                cell
                for which in PASSES
                for cell in (
                    mebibytes_text(found.get((name, length, which), {}).get("peak_growth_bytes")),
                    against(name, length, which, "memory"),
                )
            ]
            for name, length in places
        ]
        header = ["contender", "tokens", "fwd", "smaller", "fwd+bwd", "smaller"]
        made.append(Section("Peak memory", [], [dense(header, rows, "Growth of resident memory in one call, MiB.")]))
    if report["scaling"]:
        made.append(_scaling_section(report, found))
    rows = [[c["name"], f"{c['parameters']:,}", c["rule"], "; ".join(c["notes"])] for c in report["contenders"]]
    contenders = Table(["contender", "parameters", "rule", "how it differs from ours"], rows, "Contenders.")
    return [*made, about(report, contenders)]


def _scaling_section(report: dict[str, Any], found: dict[Key, dict[str, Any]]) -> Section:
    rows = []
    for row in report["scaling"]:
        fraction = found[row["contender"], row["to_length"], row["pass"]]["fraction_of_gemm"]
        rows.append(
            [
                row["contender"],
                row["pass"],
                "" if fraction is None else f"{fraction:.1%}",
                f"{row['speed_retained']:.2f}x of {row['from_length']:,}",
                "" if row["bytes_per_token"] is None else f"{row['bytes_per_token'] / 1024:.1f}",
                row["memory_growth"] or "",
            ]
        )
    gemm = report["gemm"]
    words = (
        "Of GEMM: operations per second that the rule needs, over the "
        f"{gemm['flops_per_second'] / 1e9:.1f} GFLOP/s of a {gemm['size']}^3 float32 product. KiB/token: slope of peak "
        "memory between the two longest lengths; growth compares it with the slope before."
    )
    header = ["contender", "pass", "of GEMM", "speed kept", "KiB/token", "growth"]
    return Section("At the longest length", [words], [dense(header, rows)])


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """Tokens per second against length, one picture per pass, by the title of the section they belong to."""
    made = []
    for which in PASSES:
        speeds = {
            contender["name"]: {
                r["length"]: r["tokens_per_second"]
                for r in report["results"]
                if (r["contender"], r["pass"]) == (contender["name"], which)
            }
            for contender in report["contenders"]
        }
        title = f"Speed of the neural memory, {which}"
        lengths = report["settings"]["lengths"]
        made.append(speed_figure(f"memory-{which.replace('+', '-')}", title, speeds, lengths, "tokens in the sequence"))
    return {"Speed": made}
