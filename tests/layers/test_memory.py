"""NeuralMemory: all modes are one model, and a sequence may come in any pieces, batches and paddings."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import assert_identical, assert_same, draw, relative_error, values
from titans import MemoryState, NeuralMemory
from titans.layers.memory import priced

DIM, TIME = 8, 21
MODES: dict[str, dict[str, Any]] = {
    "exact": {"mode": "exact"},
    "exact, linear": {"mode": "exact", "depth": 1},
    "chunked": {"mode": "chunked", "chunk_size": 8},
    "chunked, linear": {"mode": "chunked", "chunk_size": 8, "depth": 1},
}
every_mode = pytest.mark.parametrize("mode", MODES)


def memory(dtype: torch.dtype = torch.float64, *, seed: int = 0, trained: bool = True, **options: Any) -> NeuralMemory:
    """A small memory; ``trained``: none of its parameters stands at its initial zero, and its gates are open."""
    torch.manual_seed(seed)
    layer = NeuralMemory(DIM, **{"heads": 2, **options})
    if trained:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return layer.to(dtype)


def tokens(time: int = TIME, batch: int = 2, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(batch, time, DIM, seed=seed, dtype=dtype)


def left_padding(time: int = TIME) -> Tensor:
    """The first row is padded by 5 tokens, the second by none."""
    mask = torch.ones(2, time, dtype=torch.bool)
    mask[0, :5] = False
    return mask


def found(out: Any) -> dict[str, Tensor]:
    """All that a call returned, by name, the convolution's inputs too."""
    return values(out) | {f"conv.{i}": x for i, x in enumerate(out[1].conv)}


def pieces(layer: NeuralMemory, x: Tensor, cuts: list[int], mask: Tensor | None = None) -> dict[str, Tensor]:
    """What the layer returns for x if it is called once for every piece."""
    state = None
    outputs = []
    edges = [0, *sorted(cuts), x.shape[1]]
    for start, stop in pairwise(edges):
        y, state = layer(x[:, start:stop], state, None if mask is None else mask[:, start:stop])
        outputs.append(y)
    return found((torch.cat(outputs, dim=1), state))


def with_gradients(layer: NeuralMemory, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Two calls, the second going on from the first: all results, and the gradients in x and every parameter."""
    x = x.clone().requires_grad_()
    half = x.shape[1] // 2 + 1
    masks = (None, None) if mask is None else (mask[:, :half], mask[:, half:])
    y1, state, surprise1 = layer(x[:, :half], mask=masks[0], return_surprise=True)
    y2, state, surprise2 = layer(x[:, half:], state, mask=masks[1], return_surprise=True)
    results = found((torch.cat([y1, y2], 1), state))
    for name in ("gradient_norm", "loss"):
        results[f"surprise.{name}"] = torch.cat([getattr(surprise1, name), getattr(surprise2, name)], 2)
    outputs = [r for r in results.values() if r.requires_grad]
    leaves = {"x": x, **dict(layer.named_parameters())}
    cotangents = [draw(*r.shape, seed=i, dtype=r.dtype) for i, r in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    unused = [name for name, g in zip(leaves, gradients, strict=True) if g is None]
    assert not unused, "these have no part in the result"
    results = {name: r.detach() for name, r in results.items()}
    return results | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


def gradients_of(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: g for name, g in results.items() if name.startswith("gradient of")}


SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"depth": 1},
    "three layers, wide": {"depth": 3, "expansion": 2.0, "activation": "gelu"},
    "no convolution": {"conv_kernel": 0},
    "no momentum": {"momentum": False},
    "no forgetting": {"forgetting": False},
    "constant gates": {"gates": "constant"},
    "forgetting to zero": {"forget_to": "zero"},
    "bias": {"bias": True},
    "residual": {"residual": True},
    "narrow heads": {"head_dim": 3},
    "unbounded": {"bounded": False, "theta_max": 0.1},
    "guarded": {"max_norm": 0.5},
    "checkpoints": {"checkpoint_every": 1},
    "huber": {"loss": "huber"},
    "gates that close": {"gate_cutoff": 0.5},
}
every_switch = pytest.mark.parametrize("switch", SWITCHES)


@every_switch
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["exact", "chunked"])
def test_every_mode_is_the_definition(mode: str, padded: bool, switch: str) -> None:
    chunk = {"exact": 1, "chunked": 6}[mode]
    options = SWITCHES[switch]
    fast = memory(mode=mode, chunk_size=5 if mode == "exact" else chunk, **options)
    slow = memory(mode="recurrent", chunk_size=chunk, seed=1, **options)
    slow.load_state_dict(fast.state_dict())
    mask = left_padding() if padded else None
    assert_same(with_gradients(fast, tokens(), mask), with_gradients(slow, tokens(), mask), 1e-8)


@every_mode
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(0, TIME), max_size=6), padded=st.booleans())
def test_any_split_gives_the_same_outputs_and_state(mode: str, cuts: list[int], padded: bool) -> None:
    layer, x = memory(**MODES[mode]), tokens()
    mask = left_padding() if padded else None
    assert_same(pieces(layer, x, cuts, mask), found(layer(x, mask=mask)))


@every_mode
def test_one_token_at_a_time_gives_the_same_outputs_and_state(mode: str) -> None:
    layer, x = memory(**MODES[mode]), tokens()
    assert_same(pieces(layer, x, list(range(1, TIME))), found(layer(x)))


@every_mode
@pytest.mark.parametrize("masked", ["left", "right", "scattered", "all of one row"])
def test_a_padded_row_is_the_row_alone_and_goes_on_like_it(mode: str, masked: str) -> None:
    layer, x, more = memory(**MODES[mode]), tokens(), tokens(10, seed=2)
    mask = left_padding()
    if masked == "right":
        mask = mask.flip(1)
    elif masked == "scattered":
        mask = torch.rand(2, TIME, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.5], [0.8]])
    elif masked == "all of one row":
        mask[0] = False
    y, state, surprise = layer(x, mask=mask, return_surprise=True)
    after = layer(more, state)
    for row in range(2):
        present = mask[row]
        alone, own, own_surprise = layer(x[row : row + 1, present], return_surprise=True)
        torch.testing.assert_close(y[row : row + 1, present], alone, rtol=1e-9, atol=1e-11)
        assert not y[row, ~present].any()
        for both, single in zip(surprise, own_surprise, strict=True):
            torch.testing.assert_close(both[row : row + 1][:, :, present], single, rtol=1e-9, atol=1e-11)
        assert_same(
            {name: r[row : row + 1] for name, r in found(after).items()}, found(layer(more[row : row + 1], own))
        )


@every_mode
def test_what_is_padded_does_not_matter(mode: str) -> None:
    layer, x, mask = memory(torch.float32, **MODES[mode]), tokens(dtype=torch.float32), left_padding()
    garbage = torch.where(mask.unsqueeze(-1), x, 1e30)
    assert_same(with_gradients(layer, garbage, mask), with_gradients(layer, x, mask), 1e-4)


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_a_call_is_a_write_and_its_output(masked: bool) -> None:
    layer, x, mask = memory(), tokens(), left_padding() if masked else None
    y, state = layer(x, None, mask)
    said, written = layer.write(x, layer.init_state(2), mask)
    assert_same(found((layer.output(said, layer.output_gate(x)), written)), found((y, state)))
    assert not masked or not said[0, :, :5].any()


def test_reading_is_the_network_at_the_query() -> None:
    layer = memory(depth=1, heads=1, conv_kernel=0)
    _, state = layer(tokens())
    x = tokens(4, seed=2)
    q = F.normalize(F.silu(x @ layer.to_qkv.weight[:DIM].T), dim=-1)
    y = q @ state.weights[0][:, 0].mT
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-2) * layer.norm.weight
    expected = (y * F.silu(x @ layer.to_gate.weight.T)) @ layer.to_out.weight.T
    torch.testing.assert_close(layer.read(x, state), expected)


@every_mode
def test_reading_changes_nothing_and_is_what_a_memory_that_is_off_says(mode: str) -> None:
    layer = memory(**MODES[mode])
    _, state = layer(tokens())
    before = {name: r.clone() for name, r in found((tokens(), state)).items()}
    x = tokens(9, seed=2)
    read = layer.read(x, state)
    assert_identical(found((tokens(), state)), before)
    off = memory(**MODES[mode], writes=False)
    still = replace(state, momentum=tuple(torch.zeros_like(s) for s in state.momentum))
    torch.testing.assert_close(off(x, still)[0], read, rtol=1e-9, atol=1e-11)


def test_reading_without_a_state_asks_the_learned_start() -> None:
    layer, x = memory(), tokens()
    assert torch.equal(layer.read(x), layer.read(x, layer.init_state(2)))


@every_switch
@pytest.mark.parametrize("mode", ["exact", "chunked"])
def test_every_parameter_gets_a_gradient_from_the_start(mode: str, switch: str) -> None:
    layer = memory(mode=mode, chunk_size=6, trained=False, **SWITCHES[switch])
    gradients = gradients_of(with_gradients(layer, tokens()))
    assert all(g.isfinite().all() for g in gradients.values())
    assert [name for name, g in gradients.items() if not g.any()] == []


def test_newton_schulz_trains_and_stays_bounded() -> None:
    options = {"mode": "recurrent", "chunk_size": 1, "trained": False}
    layer = memory(optimiser="newton_schulz", **options)
    results = with_gradients(layer, tokens())
    assert all(r.isfinite().all() for r in results.values())
    assert relative_error(results["y"], with_gradients(memory(**options), tokens())["y"]) > 0.1
    gradients = gradients_of(results)
    assert [name for name, g in gradients.items() if not g.any()] == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["exact", "chunked"])
def test_first_order_gradients_are_others_and_still_reach_every_parameter(mode: str, depth: int) -> None:
    first, second = (
        with_gradients(memory(mode=mode, depth=depth, chunk_size=6, first_order=order), tokens())
        for order in (True, False)
    )
    torch.testing.assert_close(first["y"], second["y"], rtol=1e-9, atol=1e-11)
    for name, g in gradients_of(first).items():
        assert g.isfinite().all() and g.any(), name
    key = "gradient of to_qkv.weight"
    assert relative_error(first[key], second[key]) > 1e-3


@every_mode
def test_under_autocast_the_state_stays_in_float32(mode: str) -> None:
    layer, x = memory(torch.float32, **MODES[mode]), tokens(dtype=torch.float32)
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
        y, state = layer(x, state)
    assert y.dtype == torch.bfloat16
    assert {w.dtype for w in (*state.weights, *state.momentum, *state.anchor)} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(layer(x)[0], expected) < 5e-2


@every_mode
def test_a_bfloat16_module_keeps_its_state_in_float32(mode: str) -> None:
    layer, x = memory(torch.bfloat16, **MODES[mode]), tokens(dtype=torch.bfloat16)
    results = with_gradients(layer, x)
    assert results["y"].dtype == torch.bfloat16
    assert results["weights.0"].dtype == results["momentum.0"].dtype == torch.float32
    assert all(g.isfinite().all() for g in gradients_of(results).values())
    wide = copy.deepcopy(layer).double()
    assert relative_error(layer(x)[0], wide(x.double())[0]) < 5e-2


@pytest.mark.parametrize("mode", ["exact", "chunked", "recurrent"])
def test_a_memory_that_is_off_does_not_know_what_came_before(mode: str) -> None:
    layer = memory(mode=mode, chunk_size=4, writes=False, conv_kernel=0)
    x = tokens()
    other = torch.cat([tokens(15, seed=3), x[:, 15:]], dim=1)
    (y, state), (other_y, other_state) = layer(x), layer(other)
    assert torch.equal(y[:, 15:], other_y[:, 15:])
    assert all(torch.equal(a, b) for a, b in zip(state.weights, other_state.weights, strict=True))
    torch.testing.assert_close(state.weights, layer.init_state(2).weights)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
@every_mode
def test_a_bounded_memory_stays_finite_whatever_it_reads(mode: str, trained: bool) -> None:
    noise = draw(2, 1536, DIM, seed=1, dtype=torch.float32)
    streams = {
        "large": 1e4 * noise[0],
        "huge": 1e30 * noise[0],
        "zeros": torch.zeros_like(noise[0]),
        "one token again and again": noise[0, :1].expand_as(noise[0]),
        "tiny": 1e-30 * noise[0],
        "now huge, now tiny": torch.where(noise[1] > 0, 1e30, 1e-30) * noise[0],
    }
    layer = memory(torch.float32, trained=trained, **MODES[mode])
    with torch.no_grad():
        y, state, surprise = layer(torch.stack(list(streams.values())), return_surprise=True)
    for row, name in enumerate(streams):
        if "huge" not in name:  # the output is gated by the input itself
            assert y[row].isfinite().all(), name
        assert all(w[row].isfinite().all() for w in (*state.weights, *state.momentum)), name
        assert surprise.gradient_norm[row].isfinite().all(), name
    if not trained:  # an empty memory's first loss is the value's own length
        assert (surprise.loss[:, :, 0] <= 1.001).all()


STREAMS = {"noise": tokens(), "zeros": torch.zeros(2, TIME, DIM), "one token": tokens(1).expand(2, TIME, DIM)}


@every_mode
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
def test_gradients_stay_finite_in_float32_too(mode: str, stream: str, trained: bool) -> None:
    layer = memory(torch.float32, trained=trained, **MODES[mode])
    gradients = gradients_of(with_gradients(layer, STREAMS[stream].float()))
    assert [name for name, g in gradients.items() if not g.isfinite().all()] == []


@every_mode
@pytest.mark.parametrize("changed", [0, 8, 11, 15, TIME - 1])
def test_no_output_before_a_changed_token_moves_by_one_bit(mode: str, changed: int) -> None:
    layer, x = memory(torch.float32, **MODES[mode]), tokens(dtype=torch.float32)
    other = x.clone()
    other[:, changed] = -x[:, changed].flip(-1)
    (y, _, surprise), (other_y, _, other_surprise) = (layer(z, return_surprise=True) for z in (x, other))
    assert torch.equal(y[:, :changed], other_y[:, :changed])
    assert torch.equal(surprise.loss[:, :, :changed], other_surprise.loss[:, :, :changed])
    assert not torch.equal(y[:, changed], other_y[:, changed])


@every_mode
def test_a_sequence_does_not_move_another_by_one_bit(mode: str) -> None:
    layer, x = memory(**MODES[mode]), tokens()
    other = torch.stack([x[0], 3 * x[1].flip(0)])
    before, after = found(layer(x)), found(layer(other))
    assert all(torch.equal(after[name][0], r[0]) for name, r in before.items())
    assert not torch.equal(after["y"][1], before["y"][1])


@every_mode
@pytest.mark.parametrize("start", [0, 3])
def test_a_long_stretch_without_a_graph_is_the_same(mode: str, start: int) -> None:
    layer, x = memory(**MODES[mode]), tokens(start + 1100, batch=1)
    state = layer(x[:, :start])[1] if start else None
    expected = found(layer(x[:, start:], state, return_surprise=True))
    with torch.no_grad():
        actual = found(layer(x[:, start:], None if state is None else state.detach(), return_surprise=True))
    assert_same(actual, expected)


@every_mode
def test_a_saved_and_loaded_state_goes_on_identically(mode: str, tmp_path: Path) -> None:
    layer, x = memory(**MODES[mode]), tokens()
    _, state = layer(x[:, :11])
    state.save(tmp_path / "state")
    assert_identical(found(layer(x[:, 11:], MemoryState.load(tmp_path / "state"))), found(layer(x[:, 11:], state)))


@pytest.mark.parametrize("gates", ["token", "constant"])
def test_a_price_on_writing_and_forgetting_is_a_part_of_what_is_minimised(gates: str) -> None:
    layer, x = memory(gates=gates), tokens()

    def gradients(has_price: bool) -> list[Tensor]:
        prices = dict.fromkeys(("theta", "alpha"), torch.tensor(0.3, dtype=torch.float64)) if has_price else {}
        with priced([layer], prices):
            loss = layer(x)[0].square().sum()
        if not has_price:
            assert layer.gate_names[:2] == ("theta", "alpha")
            bias = layer.gate_bias
            raw = layer.to_gates(x)[..., : 2 * layer.heads] if bias is None else bias[:2].expand(2, TIME, -1, -1)
            loss = loss + 0.3 * torch.sigmoid(raw).sum()
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    for mine, wanted in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


def test_prices_end_with_their_context_and_are_of_writing_or_forgetting() -> None:
    layers, price = [memory(), memory()], torch.tensor(0.3)
    with pytest.raises(KeyboardInterrupt), priced(layers, {"alpha": price}):
        assert all(layer.prices == {"alpha": price} for layer in layers)
        raise KeyboardInterrupt
    assert not any(layer.prices for layer in layers)
    unknown = priced(layers, {"eta": price})
    with pytest.raises(ValueError, match=r"^prices has eta; expected some of theta, alpha$"), unknown:
        pass


def test_a_detached_state_ends_the_gradient() -> None:
    layer, x = memory(), tokens().requires_grad_()
    _, state = layer(x[:, :11])
    y, _ = layer(x[:, 11:], state.detach())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not gradient[:, :11].any() and gradient[:, 11:].any()


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "state_dict"])
def test_a_copy_gives_the_same(copied: str) -> None:
    layer, x = memory(), tokens()
    if copied == "deepcopy":
        other = copy.deepcopy(layer)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        other = memory(seed=5)
        assert not torch.equal(other(x)[0], layer(x)[0])
        assert other.load_state_dict(layer.state_dict()).missing_keys == []
    assert_identical(found(other(x)), found(layer(x)))
    with torch.no_grad():
        other.to_out.weight.zero_()
    assert layer(x)[0].any(), "a copy shares nothing"


@pytest.mark.parametrize("shape", [(2, 0, DIM), (0, TIME, DIM)], ids=["no tokens", "no sequences"])
def test_nothing_in_gives_nothing_out(shape: tuple[int, ...]) -> None:
    layer = memory()
    y, state, surprise = layer(torch.zeros(shape, dtype=torch.float64), return_surprise=True)
    assert y.shape == shape and layer.read(torch.zeros(shape, dtype=torch.float64)).shape == shape
    assert surprise.loss.shape == (shape[0], 2, shape[1])
    assert_identical(found((y, state)), found((y, layer.init_state(shape[0]))))


@pytest.mark.parametrize(("heads", "local", "expected"), [
    (4, None, [0.3, 0.3 * 120 ** (-1 / 3), 0.3 * 120 ** (-2 / 3), 0.0025]),
    (4, 1, [0.3, 0.0025, 0.0025, 0.0025]),
    (1, None, [0.0025]),
    (2, 2, [0.3, 0.3 * 120**-0.5]),
    (2, 0, [0.0025, 0.0025]),
])  # fmt: skip
@pytest.mark.parametrize("gates", ["token", "constant"])
def test_local_heads_start_with_mixtures_of_tokens_and_fast_forgetting(
    heads: int, local: int | None, expected: list[float], gates: str
) -> None:
    layer = NeuralMemory(16 * heads, heads, local_heads=local, gates=gates)
    bias = layer.gate_bias if layer.to_gates is None else layer.to_gates.bias.unflatten(0, (-1, heads))
    assert bias is not None and layer.conv is not None
    torch.testing.assert_close(torch.sigmoid(bias[layer.gate_names.index("alpha")]), torch.tensor(expected))
    q, k, v = layer.conv.unflatten(1, (3, heads, 16)).unbind(1)
    count = heads - 1 if local is None else local
    assert torch.equal(q, k)
    assert (k[:, :count].abs() <= 0.5).all() and (k[-1, count:] > 0.5).all() and (v[-1] > 0.5).all()


def test_convolutions_start_with_the_present_token_or_the_mean_of_the_last() -> None:
    for start, expected in (("token", [0.0, 0.0, 0.0, 1.0]), ("mean", [0.5, 0.5, 0.5, 0.5])):
        layer = NeuralMemory(256, 2, local_heads=0, conv_start=start)
        assert layer.conv is not None
        torch.testing.assert_close(layer.conv.mean(1), torch.tensor(expected), atol=0.03, rtol=0)
        q, k, _ = layer.conv.chunk(3, dim=1)
        assert torch.equal(q, k)


@torch.no_grad()
def test_keys_that_start_with_the_mean_are_alike_wherever_a_word_stands() -> None:
    torch.manual_seed(0)
    gained = {}
    for start in ("token", "mean"):
        layer = NeuralMemory(64, 1, conv_kernel=8, conv_start=start)
        facts, asked, others = torch.randn(3, 50, 6, 64)
        asked[:, 4] = facts[:, 0]  # the same word at another place
        (_, k), (q, _), (unrelated, _) = (
            layer._project(x, layer.init_state(50).conv, None)[:2] for x in (facts, asked, others)
        )
        gained[start] = float(((q - unrelated)[:, 0, -1] * k[:, 0, -1]).sum(-1).mean())
    assert gained["mean"] > 0.05 > abs(gained["token"])


@pytest.mark.parametrize("gates", ["token", "constant"])
def test_gates_with_a_cutoff_start_as_without_one(gates: str) -> None:
    torch.manual_seed(0)
    x = torch.zeros(1, 1, DIM)
    plain, closing = (NeuralMemory(DIM, 2, gates=gates, gate_cutoff=cutoff)._gate(x) for cutoff in (0.0, 0.3))
    for name, gate, other in zip(("theta", "alpha", "eta"), plain, closing, strict=True):
        assert gate is not None and other is not None
        torch.testing.assert_close(gate, other, msg=name)


@pytest.mark.parametrize("cutoff", [0.02, 0.16, 0.29, 0.9])
def test_gates_with_a_cutoff_stay_between_0_and_1(cutoff: float) -> None:
    layer = NeuralMemory(DIM, 2, gate_cutoff=cutoff, momentum=False)
    assert layer.to_gates is not None
    for bias, expected in ((-40.0, 0.0), (40.0, 1.0)):
        with torch.no_grad():
            layer.to_gates.bias.fill_(bias)
        for gate in layer._gate(torch.zeros(1, 3, DIM))[:2]:
            assert gate is not None and bool((gate == expected).all())


def test_a_closed_gate_gets_a_gradient_if_that_would_open_it_and_no_other() -> None:
    layer = NeuralMemory(DIM, 2, momentum=False, gate_cutoff=0.5)
    assert layer.to_gates is not None
    with torch.no_grad():
        layer.to_gates.weight.zero_()
        layer.to_gates.bias.fill_(-1.0)  # below the cutoff: closed
    theta, alpha, _ = layer._gate(torch.randn(1, 3, DIM))
    assert alpha is not None and bool((theta == 0).all()) and bool((alpha == 0).all())
    for sign, moves in ((1.0, False), (-1.0, True)):  # a positive gradient would close it further
        (gradient,) = torch.autograd.grad(sign * (theta.sum() + alpha.sum()), layer.to_gates.bias, retain_graph=True)
        assert bool((gradient < 0).all()) is moves and bool((gradient == 0).all()) is not moves
    with torch.no_grad():
        layer.to_gates.bias.fill_(1.0)
    theta, _, _ = layer._gate(torch.randn(1, 3, DIM))
    slope = torch.sigmoid(torch.tensor(1.0)) * torch.sigmoid(torch.tensor(-1.0)) / 0.5
    (gradient,) = torch.autograd.grad(theta.sum(), layer.to_gates.bias)
    torch.testing.assert_close(gradient[:2], 3 * slope.expand(2))


def test_a_token_whose_gates_are_below_the_cutoff_leaves_the_memory_as_it_was() -> None:
    torch.manual_seed(0)
    layer = NeuralMemory(DIM, 2, momentum=False, gate_cutoff=0.3)
    assert layer.to_gates is not None
    x = torch.randn(1, 40, DIM)
    _, state = layer(x)
    with torch.no_grad():
        layer.to_gates.bias.fill_(-1.0).sub_(layer.to_gates(x).sub(layer.to_gates.bias).amax((0, 1)))
    assert all(bool((gate == 0).all()) for gate in layer._gate(x)[:2] if gate is not None)
    y, after = layer(x, state)
    for before, then in zip(state.weights, after.weights, strict=True):
        assert torch.equal(before, then)
    torch.testing.assert_close(y, layer.read(x, state))


SETTINGS: dict[str, dict[str, Any]] = {
    "dim is 0; expected a whole number of at least 1": {"dim": 0},
    "heads is 0; expected a whole number of at least 1": {"heads": 0},
    "depth is 0; expected a whole number of at least 1": {"depth": 0},
    "mode is 'fast'; expected one of chunked, exact, recurrent": {"mode": "fast"},
    "gates is 'none'; expected one of token, constant": {"gates": "none"},
    "forget_to is 'one'; expected one of start, zero": {"forget_to": "one"},
    "dim is 8 and heads is 3; expected heads to divide dim, or give head_dim": {"heads": 3},
    "head_dim is 0; expected a whole number of at least 1": {"head_dim": 0},
    "chunk_size is 0; expected a whole number of at least 1": {"chunk_size": 0},
    "conv_kernel is -1; expected 0 (none) or the kernel's width": {"conv_kernel": -1},
    "conv_start is 'sum'; expected one of token, mean": {"conv_start": "sum"},
    "local_heads is 3; expected a whole number from 0 to heads, 2, or None": {"local_heads": 3},
    "theta_max is 2; expected a number in (0, 1]": {"theta_max": 2},
    "gate_cutoff is 1; expected a number in [0, 1)": {"gate_cutoff": 1},
    "activation is 'mish'; expected one of silu, gelu, gelu_tanh, relu": {"activation": "mish"},
    "loss is 'cubic'; expected one of squared, dot, huber": {"loss": "cubic"},
    "optimiser is 'adam'; expected one of momentum, newton_schulz": {"optimiser": "adam"},
    "optimiser is 'newton_schulz'; expected it with momentum and the mode recurrent": {"optimiser": "newton_schulz"},
    "engine is 'dual' and mode is 'recurrent'; expected the engine definition": {"engine": "dual", "mode": "recurrent"},
    "sweeps is -1; expected a whole number of at least 0": {"sweeps": -1},
    "max_norm is 0; expected a positive number": {"max_norm": 0},
    "checkpoint_every is 0; expected a whole number of at least 1": {"checkpoint_every": 0},
}


@pytest.mark.parametrize("message", SETTINGS)
def test_settings_are_checked_where_they_are_made(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        NeuralMemory(**{"dim": DIM, "heads": 2, **SETTINGS[message]})


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    layer, x = memory(), tokens()

    def refuses(message: str, *arguments: Any, **named: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            layer(*arguments, **named)

    refuses("x has shape (21, 8); expected (batch, time, 8)", x[0])
    refuses("x has shape (2, 21, 7); expected (batch, time, 8)", x[..., 1:])
    refuses("x has dtype torch.int64; expected a floating dtype", x.long())
    refuses(
        "mask has shape (2, 20) and dtype torch.bool; expected (batch, time) = (2, 21) and bool",
        x,
        mask=left_padding(20),
    )
    refuses("mask has shape (2, 21) and dtype torch.int64", x, mask=left_padding().long())
    refuses("state has weights of shape", x, layer.init_state(3))
    refuses("state has weights of shape", x, memory(depth=3).init_state(2))
    refuses("state has convolution inputs of shape []; expected [(2, 3, 24)]", x, memory(conv_kernel=0).init_state(2))
    x[1, 4, 2] = float("nan")
    refuses("x has 1 values that are NaN or infinite, the first at [1, 4, 2]", x)
    with pytest.raises(ValueError, match="x has 1 values that are NaN"):
        layer.read(x)
    with pytest.raises(ValueError, match="batch_size is -1; expected a whole number of at least 0"):
        layer.init_state(-1)


def test_a_state_inside_a_chunk_of_another_memory_is_refused() -> None:
    _, state = memory(mode="chunked", chunk_size=8)(tokens(11))
    with pytest.raises(ValueError, match="with chunk_size=8, bounded; expected chunk_size=6, bounded"):
        memory(mode="chunked", chunk_size=6)(tokens(), state)
    with pytest.raises(ValueError, match="with chunk_size=8, bounded; expected chunk_size=1, guard_every=64"):
        memory(mode="exact")(tokens(), state)
    memory(mode="chunked", chunk_size=8)(tokens(), state)


def test_states_own_their_tensors() -> None:
    layer = memory(depth=1)
    before = [w.clone() for w in layer.initial]
    for batch in (1, 2):
        start = layer.init_state(batch).detach()
        for w in start.weights:
            w.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, layer.initial, strict=True))
    _, state = layer(tokens())
    assert state.conv[0].untyped_storage().nbytes() == state.conv[0].nbytes, "a view keeps all inputs alive"


@every_mode
@pytest.mark.parametrize("engine", [None, "dual"])
def test_an_aligned_batch_never_makes_the_host_wait(
    mode: str, engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator every look at a number is a stall."""
    layer = memory(torch.float32, check_values=False, engine=engine, **MODES[mode])
    x = tokens(dtype=torch.float32)

    def refuse(*args: Any) -> Any:
        raise AssertionError("the host asked for a number")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)
    monkeypatch.setattr("titans.ops.dual._too_long", lambda *args: True)  # as on an accelerator
    _, state = layer(x[:, :11])
    _, state = layer(x[:, 11:], state)
    assert isinstance(state.position, int)


def test_nan_may_be_let_through_on_purpose() -> None:
    x = tokens()
    x[1, 4, 2] = float("nan")
    y, _ = memory(check_values=False)(x)
    assert y[0].isfinite().all() and y[1, 4:].isnan().all()


def test_printing_it_says_what_it_is() -> None:
    assert "dim=8, heads=2, depth=2, mode=chunked, chunk=16" in repr(memory(mode="chunked", chunk_size=16))


@pytest.mark.parametrize("mode", ["exact", "chunked", "recurrent"])
def test_a_memory_that_does_not_write_stays_at_its_start_however_long_its_rows(mode: str) -> None:
    memory = NeuralMemory(8, heads=2, mode=mode, chunk_size=4 if mode != "exact" else None, max_norm=0.3, writes=False)
    torch.nn.init.normal_(memory.initial[0])
    start = memory.init_state(1)
    _, state = memory(torch.randn(1, 70, 8), start)
    assert all(torch.equal(a, b) for a, b in zip(state.weights, start.weights, strict=True))
