"""``generate`` of transformers with a model that has a memory: what works, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from tests.models.cases import SEGMENT, VARIANTS, VOCAB, model, tokens
from titans import TitansCache, TitansForCausalLM
from titans.models import build
from titans.models.tokenizer import byte_tokenizer
from titans.ops.native.library import library

END, PAD = 29, 30


def quick_for(*names: str, among: Iterable[str] = VARIANTS) -> list[Any]:
    """The others are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in among]


class EndsAfter(LogitsProcessor):
    """Row r of a batch ends with its ``lengths[r]``-th new token, and not before."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.step += 1
        scores[:, [END, PAD]] = -torch.inf
        scores[self.lengths == self.step, END] = torch.inf
        return scores


def answers(made: TitansForCausalLM, ids: Tensor | None, lengths: list[int], **options: Any) -> Tensor:
    """What greedy choice gives until row r has ``lengths[r]`` new tokens; no row is longer."""
    options = {"do_sample": False, "eos_token_id": END, "pad_token_id": PAD, "max_new_tokens": max(lengths)} | options
    found: Tensor = made.generate(ids, logits_processor=LogitsProcessorList([EndsAfter(lengths)]), **options)
    return found


def texts(*lengths: int, seed: int = 1) -> list[Tensor]:
    return [row[:length] % END for row, length in zip(tokens(max(lengths), len(lengths), seed), lengths, strict=True)]


def padded(rows: list[Tensor], side: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side=side)


def next_logits(made: TitansForCausalLM, row: Tensor, cache: TitansCache) -> Tensor:
    logits: Tensor = made(row[None], past_key_values=cache).logits
    return logits


@pytest.mark.parametrize("side", quick_for("left", among=["left", "right"]))
@pytest.mark.parametrize("kind", quick_for("lmm", "mac"))
@torch.no_grad()
def test_each_row_of_a_batched_chat_is_what_it_is_alone(kind: str, side: str) -> None:
    made = model(kind)
    cache = TitansCache(made.config)
    said: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * 3
    history = torch.empty(3, 0, dtype=torch.int64)
    for turn, lengths in enumerate([[2, SEGMENT + 1, 5], [4, 1, 3]]):
        prompts = texts(7, 3, 1, seed=turn)
        history = torch.cat([history, padded(prompts, side)], dim=1)
        width = history.shape[1]
        history = answers(made, history, lengths, past_key_values=cache, attention_mask=history != PAD)
        for row, length in enumerate(lengths):
            said[row] = answers(made, torch.cat([said[row], prompts[row]])[None], [length])[0]
            assert torch.equal(history[row, width:][: lengths[row]], said[row][-length:])
            assert bool((history[row, width + length :] == PAD).all())
    assert cache.get_seq_length() == history.shape[1] - 1
    for row, text in enumerate(said):  # the last token has been read where another row went on after it
        alone = made(text[None] if lengths[row] < max(lengths) else text[None, :-1], use_cache=True).past_key_values
        mine = cache.copy()
        mine.batch_select_indices(torch.tensor([row]))
        more = tokens(5, 1)[0]
        torch.testing.assert_close(next_logits(made, more, mine), next_logits(made, more, alone), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_mask_is_not_needed_where_padding_has_a_token_of_its_own() -> None:
    made = model("lmm")
    caches = [TitansCache(made.config) for _ in range(2)]
    prompts = padded(texts(4, 6), "left")
    first = [answers(made, prompts, [2, 5], past_key_values=cache) for cache in caches]
    whole = torch.cat([first[0], tokens(3) % END], dim=1)
    told = answers(made, whole, [4, 4], past_key_values=caches[0], attention_mask=whole != PAD)
    assert torch.equal(answers(made, whole, [4, 4], past_key_values=caches[1]), told)


@pytest.mark.parametrize("kind", quick_for("lmm"))
@torch.no_grad()
def test_padding_on_the_right_and_chunks_give_what_each_row_gives_alone(kind: str) -> None:
    made, rows, lengths = model(kind), texts(4, 9, 2), [3, 8, 5]
    alone = [answers(made, row[None], [n], use_cache=False)[0, -n:] for row, n in zip(rows, lengths, strict=True)]
    expected = padded(alone, "right")
    ids = padded(rows, "right")
    mask = ids != PAD
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 3}):
        assert torch.equal(answers(made, ids, lengths, attention_mask=mask, **options)[:, ids.shape[1] :], expected)
    embedded = made.get_input_embeddings()(ids)
    assert torch.equal(answers(made, None, lengths, attention_mask=mask, inputs_embeds=embedded), expected)


WAYS: dict[str, dict[str, Any]] = {
    "cache": {}, "no cache": {"use_cache": False}, "pieces": {"prefill_chunk_size": 2}, "beams": {"num_beams": 2},
}  # fmt: skip


def chosen_by(made: TitansForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    """The logits that four tokens are chosen by, (batch, 4, vocabulary)."""
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD, **options}
    found = made.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    return torch.stack(found.logits, dim=1)


same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_documents_begin_in_the_prompt_only(way: str) -> None:
    made, ids = model("lmm"), tokens(7) % END
    expected = chosen_by(made, ids[:, 3:], **WAYS[way])
    told: dict[str, Any] = {
        "restart": torch.arange(7).expand(2, -1) == 3,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2),
        "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 2]] * 2),
    }
    for name, value in told.items():
        same(chosen_by(made, ids, **{name: value}, **WAYS[way]), expected)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_sequence_that_starts_anew_does_so_once(chunk: int | None) -> None:
    made, ids = model("lmm"), tokens(9) % END
    with torch.no_grad():
        cache = made(ids[:, :4], use_cache=True).past_key_values
    restart = torch.tensor([True, False])
    found = chosen_by(made, ids, past_key_values=cache, restart=restart, prefill_chunk_size=chunk)
    same(found, torch.cat([chosen_by(made, ids[:1, 4:]), chosen_by(made, ids[1:])]))


@pytest.mark.parametrize("way", ["cache", "no cache", "pieces"])
def test_what_is_said_of_tokens_moves_with_them_when_padding_is_on_the_right(way: str) -> None:
    made, ids = model("lmm"), tokens(5) % END
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    usual = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    plain = chosen_by(made, ids, attention_mask=mask, **WAYS[way])
    same(chosen_by(made, ids, attention_mask=mask, position_ids=usual, **WAYS[way]), plain)
    alone = torch.cat([chosen_by(made, row[None]) for row in (ids[0, 2:3], ids[1, 2:])])
    told: list[dict[str, Any]] = [
        {"position_ids": torch.tensor([[0, 1, 0, 1, 1], [0, 1, 0, 1, 2]])},
        {"seq_idx": torch.tensor([[4, 4, 5, 0, 0], [4, 4, 5, 5, 5]])},
        {"restart": torch.tensor([[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]]) == 1},
        {"attention_mask": mask * torch.tensor([1, 1, 2, 2, 2])},
    ]
    for documents in told:
        same(chosen_by(made, ids, **({"attention_mask": mask} | documents), **WAYS[way]), alone)


def test_tokens_that_a_cache_may_have_seen_are_refused() -> None:
    made, ids = model("lmm"), tokens(10) % END
    with torch.no_grad():
        cache = made(ids[:, :6], use_cache=True).past_key_values
    before = cache.copy()
    embedded = made.get_input_embeddings()(ids)
    wrong: list[dict[str, Any]] = [
        {"inputs": ids[:, 6:]},
        {"inputs": ids[:, :6]},
        {"inputs": ids[:, 6:], "attention_mask": torch.ones(2, 4)},
        {"inputs": ids[:, 6:], "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])},
        {"inputs": ids[:, 6:], "attention_mask": torch.ones(2, 9)},
        {"inputs_embeds": embedded[:, 6:]},
        {"inputs_embeds": embedded[:, 6:], "attention_mask": torch.ones(2, 10)},
    ]
    options: dict[str, Any] = {"past_key_values": cache, "max_new_tokens": 2, "do_sample": False, "pad_token_id": PAD}
    for given in wrong:
        with pytest.raises(ValueError, match=r"seen 6 tokens, . are given and the mask covers .*; expected the whole"):
            made.generate(**given, **options)
    assert cache.seen == 6
    expected = made.generate(ids[:, :7], max_new_tokens=2, do_sample=False, pad_token_id=PAD)
    for given in ({"inputs": ids[:, :7]}, {"inputs": ids[:, 6:7], "attention_mask": torch.ones(2, 7)}):
        options["past_key_values"] = before.copy()
        assert torch.equal(made.generate(**given, **options)[:, -2:], expected[:, 7:])


@pytest.mark.skipif(library(torch.float64) is None, reason="no compiler")
def test_while_no_row_has_ended_tokens_go_through_the_compiled_step() -> None:
    made = model("mal")
    cache = TitansCache(made.config)
    steps: list[bool] = []

    class Look(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            steps.append(all(layer._step is not None for layer in cache.layers))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    answers(made, tokens(5), [6, 3], past_key_values=cache, stopping_criteria=StoppingCriteriaList([Look()]))
    assert steps == [False, True, True, True, False, False]  # a prompt, three tokens of both rows, and the first row


@pytest.mark.parametrize("kind", quick_for("mag"))
@torch.no_grad()
def test_continuations_of_a_prefix_that_was_read_once_are_those_of_the_whole(kind: str) -> None:
    made = model(kind)
    prefix = tokens(SEGMENT + 3, 1) % END
    cache = made(prefix, use_cache=True).past_key_values
    rows, lengths = texts(5, 2, 7), [3, 6, 4]
    ids = padded(rows, "left")
    mask = torch.cat([torch.ones(3, cache.seen, dtype=torch.bool), ids != PAD], dim=1)
    found = answers(made, ids, lengths, past_key_values=cache.repeat(3), attention_mask=mask)
    for row, text in enumerate(rows):
        whole = torch.cat([prefix[0], text])
        alone = answers(made, whole[None], [lengths[row]])[0, len(whole) :]
        assert torch.equal(found[row, ids.shape[1] :][: lengths[row]], alone)
    assert (cache.batch_size, cache.seen) == (1, SEGMENT + 3)


def test_beams_and_samples_go_on_from_a_repeated_cache() -> None:
    made = model("mag")
    ids = tokens(9, 1)
    with torch.no_grad():
        cache = made(ids[:, :6], use_cache=True).past_key_values
    for options in ({"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 3}):
        options = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": PAD, **options}
        torch.manual_seed(1)
        found = made.generate(ids, past_key_values=cache.repeat(3), **options)
        torch.manual_seed(1)
        assert torch.equal(found, made.generate(ids, **options))


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "top-k, top-p and min-p": {"do_sample": True, "top_k": 9, "top_p": 0.8, "min_p": 0.02, "temperature": 2.0},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "beams that sample": {"num_beams": 3, "do_sample": True},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[3, 4]], "min_new_tokens": 4},
    "guidance": {"guidance_scale": 1.5},
    "ends": {"eos_token_id": [8, 19, 21, 23]},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("feature", quick_for("beams", "guidance", "ends", "chunked prefill", among=FEATURES))
def test_a_way_of_choosing_tokens_gives_the_same_with_and_without_a_cache(feature: str) -> None:
    made, ids = model("mag"), tokens(6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, **FEATURES[feature]}
    found = []
    for use_cache in (True, False):
        torch.manual_seed(2)
        # the library has no chunks without a cache
        chosen = options if use_cache else options | {"prefill_chunk_size": None}
        found.append(made.generate(ids, use_cache=use_cache, **chosen))
    assert torch.equal(*found)


def test_streamers_and_stop_strings_work() -> None:
    made, tokenizer = model("mag", vocab_size=257), byte_tokenizer()
    ids = torch.tensor([list(b"Once upon a time")])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 3.0, "pad_token_id": 256}
    torch.manual_seed(0)
    whole = made.generate(ids, **options)[0, ids.shape[1] :].tolist()
    torch.manual_seed(0)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    made.generate(ids, streamer=streamer, **options)
    assert "".join(streamer) == tokenizer.decode(whole)
    stop = next(chr(token) for token in whole if 32 < token < 127)
    torch.manual_seed(0)
    stopped = made.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **options)[0, ids.shape[1] :].tolist()
    assert stopped == whole[: whole.index(ord(stop)) + 1]


def test_scores_and_hidden_states_of_every_token_are_returned() -> None:
    made, ids = model("mal"), tokens(5)
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    found = made.generate(
        ids, max_new_tokens=3, do_sample=False, pad_token_id=PAD, return_dict_in_generate=True, **wanted
    )
    with torch.no_grad():
        expected = made(found.sequences, output_hidden_states=True)
    torch.testing.assert_close(torch.stack(found.logits, dim=1).double(), expected.logits[:, 4:7], rtol=1e-5, atol=1e-5)
    for step, hidden in enumerate(found.hidden_states):
        last = [layer[:, -1] for layer in hidden]
        torch.testing.assert_close(last, [layer[:, 4 + step] for layer in expected.hidden_states], rtol=1e-9, atol=1e-9)
    assert len(found.scores) == 3 and isinstance(found.past_key_values, TitansCache)


@pytest.mark.parametrize("name", ["static", "offloaded", "offloaded_static", "quantized"])
def test_another_form_of_cache_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"cache_implementation is '{name}'; expected None"):
        model("lmm").generate(tokens(3), max_new_tokens=2, pad_token_id=PAD, cache_implementation=name)


@pytest.mark.parametrize("made", [DynamicCache, partial(StaticCache, max_cache_len=8)], ids=["dynamic", "static"])
def test_a_cache_of_keys_and_values_is_refused(made: Any) -> None:
    mag = model("mag")
    with pytest.raises(ValueError, match=r"past_key_values is a (Dynamic|Static)Cache; expected a TitansCache"):
        mag.generate(tokens(3), max_new_tokens=2, pad_token_id=PAD, past_key_values=made(config=mag.config))


def test_continuous_batching_is_refused() -> None:
    made, ids = model("lmm"), tokens(3)
    with pytest.raises(NotImplementedError, match="continuous batching pages keys and values, and a memory has none"):
        made.generate_batch(ids.tolist())
    with pytest.raises(NotImplementedError, match="continuous batching"):
        made.generate(ids, cache_implementation="paged", max_new_tokens=2)


def test_assisted_decoding_is_refused() -> None:
    for how in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": model("lmm", seed=1)}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model("lmm").generate(tokens(3, 1), max_new_tokens=2, pad_token_id=PAD, **how)


def test_a_memory_assists_no_other_model() -> None:
    llama = build("transformer++", "1m", vocab_size=VOCAB, num_hidden_layers=1, intermediate_size=64).eval()
    with pytest.raises(NotImplementedError, match="a memory cannot take tokens back"):
        llama.generate(tokens(3, 1), max_new_tokens=6, pad_token_id=PAD, assistant_model=model("lmm", torch.float32))


def test_a_cache_is_neither_cut_nor_repeated_less_than_once() -> None:
    made = model("lmm")
    with torch.no_grad():
        cache = made(tokens(3), use_cache=True).past_key_values
    for cut in (cache.crop, cache.truncate):
        with pytest.raises(NotImplementedError, match=r"a memory cannot take tokens back; keep a copy\(\)"):
            cut(1)
    with pytest.raises(ValueError, match="repeats is 0; expected a whole number of at least 1"):
        cache.repeat(0)
