from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from titans.models.text import encode
from titans.models.tokenizer import byte_tokenizer, train_tokenizer
from titans.tasks.base import Example
from titans.tasks.language import Lambada, join_tokens, read_passages

BYTES = byte_tokenizer()
WORDS = train_tokenizer(["the red boat sailed home and the red boat sank near the shore"] * 3, 320)
PASSAGES = [
    ("The harbour was full. They had lost the red boat, and nobody could find the", " boat"),
    ("“Wait,” she said.\n\nHe looked for his coat and put on the", " coat"),
    ("A short one", " ends"),
]
GROUP = {"set": "lambada"}


def _with_bos() -> Any:
    """Bytes, each text beginning with the bos."""
    made = byte_tokenizer()
    bos = (made.bos_token, made.bos_token_id)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return made


def _write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return _write(tmp_path / "lambada.jsonl", [{"text": context + word} for context, word in PASSAGES])


def _answer(drawn: Example, tokenizer: Any) -> str:
    (answer,) = drawn.answers
    assert list(drawn.tokens[answer.place :]) == list(answer.wanted)
    text: str = tokenizer.decode(answer.wanted)
    return text


def test_both_formats_are_the_same_passages(tmp_path: Path, data: str) -> None:
    rows = [{"context": context, "continuation": word.strip()} for context, word in PASSAGES]
    assert read_passages(_write(tmp_path / "other.jsonl", rows)) == read_passages(data) == PASSAGES


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_the_answer_is_the_last_word_with_its_space_and_the_text_is_tokenised_as_a_whole(
    data: str, tokenizer: Any
) -> None:
    for number, (context, word) in enumerate(PASSAGES):
        drawn = Lambada(data).take(number, GROUP, tokenizer)
        assert _answer(drawn, tokenizer) == word
        assert list(drawn.tokens) == encode(tokenizer, context + word)


def test_a_text_begins_with_what_the_tokenizer_begins_texts_with(data: str) -> None:
    tokenizer = _with_bos()
    drawn = Lambada(data).take(0, GROUP, tokenizer)
    assert drawn.tokens[0] == tokenizer.bos_token_id
    assert _answer(drawn, tokenizer) == " boat"


def test_a_file_that_changed_is_read_again(tmp_path: Path, data: str) -> None:
    task = Lambada(data)
    assert task.count(GROUP) == 3
    _write(Path(data), [{"text": "only one"}])
    assert task.count(GROUP) == 1
    assert _answer(task.take(0, GROUP, BYTES), BYTES) == " one"


def test_the_limit_counts_from_the_first_passage(data: str) -> None:
    task = Lambada(data, limit=2)
    assert task.count(task.groups()[0]) == 2
    assert Lambada(data, limit=9).count(GROUP) == 3
    drawn = {_answer(task.draw(random.Random(seed), GROUP, "test", BYTES), BYTES) for seed in range(20)}
    assert drawn == {" boat", " coat"}


@given(st.text(min_size=1).filter(str.strip), st.text(min_size=1).filter(str.strip))
def test_two_texts_have_the_tokens_of_one(context: str, continuation: str) -> None:
    tokens, place = join_tokens(BYTES, context, continuation)
    assert bytes(tokens) == (context + continuation).encode()
    assert bytes(tokens[:place]) == context.rstrip().encode()


@given(st.text("abd ehorst", min_size=1).filter(str.strip), st.text("abd ehorst", min_size=1).filter(str.strip))
def test_what_follows_a_text_never_begins_behind_its_end(context: str, continuation: str) -> None:
    tokens, place = join_tokens(WORDS, context, continuation)
    assert WORDS.decode(tokens, skip_special_tokens=True) == context + continuation
    assert [token for token in tokens if token != WORDS.eos_token_id] == encode(WORDS, context + continuation)
    assert context.startswith(WORDS.decode(tokens[:place], skip_special_tokens=True))


def test_where_nothing_is_left_before_a_text_the_token_that_ends_texts_is() -> None:
    assert join_tokens(BYTES, "", "ab") == ([256, 97, 98], 1)
    assert join_tokens(BYTES, " ", "ab") == ([256, 32, 97, 98], 1)
    assert join_tokens(_with_bos(), "", "ab") == ([256, 97, 98], 1)
    (whole,) = encode(WORDS, "ar")  # one token, which reaches across
    assert join_tokens(WORDS, "a", "r") == ([WORDS.eos_token_id, whole], 1)


def test_there_is_nothing_to_train_on(data: str) -> None:
    task = Lambada(data)
    with pytest.raises(ValueError, match=r"^lambada has no sequences to train on"):
        task.training_group(random.Random(0), 64)
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match=rf"^split is '{split}'; expected test"):
            task.draw(random.Random(0), GROUP, split, BYTES)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "two words"}, {"words": "x"}], "has words in row 2; expected text, or context and continuation"),
        ([{"text": "one"}], "has less than two words in row 1"),
        ([{"text": ""}], "has less than two words in row 1"),
        ([{"context": "a b", "continuation": " "}], "has less than two words in row 1"),
        ([], "is empty; expected one object per line"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, rows: list[dict[str, str]], message: str) -> None:
    task = Lambada(_write(tmp_path / "data.jsonl", rows))
    with pytest.raises(ValueError, match=message):
        task.count(GROUP)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{not json", "is not JSON in line 1"), (b"3\n", "has a int as row 1"), (b"\xff\xff", "is not text")],
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Lambada(str(path)).count(GROUP)


def test_wrong_settings_are_refused(tmp_path: Path, data: str) -> None:
    with pytest.raises(ValueError, match=r"^data is ''; expected a JSONL file"):
        Lambada()
    with pytest.raises(ValueError, match=r"^limit is 0; expected at least 1"):
        Lambada(data, limit=0)
    with pytest.raises(ValueError, match=r"^number is 3; expected one from 0 to 2"):
        Lambada(data).take(3, GROUP, BYTES)
    with pytest.raises(ValueError, match=r"^tokenizer is None"):
        Lambada(data).take(0, GROUP, None)
