"""What the loops of the chunked and the exact rule share: how a call is described to PyTorch and to C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from titans.ops.native.library import address, addresses, call, empty, integers, zeros
from titans.ops.native.operators import Loop, Results, make_operator

Group: TypeAlias = Sequence[Tensor]
FLAGS = ("alpha", "eta", "momentum", "surprise", "differentiable")  # named to an operator besides settings of C
DERIVED = ("rows", "slots", "depth", "width_in", "width_out", "threads", "max_norm")  # settings of C from elsewhere


class Inputs(ctypes.Structure):
    """The tensors of a call; a pointer is NULL where a tensor is missing."""

    _fields_ = [
        ("outs", ctypes.POINTER(ctypes.c_int)),
        ("ins", ctypes.POINTER(ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "theta", "alpha", "eta", "live", "ends")),
        ("rest", ctypes.POINTER(ctypes.c_void_p)),
    ]  # fmt: skip


@dataclass(frozen=True)
class RuleLoop:
    """``titans_NAME`` and ``titans_NAME_backward`` of NAME.c as an operator.

    Tokens are (n, slots, ...), weights and momentum (n, out, in). The results are y, with surprise also ||u||^2 and the
    loss, and the state.
    """

    name: str
    settings: type[ctypes.Structure]
    keep: Callable[[Mapping[str, int], Tensor, Group, Tensor | None], list[Tensor]]  # (numbers, v, state, ends) -> kept
    pass_kept: Callable[[Group, int, Mapping[str, int]], Sequence[object]]  # (kept, depth, numbers) -> arguments of C

    def make_operator(self) -> Callable[..., Group]:
        """Registers it; the function takes (tokens, state, rest, live, ends, numbers, max_norm)."""
        others, numbers = "Tensor[] rest, Tensor? live, Tensor? ends", "int[] numbers, float max_norm"
        return make_operator(
            self.name,
            Loop(f"Tensor[] tokens, Tensor[] state, {others}, {numbers}", self._allocate, self._fill),
            Loop(
                f"Tensor[] grads, Tensor[] tokens, {others}, Tensor[] kept, {numbers}",
                self._allocate_gradients,
                self._fill_gradients,
            ),
            inputs=3,
            save=lambda args, results, kept: [args[0], *args[2:5], kept, *args[5:]],
        )

    def numbers(self, **values: int) -> list[int]:
        """The operator's numbers: those settings of C that do not follow from tensors, and ``FLAGS``."""
        return [int(values[name]) for name in self._names()]

    def _names(self) -> list[str]:
        ours = (name for name, *_ in self.settings._fields_ if name not in DERIVED)
        return [*dict.fromkeys((*ours, *FLAGS))]

    def _named(self, numbers: Sequence[int]) -> dict[str, int]:
        return dict(zip(self._names(), numbers, strict=True))

    def _allocate(
        self, tokens: Group, state: Group, rest: Group, live: Tensor | None, ends: Tensor | None,
        numbers: Sequence[int], max_norm: float,
    ) -> Results:  # fmt: skip
        named = self._named(numbers)
        v = tokens[2]
        outputs = [empty(v), *(v.new_empty(v.shape[:2]) for _ in range(2 * named["surprise"]))]
        kept = self.keep(named, v, state, ends) if named["differentiable"] else []
        return [*outputs, *map(_copy, state)], kept

    def _fill(
        self, results: Group, kept: Group, tokens: Group, state: Group, rest: Group, live: Tensor | None,
        ends: Tensor | None, numbers: Sequence[int], max_norm: float,
    ) -> None:  # fmt: skip
        named = self._named(numbers)
        outputs, state = _split_outputs(results, named)
        depth = len(state) // (1 + named["momentum"])
        self._call(
            "", named, max_norm, tokens, state[:depth], rest, (live, ends),
            addresses(state[:depth]), addresses(state[depth:]), *self.pass_kept(kept, depth, named), *outputs,
        )  # fmt: skip

    def _allocate_gradients(
        self, grads: Group, tokens: Group, rest: Group, live: Tensor | None, ends: Tensor | None, kept: Group,
        numbers: Sequence[int], max_norm: float,
    ) -> Results:  # fmt: skip
        _, state = _split_outputs(grads, self._named(numbers))
        return [*map(empty, tokens), *map(_copy, state), *map(zeros, rest)], []

    def _fill_gradients(
        self, results: Group, nothing: Group, grads: Group, tokens: Group, rest: Group, live: Tensor | None,
        ends: Tensor | None, kept: Group, numbers: Sequence[int], max_norm: float,
    ) -> None:  # fmt: skip
        named = self._named(numbers)
        outputs, _ = _split_outputs(grads, named)
        count = len(results) - len(rest)
        to_tokens, to_state, to_rest = results[: len(tokens)], results[len(tokens) : count], results[count:]
        depth = len(to_state) // (1 + named["momentum"])
        self._call(
            "_backward", named, max_norm, tokens, to_state[:depth], rest, (live, ends),
            *self.pass_kept(kept, depth, named), *outputs, addresses(to_state[:depth]), addresses(to_state[depth:]),
            *_with_gates(to_tokens, named), addresses(to_rest),
        )  # fmt: skip

    def _call(
        self, suffix: str, named: Mapping[str, int], max_norm: float, tokens: Group, weights: Group, rest: Group,
        masks: Sequence[Tensor | None], *arguments: object,
    ) -> None:  # fmt: skip
        k, v = tokens[1:3]
        derived = (*k.shape[:2], len(weights), k.shape[-1], v.shape[-1], torch.get_num_threads(), max_norm)
        values = {**named, **dict(zip(DERIVED, derived, strict=True))}
        settings = self.settings(*(values[name] for name, *_ in self.settings._fields_))
        held = [None if x is None else x.contiguous() for x in (*_with_gates(tokens, named), *masks)]
        held_rest = [x.contiguous() for x in rest]
        outs, ins = (integers([w.shape[side] for w in weights]) for side in (1, 2))
        inputs = Inputs(outs, ins, *map(address, held), addresses(held_rest))
        call(f"titans_{self.name}{suffix}", v.dtype, ctypes.byref(settings), ctypes.byref(inputs), *arguments)


def _with_gates(tokens: Group, named: Mapping[str, int]) -> list[Tensor | None]:
    """q, k, v, theta, alpha and eta from those that are there."""
    gates = iter(tokens[4:])
    return [*tokens[:4], *(next(gates) if named[name] else None for name in ("alpha", "eta"))]


def _split_outputs(results: Group, named: Mapping[str, int]) -> tuple[list[Tensor | None], Group]:
    """(y, ||u||^2 or None, l or None) and the state."""
    count = 1 + 2 * named["surprise"]
    return [*results[:count], *(None for _ in range(3 - count))], results[count:]


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
