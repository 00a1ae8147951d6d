from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, ByT5Tokenizer

from titans.models.tokenizer import (
    byte_tokenizer,
    dna_tokenizer,
    is_byte_tokenizer,
    load_tokenizer,
    make_encoder,
    save_tokenizer,
    tokenizer_state,
    train_tokenizer,
)

END = "<|endoftext|>"
TEXTS = ["the cat sat on the mat, the cat sat\n" * 20, "naïve café, 漢字 漢字 漢字, <|endoftext|> it's\n" * 20]
any_text = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [END, "<|", "endoftext", "|>", " ", "\n", "\t", "\0", "\x1b", "the", "'s", "漢", "🙂", "\u200b", "\r"]
    )
).map("".join)


@pytest.fixture(scope="module", params=["bytes", "trained"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return byte_tokenizer() if request.param == "bytes" else train_tokenizer(TEXTS, 400)


def saved(tokenizer: Any, folder: Path) -> Any:
    save_tokenizer(tokenizer, folder)
    return AutoTokenizer.from_pretrained(folder)


def hard_examples(test: Callable[..., None]) -> Callable[..., None]:
    for text in ("", " ", "\0\x01\x7f", f"a {END}{END} b", "a . b , c 's n't", "\ufeffx", "\U0010ffff", "e\u0301"):
        test = example(text=text)(test)
    return test


@hard_examples
@given(text=any_text)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    ids = make_encoder(tokenizer)([text])[0].tolist()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


@hard_examples
@given(text=any_text)
@settings(max_examples=150, deadline=None)
def test_text_never_becomes_the_special_token(tokenizer: Any, text: str) -> None:
    assert tokenizer.eos_token_id not in make_encoder(tokenizer)([text])[0]


@hard_examples
@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_ids_of_the_byte_tokenizer_are_the_bytes_with_and_without_the_shortcut(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert make_encoder(tokenizer)([text])[0].tolist() == list(text.encode())
    assert tokenizer.encode(text, split_special_tokens=True) == list(text.encode())


def test_the_special_token_is_bos_eos_and_pad_also_when_saved(tokenizer: Any, tmp_path: Path) -> None:
    again = saved(tokenizer, tmp_path / "tokenizer")
    for some in (tokenizer, again):
        assert some.bos_token == some.eos_token == some.pad_token == END
        assert some.encode(END) == [some.eos_token_id]
    assert len(again) == len(tokenizer)
    assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
    assert tokenizer_state(again) == tokenizer_state(tokenizer)
    assert is_byte_tokenizer(again) == is_byte_tokenizer(tokenizer)


def test_the_byte_tokenizer_has_257_tokens_and_ends_with_256() -> None:
    assert len(byte_tokenizer()) == 257
    assert byte_tokenizer().eos_token_id == 256


def test_training_finds_words_and_is_the_same_every_time() -> None:
    first, second = train_tokenizer(TEXTS, 400), train_tokenizer(iter(TEXTS), 400)
    assert tokenizer_state(first) == tokenizer_state(second)
    assert 257 < len(first) <= 400
    assert len(first.encode(" the cat sat")) == 3
    assert len(train_tokenizer(TEXTS, 270)) == 270
    assert len(train_tokenizer([], 300)) == 257


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 256; expected at least 257"):
        train_tokenizer(TEXTS, 256)


def test_threads_do_not_disturb_each_other(tokenizer: Any) -> None:
    encode = make_encoder(tokenizer)
    texts = [f"{i} {TEXTS[i % 2]}" for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: encode([text])[0].tolist(), texts))
    assert together == [ids.tolist() for ids in encode(texts)]


def test_a_tokenizer_in_python_is_encoded_too() -> None:
    tokenizer = ByT5Tokenizer()
    assert make_encoder(tokenizer)(["hé </s>"])[0].tolist() == [byte + 3 for byte in "hé </s>".encode()]
    assert tokenizer_state(tokenizer) != tokenizer_state(byte_tokenizer())


def test_settings_of_a_tokenizer_neither_cut_nor_fill_texts_up() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert [len(ids) for ids in make_encoder(tokenizer)(["0123456789012", "01"])] == [13, 2]
    assert tokenizer.backend_tokenizer.truncation is not None


def test_a_tokenizer_is_loaded_by_name_folder_or_file(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 300)
    save_tokenizer(trained, tmp_path / "folder")
    trained.backend_tokenizer.save(str(tmp_path / "alone.json"))
    assert is_byte_tokenizer(load_tokenizer("bytes"))
    for name in ("folder", "folder/tokenizer.json", "alone.json"):
        loaded = load_tokenizer(str(tmp_path / name))
        assert loaded.eos_token == END
        assert loaded.encode(TEXTS[0]) == trained.encode(TEXTS[0])


def test_a_file_without_a_known_end_has_no_eos(tmp_path: Path) -> None:
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).eos_token is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "the tokenizer ./nowhere is not there; expected 'bytes', a folder with a tokenizer"),
        ("here/nowhere", "the tokenizer here/nowhere is not there"),
        ("no such name", "the tokenizer no such name is not there"),
        ("", "is not there"),
        ("here", "the tokenizer here cannot be loaded; expected a folder with a tokenizer that transformers can read"),
        ("here/text.txt", "here/text.txt cannot be read as a tokenizer; expected a tokenizer.json file"),
        ("broken", "the tokenizer broken cannot be loaded; expected a folder"),
        ("broken/tokenizer.json", "cannot be read as a tokenizer"),
        (
            "owner/nothing",
            "the tokenizer owner/nothing cannot be loaded; expected 'bytes', a folder with a tokenizer",
        ),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_a_sentence(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("here").mkdir()
    Path("here/text.txt").write_text("hello")
    Path("broken").mkdir()
    Path("broken/tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError) as error_info:
        load_tokenizer(name)
    assert words in str(error_info.value)
    assert "\n" not in str(error_info.value)


def test_a_tokenizer_is_written_whole_into_a_new_folder_only(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/deep"):
        save_tokenizer(tokenizer, tmp_path / name)
        assert is_byte_tokenizer(load_tokenizer(str(tmp_path / name)))
    before = sorted(tmp_path.rglob("*"))
    for name, words in (
        ("empty", "is not empty"),
        ("empty/tokenizer.json", "is a file"),
        ("empty/tokenizer.json/x", "cannot"),
    ):
        with pytest.raises(ValueError, match=words):
            save_tokenizer(tokenizer, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_nucleotides_are_tokens_in_any_case_and_everything_else_is_n(tmp_path: Path) -> None:
    tokenizer = dna_tokenizer()
    assert tokenizer("ACGTN")["input_ids"] == [0, 1, 2, 3, 4]
    assert tokenizer("acgtn")["input_ids"] == [0, 1, 2, 3, 4]
    assert tokenizer("AXé-T\nC G")["input_ids"] == [0, 4, 4, 4, 3, 1, 2]
    assert tokenizer(["AC", "ACGT"], padding=True)["input_ids"] == [[0, 1, 5, 5], [0, 1, 2, 3]]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.decode(again("acgNtr")["input_ids"], skip_special_tokens=True) == "ACGNTN"
    assert again.decode([0, 5, 5, 4], skip_special_tokens=True) == "AN"
    assert (len(again), again.pad_token_id) == (6, 5)
