from __future__ import annotations

import io
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cli import commands
from tests.models.cases import config, model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with models and texts to read."""
    monkeypatch.chdir(tmp_path)
    model("mac", torch.float32, vocab_size=256).save_pretrained("saved")
    config("mag", vocab_size=256).to_json_file("mag.json")
    config("mag").to_json_file("small.json")
    config("mac, no memory", vocab_size=256).to_json_file("plain.json")
    Path("variant.json").write_text('{"model_type": "titans", "variant": "max"}')
    Path("text.txt").write_text("a text\nof two lines")
    Path("empty.txt").write_text("")
    return tmp_path


run = partial(commands.run, "inspect")


def test_a_saved_model_reads_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("saved", "hello, hello") == 0
    captured = capsys.readouterr()
    assert captured.out == "Page: inspect.html\n"
    assert captured.err == ""
    page = Path("inspect.html").read_text()
    assert "read 12 tokens" in page
    assert "MAC, memory as a context" in page
    assert "Random weights" not in page


def test_a_config_makes_a_random_model_and_the_page_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mag.json", "--file", "text.txt", "--out", "pages/mag.html", "--json", "mag-numbers.json") == 0
    assert capsys.readouterr().out == "Numbers: mag-numbers.json\nPage: pages/mag.html\n"
    assert "Random weights" in Path("pages/mag.html").read_text()
    numbers = json.loads(Path("mag-numbers.json").read_text())
    assert len(numbers["layers"]) == 2
    assert len(numbers["tokens"]) == len(numbers["layers"][0]["gradient_norm"]) == 19


def test_a_variant_s_name_is_a_small_random_model(folder: Path) -> None:
    assert run("lmm", "hi") == 0
    page = Path("inspect.html").read_text()
    assert "LMM, memory alone" in page
    assert "Random weights" in page


def test_standard_input_is_a_file_called_minus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb")))
    assert run("saved", "--file", "-") == 0
    assert "read 4 tokens" in Path("inspect.html").read_text()


def test_a_text_that_is_cut_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("saved", "hello, hello", "--max-tokens", "5") == 0
    assert capsys.readouterr().err == "titans: read the first 5 of 12 tokens (--max-tokens).\n"
    assert "read the first 5 of 12 tokens" in Path("inspect.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'model'"),
        (["saved"], "give the text to read, or --file"),
        (["saved", "hi", "--file", "text.txt"], "give the text to read, or --file"),
        (["saved", ""], "the text is empty"),
        (["saved", "--file", "empty.txt"], "the text is empty"),
        (["saved", "--file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["saved", "--file", "."], "cannot be read"),
        (["saved", "hi", "--out", "saved"], "saved is a directory"),
        (["saved", "hi", "--out", "text.txt/x.html"], "is not a directory"),
        (["saved", "hi", "--json", "saved"], "saved is a directory"),
        (["saved", "hi", "--max-tokens", "0"], "'--max-tokens'"),
        (["saved", "hi", "--piece", "0"], "'--piece'"),
        (["nowhere", "hi"], "nowhere is not there; expected a folder with a model, a config file, or one of lmm, mac"),
        ([".", "hi"], "config.json is not there"),
        (["text.txt", "hi"], "text.txt cannot be read as JSON"),
        (["variant.json", "hi"], "variant is 'max'; expected one of lmm, mac, mag, mal"),
        (["small.json", "hi"], "a vocabulary of 31; expected at least 256"),
        (["plain.json", "hi"], "the model has no memory"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_nothing_is_written(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.assert_refused(["inspect", *arguments], words, folder, capsys)


def test_a_file_that_cannot_be_written_after_all_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "x" * 245 + ".html"  # which fits, but the temporary name beside it does not
    capsys.readouterr()
    assert run("lmm", "hi", "--out", name) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("titans: ") and captured.err.endswith(": File name too long.\n")
    assert captured.err.count("\n") == 1


def test_without_transformers_the_command_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("saved", "hi") == 2
    assert "titan-memory[models]" in capsys.readouterr().err
