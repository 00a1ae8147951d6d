"""What a million tokens do to a memory: memory in use, speed, bounds, and whether it can still learn afterwards.

    titans bench stream --out runs/bench-stream
    titans bench stream --out runs/bench-stream --tokens 100000 --only stream-exact-1,bounds-default-exact-1

`stream` and `decode` read random tokens, in calls of 4,096 and one at a time: neither the process nor the time of a
call may grow. Times are processor time, which other programs disturb least. `bounds` reads the streams of `STREAMS`,
most of them made to break a memory, as the rows of one batch (every row has a state of its own), with parameters as
they are at the start and with two sets that are harder to bear (`SETTINGS`); width 64 and one head keep it fast. Then
it writes fresh tokens into the memory that has read all that, and counts how often each must be seen.

Every run has a process of its own, one after another. A finished one is kept as JSON in the output folder and is not
repeated.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from titans import MemoryState, NeuralMemory
from titans.bench.settings import StreamBenchmarkSettings
from titans.bench.timing import about, bar_figure, in_fresh_process, new_report, resident_bytes
from titans.files import write_json
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent

BOUNDS_CALL = 512  # tokens per call of `bounds`: the norms are looked at after each
WARM_UP = 10  # calls before memory in use is taken as a base
MAX_GROWTH = 20.0  # MB
MIN_SPEED = 0.9  # of the last tenth, over that of the first

CHUNK = 64  # the chunked rule's, and the period of the exact rule's guard
BOUNDS_DIM = 64  # one head: small enough that a million tokens take minutes
SPIKE_EVERY, LARGE = 10_000, 1e4
RHYTHMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens on and tokens off that `resonance` is tuned over
TUNING_TOKENS = 2048

PROBES = 4  # fresh tokens, each written into its own copy of the memory
PRESENTATIONS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # the convolutions are full after 4
LEARNED = 0.1  # of a value's energy is missing when it counts as learned
LEARNABLE = 0.5  # a fresh token of which a new memory misses more, after all presentations, is no probe
FALL = 10  # a loss that has fallen by so much counts too
MAX_EFFORT = 4  # times the presentations that a new memory needs

SETTINGS = ("default", "fast", "wild")
MODES, DEPTHS = ("exact", "chunked"), (1, 2)
RULES = [(mode, depth) for mode in MODES for depth in DEPTHS]
RUNS = (
    *(f"{kind}-{mode}-{depth}" for kind in ("stream", "decode") for mode, depth in RULES),
    *(f"bounds-{setting}-{mode}-{depth}" for setting in SETTINGS for mode, depth in RULES),
)
FLOWS, BOUNDS = "Memory in use and speed", "Bounds, and learning afterwards"  # titles of sections
QUICK: dict[str, Any] = {
    "tokens": 4096, "decode_tokens": 200, "call": 128,
    "only": ("stream-chunked-1", "decode-chunked-1", "bounds-default-exact-1"),
}  # fmt: skip


def make_memory(setting: str, mode: str, depth: int, dim: int = BOUNDS_DIM, seed: int = 0) -> NeuralMemory:
    """A memory of one head with random parameters.

    default: as a new memory has them. fast: steps and momentum near their largest, next to no forgetting. wild: gates
    that swing with the token over all of (0, 1), sharper keys, longer convolutions, a start that is far from zero.
    """
    torch.manual_seed(seed)
    memory = NeuralMemory(dim, heads=1, depth=depth, mode=mode)
    assert memory.to_gates is not None and memory.conv is not None
    with torch.no_grad():
        if setting == "fast":
            gates = {"theta": 12.0, "alpha": -12.0, "eta": math.log(99)}
            memory.to_gates.bias.copy_(torch.tensor([gates[name] for name in memory.gate_names]))
        if setting == "wild":
            memory.to_gates.weight.normal_(std=3 * dim**-0.5)
            memory.to_qkv.weight.normal_(std=3 * dim**-0.5)
            memory.conv.normal_(std=0.5)
            for weight in memory.initial:
                weight.normal_(std=2 * weight.shape[-1] ** -0.5)
    return memory


# Streams: name -> (start, length) -> (length, dim). Any stretch of a stream can be had without what lies before it.

Stream = Callable[[int, int], Tensor]


def make_streams(memory: NeuralMemory, seed: int = 0) -> dict[str, Stream]:
    """Ordinary input, and inputs that try to break the memory; the last two are made for it."""
    generator = torch.Generator().manual_seed(1000 + seed)
    a, b = torch.randn(2, memory.dim, generator=generator)
    other = contradiction(memory, a)
    on, off = worst_rhythm(memory, a)

    def at(choose: Callable[[Tensor], Tensor], *vectors: Tensor) -> Stream:
        """``choose`` says which of the vectors stands at each position."""
        return lambda start, length: torch.stack(vectors)[choose(torch.arange(start, start + length)).long()]

    def random(start: int, length: int) -> Tensor:
        return torch.randn(length, memory.dim, generator=torch.Generator().manual_seed(seed + start))

    zero = torch.zeros_like(a)
    return {
        "random": random,
        "constant": at(lambda t: 0 * t, a),
        "alternating": at(lambda t: t % 2, a, b),
        "zeros": at(lambda t: 0 * t, zero),
        "large": lambda start, length: LARGE * random(start, length),
        "spikes": at(lambda t: t % SPIKE_EVERY == SPIKE_EVERY // 20, zero, LARGE * a),
        "resonance": at(lambda t: t % (on + off) >= on, a, zero),
        "blocks": at(lambda t: t // CHUNK % 2, a, other),
    }


STREAMS = ("random", "constant", "alternating", "zeros", "large", "spikes", "resonance", "blocks")


def contradiction(memory: NeuralMemory, x: Tensor) -> Tensor:
    """A token with nearly the key of ``x`` and another value: x, moved where values change most and keys least."""
    _, key, value = (w.detach().double() for w in memory.to_qkv.weight.chunk(3))
    ridge = 1e-3 * torch.eye(memory.dim, dtype=torch.float64)
    factor = torch.linalg.cholesky(key.mT @ key + ridge)
    half = torch.linalg.solve_triangular(factor, value.mT, upper=False)
    direction = torch.linalg.solve_triangular(factor.mT, torch.linalg.svd(half).U[:, :1], upper=True)[:, 0]
    return x + x.norm() * (direction / direction.norm()).to(x)


@torch.no_grad()
def worst_rhythm(memory: NeuralMemory, x: Tensor) -> tuple[int, int]:
    """How long to hold ``x``, and then nothing, to make the state grow most: momentum builds up while it is held, and
    then nothing stops it."""
    pairs = [(on, off) for on in RHYTHMS for off in RHYTHMS]
    t = torch.arange(TUNING_TOKENS)
    held = torch.stack([t % (on + off) < on for on, off in pairs])
    _, state = memory(held.unsqueeze(-1) * x)
    size = torch.stack(list(state.norms().values())).nan_to_num(math.inf, math.inf).amax((0, 1, 3))
    return pairs[int(size.argmax())]


# What a memory that has read a stream is worth.


@torch.no_grad()
def missing_after_writing(memory: NeuralMemory, state: MemoryState, tokens: Tensor) -> Tensor:
    """Write each of ``tokens`` (batch, dim) over and over into its row of ``state``.

    Returns which part of its value is missing before, and after each of ``PRESENTATIONS``, (batch, 1 + presentations):
    l(M; k, v) / ||v||^2 with the weights as they stand, which is 1 for an empty memory.
    """
    looking = copy.copy(memory)  # shares its parameters, and writes nothing
    looking.writes, looking.mode, looking.chunk_size = False, "exact", 8

    def missing(state: MemoryState) -> Tensor:
        state = replace(state, anchor=state.weights, position=0, gram=None)  # as if a chunk ended here
        x = tokens.unsqueeze(1).expand(-1, max(1, memory.conv_kernel), -1)  # the last has a convolution of its own
        empty = state.map(lambda x: torch.zeros_like(x) if x.ndim == 4 else x)
        loss, energy = (looking(x, s, return_surprise=True)[2].loss[..., -1].sum(1) for s in (state, empty))
        return loss / energy

    found, seen = [missing(state)], 0
    for count in PRESENTATIONS:
        _, state = memory(tokens.unsqueeze(1).expand(-1, count - seen, -1), state)
        found.append(missing(state))
        seen = count
    return torch.stack(found, dim=1)


def presentations_needed(missing: Tensor, target: Tensor) -> list[int | None]:
    """From which presentation on each row of ``missing`` stays below its target; None: from none that was tried."""
    needed: list[int | None] = []
    for row in (missing[:, 1:] <= target.unsqueeze(1)).tolist():
        late = max((i for i, learned in enumerate(row) if not learned), default=-1) + 1
        needed.append(PRESENTATIONS[late] if late < len(PRESENTATIONS) else None)
    return needed


def relearn(memory: NeuralMemory, state: MemoryState, seed: int = 0) -> dict[str, Any]:
    """Write fresh random tokens into each row of ``state``, and into a new memory, which sets the standard.

    A token counts as learned when a tenth of its value is missing, or twice what a new memory ends with if that is more
    (forgetting goes on while it is written). A row learns if, within ``MAX_EFFORT`` times the presentations that a new
    memory needs, every token is learned or its loss has fallen by ``FALL``: what a stream left behind may take time to
    overwrite, but only in proportion. Tokens that a new memory does not take in are no probes, and the convolutions
    start empty in both.
    """
    tokens = torch.randn(64, memory.dim, generator=torch.Generator().manual_seed(2000 + seed))
    new = missing_after_writing(memory, memory.init_state(len(tokens)).detach(), tokens)
    chosen = (new[:, -1] <= LEARNABLE).nonzero()[:PROBES, 0]
    tokens, new = tokens[chosen], new[chosen]
    target = (2 * new[:, -1]).clamp(min=LEARNED)
    standard = presentations_needed(new, target)
    rows, probes = state.batch_size, len(tokens)
    copies = state.reorder(torch.arange(rows).repeat_interleave(probes))
    copies = replace(copies, conv=tuple(torch.zeros_like(x) for x in copies.conv))
    old = missing_after_writing(memory, copies, tokens.repeat(rows, 1)).unflatten(0, (rows, probes))
    result: dict[str, Any] = {"new": standard, "new_missing": _numbers(new), "rows": []}
    for missing in old:
        needed = presentations_needed(missing, target)
        learns = probes > 0
        for own, base, curve in zip(needed, standard, missing, strict=True):
            limit = min(MAX_EFFORT * (base or PRESENTATIONS[-1]), PRESENTATIONS[-1])
            fell = bool(curve[1 + PRESENTATIONS.index(limit)] * FALL <= curve[0])
            learns &= fell or (own is not None and own <= limit)
        result["rows"].append({"needed": needed, "missing": _numbers(missing), "learns": learns})
    return result


@torch.no_grad()
def run_bounds(memory: NeuralMemory, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Read all streams side by side, up to the end of the last whole chunk, and then fresh tokens."""
    tokens -= tokens % CHUNK
    streams = make_streams(memory, seed)
    rows = len(streams)
    state = memory.init_state(rows)
    largest = {name: torch.zeros(rows) for name in ("weights", "momentum", "output")}
    finite = torch.ones(rows, dtype=torch.bool)
    seconds = []
    for start in range(0, tokens, BOUNDS_CALL):
        length = min(BOUNDS_CALL, tokens - start)
        x = torch.stack([stream(start, length) for stream in streams.values()])
        before = time.process_time()
        y, state = memory(x, state)
        seconds.append(time.process_time() - before)
        now = {name: norm.amax((0, 2)) for name, norm in state.norms().items()} | {"output": y.abs().amax((1, 2))}
        for name, value in now.items():
            finite &= value.isfinite()
            largest[name] = torch.maximum(largest[name], value)
    last = {f"last_{name}": norm.amax((0, 2)) for name, norm in state.norms().items()}
    learned = relearn(memory, state.detach(), seed)
    result: dict[str, Any] = {"streams": {}, "speed": _speed(seconds)}
    result |= {key: learned[key] for key in ("new", "new_missing")}
    result["tokens_per_second"] = round(rows * tokens / sum(seconds))
    for i, name in enumerate(streams):
        figures = {key: _numbers(value[i]) for key, value in (largest | last).items()}
        result["streams"][name] = {"finite": bool(finite[i]), **figures, **learned["rows"][i]}
    return result


@torch.no_grad()
def run_stream(memory: NeuralMemory, tokens: int, call: int) -> dict[str, Any]:
    """Read random tokens in calls of ``call``; growth is that of the process, after a warm-up, in MB."""
    generator = torch.Generator().manual_seed(0)
    state = memory.init_state(1)
    seconds, resident, base = [], 0, 0
    finite = True
    for index, start in enumerate(range(0, tokens, call)):
        x = torch.randn(1, min(call, tokens - start), memory.dim, generator=generator)
        before = time.process_time()
        y, state = memory(x, state)
        if x.shape[1] == call:
            seconds.append(time.process_time() - before)
        finite &= bool(y.isfinite().all())
        now = resident_bytes()
        base = now if index < WARM_UP else base
        resident = max(resident, now)
    return {
        "growth": (resident - base) / 1e6,
        "speed": _speed(seconds),
        "tokens_per_second": round(call / median(seconds)),
        "finite": finite,
    }


def _speed(seconds: list[float]) -> float:
    """Speed of the last tenth of the calls over that of the first, by the median call, after the warm-up."""
    seconds = seconds[WARM_UP:] or seconds
    tenth = max(1, len(seconds) // 10)
    return median(seconds[:tenth]) / median(seconds[-tenth:])


def _numbers(x: Tensor) -> Any:
    """JSON has no NaN and no infinity: those become text."""
    if x.ndim:
        return [_numbers(y) for y in x]
    return float(x) if bool(x.isfinite()) else str(float(x))


# Runs, files and tables.


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """One run, in this process."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    kind, *setting, mode, depth = job["run"].split("-")
    if kind == "bounds":
        found = run_bounds(make_memory(setting[0], mode, int(depth)), job["tokens"])
    else:
        torch.manual_seed(0)
        memory = NeuralMemory(256, heads=4, depth=int(depth), mode=mode)
        tokens, call = (job["tokens"], job["call"]) if kind == "stream" else (job["decode_tokens"], 1)
        found = {"read": tokens, **run_stream(memory, tokens, call)}
    return {**job, **found, "seconds": round(time.perf_counter() - start, 1)}


def _kept(path: Path, job: dict[str, Any]) -> dict[str, Any] | None:
    """The finished run of a file, if it was made with the same settings."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if all(found.get(name) == value for name, value in job.items()) else None


def run_stream_benchmark(
    settings: StreamBenchmarkSettings, progress: Progress = silent, out: Path | None = None
) -> dict[str, Any]:
    """Run everything that the settings ask for; returns the report, a dict that is ready for JSON.

    Args:
        out: folder where finished runs are kept, each as a file; None: they are not.
    """
    report = new_report("stream", settings, threads=1)
    chosen = settings.only or RUNS
    runs = []
    for index, name in enumerate(chosen):
        progress(index, len(chosen), name)
        job = {"run": name, "version": report["version"], **asdict(settings)}
        del job["only"]
        path = None if out is None else out / "runs" / f"{name}.json"
        done = None if path is None else _kept(path, job)
        if done is None:  # what one run leaves in the allocator is not the next one's growth
            done = in_fresh_process(_run, job, threads=1)
            if "error" in done:
                report["notices"].append(f"{name} failed: {done['error']}.")
                continue
            if path is not None:
                write_json(path, done)
        runs.append(done)
    progress(len(chosen), len(chosen), "done")
    return report | {"runs": runs}


def sections(report: dict[str, Any]) -> list[Section]:
    """What is read at a constant cost, then what stays bounded, as text and tables."""
    flows, bounds = _flows(report), _bounds(report)
    made = []
    if flows:
        words = (
            f"A run passes if the process grows by less than {MAX_GROWTH:.0f} MB after {WARM_UP} calls, and if the "
            f"last tenth of the calls is at least {MIN_SPEED} times as fast as the first (last / first)."
        )
        header = ["run", "tokens", "growth, MB", "last / first", "tokens/s", "passes"]
        rows = [
            [r["run"], f"{r['read']:,}", f"{r['growth']:.1f}", f"{r['speed']:.2f}", f"{r['tokens_per_second']:,}",
             _verdict(r["growth"] < MAX_GROWTH and r["speed"] >= MIN_SPEED and r["finite"])]
            for r in flows
        ]  # fmt: skip
        made.append(Section(FLOWS, [words], [Table(header, rows)]))
    if bounds:
        words = (
            f"After each stream, {PROBES} fresh tokens are shown until a tenth of a value is missing (or twice what "
            "a new memory misses in the end). A stream passes if everything is finite and if no token needs more than "
            f"{MAX_EFFORT} times as many presentations as in a new memory, or if its loss has fallen {FALL} times by "
            "then. Weights, momentum, output: largest norms. Missing: before the first presentation, the worst token."
        )
        header = ["stream", "passes", "weights", "momentum", "output", "missing", "needed"]
        tables = [
            Table(
                header,
                _bounds_rows(r),
                f"{r['run'].removeprefix('bounds-')}: a new memory needs {_counts(r['new'])}; last / first: "
                f"{r['speed']:.2f}.",
            )
            for r in bounds
        ]
        made.append(Section(BOUNDS, [words], tables))
    return [*made, about(report)]


def _flows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for r in report["runs"] if "growth" in r]


def _bounds(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for r in report["runs"] if "streams" in r]


def _bounds_rows(run: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            _verdict(s["finite"] and s["learns"]),
            *(_figure(s[key]) for key in ("weights", "momentum", "output")),
            _figure(_worst(s["missing"])),
            _counts(s["needed"]),
        ]
        for name, s in run["streams"].items()
    ]


def _verdict(passes: bool) -> str:
    return "yes" if passes else "NO"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _worst(missing: list[list[float | str]]) -> float | str:
    return max((row[0] for row in missing), key=lambda value: math.inf if isinstance(value, str) else value, default="")


def _counts(counts: list[int | None]) -> str:
    return ", ".join("never" if count is None else str(count) for count in counts)


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """Growth of the process, and the effort of learning after the streams, by the title of the section."""
    made = {}
    if flows := _flows(report):
        title = f"Growth of the process ({MAX_GROWTH:.0f} MB are allowed)"
        bars = {"growth": [r["growth"] for r in flows]}
        made[FLOWS] = [bar_figure("stream-growth", title, [r["run"] for r in flows], bars, "", "MB")]
    if bounds := _bounds(report):
        title = "Presentations to learn a fresh token after the worst stream, over those of a new memory"
        words = [r["run"].removeprefix("bounds-") for r in bounds]
        bars = {"effort": list(map(_effort, bounds))}
        made[BOUNDS] = [bar_figure("stream-learning", title, words, bars, "", "times as many")]
    return made


def _effort(run: dict[str, Any]) -> float | None:
    """The largest ratio of presentations; None: a token was not learned."""
    pairs = [pair for s in run["streams"].values() for pair in zip(s["needed"], run["new"], strict=True)]
    if not pairs or any(own is None for own, _ in pairs):
        return None
    return float(max(own / (base or PRESENTATIONS[-1]) for own, base in pairs))
