"""Memory caching: the definition token by token, and that every way to run it is the same."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import assert_same, draw
from titans import MemoryState, NeuralMemory, TitansCache, TitansConfig, TitansForCausalLM
from titans.layers.attention import SegmentAttention
from titans.layers.blocks import MACBlock
from titans.ops.state import CachedSegments

DIM, TIME, SIZE = 8, 23, 4
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "linear": {"depth": 1},
    "best two": {"cache_top_k": 2},
    "average": {"cache_average": True},
    "average of the best two": {"cache_average": True, "cache_top_k": 2, "bias": True},
    "three states": {"cache_max_states": 3},
    "one state": {"cache_max_states": 1, "depth": 1},
    "three states, best": {"cache_max_states": 3, "cache_top_k": 1},
    "chunked": {"mode": "chunked", "chunk_size": 3, "cache_max_states": 2},
    "norm and residual": {"layer_norm": True, "residual": True, "cache_average": True},
    "unbounded": {"bounded": False, "theta_max": 0.1, "conv_kernel": 0},
}
QUICK = ("average of the best two", "three states, best", "chunked")
every_kind = pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)


def memory(dtype: torch.dtype = torch.float64, **options: Any) -> NeuralMemory:
    """A small memory, none of whose parameters stands at its start."""
    torch.manual_seed(0)
    layer = NeuralMemory(DIM, **{"heads": 2, "cache_segment_size": SIZE, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        if layer.to_fit is not None:
            layer.to_fit *= 5  # so that a token prefers some segments to others
    return layer.to(dtype)


def without_cache(layer: NeuralMemory, **options: Any) -> NeuralMemory:
    """A memory with the same parameters that keeps nothing."""
    options = {name: value for name, value in options.items() if not name.startswith("cache_")}
    plain = NeuralMemory(DIM, **{"heads": 2, **options}).double()
    shared = {name: each for name, each in layer.named_parameters() if not name.startswith("to_fit")}
    for name, parameter in shared.items():
        owner, _, last = name.rpartition(".")
        plain.get_submodule(owner)._parameters[last] = parameter
    return plain


def tokens(time: int = TIME, batch: int = 1, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(batch, time, DIM, seed=seed, dtype=dtype)


class Kept:
    """A kept segment of the definition."""

    def __init__(self, weights: list[Tensor], mean: Tensor, span: int) -> None:
        self.weights, self.mean, self.span = weights, mean, span

    def merge(self, other: Kept) -> Kept:
        span = self.span + other.span

        def average(a: Tensor, b: Tensor) -> Tensor:
            return (self.span * a + other.span * b) / span

        weights = [average(a, b) for a, b in zip(self.weights, other.weights, strict=True)]
        return Kept(weights, average(self.mean, other.mean), span)


def unit(mean: Tensor) -> Tensor:
    return mean / mean.norm() if mean.any() else mean


def definition(layer: NeuralMemory, x: Tensor, **options: Any) -> tuple[Tensor, MemoryState]:
    """One sequence x (1, time, dim), token by token, by the equations of docs/math.md."""
    caching, plain = layer.caching, without_cache(layer, **options)
    assert caching is not None and layer.to_fit is not None
    state, outputs = plain.init_state(1), []
    kept: list[Kept] = []
    segment: list[Tensor] = []
    past = None
    for t in range(x.shape[1]):
        x_t = x[:, t : t + 1]
        q, past = plain.queries(x_t, past)
        now, state = plain.write(x_t, state)  # M_t(q_t)
        u = layer.to_fit @ x_t[0, 0]
        best = sorted(kept, key=lambda each: -(u @ unit(each.mean)).item())[: caching.top_k]
        e_now = torch.exp(u @ unit(sum(segment, x.new_zeros(DIM))))  # of the tokens before this one
        e = [torch.exp(u @ unit(each.mean)) for each in best]
        total = e_now + sum(e)
        if caching.average and best:
            layers = zip(*(each.weights for each in best), strict=True)
            weights = [sum(f * w for f, w in zip(e, group, strict=True)) / sum(e) for group in layers]
            y = (e_now * now + sum(e) * plain.recall(q, weights)) / total
        else:
            said = [f * plain.recall(q, each.weights) for f, each in zip(e, best, strict=True)]
            y = (e_now * now + sum(said)) / total
        outputs.append(layer.output(y, layer.output_gate(x_t)))
        segment.append(x_t[0, 0])
        if len(segment) == caching.segment_size:
            kept.append(Kept(list(state.weights), sum(segment) / len(segment), 1))
            segment = []
            if caching.max_states is not None and len(kept) > caching.max_states:
                spans = [a.span + b.span for a, b in pairwise(kept)]
                i = spans.index(min(spans))
                kept[i : i + 2] = [kept[i].merge(kept[i + 1])]
    weights = [torch.stack(group, dim=1) for group in zip(*(each.weights for each in kept), strict=True)]
    cached = CachedSegments(
        tuple(weights),
        torch.stack([each.mean for each in kept]).unsqueeze(0),
        torch.tensor([[each.span for each in kept]]),
        sum(segment, x.new_zeros(DIM)).unsqueeze(0),
        len(segment),
    )
    return torch.cat(outputs, dim=1), replace(state, cached=cached)


def found(y: Tensor, state: MemoryState) -> dict[str, Tensor]:
    """Outputs and all of the state, by name."""
    cached = state.cached
    assert cached is not None
    names = {"y": y, "means": cached.means, "spans": cached.spans, "total": cached.total, "length": cached.lengths}
    groups = {"weights": state.weights, "momentum": state.momentum, "kept": cached.weights, "conv": state.conv}
    return names | {f"{name}.{i}": x for name, group in groups.items() for i, x in enumerate(group)}


def with_gradients(layer: NeuralMemory, run: Any, x: Tensor) -> dict[str, Tensor]:
    """What ``run(x)`` returns, and the gradients of a random sum of it in x and every parameter."""
    x = x.clone().requires_grad_()
    results = found(*run(x))
    outputs = [each for each in results.values() if each.requires_grad]
    leaves = {"x": x, **dict(layer.named_parameters())}
    seeds = [draw(*each.shape, seed=100 + i) for i, each in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds, materialize_grads=True)
    return results | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


def in_pieces(layer: NeuralMemory, x: Tensor, cuts: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    state, outputs = None, []
    for start, stop in pairwise([0, *cuts, x.shape[1]]):
        y, state = layer(x[:, start:stop], state, None if mask is None else mask[:, start:stop])
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


@every_kind
def test_it_is_its_definition_in_outputs_states_and_gradients(kind: str) -> None:
    layer, x = memory(**KINDS[kind]), tokens()
    expected = with_gradients(layer, lambda x: definition(layer, x, **KINDS[kind]), x)
    assert_same(with_gradients(layer, layer, x), expected)
    assert float(expected["gradient of to_fit"].abs().amax()) > 1e-6


@every_kind
def test_any_split_gives_the_same(kind: str) -> None:
    layer, x = memory(**KINDS[kind]), tokens(batch=2)
    whole = with_gradients(layer, layer, x)
    for cuts in ([1, 2, 5, 17], [SIZE, 2 * SIZE, 19]):
        assert_same(with_gradients(layer, lambda x, cuts=cuts: in_pieces(layer, x, cuts), x), whole)
    with torch.no_grad():  # one token a call, as in decoding
        assert_same(found(*in_pieces(layer, x, [*range(1, TIME)])), found(*layer(x)))


@every_kind
def test_padding_anywhere_and_rows_at_different_places_equal_each_row_alone(kind: str) -> None:
    layer, x = memory(**KINDS[kind]), tokens(batch=3)
    mask = torch.rand(3, TIME, generator=torch.Generator().manual_seed(3)) < torch.tensor([[0.5], [0.9], [1.0]])
    mask[0, 9:16] = False
    y, state = in_pieces(layer, x, [7, 8, 15], mask)
    more = tokens(time=6, batch=3, seed=5)
    later, state = layer(more, state)
    assert state.cached is not None
    for row in range(3):
        alone, own = layer(x[row : row + 1, mask[row]])
        torch.testing.assert_close(y[row, mask[row]], alone[0], rtol=0, atol=1e-10)
        assert not y[row, ~mask[row]].any()
        alone, own = layer(more[row : row + 1], own)
        torch.testing.assert_close(later[row], alone[0], rtol=0, atol=1e-10)
        kept = own.cached.spans.shape[1]
        mine = state.reorder(torch.tensor([row])).cached
        assert not mine.spans[:, kept:].any()
        torch.testing.assert_close(mine.spans[:, :kept], own.cached.spans)
        torch.testing.assert_close(mine.means[:, :kept], own.cached.means, rtol=0, atol=1e-10)
        torch.testing.assert_close(mine.weights[0][:, :kept], own.cached.weights[0], rtol=0, atol=1e-10)


@every_kind
@torch.no_grad()
def test_no_output_depends_on_a_later_token(kind: str) -> None:
    layer, x = memory(**KINDS[kind]), tokens()
    y, _ = layer(x)
    for t in (2, 3, 4, 9, TIME - 1):
        changed = x.clone()
        changed[:, t] += 1
        other, _ = layer(changed)
        assert torch.equal(other[:, :t], y[:, :t])
        assert not torch.equal(other[:, t], y[:, t])


def test_linear_memories_may_be_averaged_before_or_after_they_are_read() -> None:
    x = tokens(batch=2)
    before, after = memory(depth=1, cache_average=True), memory(depth=1)
    assert_same(found(*before(x)), found(*after(x)))
    assert not torch.allclose(memory(cache_average=True)(x)[0], memory()(x)[0])


def test_a_constant_number_of_states_is_kept_however_long_the_text() -> None:
    layer = memory(torch.float32, depth=1, cache_max_states=4)
    with torch.no_grad():
        _, state = layer(tokens(100 * SIZE + 1, dtype=torch.float32))
    assert state.cached is not None and state.cached.spans.sum() == 100
    assert state.cached.spans.shape == (1, 4)
    assert state.cached.spans.max() < 2.1 * state.cached.spans.min()


@torch.no_grad()
def test_at_the_start_a_token_prefers_the_segment_in_which_it_has_occurred() -> None:
    torch.manual_seed(0)
    layer, x = NeuralMemory(64, cache_segment_size=8, depth=1), torch.randn(1, 64, 64)
    _, state = layer(x)
    u, cached = layer.fit_queries(x), state.cached
    assert u is not None and cached is not None
    gamma = torch.softmax(u[0] @ torch.nn.functional.normalize(cached.means[0], dim=-1).mT, dim=-1)
    own = gamma[torch.arange(64), torch.arange(64) // 8]
    assert own.mean() > 0.8


def test_without_the_option_nothing_changes() -> None:
    """Neither parameters nor results: a memory that keeps nothing is the old one, and one that has kept nothing yet."""
    cached = memory(cache_segment_size=TIME)
    plain = without_cache(cached)
    assert plain.to_fit is None and plain.init_state(1).cached is None
    x = tokens(batch=2)
    (y, state), (other, _) = plain(x), cached(x)
    assert torch.equal(y, other) and state.cached is None


@torch.no_grad()
def test_extreme_inputs_stay_finite_and_it_still_reads() -> None:
    layer = memory(torch.float32, cache_max_states=2)
    largest = torch.finfo(torch.float32).max
    x = torch.stack([torch.full((TIME, DIM), largest), tokens(dtype=torch.float32)[0] * 1e30])
    y, state = layer(x)
    assert y.isfinite().all()
    values: list[bool] = []
    state.map(lambda each: values.append(bool(each.isfinite().all())) or each)
    assert all(values)
    y, _ = layer(tokens(batch=2, dtype=torch.float32), state)
    assert y.isfinite().all()


@torch.no_grad()
def test_kept_states_are_float32_whatever_the_model_is() -> None:
    layer, x = memory(torch.float32, cache_max_states=2), tokens(dtype=torch.float32)
    exact, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, state = layer(x)
    low, other = memory(torch.bfloat16, cache_max_states=2)(x.bfloat16())
    for y, each in ((mixed, state), (low, other)):
        assert each.cached is not None and each.cached.weights[0].dtype == each.cached.means.dtype == torch.float32
        assert (y.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_gradients_reach_kept_states_until_they_are_detached() -> None:
    layer, x = memory(), tokens().requires_grad_()
    _, state = layer(x[:, : 2 * SIZE])
    y, _ = layer(x[:, 2 * SIZE :].detach(), replace(state.detach(), cached=state.cached))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient[:, : 2 * SIZE].abs().amax() > 0
    y, _ = layer(x[:, 2 * SIZE :].detach(), state.detach())
    (gradient,) = torch.autograd.grad(y.sum(), x, allow_unused=True)
    assert gradient is None


@torch.no_grad()
def test_a_read_changes_nothing_and_looks_at_the_kept_states() -> None:
    layer, x = memory(), tokens(batch=2)
    _, state = layer(x)
    asked = tokens(3, batch=2, seed=7)
    y = layer.read(asked, state)
    cached = state.cached
    assert cached is not None
    assert not torch.allclose(y, layer.read(asked, replace(state, cached=cached.map(torch.zeros_like))))
    assert torch.equal(layer.read(asked[:, :1], state), y[:, :1])


@torch.no_grad()
def test_a_state_is_a_value(tmp_path: Path) -> None:
    layer, x = memory(cache_max_states=3), tokens(batch=3)
    more = tokens(6, batch=3, seed=5)
    states = [layer(x[row : row + 1, : 2 + 7 * row])[1] for row in range(3)]
    joined = MemoryState.concatenate(states)
    y, _ = layer(more, joined)
    for row, state in enumerate(states):
        torch.testing.assert_close(y[row], layer(more[row : row + 1], state)[0][0], rtol=0, atol=1e-10)
    joined.save(tmp_path / "state")
    assert torch.equal(layer(more, MemoryState.load(tmp_path / "state"))[0], y)
    turned = joined.reorder(torch.tensor([2, 0, 2]))
    torch.testing.assert_close(layer(more[[2, 0, 2]], turned)[0], y[[2, 0, 2]], rtol=0, atol=1e-10)
    rows = torch.tensor([True, False, True])
    fresh = layer.init_state(3)
    mixed = layer(more, fresh.where(rows, joined))[0]
    torch.testing.assert_close(mixed[rows], layer(more, fresh)[0][rows], rtol=0, atol=1e-10)
    torch.testing.assert_close(mixed[~rows], y[~rows], rtol=0, atol=1e-10)
    assert joined.to(dtype=torch.float32).cached.means.dtype == torch.float32


def test_a_wrong_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state.cached is none; expected some of this memory"):
        memory()(tokens(), without_cache(memory()).init_state(1))
    with pytest.raises(ValueError, match=r"state.cached is cached segments; expected none of this memory"):
        without_cache(memory())(tokens(), memory().init_state(1))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_segment_size": 0}, "cache_segment_size is 0; expected a whole number of at least 1, or None"),
        ({"cache_segment_size": 4, "cache_top_k": 0}, "cache_top_k is 0; expected"),
        ({"cache_top_k": 2}, "cache_top_k is 2 and cache_segment_size is None; expected a size with it"),
        ({"cache_average": True}, "cache_average is True and cache_segment_size is None; expected a size with it"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NeuralMemory(DIM, **options)


def test_mac_keeps_whole_segments() -> None:
    with pytest.raises(ValueError, match="cache_segment_size is 4; expected a multiple of the attention's segment, 3"):
        MACBlock(DIM, memory(), SegmentAttention(DIM, 2, 3))
    with pytest.raises(ValueError, match="memory_cache_segment_size is 6 and segment_size is 4; expected a multiple"):
        TitansConfig(variant="mac", segment_size=4, memory_cache_segment_size=6)


@torch.no_grad()
def test_mac_reads_the_kept_segments_in_both_places() -> None:
    """Eq. 21 to 25 token by token, with the kept segments beside M* and beside M_t."""
    torch.manual_seed(0)
    made = MACBlock(DIM, memory(cache_segment_size=2 * SIZE), SegmentAttention(DIM, 2, SIZE), persistent=2).double()
    x = tokens(5 * SIZE + 2)
    layer, attention, normed = made.memory, made.attention, made.attention_norm(x)
    assert layer is not None and attention is not None and made.gate is not None
    state, outputs, h = layer.init_state(1), [], []
    start = state
    for t in range(x.shape[1]):
        place = t % SIZE
        if place == 0:
            start, h = state, []
        past = layer.queries(normed[:, :t], None)[1] if t else None
        h.append(layer.read_stream(normed[:, t : t + 1], start.weights, past, cached=start.cached)[0])  # Eq. 21
        y, _ = attention(
            normed[:, t - place : t + 1], torch.cat(h, dim=1), None, made.attention_norm(made.persistent)
        )  # Eq. 22, 23
        y = x[:, t : t + 1] + y[:, -1:]
        m, state = layer(made.memory_norm(y), state)  # Eq. 24
        outputs.append(made._feed_forward(y + made.gate(y, m)))  # Eq. 25
    expected = torch.cat(outputs, dim=1)
    torch.testing.assert_close(made(x)[0], expected, rtol=0, atol=1e-10)
    first, carried = made(x[:, :7])
    second, carried = made(x[:, 7:11], carried)
    third, _ = made(x[:, 11:], carried)
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), expected, rtol=0, atol=1e-10)


def model(variant: str, **options: Any) -> TitansForCausalLM:
    torch.manual_seed(0)
    config = TitansConfig(
        variant=variant, vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, memory_heads=2,
        segment_size=2, window_size=3, num_persistent_tokens=1, memory_cache_segment_size=SIZE,
        memory_cache_max_states=2, **options,
    )  # fmt: skip
    made = TitansForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


every_variant = pytest.mark.parametrize(
    "variant", ["mac", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lmm", "mag", "mal"))]
)


@every_variant
@torch.no_grad()
def test_every_variant_streams_pads_restarts_and_saves(variant: str, tmp_path: Path) -> None:
    made = model(variant)
    ids = torch.randint(0, 11, (2, 21), generator=torch.Generator().manual_seed(1))
    whole = made(ids).logits
    cache, outputs = None, []
    for start, stop in pairwise([0, 1, 2, 7, 8, 16, 21]):
        out = made(ids[:, start:stop], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        outputs.append(out.logits)
        cache.save(tmp_path / "cache")
        cache = TitansCache.load(tmp_path / "cache")
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-10)
    assert cache.states[0].memory.cached.spans.shape[1] == 2

    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    padded = made(ids, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(padded.logits[:1, 6:], made(ids[:1, 6:]).logits, rtol=0, atol=1e-10)
    joined = TitansCache.concatenate([made(ids[:1, :3], use_cache=True).past_key_values, padded.past_key_values])
    joined.reorder_cache(torch.tensor([2, 0]))
    more = made(ids[:, :9], past_key_values=joined).logits
    alone = made(torch.cat([ids[1:], ids[:1, :9]], dim=1)).logits[:, 21:]
    torch.testing.assert_close(more[:1], alone, rtol=0, atol=1e-10)
    alone = made(torch.cat([ids[:1, :3], ids[1:, :9]], dim=1)).logits[:, 3:]
    torch.testing.assert_close(more[1:], alone, rtol=0, atol=1e-10)
    generated = made.generate(ids[:, :5], max_new_tokens=12, do_sample=False)
    for t in range(5, 17):
        assert torch.equal(made(generated[:, :t]).logits[:, -1].argmax(-1), generated[:, t])

    block: Any = made.model.layers[0]
    x = draw(2, 11, 16, seed=3)  # MAC stands inside a segment, and its memory inside one to be kept
    _, state = block(x)
    rows = torch.tensor([True, False])
    again, _ = block(x, state, None, rows)
    torch.testing.assert_close(again[:1], block(x[:1])[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(again[1:], block(x, state)[0][1:], rtol=0, atol=1e-10)


def test_every_field_of_the_state_is_saved() -> None:
    from titans.ops.state import CACHED

    assert {field.name for field in fields(CachedSegments)} == {"weights", *CACHED}


@every_variant
def test_the_other_weights_start_as_without_a_cache(variant: str) -> None:
    """So that the same seed compares the two, and not two draws."""

    def start(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        config = TitansConfig(
            variant=variant, vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, memory_heads=2,
            segment_size=2, window_size=3, **options,
        )  # fmt: skip
        return TitansForCausalLM(config).state_dict()

    plain, cached = start(), start(memory_cache_segment_size=SIZE)
    assert all(torch.equal(cached.pop(name), value) for name, value in plain.items())
    assert cached and all(name.endswith("to_fit") for name in cached)


@every_variant
def test_training_reaches_every_parameter(variant: str) -> None:
    made = model(variant).float().train()
    ids = torch.randint(0, 11, (2, 13))
    made(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in made.named_parameters()}
    missing = [name for name, grad in gradients.items() if grad is None or not grad.isfinite().all() or not grad.any()]
    assert not missing
