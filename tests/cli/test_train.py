"""`titans train` and `titans experiment lm`: errors are one sentence, and nothing is overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands import run
from tests.training.conftest import TINY
from titans.files import locked
from titans.training.prepare import prepare

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "fox.txt").write_text(TEXT, encoding="utf-8")
    prepare([str(folder / "fox.txt")], folder / "set", validation=0.1, workers=1)
    return folder / "set"


def call(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run(*words)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Path:
    fields: dict[str, Any] = {
        "model": {"name": "mac", **TINY}, "data": str(data), "output": str(tmp_path / "run"), "length": 32,
        "batch_tokens": 128, "steps": 2, "log_every": 1, "trackers": [],
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(fields))
    return file


def test_train_then_refuse_then_resume_then_overwrite(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = call("train", str(config), capsys=capsys)
    assert code == 0 and "Model: " in said and "Validation loss" in said
    kept = (tmp_path / "run" / "model.safetensors").read_bytes()

    code, said = call("train", str(config), "--learning-rate", "0.1", capsys=capsys)
    assert code == 2 and "holds another run; --resume goes on with it, --overwrite replaces it" in said
    code, said = call("train", str(config), "--resume", "--model.hidden_size", "64", capsys=capsys)
    assert code == 2 and "has model.hidden_size 32, this one 64; expected the same" in said
    code, said = call("train", str(config), "--resume", "--overwrite", capsys=capsys)
    assert code == 2 and "both given" in said
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == kept

    code, said = call("train", str(config), "--resume", capsys=capsys)
    assert code == 0 and (tmp_path / "run" / "model.safetensors").read_bytes() == kept
    code, said = call("train", str(tmp_path / "run" / "train.yaml"), "--resume", capsys=capsys)
    assert code == 0 and "is complete already" in said
    code, said = call("train", str(config), "--overwrite", "--learning-rate", "0.1", capsys=capsys)
    assert code == 0 and (tmp_path / "run" / "model.safetensors").read_bytes() != kept


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.name", "mack"], "model.name is 'mack': did you mean mac?"),
        (["--model.size", "11m"], "model.size is '11m': did you mean 1m?"),
        (["--model.hiden_size", "3"], "model.hiden_size is not a field of mac: did you mean hidden_size?"),
        (["--model.vocab_size", "100"], "the tokenizer has 257 tokens and model.vocab_size is 100"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", ""], "data is empty; expected the folder that `titans prepare` wrote"),
        (["--output", ""], "output is empty"),
        (["--length", "4096", "--batch-tokens", "4096"], "tokens; expected more than length = 4,096"),
        (["--lenght", "3"], "did you mean length?"),
        (["--tokenizer", "bytes"], "prepared data brings its own"),
        (["--resume"], "holds no run to resume"),
        (["--model.name", "transformer++", "--carry", "1"], "transformer++"),
        (["--model.num_attention_heads", "5"], "num_attention_heads is 5"),
        (["--trackers", "[tensorbord]"], "trackers has 'tensorbord': did you mean tensorboard?"),
        (["--device", "cuda:9"], "device is 'cuda:9'; expected auto or cpu"),
        (["--learning-rate", ".inf"], "learning_rate is inf; expected a positive number"),
    ],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(
    flags: list[str], words: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = call("train", str(config), *flags, capsys=capsys)
    assert code == 2 and words in said, said
    assert said.startswith("titans: ") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_left_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    for flags in ([], ["--overwrite"]):
        code, said = call("train", str(config), *flags, capsys=capsys)
        assert code == 2 and "is not empty and holds no run" in said
    (tmp_path / "file").write_text("mine")
    code, said = call("train", str(config), "--output", str(tmp_path / "file"), capsys=capsys)
    assert code == 2 and "file cannot be written to (it is a file); expected a folder" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_folder_in_use_is_one_sentence(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path / "run", "titans train"):
        code, said = call("train", str(config), capsys=capsys)
    assert code == 2 and "run is in use by another process (titans train, process " in said and said.count("\n") == 1


def test_fields_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = call("train", "--fields", capsys=capsys)
    assert code == 0 and "learning_rate: 0.0004" in said


@pytest.mark.slow
def test_the_comparison_runs_resumes_and_reports(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment", "lm", str(data), "--out", str(tmp_path / "lm"), "--quick", "--seeds", "0"]
    words += ["--length", "32", "--batch-tokens", "64", "--models", "mag,sliding-window", "--size", "1m"]
    code, said = call(*words, capsys=capsys)
    assert code == 0 and "| mag |" in said and "| sliding-window |" in said
    folder = tmp_path / "lm" / "quick"
    report = json.loads((folder / "lm.json").read_text())
    assert {run["model"] for run in report["runs"]} == {"mag", "sliding-window"}
    assert all(run["cpu_seconds"] > 0 and len(run["curve"]) == 1 for run in report["runs"])
    assert (folder / "report.html").stat().st_size > 10_000 and list(folder.glob("*.png"))
    times = {path: path.stat().st_mtime for path in (folder / "runs").glob("*/result.json")}
    code, _ = call(*words, capsys=capsys)
    assert times and code == 0 and all(path.stat().st_mtime == time for path, time in times.items())
    code, said = call(*words, "--learning-rate", "0.1", capsys=capsys)
    assert code == 2 and "expected another --out" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "mat"], "did you mean"),
        (["--seeds", "a"], "--seeds takes whole numbers"),
        (["--size", "2g"], "size is '2g'"),
        (["--rate", "mac"], "--rate takes NAME=VALUE"),
        (["--length", "7"], "batch_tokens is 1,024; expected a multiple of 7"),
    ],
)
def test_a_wrong_comparison_is_one_sentence(
    flags: list[str], words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = call("experiment", "lm", str(data), "--out", str(tmp_path / "lm"), *flags, capsys=capsys)
    assert code == 2 and words in said and said.count("\n") == 1, said
    assert not (tmp_path / "lm").exists()
