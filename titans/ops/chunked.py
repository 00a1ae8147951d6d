"""The chunked rule's key pass: every gradient of a chunk is taken at the chunk's first weights."""

from __future__ import annotations

import torch

from titans.ops.coefficients import Coefficients
from titans.ops.dual import Keys, Tile, finish_keys, output_error
from titans.ops.flat import FlatRule, FlatState, FlatTokens, Tensors
from titans.ops.network import ACTIVATIONS


class ChunkKeys:
    """Forwards and backpropagates all keys of a chunk through its anchor."""

    def prepare(self, rule: FlatRule, tile: int, tokens: FlatTokens, coefficients: Coefficients) -> Tensors:
        """Nothing: all of it depends on the anchor."""
        return ()

    def __call__(self, rule: FlatRule, state: FlatState, tile: Tile) -> Keys:
        """Gradients of all tokens of a chunk at its anchor."""
        activation = ACTIVATIONS[rule.network.activation]
        anchor = state.anchor or state.weights
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
