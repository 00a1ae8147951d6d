"""Whatever is wrong with a config, an input, a checkpoint or a file: one sentence says so, and nothing is half done."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tests.models.cases import TINY, VARIANTS, VOCAB, config, model, tokens
from titans import MemoryState, TitansCache, TitansConfig, TitansForCausalLM
from titans.models import build, config_for
from titans.models.modeling import make_layer


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"variant": "max"}, "variant is 'max'; expected one of lmm, mac, mag, mal"),
        ({"preset": "rwkv"}, "preset is 'rwkv'; expected one of linear-attention, retnet, gla, deltanet, "),
        ({"num_attention_heads": 3}, "num_attention_heads is 3 and hidden_size is 16; expected heads that divide"),
        ({"memory_heads": 5}, "memory_heads is 5 and hidden_size is 16; expected heads that divide the width"),
        ({"segment_size": 0}, "segment_size is 0; expected a whole number of at least 1"),
        ({"window_size": -1}, "window_size is -1; expected a whole number of at least 1"),
        ({"window_size": 2.5}, "window_size is 2.5; expected a whole number of at least 1"),
        ({"num_persistent_tokens": -1}, "num_persistent_tokens is -1; expected a whole number of at least 0"),
        ({"gate": "tanh"}, "gate is 'tanh'; expected one of sigmoid, silu, multiply, sum"),
        ({"ffn": "moe"}, "ffn is 'moe'; expected one of swiglu, plain"),
        ({"use_memory": False, "use_attention": False}, "use_memory is False and nothing else is left"),
        ({"attention_layers": [2]}, "attention_layers is [2]; expected different numbers from 0 to 1"),
        ({"attention_layers": 1}, "attention_layers is 1; expected a list of whole numbers, or None"),
        ({"attention_layers": [True]}, "attention_layers is [True]; expected a list of whole numbers, or None"),
        ({"attention_layers": []}, "attention_layers is []; expected different numbers from 0 to 1"),
        ({"attention_layers": [1], "use_attention": False}, "attention_layers is [1] in a model without attention"),
        ({"attention_layers": [1], "use_memory": False}, "attention_layers is [1] in a model without memory"),
        ({"variant": "lmm", "use_memory": False}, "use_memory is False and nothing else is left"),
        ({"variant": ["mac"]}, "variant is ['mac']; expected one of lmm, mac, mag, mal"),
        ({"hidden_size": "wide", "intermediate_size": None}, "hidden_size is 'wide'; expected a whole number"),
        ({"intermediate_size": 2.5}, "intermediate_size is 2.5; expected a whole number of at least 1"),
        ({"memory_head_dim": "8"}, "memory_head_dim is '8'; expected a whole number of at least 1"),
        ({"memory_expansion": -1.0}, "memory_expansion is -1.0; expected a positive number"),
        ({"memory_theta_max": 2.0}, "memory_theta_max is 2.0; expected a number in (0, 1]"),
        ({"memory_gate_cutoff": 1.0}, "memory_gate_cutoff is 1.0; expected a number in [0, 1)"),
        ({"memory_gate_cutoff": "low"}, "memory_gate_cutoff is 'low'; expected a number"),
        ({"memory_fixed_alpha": "ab"}, "memory_fixed_alpha is 'ab'; expected a list of numbers, one per head"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps is 'a'; expected a positive number"),
        ({"use_memory": "no"}, "use_memory is 'no'; expected True or False"),
        ({"memory_mode": "foo"}, "memory_mode is 'foo'; expected one of chunked, exact, recurrent"),
        ({"memory_activation": "foo"}, "memory_activation is 'foo'; expected one of "),
        ({"preset": "deltanet"}, "preset is 'deltanet' and memory_depth is 2; expected 1, or TitansConfig.from_preset"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        TitansConfig(**{**TINY, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"variant": "xyz"}, "variant is 'xyz'; expected one of lmm, mac, mag, mal"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3 and hidden_size is 16; expected heads that divide"),
        ({"segment_size": 0}, "segment_size is 0; expected a whole number of at least 1"),
    ],
)
def test_fields_that_changed_after_the_config_was_made_are_checked_in_the_model(
    fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config("mac").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, **fields))
    changed = config("mac")
    for name, value in fields.items():
        setattr(changed, name, value)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        TitansForCausalLM(changed)


def test_a_layer_of_an_unknown_variant_is_refused() -> None:
    changed = config("mac")
    changed.variant = "xyz"
    with pytest.raises(ValueError, match="variant is 'xyz'; expected one of lmm, mac, mag, mal"):
        make_layer(changed, 0)


def test_fields_that_leave_no_room_for_the_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mac has [\d,]+ parameters with these fields, .*; expected 1,000,000"):
        config_for("mac", "1m", num_hidden_layers=50)
    with pytest.raises(ValueError, match=r"mamba2 has [\d,]+ parameters with these fields, whatever its state_size"):
        config_for("mamba2", "1m", num_hidden_layers=50)
    assert config_for("mac", "1m", num_hidden_layers=50, intermediate_size=8).num_hidden_layers == 50


def test_unknown_names_and_sizes_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"preset is 'x'; expected one of linear-attention, .*, ttt-mlp$"):
        TitansConfig.from_preset("x")
    with pytest.raises(ValueError, match=r"name is 'x'; expected one of lmm, mac, .*, gated-deltanet-hybrid$"):
        config_for("x", "1m")
    with pytest.raises(ValueError, match=r"size is '2b'; expected one of 1m, 1\.5m, 10m, 170m, 340m, 400m, 760m$"):
        build("mac", "2b")


@torch.no_grad()
def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    made = model("mac")
    for bad in (VOCAB, -1):
        ids = tokens(5)
        ids[1, 2] = bad
        with pytest.raises(ValueError, match=f"input_ids has the token {bad}; expected numbers from 0 to {VOCAB - 1}"):
            made(ids)


@torch.no_grad()
def test_inputs_that_do_not_fit_together_are_refused() -> None:
    made = model("mac")
    with pytest.raises(ValueError, match="expected either input_ids or inputs_embeds"):
        made()
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 3\); expected \(batch, time\) = \(2, 5\)"):
        made(tokens(5), attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache; expected a TitansCache"):
        made(tokens(5), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"input_ids has shape \(5,\); expected \(batch, time\)"):
        made(tokens(5)[0])
    with pytest.raises(ValueError, match=r"input_ids has dtype torch.float32; expected int64 or int32"):
        made(tokens(5).float())
    for shape in ((5, 16), (2, 5, 17)):
        with pytest.raises(ValueError, match=re.escape(f"inputs_embeds has shape {shape}; expected (batch, time, 16)")):
            made(inputs_embeds=torch.zeros(shape, dtype=torch.float64))


@torch.no_grad()
def test_a_cache_of_another_config_or_batch_is_refused_and_stays_as_it_was() -> None:
    cache = model("mag")(tokens(5), use_cache=True).past_key_values
    states = cache.states
    with pytest.raises(ValueError, match="comes from a model with variant='mag'; this one has variant='mal'"):
        model("mal")(tokens(5), past_key_values=cache)
    with pytest.raises(ValueError, match="comes from a model with window_size=8; this one has window_size=9"):
        model("mag", window_size=9)(tokens(5), past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds 2 sequences and the batch has 3"):
        model("mag")(tokens(5, batch=3), past_key_values=cache)
    assert cache.states == states and cache.get_seq_length() == 5


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # whoever has silenced it before
    model("mac", torch.float32).save_pretrained(tmp_path)
    for load in (TitansForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="holds a mac model; expected mag, the variant that was asked for"):
            load(tmp_path, config=config("mag"))
    with pytest.raises(ValueError, match=r"does not fit the config: \d+ missing parameters, the first of them model\."):
        TitansForCausalLM.from_pretrained(tmp_path, config=config("mac", memory_depth=3))
    with pytest.raises(
        ValueError, match=r"does not fit the config: \d+ unexpected parameters, the first of them model"
    ):
        TitansForCausalLM.from_pretrained(tmp_path, config=config("mac", use_memory=False))
    with pytest.raises(
        ValueError, match=r"does not fit the config: \d+ mismatched parameters, the first of them model"
    ):
        TitansForCausalLM.from_pretrained(tmp_path, config=config("mac", intermediate_size=32))
    assert "LOAD REPORT" not in caplog.text
    options = {"config": config("mac", intermediate_size=32), "ignore_mismatched_sizes": True}
    assert isinstance(TitansForCausalLM.from_pretrained(tmp_path, **options), TitansForCausalLM)
    assert "LOAD REPORT" in caplog.text  # nothing else would say what is new
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="has weights that cannot be read"):
        TitansForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [*VARIANTS, "mac, chunked", "mac, no memory", "linear-attention"])
@torch.no_grad()
def test_a_cache_comes_back_from_its_file(kind: str, tmp_path: Path) -> None:
    made = model(kind)
    ids = tokens(21)
    cache = made(ids[:, :11], use_cache=True).past_key_values
    cache.save(tmp_path / "cache")
    loaded = TitansCache.load(tmp_path / "cache")
    assert loaded.get_seq_length() == 11 and loaded.batch_size == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]
    rest = made(ids[:, 11:], past_key_values=loaded).logits
    assert torch.equal(rest, made(ids[:, 11:], past_key_values=cache).logits)


@torch.no_grad()
def test_a_damaged_state_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    model("mac")(tokens(11), use_cache=True).past_key_values.save(path)
    whole = path.read_bytes()

    def refused(data: bytes, sentence: str) -> None:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=sentence) as caught:
            TitansCache.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    for cut in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        refused(whole[:cut], "cannot be read as a cache")
    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    changes = {"seen": "12", "config": json.dumps(json.loads(metadata["config"]) | {"segment_size": 9}), "extra": ""}
    for name, value in changes.items():
        save_file(load_file(path), path, metadata=metadata | {name: value})
        refused(path.read_bytes(), "is damaged: its contents are not what was saved")
        path.write_bytes(whole)
    flipped = bytearray(whole)
    flipped[-20] ^= 1
    refused(bytes(flipped), "is damaged")
    refused(b"not a cache at all" * 10, "cannot be read as a cache")

    path.write_bytes(whole)
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is not a cache \(its format is 'pt'\)"):
        TitansCache.load(path)
    save_file(tensors, path, metadata={"format": "titans.TitansCache", "version": "9"})
    with pytest.raises(ValueError, match="has cache version '9'; this release reads '2'"):
        TitansCache.load(path)
    MemoryState.create([torch.zeros(1, 1, 2, 2)]).save(path)
    with pytest.raises(ValueError, match=r"its format is 'titans.MemoryState'"):
        TitansCache.load(path)
    with pytest.raises(FileNotFoundError, match=r"does not exist; expected a file written by TitansCache.save"):
        TitansCache.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"missing does not exist; expected a folder to write cache into"):
        TitansCache(config("mac")).save(tmp_path / "missing" / "cache")


@torch.no_grad()
def test_a_cache_does_not_give_tokens_back() -> None:
    cache = model("mac")(tokens(5), use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match=r"a memory cannot take tokens back; keep a copy\(\)"):
        cache.crop(1)
    assert cache.get_seq_length() == 5
