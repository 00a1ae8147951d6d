"""Adapters of PEFT on every part of a model: what they add is what merging them adds, and everything of it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.cases import VARIANTS, in_pieces, model, tokens

peft = pytest.importorskip("peft", reason="peft is not installed; make test-tools installs it")

IDS = tokens(20)
LINEAR = ["to_qkv", "to_gates", "to_gate", "to_out", "to_q", "to_kv", "ffn.gate", "up", "down"]
TOKEN_BY_TOKEN = [*range(5, 20)]


def adapted(variant: str, **options: Any) -> Any:
    """A model with LoRA that is not zero, on all linear layers by default."""
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "lora_alpha": 2, **options}
    torch.manual_seed(1)
    made = peft.get_peft_model(model(variant, torch.float32), peft.LoraConfig(**options))
    return made.eval()


def train(made: Any, steps: int = 3) -> list[float]:
    made.train()
    optimiser = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = made(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    made.eval()
    return losses


def assert_merged_is_equal(made: Any) -> None:
    with torch.no_grad():
        logits = made(input_ids=IDS).logits
        torch.testing.assert_close(in_pieces(made, IDS, TOKEN_BY_TOKEN)[0], logits, atol=1e-5, rtol=0)
        merged = made.merge_and_unload()
        torch.testing.assert_close(merged(IDS).logits, logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(in_pieces(merged, IDS, TOKEN_BY_TOKEN)[0], logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_on_every_linear_layer_equals_the_merged_model(variant: str) -> None:
    made = adapted(variant)
    found = {name.split(".lora_")[0] for name, _ in made.named_parameters() if ".lora_" in name}
    expected = {*LINEAR} - ({"to_q", "to_kv"} if variant == "lmm" else set())
    assert {kind for kind in LINEAR if any(name.endswith("." + kind) for name in found)} == expected
    assert_merged_is_equal(made)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_adapter_learns(variant: str) -> None:
    made = adapted(variant)
    made.train()
    made(input_ids=IDS, labels=IDS).loss.backward()
    still = [name for name, p in made.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not still


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_tuned_norms_learn_and_equal_the_merged_model(variant: str) -> None:
    norms = sorted({name.split(".")[-1] for name, _ in model(variant).named_modules() if name.endswith("norm")})
    made = peft.get_peft_model(model(variant, torch.float32), peft.LNTuningConfig(target_modules=norms))
    made(input_ids=IDS, labels=IDS).loss.backward()
    tuned = {name: p for name, p in made.named_parameters() if p.requires_grad}
    assert any(".memory.norm." in name for name in tuned)
    assert not [name for name, p in tuned.items() if p.grad is None or not p.grad.any()]
    with torch.no_grad():
        for p in tuned.values():
            p += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    assert_merged_is_equal(made.eval())


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [*LINEAR, "lm_head", "embed_tokens"])
def test_lora_on_one_kind_of_layer_equals_the_merged_model(variant: str, name: str) -> None:
    if variant == "lmm" and name in ("to_q", "to_kv"):
        pytest.skip("LMM has no attention")
    untied = {"tie_word_embeddings": False} if name in ("lm_head", "embed_tokens") else {}
    torch.manual_seed(1)
    plain = model(variant, torch.float32, **untied)
    before = plain(IDS).logits.detach()
    config = peft.LoraConfig(r=4, target_modules=[name], init_lora_weights=False)
    made = peft.get_peft_model(plain, config).eval()
    assert (made(input_ids=IDS).logits - before).abs().max() > 1e-3
    assert_merged_is_equal(made)


def test_what_a_memory_says_changes_with_an_adapter_on_its_queries() -> None:
    made = adapted("mac", target_modules=["to_qkv"])
    block = made.base_model.model.model.layers[0]
    x = torch.randn(2, 6, block.memory.dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        on = block.memory.read(x), block.memory.queries(x, None)[0]
        with made.disable_adapter():
            off = block.memory.read(x), block.memory.queries(x, None)[0]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(on, off, strict=True))


def test_a_token_alone_notices_an_adapter_that_is_switched_off_or_merged() -> None:
    made = adapted("mag")
    changes = (made.base_model.disable_adapter_layers, made.base_model.enable_adapter_layers, made.merge_and_unload)
    with torch.no_grad():
        cache = made(input_ids=IDS[:, :8], use_cache=True).past_key_values
        for step, change in enumerate([*changes, lambda: None]):
            token = IDS[:, 8 + step : 9 + step]
            cold = made(input_ids=token, past_key_values=cache.copy(), output_hidden_states=True).logits
            last = made(input_ids=token, past_key_values=cache).logits
            torch.testing.assert_close(last, cold, atol=1e-5, rtol=0)
            made = change() or made


def test_a_token_alone_notices_an_adapter_that_comes_and_is_merged_before_the_next_token() -> None:
    made = model("mag", torch.float32)
    with torch.no_grad():
        caches = [in_pieces(made, IDS[:, :10], [8, 9])[1] for _ in range(2)]
        peft.get_peft_model(
            made, peft.LoraConfig(r=4, target_modules=["to_kv"], init_lora_weights=False)
        ).merge_and_unload()
        last, cold = (
            made(IDS[:, 10:11], past_key_values=cache, output_hidden_states=whole).logits
            for cache, whole in zip(caches, [False, True], strict=True)
        )
    torch.testing.assert_close(last, cold, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompt"])
def test_adapters_train_save_load_and_merge(variant: str, kind: str, tmp_path: Path) -> None:
    task = {"task_type": "CAUSAL_LM"}
    config = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, **task),
        "dora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, **task),
        "ia3": lambda: peft.IA3Config(target_modules=LINEAR, feedforward_modules=["down"], **task),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **task),
    }[kind]()
    made = peft.get_peft_model(model(variant, torch.float32), config)
    losses = train(made, steps=4)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        logits = made(input_ids=IDS).logits
        made.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(model(variant, torch.float32), tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=IDS).logits, logits, atol=1e-6, rtol=0)
    written = made.generate(input_ids=IDS[:, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        written, loaded.generate(input_ids=IDS[:, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    )
    if kind != "prompt":
        assert_merged_is_equal(made)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adapters_on_a_half_precision_model_and_under_autocast_run(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    made = peft.get_peft_model(model(variant, dtype), peft.LoraConfig(r=4, target_modules="all-linear"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.float32):
        assert torch.isfinite(torch.tensor(train(made))).all()
        assert torch.isfinite(made(input_ids=IDS).logits).all()


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name == "mac" else pytest.mark.slow) for name in VARIANTS]
)
def test_lora_on_the_learned_start_of_the_memory_equals_the_merged_model(variant: str) -> None:
    start = ["memory.initial.0", "memory.initial.1"]
    made = adapted(variant, target_modules=[], target_parameters=start)
    made.train()
    made(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad.any() for name, p in made.named_parameters() if "lora_" in name)
    made.eval()
    assert_merged_is_equal(made)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_memory_can_be_trained_and_saved_whole(variant: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["up"], modules_to_save=["memory"])
    made = peft.get_peft_model(model(variant, torch.float32), config)
    train(made)
    with torch.no_grad():
        logits = made(input_ids=IDS).logits
        made.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(model(variant, torch.float32), tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=IDS).logits, logits, atol=1e-6, rtol=0)
    assert_merged_is_equal(made)
