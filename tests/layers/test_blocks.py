"""The blocks as modules of their own: the equations written out, states, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titans.layers.attention import SegmentAttention, WindowAttention
from titans.layers.blocks import GATES, BlockState, LMMBlock, MACBlock, MAGBlock, MALBlock
from titans.layers.memory import NeuralMemory

DIM, SIZE = 16, 4


def parts() -> tuple[NeuralMemory, SegmentAttention, WindowAttention]:
    return NeuralMemory(DIM, heads=2), SegmentAttention(DIM, 2, SIZE), WindowAttention(DIM, 2, SIZE)


def block(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    memory, segment, window = parts()
    options = {"persistent": 3, **options}
    made = {
        "lmm": lambda: LMMBlock(DIM, memory, **options),
        "mac": lambda: MACBlock(DIM, memory, segment, **options),
        "mag": lambda: MAGBlock(DIM, memory, window, **options),
        "mal": lambda: MALBlock(DIM, memory, window, **options),
    }[name]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return made.double()


def stream(time: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def feed_forward(made: Any, x: Tensor) -> Tensor:
    normed = made.ffn_norm(x)
    return x + made.ffn.down(F.silu(made.ffn.gate(normed)) * made.ffn.up(normed))


NAMES = ("lmm", "mac", "mag", "mal")
every_block = pytest.mark.parametrize("name", NAMES)
with_and_without_skip = pytest.mark.parametrize("skip", [False, True], ids=["stream", "stream and tokens"])


def skipped(made: Any, tokens: Tensor) -> Tensor | int:
    """What the memory sees beside the stream."""
    return 0 if made.token_skip is None else made.token_skip * tokens


@with_and_without_skip
@torch.no_grad()
def test_mac_is_its_equations_token_by_token(skip: bool) -> None:
    """Eq. 21 to 25 with one softmax a token, and a memory that is copied where a segment starts."""
    made = block("mac", token_skip=skip)
    x, originals = stream(2 * SIZE + 2, batch=1), stream(2 * SIZE + 2).flip(1)[:1]
    memory, attention = made.memory, made.attention
    state = memory.init_state(1)
    start, normed = state.weights, made.attention_norm(x)
    seen = normed + skipped(made, originals)
    outputs: list[Tensor] = []
    h: list[Tensor] = []
    for t in range(x.shape[1]):
        place = t % SIZE
        if place == 0:
            start, h = state.weights, []
        past = memory.read_stream(seen[:, :t], start, None)[1] if t else None
        h.append(memory.read_stream(seen[:, t : t + 1], start, past)[0])  # Eq. 21
        tokens, said = normed[:, t - place : t + 1], torch.cat(h, dim=1)
        y, _ = attention(tokens, said, None, made.attention_norm(made.persistent))  # Eq. 22, 23
        y = x[:, t : t + 1] + y[:, -1:]
        m, state = memory(made.memory_norm(y) + skipped(made, originals[:, t : t + 1]), state)  # Eq. 24
        gate = torch.sigmoid(made.gate.y_norm(y) + made.gate.shift)
        outputs.append(feed_forward(made, y + made.gate.m_norm(m) * gate))  # Eq. 25
    torch.testing.assert_close(made(x, tokens=originals)[0], torch.cat(outputs, dim=1), rtol=0, atol=1e-10)


@with_and_without_skip
@torch.no_grad()
def test_mag_is_its_equations(skip: bool) -> None:
    made = block("mag", token_skip=skip)
    x, originals = stream(11), stream(11).flip(1)
    normed, prefix = made.attention_norm(x), made.attention_norm(made.persistent)
    y, _ = made.attention(normed, prefix=prefix)  # Eq. 27
    m, _ = made.memory(torch.cat([prefix.expand(2, -1, -1), normed + skipped(made, originals)], dim=1))
    gated = (made.gate.y_norm(y) + made.gate.shift) * torch.sigmoid(made.gate.m_norm(m[:, 3:]))  # Eq. 28
    torch.testing.assert_close(made(x, tokens=originals)[0], feed_forward(made, x + gated), rtol=0, atol=1e-10)


@with_and_without_skip
@torch.no_grad()
def test_mal_is_its_equations(skip: bool) -> None:
    made = block("mal", token_skip=skip)
    x, originals = stream(11), stream(11).flip(1)
    prefix = made.memory_norm(made.persistent).expand(2, -1, -1)
    m, _ = made.memory(torch.cat([prefix, made.memory_norm(x) + skipped(made, originals)], dim=1))  # Eq. 30
    between = x + m[:, 3:]
    y, _ = made.attention(made.attention_norm(between), prefix=made.attention_norm(made.persistent))  # Eq. 31
    torch.testing.assert_close(made(x, tokens=originals)[0], feed_forward(made, between + y), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_block_that_sees_tokens_wants_them_and_one_without_memory_has_no_use_for_them() -> None:
    for name in NAMES:
        with pytest.raises(
            ValueError, match=r"^tokens is None and the block has a token_skip; expected x as it was before"
        ):
            block(name, token_skip=True)(stream(5))
    assert MALBlock(DIM, None, parts()[2], token_skip=True).token_skip is None


@torch.no_grad()
def test_mal_hears_of_what_its_window_does_not_see_through_the_memory_alone() -> None:
    made = block("mal")
    x = stream(4 * SIZE)
    changed = x.clone()
    changed[:, 0] += 1
    reach = SIZE + made.memory.conv_kernel - 1  # of the window over tokens that the convolution has mixed
    assert bool(((made(x)[0] - made(changed)[0]).abs().amax((0, 2)) > 1e-6).all())
    made.memory.writes = False
    before, after = made(x)[0], made(changed)[0]
    assert not torch.equal(before[:, reach - 1], after[:, reach - 1])
    assert torch.equal(before[:, reach:], after[:, reach:])


@every_block
@torch.no_grad()
def test_rows_may_stand_at_different_places(name: str) -> None:
    made = block(name)
    x = stream(3 * SIZE, batch=3)
    counts = (2, 7, 3 * SIZE)
    mask = torch.arange(3 * SIZE) < torch.tensor(counts).unsqueeze(1)
    y, state = made(x, None, mask)
    more, state = made(stream(SIZE + 1, batch=3), state)
    for row, count in enumerate(counts):
        alone, own = made(x[row : row + 1, :count])
        torch.testing.assert_close(y[row, :count], alone[0], rtol=0, atol=1e-10)
        alone, own = made(stream(SIZE + 1, batch=3)[row : row + 1], own)
        torch.testing.assert_close(more[row], alone[0], rtol=0, atol=1e-10)


@every_block
def test_a_state_can_be_reordered_and_detached(name: str) -> None:
    made = block(name)
    _, state = made(stream(SIZE + 2))
    assert isinstance(state, BlockState) and state.batch_size == 2
    swapped = state.reorder(torch.tensor([1, 0, 1]))
    assert swapped.batch_size == 3
    x = stream(5)
    with torch.no_grad():
        y = made(x, state)[0]
        again = made(x[[1, 0, 1]], swapped)[0]
    torch.testing.assert_close(again, y[[1, 0, 1]], rtol=0, atol=1e-10)
    requires: list[bool] = []
    state.detach().map(lambda t: requires.append(t.requires_grad) or t)
    assert not any(requires)


@every_block
@torch.no_grad()
def test_no_tokens_change_nothing(name: str) -> None:
    made = block(name)
    y, state = made(stream(6)[:, :0])
    assert y.shape == (2, 0, DIM)
    x = stream(6)
    torch.testing.assert_close(made(x, state)[0], made(x)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_lets_attention_and_memory_through(gate: str) -> None:
    made = block("mag", gate=gate)
    made(stream(9))[0].square().sum().backward()
    assert all(bool(p.grad.abs().max() > 0) for p in made.parameters())


def test_parts_that_do_not_fit_are_refused_in_one_sentence() -> None:
    memory, segment, window = parts()
    with pytest.raises(ValueError, match="the block has neither memory nor attention"):
        MACBlock(DIM, None, None)
    with pytest.raises(ValueError, match=r"attention.dim is 16, the block's dim is 32"):
        MAGBlock(32, None, window)
    with pytest.raises(ValueError, match="gate is 'tanh'; expected one of sigmoid, silu, multiply, sum"):
        MACBlock(DIM, memory, segment, gate="tanh")
    with pytest.raises(ValueError, match="ffn is 'moe'; expected one of swiglu, plain"):
        MALBlock(DIM, memory, window, ffn="moe")
    with pytest.raises(ValueError, match="persistent is -1"):
        LMMBlock(DIM, memory, persistent=-1)


@torch.no_grad()
def test_a_stream_that_is_only_read_may_come_in_pieces() -> None:
    memory = parts()[0].double()
    torch.nn.init.normal_(memory.initial[-1])
    x = stream(9)
    weights = memory.init_state(2).weights
    whole, end = memory.read_stream(x, weights, None)
    torch.testing.assert_close(whole, memory.read(x), rtol=0, atol=1e-12)
    first, past = memory.read_stream(x[:, :4], weights, None)
    mask = torch.tensor([[True] * 5 + [False] * 2] * 2)
    second, past = memory.read_stream(F.pad(x[:, 4:], (0, 0, 0, 2)), weights, past, mask)
    torch.testing.assert_close(torch.cat([first, second[:, :5]], dim=1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(past, end, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss": "hinge"}, "loss is 'hinge'; expected one of squared, dot"),
        ({"decay_first": True, "mode": "chunked"}, "decay_first is for the modes exact and recurrent"),
        ({"fixed_theta": 2.0}, "fixed_theta is 2.0; expected a number in"),
        ({"fixed_alpha": [0.5]}, r"fixed_alpha is \[0.5\]; expected 2 numbers in \[0, 1\], one per head"),
        ({"fixed_alpha": [0.5, 0.5], "forgetting": False}, "fixed_alpha is given and forgetting is False"),
    ],
)
def test_memory_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NeuralMemory(DIM, heads=2, **options)


@torch.no_grad()
def test_an_open_segment_keeps_its_own_tokens_alone_alive() -> None:
    _, state = block("mac")(stream(5 * SIZE + 1))
    for x in (state.attention.k, state.attention.v, state.attention.h_k, state.attention.h_v, state.conv):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
