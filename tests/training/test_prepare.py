from __future__ import annotations

import gzip
import json
import os
import random
import re
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from titans.models.tokenizer import byte_tokenizer, save_tokenizer, train_tokenizer
from titans.tasks.prepared import load_prepared
from titans.training import shards
from titans.training.prepare import Progress, prepare
from titans.training.sources import Reading, find_cut, find_sources, sample_texts

EOS = 256  # of the byte tokenizer
PROSE = "".join(random.Random(0).choices([*"abcdefgh     \n", "\n\n", "  ", " é", "漢字", "don't ", ". "], k=4000))
slow_disk = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a trained tokenizer."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer"
    save_tokenizer(train_tokenizer([PROSE], 400), path)
    return str(path)


def rows(out: str | Path, split: str = "train") -> list[list[int]]:
    ids: list[list[int]] = load_prepared(out).open(split)["input_ids"][:]
    return ids


def texts(out: str | Path, split: str = "train") -> list[str]:
    """The documents of a set of bytes, whose ends have been looked at."""
    ids = rows(out, split)
    assert all(document[-1] == EOS and EOS not in document[:-1] for document in ids)
    return [bytes(document[:-1]).decode() for document in ids]


def write_jsonl(path: str, documents: Sequence[Any], column: str = "text") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(documents)))


def content(out: str | Path) -> dict[str, bytes]:
    """Every file of a set."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(Path(out).rglob("*")) if path.is_file()}


def test_a_set_holds_what_was_promised(folder: Path) -> None:
    Path("a.txt").write_text("hello")
    write_jsonl("b.jsonl", ["first", "", "second é", "  \n", None])
    report = prepare(["a.txt", "b.jsonl"], "out")
    assert texts("out") == ["hello", "first", "second é"]
    assert report.blank == 3
    assert report.splits["train"] == (3, 6 + 6 + 10, 6.0, 10)
    assert report.bytes_per_token == 1
    assert json.loads(Path("out/prepared.json").read_text()) == {
        "format": "titans.prepared",
        "version": 1,
        "tokenizer": {"name": "bytes", "vocab_size": 257, "eos_token_id": 256},
        "splits": {"train": {"documents": 3, "tokens": 22}},
        "sources": ["a.txt", "b.jsonl"],
        "skipped_lines": 0,
        "fingerprint": report.prepared.fingerprint,
    }
    assert AutoTokenizer.from_pretrained("out/tokenizer").eos_token_id == EOS
    data = load_prepared("out").open()
    assert str(data.features.arrow_schema.field("input_ids").type) == "list<item: int32>"
    state = json.loads(Path("out/train/state.json").read_text())
    assert (state["_fingerprint"], state["_split"]) == (f"{report.prepared.fingerprint}-train", "train")
    assert sorted(path.name for path in Path("out").iterdir()) == ["prepared.json", "tokenizer", "train"]


def test_folders_are_read_in_order_without_what_is_hidden_or_something_else(folder: Path) -> None:
    for name in ("b/2.md", "b/1.TXT", "a.text", "b/.hidden.txt", ".git/x.txt", "b/image.png", "c.txt", "out.txt"):
        Path("in", name).parent.mkdir(parents=True, exist_ok=True)
        Path("in", name).write_text(name)
    write_jsonl("in/b/3.jsonl", ["line"])
    Path("in/b/4.txt.gz").write_bytes(gzip.compress(b"packed"))
    Path("in/b/5.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed line"}\n\n{"text": "x"}'))
    prepare(["in/c.txt", "in"], "in/out")
    expected = ["c.txt", "a.text", "out.txt", "b/1.TXT", "b/2.md", "line", "packed", "packed line", "x"]
    assert texts("in/out") == expected
    Path("in/out/notes.md").write_text("what is in the set itself is no source")
    assert not prepare(["in/c.txt", "in"], "in/out").fresh


def test_a_byte_order_mark_is_not_text(folder: Path) -> None:
    Path("a.txt").write_bytes(b"\xef\xbb\xbfhello")
    Path("b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "line"}')
    Path("c.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfpacked"))
    prepare(["a.txt", "b.jsonl", "c.txt.gz"], "out")
    assert texts("out") == ["hello", "line", "packed"]


@example(text="aXXXbXXXXXc", separator="XX", shard=64, packed=False)
@example(text="X" * 400, separator="XXX", shard=64, packed=False)
@example(text=" " * 300 + "XX" + "a" * 300, separator="XX", shard=64, packed=False)
@given(
    text=st.lists(st.sampled_from(["a", "bc ", "é", "漢", "X", "XX", "\n", "X\nX", "word " * 40, " " * 70])).map(
        "".join
    ),
    separator=st.sampled_from(["X", "XX", "XXX", "\n", "X\nX", "\n\n", "é"]),
    shard=st.integers(64, 300),
    packed=st.booleans(),
)
@slow_disk
def test_a_separator_cuts_like_split_wherever_shards_begin(
    folder: Path, text: str, separator: str, shard: int, packed: bool
) -> None:
    name = "a.txt.gz" if packed else "a.txt"
    Path(name).write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    expected = [part for part in text.split(separator) if part.strip()]
    arguments = {"reading": Reading(separator=separator, shard_bytes=shard), "workers": 2, "overwrite": True}
    if expected:
        prepare([name], "out", **arguments)
        assert texts("out") == expected
    else:
        with pytest.raises(ValueError, match="there is no text in"):
            prepare([name], "new", **arguments)
        assert not Path("new").exists()


@pytest.mark.parametrize("shard", [64, 700, 3000, 1 << 20])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_long_document_is_one_row_with_the_tokens_it_has_as_a_whole(
    folder: Path, bpe: str, name: str, shard: int
) -> None:
    document = PROSE.replace("漢字", "\n")  # some white space everywhere
    text = json.dumps({"text": document}) if "jsonl" in name else document
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": [document]}), name)
    else:
        Path(name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    prepare([name], "out", bpe, reading=Reading(shard_bytes=shard), workers=3)
    tokenizer = AutoTokenizer.from_pretrained("out/tokenizer")
    assert rows("out") == [[*tokenizer.encode(document), tokenizer.eos_token_id]]


def test_a_document_without_any_white_space_is_cut_between_characters(folder: Path) -> None:
    Path("a.txt").write_text("漢字é" * 1000)
    prepare(["a.txt"], "out", reading=Reading(shard_bytes=97))
    assert texts("out") == ["漢字é" * 1000]


GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT4 = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)


@example(text="aaaa b bbbbb", pattern=GPT4)
@example(text="aaaa\nb\nbbbbb", pattern=GPT4)
@example(text="aaaa  b  bbbbb", pattern=GPT2)
@example(text="aaaa\u3000\nb\u3000\nbbbbb", pattern=GPT2)
@given(
    text=st.lists(st.sampled_from([*"a1.' \n\t", "\u3000", "\u2028", "é", "'s", "bc", "  "]), min_size=12).map("".join),
    pattern=st.sampled_from([GPT2, GPT4]),
)
@settings(max_examples=200, deadline=None)
def test_words_of_gpt2_and_gpt4_are_the_same_on_both_sides_of_a_cut(text: str, pattern: str) -> None:
    data = text.encode()
    cut = find_cut(data)
    parts = data[:cut].decode(), data[cut:].decode()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    words = [[word for word, _ in split.pre_tokenize_str(part)] for part in (text, *parts)]
    inside = text[3:-4]  # with the character in front of the first place where a cut may be
    if re.search(r"\S \S", inside) or (pattern == GPT2 and re.search(r"\s\S", inside[1:])):
        assert words[0] == words[1] + words[2]


def test_jsonl_is_the_same_in_shards_of_any_size(folder: Path) -> None:
    documents = [f"{i} " + "x" * (i * 37 % 200) for i in range(60)]
    write_jsonl("a.jsonl", documents, "body")
    for shard in (64, 100, 1 << 20):
        prepare(["a.jsonl"], f"out{shard}", reading=Reading(text_column="body", shard_bytes=shard), workers=2)
        assert texts(f"out{shard}") == documents


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_parquet_is_the_same_in_shards_of_any_size(folder: Path, kind: pa.DataType) -> None:
    documents = [f"{i} é" * (i % 7 + 1) for i in range(200)]
    column = pa.array([*documents, None, ""]).cast(kind)
    pq.write_table(pa.table({"id": range(202), "text": column}), "a.parquet", row_group_size=30)
    for shard in (64, 2000, 1 << 20):
        assert prepare(["a.parquet"], f"out{shard}", reading=Reading(shard_bytes=shard), workers=2).blank == 2
        assert texts(f"out{shard}") == documents


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset called owner/name, which datasets' own builder finds in a folder of that name, and no network."""
    write_jsonl("owner/name/train.jsonl", [f"train {i} " + "x" * i for i in range(150)])
    write_jsonl("owner/name/validation.jsonl", ["validation one", "validation two"])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_dataset_of_the_hub_is_read_by_its_name(hub: None, capfd: pytest.CaptureFixture[str]) -> None:
    reading = Reading(shard_bytes=500)
    prepare(["hf://owner/name"], "out", validation=["hf://owner/name:validation"], reading=reading, workers=2)
    assert texts("out") == [f"train {i} " + "x" * i for i in range(150)]
    assert texts("out", "validation") == ["validation one", "validation two"]
    assert not prepare(["hf://owner/name"], "out", validation=["hf://owner/name:validation"], reading=reading).fresh
    prepare(["hf://owner/name"], "other", reading=Reading(split="train[:3]"))
    assert len(texts("other")) == 3
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "reading", "words"),
    [
        ("hf://owner/name", Reading(text_column="txet"), "hf://owner/name has no column 'txet' (did you mean 'text'?)"),
        (
            "hf://owner/name",
            Reading(text_column="id"),
            "hf://owner/name has a column 'id' of int64; expected one of str",
        ),
        (
            "hf://owner/name:test",
            Reading(),
            "hf://owner/name cannot be loaded from the hub, nor is it a local path: Unk",
        ),
        ("hf://owner/name", Reading(name="small"), "BuilderConfig 'small' not found"),
        ("someone/nothing", Reading(), "hf://someone/nothing cannot be loaded from the hub, nor is it a local path"),
    ],
)
def test_what_is_wrong_with_a_dataset_of_the_hub_is_said(hub: None, name: str, reading: Reading, words: str) -> None:
    with pytest.raises(ValueError) as error_info:
        prepare([name], "out", reading=reading)
    assert words in str(error_info.value)
    assert "\n" not in str(error_info.value)
    assert not Path("out").exists()


def test_a_part_of_many_documents_is_validation_chosen_by_the_seed(folder: Path) -> None:
    documents = [f"document {i}" for i in range(50)]
    write_jsonl("a.jsonl", documents)
    chosen = []
    for seed in (0, 0, 1):
        prepare(["a.jsonl"], f"out{len(chosen)}", validation=0.1, seed=seed, reading=Reading(shard_bytes=80))
        train, validation = (texts(f"out{len(chosen)}", split) for split in ("train", "validation"))
        assert len(validation) == 5
        assert train == [document for document in documents if document not in validation]
        assert validation == [document for document in documents if document in validation]
        chosen.append(validation)
    assert chosen[0] == chosen[1] != chosen[2]
    prepare(["a.jsonl"], "one", validation=0.001)
    assert len(texts("one", "validation")) == 1
    prepare(["a.jsonl"], "most", validation=0.999)
    assert len(texts("most", "train")) == 1


@pytest.mark.parametrize(
    ("documents", "fraction", "train", "validation"),
    [
        (["0123456789"], 0.5, ["01234"], ["56789"]),
        (["0123456789"], 0.01, ["012345678"], ["9"]),
        (["0123456789"], 0.9, ["0"], ["123456789"]),
        (["01234", "abcde"], 0.5, ["01234"], ["abcde"]),
        (["01234", "abcde"], 0.25, ["01234", "abc"], ["de"]),
        (["01234", "abcde"], 0.75, ["012"], ["34", "abcde"]),
        (["01234", " ", "abcde", "x"], 0.2, ["01234", "abcd"], ["e", "x"]),
    ],
)
@pytest.mark.parametrize("shard", [64, 1 << 20])
def test_of_few_documents_the_last_tokens_are_validation(
    folder: Path, documents: list[str], fraction: float, train: list[str], validation: list[str], shard: int
) -> None:
    write_jsonl("a.jsonl", documents)
    report = prepare(["a.jsonl"], "out", validation=fraction, reading=Reading(shard_bytes=shard))
    assert texts("out", "train") == train
    assert texts("out", "validation") == validation
    for split, expected in (("train", train), ("validation", validation)):
        assert report.splits[split].tokens == sum(len(document) + 1 for document in expected)
        assert report.prepared.splits[split] == report.splits[split][:2]


def test_files_of_the_validation_are_not_trained_on(folder: Path) -> None:
    for name in ("1.txt", "2.txt", "3.txt"):
        Path(name).write_text(name)
    prepare(["."], "out", validation=["./2.txt"])
    assert texts("out") == ["1.txt", "3.txt"]
    assert texts("out", "validation") == ["2.txt"]
    with pytest.raises(ValueError, match="nothing left to train on"):
        prepare(["2.txt"], "new", validation=["."])


@pytest.fixture
def many(folder: Path) -> list[str]:
    """Sources of all kinds, with a document that goes over many shards."""
    write_jsonl("1.jsonl", [PROSE[i : i + i % 90] for i in range(120)])
    Path("2.txt").write_text(PROSE)
    pq.write_table(pa.table({"text": [PROSE[i : i + 50] for i in range(60)]}), "3.parquet", row_group_size=20)
    Path("4.txt.gz").write_bytes(gzip.compress(PROSE.encode()))
    return ["1.jsonl", "2.txt", "3.parquet", "4.txt.gz"]


SMALL = Reading(shard_bytes=700)


def test_any_number_of_workers_gives_the_same_files(many: list[str], bpe: str) -> None:
    for workers in (1, 2, 7):
        prepare(many, f"out{workers}", bpe, validation=0.2, reading=SMALL, workers=workers)
    assert content("out1") == content("out2") == content("out7")


class Stop:
    """Presses Ctrl-C at the n-th sign of progress of a stage, and counts what has been tokenised up to there."""

    def __init__(self, after: int | None = None, stage: str = "tokenising") -> None:
        self.after, self.stage, self.seen, self.documents = after, stage, 0, 0

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "tokenising":
            self.documents = progress.documents
        self.seen += progress.stage == self.stage
        if self.seen == self.after:
            raise KeyboardInterrupt


def test_stopped_work_goes_on_and_ends_as_if_it_had_not_been_stopped(many: list[str], bpe: str) -> None:
    whole, last = Stop(), Stop()
    prepare(many, "whole", bpe, validation=0.2, reading=SMALL, on_progress=whole)
    stops = [Stop(9), Stop(19), Stop(3, "writing")]
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            prepare(many, "out", bpe, validation=0.2, reading=SMALL, workers=2, on_progress=stop)
        assert not Path("out/prepared.json").exists()
        with pytest.raises(ValueError, match="out is not finished; `titans prepare` with the same arguments finishes"):
            load_prepared("out")
    prepare(many, "out", bpe, validation=0.2, reading=SMALL, workers=2, on_progress=last)
    assert [stop.documents < whole.documents for stop in stops] == [True, True, True], "work was done again"
    assert last.documents == 0, "work was done again"
    assert content("out") == content("whole")


def test_other_arguments_do_not_go_on_with_unfinished_work(many: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(many, "out", reading=SMALL, on_progress=Stop(5))
    with pytest.raises(ValueError, match="out holds the unfinished set of other sources or options"):
        prepare(many[1:], "out", reading=SMALL)
    prepare(many[1:], "out", reading=SMALL, overwrite=True)
    prepare(many[1:], "fresh", reading=SMALL)
    assert content("out") == content("fresh")


@pytest.mark.parametrize(
    "options",
    [
        {"validation": 0.5},
        {"validation": 0.25, "seed": 1},
        {"reading": Reading(separator="l")},
        {"reading": Reading(shard_bytes=64)},
        {"tokenizer": "bpe"},
        {"names": ["b.txt"]},
        {"validation": ["b.txt"]},
    ],
)
def test_a_set_with_any_other_option_is_another_set(folder: Path, bpe: str, options: dict[str, Any]) -> None:
    Path("a.txt").write_text("hello, world")
    Path("b.txt").write_text("hello, world")
    given = {"names": ["a.txt"], "validation": 0.25}
    prepare(**given, out="out", workers=1)
    assert not prepare(**given, out="out", workers=2).fresh
    options = options | ({"tokenizer": bpe} if "tokenizer" in options else {})
    with pytest.raises(ValueError, match="out holds a set of other sources or options"):
        prepare(**given | options, out="out")


def test_a_finished_set_is_kept_until_another_one_is_finished(many: list[str]) -> None:
    Path("5.txt").write_text("text")
    Path("bad.jsonl").write_text("{}\n")
    prepare(["5.txt"], "out")
    assert not prepare(["5.txt"], "out").fresh
    before = content("out")
    with pytest.raises(ValueError, match="out holds a set of other sources or options"):
        prepare(many, "out", reading=SMALL)
    with pytest.raises(ValueError, match="has no column 'text'"):
        prepare(["bad.jsonl"], "out", overwrite=True)
    assert content("out") == before
    with pytest.raises(KeyboardInterrupt):
        prepare(many, "out", reading=SMALL, overwrite=True, on_progress=Stop(5))
    assert texts("out") == ["text"]
    prepare(many, "out", reading=SMALL, validation=0.1, overwrite=True)
    prepare(["5.txt"], "out", overwrite=True)  # without a validation split again
    assert content("out") == before
    with Path("5.txt").open("a") as file:
        file.write("more")
    with pytest.raises(ValueError, match="or of sources that have changed since; --overwrite replaces it"):
        prepare(["5.txt"], "out")


def test_a_folder_with_something_else_is_never_touched(folder: Path) -> None:
    Path("a.txt").write_text("text")
    Path("out/train").mkdir(parents=True)
    Path("out/train/precious.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="out holds something that is no prepared set; expected a folder"):
            prepare(["a.txt"], "out", overwrite=overwrite)
    assert content("out") == {"train/precious.txt": b"mine"}


def test_two_at_a_time_do_not_write_the_same_set(many: list[str]) -> None:
    refused = []

    def other(progress: Progress) -> None:
        if not refused:
            with pytest.raises(ValueError, match="out is in use by another process") as error_info:
                prepare(many, "out", reading=SMALL)
            refused.append(error_info)

    prepare(many, "out", reading=SMALL, on_progress=other)
    assert refused
    assert len(rows("out")) > 100


def test_a_source_that_changes_while_it_is_read_is_refused(many: list[str]) -> None:
    def change(progress: Progress) -> None:
        Path("2.txt").write_text("another text")

    with pytest.raises(ValueError, match=r"2\.txt was changed while it was read; .*; what is done is kept"):
        prepare(many, "out", reading=SMALL, on_progress=change)
    prepare(many, "out", reading=SMALL)
    prepare(many, "fresh", reading=SMALL)
    assert content("out") == content("fresh")


LINES = [json.dumps({"text": f"line {i}"}) for i in range(60)]
LINE = Reading(shard_bytes=64)  # a few lines per shard


@pytest.mark.parametrize("mended", ["the line", "the file"])
def test_a_bad_source_leaves_the_finished_shards_for_when_it_is_mended(folder: Path, mended: str) -> None:
    Path("good.jsonl").write_text("\n".join(LINES))
    Path("bad").mkdir()
    Path("bad/1.jsonl").write_text("\n".join([*LINES[:30], "no JSON", *LINES[30:]]))
    Path("bad/2.jsonl").write_text("\n".join(LINES[:5]))
    whole, last = Stop(), Stop()
    with pytest.raises(ValueError, match=r"bad/1\.jsonl, line 31 is not JSON .*; --skip-bad .*; what is done is kept"):
        prepare(["good.jsonl", "bad"], "out", reading=LINE)
    with pytest.raises(ValueError, match="out is not finished; `titans prepare` with the same arguments finishes"):
        load_prepared("out")
    if mended == "the line":
        Path("bad/1.jsonl").write_text("\n".join(LINES))
    else:
        Path("bad/1.jsonl").unlink()
    prepare(["good.jsonl", "bad"], "out", reading=LINE, on_progress=last)
    prepare(["good.jsonl", "bad"], "whole", reading=LINE, on_progress=whole)
    assert content("out") == content("whole")
    assert last.documents <= whole.documents - 60, "the good source was tokenised again"


def test_bad_lines_are_skipped_and_counted_if_that_is_wanted(folder: Path) -> None:
    bad = ["no JSON", "[]", '{"txt": "a"}', '{"text": 3}', '{"text": "\\ud800"}', "[" * 100_000]
    lines = [line for pair in zip(LINES, [*bad, *[""] * (len(LINES) - len(bad))], strict=True) for line in pair]
    Path("a.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"line 2 is not JSON"):
        prepare(["a.jsonl"], "out", reading=LINE)
    report = prepare(["a.jsonl"], "out", reading=replace(LINE, skip_bad=True), workers=2)
    assert (report.skipped, report.blank) == (7, 0)
    assert json.loads(Path("out/prepared.json").read_text())["skipped_lines"] == 7
    assert texts("out") == [f"line {i}" for i in range(60)]


def test_skipping_goes_on_with_shards_that_had_nothing_to_skip_but_not_the_other_way_round(folder: Path) -> None:
    Path("a.jsonl").write_text("\n".join([*LINES, "no JSON", "no JSON"]))
    skip = replace(LINE, skip_bad=True)
    with pytest.raises(ValueError, match="line 61 is not JSON"):
        prepare(["a.jsonl"], "out", reading=LINE)
    stop = Stop(1, "writing")
    with pytest.raises(KeyboardInterrupt):
        prepare(["a.jsonl"], "out", reading=skip, on_progress=stop)
    assert stop.documents < 10, "the good lines were tokenised again"
    with pytest.raises(ValueError, match="line 61 is not JSON"):
        prepare(["a.jsonl"], "out", reading=LINE)
    assert prepare(["a.jsonl"], "out", reading=skip).skipped == 2


def test_if_all_lines_are_bad_that_is_said(folder: Path) -> None:
    Path("a.jsonl").write_text("no JSON\n" * 3)
    with pytest.raises(ValueError, match=r"no text in .*a\.jsonl \(3 bad lines were skipped\); expected at least one"):
        prepare(["a.jsonl"], "out", reading=Reading(skip_bad=True))
    assert not Path("out").exists()


def test_a_document_of_very_many_tokens_is_put_together_on_disk(
    many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(many, "memory", validation=0.2, reading=SMALL)
    prepare(["2.txt"], "memory2", validation=0.2, reading=SMALL)
    monkeypatch.setattr(shards, "MAX_IN_MEMORY", 100)
    prepare(many, "disk", validation=0.2, reading=SMALL)
    prepare(["2.txt"], "disk2", validation=0.2, reading=SMALL)
    assert content("memory") == content("disk")
    assert content("memory2") == content("disk2")


def test_a_document_that_is_too_long_for_a_row_goes_on_in_the_next(tmp_path: Path) -> None:
    pieces = [shards.Piece("ab ", 3, False)] * 7 + [shards.Piece("end", 3, True), shards.Piece("x", 1, True)]
    encode = lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]  # noqa: E731
    paths = []
    for i, piece in enumerate(pieces):
        paths.append(tmp_path / f"{i}.arrow")
        shards.write_shard(paths[-1], [piece], encode, 0, lambda documents, tokens: None)
    groups = list(shards.read_groups(paths, 0, max_document=8))
    documents = [b"".join(bytes(part.astype(np.uint8)) for part in group.values) for group in groups]
    assert documents == [b"ab ab ab \0", b"ab ab ab \0", b"ab end\0", b"x\0"]


def test_a_large_file_is_not_held_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_IN_MEMORY", 1 << 16)
    with Path("a.txt").open("w") as file:
        for i in range(120):
            file.write(f"{i} " + "some words " * 3000)
    size = os.path.getsize("a.txt")
    write_jsonl("b.jsonl", ["word " * 200] * (size // 1000))
    for name in ("a.txt", "b.jsonl"):
        tracemalloc.start()
        prepare([name], f"out-{name}", reading=Reading(shard_bytes=1 << 16))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size / 3, f"{peak:,} bytes at a time for {size:,}"  # the tokens would be 4 x size


def test_blank_pieces_of_a_document_that_has_text_are_kept(folder: Path) -> None:
    text = "a" + " " * 500 + "b" + "\n" * 500
    Path("a.txt").write_text(text)
    Path("b.txt").write_text(" " * 900)
    Path("c.txt.gz").write_bytes(gzip.compress(text.encode()))  # all of it in one shard
    report = prepare(["a.txt", "b.txt", "c.txt.gz"], "out", reading=Reading(shard_bytes=64))
    assert texts("out") == [text, text]
    assert report.blank == 1


def test_literal_special_tokens_are_text(folder: Path, bpe: str) -> None:
    document = "before <|endoftext|> after"
    Path("a.txt").write_text(document)
    for name in ("bytes", bpe):
        prepare(["a.txt"], "out", name, overwrite=True)
        tokenizer = AutoTokenizer.from_pretrained("out/tokenizer")
        (ids,) = rows("out")
        assert ids.index(tokenizer.eos_token_id) == len(ids) - 1
        assert tokenizer.decode(ids) == document + "<|endoftext|>"


def test_a_sample_is_taken_from_all_over_the_sources(folder: Path) -> None:
    for i in range(10):
        Path(f"{i}.txt").write_text(str(i) * (1 << 20))  # as much as is taken in one place
    found, reading = find_sources(["."], Reading()), Reading()
    sample = list(sample_texts(found, reading, 5 << 20))
    assert sum(map(len, sample)) == 5 << 20
    assert len({text[0] for text in sample}) >= 5
    assert "".join(sample_texts(found, reading, 3)) == "000"
    assert sum(map(len, sample_texts(found, reading, 11 << 20))) == 10 << 20


BAD = {
    "latin.txt": b"caf\xe9",
    "nul.txt": b"ab\0c",
    "late.txt": b"a word " * 300 + b"\xff" + b"a word " * 300,
    "nul.txt.gz": gzip.compress(b"ab\0c"),
    "cut.txt.gz": gzip.compress(b"some text" * 100)[:-20],
    "fake.txt.gz": b"not gzip",
    "empty.txt": b"",
    "blank.txt": b" \n ",
    "broken.jsonl": b'{"text": "a"}\n\n{"text": \n',
    "column.jsonl": b'{"text": "a"}\n{"txt": "b", "id": 1}\n',
    "other.jsonl": b'{"id": 1}\n',
    "list.jsonl": b'["a"]\n',
    "number.jsonl": b'{"text": 3}\n',
    "half.jsonl": b'{"text": "\\ud800"}\n',
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "latin.jsonl": b'{"text": "a"}\n{"text": "caf\xe9"}\n',
    "fake.parquet": b"not parquet",
    "good.txt": b"good",
    "eosless.json": Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str().encode(),
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing is as it should be."""
    folder = tmp_path_factory.mktemp("bad")
    files = folder / "files"
    (files / "none").mkdir(parents=True)
    for name, data in BAD.items():
        (files / name).write_bytes(data)
    table = pa.table({"text": [PROSE] * 9})
    pq.write_table(table, files / "whole.parquet", compression="none", use_dictionary=False)
    data = (files / "whole.parquet").read_bytes()
    (files / "cut.parquet").write_bytes(data[:-100])
    (files / "hole.parquet").write_bytes(data[:4] + bytes(1000) + data[1004:])
    pq.write_table(table.rename_columns(["texts"]), files / "other.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), files / "int.parquet")
    return folder


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["nowhere.txt"], {}, "nowhere.txt is not there; expected a file, a folder, or hf://OWNER/NAME"),
        (["files/nowhere"], {}, "files/nowhere is not there"),
        ([""], {}, "'' is not there"),
        (["files/none"], {}, "files/none holds nothing to read; expected files that end in .txt, .md"),
        (["/dev/null"], {}, "/dev/null is neither a file nor a folder"),
        (["files/latin.txt"], {}, "files/latin.txt is not text: byte 3 is 0xe9; expected UTF-8 without NUL bytes."),
        (["files/nul.txt"], {}, "files/nul.txt is not text: byte 2 is 0x00;"),
        (["files/late.txt"], {"reading": Reading()}, "files/late.txt is not text: byte 2,100 is 0xff;"),
        (["files/late.txt"], {"reading": Reading(separator="d a")}, "late.txt is not text: byte 2,100 is 0xff;"),
        (["files/nul.txt.gz"], {}, "files/nul.txt.gz is not text: byte 2 when unpacked is 0x00;"),
        (["files/cut.txt.gz"], {}, "files/cut.txt.gz cannot be unpacked; expected a whole gzip file"),
        (["files/fake.txt.gz"], {}, "files/fake.txt.gz cannot be unpacked"),
        (["files/empty.txt"], {}, "files/empty.txt; expected at least one document that is not empty."),
        (["files/blank.txt"], {}, "there is no text in"),
        (["files/broken.jsonl"], {}, "files/broken.jsonl, line 3 is not JSON (Expecting value); expected an object wi"),
        (["files/column.jsonl"], {}, "line 2 has no column 'text' (did you mean 'txt'?); expected the one that --text"),
        (["files/other.jsonl"], {}, "line 1 has no column 'text' (it has 'id')"),
        (["files/list.jsonl"], {}, "line 1 is a list in JSON; expected an object with a 'text'"),
        (["files/number.jsonl"], {}, "line 1 has a 'text' that is a int; expected a text"),
        (["files/half.jsonl"], {}, "line 1 has half a character, \\ud800, in its 'text'"),
        (["files/deep.jsonl"], {}, "files/deep.jsonl, line 1 is not JSON"),
        (["files/latin.jsonl"], {}, "files/latin.jsonl is not text: byte 27 is 0xe9"),
        (["files/fake.parquet"], {}, "files/fake.parquet is damaged; expected a whole Parquet file"),
        (["files/cut.parquet"], {}, "files/cut.parquet is damaged; expected a whole Parquet file"),
        (["files/hole.parquet"], {}, "files/hole.parquet is damaged; expected a whole Parquet file"),
        (["files/other.parquet"], {}, "files/other.parquet has no column 'text' (did you mean 'texts'?)"),
        (["files/int.parquet"], {}, "files/int.parquet has a column 'text' of int64; expected one of strings."),
        (["files/good.txt"], {"validation": ["files/nowhere.txt"]}, "files/nowhere.txt is not there"),
        (["files/good.txt"], {"validation": ["files/empty.txt"]}, "files/empty.txt; expected at least one document"),
        (["files/good.txt"], {"validation": 1.0}, "validation is 1; expected a part between 0 and 1, or files."),
        (["files/good.txt"], {"validation": float("nan")}, "validation is nan; expected a part between 0 and 1"),
        (["files/good.txt"], {"validation": 0.99}, "the sources have 5 tokens, too few to take 0.99 of them"),
        (["files/good.txt"], {"workers": 0}, "workers is 0; expected at least 1"),
        (["files/good.txt"], {"tokenizer": "./nowhere"}, "the tokenizer ./nowhere is not there"),
        (["files/good.txt"], {"tokenizer": "files/eosless.json"}, "the tokenizer files/eosless.json has no eos token"),
        (["files/good.txt"], {"out": "files/good.txt"}, "files/good.txt cannot be written"),
        (["files/good.txt"], {"out": "files/good.txt/deep"}, "good.txt is not a folder to write in"),
    ],
)
def test_what_cannot_be_prepared_is_said_in_a_sentence_and_leaves_nothing_behind(
    bad_files: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], options: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(bad_files)
    before = {path: path.stat().st_mtime_ns for path in bad_files.rglob("*")}
    options = {"out": "deep/out", "reading": Reading(shard_bytes=500), "workers": 2} | options
    with pytest.raises(ValueError) as error_info:
        prepare(names, **options)
    assert words in str(error_info.value)
    assert "\n" not in str(error_info.value)
    assert {path: path.stat().st_mtime_ns for path in bad_files.rglob("*")} == before


@pytest.mark.parametrize("options", [{"separator": ""}, {"shard_bytes": 63}])
def test_readings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Reading(**options)


def test_a_prepared_set_says_what_is_wrong_with_it(folder: Path) -> None:
    Path("a.txt").write_text("text")
    prepared = prepare(["a.txt"], "out").prepared
    assert load_prepared("out") == prepared
    assert (prepared.vocab_size, prepared.eos_token_id) == (257, EOS)
    assert prepared.tokenizer_folder == Path("out/tokenizer")
    with pytest.raises(ValueError, match="out has no split 'validation'; expected one of train"):
        prepared.open("validation")
    Path("empty").mkdir()
    description = Path("out/prepared.json").read_text()
    for name, text, words in (
        ("nowhere", "", "nowhere is not there; expected a folder that `titans prepare` has written"),
        ("a.txt", "", "a.txt is a file; expected a folder"),
        ("empty", "", "empty is not a prepared set: it has no prepared.json"),
        ("out", description[:50], "out/prepared.json is damaged"),
        ("out", "[]", "is damaged"),
        ("out", "{}", "it has no 'format'"),
        ("out", description.replace('"version": 1', '"version": 2'), "version 2"),
        ("out", description.replace("titans.prepared", "other"), "its format is 'other'"),
        ("out", description.replace("vocab_size", "size"), "it has no 'vocab_size'"),
    ):
        if text:
            Path(name, "prepared.json").write_text(text)
        with pytest.raises(ValueError) as error_info:
            load_prepared(name)
        assert words in str(error_info.value)
    Path("out/prepared.json").write_text(description.replace('"documents": 1', '"documents": 2'))
    with pytest.raises(ValueError, match="out/train has 1 documents; expected 2"):
        load_prepared("out").open()
    (data,) = Path("out/train").glob("*.arrow")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ValueError, match="out/train is missing or damaged"):
        load_prepared("out").open()


def test_a_set_of_a_byte_tokenizer_from_a_folder_is_the_same(folder: Path) -> None:
    save_tokenizer(byte_tokenizer(), Path("tokenizer"))
    Path("a.txt").write_text(PROSE)
    prepare(["a.txt"], "one")
    prepare(["a.txt"], "two", "tokenizer")
    assert rows("one") == rows("two")
