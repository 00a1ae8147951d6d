"""Speed and peak memory of whole language models against length: ours, those of transformers, and titans-pytorch's MAC.

    titans bench model --out runs/bench-model

Every contender has the same width and about the same number of parameters, and does the same work: training (forward
and backward of the next-token loss), prefill (reading a prompt into a cache), decoding token by token far into a
sequence, and, if asked for, training through torch.compile. Timings are interleaved: each round runs every contender
once, so that a busy minute hits all of them. Peak memory is measured in a fresh process for every figure. Nothing is
extrapolated: where a length did not run, there is no figure, and a sentence says why.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.bench.settings import ModelBenchmarkSettings
from titans.bench.timing import (
    REFERENCE,
    REFERENCE_MAX_STEP,
    about,
    available_memory,
    choose_names,
    dense,
    in_fresh_process,
    limit_memory,
    mebibytes_text,
    milliseconds_text,
    new_report,
    over,
    peak_growth,
    ratios,
    reference_memory_options,
    reference_version,
    settled_bytes,
    speed_figure,
    times_text,
    timing,
)
from titans.layers.record import memories_of
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent

QUICK: dict[str, Any] = {
    "dim": 64, "layers": 2, "window": 32, "segment": 32, "lengths": (64, 128), "decode_positions": (32, 64),
    "decode_tokens": 4, "repeats": 1, "peak_memory": False,
}  # fmt: skip
TRAIN, PREFILL, DECODE, COMPILE = "train", "prefill", "decode", "compile"
MEASURES = (TRAIN, PREFILL, DECODE, COMPILE)
OURS = ("lmm", "mac", "mag", "mal")
BASELINE = "transformer++"
REFERENCE_MAC = "titans-pytorch-mac"
REFERENCE_STEP = 16  # tokens that titans-pytorch writes with one step
REFERENCE_BATCH = 64  # tokens that take their gradient at the same weights in titans-pytorch
CHUNK_SIZE = 64  # of the chunked rule, unless given
PIECE = 1024  # tokens that are read at a time on the way to a far position
START_SECONDS = 60  # what a fresh process may take before it gets to work
MEMORY_SHARE = 0.75  # of what is free at the start, the most that a contender may take unless told otherwise


@dataclass(frozen=True)
class Subject:
    """A contender made ready to run.

    Attributes:
        logits: of all tokens, (batch, time) -> (batch, time, vocab_size), for training.
        read: tokens and a cache (None at the start) -> the logits of the last token, and the cache after it.
        whole_prompt: a prompt must be read in one call, and after it one token per call.
    """

    model: nn.Module
    layers: int
    logits: Callable[[Tensor], Tensor]
    read: Callable[[Tensor, Any], tuple[Tensor, Any]]
    whole_prompt: bool = False

    @cached_property
    def compiled(self) -> Subject:
        """The same, trained through torch.compile, with a program for every length."""
        return dataclasses.replace(self, logits=torch.compile(self.logits, dynamic=False))

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def engine(self) -> str | None:
        """What runs the rule of its memories, None without one of ours."""
        memories = memories_of(self.model)
        return memories[0].explain() if memories else None


@dataclass(frozen=True)
class Contender:
    """One language model: what it is, how it is built, and how its memory, if it has one, learns at test time."""

    name: str
    package: str
    what: str
    build: Callable[[ModelBenchmarkSettings], Subject]
    rule: Callable[[ModelBenchmarkSettings], str | None] = lambda settings: None
    tokens_per_step: int | None = None
    notes: tuple[str, ...] = ()


def _config(name: str, settings: ModelBenchmarkSettings, **fields: Any) -> Any:
    from titans.models import config_for

    fields |= {"vocab_size": settings.vocab_size, "hidden_size": settings.dim}
    fields.setdefault("num_hidden_layers", settings.layers)
    heads, width = settings.heads, settings.head_width
    if name == "mamba2":
        fields |= {"num_heads": 2 * heads, "head_dim": width}
    else:
        fields["num_attention_heads"] = heads
    if name == "gated-deltanet-hybrid":
        fields |= {"num_key_value_heads": heads, "linear_num_key_heads": heads, "linear_num_value_heads": heads}
        fields |= {"head_dim": width, "linear_key_head_dim": width, "linear_value_head_dim": width}
        fields["full_attention_interval"] = min(4, settings.layers)
    if name in OURS:
        fields |= {
            "segment_size": settings.segment,
            "window_size": settings.window,
            "num_persistent_tokens": settings.persistent,
            "memory_heads": heads,
            "memory_mode": settings.memory_mode,
            "memory_depth": settings.memory_depth,
            "memory_chunk_size": settings.chunk_size,
        }
    return config_for(name, "10m", **fields)  # whose own figures are all replaced


def target_parameters(settings: ModelBenchmarkSettings) -> int:
    """How many parameters the models are fitted to."""
    from titans.models import count_parameters

    return settings.parameters or count_parameters(_config("mac", settings, intermediate_size=None))


def _build_transformers(settings: ModelBenchmarkSettings, name: str) -> Subject:
    from transformers import AutoModelForCausalLM

    from titans.models.baselines import count_parameters, fit

    target = target_parameters(settings)
    if name == "mamba2":  # no feed-forward layers: it takes as many layers as fit, and a state that makes up the rest

        def make(layers: int, state: int) -> Any:
            return _config(name, settings, num_hidden_layers=layers, state_size=state)

        usual = 2 * settings.head_width
        layers = fit(lambda n: count_parameters(make(n, usual)), target, step=1)
        config = make(layers, fit(lambda n: count_parameters(make(layers, n)), target))
    else:
        width = fit(lambda n: count_parameters(_config(name, settings, intermediate_size=n)), target)
        config = _config(name, settings, intermediate_size=width)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)

    def logits(ids: Tensor) -> Tensor:
        y: Tensor = model(input_ids=ids, use_cache=False).logits
        return y

    def read(ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        key = "cache_params" if name == "mamba2" else "past_key_values"
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{key: cache})
        return output.logits, output[key]

    return Subject(model, config.num_hidden_layers, logits, read)


def _build_reference(settings: ModelBenchmarkSettings) -> Subject:
    from titans_pytorch import MemoryAsContextTransformer
    from titans_pytorch.memory_models import MemoryMLP

    from titans.models.baselines import fit

    def make(width: int) -> Any:
        torch.manual_seed(0)
        return MemoryAsContextTransformer(
            num_tokens=settings.vocab_size,
            dim=settings.dim,
            depth=settings.layers,
            heads=settings.heads,
            dim_head=settings.head_width,
            segment_len=settings.segment,
            num_persist_mem_tokens=settings.persistent,
            ff_mult=1.5 * (width + 0.5) / settings.dim,  # which it multiplies by 2/3 and rounds down
            num_residual_streams=1,
            neural_memory_segment_len=REFERENCE_STEP,
            neural_memory_batch_size=REFERENCE_BATCH,
            neural_memory_model=MemoryMLP(settings.head_width, depth=settings.memory_depth, expansion_factor=1.0),
            neural_memory_kwargs=reference_memory_options(settings.heads, settings.head_width),
        )

    model = make(fit(lambda n: sum(p.numel() for p in make(n).parameters()), target_parameters(settings)))
    positions = model.axial_pos_emb

    def read(ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        if cache is None:
            logits, state = model(ids, return_cache=True)
            # As its own sample() does, the factors of the positions are made once for all tokens to come.
            room = ids.shape[1] + settings.decode_tokens * (settings.repeats + 1)
            shape = positions.maybe_derive_outer_dim(room, (REFERENCE_STEP,))
            return logits[:, -1:], (ids, state, positions(shape, return_factorized=True))
        seen, state, factors = cache
        seen = torch.cat((seen, ids), dim=1)
        logits, state = model(seen, cache=state, return_cache=True, factorized_pos_emb=factors)
        return logits, (seen, state, factors)

    return Subject(model, settings.layers, model, read, whole_prompt=True)


def _our_rule(settings: ModelBenchmarkSettings) -> str:
    if settings.memory_mode == "exact":
        where = "at the weights of the token before (the sequential rule, in parallel)"
    else:
        where = f"at the start of the token's chunk of {settings.chunk_size or CHUNK_SIZE}"
    return f"one step per token, gradient {where}, every token reads after its own write"


def _ours(name: str, what: str) -> Contender:
    build = partial(_build_transformers, name=name)
    return Contender(name, "titan-memory", what, build, _our_rule, tokens_per_step=1)


def _theirs(name: str, what: str, *notes: str) -> Contender:
    return Contender(name, "transformers", what, partial(_build_transformers, name=name), notes=notes)


_REFERENCE_RULE = (
    f"one step per {REFERENCE_STEP} tokens, gradient at weights that are renewed every {REFERENCE_BATCH} tokens, "
    f"reads use the weights before the {REFERENCE_STEP}"
)
_NO_KERNEL = "the PyTorch code of transformers: its faster kernels need a GPU"

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        _ours("lmm", "memory alone"),
        _ours("mac", "memory as a context of segment attention"),
        _ours("mag", "memory as a gate of sliding-window attention"),
        _ours("mal", "memory as a layer before sliding-window attention"),
        _theirs(BASELINE, "Llama: full causal attention (SDPA), RoPE, SwiGLU"),
        _theirs(
            "mamba2",
            "a state space with one decay per head",
            _NO_KERNEL,
            "more layers than the others: it has no feed-forward layers",
        ),
        _theirs(
            "gated-deltanet-hybrid",
            "Qwen3-Next: Gated DeltaNet, and full attention (SDPA) in every fourth layer",
            _NO_KERNEL,
        ),
        Contender(
            REFERENCE_MAC,
            REFERENCE,
            "MemoryAsContextTransformer: a memory, then segment attention",
            _build_reference,
            lambda settings: _REFERENCE_RULE,
            tokens_per_step=REFERENCE_STEP,
            notes=(
                f"neural_memory_segment_len={REFERENCE_STEP}, neural_memory_batch_size={REFERENCE_BATCH}",
                "memory, segment and persistent tokens of the sizes of ours",
                "one residual stream (its default of four is slower), no long-term memory tokens",
                f"step gate at most {REFERENCE_MAX_STEP} (its default of 1 gives NaN on random tokens)",
                "prefill computes the logits of all tokens, a prompt is read in one call",
                "its cached decoding is timed as it is, though past one segment it is not what it computes uncached",
            ),
        ),
    )
}


def choose_contenders(settings: ModelBenchmarkSettings) -> tuple[list[Contender], list[str]]:
    """The contenders that will run, and one sentence for everything worth knowing about the choice."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("the models need transformers: pip install 'titan-memory[models]'")
    packages = {name: contender.package for name, contender in CONTENDERS.items()}
    names, notices = choose_names(packages, settings.only, reference_version())
    return [CONTENDERS[name] for name in names], notices


def make_ids(settings: ModelBenchmarkSettings, length: int) -> Tensor:
    """Random tokens, (batch, length), the same for every contender."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(settings.vocab_size, (settings.batch, length), generator=generator)


def train_step(subject: Subject, ids: Tensor) -> Tensor:
    """Forward and backward of the next-token loss, which is returned; the gradients stay in the parameters."""
    subject.model.train()
    logits = subject.logits(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach()


@torch.no_grad()
def prefill(subject: Subject, ids: Tensor) -> tuple[Tensor, Any]:
    """Read a prompt in one call: the logits of its last token, and the cache."""
    subject.model.eval()
    return subject.read(ids, None)


@torch.no_grad()
def reach(subject: Subject, ids: Tensor, max_seconds: float = math.inf) -> tuple[Tensor, Any]:
    """As ``prefill``, in pieces where the model can; a TimeoutError if that takes longer than ``max_seconds``."""
    subject.model.eval()
    start = time.perf_counter()
    cache = None
    for piece in ids.split(ids.shape[1] if subject.whole_prompt else PIECE, dim=1):
        if time.perf_counter() - start > max_seconds:
            raise TimeoutError(f"reading up to there takes more than {max_seconds:.0f} s (max_seconds)")
        logits, cache = subject.read(piece, cache)
    return logits, cache


@torch.no_grad()
def decode(subject: Subject, logits: Tensor, cache: Any, tokens: int) -> tuple[Tensor, Any]:
    """Decode ``tokens`` tokens greedily after the last one's logits: the logits after them, and the cache."""
    for _ in range(tokens):
        logits, cache = subject.read(logits[:, -1].argmax(dim=-1, keepdim=True), cache)
    return logits, cache


def _check_finite(y: Tensor) -> None:
    if not y.isfinite().all():
        raise FloatingPointError("the output is not finite")


def _time_call(subject: Subject, measure: str, ids: Tensor) -> float:
    """Seconds of one training step or one prefill."""
    if measure == COMPILE:
        subject = subject.compiled
    start = time.perf_counter()
    y = prefill(subject, ids)[0] if measure == PREFILL else train_step(subject, ids)
    seconds = time.perf_counter() - start
    subject.model.zero_grad()
    _check_finite(y)
    return seconds


def _warm_up(subject: Subject, settings: ModelBenchmarkSettings, measure: str, length: int) -> None:
    """Libraries, thread pools and autograd come alive at a short length, programs at their own, before any timing."""
    ids = make_ids(settings, length if measure == COMPILE else min(length, 2 * settings.segment))
    if measure == DECODE:
        decode(subject, *reach(subject, ids), tokens=2)
    else:
        _time_call(subject, measure, ids)


def _graph_breaks() -> int:
    """How often torch.compile has left its graph in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _probe_worker(job: dict[str, Any]) -> dict[str, Any]:
    settings = ModelBenchmarkSettings(**job["settings"])
    measure, length = job["measure"], job["length"]
    torch.set_num_threads(settings.threads)
    _quiet_transformers()
    subject = CONTENDERS[job["contender"]].build(settings)
    _warm_up(subject, settings, measure, length)
    ids = make_ids(settings, length)
    if job["max_memory"] is not None:
        limit_memory(job["max_memory"])
    before, start = settled_bytes(), time.perf_counter()
    try:
        if measure == DECODE:
            logits, cache = reach(subject, ids, settings.max_seconds)
            seconds = time.perf_counter() - start
            growth, method = peak_growth(lambda: decode(subject, logits, cache, settings.decode_tokens), before)
        else:
            growth, method = peak_growth(lambda: _time_call(subject, measure, ids))
            seconds = time.perf_counter() - start
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            limit = job["max_memory"]
            room = "there is" if limit is None else f"{limit / 2**30:.2g} GiB (max_memory)"
            return {"error": f"it needs more than {room}"}
        raise
    except (FloatingPointError, TimeoutError) as error:
        return {"error": str(error)}
    return {"bytes": growth, "method": method, "seconds": seconds}


def probe(
    settings: ModelBenchmarkSettings, name: str, measure: str, length: int, max_memory: int | None = None
) -> dict[str, Any]:
    """One measurement in a fresh process: {"bytes", "method", "seconds"}, or {"error"} if it failed.

    bytes: peak growth of resident memory during the call; for decoding, growth since before the prompt was read, so
        that the cache counts and the working memory of the prompt does not.
    seconds: of the call, or of reading up to the position where decoding starts.

    Args:
        max_memory: bytes that it may take.
    """
    job = {"settings": dataclasses.asdict(settings), "contender": name, "measure": measure, "length": length}
    allowed = START_SECONDS + settings.max_seconds
    answer = in_fresh_process(_probe_worker, job | {"max_memory": max_memory}, settings.threads, allowed)
    if answer.get("seconds", 0) > settings.max_seconds:
        return {"error": f"it took {answer['seconds']:.0f} s, more than {settings.max_seconds:.0f} s (max_seconds)"}
    return answer


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()  # the notes say that kernels for a GPU are missing


Key = tuple[str, str, int]  # contender, measure, length


class _Run:
    """A benchmark under way: how far it is, how long things are known to take, what was left out and why."""

    def __init__(self, settings: ModelBenchmarkSettings, progress: Progress) -> None:
        self.settings, self.progress = settings, progress
        self.contenders, self.notices = choose_contenders(settings)
        self.places = [(m, n) for m in MEASURES if m in settings.measures for n in settings.lengths_of(m)]
        self.left_out: dict[tuple[str, str], int] = {}
        self.known: dict[tuple[str, str], tuple[int, float]] = {}
        self.graph_breaks: dict[Key, int] = {}
        ways = sum(measure == DECODE for measure, _ in self.places)
        probes = settings.peak_memory * sum(measure != COMPILE for measure, _ in self.places)
        self.total = len(self.contenders) * (len(self.places) * settings.repeats + probes + ways)
        self.done = 0
        self.subjects: dict[str, Subject] = {}

    def step(self, what: str, contender: Contender, measure: str, length: int) -> bool:
        """Report the next step; False if it is left out."""
        self.progress(self.done, self.total, f"{what} {contender.name}, {measure}, {length:,} tokens")
        self.done += 1
        return not self.is_out(contender, measure, length)

    def is_out(self, contender: Contender, measure: str, length: int) -> bool:
        """Whether the contender failed at this length or a shorter one, or is sure to take too long."""
        if length >= self.left_out.get((contender.name, measure), length + 1):
            return True
        if measure == DECODE and contender.package != REFERENCE:
            return False  # reads the prompt in pieces, and stops by itself
        shorter, seconds = self.known.get((contender.name, PREFILL if measure == DECODE else measure), (length, 0.0))
        seconds *= length / shorter
        if seconds > self.settings.max_seconds:
            took = "it took" if shorter == length else f"judging by {shorter} tokens it would take at least"
            why = f"{took} {seconds:.0f} s, more than {self.settings.max_seconds:.0f} s (max_seconds)"
            self.leave_out(contender, measure, length, why)
            return True
        return False

    def leave_out(self, contender: Contender, measure: str, length: int, why: object) -> None:
        self.left_out[contender.name, measure] = length
        place = f"at position {length}" if measure == DECODE else f"at {length} tokens"
        self.notices.append(f"{contender.name}, {measure}, is not measured {place} and beyond: {why}.")

    def measure_memory(self, max_memory: int | None) -> dict[Key, dict[str, Any]]:
        peaks = {}
        for measure, length in self.places:
            if measure == COMPILE:  # every process would compile again
                continue
            for contender in self.contenders:
                if not self.step("memory of", contender, measure, length):
                    continue
                answer = probe(self.settings, contender.name, measure, length, max_memory)
                if "error" in answer:
                    self.leave_out(contender, measure, length, answer["error"])
                else:
                    if measure != DECODE:
                        self.known[contender.name, measure] = length, answer["seconds"]
                    peaks[contender.name, measure, length] = answer
        return peaks

    def warm_up(self, measure: str, length: int) -> None:
        for contender in self.contenders:
            if not self.is_out(contender, measure, length):
                before = _graph_breaks()
                try:
                    _warm_up(self.subjects[contender.name], self.settings, measure, length)
                except FloatingPointError as error:
                    self.leave_out(contender, measure, length, error)
                if measure == COMPILE:
                    self.graph_breaks[contender.name, measure, length] = _graph_breaks() - before

    def rounds(self, places: Sequence[tuple[str, int]], call: Callable[[Key], float]) -> dict[Key, list[float]]:
        """Seconds of ``call`` at every place; every round runs every contender and starts with another one."""
        seconds: dict[Key, list[float]] = {}
        for number in range(self.settings.repeats):
            gc.collect()
            turn = number % len(self.contenders)
            for contender in self.contenders[turn:] + self.contenders[:turn]:
                for measure, length in places:
                    if not self.step(f"round {number + 1}:", contender, measure, length):
                        continue
                    key = contender.name, measure, length
                    try:
                        taken = call(key)
                    except FloatingPointError as error:
                        self.leave_out(contender, measure, length, error)
                        continue
                    seconds.setdefault(key, []).append(taken)
                    if measure != DECODE:
                        self.known[contender.name, measure] = length, min(seconds[key])
        return seconds

    def time_calls(self) -> dict[Key, list[float]]:
        """Seconds of every round of training and prefill."""
        seconds: dict[Key, list[float]] = {}
        for length in self.settings.lengths:
            ids = make_ids(self.settings, length)
            places = [place for place in self.places if place[1] == length and place[0] != DECODE]
            for measure, _ in places:
                self.warm_up(measure, length)

            def call(key: Key, ids: Tensor = ids) -> float:
                return _time_call(self.subjects[key[0]], key[1], ids)

            seconds |= self.rounds(places, call)
        return seconds

    def time_decoding(self) -> dict[Key, list[float]]:
        """Seconds of every round of decoding, all positions in the same rounds."""
        settings = self.settings
        places = [place for place in self.places if place[0] == DECODE]
        standing: dict[Key, tuple[Tensor, Any]] = {}
        for measure, position in places:
            for contender in self.contenders:
                subject = self.subjects[contender.name]
                if not self.step("reading for", contender, measure, position):
                    continue
                try:
                    at = reach(subject, make_ids(settings, position), settings.max_seconds)
                    standing[contender.name, measure, position] = decode(subject, *at, tokens=2)
                except TimeoutError as error:
                    self.leave_out(contender, measure, position, error)

        def call(key: Key) -> float:
            start = time.perf_counter()
            standing[key] = decode(self.subjects[key[0]], *standing[key], tokens=settings.decode_tokens)
            seconds = time.perf_counter() - start
            _check_finite(standing[key][0])
            return seconds

        return self.rounds(places, call)


def run_model_benchmark(settings: ModelBenchmarkSettings, progress: Progress = silent) -> dict[str, Any]:
    """Measure everything that the settings ask for; returns the report, a dict that is ready for JSON."""
    run = _Run(settings, progress)
    report = new_report("model", settings, settings.threads)
    free = available_memory()
    max_memory = None if free is None else int(MEMORY_SHARE * free)
    if settings.max_memory is not None:
        max_memory = int(settings.max_memory * 2**30)
    _quiet_transformers()

    # Memory comes first, so that a length that does not fit ends a child process and not this one.
    peaks = run.measure_memory(max_memory) if settings.peak_memory else {}
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        run.subjects |= {contender.name: contender.build(settings) for contender in run.contenders}
        seconds = run.time_calls() | run.time_decoding()
    finally:
        torch.set_num_threads(previous_threads)
    progress(run.total, run.total, "done")

    results = []
    for key, times in seconds.items():
        name, measure, length = key
        tokens = settings.batch * (settings.decode_tokens if measure == DECODE else length)
        peak = peaks.get(key, {})
        results.append(
            {
                "contender": name,
                "measure": measure,
                "length": length,
                **timing(times, tokens),
                "peak_growth_bytes": peak.get("bytes"),
                "peak_method": peak.get("method"),
                "graph_breaks": run.graph_breaks.get(key),
            }
        )
    results.sort(key=lambda r: (MEASURES.index(r["measure"]), r["length"], list(CONTENDERS).index(r["contender"])))
    rules = {contender.name: contender.rule(settings) for contender in run.contenders}
    return report | {
        "versions": {"transformers": importlib.metadata.version("transformers"), REFERENCE: reference_version()},
        "target_parameters": target_parameters(settings),
        "max_memory_bytes": max_memory,
        "contenders": [
            {
                "name": c.name,
                "package": c.package,
                "what": c.what,
                "rule": rules[c.name],
                "tokens_per_step": c.tokens_per_step,
                "notes": list(c.notes),
                "parameters": run.subjects[c.name].parameters,
                "layers": run.subjects[c.name].layers,
                "engine": run.subjects[c.name].engine,
            }
            for c in run.contenders
        ],
        "results": results,
        "ratios": [
            pair | {"rule": rules[pair["contender"]], "against_rule": rules[pair["against"]]}
            for pair in ratios(results, OURS, (BASELINE, REFERENCE_MAC), ("measure", "length"))
        ],
        "crossings": find_crossings(results),
        "decoding": _decoding(results),
        "left_out": [
            {"contender": name, "measure": measure, "from_length": length}
            for (name, measure), length in run.left_out.items()
        ],
        "notices": run.notices + report["notices"],
    }


def find_crossings(results: list[dict[str, Any]], against: str = BASELINE) -> list[dict[str, Any]]:
    """For each of our models, the length from which it trains faster than ``against``, among the lengths both ran.

    "length" lies between the last length where it was slower and the first from which on it was faster, on a straight
    line between the two in logarithms: the shortest length if it was never slower, None if it is slower at the longest.
    """
    speeds: dict[str, dict[int, float]] = {}
    for r in results:
        if r["measure"] == TRAIN:
            speeds.setdefault(r["contender"], {})[r["length"]] = r["tokens_per_second"]
    crossings = []
    for name in OURS:
        lengths = sorted(set(speeds.get(name, {})) & set(speeds.get(against, {})))
        if not lengths:
            continue
        gain = {n: math.log(speeds[name][n] / speeds[against][n]) for n in lengths}
        length: float | None = float(lengths[0])
        text = f"at every length measured, from {lengths[0]:,} tokens on"
        if gain[lengths[-1]] <= 0:
            length, text = None, f"not up to {lengths[-1]:,} tokens, the longest that both ran"
        else:
            for low, high in pairwise(lengths):
                if gain[low] <= 0 < gain[high]:
                    share = gain[low] / (gain[low] - gain[high])
                    length = low * (high / low) ** share
                    text = f"from about {length:,.0f} tokens on (between {low:,} and {high:,})"
        crossings.append({"contender": name, "against": against, "length": length, "text": text})
    return crossings


def _decoding(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each contender, speed and memory of decoding at each position over those at its first."""
    rows = []
    for name in dict.fromkeys(r["contender"] for r in results):
        runs = [r for r in results if r["contender"] == name and r["measure"] == DECODE]
        for run in runs[1:]:
            rows.append(
                {
                    "contender": name,
                    "from_position": runs[0]["length"],
                    "to_position": run["length"],
                    "speed_kept": run["tokens_per_second"] / runs[0]["tokens_per_second"],
                    "memory_grown": over(run["peak_growth_bytes"], runs[0]["peak_growth_bytes"]),
                }
            )
    return rows


TITLES = {
    TRAIN: ("Training", "Forward and backward of the next-token loss."),
    PREFILL: ("Prefill", "A prompt read into a cache."),
    DECODE: ("Decoding", "One token at a time, after so many tokens."),
    COMPILE: ("Training, compiled", "The same as training, through torch.compile."),
}


def sections(report: dict[str, Any]) -> list[Section]:
    """The models, their speed and memory, and where the curves cross, as text and tables."""
    speeds = {(r["contender"], r["against"], r["measure"], r["length"]): r["speed"] for r in report["ratios"]}
    kept = {(r["contender"], r["to_position"]): r["speed_kept"] for r in report["decoding"]}
    eager = {(r["contender"], r["length"]): r["tokens_per_second"] for r in report["results"] if r["measure"] == TRAIN}
    made = []
    for measure in MEASURES:
        rows = []
        for r in (r for r in report["results"] if r["measure"] == measure):
            name, length, speed = r["contender"], r["length"], r["tokens_per_second"]
            row = [name, f"{length:,}", f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"]
            if measure == DECODE:
                tokens = report["settings"]["decode_tokens"]
                row += [milliseconds_text(r["best_seconds"] / tokens), times_text(kept.get((name, length)))]
            else:
                row.append(milliseconds_text(r["median_seconds"]))
            if measure == COMPILE:
                row += [times_text(over(speed, eager.get((name, length)))), str(r["graph_breaks"])]
            row += [times_text(speeds.get((name, other, measure, length))) for other in (BASELINE, REFERENCE_MAC)]
            rows.append([*row, mebibytes_text(r["peak_growth_bytes"])])
        if rows:
            middle = ["ms/token", "kept"] if measure == DECODE else ["median, ms"]
            middle += ["/eager", "breaks"] if measure == COMPILE else []
            header = ["contender", "tokens", "tokens/s", *middle, "/Llama", "/t-p", "MiB"]
            title, caption = TITLES[measure]
            words = _crossing_words(report) if measure == TRAIN else []
            made.append(Section(title, words, [dense(header, rows, caption)]))
    rows = [[c["name"], c["what"], c["rule"] or "", "; ".join(c["notes"])] for c in report["contenders"]]
    return [*made, _legend(report), about(report, dense(["contender", "what it is", "update rule", "notes"], rows))]


def _crossing_words(report: dict[str, Any]) -> list[str]:
    if not report["crossings"]:
        return []
    found: dict[str, list[str]] = {}
    for each in report["crossings"]:
        found.setdefault(each["text"], []).append(each["contender"])
    texts = "; ".join(f"{', '.join(names)} {text}" for text, names in found.items())
    return [f"Faster in training than {report['crossings'][0]['against']}: {texts}."]


def _legend(report: dict[str, Any]) -> Section:
    """The models, and what the columns mean."""
    rows = [
        [c["name"], f"{c['parameters']:,}", str(c["layers"]), str(c["tokens_per_step"] or ""), c["engine"] or ""]
        for c in report["contenders"]
    ]
    words = (
        f"/Llama, /t-p: speed over {BASELINE} and over {REFERENCE_MAC}, whose rule takes one step per "
        f"{REFERENCE_STEP} tokens where ours takes one per token. tokens/s: of the best round; median: of all rounds. "
        "kept: speed over that at the first position. /eager: speed over training without torch.compile; breaks: how "
        "often a compiled model leaves its graph. MiB: peak growth of resident memory during the call; for decoding, "
        "with the cache and without the work of reading the prompt."
    )
    return Section("Models", [words], [Table(["contender", "parameters", "layers", "tokens per step", "engine"], rows)])


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """Tokens per second against length, one picture per measure, by the title of the section it belongs to."""
    made = {}
    for measure in MEASURES:
        runs = [r for r in report["results"] if r["measure"] == measure]
        if not runs:
            continue
        speeds: dict[str, dict[int, float]] = {c["name"]: {} for c in report["contenders"]}
        for r in runs:
            speeds[r["contender"]][r["length"]] = r["tokens_per_second"]
        places = report["settings"]["decode_positions" if measure == DECODE else "lengths"]
        axis = "tokens before" if measure == DECODE else "tokens in the sequence"
        title = TITLES[measure][0]
        made[title] = [speed_figure(f"model-{measure}", title, speeds, places, axis)]
    return made
