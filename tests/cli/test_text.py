"""`titans text train`: figures before and after, one sentence for bad input, and nothing half written."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.cli.commands import run
from tests.text.small_bert import save_small_bert
from titans.text.neural import NeuralTextMemory


def call(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run("text", "train", *words)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_small_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    file = tmp_path / "talk.txt"
    file.write_text("".join(f"Message number {i}, which is about thing {i % 7}.\n" for i in range(60)))
    return file


def test_a_memory_is_trained_on_a_transcript_and_loaded(
    talk: Path, bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory"
    code, said = call(str(talk), "--out", str(out), "--encoder", bert, "--quick", capsys=capsys)
    assert code == 0 and "held-out loss" in said and "held-out answers found first by the memory" in said
    memory = NeuralTextMemory.load(out)
    assert memory.fingerprint in said and memory.config.width == 32 and not memory.config.first_order
    figures = json.loads((out / "figures.json").read_text())
    assert figures["fingerprint"] == memory.fingerprint and figures["settings"]["epochs"] == 2
    assert f"{figures['held_out']['before']['loss']:.4f} before" in said

    code, said = call(str(talk), "--out", str(out), "--encoder", bert, "--quick", capsys=capsys)
    assert code == 2 and "has a text memory in it; expected a new folder, or --overwrite to replace it" in said
    flags = ("--first-order", "--neighbours", "3", "--data-dependent", "--seed", "3")
    code, said = call(str(talk), "--out", str(out), "--encoder", bert, "--quick", "--overwrite", *flags, capsys=capsys)
    assert code == 0
    config = NeuralTextMemory.load(out).config
    assert (config.first_order, config.data_dependent, config.seed) == (True, True, 3)
    settings = json.loads((out / "figures.json").read_text())["settings"]
    assert (settings["neighbours"], settings["generated"], settings["seed"]) == (3, 0, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory", "talk.txt"]


def test_without_data_the_episodes_are_generated(bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = call("--out", str(tmp_path / "memory"), "--encoder", bert, "--quick", capsys=capsys)
    assert code == 0 and said.startswith("4 episodes per epoch, 1 held out; 8 steps in ")


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ("one\ntwo\n", [], "the data has 2 messages; expected at least 16"),
        ("", [], "talk.txt has no messages in it"),
        (None, [], "talk.txt: No such file or directory"),
        ("a\n" * 20, ["--learning-rate", "0"], "learning_rate is 0.0; expected a positive number"),
        ("a\n" * 20, ["--encoder", "/nowhere"], "/nowhere is not there; expected a folder of a BERT-like model"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path,
    content: str | None,
    flags: list[str],
    words: str,
    bert: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "talk.txt"
    if content is not None:
        file.write_text(content)
    encoder = [] if "--encoder" in flags else ["--encoder", bert]
    code, said = call(str(file), "--out", str(tmp_path / "memory"), *encoder, *flags, capsys=capsys)
    assert code == 2 and words in said and said.count("\n") == 1
    assert not (tmp_path / "memory").exists()


@pytest.fixture
def interrupted_soon() -> Iterator[None]:
    """Ctrl-C three seconds from now."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_training_that_is_stopped_leaves_nothing(
    talk: Path, bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted_soon: None
) -> None:
    flags = ("--out", str(tmp_path / "memory"), "--encoder", bert, "--epochs", "3000")
    code, said = call(str(talk), *flags, capsys=capsys)
    assert code == 130 and "interrupted" in said
    assert [path.name for path in tmp_path.iterdir()] == ["talk.txt"]
