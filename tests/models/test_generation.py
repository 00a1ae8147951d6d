"""Reading in pieces and going on: the same as all at once, in memory that does not grow."""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.models.cases import KINDS, SEGMENT, VARIANTS, model, tokens
from titans import TitansCache, TitansForCausalLM
from titans.layers.record import record_memory
from titans.models import build
from titans.models.generation import Reader, Sampling, Session, end_tokens
from titans.models.text import DOCUMENT, MARGIN, TextStream, encode, encode_blocks, opening, read_text
from titans.models.tokenizer import byte_tokenizer
from titans.ops.native.library import library

ROOT = Path(__file__).parents[2]
GREEDY = Sampling(greedy=True)
BOOK = "It was the best of times, it was the worst of times; 12345 ñandúes, 東京, 🐉.\n" * 3
QUESTION = "Was it?"
TEXTS = [
    BOOK * 20,
    " ".join(str(n**3) for n in range(900)),
    "1234567890" * 200,
    "東京都は日本の首都です。" * 150,
    "a" * 700 + " " * 700 + "\n\n\t b" * 200 + "<|endoftext|>" * 40,
    "🐉👩‍🚀é" * 300,
]


def reads_bytes(kind: str, dtype: torch.dtype = torch.float64, **fields: Any) -> TitansForCausalLM:
    return model(kind, dtype, vocab_size=257, **fields)


def session(kind: str = "mac", cache: TitansCache | None = None) -> Session:
    return Session(reads_bytes(kind), byte_tokenizer(), cache)


def at_once(made: Any, text: str, new: int, **options: Any) -> list[int]:
    """What transformers' generate makes of the whole text in one call."""
    ids = torch.tensor([encode(byte_tokenizer(), text)])
    result = made.generate(ids, max_new_tokens=new, eos_token_id=None, pad_token_id=256, **options)
    return list(result[0, ids.shape[1] :].tolist())


def endless(made: Session) -> Session:
    """The same, going on past the token that ends a text."""
    made.ends = set()
    return made


LONG_WAY = ("gated-deltanet", "ttt-linear", "ttt-mlp")  # rules that the compiled step does not know


def in_place(cache: TitansCache) -> bool:
    """Whether the last token went through the compiled step."""
    return all(layer._step is not None for layer in cache.layers)


def next_logits(made: TitansForCausalLM, ids: Any, cache: TitansCache) -> Any:
    return made(ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_token_at_a_time_equals_one_call_at_every_token(kind: str, batch: int, tmp_path: Path) -> None:
    made, ids = model(kind), tokens(3 * SEGMENT + 3, batch)
    whole = made(ids).logits
    cache = made(ids[:, :3], use_cache=True).past_key_values
    for t in range(3, ids.shape[1]):
        logits = next_logits(made, ids[:, t : t + 1], cache)
        torch.testing.assert_close(logits[:, 0], whole[:, t], rtol=1e-9, atol=1e-9)
        assert in_place(cache) == (library(torch.float64) is not None and kind not in LONG_WAY)
        if t == SEGMENT + 4:  # in the middle of a segment, a window and a chunk
            cache.save(tmp_path / "middle")
            cache = TitansCache.load(tmp_path / "middle")
    assert cache.seen == ids.shape[1]


@pytest.mark.parametrize("kind", VARIANTS)
@torch.no_grad()
def test_a_cache_may_be_copied_reordered_and_read_on_between_tokens(kind: str) -> None:
    made, ids = model(kind), tokens(2 * SEGMENT + 2, 3)
    cache = made(ids[:, :5], use_cache=True).past_key_values
    for t in range(5, 9):
        next_logits(made, ids[:, t : t + 1], cache)
    kept = cache.copy()
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    mixed = torch.cat([ids[order, :9], ids[:, 9:]], dim=1)
    whole = made(mixed).logits
    torch.testing.assert_close(next_logits(made, ids[:, 9:10], cache)[:, 0], whole[:, 9], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(next_logits(made, ids[:, 10:15], cache), whole[:, 10:15], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(next_logits(made, ids[:, 15:16], cache)[:, 0], whole[:, 15], rtol=1e-9, atol=1e-9)
    assert (kept.seen, cache.seen) == (9, 16)
    alone = made(ids).logits
    torch.testing.assert_close(next_logits(made, ids[:, 9:10], kept)[:, 0], alone[:, 9], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", VARIANTS)
@torch.no_grad()
def test_beams_are_what_they_are_the_long_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(kind)
    options: dict[str, Any] = {"max_new_tokens": SEGMENT + 3, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    found = made.generate(tokens(6), **options)
    monkeypatch.setenv("TITANS_ENGINE", "dual")
    assert torch.equal(made.generate(tokens(6), **options), found)


@pytest.mark.parametrize("kind", VARIANTS)
@torch.no_grad()
def test_a_parameter_that_changes_between_two_tokens_counts_from_there_on(kind: str) -> None:
    made, ids = model(kind), tokens(5)
    caches = [made(ids[:, :3], use_cache=True).past_key_values for _ in range(2)]
    for each in caches:
        next_logits(made, ids[:, 3:4], each)
    copied = caches[0].copy()  # which starts anew
    for parameter in made.parameters():
        parameter += 0.1
    made.model.layers[0].ffn.up.weight = torch.nn.Parameter(made.model.layers[0].ffn.up.weight * 2)
    found = next_logits(made, ids[:, 4:], caches[1])
    torch.testing.assert_close(found, next_logits(made, ids[:, 4:], copied), rtol=0, atol=0)


@torch.no_grad()
def test_whoever_listens_to_a_layer_hears_every_token() -> None:
    made, ids = model("mal"), tokens(8)
    cache = made(ids[:, :3], use_cache=True).past_key_values
    next_logits(made, ids[:, 3:4], cache)
    with record_memory(made) as records:
        next_logits(made, ids[:, 4:5], cache)
    assert len(records[0].gates) == 1 and not in_place(cache)
    heard: list[int] = []
    handle = made.model.layers[1].ffn.register_forward_hook(lambda *_: heard.append(1))
    next_logits(made, ids[:, 5:6], cache)
    handle.remove()
    next_logits(made, ids[:, 6:7], cache)
    assert heard == [1] and in_place(cache) == (library(torch.float64) is not None)
    again = pickle.loads(pickle.dumps(cache))
    expected = made(ids).logits[:, 7:]
    for each in (cache, again):
        torch.testing.assert_close(next_logits(made, ids[:, 7:], each), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_book_and_then_asking_equals_the_text_at_once(kind: str) -> None:
    made = endless(session(kind))
    assert made.read([BOOK]) == len(BOOK.encode())
    answer = made.answer(made.encode(QUESTION), 2 * SEGMENT + 3, GREEDY)
    assert answer.tokens == at_once(made.model, BOOK + QUESTION, 2 * SEGMENT + 3, do_sample=False)
    assert answer.finish == "length"


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_text_goes_on_without_a_prompt(kind: str) -> None:
    made = endless(session(kind))
    made.read([BOOK])
    answer = made.answer([], 9, GREEDY)
    assert answer.tokens == at_once(made.model, BOOK, 9, do_sample=False)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("piece", [1, 3, SEGMENT, 50, 10_000])
def test_any_size_of_the_pieces_gives_the_same(kind: str, piece: int) -> None:
    ids = encode(byte_tokenizer(), BOOK)[:150]
    made = reads_bytes(kind)
    reader, other = Reader(made), Reader(made)
    told: list[int] = []
    assert reader.read(ids, piece, told.append) == len(ids)
    assert told == [*range(piece, len(ids), piece), len(ids)]
    other.read(ids, 64)
    assert reader.logits is not None and other.logits is not None
    torch.testing.assert_close(reader.logits, other.logits, rtol=1e-9, atol=1e-9)
    assert reader.cache.seen == other.cache.seen == len(ids)
    assert list(reader.write([1], 20, GREEDY)) == list(other.write([1], 20, GREEDY))


@pytest.mark.parametrize("kind", VARIANTS)
def test_what_was_kept_in_a_file_answers_the_same(kind: str, tmp_path: Path) -> None:
    made = session(kind)
    made.read([BOOK])
    made.cache.save(tmp_path / "book.mem")
    made.model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    other = Session.load(str(tmp_path / "model"), tmp_path / "book.mem")
    prompt = other.encode(QUESTION)
    assert other.answer(prompt, 30, Sampling(seed=3)).tokens == made.answer(prompt, 30, Sampling(seed=3)).tokens
    torch.testing.assert_close(other.reader.logits, made.reader.logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_talk_with_pauses_is_one_text(kind: str, tmp_path: Path) -> None:
    made = endless(session(kind))
    first = made.answer(made.encode("One."), 5, GREEDY)
    made.settle().save(tmp_path / "talk.mem")
    paused = endless(Session(made.model, made.tokenizer, TitansCache.load(tmp_path / "talk.mem")))
    second = paused.answer(paused.encode("Two."), 12, GREEDY)
    ids = [*b"One.", *first.tokens, *b"Two."]
    whole = made.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert second.tokens == whole[0, len(ids) :].tolist()
    assert made.answer(made.encode("Two."), 12, GREEDY).tokens == second.tokens
    assert paused.cache.seen == len(ids) + 11


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_memory_does_not_grow_with_the_text(kind: str) -> None:
    sizes = []
    reader = Reader(reads_bytes(kind, torch.float32, segment_size=256, window_size=256))
    for count in (4096, 12288):
        reader.read(itertools.islice(itertools.cycle(range(256)), count))
        sizes.append(reader.cache.nbytes)
    assert reader.cache.seen == 16384
    assert sizes[0] == sizes[1] > 0


MEASURE = """
import resource, sys, tempfile
from tests.models.cases import model
from titans.models.generation import Session
from titans.models.text import read_text
from titans.models.tokenizer import byte_tokenizer
import torch

made = model(sys.argv[1], torch.float32, vocab_size=257, segment_size=256, window_size=256)
made = Session(made, byte_tokenizer())
peaks = []
for count in (1 << 14, 1 << 18):
    with tempfile.TemporaryFile() as file:
        file.write(b"a word and another one, " * (count // 24))
        file.seek(0)
        made.read(read_text(file, "file"))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts KiB only there")
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_long_text_takes_no_more_memory_than_a_short_one(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, kind], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 << 10  # KiB, for 256 KiB of text


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (Sampling(temperature=1.0, seed=5), {}),
        (Sampling(temperature=0.5, seed=6), {"temperature": 0.5}),
        (Sampling(temperature=3.0, top_k=7, seed=7), {"temperature": 3.0, "top_k": 7}),
        (Sampling(temperature=1.0, top_p=0.6, seed=8), {"top_p": 0.6}),
        (Sampling(temperature=1.0, repetition_penalty=1.8, seed=9), {"repetition_penalty": 1.8}),
        (Sampling(greedy=True, repetition_penalty=1.8), {"repetition_penalty": 1.8, "do_sample": False}),
    ],
)
def test_choices_are_those_of_transformers(sampling: Sampling, options: dict[str, Any]) -> None:
    made = endless(session("mag"))
    answer = made.answer(made.encode(BOOK[:60]), 40, sampling)
    torch.manual_seed(sampling.seed)
    assert answer.tokens == at_once(made.model, BOOK[:60], 40, **{"do_sample": True, "top_k": 0, **options})


def test_a_seed_makes_the_same_choices_and_another_makes_others() -> None:
    def write(seed: int) -> list[int]:
        return session().answer([104, 105], 30, Sampling(seed=seed)).tokens

    assert write(1) == write(1) != write(2)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("transformer++", {"num_hidden_layers": 2, "intermediate_size": 64}),
        ("mamba2", {"num_hidden_layers": 2, "state_size": 8}),
        ("gated-deltanet-hybrid", {"num_hidden_layers": 4, "intermediate_size": 64}),
    ],
)
def test_models_of_transformers_go_on_as_their_generate_does(name: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = endless(Session(build(name, "1m", vocab_size=257, **fields).eval(), byte_tokenizer()))
    made.read([BOOK], piece=37)
    answer = made.answer(made.encode(QUESTION), 20, GREEDY)
    assert answer.tokens == at_once(made.model, BOOK + QUESTION, 20, do_sample=False)
    assert made.reader.grows == (name != "mamba2")


def test_a_model_with_so_many_positions_reads_and_writes_no_more() -> None:
    made = build(
        "transformer++", "1m", vocab_size=257, num_hidden_layers=1, intermediate_size=64, max_position_embeddings=20
    ).eval()
    talk = endless(Session(made, byte_tokenizer()))
    with pytest.raises(ValueError, match="the text is too long for the model; expected at most 20 tokens"):
        talk.encode("a" * 21)
    answer = talk.answer(talk.encode("a" * 15), 100)
    assert (len(answer.tokens), answer.finish) == (6, "length")
    with pytest.raises(ValueError, match="expected at most 20 tokens"):
        talk.read(["more"])


def trained_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of one of the kinds that there are, which joins characters as far as it can."""
    made = Tokenizer(models.BPE(unk_token=None if kind == "gpt" else "<unk>", byte_fallback=kind == "llama"))
    special = ["<unk>", "<s>", "<|endoftext|>"]
    if kind == "gpt":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=16,
        )
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, max_token_length=16)
    made.train_from_iterator([*TEXTS, BOOK], trainer)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special[:3]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|endoftext|>")


@cache
def tokenizer_of(kind: str) -> Any:
    return byte_tokenizer() if kind == "bytes" else trained_tokenizer(kind)


@pytest.mark.parametrize("kind", ["bytes", "gpt", "llama"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("size", [97, 600, 5000])
def test_blocks_of_any_size_give_the_tokens_of_the_whole_text(kind: str, text: str, size: int) -> None:
    made = tokenizer_of(kind)
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    parts = list(encode_blocks(made, blocks))
    assert list(itertools.chain.from_iterable(parts)) == made(text, **DOCUMENT)["input_ids"]
    assert len(parts) >= len(text) // (size + 4 * MARGIN)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=300), sizes=st.lists(st.integers(1, 40), min_size=1), margin=st.integers(16, 40))
def test_blocks_cut_anywhere_lose_nothing(text: str, sizes: list[int], margin: int) -> None:
    made = tokenizer_of("gpt")
    rest = iter(text)
    lengths = itertools.cycle(sizes)
    blocks = iter(lambda: "".join(itertools.islice(rest, next(lengths))), "")
    ids = list(itertools.chain.from_iterable(encode_blocks(made, blocks, margin)))
    assert made.decode(ids, clean_up_tokenization_spaces=False) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(), block=st.integers(1, 9))
def test_a_file_comes_back_whole_from_blocks_of_any_size(text: str, block: int) -> None:
    text = text.replace("\0", "0")
    assert "".join(read_text(io.BytesIO(text.encode()), "file", block)) == text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"abc\xff", "file is not text: it is not UTF-8 at byte 3"),
        ("aé".encode()[:2], "file is not text: it is not UTF-8 at byte 1"),
        (b"ab" * 5 + "é".encode() + b"\xc3(", "file is not text: it is not UTF-8 at byte 12"),
        (b"\x7fELF\0\0", "file is not text: it has a zero byte"),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 100])
def test_what_is_not_text_is_refused_where_it_is_not(data: bytes, words: str, block: int) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        list(read_text(io.BytesIO(data), "file", block))


@pytest.mark.parametrize("kind", ["bytes", "gpt", "llama"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_is_written_as_soon_as_its_characters_are_complete(kind: str, text: str) -> None:
    made = tokenizer_of(kind)
    stream, out = TextStream(made), ""
    text = text.replace("<|endoftext|>", "")[:1000]
    for token in encode(made, text):
        piece = stream.put(token)
        assert "\N{REPLACEMENT CHARACTER}" not in piece
        out += piece
    assert stream.end() == ""
    assert out == text


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.integers(0, 255), max_size=120))
def test_bytes_that_are_no_text_are_written_as_the_tokenizer_decodes_them(data: list[int]) -> None:
    stream = TextStream(tokenizer_of("bytes"))
    out = "".join(map(stream.put, data)) + stream.end()
    assert out == bytes(data).decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@example(text="aéa", stops=["é", "aéa"])
@given(text=st.text("abc\né", max_size=60), stops=st.lists(st.text("abc\né", min_size=1, max_size=4), max_size=3))
def test_a_stop_text_ends_the_stream_and_nothing_of_it_is_written(text: str, stops: list[str]) -> None:
    stream, out = TextStream(tokenizer_of("bytes"), stops), ""
    for byte in text.encode():
        out += stream.put(byte)
        if stream.stopped:
            break
    out += stream.end()
    # the stop text that is complete first, and of several the one that began first
    seen = (text[:count] for count in range(len(text) + 1))
    ended = next((part for part in seen if any(stop in part for stop in stops)), None)
    assert stream.stopped == (ended is not None)
    assert out == (text if ended is None else ended[: min(ended.find(stop) for stop in stops if stop in ended)])


def test_an_answer_ends_at_a_stop_text_or_at_the_end_of_the_text() -> None:
    made = endless(session())
    whole = made.answer([104, 105], 40, GREEDY)
    again = endless(session())
    shown: list[str] = []
    part = again.answer([104, 105], 40, GREEDY, [whole.text[3:5]], shown.append)
    assert part.finish == "stop"
    assert part.text == "".join(shown) == whole.text[: whole.text.index(whole.text[3:5])]
    assert part.tokens == whole.tokens[: len(part.tokens)]
    ended = session()
    ended.ends = {whole.tokens[6]}
    answer = ended.answer([104, 105], 40, GREEDY)
    assert answer.finish == "end"
    assert answer.tokens == whole.tokens[: whole.tokens.index(whole.tokens[6]) + 1]


def test_special_tokens_stand_at_the_very_beginning_only() -> None:
    made = model("mag", vocab_size=700)
    talk = Session(made, tokenizer_of("gpt"))
    assert opening(talk.tokenizer) == [1]
    plain = encode(talk.tokenizer, "times")
    assert talk.encode("times") == [1, *plain]
    assert talk.encode("times", first=False) == plain
    assert talk.encode("") == [1]
    talk.read(["times"])
    assert talk.cache.seen == 1 + len(plain)
    assert talk.encode("times") == plain
    assert talk.encode("") == []
    assert opening(byte_tokenizer()) == []
    assert session().encode("") == [256]
    resumed = Session(made, talk.tokenizer, talk.cache)
    assert resumed.encode("times") == plain
    assert resumed.encode("") == [1]
    resumed.read(["times"])
    assert resumed.cache.seen == 1 + 2 * len(plain)


def test_an_empty_prompt_needs_a_token_to_begin_with() -> None:
    made = Session(model("mac", vocab_size=256), byte_tokenizer())
    with pytest.raises(ValueError, match="the prompt is empty and the model has no token to begin with"):
        made.encode("")
    assert made.encode("", first=False) == []
    with pytest.raises(ValueError, match="the prompt is empty and nothing was read before it"):
        made.answer([])


def test_a_tokenizer_that_knows_more_than_the_model_is_refused() -> None:
    made = Session(model("mac", vocab_size=100), byte_tokenizer())
    assert made.encode("ABC") == [65, 66, 67]
    words = "the text has the token 122 and the vocabulary of the model has 100; expected a tokenizer that fits"
    with pytest.raises(ValueError, match=words):
        made.encode("xyz")
    with pytest.raises(ValueError, match=words):
        made.read(["ABCxyz"])
    assert made.cache is None


def test_a_token_without_a_text_is_never_chosen() -> None:
    made = Session(model("mac", vocab_size=20_000), byte_tokenizer())
    assert max(made.answer([65], 30, Sampling(temperature=5.0)).tokens) <= 256


def test_the_tokens_that_end_a_text_are_the_tokenizer_s_and_the_config_s() -> None:
    assert end_tokens(reads_bytes("mac"), byte_tokenizer()) == {256}
    assert end_tokens(reads_bytes("mac", eos_token_id=[10, 11]), byte_tokenizer()) == {10, 11, 256}
    llama = build("transformer++", "1m", vocab_size=257, num_hidden_layers=1, intermediate_size=64)
    assert llama.config.eos_token_id == 2
    assert end_tokens(llama, byte_tokenizer()) == {256}


def test_logits_that_are_not_finite_are_one_sentence() -> None:
    made = session()
    with torch.no_grad():
        made.model.lm_head.weight[5] = math.nan
    with pytest.raises(ValueError, match="the model gives logits that are not finite"):
        made.answer([65])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; expected a positive number, or greedy choice"),
        ({"temperature": math.nan}, "temperature is nan; expected a positive number"),
        ({"temperature": math.inf}, "temperature is inf; expected a positive number"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0; expected a positive number"),
        ({"top_k": 0}, "top_k is 0; expected a whole number of at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a number in (0, 1]"),
        ({"top_p": 1.1}, "top_p is 1.1; expected a number in (0, 1]"),
        ({"seed": -1}, "seed is -1; expected a whole number from 0"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Sampling(**fields)


def test_no_tokens_and_empty_stop_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens is 0; expected a whole number of at least 1"):
        session().answer([65], 0)
    with pytest.raises(ValueError, match="a stop text is empty"):
        session().answer([65], stops=["", "a"])


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_memory_of_another_model_is_refused(kind: str, tmp_path: Path) -> None:
    made = reads_bytes("mac, no memory")
    made(torch.tensor([[1, 2]]), use_cache=True).past_key_values.save(tmp_path / "other.mem")
    reads_bytes(kind).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"other.mem does not fit .*model: the cache comes from a model with "):
        Session.load(str(tmp_path / "model"), tmp_path / "other.mem")


@pytest.mark.parametrize("kind", ["lmm", "mac", "mag", "mal"])
def test_a_step_reads_no_parameter_in_another_order_than_it_has(kind: str) -> None:
    made = model(kind)
    ids = tokens(6)
    turned = {
        name: p.detach().t().contiguous().t() if p.ndim == 2 else p.detach() for name, p in made.named_parameters()
    }
    with torch.no_grad():
        expected = made(ids).logits
        cache = None
        for place in range(ids.shape[1]):
            output = torch.func.functional_call(
                made, turned, (ids[:, place : place + 1],), {"past_key_values": cache, "use_cache": True}
            )
            cache = output.past_key_values
            torch.testing.assert_close(output.logits[:, 0], expected[:, place])
