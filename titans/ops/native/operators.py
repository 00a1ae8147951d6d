"""The compiled loops as PyTorch operators (``torch.ops.titans``), which torch.compile, torch.export and modes can see.

The dispatcher takes longer than some of the loops themselves, so a plain eager call goes straight to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from titans.ops.native.library import is_traced
from titans.ops.once import once_differentiable

Argument: TypeAlias = Tensor | Sequence[Tensor] | Sequence[float] | float | None
Results: TypeAlias = tuple[list[Tensor], list[Tensor]]  # what is asked for, and what only the backward pass needs

REGISTERED = torch.library.Library("titans", "FRAGMENT")  # operators vanish with the object that registered them


class Loop(NamedTuple):
    """A compiled loop: its arguments as a schema, the tensors that it fills, and the call that fills them."""

    arguments: str
    allocate: Callable[..., Results]
    fill: Callable[..., None]

    def __call__(self, *args: Argument) -> Results:
        results, kept = self.allocate(*args)
        self.fill(results, kept, *args)
        return results, kept


class _Differentiable(NamedTuple):
    forward: Loop
    backward: Loop
    save: Callable[..., Sequence[Argument]]


def make_operator(
    name: str, forward: Loop, backward: Loop, *, inputs: int, save: Callable[..., Sequence[Argument]]
) -> Callable[..., Sequence[Tensor]]:
    """Registers ``titans::name`` and ``titans::name_backward``.

    Args:
        inputs: how many of the forward loop's first arguments have gradients; the backward loop returns those of all
            tensors among them, one after the other.
        save: (arguments, results, kept) of the forward loop -> the arguments of the backward loop, but for the first,
            the gradients of the results.

    Returns:
        A function of the forward loop's arguments that gives its results, with gradients.
    """
    loops = _Differentiable(forward, backward, save)
    forward_operator = _register(name, forward)
    backward_operator = _register(f"{name}_backward", backward)

    def set_up(ctx: Any, inputs: Sequence[Argument], output: Results) -> None:
        _save(ctx, save(inputs, *output))
        _, ctx.inputs = _split(inputs)

    def differentiate(ctx: Any, grads: list[Tensor], _: list[Tensor]) -> tuple[Any, ...]:
        found = backward_operator(grads, *_saved(ctx))[0]
        return *_join(found, ctx.inputs[:inputs]), *(None for _ in ctx.inputs[inputs:])

    torch.library.register_autograd(f"titans::{name}", differentiate, setup_context=set_up, lib=REGISTERED)

    def run(*args: Argument) -> Sequence[Tensor]:
        if is_traced():
            return forward_operator(*args)[0]
        tensors, _ = _split(args[:inputs])
        if type(tensors[0]) not in (Tensor, Parameter):
            return forward_operator(*args)[0]
        if needs_gradients(*tensors):
            found: tuple[Tensor, ...] = _Eager.apply(loops, args, *tensors)
            return found
        return forward(*args)[0]

    return run


def needs_gradients(*tensors: Tensor) -> bool:
    """Whether autograd will want what the backward pass needs."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _register(name: str, loop: Loop) -> Callable[..., Results]:
    schema = f"{name}({loop.arguments}) -> (Tensor[] results, Tensor[] kept)"
    REGISTERED.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    REGISTERED.impl(name, loop, "CPU")
    torch.library.register_fake(f"titans::{name}", loop.allocate, lib=REGISTERED)
    operator: Callable[..., Results] = getattr(torch.ops.titans, name).default
    return operator


class _Eager(torch.autograd.Function):
    """The forward loop of ``loops`` with ``args``; ``tensors`` are those among them that may have gradients."""

    @staticmethod
    def forward(ctx: Any, loops: _Differentiable, args: Sequence[Argument], *tensors: Tensor) -> tuple[Tensor, ...]:
        results, kept = loops.forward(*args)
        _save(ctx, loops.save(args, results, kept))
        ctx.backward_loop = loops.backward
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_loop(grads, *_saved(ctx))[0]


def _save(ctx: Any, values: Sequence[Argument]) -> None:
    """Tensors go where autograd watches over them."""
    tensors, ctx.places = _split(values)
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> list[Argument]:
    return _join(ctx.saved_tensors, ctx.places)


def _split(values: Sequence[Argument]) -> tuple[list[Tensor], list[Any]]:
    """The tensors of some arguments, one after the other, and what :func:`_join` needs to put them back."""
    tensors: list[Tensor] = []
    places: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            places.append(Tensor)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            tensors.extend(value)
            places.append(range(len(value)))
        else:
            places.append(value)
    return tensors, places


def _join(tensors: Sequence[Tensor], places: Sequence[Any]) -> list[Argument]:
    rest = iter(tensors)
    return [
        next(rest) if place is Tensor else [next(rest) for _ in place] if isinstance(place, range) else place
        for place in places
    ]
