"""Floating-point operations of a memory and of training a model, by a formula.

It counts the products of matrices and the convolutions, a multiplication and an addition as two; norms, activations
and gates are left out. It is for the chunked rule in PyTorch's own operations, as a GPU runs it;
``tests/bench/test_flops.py`` holds it to PyTorch's count of what really runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from titans.bench.settings import FlopsSettings
from titans.bench.timing import about, bar_figure, new_report
from titans.layers.attention import PIECE, PIECE_WINDOWS
from titans.ops.attention import MIN_BLOCK, SEGMENT_BLOCK
from titans.ops.dual import CACHED_NUMBERS, GRAPH_NUMBERS
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent

if TYPE_CHECKING:
    from titans.models import TitansConfig

NAMES = ("lmm", "mac", "mag", "mal", "sliding-window")
PARTS = ("linear", "head", "attention", "memory", "convolution")
FLOAT32 = ("memory",)  # these products stay in float32 under bf16
HOUR, DAY = 3600, 86_400


@dataclass(frozen=True)
class Gpu:
    """A GPU and the FLOP/s of dense products at its peak, according to its maker."""

    name: str
    bf16: float
    tf32: float
    float32: float


GPUS = (Gpu("A100", 312e12, 156e12, 19.5e12), Gpu("H100", 989e12, 494e12, 67e12))
# what a plan assumes
SHARES = (0.2, 0.3, 0.4)  # of the peak that products reach, each in its own precision
PRICES = (2.0, 3.0)  # dollars per GPU hour
COUNTS = (8, 64)  # GPUs
DAYS = (3, 7)


@dataclass(frozen=True)
class Flops:
    """Operations of one part of a model.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, without what it recomputes.
        recomputed: forward operations that the backward pass repeats instead of keeping their results.
    """

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        """Everything that runs."""
        return self.forward + self.backward + self.recomputed

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward, self.recomputed + other.recomputed)

    def __mul__(self, times: int) -> Flops:
        return Flops(self.forward * times, self.backward * times, self.recomputed * times)


@dataclass(frozen=True)
class MemoryShape:
    """What the operations of a neural memory under the chunked rule depend on; the defaults are ``NeuralMemory``'s.

    Attributes:
        dim: width of the model around the memory.
        heads: memories side by side.
        widths: of each memory's network: its input, its hidden layers, its output.
        chunk_size: tokens that share one gradient anchor.
        gates: how many of theta, alpha and eta are computed from each token.
        forget_to: ``"start"``, ``"zero"``, or None without forgetting.
        checkpoint_every: the backward pass keeps the state at every so many chunks; None: chosen by size.
    """

    dim: int
    heads: int
    widths: tuple[int, ...]
    chunk_size: int = 64
    gates: int = 3
    conv_kernel: int = 4
    momentum: bool = True
    forget_to: str | None = "start"
    bounded: bool = True
    first_order: bool = False
    checkpoint_every: int | None = None

    @property
    def inner(self) -> int:
        """Width of the queries, keys and values of all heads."""
        return self.heads * self.widths[0]

    @property
    def weights(self) -> list[int]:
        """How many weights each layer of one memory has."""
        return [a * b for a, b in pairwise(self.widths)]


def training_flops(config: TitansConfig, length: int, batch: int = 1, checkpointing: bool = False) -> dict[str, Flops]:
    """Operations of a forward and backward pass over (batch, length) tokens, by part of the model.

    Args:
        config: a model whose memory runs under the chunked rule.
        length: of a sequence, a multiple of the chunk.
        batch: sequences at a time; decides how often the memory keeps its state, and so what is recomputed.
        checkpointing: whether every layer keeps only its input and recomputes the rest.
    """
    _check(config, length, batch)
    found = dict.fromkeys(PARTS, Flops()) | {"head": _product(batch * length, config.hidden_size, config.vocab_size)}
    assert config.intermediate_size is not None
    # recomputation stops before the last product of the feed-forward layer, whose output nobody needs
    last = 2 * batch * length * config.hidden_size * config.intermediate_size
    attending = len(config.attending)
    for attends, layers in ((True, attending), (False, config.num_hidden_layers - attending)):
        for part, flops in _layer(config, length, batch, attends).items() if layers else ():
            again = flops.forward - (last if part == "linear" else 0) if checkpointing else 0
            found[part] += (flops + Flops(recomputed=again)) * layers
    return found


def _check(config: TitansConfig, length: int, batch: int) -> None:
    if length < 1 or batch < 1:
        raise ValueError(f"length is {length} and batch is {batch}; expected at least 1 of each")
    attends = bool(config.attending)
    if config.variant == "mac" and attends and length % config.segment_size:
        raise ValueError(f"length is {length:,}; expected a multiple of the segment, {config.segment_size:,}")
    if not config.use_memory:
        return
    if config.memory_mode != "chunked":
        raise ValueError(f"memory_mode is {config.memory_mode!r}; the formula is for 'chunked'")
    if config.memory_loss != "squared" or config.memory_bias or config.memory_cache_segment_size:
        raise ValueError("the formula is for a memory with squared loss, without biases and without a cache")
    chunk = _chunk(config)
    if config.variant == "mac" and attends and config.segment_size % chunk:
        raise ValueError(f"memory_chunk_size is {chunk}; expected a divisor of the segment, {config.segment_size:,}")


def _chunk(config: TitansConfig) -> int:
    return config.memory_chunk_size or 64


def _product(rows: int, inner: int, columns: int) -> Flops:
    """(rows, inner) by (inner, columns), both with a gradient: the backward pass takes two more of the same size."""
    return Flops(2 * rows * inner * columns, 4 * rows * inner * columns)


def _layer(config: TitansConfig, length: int, batch: int, attends: bool) -> dict[str, Flops]:
    """One block, with attention or without."""
    width, tokens = config.hidden_size, batch * length
    assert config.intermediate_size is not None
    parts = dict.fromkeys(PARTS, Flops())
    feed_forward = 3 if config.ffn == "swiglu" else 2
    parts["linear"] += _product(tokens, width, config.intermediate_size) * feed_forward
    in_segments = attends and config.variant == "mac"
    if attends:
        parts["linear"] += _product(tokens, width, width) * 4
        if in_segments:
            attention_calls, pairs = 1, length // config.segment_size * _segment_pairs(config)
        else:
            attention_calls = -(-length // max(PIECE, PIECE_WINDOWS * config.window_size))
            pairs = _window_pairs(length, config.window_size, config.num_persistent_tokens)
        # keys and values of the persistent tokens: once per call, for all sequences
        parts["linear"] += _product(config.num_persistent_tokens, width, 2 * width) * attention_calls
        # scores and sums forward; backward the scores again, and two products for each
        parts["attention"] += Flops(4 * batch * pairs * width, 10 * batch * pairs * width)
    if not config.use_memory:
        return parts

    shape = memory_shape(config)
    prefix = 0 if config.variant == "mac" else config.num_persistent_tokens
    calls = length // config.segment_size if in_segments else 1
    for part, flops in memory_flops(shape, (length + prefix) // calls, batch, calls).items():
        parts[part] += flops
    if in_segments:  # Eq. 21: the memory at the segment's start is asked, and its answer is attended to
        parts["linear"] += _product(tokens, width, shape.inner) * 3 + _product(tokens, width, 2 * width)
        parts["memory"] += _product(tokens * shape.heads, 1, sum(shape.weights))
        parts["convolution"] += _convolution(shape, length, shape.inner, batch)
    return parts


def memory_shape(config: TitansConfig) -> MemoryShape:
    """The memory of one layer of a model."""
    width = config.memory_head_dim or config.hidden_size // config.memory_heads
    hidden = round(config.memory_expansion * width)
    learned = (
        config.memory_fixed_theta is None,
        config.memory_forgetting and config.memory_fixed_alpha is None,
        config.memory_momentum,
    )
    return MemoryShape(
        dim=config.hidden_size,
        heads=config.memory_heads,
        widths=(width, *[hidden] * (config.memory_depth - 1), width),
        chunk_size=_chunk(config),
        gates=sum(learned) if config.memory_gates == "token" else 0,
        conv_kernel=config.memory_conv_kernel,
        momentum=config.memory_momentum,
        forget_to=config.memory_forget_to if config.memory_forgetting else None,
        bounded=config.memory_bounded,
        first_order=config.memory_first_order,
        checkpoint_every=config.memory_checkpoint_every,
    )


def memory_flops(shape: MemoryShape, time: int, batch: int = 1, calls: int = 1) -> dict[str, Flops]:
    """Operations of a ``NeuralMemory`` that reads ``time`` tokens in each of ``calls`` calls, by part."""
    tokens = batch * time * calls
    return {
        "linear": _product(tokens, shape.dim, shape.inner) * 5,  # queries, keys, values, the output's gate, the output
        "memory": _product(tokens, shape.dim, shape.gates * shape.heads) + rule_flops(shape, time, batch, calls),
        "convolution": _convolution(shape, time, 3 * shape.inner, batch) * calls,
    }


def rule_flops(shape: MemoryShape, time: int, batch: int = 1, calls: int = 1) -> Flops:
    """Operations of the chunked rule itself in its dual form (titans/ops/dual.py).

    Per chunk of b tokens, in multiplications and additions, a layer from width i to width o takes

        keys       b i o         forward through the anchor; as much again backwards, except for the first layer
        writes     b i o n       (coefficients * delta)^T h, into W and into S: n = 2, or 1 without momentum
        reads      b i o n       x W^T and x S^T; and x M_0^T, b i o more, if forgetting returns to the start
                   b^2 (i + o)   x h^T, and the weighted sum of deltas

    The coefficients of momentum take b^3 per chunk, and bounded steps compare a chunk's keys with each other, b^2 i.
    The last chunk counts as a whole one, as it is padded.
    """
    rows, chunk = batch * shape.heads, min(shape.chunk_size, time)
    tiles = -(-time // chunk)
    weights = chunk * sum(shape.weights)
    upper = chunk * sum(shape.weights[1:])
    momentum, forgets = shape.momentum, shape.forget_to is not None

    keys = weights + upper
    write = weights * (1 + momentum)
    read = weights * (1 + momentum + (shape.forget_to == "start"))
    read += chunk**2 * sum(a + b for a, b in pairwise(shape.widths))
    gates = chunk**3 + chunk**2 if momentum else 0
    crowding = chunk**2 * (shape.widths[0] + 1) if shape.bounded else 0
    forward = keys + write + read + gates + crowding
    backward = 2 * (write + read + crowding) + (1 if shape.first_order else 2) * keys
    backward += gates * (1 + forgets) + (chunk - 1) * chunk**2 * (momentum + forgets)

    every = shape.checkpoint_every
    tile = rows * chunk * max(chunk, *shape.widths)  # numbers in its widest tensor
    if every is None:
        every = GRAPH_NUMBERS // (20 * len(shape.weights) * tile)
    regrouped = tiles > max(1, every)
    total = Flops(forward, backward, forward if regrouped else 0) * (tiles * calls)
    if not regrouped:  # group by group, everything has a gradient
        total += Flops(backward=-2 * write)  # nobody asks for the state after the last chunk
        if min(tiles, CACHED_NUMBERS // tile) <= 1:  # the first chunk is read alone, and its momentum is a constant 0
            total += Flops(backward=-weights * momentum)
    if shape.bounded and time % chunk:  # the chunk stays open
        gram = chunk * shape.widths[0] ** 2
        total += Flops(gram, 2 * gram, gram) if regrouped else Flops(gram)
    return total * (2 * rows)


def _convolution(shape: MemoryShape, time: int, channels: int, batch: int) -> Flops:
    kernel = shape.conv_kernel
    if not kernel:
        return Flops()
    return Flops(2 * batch * kernel * channels * time, 2 * batch * kernel * channels * (time + kernel - 1))


def _segment_pairs(config: TitansConfig) -> int:
    """Queries times keys of one segment of MAC, as ``segment_attention`` computes them."""
    size, prefix = config.segment_size, config.num_persistent_tokens
    history = 2 if config.use_memory else 1
    pairs = 0
    for begin in range(0, size, SEGMENT_BLOCK):
        end = min(size, begin + SEGMENT_BLOCK)
        pairs += (end - begin) * (prefix + history * end)
    return pairs


def _window_pairs(time: int, window: int, prefix: int, past: int = 0) -> int:
    """Queries times keys of a sliding window, as ``WindowAttention`` and ``window_attention`` compute them."""
    piece = max(PIECE, PIECE_WINDOWS * window)
    if time > piece:
        first = _window_pairs(piece, window, prefix, past)
        return first + _window_pairs(time - piece, window, prefix, window - 1)
    block = max(-(-window // 2), MIN_BLOCK)
    reach = -(-(window - 1) // block)
    head = max(1, reach) * block
    stepped = time if time <= head + block else head
    pairs = 0
    for begin in range(0, stepped, block):
        queries = min(block, stepped - begin)
        pairs += queries * (prefix + min(past + begin, window - 1) + queries)
    if stepped == time:
        return pairs
    tail = (time - head) % block
    pairs += (time - head - tail) * (prefix + (reach + 1) * block)
    return pairs + tail * (prefix + window - 1 + tail)


def flops_report(settings: FlopsSettings, progress: Progress = silent) -> dict[str, Any]:
    """Operations per token of a model, and what a run takes on known GPUs: a dict that is ready for JSON."""
    from titans.models import TitansConfig, config_for, count_parameters

    fields = {} if settings.vocab_size is None else {"vocab_size": settings.vocab_size}
    config = config_for(
        settings.model, settings.size, memory_mode="chunked", memory_chunk_size=settings.chunk_size,
        memory_first_order=settings.first_order, **fields,
    )  # fmt: skip
    assert isinstance(config, TitansConfig)
    whole = training_flops(config, settings.length, settings.batch, settings.checkpointing)
    count, tokens = settings.batch * settings.length, settings.tokens
    parts = {part: {key: value / count for key, value in asdict(flops).items()} for part, flops in whole.items()}
    executed = sum(flops.total for flops in whole.values()) / count
    float32 = sum(whole[part].total for part in FLOAT32) / count
    return new_report("flops", settings) | {
        "parameters": count_parameters(config),
        "parts": parts,
        "executed": executed,
        "useful": sum(flops.forward + flops.backward for flops in whole.values()) / count,
        "float32": float32,
        "plans": [
            _plan(gpu, share, tf32, executed - float32, float32, tokens)
            for gpu in GPUS
            for share in SHARES
            for tf32 in (False, True)
        ],
        "needed": [
            {"days": days, "gpus": gpus, "tokens_per_second": tokens / (days * DAY * gpus)}
            for days in DAYS
            for gpus in COUNTS
        ],
    }


def _plan(gpu: Gpu, share: float, tf32: bool, bf16: float, float32: float, tokens: float) -> dict[str, Any]:
    """A run in which products reach ``share`` of the peak, and nothing else takes time."""
    seconds = (bf16 / gpu.bf16 + float32 / (gpu.tf32 if tf32 else gpu.float32)) / share
    hours = tokens * seconds / HOUR
    return {
        "gpu": gpu.name,
        "share": share,
        "memory": "TF32" if tf32 else "float32",
        "tokens_per_second": 1 / seconds,
        "gpu_hours": hours,
        "days": [hours / 24 / count for count in COUNTS],
        "dollars": [hours * price for price in PRICES],
    }


def sections(report: dict[str, Any]) -> list[Section]:
    """What :func:`flops_report` gives, as text and tables."""
    settings, tokens = report["settings"], report["settings"]["tokens"]
    parts = [
        [part, *(f"{value / 1e6:,.1f}" for value in flops.values()), f"{sum(flops.values()) / report['executed']:.1%}"]
        for part, flops in report["parts"].items()
    ]
    plans = [
        [
            f"{plan['gpu']}, {plan['share']:.0%}, {plan['memory']}",
            f"{plan['tokens_per_second']:,.0f}",
            f"{plan['gpu_hours']:,.0f}",
            *(f"{days:.1f}" for days in plan["days"]),
            *(f"{dollars:,.0f}" for dollars in plan["dollars"]),
        ]
        for plan in report["plans"]
    ]
    needed = [
        [f"{each['days']} days on {each['gpus']}", f"{each['tokens_per_second']:,.0f}"] for each in report["needed"]
    ]
    days = [f"days on {count}" for count in COUNTS]
    return [
        Section(
            "Operations",
            [
                f"{settings['model']} {settings['size']}, {report['parameters']:,} parameters, sequences of "
                f"{settings['length']:,} tokens: {report['executed'] / 1e9:.3f} GFLOP per token are executed, "
                f"{report['useful'] / 1e9:.3f} without what is recomputed; {tokens * report['executed']:.3g} FLOP for "
                f"{tokens:.3g} tokens."
            ],
            [Table(["part", "forward", "backward", "recomputed", "share"], parts, "MFLOP per token.")],
        ),
        Section(
            "Time and money, if only products took time",
            ["Assumed: the share of its peak that a GPU reaches, and whether the memory's products are in TF32."],
            [
                Table(
                    ["GPU", "tokens/s each", "GPU hours", *days, *(f"at ${price:g}/h" for price in PRICES)], plans,
                    "A run.",
                ),
                Table(["to finish in", "tokens/s per GPU"], needed, "Needed to finish in time."),
            ],
        ),
        about(report),
    ]  # fmt: skip


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """Operations by part of the model, by the title of the section."""
    kinds = ("forward", "backward", "recomputed")
    bars = {kind: [part[kind] / 1e6 for part in report["parts"].values()] for kind in kinds}
    title = "Operations per token, by part of the model"
    return {"Operations": [bar_figure("flops", title, list(report["parts"]), bars, "part", "MFLOP per token")]}
