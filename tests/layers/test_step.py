"""One token at a time, in place: the same as the long way, from any state, whatever the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.models.cases import model, tokens
from titans.layers.memory import NeuralMemory
from titans.layers.step import open_memory, open_step
from titans.ops import MemoryState
from titans.ops.native.library import library

DIM, HEADS = 12, 2
NATIVE = library(torch.float64) is not None
RULES: dict[str, dict[str, Any]] = {
    "exact": {},
    "linear": {"depth": 1},
    "three layers": {"depth": 3, "expansion": 1.5},
    "chunked": {"mode": "chunked", "chunk_size": 4},
    "chunked, linear": {"mode": "chunked", "chunk_size": 5, "depth": 1},
    "chunked, unbounded": {"mode": "chunked", "chunk_size": 4, "bounded": False, "theta_max": 0.1},
    "chunks of one": {"mode": "chunked", "chunk_size": 1},
    "no momentum": {"momentum": False},
    "no forgetting": {"forgetting": False},
    "forgets to zero": {"forget_to": "zero"},
    "unbounded": {"bounded": False, "theta_max": 0.1},
    "guarded": {"max_norm": 0.3},
    "guarded chunks": {"max_norm": 0.3, "mode": "chunked", "chunk_size": 4, "forget_to": "zero"},
    "bias and residual": {"bias": True, "residual": True},
    "dot": {"loss": "dot", "activation": "gelu"},
    "dot, chunked": {"loss": "dot", "mode": "chunked", "chunk_size": 3, "activation": "relu"},
    "no convolution": {"conv_kernel": 0, "activation": "gelu_tanh"},
    "present token only": {"conv_kernel": 1, "unit_keys": False},
    "constant gates": {"gates": "constant"},
    "gates that close": {"gate_cutoff": 0.5},
    "fixed gates": {"fixed_theta": 0.4, "fixed_alpha": [0.1, 0.0]},
    "no gates": {"fixed_theta": 0.4, "fixed_alpha": [0.1, 0.0], "momentum": False},
    "off": {"writes": False, "max_norm": 0.3},
    "wide heads": {"head_dim": 7},
}
LONG_WAY: dict[str, dict[str, Any]] = {
    "norm inside": {"layer_norm": True},
    "decay first": {"decay_first": True},
    "definition": {"mode": "recurrent", "chunk_size": 4},
    "sweeps": {"sweeps": 2},
    "another loss": {"loss": "huber"},
    "another engine": {"engine": "dual"},
}


def memory(dtype: torch.dtype = torch.float64, **options: Any) -> NeuralMemory:
    torch.manual_seed(0)
    made = NeuralMemory(DIM, HEADS, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return made.to(dtype)


def stream(time: int, batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1))


def numbers(state: MemoryState) -> list[Tensor]:
    found: list[Tensor] = []
    state.map(lambda x: found.append(x.double()) or x)
    return [*found, torch.as_tensor(state.position, dtype=torch.float64).expand(state.batch_size)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*RULES, *LONG_WAY])
@torch.no_grad()
def test_a_step_is_a_call_of_one_token(name: str, batch: int) -> None:
    made, x = memory(**(RULES | LONG_WAY)[name]), stream(72, batch)
    _, state = made(x[:, :58])
    stepped = state
    assert (open_memory(made, state, x) is not None) == (NATIVE and name in RULES)
    for t in range(58, 72):  # over a guard and several chunks
        y, state = made(x[:, t : t + 1], state)
        found, stepped = made.step(x[:, t : t + 1], stepped)
        torch.testing.assert_close(found, y, rtol=1e-9, atol=1e-11)
        for mine, theirs in zip(numbers(stepped), numbers(state), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_steps_from_the_start_equal_one_call_in_float32() -> None:
    made, x = memory(torch.float32), stream(20, 2, torch.float32)
    whole, _ = made(x)
    state, outputs = None, []
    for token in x.split(1, dim=1):
        y, state = made.step(token, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["exact", "chunked"])
@torch.no_grad()
def test_a_step_does_not_change_the_state_that_it_is_given(name: str) -> None:
    made, x = memory(**RULES[name]), stream(7, 2)
    _, state = made(x[:, :6])
    before = [part.clone() for part in numbers(state)]
    first, _ = made.step(x[:, 6:], state)
    again, _ = made.step(x[:, 6:], state)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(state), strict=True))


@torch.no_grad()
def test_sequences_at_different_places_go_the_long_way() -> None:
    made, x = memory(**RULES["chunked"]), stream(8, 2)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 5:] = False
    _, state = made(x[:, :7], None, mask)
    assert open_memory(made, state, x) is None
    torch.testing.assert_close(made.step(x[:, 7:], state)[0], made(x[:, 7:], state)[0], rtol=0, atol=0)


def test_a_step_takes_one_token() -> None:
    with pytest.raises(ValueError, match="x has 2 tokens; expected 1"):
        memory().step(stream(2, 1))


@torch.no_grad()
def test_a_state_inside_a_chunk_of_another_rule_is_refused() -> None:
    _, state = memory(**RULES["chunked"])(stream(3, 1))
    with pytest.raises(ValueError, match="state stands inside a chunk of a memory with"):
        memory(mode="chunked", chunk_size=6).step(stream(1, 1), state)


@pytest.mark.skipif(not NATIVE, reason="needs the compiled loops")
@pytest.mark.parametrize(
    "name", ["persistent", "attention_norm.weight", "attention.to_kv.weight", "attention.k_norm.weight"]
)
@torch.no_grad()
def test_a_step_does_not_fit_when_a_weight_behind_the_kept_keys_changes_unannounced(name: str) -> None:
    made = model("mag")
    block = made.model.layers[0]
    x = torch.zeros(2, made.config.hidden_size, dtype=torch.float64)
    step = open_step(block, made(tokens(5)).past_key_values.states[0], x)
    assert step is not None and step.fits(block, x)
    block.get_parameter(name).data[..., -1] += 1  # counts no version
    assert not step.fits(block, x)


@torch.no_grad()
def test_whoever_listens_to_all_modules_hears_every_part_of_every_token() -> None:
    made, ids = model("mag"), tokens(8)
    cache = made(ids[:, :6]).past_key_values
    made(ids[:, 6:7], past_key_values=cache)
    heard: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, args, y: heard.append(module))
    try:
        made(ids[:, 7:], past_key_values=cache)
    finally:
        handle.remove()
    block = made.model.layers[1]
    expected = [made.lm_head, *block.modules()]
    assert not [module for module in expected if not any(module is each for each in heard)]
