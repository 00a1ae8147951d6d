"""Who runs a rule: engines that take it or say why not, and how one of them is chosen."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from titans.ops.chunked import ChunkKeys
from titans.ops.dual import KeyPass, join_outputs, run_checkpointed
from titans.ops.exact import ExactKeys
from titans.ops.flat import FlatRule, FlatState, FlatTokens, Tensors, Tiling, run_flat
from titans.ops.inputs import check_inputs, check_values_of
from titans.ops.losses import Dot, Squared
from titans.ops.native.chunked import run_chunked
from titans.ops.native.exact import run_exact
from titans.ops.native.library import can_run_native
from titans.ops.network import MemoryMLP
from titans.ops.optimisers import Descent, Momentum
from titans.ops.recurrent import run_definition
from titans.ops.rule import Rule, Tokens
from titans.ops.state import MemoryState, Surprise

LINEAR_TILE, DEEP_TILE = 64, 8
AS_ASKED, FASTEST = "as asked", "the fastest"  # why an engine was chosen
Found = tuple[Tensor, MemoryState, Surprise | None]


class Options(NamedTuple):
    """What a call asks for besides the rule. Only ``sweeps`` and ``tolerance`` can change a result.

    Attributes:
        surprise: also return each token's gradient norm and loss.
        tile: tokens that the exact rule takes at a time; None: 64 for linear memory, 8 for deep.
        sweeps, tolerance, residuals: of deep memory under the exact rule, see :func:`titans.ops.neural_memory_exact`.
        checkpoint_every: tiles between two states that the backward pass keeps.
    """

    surprise: bool = False
    tile: int | None = None
    sweeps: int | None = None
    tolerance: float | None = None
    residuals: list[Tensor] | None = None
    checkpoint_every: int | None = None

    @property
    def by_sweeps(self) -> bool:
        """Whether the caller wants to know or decide how many sweeps there are."""
        return self.sweeps is not None or self.tolerance is not None or self.residuals is not None


class Engine(NamedTuple):
    """A way to run rules.

    Attributes:
        declines: why it does not take a rule for a memory in this state, or None.
        run: the outputs, the new state, and the surprise if it was asked for.
    """

    name: str
    declines: Callable[[Rule, MemoryState, Options], str | None]
    run: Callable[[Rule, Tokens, MemoryState, Options], Found]


def run_memory(
    rule: Rule,
    tokens: Tokens,
    state: MemoryState,
    engine: str | None = None,
    options: Options = Options(),  # noqa: B008 (a value)
    check_values: bool = True,
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
    """Reads and writes a memory by any rule; the three functions of :mod:`titans.ops` are this with a rule made for it.

    Args:
        engine: ``"native"``, ``"dual"`` or ``"definition"``; None: what :func:`explain` says.
        check_values: refuse NaN, infinities and gates outside [0, 1].

    Returns:
        y (batch, heads, time, out) with y_t = M_t(q_t), the new state, and the surprise if asked for.
    """
    _check_options(options)
    check_inputs(rule, tokens, state)
    if check_values:
        check_values_of(tokens)
    chosen, reason = choose(rule, state, engine, options)
    if reason not in (FASTEST, AS_ASKED) and chosen.name == "definition":
        _warn_once(f"the memory runs by its definition, token by token, which is slow ({reason})")
    if not tokens.q.shape[0] or not tokens.q.shape[2]:
        empty = tokens.v.new_zeros(tokens.q.shape[:3])
        y, surprise = torch.empty_like(tokens.v), Surprise(empty, empty)
        return (y, state, surprise) if options.surprise else (y, state)
    y, state, found = chosen.run(rule, tokens, state, options)
    return (y, state, found) if options.surprise and found is not None else (y, state)


def choose(
    rule: Rule,
    state: MemoryState,
    engine: str | None = None,
    options: Options = Options(),  # noqa: B008 (a value)
) -> tuple[Engine, str]:
    """The engine that runs a rule for a memory in this state, and why that one.

    ``engine`` is an order: an engine that declines is an error. ``TITANS_ENGINE`` is a wish. Without either it is the
    first of native, dual and definition that takes the rule.
    """
    wish = engine or os.environ.get("TITANS_ENGINE") or None
    if wish is not None and wish not in ENGINES:
        name = "engine" if engine else "TITANS_ENGINE"
        raise ValueError(f"{name} is {wish!r}; expected one of {', '.join(ENGINES)}")
    declined: list[str] = []
    for candidate in dict.fromkeys([wish or "native", *ENGINES]):
        reason = ENGINES[candidate].declines(rule, state, options)
        if reason is None:
            return ENGINES[candidate], "; ".join(declined) or (AS_ASKED if wish else FASTEST)
        if engine:
            raise ValueError(f"engine is {engine!r}, which does not take this memory: {reason}")
        declined.append(f"not {candidate}: {reason}")
    raise ValueError(f"no engine takes this memory; {'; '.join(declined)}")


def explain(
    rule: Rule,
    state: MemoryState,
    engine: str | None = None,
    options: Options = Options(),  # noqa: B008 (a value)
) -> str:
    """Which engine runs a rule for a memory in this state, and why: one line."""
    chosen, reason = choose(rule, state, engine, options)
    return f"{chosen.name} ({reason})"


def _definition_declines(rule: Rule, state: MemoryState, options: Options) -> str | None:
    return "it has no sweeps" if options.by_sweeps else None


def _run_definition(rule: Rule, tokens: Tokens, state: MemoryState, options: Options) -> Found:
    return run_definition(rule, tokens, state)


def _dual_declines(rule: Rule, state: MemoryState, options: Options) -> str | None:
    if not isinstance(rule.network, MemoryMLP):
        return f"network is a {type(rule.network).__name__}, expected a MemoryMLP"
    if not isinstance(rule.optimiser, Momentum | Descent):
        return f"optimiser is {type(rule.optimiser).__name__}, expected Momentum or Descent"
    if rule.chunk_size is not None and rule.retention.first:
        return "retention forgets first, expected that under the exact rule alone"
    if rule.chunk_size is not None and rule.guard_every not in (None, rule.chunk_size):
        return f"guard_every is {rule.guard_every}, expected chunk_size, {rule.chunk_size}"
    return None


def _run_dual(rule: Rule, tokens: Tokens, state: MemoryState, options: Options) -> Found:
    if rule.chunk_size is None and len(state.weights) > 1 and state.weights[0].device.type != "cpu":
        _warn_once(
            "deep memory under the exact rule runs by sweeps on this device, many passes over every tile; the chunked "
            "rule needs one"
        )
    loop = partial(run_checkpointed, key_pass=_key_pass(rule, options), checkpoint_every=options.checkpoint_every)
    return run_flat(rule, tokens, state, _tile(rule, state, options), loop, options.surprise)


def _key_pass(rule: Rule, options: Options) -> KeyPass:
    if rule.chunk_size is not None:
        return ChunkKeys()
    return ExactKeys(options.sweeps, options.tolerance, options.residuals)


def _tile(rule: Rule, state: MemoryState, options: Options) -> int:
    """How many tokens are taken at a time: a chunk, or as many as divide the tokens between two guards."""
    if rule.chunk_size is not None:
        return rule.chunk_size
    tile = options.tile or (LINEAR_TILE if len(state.weights) == 1 else DEEP_TILE)
    period = rule.period
    return tile if period is None else max(d for d in range(1, min(tile, period) + 1) if period % d == 0)


def _native_declines(rule: Rule, state: MemoryState, options: Options) -> str | None:
    reason = _dual_declines(rule, state, options)
    if reason is not None:
        return reason
    assert isinstance(rule.network, MemoryMLP)
    if rule.network.norm is not None:
        return "the memory network has a LayerNorm"
    if not isinstance(rule.loss, Squared | Dot):
        return f"loss is {type(rule.loss).__name__}, expected Squared or Dot"
    if rule.chunk_size is None:
        if options.by_sweeps:
            return "sweeps are asked for"
        if rule.retention.first and rule.retention.to is not None:
            return "retention forgets first, and not to zero"
    if not can_run_native(*state.weights, *state.momentum):
        first = state.weights[0]
        return f"no compiled loop for {str(first.dtype).removeprefix('torch.')} tensors on {first.device.type} here"
    return None


def _run_native(rule: Rule, tokens: Tokens, state: MemoryState, options: Options) -> Found:
    loop = partial(run_exact if rule.chunk_size is None else _native_chunks, every=options.checkpoint_every)
    whole = rule.chunk_size is not None
    return run_flat(rule, tokens, state, _tile(rule, state, options), loop, options.surprise, whole)


def _native_chunks(
    rule: FlatRule, tiling: Tiling, state: FlatState, tokens: FlatTokens, *, every: int | None
) -> tuple[FlatState, Tensors]:
    """Whole chunks in the compiled loop; those that are entered or left half way, or not together, in PyTorch."""
    tile, ends = tiling
    start = 1 if state.anchor else 0
    stop = len(ends) if ends[-1] is True else len(ends) - 1
    if stop <= start or any(end is not True for end in ends[:stop]):
        start, stop = len(ends), len(ends)
    outputs = []
    for first, last in ((0, start), (start, stop), (stop, len(ends))):
        if first == last:
            continue
        part = tokens.slots(first * tile, last * tile)
        if first == start:
            state, out = run_chunked(rule, tile, state, part, every)
        else:
            rest = Tiling(tile, ends[first:last])
            state, out = run_checkpointed(rule, rest, state, part, key_pass=ChunkKeys(), checkpoint_every=every)
        outputs.append(out)
    return state, join_outputs(outputs)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("native", _native_declines, _run_native),
        Engine("dual", _dual_declines, _run_dual),
        Engine("definition", _definition_declines, _run_definition),
    )
}


def _check_options(options: Options) -> None:
    if options.tile is not None and (not isinstance(options.tile, int) or options.tile < 1):
        raise ValueError(f"chunk_size is {options.tile!r}; expected a whole number of at least 1")
    if options.sweeps is not None and options.sweeps < 0:
        raise ValueError(f"sweeps is {options.sweeps}; expected a whole number of at least 0")
    if options.tolerance is not None and not options.tolerance > 0:
        raise ValueError(f"tolerance is {options.tolerance}; expected a positive number")
    if options.checkpoint_every is not None and options.checkpoint_every < 1:
        raise ValueError(f"checkpoint_every is {options.checkpoint_every}; expected a whole number of at least 1")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
