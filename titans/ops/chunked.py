"""The paper's parallel rule: every gradient of a chunk is taken at the chunk's first weights, in the dual form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titans.ops.coefficients import Coefficients
from titans.ops.dual import (
    Carry,
    Keys,
    Rule,
    Stretch,
    Tensors,
    Tile,
    Tokens,
    finish_keys,
    join_outputs,
    output_error,
    run_tiles,
)
from titans.ops.fold import call_dual
from titans.ops.native import chunked as native
from titans.ops.network import ACTIVATIONS, MemoryMLP
from titans.ops.state import MemoryState, Surprise


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
    network: MemoryMLP = MemoryMLP(),  # noqa: B008 (frozen)
    loss: str = "squared",
    mask: Tensor | None = None,
    rest: Sequence[Tensor] | None = None,
    bounded: bool = False,
    max_norm: float | None = None,
    first_order: bool = False,
    return_surprise: bool = False,
    checkpoint_every: int | None = None,
    check_values: bool = True,
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Surprise]:
    """What ``neural_memory_recurrent`` with this ``chunk_size`` gives, many times faster (Eq. 16 to 18, Algorithm 2).

    The arguments are those of :func:`titans.ops.neural_memory_recurrent`, and:
        chunk_size: part of the model: a memory trained with one is a different model with another.
        max_norm: checked at the end of every chunk.
        checkpoint_every: the backward pass keeps the state at every so many chunks and recomputes what lies between;
            default: at every chunk or 64 tokens in the compiled loop, else so many that their graph takes about 128 MB.
    """
    return call_dual(
        ChunkKeys(checkpoint_every), q, k, v, theta, alpha, eta, state,
        tile=chunk_size, period=chunk_size, network=network, loss=loss, mask=mask, rest=rest,
        bounded=bounded, crowding=bounded,
        max_norm=max_norm, anchored=True, decay_first=False, first_order=first_order,
        return_surprise=return_surprise, checkpoint_every=checkpoint_every, check_values=check_values,
    )  # fmt: skip


@dataclass(frozen=True)
class ChunkKeys:
    """The chunked rule's key pass: forward and backpropagate all keys of a chunk through its anchor."""

    checkpoint_every: int | None

    def shortcut(self, rule: Rule, stretch: Stretch, carry: Carry, tokens: Tokens) -> tuple[Carry, Tensors] | None:
        """The compiled loop for whole chunks; a chunk that was entered or is left half way goes the other way."""
        tile, ends = stretch
        start = 1 if carry.anchor else 0
        stop = len(ends) if ends[-1] is True else len(ends) - 1
        if stop <= start or any(end is not True for end in ends[:stop]):
            return None
        if not native.available(rule, carry._replace(anchor=(), gram=None)):
            return None
        outputs = []
        if start:
            carry, out = run_tiles(rule, self, Stretch(tile, ends[:1]), carry, tokens.slots(0, tile))
            outputs.append(out)
        middle = tokens.slots(start * tile, stop * tile)
        carry, out = native.run_chunked(rule, tile, carry, middle, self.checkpoint_every)
        outputs.append(out)
        if stop < len(ends):
            last = tokens.slots(stop * tile, len(ends) * tile)
            carry, out = run_tiles(rule, self, Stretch(tile, ends[stop:]), carry, last)
            outputs.append(out)
        return carry, join_outputs(outputs)

    def prepare(
        self, rule: Rule, stretch: Stretch, carry: Carry, tokens: Tokens, coefficients: Coefficients
    ) -> Tensors:
        """Nothing: all of it depends on the anchor."""
        return ()

    def __call__(self, rule: Rule, carry: Carry, tile: Tile) -> Keys:
        """Gradients of all tokens of a chunk at its anchor."""
        activation = ACTIVATIONS[rule.network.activation]
        anchor = carry.anchor or carry.weights
        if tile.rest:
            anchor = tuple(w + r for w, r in zip(anchor, tile.rest, strict=True))
        if rule.first_order:
            anchor = tuple(w.detach() for w in anchor)
        inputs, slopes = [], []
        x = tile.k
        for index, weight in enumerate(anchor):
            inputs.append(rule.inputs(x))
            z = torch.bmm(inputs[-1], weight.mT)
            if index + 1 < len(anchor):
                x, slope = activation.with_derivative(z)
                slopes.append(slope)
        output = output_error(rule, z, tile)
        deltas = [output.delta]
        for weight, slope in zip(reversed(anchor[1:]), reversed(slopes), strict=True):
            deltas.append(torch.bmm(deltas[-1], weight[..., : slope.shape[-1]]) * slope)
        return finish_keys(rule, tile, tuple(inputs), tuple(reversed(deltas)), output)
