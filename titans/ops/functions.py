"""The memory as three functions of tensors: each describes its rule, and an engine runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from titans.ops.engines import Options, run_memory
from titans.ops.exact import GUARD_EVERY
from titans.ops.losses import Loss, find_loss
from titans.ops.network import MemoryMLP
from titans.ops.optimisers import Descent, Momentum, Optimiser
from titans.ops.retention import Forgetting
from titans.ops.rule import Network, Rule, Tokens
from titans.ops.state import MemoryState, Surprise

Result = tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]


def neural_memory_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    state: MemoryState,
    chunk_size: int = 1,
    *,
    network: Network = MemoryMLP(),  # noqa: B008 (frozen)
    loss: str | Loss = "squared",
    mask: Tensor | None = None,
    rest: Sequence[Tensor] | None = None,
    bounded: bool = False,
    max_norm: float | None = None,
    guard_every: int | None = None,
    decay_first: bool = False,
    optimiser: Optimiser | None = None,
    first_order: bool = False,
    return_surprise: bool = False,
    check_values: bool = True,
) -> Result:
    """Reads and writes a memory token by token (Eq. 8 to 15, Algorithm 1). Slow, obvious, and right by construction.

    Args:
        q, k, v: queries, keys, values, (batch, heads, time, width).
        theta, alpha, eta: step, forgetting and momentum in [0, 1], (batch, heads, time); for linear memory also
            (batch, heads, time, out), one gate per output channel. ``alpha=None``: nothing is forgotten;
            ``eta=None``: no momentum, and ``state.momentum`` passes through untouched.
        state: where the memory stands; it is not changed.
        chunk_size: the gradient is taken at the weights of the start of the token's chunk; 1 is the sequential rule.
        network: ``network(weights, x) -> y``; any differentiable function.
        loss: ``"squared"``, ||M(k) - v||^2, ``"dot"``, -<M(k), v>, ``"huber"``, or a :class:`titans.ops.Loss`.
        mask: (batch, time) bool; a token that is False is skipped as if it were not there, and reads 0.
        rest: weights that forgetting returns to, (batch, heads, out, in) a layer: M_t = (1 - alpha_t)(M_{t-1} - rest) +
            rest + S_t. None: zero, Eq. 13 as written.
        bounded: divide each step by 1 + kappa, and by the square of how crowded its chunk is (docs/math.md, Bounds).
        max_norm: every ``guard_every`` tokens (default: ``chunk_size``) no row of M - rest, nor
            of S, keeps a larger norm.
        decay_first: take the gradient at (1 - alpha_t) times the weights, as Gated DeltaNet does.
        optimiser: how surprise becomes a step; default: :class:`titans.ops.Momentum`, and without eta
            :class:`titans.ops.Descent`.
        first_order: the outer gradient treats the weights at which the inner gradient is taken as constants.
        return_surprise: also return each token's gradient norm and loss.
        check_values: refuse NaN, infinities and gates outside [0, 1].

    Returns:
        y (batch, heads, time, out) with y_t = M_t(q_t), the new state, and the surprise if asked for.
    """
    rule = Rule(
        network, find_loss(loss), Forgetting(rest, decay_first), optimiser or _optimiser(eta), chunk_size,
        bounded, max_norm, guard_every, first_order,
    )  # fmt: skip
    tokens = Tokens(q, k, v, theta, alpha, eta, mask)
    return run_memory(rule, tokens, state, "definition", Options(return_surprise), check_values)


def neural_memory_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    state: MemoryState,
    chunk_size: int = 64,
    *,
    network: Network = MemoryMLP(),  # noqa: B008 (frozen)
    loss: str | Loss = "squared",
    mask: Tensor | None = None,
    rest: Sequence[Tensor] | None = None,
    bounded: bool = False,
    max_norm: float | None = None,
    first_order: bool = False,
    return_surprise: bool = False,
    checkpoint_every: int | None = None,
    check_values: bool = True,
    engine: str | None = None,
) -> Result:
    """What ``neural_memory_recurrent`` with this ``chunk_size`` gives, many times faster (Eq. 16 to 18, Algorithm 2).

    The arguments are those of :func:`titans.ops.neural_memory_recurrent`, and:
        chunk_size: part of the model: a memory trained with one is a different model with another.
        max_norm: checked at the end of every chunk.
        checkpoint_every: the backward pass keeps the state at every so many chunks and recomputes what lies between;
            default: at every chunk or 64 tokens in the compiled loop, else so many that their graph takes about 128 MB.
        engine: ``"native"``, ``"dual"`` or ``"definition"``; None: the fastest that takes the rule, see
            :func:`titans.ops.explain`.
    """
    rule = Rule(
        network, find_loss(loss), Forgetting(rest), _optimiser(eta), chunk_size, bounded, max_norm,
        first_order=first_order,
    )  # fmt: skip
    options = Options(return_surprise, checkpoint_every=checkpoint_every)
    return run_memory(rule, Tokens(q, k, v, theta, alpha, eta, mask), state, engine, options, check_values)


def neural_memory_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    eta: Tensor | None,
    state: MemoryState,
    chunk_size: int | None = None,
    *,
    sweeps: int | None = None,
    tolerance: float | None = None,
    network: Network = MemoryMLP(),  # noqa: B008 (frozen)
    loss: str | Loss = "squared",
    mask: Tensor | None = None,
    rest: Sequence[Tensor] | None = None,
    bounded: bool = False,
    max_norm: float | None = None,
    guard_every: int = GUARD_EVERY,
    decay_first: bool = False,
    first_order: bool = False,
    return_surprise: bool = False,
    checkpoint_every: int | None = None,
    check_values: bool = True,
    residuals: list[Tensor] | None = None,
    engine: str | None = None,
) -> Result:
    """What ``neural_memory_recurrent`` with ``chunk_size=1`` gives, many times faster (Eq. 13, 14 to the letter).

    The arguments are those of :func:`titans.ops.neural_memory_recurrent`, and:
        chunk_size: a tile size: it changes nothing but the speed. Default: 64 for linear memory, 8 for deep.
        sweeps: fixed-point sweeps for deep memory. The default, one fewer than a tile has tokens, is exact for any
            input; fewer are faster, and close where keys differ and steps are small. Linear memory is solved and
            needs none.
        tolerance: instead of a fixed number, sweep until the largest relative change falls below this, at most
            ``chunk_size`` times. The residual sees the whole tile, so the future then decides how often the past is
            refined: not for a model that must be causal to the last bit.
        guard_every: with ``max_norm``, how many tokens lie between two checks.
        checkpoint_every: the backward pass keeps the state at every so many tiles and recomputes what lies between;
            default: so many that their graph takes about 128 MB. The compiled loop keeps one every 32 tokens, or less
            often where they would take more than 32 MB (float32).
        residuals: a list that receives each tile's last relative change, a scalar tensor; empty for linear memory.
        engine: as for :func:`titans.ops.neural_memory_chunked`.
    """
    rule = Rule(
        network, find_loss(loss), Forgetting(rest, decay_first), _optimiser(eta), None, bounded, max_norm, guard_every,
        first_order,
    )  # fmt: skip
    options = Options(return_surprise, chunk_size, sweeps, tolerance, residuals, checkpoint_every)
    return run_memory(rule, Tokens(q, k, v, theta, alpha, eta, mask), state, engine, options, check_values)


def _optimiser(eta: Tensor | None) -> Optimiser:
    return Descent() if eta is None else Momentum()
