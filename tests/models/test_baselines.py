"""One roof: shipped configs have the size of their names, presets are their papers' rules, baselines match them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.cases import TINY
from titans import NeuralMemory, TitansConfig, TitansForCausalLM
from titans.models import NAMES, PRESETS, SIZES, build, config_for, count_parameters, state_bytes
from titans.models.baselines import best
from titans.models.presets import preset_fields
from titans.ops import MemoryState, presets

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


def test_there_is_a_config_for_every_variant_and_size() -> None:
    assert {path.stem for path in CONFIGS} == {f"{v}-{s}" for v in ("lmm", "mac", "mag", "mal") for s in SIZES}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_has_the_size_of_its_name(path: Path) -> None:
    variant, size = path.stem.split("-")
    config = TitansConfig.from_json_file(path)
    assert config.variant == variant
    assert abs(count_parameters(config) / SIZES[size].parameters - 1) < 0.05
    assert TitansConfig.from_pretrained(path).fingerprint() == config.fingerprint()
    if SIZES[size].parameters > 200_000_000:  # fitting the larger ones again takes a while, and is the same code
        return
    built = config_for(variant, size)
    written = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("model_type", "architectures")}
    assert {k: getattr(built, k) for k in written} == written


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_name_builds_a_model_of_the_same_size_that_reads_and_has_a_state(name: str) -> None:
    made = build(name, "1m").eval()
    count = sum(p.numel() for p in made.parameters())
    assert abs(count / 1_000_000 - 1) < 0.01
    assert made(torch.zeros(1, 5, dtype=torch.int64)).logits.shape == (1, 5, 512)
    short, long = state_bytes(made, 100), state_bytes(made, 100_000)
    if name in ("transformer++", "gated-deltanet-hybrid"):
        assert long > 900 * (short - state_bytes(made, 1))
    else:
        assert 0 < long < 3_000_000
    if name in ("lmm", "mamba2", *PRESETS):
        assert short == long


@pytest.mark.parametrize("vocab_size", [258, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_the_size_in_its_best_shape(name: str, vocab_size: int) -> None:
    config = config_for(name, "1.5m", vocab_size=vocab_size)
    assert abs(count_parameters(config) / 1_500_000 - 1) < 0.05
    found = best(name, "1.5m", vocab_size)
    assert found.rate > 0
    for field, value in (found.shape | found.options).items():
        assert getattr(config, field) == value


def test_options_hold_in_any_shape_and_can_be_changed_by_themselves() -> None:
    best_shape, without = config_for("lmm", "1.5m"), config_for("lmm", "1.5m", token_skip=False)
    fields = {"num_hidden_layers": 4, "hidden_size": 160, "memory_head_dim": 80, "memory_depth": 1}
    other = config_for("lmm", "1.5m", **fields)
    assert not best_shape.memory_momentum and config_for("lmm", "1.5m", vocab_size=258).memory_momentum
    assert best_shape.token_skip and other.token_skip and not without.token_skip
    assert without.hidden_size == best_shape.hidden_size
    assert not config_for("mac", "1.5m").token_skip and config_for("mag", "1.5m").gate == "sum"


def test_bytes_have_shapes_of_their_own() -> None:
    assert config_for("lmm", "1.5m", vocab_size=258).num_hidden_layers == 4
    assert config_for("lmm", "1.5m").num_hidden_layers == 3
    assert best("mac", "1.5m", 258) == best("mac", "1.5m")  # not searched for


def test_a_best_shape_is_one_choice_that_a_given_field_undoes() -> None:
    shape = best("lmm", "1.5m").shape
    assert shape and best("deltanet", "1.5m") == best("gated-deltanet", "1.5m")
    plain = config_for("lmm", "1.5m", memory_depth=4)
    assert plain.hidden_size == SIZES["1.5m"].hidden_size and plain.num_hidden_layers == SIZES["1.5m"].plain_layers
    assert config_for("lmm", "1.5m", memory_conv_kernel=2).hidden_size == shape["hidden_size"]


@torch.no_grad()
def test_state_bytes_is_what_the_cache_holds() -> None:
    places = [("mag", 300), ("mac", 40), ("sliding-window", 50), *(("mac", length) for length in (64, 65, 100, 128))]
    for name, length in places:
        made = build(name, "1m").eval()
        assert isinstance(made, TitansForCausalLM)
        cache = made(torch.zeros(1, length, dtype=torch.int64), use_cache=True).past_key_values
        assert state_bytes(made, length) == cache.nbytes
    for fields in ({"variant": "mac", "segment_size": 3}, {"variant": "mag", "window_size": 1}):
        small = TitansForCausalLM(TitansConfig(**{**TINY, **fields}))
        for length in range(1, 8):
            cache = small(torch.zeros(1, length, dtype=torch.int64), use_cache=True).past_key_values
            assert state_bytes(small, length) == cache.nbytes
    made = build("transformer++", "1m").eval()
    layers, heads, width = made.config.num_hidden_layers, 4, 24
    assert state_bytes(made, 1000) == 2 * layers * heads * width * 1000 * 4


def test_a_preset_follows_the_heads_of_its_memory() -> None:
    config = config_for("retnet", "1m", memory_heads=3)
    assert isinstance(config, TitansConfig)
    assert config.memory_fixed_alpha == [2.0**-5, 2.0**-6, 2.0**-7] and config.preset == "retnet"


def project(memory: NeuralMemory, x: torch.Tensor) -> tuple[Any, ...]:
    past = memory.init_state(len(x)).conv
    q, k, v, _ = memory._project(x, past, None)
    theta, alpha, _ = memory._gate(x)
    return q, k, v, theta, alpha


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_a_preset_is_the_rule_of_its_paper(name: str) -> None:
    torch.manual_seed(0)
    fields = preset_fields(name, 2)
    options = {k.removeprefix("memory_"): v for k, v in fields.items() if k.startswith("memory_")}
    memory = NeuralMemory(8, heads=2, **options).double()
    for parameter in memory.parameters():
        if name.startswith("ttt") or parameter is not memory.initial[0]:
            parameter += 0.3 * torch.randn_like(parameter)
    x = torch.randn(2, 37, 8, dtype=torch.float64)
    q, k, v, theta, alpha = project(memory, x)
    start = MemoryState.create([w.expand(2, -1, -1, -1) for w in memory.initial])
    expected = {
        "linear-attention": lambda: presets.linear_attention(q, k, v),
        "retnet": lambda: presets.retnet(q, k, v, 1 - 2.0 ** torch.tensor([-5.0, -6.0], dtype=torch.float64)),
        "gla": lambda: presets.gla(q, k, v, 1 - alpha),
        "deltanet": lambda: presets.delta_net(q, k, v, 2 * theta),
        "gated-deltanet": lambda: presets.gated_delta_net(q, k, v, 2 * theta, 1 - alpha),
        "ttt-linear": lambda: presets.ttt_linear(q, k, v, theta, start, (memory.gain, memory.shift)),
        "ttt-mlp": lambda: presets.ttt_mlp(q, k, v, theta, start, (memory.gain, memory.shift)),
    }[name]()
    y, state = memory(x)
    torch.testing.assert_close(y, memory.output(expected[0], memory.output_gate(x)), rtol=0, atol=1e-10)
    torch.testing.assert_close(state.weights, expected[1].weights, rtol=0, atol=1e-10)
