"""A window of attention with sinks on models of transformers, and the memory behind it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from titans.adapters.model import AdaptedModel, adapt
from titans.adapters.window import make_view, rotate
from titans.cli import app

VOCABULARY = 50
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}


def small(family: str, layers: int = 3, **fields: Any) -> PreTrainedModel:
    """A model of a family with random weights, the same ones every time, in float64."""
    config, model = FAMILIES[family]
    torch.manual_seed(0)
    if family == "smollm3":
        fields = {"no_rope_layers": [1, 0, 1][:layers] if layers > 1 else [0]} | fields  # 0: this one does not rotate
    made = model(
        config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **fields,
        )
    )
    return made.double().eval()


def adapted(family: str = "llama", **options: Any) -> AdaptedModel:
    """A small model with a window and a memory that says something."""
    model = adapt(small(family), **({"window": 8, "sinks": 2} | options)).double().eval()
    for memory in model.memories:
        torch.nn.init.constant_(memory.loudness, 20.0)
        torch.nn.init.constant_(memory.floor, 0.0)
        torch.nn.init.normal_(memory.to_value.weight, generator=torch.Generator().manual_seed(1))
    return model


def some_ids(batch: int = 2, time: int = 60) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_window_as_long_as_the_text_and_a_silent_memory_leave_the_model_as_it_was(family: str) -> None:
    ids = some_ids()
    expected = small(family)(ids).logits
    model = adapt(small(family), window=ids.shape[1]).double().eval()
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_window_alone_is_the_model_on_sinks_and_the_last_tokens(family: str) -> None:
    """In one layer a token depends on nothing but the tokens it sees, which stand side by side for it."""
    window, sinks = 8, 2
    ids = some_ids()
    model = adapt(small(family, layers=1), window=window, sinks=sinks).double().eval()
    found = model(ids, use_memory=False).logits[:, -1]
    seen = torch.cat([ids[:, :sinks], ids[:, -window:]], dim=1)
    torch.testing.assert_close(found, small(family, layers=1)(seen).logits[:, -1], rtol=0, atol=1e-7)


def logits_in_pieces(model: AdaptedModel, ids: Tensor, sizes: list[int]) -> Tensor:
    """What a model says to ids (batch, tokens) in calls of so many tokens each."""
    cache, found = None, []
    for piece in ids.split(sizes, dim=1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [[1] * 60, [13, 1, 30, 16], [59, 1]], ids=["one by one", "pieces", "all but one"])
@torch.no_grad()
def test_any_split_gives_the_same_logits(family: str, sizes: list[int]) -> None:
    model, ids = adapted(family), some_ids()
    torch.testing.assert_close(logits_in_pieces(model, ids, sizes), model(ids).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("where", ["left", "right", "middle"])
@torch.no_grad()
def test_padding_anywhere_changes_nothing(where: str) -> None:
    model, ids = adapted(), some_ids()
    place = {"left": 0, "right": 60, "middle": 31}[where]
    pad = torch.zeros(2, 9, dtype=torch.long)
    padded = torch.cat([ids[:, :place], pad, ids[:, place:]], dim=1)
    mask = torch.cat([torch.ones(2, place), torch.zeros(2, 9), torch.ones(2, 60 - place)], dim=1)
    cache, found = None, []
    for piece, part in zip(padded.split(20, dim=1), mask.split(20, dim=1), strict=True):
        output = model(piece, attention_mask=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    live = torch.cat(found, dim=1)[:, mask[0].bool()]
    torch.testing.assert_close(live, model(ids).logits, rtol=0, atol=1e-9)


@torch.no_grad()
def test_rows_of_different_lengths_are_each_as_if_alone() -> None:
    model, ids = adapted(), some_ids(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :17] = 0
    found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[:1], model(ids[:1]).logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1:, 17:], model(ids[1:, 17:]).logits, rtol=0, atol=1e-9)


@torch.no_grad()
def test_no_token_sees_the_future() -> None:
    model, ids = adapted(), some_ids()
    changed = ids.clone()
    changed[:, 40] = (changed[:, 40] + 1) % VOCABULARY
    assert torch.equal(model(changed).logits[:, :40], model(ids).logits[:, :40])


@torch.no_grad()
def test_what_left_the_window_is_heard_through_the_memory_alone() -> None:
    model, ids = adapted(), some_ids(1)
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % VOCABULARY
    far = slice(20 + 3 * 8 + 1, None)  # three layers carry a token three windows far
    assert torch.equal(model(ids, use_memory=False).logits[:, far], model(changed, use_memory=False).logits[:, far])
    assert (model(ids).logits[:, far] - model(changed).logits[:, far]).abs().max() > 1e-6


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_generation_with_a_cache_equals_generation_without(beams: int) -> None:
    model, ids = adapted(), some_ids(2, 20)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    mask = torch.ones_like(ids)
    cached = model.generate(ids, attention_mask=mask, **options)
    torch.testing.assert_close(model.generate(ids, attention_mask=mask, use_cache=False, **options), cached)
    if beams == 1:
        written = ids
        for _ in range(12):
            written = torch.cat([written, model(written).logits[:, -1:].argmax(-1)], dim=1)
        torch.testing.assert_close(cached, written)
    pad = torch.zeros(2, 5, dtype=torch.long)
    padded = model.generate(torch.cat([pad, ids], 1), attention_mask=torch.cat([pad, mask], 1), **options)
    torch.testing.assert_close(padded[:, 5:], cached)


@torch.no_grad()
def test_the_cache_does_not_grow() -> None:
    model = adapted()
    short = model(some_ids(1, 20)).past_key_values
    long = model(some_ids(1, 1500)).past_key_values
    assert long.nbytes == short.nbytes
    assert all(layer.keys.shape[2] == 8 - 1 + 2 for layer in long.layers)


@torch.no_grad()
def test_a_copy_of_the_cache_goes_its_own_way() -> None:
    model, ids = adapted(), some_ids()
    cache = model(ids[:, :30]).past_key_values
    kept = cache.copy()
    first = model(ids[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(model(ids[:, 30:], past_key_values=kept).logits, first, rtol=0, atol=0)


def test_every_parameter_of_the_memory_learns_and_the_model_does_not() -> None:
    model, ids = adapted(), some_ids()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("memories."):
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_turning_a_query_is_being_elsewhere() -> None:
    frequencies = torch.tensor([1.0, 0.1], dtype=torch.float64)
    view = make_view(torch.tensor([[30]]), torch.arange(31)[None], window=8, sinks=2, frequencies=frequencies)
    assert view.turn is not None
    q = torch.randn(1, 1, 1, 4, dtype=torch.float64)

    def at(position: int) -> Tensor:
        angle = position * torch.cat([frequencies, frequencies])
        return rotate(q, angle.cos(), angle.sin())

    torch.testing.assert_close(rotate(at(30), *view.turn), at(8 + 2 - 1), rtol=0, atol=1e-5)
    assert view.mask[0, 0, 0].nonzero().flatten().tolist() == [0, 1, *range(23, 31)]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), {}, "no standard attention"),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
            ),
            {},
            "an encoder with a decoder",
        ),
        (
            lambda: BertModel(
                BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
            ),
            {},
            "no standard attention",
        ),
        (
            lambda: GraniteForCausalLM(
                GraniteConfig(
                    vocab_size=9,
                    hidden_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    intermediate_size=8,
                    logits_scaling=4.0,
                )
            ),
            {},
            "which scales its embeddings or its logits",
        ),
        (lambda: torch.nn.Linear(2, 2), {}, "model is a Linear; expected a causal language model of transformers"),
        (lambda: small("llama"), {"window": 4, "sinks": 4}, "window is 4 and sinks is 4; expected a window above"),
        (lambda: small("llama"), {"sinks": -1}, "sinks is -1; expected a whole number of at least 0"),
        (lambda: small("llama"), {"taps": [0, 7]}, "taps is \\[0, 7\\]; expected numbers from 0"),
        (lambda: small("llama"), {"taps": [2], "inject": 2}, "taps is \\[2\\]; expected numbers from 0"),
        (lambda: small("llama"), {"inject": 4}, "inject is 4; expected head, or a layer from 1 to 3"),
        (lambda: small("mistral", sliding_window=16), {"window": 32}, "window is 32; expected at most 16"),
        (lambda: adapted().backbone, {}, "model has a window already"),
    ],
    ids=[
        "gpt2",
        "t5",
        "bert",
        "granite",
        "linear",
        "window",
        "sinks",
        "taps",
        "tap of inject",
        "inject",
        "own window",
        "twice",
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_sentence(model: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapt(model(), **options)


@pytest.mark.parametrize("rank", [0, -2, 1.5, "4", True])
def test_a_rank_that_is_none_is_refused_and_the_model_left_alone(rank: Any) -> None:
    model = small("llama")
    with pytest.raises(ValueError, match=rf"^lora is {rank!r}; expected a whole number of at least 1, the rank"):
        adapt(model, lora=rank)
    assert model.config._attn_implementation == "sdpa"


def test_without_peft_updates_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"^lora needs the package peft: pip install 'titan-memory\[adapt\]'$"):
        adapt(small("llama"), lora=4)
    result = CliRunner().invoke(app, ["adapt", "fit", "nowhere", "--lora", "4"], terminal_width=1000)
    assert result.exit_code == 2 and "adapt fit --lora needs peft" in result.output


def test_another_cache_is_refused() -> None:
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="past_key_values is a DynamicCache; expected the cache of an adapted model"):
        adapted()(some_ids(), past_key_values=DynamicCache())


def test_the_library_still_loads_models_of_these_families() -> None:
    """Registering an attention of our own changes nothing for others."""
    model = AutoModelForCausalLM.from_config(small("llama").config)
    assert model.config._attn_implementation == "sdpa"
