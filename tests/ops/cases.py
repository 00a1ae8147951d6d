"""What the tests of the memory share: calls drawn from a description, and comparing two ways to run them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops import (
    MemoryMLP,
    MemoryState,
    neural_memory_chunked,
    neural_memory_exact,
    neural_memory_recurrent,
)

BATCH, HEADS = 2, 2
TOLERANCE = 1e-9
FLOOR = 1e-3  # a tensor smaller than this is compared as if it were this large

Op = Callable[..., Any]


def exact_by_sweeps(*tensors: Any, **options: Any) -> Any:
    """The exact rule with more sweeps than any tile needs, never compiled."""
    return neural_memory_exact(*tensors, **{"sweeps": 1000, **options})


GUARD = 6  # tokens between two checks of max_norm under the exact rule
OPS: dict[str, Op] = {
    "recurrent": neural_memory_recurrent,
    "chunked": neural_memory_chunked,
    "exact": neural_memory_exact,
    "exact by sweeps": exact_by_sweeps,
}
LENGTHS = (1, 63, 64, 100, 257)
CHUNKS = (1, 4, 16, 64)


@dataclass(frozen=True)
class Case:
    """What a call looks like. The defaults are plain; a test changes what it is about."""

    depth: int = 2
    time: int = 21
    chunk: int = 8
    width: int = 5
    activation: str = "silu"
    bias: bool = False
    expansion: int = 1
    residual: bool = False
    norm: bool = False
    loss: str = "squared"
    momentum: bool = True
    forgetting: bool = True
    rest: bool = False
    channels: bool = False
    masked: bool = False
    bounded: bool = False
    max_norm: float | None = None
    first_order: bool = False
    decay_first: bool = False
    checkpoint_every: int | None = None
    surprise: bool = False
    seed: int = 0

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(name if value is True else f"{name}={value}" for name, value in changed) or "plain"

    @property
    def step(self) -> float:
        """The largest theta.

        A linear memory takes any step in [0, 1]. A deep one with such steps and no bound grows without limit, however
        it is computed, and what is compared then is noise.
        """
        if self.bounded or (self.depth == 1 and not self.norm and (self.forgetting or not self.momentum)):
            return 1.0
        return 0.1 if self.forgetting and self.time < 40 else 0.02


@dataclass(frozen=True)
class Call:
    """The tensors of a call and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor
    alpha: Tensor | None
    eta: Tensor | None
    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    norm: tuple[Tensor, ...]
    rest: tuple[Tensor, ...]
    mask: Tensor | None
    network: Mapping[str, Any]
    options: Mapping[str, Any]

    def __call__(self, op: Op, chunk_size: int | None, state: MemoryState | None = None, **options: Any) -> Any:
        """Runs ``op`` from ``state``, by default from the start of a chunk."""
        network = MemoryMLP(**self.network, norm=self.norm or None)  # type: ignore[arg-type]
        state = self.start() if state is None else state
        return op(
            self.q, self.k, self.v, self.theta, self.alpha, self.eta, state, chunk_size,
            **{"network": network, "mask": self.mask, "rest": self.rest or None, **self.options, **options},
        )  # fmt: skip

    def start(self) -> MemoryState:
        return MemoryState.create(self.weights, self.momentum)

    def inputs(self) -> dict[str, Tensor]:
        """All differentiable tensors by name."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "theta", "alpha", "eta")}
        for name in ("weights", "momentum", "norm", "rest"):
            named |= {f"{name}.{i}": x for i, x in enumerate(getattr(self, name))}
        return {name: x for name, x in named.items() if x is not None}

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Call:
        """The call with ``function(name, tensor)`` in place of every differentiable tensor."""
        changed: dict[str, Any] = {name: () for name in ("weights", "momentum", "norm", "rest")}
        for name, x in self.inputs().items():
            group = name.split(".")[0]
            changed[group] = (*changed[group], function(name, x)) if "." in name else function(name, x)
        return replace(self, **changed)

    def tokens(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The call with ``function`` applied to everything that has a time dimension, put third."""
        mask = None if self.mask is None else function(self.mask[:, None])[:, 0]
        return replace(self.map(lambda name, x: x if "." in name else function(x)), mask=mask)

    def between(self, start: int, stop: int) -> Call:
        return self.tokens(lambda x: x[:, :, start:stop])

    def row(self, index: int) -> Call:
        """One sequence of the batch alone, a batch of one."""
        one = self.map(lambda name, x: x if name.startswith("norm") else x[index : index + 1])
        return replace(one, mask=None if self.mask is None else self.mask[index : index + 1])


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_gate(*shape: int, seed: int) -> Tensor:
    """Values from all of [0, 1], with zeros and ones among them in every second head."""
    generator = torch.Generator().manual_seed(seed)
    gate = torch.rand(shape, generator=generator, dtype=torch.float64)
    at = torch.rand(shape, generator=generator, dtype=torch.float64)
    gate[:, 1::2] = gate[:, 1::2] ** 4  # small ones: what is written stays for long
    gate[:, ::2][at[:, ::2] < 0.1] = 0
    gate[:, ::2][at[:, ::2] > 0.9] = 1
    return gate


def draw_forgetting(case: Case, *shape: int, seed: int) -> Tensor:
    """A gate from all of [0, 1]; for deep memory only at the end.

    Once a deep memory has forgotten everything, its gradients are zero and it stays empty: little to compare. A row
    that the guard has cut and that nothing moves until the next check stands where cutting has no derivative, so in a
    guarded memory both weights and momentum always fade a little.
    """
    alpha = draw_gate(*shape, seed=seed)
    if case.depth > 1:
        alpha[:, :, :-4] *= 0.02
        alpha[:, :, -4:-1] *= 0.5
        if case.time > 5:
            alpha[0, 0, -3] = 1
    return alpha if case.max_norm is None else alpha.clamp(min=1e-3)


def draw_mask(time: int, seed: int) -> Tensor:
    """About two tokens in three; the rows differ in how many."""
    uniform = torch.rand(BATCH, time, generator=torch.Generator().manual_seed(seed))
    return uniform < torch.linspace(0.5, 0.8, BATCH).unsqueeze(1)


def make(case: Case, dtype: torch.dtype = torch.float64) -> Call:
    """Draws a case's tensors: unit keys and queries, weights that keep the size of what they multiply."""
    seed = 100 * case.seed
    out = case.width if case.residual else case.width - 1
    hidden = case.expansion * case.width
    widths = [case.width, *[hidden] * (case.depth - 1), out]
    gate = (BATCH, HEADS, case.time, out) if case.channels else (BATCH, HEADS, case.time)
    shapes = [(BATCH, HEADS, o, i + int(case.bias)) for i, o in pairwise(widths)]

    def tokens(width: int, number: int) -> Tensor:
        return draw(BATCH, HEADS, case.time, width, seed=seed + number)

    most = 1.0 if case.max_norm is None else 0.999
    options: dict[str, Any] = {"loss": case.loss, "bounded": case.bounded, "max_norm": case.max_norm}
    options |= {"first_order": case.first_order, "return_surprise": case.surprise}
    norm = (1 + 0.3 * draw(HEADS, out, seed=seed + 8), 0.3 * draw(HEADS, out, seed=seed + 9)) if case.norm else ()
    call = Call(
        q=F.normalize(tokens(case.width, 1), dim=-1),
        k=F.normalize(tokens(case.width, 2), dim=-1),
        v=tokens(out, 3),
        theta=case.step * draw_gate(*gate, seed=seed + 4),
        alpha=draw_forgetting(case, *gate, seed=seed + 5) if case.forgetting else None,
        eta=draw_gate(*gate, seed=seed + 6).clamp(max=most) if case.momentum else None,
        weights=tuple(draw(*s, seed=seed + 20 + i) * s[-1] ** -0.5 for i, s in enumerate(shapes)),
        momentum=tuple(0.1 * draw(*s, seed=seed + 40 + i) for i, s in enumerate(shapes)),
        norm=norm,
        rest=tuple(0.5 * draw(*s, seed=seed + 60 + i) for i, s in enumerate(shapes)) if case.rest else (),
        mask=draw_mask(case.time, seed + 7) if case.masked else None,
        network={"activation": case.activation, "bias": case.bias, "residual": case.residual},
        options=options,
    )
    return call.map(lambda name, x: x.to(dtype))


def values(out: Sequence[Any]) -> dict[str, Tensor]:
    """All that a call returned, by name."""
    y, state, *surprise = out
    found = {"y": y, "position": state.positions}
    for name in ("weights", "momentum", "anchor"):
        found |= {f"{name}.{i}": x for i, x in enumerate(getattr(state, name))}
    return found | {f"surprise.{name}": x for one in surprise for name, x in one._asdict().items()}


def values_and_gradients(op: Op, call: Call, chunk_size: int | None, **options: Any) -> dict[str, Tensor]:
    """All that a call returns, and the gradients of a random sum of it in all that went in."""
    call = call.map(lambda name, x: x.detach().clone().requires_grad_())
    found = values(call(op, chunk_size, **options))
    outputs = [x for x in found.values() if x.requires_grad]
    cotangents = [draw(*x.shape, seed=1000 + i, dtype=x.dtype) for i, x in enumerate(outputs)]
    leaves = call.inputs()
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, materialize_grads=True)
    found = {name: x.detach() for name, x in found.items()}
    return found | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


def assert_same(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float = TOLERANCE,
    slack: Mapping[str, float] | None = None,
) -> None:
    """Every tensor within ``tolerance`` of the expected one, relative to the largest number in it.

    ``slack`` may allow single tensors more.
    """
    assert actual.keys() == expected.keys()
    wrong = []
    for name, want in expected.items():
        found = actual[name]
        assert found.shape == want.shape, f"{name} has shape {tuple(found.shape)}, expected {tuple(want.shape)}"
        assert want.isfinite().all(), f"the expected {name} is not finite: the case is too hard"
        if want.numel():
            error = relative_error(found, want)
            if not error <= max(tolerance, (slack or {}).get(name, 0)):
                wrong.append(f"{name}: {error:.1e}")
    assert not wrong, "relative errors: " + ", ".join(wrong)


def relative_error(found: Tensor, want: Tensor) -> float:
    found, want = found.detach().double(), want.detach().double()
    return float((found - want).abs().amax() / want.abs().amax().clamp(min=FLOOR))


def assert_equals_the_definition(op: Op, case: Case, allow_chaos: bool = False) -> None:
    """The chunked rule against token by token with the same chunk, the exact rule against token by token.

    ``allow_chaos``: where the definition itself is moved by rounding errors in its inputs, another way to compute it
    may be off by a hundred times as much.
    """
    both: dict[str, Any] = {}
    chunk = case.chunk
    if op is not neural_memory_chunked:
        chunk = 1
        both["decay_first"] = case.decay_first
        if case.max_norm is not None:
            both["guard_every"] = GUARD
    call = make(case)
    expected = values_and_gradients(neural_memory_recurrent, call, chunk, **both)
    every = {"checkpoint_every": case.checkpoint_every}
    actual = values_and_gradients(op, call, case.chunk, **both, **every)
    slack = None
    if allow_chaos:
        nearby = call.map(lambda _, x: x * (1 - 1e-15 * torch.rand_like(x)))
        moved = values_and_gradients(neural_memory_recurrent, nearby, chunk, **both)
        slack = {name: 100 * relative_error(moved[name], x) for name, x in expected.items() if x.numel()}
    assert_same(actual, expected, slack=slack)


def assert_identical(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    different = [name for name, want in expected.items() if not torch.equal(actual[name], want)]
    assert not different


def in_pieces(op: Op, call: Call, chunk_size: int | None, cuts: Sequence[int], **options: Any) -> dict[str, Tensor]:
    """What a call returns if it is made in several, cut before the tokens ``cuts``."""
    state = call.start()
    parts = []
    edges = [0, *sorted(cuts), call.q.shape[2]]
    for start, stop in pairwise(edges):
        out = call.between(start, stop)(op, chunk_size, state, **options)
        state = out[1]
        parts.append(values(out))
    whole = dict(parts[-1])
    for name in whole:
        if name == "y" or name.startswith("surprise"):
            whole[name] = torch.cat([part[name] for part in parts], dim=2)
    return whole


def mixed(count: int, seed: int, choices: Mapping[str, Sequence[Any]]) -> list[Case]:
    """``count`` cases in which every choice of every field occurs equally often, in random company."""
    generator = random.Random(seed)
    columns = {}
    for name, options in choices.items():
        column = [options[i % len(options)] for i in range(count)]
        generator.shuffle(column)
        columns[name] = column
    return [_fitting(Case(**{name: c[i] for name, c in columns.items()}, seed=seed + i)) for i in range(count)]


def _fitting(case: Case) -> Case:
    if case.channels:  # gates per output channel are for linear memory
        case = replace(case, depth=1, residual=False, norm=False, bias=False)
    if case.norm:  # over many tokens a norm on what is left of a memory makes rounding errors large
        case = replace(case, time=min(case.time, 37))
    if case.max_norm is not None:  # see draw_forgetting
        case = replace(case, forgetting=True)
    return case


ONE_AT_A_TIME = [
    Case(),
    Case(depth=1),
    Case(depth=3),
    Case(depth=4, time=13),
    Case(activation="gelu"),
    Case(activation="gelu_tanh"),
    Case(activation="relu"),
    Case(bias=True),
    Case(expansion=2),
    Case(residual=True),
    Case(norm=True),
    Case(depth=1, norm=True, bias=True, residual=True),
    Case(loss="dot"),
    Case(momentum=False),
    Case(forgetting=False),
    Case(momentum=False, forgetting=False),
    Case(depth=1, momentum=False, forgetting=False),
    Case(rest=True),
    Case(depth=1, rest=True, masked=True),
    Case(rest=True, max_norm=0.5, bounded=True, masked=True, bias=True),
    Case(depth=1, channels=True, rest=True, max_norm=0.5),
    Case(rest=True, first_order=True, checkpoint_every=1),
    Case(depth=1, channels=True),
    Case(depth=1, channels=True, masked=True, surprise=True),
    Case(masked=True),
    Case(depth=1, masked=True),
    Case(bounded=True),
    Case(depth=1, bounded=True),
    Case(bounded=True, masked=True, surprise=True),
    Case(max_norm=0.5),
    Case(depth=1, max_norm=0.2),
    Case(max_norm=0.5, masked=True, bounded=True),
    Case(first_order=True),
    Case(depth=1, first_order=True),
    Case(first_order=True, bounded=True, masked=True),
    Case(surprise=True),
    Case(depth=1, surprise=True, loss="dot"),
    Case(checkpoint_every=1),
    Case(checkpoint_every=2, masked=True, bounded=True, norm=True, surprise=True),
]

CHOICES: dict[str, Sequence[Any]] = {
    "depth": (1, 2, 3, 4),
    "time": (1, 5, 16, 17, 37),
    "chunk": CHUNKS,
    "activation": ("silu", "gelu", "gelu_tanh", "relu"),
    "bias": (False, True),
    "expansion": (1, 2),
    "residual": (False, True),
    "norm": (False, False, False, True),
    "loss": ("squared", "squared", "dot"),
    "momentum": (True, True, True, False),
    "forgetting": (True, True, True, False),
    "rest": (False, True),
    "channels": (False,) * 9 + (True,),
    "masked": (False, True),
    "bounded": (False, True),
    "max_norm": (None, 0.7),
    "first_order": (False, False, False, True),
    "checkpoint_every": (None, 1, 2),
    "surprise": (False, True),
}
