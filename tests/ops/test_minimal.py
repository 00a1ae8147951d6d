"""The paper's rule on one page is the definition, and so are the fast forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.cases import BATCH, HEADS, OPS, Case, make
from titans.ops.minimal import read_and_write


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["recurrent", "exact", "exact by sweeps"])
def test_one_page_is_the_definition(name: str, depth: int) -> None:
    call = make(Case(depth=depth))
    call = replace(call, momentum=tuple(torch.zeros_like(s) for s in call.momentum))
    y, state = call(OPS[name], 1)
    tokens = (call.q, call.k, call.v, call.theta, call.alpha, call.eta)
    for row in range(BATCH):
        for head in range(HEADS):
            mine = [x[row, head] for x in tokens if x is not None]
            found, weights = read_and_write(*mine, tuple(w[row, head] for w in call.weights))  # type: ignore[call-arg, arg-type]
            torch.testing.assert_close(found, y[row, head], rtol=1e-9, atol=1e-12)
            for w, after in zip(weights, state.weights, strict=True):
                torch.testing.assert_close(w, after[row, head], rtol=1e-9, atol=1e-12)
