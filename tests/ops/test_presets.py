"""Each preset against the recurrence of its own paper, written as a loop: outputs, final state, gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titans.ops import presets
from titans.ops.state import MemoryState

BATCH, HEADS, WIDTH, OUT = 2, 3, 5, 4
LENGTHS = [1, 16, 37, 150]
TOLERANCE = 1e-9


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def qkv(time: int, out: int = OUT) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, unit keys and values."""
    q, k = draw(BATCH, HEADS, time, WIDTH, seed=1), draw(BATCH, HEADS, time, WIDTH, seed=2)
    return q, F.normalize(k, dim=-1), draw(BATCH, HEADS, time, out, seed=3)


def gate(time: int, seed: int, high: float = 1.0) -> Tensor:
    """Random values in (0, high), and both ends of the range among them."""
    values = high * torch.sigmoid(2 * draw(BATCH, HEADS, time, seed=seed))
    values[:, 0, 1::5], values[:, 0, 3::5] = 0, high
    return values


def outer(v: Tensor, k: Tensor) -> Tensor:
    return v.unsqueeze(-1) * k.unsqueeze(-2)


def apply(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def assert_same_model(
    preset: Callable[..., tuple[Tensor, list[Tensor]]],
    textbook: Callable[..., tuple[Tensor, list[Tensor]]],
    *arguments: Tensor,
) -> None:
    """Both map the arguments to outputs and final weights; these and their gradients must agree."""
    results = []
    for model in (preset, textbook):
        leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
        y, weights = model(*leaves)
        total = sum((x * draw(*x.shape, seed=90 + i)).sum() for i, x in enumerate([y, *weights]))
        assert isinstance(total, Tensor)
        results.append([y, *weights, *torch.autograd.grad(total, leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def loop(step: Callable[..., Tensor], q: Tensor, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The plain recurrence M_t = step(M_{t-1}, inputs_t), read after each write: y_t = M_t q_t."""
    outputs = []
    for t in range(q.shape[2]):
        weight = step(weight, *(x[:, :, t] for x in inputs))
        outputs.append(apply(weight, q[:, :, t]))
    return torch.stack(outputs, 2), [weight]


def linear(preset: Callable[..., tuple[Tensor, MemoryState]]) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """A preset of linear memory as a function of q, k, v, the initial weight and its own gates."""

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *gates: Tensor) -> tuple[Tensor, list[Tensor]]:
        y, state = preset(q, k, v, *gates, MemoryState.create([weight]), chunk_size=16)
        return y, list(state.weights)

    return run


@pytest.mark.parametrize("time", LENGTHS)
def test_linear_attention_adds_outer_products(time: int) -> None:
    def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loop(lambda m, k, v: m + outer(v, k), q, weight, k, v)  # Eq. 4, 5

    arguments = (*qkv(time), draw(BATCH, HEADS, OUT, WIDTH, seed=4))
    assert_same_model(linear(presets.linear_attention), textbook, *arguments)


@pytest.mark.parametrize("time", LENGTHS)
def test_normalised_linear_attention_is_a_weighted_mean_of_the_values(time: int) -> None:
    def preset(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        y, state = presets.linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, chunk_size=16, normalise=True)
        return y, list(state.weights)

    def textbook(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        outputs = []
        for i in range(time):  # Eq. 3, its second form
            similarity = torch.stack([(q[:, :, i] * k[:, :, j]).sum(-1) for j in range(i + 1)], -1)
            mean = similarity / similarity.sum(-1, keepdim=True)
            outputs.append((mean.unsqueeze(-1) * v[:, :, : i + 1]).sum(2))
        weight = torch.cat([v.mT @ k, k.sum(2, keepdim=True)], 2)
        return torch.stack(outputs, 2), [weight]

    assert_same_model(preset, textbook, *qkv(time))


@pytest.mark.parametrize("time", LENGTHS)
def test_retnet_forgets_at_a_fixed_rate_per_head(time: int) -> None:
    def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, gamma: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loop(lambda m, k, v: gamma[:, None, None] * m + outer(v, k), q, weight, k, v)

    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))
    arguments = (*qkv(time), draw(BATCH, HEADS, OUT, WIDTH, seed=4), gamma)
    assert_same_model(linear(presets.retnet), textbook, *arguments)


@pytest.mark.parametrize("time", LENGTHS)
def test_gla_forgets_at_a_rate_per_token(time: int) -> None:
    def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, decay: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loop(lambda m, k, v, a: a[..., None, None] * m + outer(v, k), q, weight, k, v, decay)

    arguments = (*qkv(time), draw(BATCH, HEADS, OUT, WIDTH, seed=4), gate(time, seed=5))
    assert_same_model(linear(presets.gla), textbook, *arguments)


@pytest.mark.parametrize("time", LENGTHS)
def test_gla_is_the_state_space_model_of_mamba2(time: int) -> None:
    def preset(c: Tensor, b: Tensor, x: Tensor, dt: Tensor, log_a: Tensor) -> tuple[Tensor, list[Tensor]]:
        a = -log_a.exp()[:, None]
        y, state = presets.gla(c, b, dt[..., None] * x, torch.exp(dt * a), chunk_size=16)
        return y, list(state.weights)

    def textbook(c: Tensor, b: Tensor, x: Tensor, dt: Tensor, log_a: Tensor) -> tuple[Tensor, list[Tensor]]:
        h = x.new_zeros(BATCH, HEADS, WIDTH, OUT)  # states by channels: h' = A h + B x, y = C h, discretised
        outputs = []
        for t in range(time):
            step = dt[:, :, t, None, None]
            h = torch.exp(-step * log_a.exp()[:, None, None]) * h + step * outer(b[:, :, t], x[:, :, t])
            outputs.append((c[:, :, t, None] @ h).squeeze(-2))
        return torch.stack(outputs, 2), [h.mT]

    dt = F.softplus(draw(BATCH, HEADS, time, seed=6))
    assert_same_model(preset, textbook, *qkv(time), dt, draw(HEADS, seed=7))


@pytest.mark.parametrize("time", LENGTHS)
def test_delta_net_replaces_the_old_value_of_a_key(time: int) -> None:
    def replace(m: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        old = apply(m, k)
        new = beta[..., None] * v + (1 - beta[..., None]) * old
        return m - outer(old, k) + outer(new, k)

    def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, beta: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loop(replace, q, weight, k, v, beta)

    arguments = (*qkv(time), draw(BATCH, HEADS, OUT, WIDTH, seed=4), gate(time, seed=5, high=2.0))
    assert_same_model(linear(presets.delta_net), textbook, *arguments)


@pytest.mark.parametrize("time", LENGTHS)
def test_gated_delta_net_decays_before_it_corrects(time: int) -> None:
    identity = torch.eye(WIDTH, dtype=torch.float64)

    def transition(m: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        beta, decay = beta[..., None, None], decay[..., None, None]
        return m @ (decay * (identity - beta * outer(k, k))) + beta * outer(v, k)

    def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *gates: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loop(transition, q, weight, k, v, *gates)

    gates = gate(time, seed=5, high=2.0), gate(time, seed=6)
    arguments = (*qkv(time), draw(BATCH, HEADS, OUT, WIDTH, seed=4), *gates)
    assert_same_model(linear(presets.gated_delta_net), textbook, *arguments)


@pytest.mark.parametrize("per_channel", [False, True], ids=["beta per head", "beta per channel"])
@pytest.mark.parametrize("time", LENGTHS)
def test_longhorn_solves_each_online_regression(time: int, per_channel: bool) -> None:
    identity = torch.eye(WIDTH, dtype=torch.float64)

    def minimise(m: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """argmin_M ||M - m||^2 + beta ||M k - v||^2 from the normal equations of each output channel."""
        beta = beta.expand(OUT, BATCH, HEADS).movedim(0, -1) if beta.ndim == 2 else beta
        system = identity + beta[..., None, None] * outer(k, k).unsqueeze(2)
        right = m + beta[..., None] * outer(v, k)
        return torch.linalg.solve(system, right)

    def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, beta: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loop(minimise, q, weight, k, v, beta)

    q, k, v = qkv(time)
    k = k * (0.8 + draw(BATCH, HEADS, time, 1, seed=8).square())
    beta = gate(time, seed=5, high=20.0)
    if per_channel:
        beta = torch.stack([beta, *(gate(time, seed=40 + i, high=20.0) for i in range(1, OUT))], -1)
    arguments = (q, k, v, draw(BATCH, HEADS, OUT, WIDTH, seed=4), beta)
    assert_same_model(linear(presets.longhorn), textbook, *arguments)


def ttt_textbook(
    residual: Callable[[list[Tensor], Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *parameters: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Mini-batch gradient descent with mini-batches of 16, the gradients from autograd."""

    def f(parameters: list[Tensor], x: Tensor) -> Tensor:
        z = residual(parameters, x)
        unit = (z - z.mean(-1, keepdim=True)) / (z.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return x + norm_weight * unit + norm_bias

    current, outputs = list(parameters), []
    for t in range(q.shape[2]):
        if t % 16 == 0:
            start = current
        loss = (f(start, k[:, :, t]) - v[:, :, t]).square().sum()
        gradients = torch.autograd.grad(loss, start, create_graph=True)
        current = [
            w - lr[:, :, t].view(BATCH, HEADS, *[1] * (w.ndim - 2)) * g for w, g in zip(current, gradients, strict=True)
        ]
        outputs.append(f(current, q[:, :, t]))
    return torch.stack(outputs, 2), current


def ttt_preset(
    preset: Callable[..., tuple[Tensor, MemoryState]],
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """The preset with weights and biases apart, as the paper has them: W, b, or W1, b1, W2, b2."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lr: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        state = MemoryState.create([torch.cat([weight, bias.unsqueeze(-1)], -1) for weight, bias in pairs])
        y, state = preset(q, k, v, lr, state, (norm_weight, norm_bias))
        return y, [part for weight in state.weights for part in (weight[..., :-1], weight[..., -1])]

    return run


def ttt_arguments(time: int, *shapes: tuple[int, int]) -> list[Tensor]:
    norm = [1 + 0.3 * draw(HEADS, WIDTH, seed=9), 0.3 * draw(HEADS, WIDTH, seed=10)]
    parameters = []
    for i, (out, inside) in enumerate(shapes):
        parameters += [
            0.5 * draw(BATCH, HEADS, out, inside, seed=20 + i),
            0.1 * draw(BATCH, HEADS, out, seed=30 + i),
        ]
    return [*qkv(time, out=WIDTH), 0.1 * gate(time, seed=5), *norm, *parameters]


@pytest.mark.parametrize("time", LENGTHS)
def test_ttt_linear_descends_in_mini_batches(time: int) -> None:
    def residual(parameters: list[Tensor], x: Tensor) -> Tensor:
        weight, bias = parameters
        return apply(weight, x) + bias

    def textbook(*arguments: Tensor) -> tuple[Tensor, list[Tensor]]:
        return ttt_textbook(residual, *arguments)

    assert_same_model(ttt_preset(presets.ttt_linear), textbook, *ttt_arguments(time, (WIDTH, WIDTH)))


@pytest.mark.parametrize("time", LENGTHS)
def test_ttt_mlp_descends_in_mini_batches(time: int) -> None:
    def residual(parameters: list[Tensor], x: Tensor) -> Tensor:
        w1, b1, w2, b2 = parameters
        return apply(w2, F.gelu(apply(w1, x) + b1, approximate="tanh")) + b2

    def textbook(*arguments: Tensor) -> tuple[Tensor, list[Tensor]]:
        return ttt_textbook(residual, *arguments)

    hidden = 4 * WIDTH
    arguments = ttt_arguments(time, (hidden, WIDTH), (WIDTH, hidden))
    assert_same_model(ttt_preset(presets.ttt_mlp), textbook, *arguments)


def test_a_memory_without_a_state_starts_empty() -> None:
    q, k, v = qkv(9)
    beta = gate(9, seed=5)
    empty = MemoryState.create([torch.zeros(BATCH, HEADS, OUT, WIDTH, dtype=torch.float64)])
    for preset in (presets.delta_net, presets.gla, presets.longhorn):
        assert torch.equal(preset(q, k, v, beta)[0], preset(q, k, v, beta, empty)[0])


@pytest.mark.parametrize("cut", [1, 5, 16, 20])
def test_a_sequence_may_be_split_anywhere(cut: int) -> None:
    q, k, v = qkv(24)
    q, k = q.exp(), k.exp()
    whole, end = presets.linear_attention(q, k, v, chunk_size=8, normalise=True)
    head, state = presets.linear_attention(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], None, 8, normalise=True)
    tail, state = presets.linear_attention(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], state, 8, normalise=True)
    torch.testing.assert_close(torch.cat([head, tail], 2), whole, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(state.weights, end.weights, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_masked_token_is_not_there_for_normalised_attention() -> None:
    q, k, v = (x.exp() for x in qkv(10))
    mask = torch.ones(BATCH, 10, dtype=torch.bool)
    mask[:, [0, 4]] = False
    y, state = presets.linear_attention(q, k, v, chunk_size=4, normalise=True, mask=mask)
    q, k, v = (x[:, :, mask[0]] for x in (q, k, v))
    kept, end = presets.linear_attention(q, k, v, chunk_size=4, normalise=True)
    assert not y[:, :, [0, 4]].any()
    torch.testing.assert_close(y[:, :, mask[0]], kept, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(state.weights, end.weights, rtol=TOLERANCE, atol=TOLERANCE)


def test_what_is_out_of_range_is_one_sentence_in_the_model_s_own_words() -> None:
    q, k, v = qkv(3)
    beta, decay = gate(3, seed=5), gate(3, seed=6)
    with pytest.raises(ValueError, match=r"beta has values from 2\.5 to 2\.5; expected them in \[0, 2\]"):
        presets.delta_net(q, k, v, torch.full_like(beta, 2.5))
    with pytest.raises(ValueError, match=r"decay has values from 1\.5 to 1\.5; expected them in \[0, 1\]"):
        presets.gated_delta_net(q, k, v, beta, torch.full_like(decay, 1.5))
    with pytest.raises(ValueError, match=r"decay has values from -1 to -1; expected them in \[0, 1\]"):
        presets.gla(q, k, v, torch.full_like(decay, -1))
    with pytest.raises(ValueError, match=r"gamma has values from 2 to 2; expected them in \[0, 1\]"):
        presets.retnet(q, k, v, torch.full((HEADS,), 2.0))
    with pytest.raises(ValueError, match=r"gamma has shape \(2,\); expected \(heads,\) = \(3,\)"):
        presets.retnet(q, k, v, torch.ones(2))
    with pytest.raises(ValueError, match=r"beta has values from -1 to -1; expected them not to be negative"):
        presets.longhorn(q, k, v, torch.full_like(beta, -1))
    with pytest.raises(ValueError, match=r"beta / \(1 \+ beta \|\|k\|\|\^2\) has values .* in \[0, 2\]"):
        presets.longhorn(q, k / 100, v, torch.full_like(beta, 100))


def test_a_wrong_ttt_state_or_norm_is_one_sentence() -> None:
    q, k, v = qkv(3, out=WIDTH)
    lr = gate(3, seed=5)
    state = MemoryState.create([torch.zeros(BATCH, HEADS, WIDTH, WIDTH + 1, dtype=torch.float64)])
    norm = (torch.ones(HEADS, WIDTH), torch.zeros(HEADS, WIDTH))
    with pytest.raises(ValueError, match="state has 1 layers; expected 2"):
        presets.ttt_mlp(q, k, v, lr, state, norm)
    with pytest.raises(ValueError, match=r"the bias of norm has shape \(5,\); expected \(heads, width\) = \(3, 5\)"):
        presets.ttt_linear(q, k, v, lr, state, (norm[0], norm[1][0]))
    with pytest.raises(ValueError, match=r"lr has values from 2 to 2; expected them in \[0, 1\]"):
        presets.ttt_linear(q, k, v, torch.full_like(lr, 2), state, norm)
