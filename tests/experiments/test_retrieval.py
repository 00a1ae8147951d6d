"""What a memory leaves of a question, and texts with a share of the one before."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from titans.experiments.retrieval import add_previous, residual
from titans.text.neural import NeuralConfig, NeuralTextMemory

CONFIG = NeuralConfig(width=16, dim=16, depth=1, bias=False, theta=0.1, eta=0.0, alpha=0.0, heads=1)


def texts(count: int, seed: int = 0) -> torch.Tensor:
    """Unit vectors with a large part in common."""
    generator = torch.Generator().manual_seed(seed)
    common = F.normalize(torch.randn(1, 16, generator=generator), dim=-1)
    own = F.normalize(torch.randn(count, 16, generator=generator), dim=-1)
    return F.normalize(2 * common + own, dim=-1)


@torch.no_grad()
def test_a_memory_that_knows_nothing_takes_nothing_from_a_question() -> None:
    neural = NeuralTextMemory(CONFIG)
    asked = texts(3)
    left = residual(neural, neural.current(neural.empty()), asked[None])[0]
    torch.testing.assert_close(left, neural.project(asked))


@torch.no_grad()
def test_what_all_texts_have_in_common_is_taken_from_a_question_and_the_rest_stays() -> None:
    neural = NeuralTextMemory(CONFIG)
    known = texts(256)
    common, asked = F.normalize(known.mean(0), dim=-1), known[:4]
    state = neural.current(neural.write(neural.empty(), known)[0])
    before, after = neural.project(asked), residual(neural, state, asked[None])[0]
    direction = neural.project(common[None])[0]
    assert (before @ direction > 0.8).all()
    assert ((after @ direction).abs() < 0.3).all()
    own = F.normalize(before - (before @ direction)[:, None] * direction, dim=-1)
    assert ((after * own).sum(-1) > 0.5).all()


@torch.no_grad()
def test_it_whitens_as_ridge_regression_on_the_texts_themselves_does() -> None:
    neural = NeuralTextMemory(CONFIG)
    known, asked = texts(256), texts(8, seed=1)
    state = neural.current(neural.write(neural.empty(), known)[0])
    x, q = neural.project(known), neural.project(asked)
    ridge = F.normalize(torch.linalg.solve(x.mT @ x + 10 * torch.eye(16), q.mT).mT, dim=-1)
    left = residual(neural, state, asked[None])[0]
    assert float((left * ridge).sum(-1).min()) > 0.99
    assert float((q * ridge).sum(-1).mean()) < 0.9


def test_a_text_gets_a_share_of_the_one_before_and_the_first_stays() -> None:
    x = texts(5)
    made = add_previous(x, 0.5)
    assert torch.equal(made[0], x[0])
    torch.testing.assert_close(made[1:], x[1:] + 0.5 * x[:-1])
    assert torch.equal(add_previous(x, 0.0), x)
