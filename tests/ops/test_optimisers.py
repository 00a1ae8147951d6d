"""Inner optimisers: Newton and Schulz's against the formula, token by token."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import Case, assert_same, make, values_and_gradients
from titans.ops import (
    Descent,
    Momentum,
    NewtonSchulz,
    neural_memory_recurrent,
)
from titans.ops.optimisers import orthogonalise


def test_orthogonalising_brings_singular_values_near_one_and_leaves_directions() -> None:
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(x, full_matrices=False)
    assert sizes.amax() / sizes.amin() > 3
    found = left.mT @ orthogonalise(x, 5) @ right.mT
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    assert ((diagonal > 0.6) & (diagonal < 1.3)).all()
    assert (found - torch.diag_embed(diagonal)).abs().max() < 1e-9
    assert not orthogonalise(torch.zeros(2, 3), 5).any()


def test_newton_schulz_is_the_obvious_formula() -> None:
    call = make(Case(depth=1, time=5))
    y, state = call(neural_memory_recurrent, 1, optimiser=NewtonSchulz())
    assert call.alpha is not None and call.eta is not None
    (m,), (s,) = call.weights, call.momentum
    for t in range(5):
        k, v, q = (x[:, :, t, :, None] for x in (call.k, call.v, call.q))
        theta, alpha, eta = (x[:, :, t, None, None] for x in (call.theta, call.alpha, call.eta))
        s = eta * s - 2 * (m @ k - v) @ k.mT
        m = (1 - alpha) * m + theta * orthogonalise(s, 5)
        torch.testing.assert_close(y[:, :, t], (m @ q)[..., 0])
    torch.testing.assert_close(state.weights[0], m)
    torch.testing.assert_close(state.momentum[0], s)


def test_it_passes_gradients_and_masks_like_the_others() -> None:
    call = make(Case(time=6, masked=True, bounded=True, rest=True))
    found = values_and_gradients(neural_memory_recurrent, call, 1, optimiser=NewtonSchulz(3))
    assert all(x.isfinite().all() for x in found.values())
    assert call.mask is not None
    for row in range(2):
        alone = call.row(row).tokens(lambda x, row=row: x[:, :, call.mask[row]])  # type: ignore[misc, index]
        y, _ = alone(neural_memory_recurrent, 1, optimiser=NewtonSchulz(3))
        torch.testing.assert_close(found["y"][row : row + 1, :, call.mask[row]], y)


def test_momentum_is_the_default_with_eta_and_descent_without() -> None:
    for case, optimiser in ((Case(), Momentum()), (Case(momentum=False), Descent())):
        call = make(case)
        named, default = (
            values_and_gradients(neural_memory_recurrent, call, 4, **options)
            for options in ({"optimiser": optimiser}, {})
        )
        assert_same(named, default, 0)


@pytest.mark.parametrize(
    ("case", "optimiser", "message"),
    [
        (Case(), Descent(), "eta is given; expected None for Descent"),
        (Case(momentum=False), NewtonSchulz(), "eta is None; expected a gate for NewtonSchulz"),
    ],
    ids=str,
)
def test_a_gate_that_does_not_fit_is_refused(case: Case, optimiser: Descent | NewtonSchulz, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(case)(neural_memory_recurrent, 1, optimiser=optimiser)
