"""Every variant and preset: causal to the last bit, the same in any pieces, batches and paddings, and trainable."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.models.cases import (
    CHUNK,
    KINDS,
    SEGMENT,
    SWITCHES,
    VARIANTS,
    VOCAB,
    WINDOW,
    config,
    in_pieces,
    model,
    tokens,
)
from titans import TitansCache, TitansConfig, TitansForCausalLM, TitansModel
from titans.models import PRESETS

TIME = 2 * SEGMENT + 5
every_kind = pytest.mark.parametrize("kind", KINDS)
every_variant = pytest.mark.parametrize("kind", VARIANTS)
# inside a chunk, inside a segment, at both sides of its edge, the last token
PLACES = (CHUNK + 1, SEGMENT - 1, SEGMENT, SEGMENT + 3, TIME - 1)


@every_kind
@torch.no_grad()
def test_no_output_before_a_changed_token_moves_by_one_bit(kind: str) -> None:
    made = model(kind, torch.float32)
    ids = tokens(TIME)
    before = made(ids).logits
    for place in PLACES:
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        after = made(changed).logits
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place], before[:, place])


@every_kind
@torch.no_grad()
def test_any_split_into_calls_gives_the_same_logits(kind: str) -> None:
    made = model(kind)
    ids = tokens(TIME)
    whole = made(ids).logits
    for cuts in ([1], [SEGMENT], [3, SEGMENT - 1, SEGMENT + 1], list(range(1, TIME))):
        logits, cache = in_pieces(made, ids, cuts)
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-8)
        assert cache.get_seq_length() == TIME


MADE = {kind: model(kind) for kind in VARIANTS}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(VARIANTS)),
    time=st.integers(1, 4 * SEGMENT),
    cuts=st.lists(st.integers(1, 4 * SEGMENT), unique=True, max_size=4),
    padding=st.lists(st.integers(0, 12), min_size=3, max_size=3),
)
@torch.no_grad()
def test_any_split_of_a_padded_batch_gives_what_each_row_gives_alone(
    kind: str, time: int, cuts: list[int], padding: list[int]
) -> None:
    made = MADE[kind]
    ids = tokens(time, batch=3)
    mask = torch.arange(time) >= torch.tensor(padding).unsqueeze(1)
    logits, _ = in_pieces(made, ids, sorted(c for c in cuts if c < time), mask.long())
    for row, start in enumerate(padding):
        assert not logits[row, :start].any()
        if start < time:
            alone = made(ids[row : row + 1, start:]).logits[0]
            torch.testing.assert_close(logits[row, start:], alone, rtol=0, atol=1e-8)


@every_kind
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(kind: str) -> None:
    made = model(kind)
    ids = tokens(TIME)
    alone = made(ids[:1, 6:]).logits[0]
    for shift in (0, 3, 6):  # padding on the right, on both sides, on the left
        mask = torch.ones(2, TIME)
        mask[0] = 0
        mask[0, shift : shift + TIME - 6] = 1
        padded = ids.clone()
        padded[0, mask[0] == 1] = ids[0, 6:]
        logits = made(padded, attention_mask=mask).logits
        torch.testing.assert_close(logits[0, mask[0] == 1], alone, rtol=0, atol=1e-8)
        torch.testing.assert_close(logits[1], made(ids[1:]).logits[0], rtol=0, atol=1e-8)


@every_kind
@torch.no_grad()
def test_the_rows_of_a_batch_do_not_influence_each_other(kind: str) -> None:
    made = model(kind, torch.float32)
    ids = tokens(TIME)
    before = made(ids).logits
    ids[1] = tokens(TIME, seed=5)[1]
    after = made(ids).logits
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@every_kind
def test_every_parameter_of_a_new_model_gets_a_gradient_that_is_not_zero(kind: str) -> None:
    torch.manual_seed(0)
    made = TitansForCausalLM(config(kind))
    ids = tokens(TIME)
    made(ids, labels=ids).loss.backward()
    without = [n for n, p in made.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    assert without == []
    assert all(bool(torch.isfinite(p.grad).all()) for p in made.parameters() if p.grad is not None)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [*VARIANTS, "ttt-mlp"])
def test_gradient_checkpointing_gives_identical_gradients_and_a_cache_unless_reentrant(
    kind: str, reentrant: bool, either_way: str
) -> None:
    ids = tokens(TIME)
    gradients = []
    for checkpointing in (False, True):
        made = model(kind).train()
        if checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        output = made(ids, labels=ids, use_cache=True)
        assert (output.past_key_values is None) == (checkpointing and reentrant)
        loss = output.loss
        if not reentrant:  # the graph goes on through the cache
            loss = loss + made(ids, labels=ids, past_key_values=output.past_key_values).loss
        loss.backward()
        gradients.append([p.grad for p in made.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@every_variant
def test_gradients_flow_through_a_cache_unless_it_is_detached(kind: str) -> None:
    made = model(kind)
    ids = tokens(TIME)
    embeddings = made.get_input_embeddings()(ids[:, :10]).detach().requires_grad_()
    cache = made(inputs_embeds=embeddings, use_cache=True).past_key_values
    made(ids[:, 10:], past_key_values=cache.copy()).logits.square().sum().backward()
    assert embeddings.grad is not None and bool(embeddings.grad.abs().max() > 0)
    embeddings.grad = None
    made(ids[:, 10:], past_key_values=cache.detach()).logits.square().sum().backward()
    assert embeddings.grad is None


@every_kind
def test_rows_that_restart_read_as_new_sequences_and_the_others_go_on(kind: str) -> None:
    """Outputs, states and gradients equal those of each row by itself."""
    for first, second in ((11, 10), (SEGMENT, SEGMENT), (3, 1)):
        made = model(kind)
        ids, new = tokens(first, batch=3), tokens(second, batch=3, seed=7)
        rows = torch.tensor([False, True, False])
        cache = made(ids, use_cache=True).past_key_values
        together = made(new, past_key_values=cache, use_cache=True, restart=rows)
        after = made(new, past_key_values=together.past_key_values.copy(), use_cache=True).logits
        together.logits.square().sum().backward()
        gradients = [p.grad.clone() for p in made.parameters() if p.grad is not None]
        made.zero_grad()

        total = torch.zeros((), dtype=torch.float64)
        for row, restarts in enumerate(rows.tolist()):
            cache = None if restarts else made(ids[row : row + 1], use_cache=True).past_key_values
            alone = made(new[row : row + 1], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(together.logits[row : row + 1], alone.logits, rtol=0, atol=1e-9)
            again = made(new[row : row + 1], past_key_values=alone.past_key_values.copy()).logits
            torch.testing.assert_close(after[row : row + 1], again, rtol=0, atol=1e-9)
            total = total + alone.logits.square().sum()
        total.backward()
        expected = [p.grad for p in made.parameters() if p.grad is not None]
        for got, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-8 * max(1.0, float(wanted.abs().max())))


@every_kind
@torch.no_grad()
def test_caches_that_are_put_together_read_on_like_each_of_them(kind: str) -> None:
    made = model(kind)
    ids, new = tokens(SEGMENT + 3, batch=3), tokens(TIME, batch=3, seed=7)
    whole = made(ids, use_cache=True).past_key_values
    rows = torch.tensor([True, False, True])
    whole = made(new, past_key_values=whole, use_cache=True, restart=rows).past_key_values
    some = whole.copy()
    some.batch_select_indices(torch.tensor([0, 2]))
    # buffers are as long as the longest row of a batch needs: this one was read alone
    alone = made(ids[1:2], use_cache=True).past_key_values
    alone = made(new[1:2], past_key_values=alone, use_cache=True).past_key_values
    order = torch.tensor([0, 2, 1])
    whole.batch_select_indices(order)
    expected = made(ids[order], past_key_values=whole).logits
    for parts in ([some, alone], [alone, some]):
        joined = TitansCache.concatenate(parts)
        if parts[0] is alone:
            joined.batch_select_indices(torch.tensor([1, 2, 0]))
        torch.testing.assert_close(made(ids[order], past_key_values=joined).logits, expected, rtol=0, atol=1e-9)


@every_kind
def test_every_parameter_takes_part_whichever_rows_restart(kind: str) -> None:
    made = model(kind)
    ids = tokens(TIME)
    cache = made(ids, use_cache=True).past_key_values.detach()
    made(ids, past_key_values=cache, restart=torch.zeros(len(ids), dtype=torch.bool)).logits.square().sum().backward()
    assert [name for name, p in made.named_parameters() if p.grad is None] == []


@every_variant
def test_a_copy_of_a_cache_stays_where_it_was(kind: str) -> None:
    made = model(kind)
    ids = tokens(TIME)
    cache = made(ids[:, :10], use_cache=True).past_key_values
    for kept in (cache.copy(), copy.deepcopy(cache)):  # both with the graph
        assert all(a is b for a, b in zip(leaves(kept), leaves(cache), strict=True))
        first = made(ids[:, 10:], past_key_values=kept, use_cache=True).logits
        assert (kept.get_seq_length(), cache.get_seq_length()) == (TIME, 10)
        assert torch.equal(made(ids[:, 10:], past_key_values=cache.copy()).logits, first)


@pytest.mark.parametrize("kind", [*VARIANTS, *PRESETS, "mal, linear, untied, plain, token skip"])
@torch.no_grad()
def test_a_saved_model_comes_back_with_identical_logits(kind: str, tmp_path: Path) -> None:
    made = model(kind, torch.float32)
    ids = tokens(TIME)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, TitansForCausalLM)
    assert loaded.config.fingerprint() == made.config.fingerprint()
    assert torch.equal(loaded(ids).logits, made(ids).logits)
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == loaded.config.tie_word_embeddings
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, TitansModel)
    assert torch.equal(base(ids).last_hidden_state, made.model(ids).last_hidden_state)


@torch.no_grad()
def test_a_model_comes_back_from_its_state_dict() -> None:
    made = model("mac", torch.float32)
    loaded = TitansForCausalLM.from_pretrained(None, config=made.config, state_dict=made.state_dict())
    assert torch.equal(loaded(tokens(TIME)).logits, made(tokens(TIME)).logits)
    with pytest.raises(ValueError, match="state_dict does not fit the config: 1 missing parameters"):
        rest = {name: x for name, x in made.state_dict().items() if name != "model.norm.weight"}
        TitansForCausalLM.from_pretrained(None, config=made.config, state_dict=rest)


@pytest.mark.slow
def test_the_auto_classes_know_the_models_even_if_their_module_was_looked_for_first() -> None:
    program = (
        "import titans, importlib.util\n"
        "for _ in range(2):\n"
        "    assert importlib.util.find_spec('transformers.models.auto.configuration_auto').origin\n"
        "from transformers import AutoConfig\n"
        "assert type(AutoConfig.for_model('titans')).__name__ == 'TitansConfig'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_auto_classes_know_the_models_once_titans_is_imported(tmp_path: Path) -> None:
    model("mag", torch.float32).save_pretrained(tmp_path)
    program = (
        "import sys, titans\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "from transformers import LlamaForCausalLM, AutoModelForCausalLM\n"  # loads the Auto classes half way through
        "made = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "assert type(made).__name__ == 'TitansForCausalLM'\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)


@torch.no_grad()
def test_a_cache_of_a_version_with_fewer_fields_goes_on() -> None:
    made, ids = model("mac"), tokens(TIME)
    cache = made(ids[:, :11], use_cache=True).past_key_values
    later = ("memory_cache_average", "memory_cache_top_k")
    cache.fingerprint = {name: value for name, value in cache.fingerprint.items() if name not in later}
    cache._fits = None
    torch.testing.assert_close(made(ids[:, 11:], past_key_values=cache).logits, made(ids).logits[:, 11:])
    other = TitansForCausalLM(config("mac", memory_cache_segment_size=2 * SEGMENT, memory_cache_average=True))
    cache._fits = None
    with pytest.raises(ValueError, match=r"memory_cache_\w+=(None|False); this one has"):
        other(ids[:, 11:], past_key_values=cache)


@pytest.mark.slow
@torch.no_grad()
def test_a_cache_saved_in_one_process_goes_on_in_another(tmp_path: Path) -> None:
    made = model("mac", torch.float32)
    ids = tokens(TIME)
    expected = made(ids).logits[:, 11:]
    made.save_pretrained(tmp_path / "model")
    made(ids[:, :11], use_cache=True).past_key_values.save(tmp_path / "cache")
    torch.save(ids[:, 11:], tmp_path / "rest")
    program = (
        "import sys, torch; from titans import TitansCache, TitansForCausalLM\n"
        "path = sys.argv[1]\n"
        "made = TitansForCausalLM.from_pretrained(path + '/model')\n"
        "with torch.no_grad():\n"
        "    out = made(torch.load(path + '/rest'), past_key_values=TitansCache.load(path + '/cache'))\n"
        "torch.save(out.logits, path + '/logits')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits_to_keep_and_labels() -> None:
    made = model("mag")
    ids = tokens(TIME)
    output = made(ids, labels=ids)
    kept = made(ids, logits_to_keep=3).logits
    assert torch.equal(kept, output.logits[:, -3:])
    assert torch.equal(made(ids, logits_to_keep=torch.tensor([1, 4])).logits, output.logits[:, [1, 4]])
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss.float(), loss)


@torch.no_grad()
def test_hidden_states_and_tuples() -> None:
    made = model("mal")
    ids = tokens(TIME)
    mask = torch.ones(2, TIME)
    mask[0, :4] = 0
    output = made.model(ids, attention_mask=mask, output_hidden_states=True)
    assert [tuple(h.shape) for h in output.hidden_states] == [(2, TIME, 16)] * 3
    first = made.model.embed_norm(made.model.embed_tokens(ids[1]))
    assert torch.equal(output.hidden_states[0][1], first)
    logits, cache = made(ids, return_dict=False, use_cache=True)
    assert logits.shape == (2, TIME, VOCAB) and isinstance(cache, TitansCache)


@every_variant
@torch.no_grad()
def test_bfloat16_autocast_keeps_the_memory_in_float32(kind: str) -> None:
    made = model(kind, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = made(tokens(TIME), use_cache=True)
    assert bool(torch.isfinite(output.logits).all())
    assert all(s.memory.weights[0].dtype == torch.float32 for s in output.past_key_values.states)


def generated(made: TitansForCausalLM, ids: Tensor | None = None, **options: object) -> Tensor:
    options = {"max_new_tokens": 3 * SEGMENT, "do_sample": False, "pad_token_id": 0, **options}
    result: Tensor = made.generate(ids, **options)
    return result


@every_variant
def test_cached_generation_equals_uncached_far_past_window_and_segment(kind: str) -> None:
    made = model(kind)
    ids = tokens(10)
    cached = generated(made, ids)
    assert cached.shape == (2, 10 + 3 * SEGMENT)
    assert torch.equal(cached, generated(made, ids, use_cache=False))
    torch.manual_seed(3)
    sampled = generated(made, ids, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(sampled, generated(made, ids, do_sample=True, use_cache=False))
    beams = generated(made, ids, num_beams=2, max_new_tokens=SEGMENT + 2)
    assert torch.equal(beams, generated(made, ids, num_beams=2, max_new_tokens=SEGMENT + 2, use_cache=False))
    embedded = generated(made, inputs_embeds=made.get_input_embeddings()(ids))
    assert torch.equal(embedded, cached[:, 10:])


@every_variant
def test_a_left_padded_batch_generates_what_each_row_generates_alone(kind: str) -> None:
    made = model(kind)
    ids = tokens(11)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, :5] = 0
    padded = generated(made, ids, attention_mask=mask)
    assert torch.equal(padded[:1, 5:], generated(made, ids[:1, 5:]))
    assert torch.equal(padded[1:], generated(made, ids[1:]))
    beams = generated(made, ids, attention_mask=mask, num_beams=2, max_new_tokens=6)
    assert torch.equal(beams[:1, 5:], generated(made, ids[:1, 5:], num_beams=2, max_new_tokens=6))


@every_variant
def test_generation_goes_on_from_a_returned_cache(kind: str) -> None:
    made = model(kind)
    ids = tokens(10)
    whole = generated(made, ids, max_new_tokens=12)
    first = generated(made, ids, max_new_tokens=5, return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == 14  # the last token has not been read yet
    rest = generated(made, first.sequences, past_key_values=first.past_key_values, max_new_tokens=7)
    assert torch.equal(rest, whole)


def test_chunked_prefill_is_the_same() -> None:
    made = model("mac")
    ids = tokens(TIME)
    cache = TitansCache(made.config)
    assert torch.equal(generated(made, ids, prefill_chunk_size=6, past_key_values=cache), generated(made, ids))


@every_variant
@torch.no_grad()
def test_a_cache_weighs_the_same_however_long_the_text_was(kind: str) -> None:
    made = model(kind, torch.float32)
    caches = [made(tokens(n), use_cache=True).past_key_values for n in (2 * SEGMENT + 3, 10 * SEGMENT + 3)]
    assert caches[0].nbytes == caches[1].nbytes
    for cache in caches:  # nothing is a view of something larger
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in leaves(cache)}
        assert sum(held.values()) <= cache.nbytes


def leaves(cache: TitansCache) -> list[Tensor]:
    found: list[Tensor] = []
    for state in cache.states:
        assert state is not None
        state.map(lambda x: found.append(x) or x)
    return found


@torch.no_grad()
def test_with_the_memory_switched_off_nothing_before_the_window_or_segment_counts() -> None:
    for kind, reach in (("mac, no memory", SEGMENT), ("mag, no memory", WINDOW), ("mal, no memory", WINDOW)):
        made = model(kind, num_hidden_layers=1)
        ids = tokens(4 * SEGMENT)
        changed = ids.clone()
        changed[:, 0] = (changed[:, 0] + 1) % VOCAB
        assert torch.equal(made(ids).logits[:, reach:], made(changed).logits[:, reach:])
    made = model("mag", num_hidden_layers=1)
    assert not torch.equal(made(ids).logits[:, 20:], made(changed).logits[:, 20:])


def test_presets_and_switches_reach_the_layers() -> None:
    assert all(TitansConfig.from_preset(name).preset == name for name in PRESETS)
    retnet = TitansConfig.from_preset("retnet", memory_heads=3)
    assert retnet.memory_fixed_alpha == [2.0**-5, 2.0**-6, 2.0**-7]
    changed = TitansConfig.from_preset("gated-deltanet", memory_momentum=True)
    assert changed.memory_momentum and changed.preset is None  # it is no longer what it would be called
    assert TitansConfig.from_preset("gated-deltanet", variant="mag").preset == "gated-deltanet"
    for kind in SWITCHES:
        layer, second = model(kind).model.layers
        assert (layer.memory is None) == ("no memory" in kind)
        assert (second.attention is None) == ("no attention" in kind or kind.startswith("lmm"))
        assert (layer.attention is None) == (second.attention is None or "attention above" in kind)
        assert (second.token_skip is not None) == ("token skip" in kind)
        assert (layer.token_skip is not None) == (kind == "mac, no convolution, token skip")  # attention comes first
    assert isinstance(TitansModel(config("mac")), TitansModel)
    assert isinstance(AutoConfig.for_model("titans"), TitansConfig)


def test_the_gate_follows_the_variant_unless_it_is_given(tmp_path: Path) -> None:
    config("mac").save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, variant="mag")
    assert loaded.gate is None
    assert TitansModel(loaded).layers[0].gate.kind == "sigmoid"
    assert TitansModel(config("mac")).layers[0].gate.kind == "memory"
    assert TitansModel(config("mac", gate="sum")).layers[0].gate.kind == "sum"
    assert config("mac").fingerprint() == config("mac", gate="memory").fingerprint()
    assert config("mac").fingerprint() != config("mac", gate="sum").fingerprint()


class NarrowConfig(TitansConfig):
    window_size: int = WINDOW


def test_a_subclass_of_the_config_describes_the_same_memory_and_state() -> None:
    fields = config("mag").to_diff_dict() | {"memory_depth": 3}
    made = NarrowConfig(**fields)
    assert made.memory_options == TitansConfig(**fields).memory_options
    assert made.fingerprint() == TitansConfig(**fields).fingerprint()
    assert len(TitansModel(made).layers[0].memory.initial) == 3
