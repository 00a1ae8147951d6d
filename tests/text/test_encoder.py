"""The text encoder: what a vector means, that its bits are its own, and what cannot be encoded."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, BertModel

from tests.text.small_bert import save_small_bert
from titans.text.encoder import CachedEncoder, TextEncoder

WORDS = ["the", "of", "a", "cat", "lives", "Oslo", "home", "Ann", "2024", "!!", "東京", "é", "unbelievably", "hello"]


@pytest.fixture(scope="module")
def default() -> TextEncoder:
    return TextEncoder.load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def small(folder: Path) -> TextEncoder:
    return TextEncoder.load(folder, max_tokens=40)


def make_texts(count: int, longest: int, rng: random.Random) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.randrange(longest))) for _ in range(count)]


def test_the_default_puts_what_means_the_same_close_together(default: TextEncoder) -> None:
    texts = ["Ann lives in Oslo.", "Ann's home is in Oslo.", "The recipe needs two eggs and some flour."]
    vectors = default.encode(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (3, 384) == (3, default.width)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors[0] @ vectors[1] > 0.8 > 0.3 > vectors[0] @ vectors[2]
    assert (default.pooling, default.max_tokens) == ("mean", 256)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("name", "count", "rounds"), [("small", 30, 20), ("default", 8, 2)])
def test_a_vector_has_the_same_bits_in_any_company(
    name: str, count: int, rounds: int, threads: int, request: pytest.FixtureRequest
) -> None:
    encoder: TextEncoder = request.getfixturevalue(name)
    rng = random.Random(0)
    texts = make_texts(count, 3 * count, rng)
    # texts of exactly 16 and 32 tokens need no padding
    texts += ["cat " * 14, "cat " * 30, "cat " * 13, "cat " * 15]
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(rounds // threads):
            chosen = rng.choices(range(len(texts)), k=rng.randrange(count))
            assert np.array_equal(encoder.encode([texts[i] for i in chosen]), alone[chosen])
    finally:
        torch.set_num_threads(before)


def test_threads_share_an_encoder(small: TextEncoder) -> None:
    texts = make_texts(60, 90, random.Random(1))
    expected = small.encode(texts)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: small.encode([texts[i]])[0], range(60)))
    assert np.array_equal(np.stack(found), expected)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@torch.inference_mode()
def test_pooling_is_over_the_tokens_that_are_not_padding(folder: Path, pooling: str) -> None:
    encoder = TextEncoder.load(folder, pooling)
    text = "Ann lives in Oslo, unbelievably."
    ids = torch.tensor(encoder._network.tokenize([text], 512, 0)[0])
    hidden = BertModel.from_pretrained(folder)(input_ids=ids).last_hidden_state[0]  # nothing is padded here
    pooled = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0)}[pooling]
    np.testing.assert_allclose(encoder.encode([text])[0], F.normalize(pooled, dim=0).numpy(), atol=1e-6)


def test_a_long_text_is_the_mean_of_its_overlapping_passages(small: TextEncoder, folder: Path) -> None:
    words = [f"{word} {number}" for number, word in enumerate(WORDS * 7)]
    text = " ".join(words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    room, overlap = small.max_tokens - 2, small.max_tokens // 8
    starts = range(0, len(ids) - overlap, room - overlap)
    assert len(starts) > 3
    mean = small.encode([tokenizer.decode(ids[start : start + room]) for start in starts]).mean(0)
    assert small.encode([text])[0] @ (mean / np.linalg.norm(mean)) > 0.999
    assert small.encode([text])[0] @ small.encode([text + " A last word."])[0] < 1 - 1e-6  # nothing is cut off


def test_empty_and_strange_texts_have_vectors(small: TextEncoder) -> None:
    texts = ["", " ", "\x00\x07", "\ud800 half a pair", "🙂" * 50, "a" * 5000]
    vectors = small.encode(texts)
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert small.encode([]).shape == (0, 32)


def test_a_folder_of_sentence_transformers_says_how_it_pools(folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(folder, tmp_path / "sentences")
    (target / "1_Pooling").mkdir()
    (target / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    pooling = target / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    encoder = TextEncoder.load(target)
    assert (encoder.pooling, encoder.max_tokens) == ("cls", 100)
    assert TextEncoder.load(target, "max", max_tokens=512).pooling == "max"
    pooling.write_text('{"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": true}')
    assert TextEncoder.load(target).pooling == "cls"
    for fields in (
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        {"pooling_mode": "lasttoken"},
        {"pooling_mode": ["mean", "max"]},
    ):
        pooling.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match="asks for a pooling that is not known; expected one of mean, cls, max"):
            TextEncoder.load(target)


def test_a_folder_of_sentence_transformers_with_other_layers_is_refused(folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(folder, tmp_path / "sentences")
    kinds = ["models.Transformer", "sentence_transformer.modules.Pooling", "models.Normalize"]
    modules = target / "modules.json"
    modules.write_text(json.dumps([{"type": f"sentence_transformers.{kind}"} for kind in kinds]))
    assert TextEncoder.load(target).pooling == "mean"
    modules.write_text(json.dumps([{"type": f"sentence_transformers.{kind}"} for kind in [*kinds, "models.Dense"]]))
    with pytest.raises(ValueError, match=r"has a layer Dense, .* expected only Transformer, Pooling, Normalize"):
        TextEncoder.load(target)
    modules.write_text("[1]")
    with pytest.raises(ValueError, match="is no list of modules; expected what sentence-transformers writes"):
        TextEncoder.load(target)


def test_lower_case_that_the_tokenizer_does_not_make_is_refused(folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(folder, tmp_path / "sentences")
    (target / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    vector = TextEncoder.load(target).encode(["Oslo"])
    assert np.array_equal(vector, TextEncoder.load(folder).encode(["oslo"]))
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_lower_case": False}))
    with pytest.raises(ValueError, match="its tokenizer keeps capitals; expected do_lower_case in tokenizer_config"):
        TextEncoder.load(target)


def test_the_fingerprint_is_of_weights_pooling_and_passages(folder: Path, tmp_path: Path) -> None:
    first = TextEncoder.load(folder)
    assert len(first.fingerprint) == 16 and TextEncoder.load(folder).fingerprint == first.fingerprint
    other = TextEncoder.load(folder)
    with torch.no_grad():
        other._network.weights["embeddings.word_embeddings.weight"][0, 0] += 1e-6
    known = {first.fingerprint, other.fingerprint, TextEncoder.load(folder, "cls").fingerprint}
    known.add(TextEncoder.load(folder, max_tokens=64).fingerprint)
    assert len(known) == 4


def test_what_cannot_be_loaded_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pooling is 'sum'; expected one of mean, cls, max"):
        TextEncoder.load(pooling="sum")
    with pytest.raises(ValueError, match=r"mistyped is not there; expected a folder of a BERT-like model"):
        TextEncoder.load(tmp_path / "mistyped")
    with pytest.raises(ValueError, match=r"has no config.json; expected a folder of a BERT-like model"):
        TextEncoder.load(tmp_path)
    with pytest.raises(ValueError, match="max_tokens is 513; expected 16 to 512"):
        TextEncoder.load(folder, max_tokens=513)
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"damaged cannot be loaded as a text encoder: .+"):
        TextEncoder.load(damaged)
    (damaged / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ValueError, match=r"damaged cannot be loaded as a text encoder: .+") as caught:
        TextEncoder.load(damaged)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_is_one_sentence(small: TextEncoder) -> None:
    with pytest.raises(ValueError, match="texts is one text; expected a list of them"):
        small.encode("text")
    with pytest.raises(ValueError, match=r"texts\[1\] is of type NoneType; expected a text"):
        small.encode(["a", None])  # type: ignore[list-item]


class Counting(CachedEncoder):
    """Counts the texts that reach the model."""

    def __init__(self, encoder: TextEncoder, file: Path | None = None) -> None:
        super().__init__(encoder, file)
        self.count = 0
        encode = encoder.encode

        def counted(texts: Sequence[str]) -> np.ndarray:
            self.count += len(texts)
            return encode(texts)

        self._encoder = SimpleNamespace(encode=counted)  # type: ignore[assignment]


def test_a_cache_encodes_each_text_once_and_gives_the_vectors_of_the_encoder(small: TextEncoder) -> None:
    cached = Counting(small)
    texts = [*WORDS, *WORDS[:3]]
    np.testing.assert_array_equal(cached.encode(texts), small.encode(texts))
    assert (cached.count, cached.fingerprint, cached.width) == (len(WORDS), small.fingerprint, 32)
    steps: list[tuple[int, int, str]] = []
    cached.learn([*WORDS, "new"], lambda *step: steps.append(step))
    assert cached.count == len(WORDS) + 1 and steps == [(0, 1, "encoding texts")]
    assert cached.encode([]).shape == (0, 32)
    with pytest.raises(ValueError, match="texts is one text"):
        cached.encode("one")


def test_a_cache_keeps_its_vectors_in_a_file_for_the_same_encoder(
    small: TextEncoder, folder: Path, tmp_path: Path
) -> None:
    file, texts = tmp_path / "new" / "vectors.npz", [f"text {number} \N{SNOWMAN}" for number in range(70)]
    first = CachedEncoder(small, file).encode(texts)
    again = Counting(small, file)
    np.testing.assert_array_equal(again.encode(texts), first)
    assert again.count == 0
    other = Counting(TextEncoder.load(folder, "cls", max_tokens=40), file)
    assert not np.array_equal(other.encode(texts), first) and other.count == 70
    file.write_bytes(b"damaged")
    np.testing.assert_array_equal(CachedEncoder(small, file).encode(texts), first)
    again = Counting(small, file)
    again.encode(texts)
    assert again.count == 0
