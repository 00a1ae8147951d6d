"""Floating-point operations of a training step: a formula for our models, and PyTorch's count of what really runs.

Both count the products of matrices and the convolutions, a multiplication and an addition as two; norms, activations
and gates are left out. The formula is for the chunked rule in PyTorch's own operations, as a GPU runs it;
``tests/bench/test_flops.py`` holds it to the count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from titans.layers.attention import PIECE, PIECE_WINDOWS
from titans.models import TitansConfig, TitansForCausalLM, config_for, count_parameters
from titans.models.configuration import VARIANTS
from titans.ops.attention import MIN_BLOCK, SEGMENT_BLOCK
from titans.ops.dual import CACHED_NUMBERS, GRAPH_NUMBERS

if TYPE_CHECKING:
    from rich.console import Console

NAMES = (*VARIANTS, "sliding-window")
PARTS = ("linear", "head", "attention", "memory", "convolution")
FLOAT32 = ("memory",)  # these products stay in float32 under bf16
HOUR, DAY = 3600, 86_400


@dataclass(frozen=True)
class Gpu:
    """What its maker says of a GPU: FLOP/s of dense products at its peak."""

    name: str
    bf16: float
    tf32: float
    float32: float


GPUS = (Gpu("A100", 312e12, 156e12, 19.5e12), Gpu("H100", 989e12, 494e12, 67e12))
# what a plan assumes
SHARES = (0.2, 0.3, 0.4)  # of the peak that products reach, each in its own precision
PRICES = (2.0, 3.0)  # dollars for a GPU and an hour
COUNTS = (8, 64)  # GPUs
DAYS = (3, 7)


@dataclass(frozen=True)
class Flops:
    """Operations of one part of a model.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, without what it computes again.
        again: forward operations that the backward pass repeats, instead of keeping what they gave.
    """

    forward: int = 0
    backward: int = 0
    again: int = 0

    @property
    def total(self) -> int:
        """All that runs."""
        return self.forward + self.backward + self.again

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward, self.again + other.again)

    def __mul__(self, times: int) -> Flops:
        return Flops(self.forward * times, self.backward * times, self.again * times)


def training_flops(config: TitansConfig, length: int, batch: int = 1, checkpointing: bool = False) -> dict[str, Flops]:
    """Operations of a forward and backward pass over (batch, length) tokens, by part of the model.

    Args:
        config: a model whose memory runs under the chunked rule.
        length: of a sequence, a multiple of the chunk.
        batch: sequences at a time; decides how often the memory keeps its state, and so what it computes again.
        checkpointing: whether every layer keeps its input only, and computes the rest again.
    """
    _check(config, length, batch)
    layer = _layer(config, length, batch)
    if checkpointing:
        # recomputing ends where the last product, of the feed-forward layer, has been given its input
        assert config.intermediate_size is not None
        last = 2 * batch * length * config.hidden_size * config.intermediate_size
        for part, flops in layer.items():
            again = flops.forward - (last if part == "linear" else 0)
            layer[part] = flops + Flops(again=again)
    head = _product(batch * length, config.hidden_size, config.vocab_size)
    return {part: layer[part] * config.num_hidden_layers + (head if part == "head" else Flops()) for part in PARTS}


def counted_flops(model: TitansForCausalLM, ids: Tensor, checkpointing: bool = False) -> tuple[int, int]:
    """What PyTorch counts for the forward and for the backward pass of ``model`` over ``ids`` (batch, time).

    Compiled loops are not seen: run it with ``TITANS_NATIVE=0``.
    """
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with _counter() as counter:
        loss = model(ids, labels=ids, use_cache=False).loss
        forward = counter.get_total_flops()
        loss.backward()
    model.zero_grad()
    return forward, counter.get_total_flops() - forward


@contextmanager
def _counter() -> Iterator[FlopCounterMode]:
    """PyTorch's counter, which does not know attention on a CPU."""

    def attend(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(q, k, v))

    def attend_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(grad, q, k, v))

    aten = torch.ops.aten
    known = {
        aten._scaled_dot_product_flash_attention_for_cpu: attend,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attend_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        yield counter


def _check(config: TitansConfig, length: int, batch: int) -> None:
    if length < 1 or batch < 1:
        raise ValueError(f"length is {length} and batch is {batch}; expected at least 1 of each")
    attends = config.use_attention and config.variant != "lmm"
    if config.variant == "mac" and attends and length % config.segment_size:
        raise ValueError(f"length is {length:,}; expected a multiple of the segment, {config.segment_size:,}")
    if not config.use_memory:
        return
    if config.memory_mode != "chunked":
        raise ValueError(f"memory_mode is {config.memory_mode!r}; the formula is for 'chunked'")
    if config.memory_loss != "squared" or config.memory_bias:
        raise ValueError("the formula is for a memory with squared loss and without biases")
    chunk = _chunk(config)
    if config.variant == "mac" and attends and config.segment_size % chunk:
        raise ValueError(f"memory_chunk_size is {chunk}; expected a divisor of the segment, {config.segment_size:,}")


def _chunk(config: TitansConfig) -> int:
    return config.memory_chunk_size or 64


def _product(rows: int, inner: int, columns: int) -> Flops:
    """(rows, inner) by (inner, columns), both with a gradient: the backward pass takes two more of the same size."""
    return Flops(2 * rows * inner * columns, 4 * rows * inner * columns)


def _layer(config: TitansConfig, length: int, batch: int) -> dict[str, Flops]:
    """One block."""
    width, tokens = config.hidden_size, batch * length
    assert config.intermediate_size is not None
    parts = dict.fromkeys(PARTS, Flops())
    feed_forward = 3 if config.ffn == "swiglu" else 2
    parts["linear"] += _product(tokens, width, config.intermediate_size) * feed_forward
    attends = config.use_attention and config.variant != "lmm"
    in_segments = attends and config.variant == "mac"
    if attends:
        parts["linear"] += _product(tokens, width, width) * 4
        if in_segments:
            segments = length // config.segment_size
            pairs = segments * _segment_pairs(config)
        else:
            segments = -(-length // max(PIECE, PIECE_WINDOWS * config.window_size))
            pairs = _window_pairs(length, config.window_size, config.num_persistent_tokens)
        # keys and values of the persistent tokens: once a call, for all sequences
        parts["linear"] += _product(config.num_persistent_tokens, width, 2 * width) * segments
        # scores and sums forward; backward the scores again, and two products for each
        parts["attention"] += Flops(4 * batch * pairs * width, 10 * batch * pairs * width)
    if not config.use_memory:
        return parts

    inner = config.memory_heads * (config.memory_head_dim or width // config.memory_heads)
    prefix = 0 if in_segments or config.variant == "mac" else config.num_persistent_tokens
    read = length + prefix
    calls = length // config.segment_size if in_segments else 1
    parts["linear"] += _product(batch * read, width, inner) * 5  # q, k, v, the gate, the way out
    parts["memory"] += _product(batch * read, width, _gates(config) * config.memory_heads)
    parts["memory"] += _rule(config, read // calls, batch, calls)
    parts["convolution"] += _convolution(config, read // calls, 3 * inner, batch) * calls
    if in_segments:  # Eq. 21: the memory at the segment's start is asked, and what it says is attended to
        parts["linear"] += _product(tokens, width, inner) * 3 + _product(tokens, width, 2 * width)
        parts["memory"] += _product(tokens * config.memory_heads, 1, sum(a * b for a, b in _shapes(config)))
        parts["convolution"] += _convolution(config, config.segment_size, inner, batch) * calls
    return parts


def _gates(config: TitansConfig) -> int:
    if config.memory_gates != "token":
        return 0
    forgets = config.memory_forgetting and config.memory_fixed_alpha is None
    return (config.memory_fixed_theta is None) + forgets + config.memory_momentum


def _shapes(config: TitansConfig) -> list[tuple[int, int]]:
    """(out, in) of every layer of a memory."""
    width = config.memory_head_dim or config.hidden_size // config.memory_heads
    hidden = round(config.memory_expansion * width)
    widths = [width, *[hidden] * (config.memory_depth - 1), width]
    return [(after, before) for before, after in pairwise(widths)]


def _rule(config: TitansConfig, time: int, batch: int, calls: int) -> Flops:
    """The chunked rule in its dual form, in so many calls of ``time`` tokens (titans/ops/dual.py)."""
    rows, chunk, shapes = batch * config.memory_heads, min(_chunk(config), time), _shapes(config)
    tiles = -(-time // chunk)
    width = shapes[0][1]
    weights = chunk * sum(a * b for a, b in shapes)  # a product with every weight of the memory
    upper = chunk * sum(a * b for a, b in shapes[1:])
    momentum, forgets = config.memory_momentum, config.memory_forgetting

    keys = weights + upper  # through the anchor, and back
    write = weights * (1 + momentum)
    read = weights * (1 + momentum + (forgets and config.memory_forget_to == "start"))
    read += chunk**2 * sum(a + b for a, b in shapes)
    gates = chunk**3 + chunk**2 if momentum else 0
    crowding = chunk**2 * (width + 1) if config.memory_bounded else 0
    forward = keys + write + read + gates + crowding
    backward = 2 * (write + read + crowding) + (1 if config.memory_first_order else 2) * keys
    backward += gates * (1 + forgets) + (chunk - 1) * chunk**2 * (momentum + forgets)

    every = config.memory_checkpoint_every
    tile = rows * chunk * max(chunk, *(max(shape) for shape in shapes))  # numbers of its widest tensor
    if every is None:
        every = GRAPH_NUMBERS // (20 * len(shapes) * tile)
    regrouped = tiles > max(1, every)
    total = Flops(forward, backward, forward if regrouped else 0) * (tiles * calls)
    if not regrouped:  # group by group, everything has a gradient
        total += Flops(backward=-2 * write)  # nobody asks for the state after the last chunk
        if min(tiles, CACHED_NUMBERS // tile) <= 1:  # the first chunk is read alone, and its momentum is a constant 0
            total += Flops(backward=-weights * momentum)
    if config.memory_bounded and time % chunk:  # the chunk stays open
        gram = chunk * width**2
        total += Flops(gram, 2 * gram, gram) if regrouped else Flops(gram)
    return total * (2 * rows)


def _convolution(config: TitansConfig, time: int, channels: int, batch: int) -> Flops:
    kernel = config.memory_conv_kernel
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


def flops_report(
    name: str,
    size: str,
    length: int,
    batch: int = 4,
    tokens: float = 30e9,
    checkpointing: bool = True,
    **fields: Any,
) -> dict[str, Any]:
    """Operations a token of the model ``name`` at ``size``, and what a run over ``tokens`` takes of known GPUs.

    Args:
        length: of a sequence.
        batch: sequences that a GPU works on at a time.
        checkpointing: gradient checkpointing.
        fields: of the model's config, over those of its size.
    """
    if name not in NAMES:
        raise ValueError(f"model is {name!r}; the formula is for {', '.join(NAMES)}")
    if not tokens > 0:
        raise ValueError(f"tokens is {tokens}; expected a positive number")
    config = config_for(name, size, **{"memory_mode": "chunked", **fields})
    assert isinstance(config, TitansConfig)
    whole = training_flops(config, length, batch, checkpointing)
    count = batch * length
    parts = {part: {key: value / count for key, value in asdict(flops).items()} for part, flops in whole.items()}
    executed = sum(flops.total for flops in whole.values()) / count
    float32 = sum(whole[part].total for part in FLOAT32) / count
    return {
        "model": name,
        "size": size,
        "parameters": count_parameters(config),
        "length": length,
        "batch": batch,
        "checkpointing": checkpointing,
        "tokens": tokens,
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


def print_report(report: dict[str, Any], console: Console) -> None:
    """What :func:`flops_report` gives, as tables."""
    from titans.bench.timing import print_table

    million = 1e6
    rows = [
        [
            part,
            *(f"{value / million:,.1f}" for value in flops.values()),
            f"{sum(flops.values()) / report['executed']:.1%}",
        ]
        for part, flops in report["parts"].items()
    ]
    title = f"{report['model']} {report['size']}, {report['parameters']:,} parameters, length {report['length']:,}"
    columns = ("MFLOP a token", "forward", "backward", "again", "share")
    print_table(console, title, columns, rows)
    console.print(
        f"{report['executed'] / 1e9:.3f} GFLOP a token are run, {report['useful'] / 1e9:.3f} without what is computed "
        f"again; {report['tokens'] * report['executed']:.3g} FLOP for {report['tokens']:.3g} tokens.",
        highlight=False,
    )
    rows = [
        [
            f"{plan['gpu']}, {plan['share']:.0%} of the peak, memory in {plan['memory']}",
            f"{plan['tokens_per_second']:,.0f}",
            f"{plan['gpu_hours']:,.0f}",
            *(f"{days:.1f}" for days in plan["days"]),
            *(f"{dollars:,.0f}" for dollars in plan["dollars"]),
        ]
        for plan in report["plans"]
    ]
    days = [f"days on {count}" for count in COUNTS]
    headings = ["if", "tokens/s a GPU", "GPU hours", *days, *(f"at ${price:g}" for price in PRICES)]
    print_table(console, "A run, where only products take time (assumed)", headings, rows)
    rows = [[f"{n['days']} days on {n['gpus']} GPUs", f"{n['tokens_per_second']:,.0f}"] for n in report["needed"]]
    print_table(console, "Needed for it", ["to be done in", "tokens/s a GPU"], rows)
