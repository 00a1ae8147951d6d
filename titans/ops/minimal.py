"""The paper's rule and nothing else: one memory, one sequence, one token after another (Eq. 8 and 12 to 15)."""

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = tuple[Tensor, ...]


def answer(weights: Weights, x: Tensor) -> Tensor:
    """M(x): linear layers with SiLU between them."""
    for w in weights[:-1]:
        x = F.silu(w @ x)
    return weights[-1] @ x


def loss(weights: Weights, k: Tensor, v: Tensor) -> Tensor:
    """How wrong M is about a token (Eq. 12)."""
    return (answer(weights, k) - v).square().sum()


def read_and_write(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, alpha: Tensor, eta: Tensor, weights: Weights
) -> tuple[Tensor, Weights]:
    """What M answers to q (time, in) after each token, and M after all of them; theta, alpha and eta are (time,)."""
    momentum = tuple(torch.zeros_like(w) for w in weights)
    outputs = []
    for t in range(len(q)):
        surprise = torch.func.grad(loss)(weights, k[t], v[t])  # Eq. 8
        momentum = tuple(eta[t] * s - theta[t] * u for s, u in zip(momentum, surprise, strict=True))  # Eq. 14
        weights = tuple((1 - alpha[t]) * w + s for w, s in zip(weights, momentum, strict=True))  # Eq. 13
        outputs.append(answer(weights, q[t]))  # Eq. 15
    return torch.stack(outputs), weights
