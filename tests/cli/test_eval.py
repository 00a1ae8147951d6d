"""`titans eval`: results and report of a saved model, and one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.commands import run
from tests.evaluation.test_evaluate import FIELDS
from tests.tasks.test_quote import book
from titans import TitansConfig, TitansForCausalLM
from titans.models.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    TitansForCausalLM(TitansConfig(**FIELDS | {"vocab_size": 257})).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def call(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run("eval", *words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_tasks_are_measured_and_reported(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be. " * 20)
    code, out, _ = call(
        str(model), "--tasks", "recall,needle-noise,perplexity", "--set", "lengths=512,640", "--set", "depths=0.5",
        "--set", f"perplexity.data={text}", "--set", "pairs=2", "--quick", "--out", str(tmp_path / "out"),
        capsys=capsys,
    )  # fmt: skip
    assert code == 0
    result = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert list(result["tasks"]) == ["recall", "needle-noise", "perplexity"]
    assert [len(entry["cells"]) for entry in result["tasks"].values()] == [2, 2, 4]
    assert all(entry["made"][0]["command"].startswith("titans") for entry in result["tasks"].values())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "bits per byte" in page and "tokens per cell" in page
    assert (tmp_path / "out" / "report.html").is_file() and "report.html" in out


def test_names_in_books_are_asked_for_with_memory_reset_and_search(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text(book(1500))
    code, _, _ = call(
        str(model), "--tasks", "book-quote", "--set", f"haystack={tmp_path / 'book.txt'}", "--set", "lengths=600",
        "--set", "depths=0.2", "--quick", "--control", "none,reset,bm25", "--out", str(tmp_path / "out"), capsys=capsys,
    )  # fmt: skip
    assert code == 0
    tasks = json.loads((tmp_path / "out" / "eval.json").read_text())["tasks"]
    assert [entry["control"] for entry in tasks.values()] == [None, "reset", "bm25"]
    assert [*tasks.values()][-1]["cells"][0]["found"] is not None


def test_several_controls_share_a_reading(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = call(
        str(model), "--tasks", "recall", "--set", "lengths=64", "--set", "pairs=2", "--quick",
        "--control", "none,reset,swap", "--out", str(tmp_path), capsys=capsys,
    )  # fmt: skip
    assert code == 0
    tasks = json.loads((tmp_path / "eval.json").read_text())["tasks"]
    assert [entry["control"] for entry in tasks.values()] == [None, "reset", "swap"]


def test_the_list_of_tasks_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call("--list", capsys=capsys)
    assert code == 0
    for name in ("needle-noise", "babilong", "mqar", "s5", "perplexity", "piqa"):
        assert f"\n{name}: " in f"\n{out}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", "needles"), "task is 'needles': did you mean needle-"),
        (("--tasks", "recall", "--set", "pears=2"), "pears is not a setting of recall"),
        (("--tasks", "recall", "--set", "pairs"), "--set takes NAME=VALUE, got 'pairs'."),
        (("--tasks", "recall", "--control", "off"), "control is 'off'; expected some of none, no-writes, reset, swap"),
        (("--tasks", "needle-essay", "--set", "haystack=nowhere"), "nowhere has no text"),
        (("--tasks", "perplexity"), "perplexity needs text; expected the setting data"),
        (("--tasks", "recall", "--field", "memory_size=2"), "memory_size is not a field of the model's config"),
        (("--tasks", "perplexity", "--set", "perplexity.foo=1"), "foo is not a setting of perplexity"),
        (
            ("--tasks", "perplexity", "--set", "data=x", "--set", "length=abc"),
            "length is 'abc'; expected",
        ),
        (("--tasks", "perplexity", "--set", "data=5"), "data is 5; expected the name of a file or folder"),
        (("--tasks", "piqa", "--set", "limit=few"), "limit is 'few'; expected a whole number"),
        (("--tasks", "piqa", "--set", "data=5"), "data is 5; expected the name of a folder"),
        (
            ("--tasks", "piqa", "--control", "swap"),
            "control is 'swap'; expected none, as piqa asks no question at the end",
        ),
        (("--tasks", "nowhere.py"), "nowhere.py is not a file; expected one with Python code"),
        (("--tasks", "recall", "--device", "tpu"), "device is 'tpu', which cannot be used"),
        ((), "a model and --tasks are needed"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(
    words: tuple[str, ...], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(str(model), *words, "--out", str(tmp_path / "out"), capsys=capsys)
    assert code == 2 and out == ""
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_model_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(str(tmp_path), "--tasks", "recall", capsys=capsys)
    assert code == 2 and "expected a folder written by save_pretrained" in err
