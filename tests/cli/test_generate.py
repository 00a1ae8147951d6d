from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli import commands
from tests.models.cases import VARIANTS, model
from titans import TitansCache
from titans.models import build
from titans.models.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
BOOK = "Call me Ishmael. Some years ago, never mind how long precisely, 東京.\n" * 4
QUESTION = "Who?"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, texts and what is neither."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in VARIANTS:
        model(kind, vocab_size=257).save_pretrained(folder / kind)
        byte_tokenizer().save_pretrained(folder / kind)
    model("mac", vocab_size=256).save_pretrained(folder / "bytes")
    model("mac", vocab_size=300).save_pretrained(folder / "numbers")
    model("mac", vocab_size=100).save_pretrained(folder / "small")
    byte_tokenizer().save_pretrained(folder / "small")
    torch.manual_seed(0)
    llama = build("transformer++", "1m", vocab_size=257, num_hidden_layers=2, intermediate_size=64)
    llama.save_pretrained(folder / "llama")
    byte_tokenizer().save_pretrained(folder / "llama")
    broken = model("mac", vocab_size=257)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    broken.save_pretrained(folder / "nan")
    shutil.copytree(folder / "mac", folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"x")
    shutil.copytree(folder / "llama", folder / "partial")
    weights = dict(build("transformer++", "1m", vocab_size=257, num_hidden_layers=2, intermediate_size=64).state_dict())
    del weights["model.norm.weight"], weights["lm_head.weight"]
    from safetensors.torch import save_file

    save_file(weights, folder / "partial" / "model.safetensors", metadata={"format": "pt"})
    (folder / "empty").mkdir()
    (folder / "book.txt").write_text(BOOK)
    (folder / "empty.txt").write_text("")
    (folder / "late.txt").write_bytes(b"a" * 100_000 + b"\xff")
    (folder / "program").write_bytes(b"\x7fELF\0\0\0")
    (folder / "broken.mem").write_bytes(b"x" * 100)
    cache = model("lmm", vocab_size=257)(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    cache.save(folder / "lmm.mem")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, to write in."""
    for path in saved.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


run = partial(commands.run, "generate")


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command says as JSON, greedily and in a few tokens unless told otherwise."""
    capsys.readouterr()
    assert run(*arguments, "--json", "--greedy", "--max-new-tokens", "24") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def start(*arguments: str, folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    code = "from titans.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-c", code, "generate", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def test_an_answer_is_streamed_and_ends_with_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mac", "Hello", "--greedy", "--max-new-tokens", "24") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    report = ask(capsys, "mac", "Hello")
    assert captured.out == report["text"] + "\n"
    assert report["new_tokens"] == len(report["tokens"]) == 24
    assert report["prompt_tokens"] == 5
    assert report["finish"] == "length"
    assert report["tokens_per_second"] > 0


def test_the_prompt_comes_from_an_argument_a_file_or_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("prompt.txt").write_text("Héllo\n")
    expected = ask(capsys, "mag", "Héllo\n")
    assert expected["prompt_tokens"] == 7
    assert ask(capsys, "mag", "--file", "prompt.txt")["tokens"] == expected["tokens"]
    for arguments in (["-"], ["--file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Héllo\n".encode())))
        assert ask(capsys, "mag", *arguments)["tokens"] == expected["tokens"]


def test_the_prompt_is_printed_if_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, "mac", "Hello")["text"]
    assert ask(capsys, "mac", "Hello", "--echo")["text"] == "Hello" + plain
    assert run("mac", "Hello", "--echo", "--greedy", "--max-new-tokens", "24") == 0
    assert capsys.readouterr().out == "Hello" + plain + "\n"


def test_a_seed_makes_the_same_answer_and_without_one_answers_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*arguments: str) -> dict[str, Any]:
        assert run("mac", "Hello", "--json", "--max-new-tokens", "30", *arguments) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    one, same, other, free = write("--seed", "1"), write("--seed", "1"), write("--seed", "2"), write()
    assert one["tokens"] == same["tokens"] != other["tokens"]
    assert free["seed"] not in (1, 2)
    assert write("--seed", str(free["seed"]))["tokens"] == free["tokens"]
    narrow = write("--seed", "1", "--top-k", "1", "--temperature", "3", "--top-p", "0.9")
    assert narrow["tokens"] == ask(capsys, "mac", "Hello")["tokens"][:24] + narrow["tokens"][24:]


def test_a_stop_text_ends_the_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = ask(capsys, "mac", "Hello")["text"]
    report = ask(capsys, "mac", "Hello", "--stop", "no such text", "--stop", whole[4:6])
    assert report["finish"] == "stop"
    assert report["text"] == whole[: whole.index(whole[4:6])]


def test_a_model_without_a_tokenizer_reads_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ask(capsys, "bytes", "é")
    assert report["prompt_tokens"] == 2
    assert bytes(report["tokens"]).decode(errors="replace") == report["text"]


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_context_and_a_prompt_are_one_text(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at_once = ask(capsys, kind, BOOK + QUESTION)
    report = ask(capsys, kind, QUESTION, "--context", "book.txt")
    assert report["tokens"] == at_once["tokens"]
    assert report["context_tokens"] == len(BOOK.encode())
    assert report["prompt_tokens"] == len(QUESTION)
    assert ask(capsys, kind, "--context", "book.txt")["tokens"] == ask(capsys, kind, BOOK)["tokens"]


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_book_is_read_once_and_asked_many_times(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(kind, "--context", "book.txt", "--memory", "book.mem") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    size = Path("book.mem").stat().st_size
    count = len(BOOK.encode())
    assert captured.err.startswith(f"titans: read {count} tokens of book.txt in ")
    assert captured.err.endswith(f"; book.mem holds {count} tokens in {size:,} bytes.\n")
    assert captured.err.count("\n") == 1

    before = Path("book.mem").read_bytes()
    for question in (QUESTION, "When?"):
        assert ask(capsys, kind, question, "--memory", "book.mem")["text"] == ask(capsys, kind, BOOK + question)["text"]
    assert Path("book.mem").read_bytes() == before
    assert run(kind, QUESTION, "--memory", "book.mem", "--max-new-tokens", "1") == 0
    assert capsys.readouterr().err == f"titans: book.mem holds {count} tokens in {size:,} bytes.\n"


def test_a_terminal_shows_how_far_the_reading_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert run("lmm", "--context", "book.txt", "--memory", "book.mem") == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"left 0:00:00 reading: \d+ tokens, [\d,]+ tokens/s", shown)


def test_a_context_is_added_to_a_memory_that_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run("mac", "--context", "book.txt", "--memory", "book.mem") == 0
    assert TitansCache.load("book.mem").seen == 2 * len(BOOK.encode())
    asked = ask(capsys, "mac", QUESTION, "--memory", "book.mem")
    assert asked["tokens"] == ask(capsys, "mac", BOOK + BOOK + QUESTION)["tokens"]
    both = ask(capsys, "mac", QUESTION, "--context", "book.txt", "--memory", "other.mem")
    assert both["tokens"] == ask(capsys, "mac", QUESTION, "--memory", "other.mem")["tokens"]
    assert TitansCache.load("other.mem").seen == len(BOOK.encode())


def test_a_talk_goes_on_if_its_memory_is_saved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = ask(capsys, "mal", "One.", "--memory", "talk.mem", "--save-memory")
    assert TitansCache.load("talk.mem").seen == 4 + 24
    second = ask(capsys, "mal", "Two.", "--memory", "talk.mem")
    ids = torch.tensor([[*b"One.", *first["tokens"], *b"Two."]])
    made = model("mal", vocab_size=257)
    assert made.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist() == second["tokens"]


def test_a_model_of_transformers_answers_and_says_that_its_cache_grows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_once = ask(capsys, "llama", BOOK + QUESTION)
    assert run("llama", QUESTION, "--context", "book.txt", "--json", "--greedy", "--max-new-tokens", "24") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tokens"] == at_once["tokens"]
    assert captured.err.startswith("titans: the cache of a llama model grows with the context.\n")


def test_an_empty_prompt_begins_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ask(capsys, "mac", "")
    assert report["prompt_tokens"] == 1
    assert report["tokens"] == ask(capsys, "mac")["tokens"] == ask(capsys, "mac", "<|endoftext|>")["tokens"]


def test_weights_can_be_read_in_another_dtype(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "mac", "Hello", "--dtype", "float32", "--device", "cpu")["new_tokens"] == 24
    assert run("mac", "--context", "book.txt", "--memory", "book.mem", "--dtype", "bfloat16") == 0
    assert ask(capsys, "mac", "Hello", "--memory", "book.mem", "--dtype", "float32")["new_tokens"] == 24


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'model'"),
        (["no/such/folder", "hi"], "no/such/folder is not there; expected a folder written by save_pretrained or the"),
        (["mac/nowhere", "hi"], "mac/nowhere is not there; expected a folder"),
        (["book.txt", "hi"], "book.txt is a file; expected a folder"),
        (["empty", "hi"], "empty/config.json is not there; expected a folder written by save_pretrained"),
        (["damaged", "hi"], "damaged cannot be loaded: "),
        (["partial", "hi"], "partial cannot be loaded: its weights lack model.norm.weight"),
        (["numbers", "hi"], "numbers has no tokenizer and a vocabulary of 300; expected 256 or 257, to read bytes"),
        (["small", "xyz"], "the text has the token 122 and the vocabulary of the model has 100"),
        (["small", "ABC", "--context", "book.txt", "--memory", "new.mem"], "the text has the token "),
        (["small", "xyz", "--context", "empty.txt", "--memory", "new.mem"], "empty.txt is empty"),
        (["nan", "hi"], "the model gives logits that are not finite"),
        (["bytes", ""], "the prompt is empty and the model has no token to begin with"),
        (["bytes"], "the prompt is empty and the model has no token to begin with"),
        (["mac", b"\xff"], "the prompt is not UTF-8 at byte 0"),
        (["mac", "--file", "program.txt"], "program.txt: No such file"),
        (["mac", "--file", "mac"], "mac: Is a directory"),
        (["mac", "hi", "--file", "book.txt"], "give the prompt, or --file"),
        (["mac", "hi", "--context", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["mac", "hi", "--context", "mac"], "mac: Is a directory"),
        (["mac", "hi", "--context", "empty.txt", "--memory", "new.mem"], "empty.txt is empty"),
        (["mac", "hi", "--context", "program", "--memory", "new.mem"], "program is not text: it has a zero byte"),
        (["mac", "hi", "--context", "late.txt", "--memory", "new.mem"], "is not text: it is not UTF-8 at byte 100,000"),
        (["mac", "hi", "--memory", "lmm.mem"], "lmm.mem does not fit mac: the cache comes from a model with variant="),
        (["mac", "hi", "--memory", "lmm.mem", "--context", "book.txt"], "lmm.mem does not fit mac: "),
        (["mac", "hi", "--memory", "broken.mem"], "broken.mem cannot be read as a cache"),
        (["mac", "hi", "--memory", "nowhere.mem"], "nowhere.mem is not there; --context or --save-memory would make"),
        (["mac", "hi", "--memory", "mac"], "mac is a directory"),
        (["mac", "hi", "--context", "book.txt", "--memory", "no/book.mem"], "no/book.mem cannot be written: "),
        (["mac", "hi", "--save-memory"], "--save-memory needs --memory"),
        (["llama", "hi", "--memory", "lmm.mem"], "llama is a llama model, which has no memory to keep in a file"),
        (["llama", "hi", "--memory", "new.mem", "--save-memory"], "llama is a llama model, which has no memory"),
        (["mac", "hi", "--temperature", "0"], "temperature is 0.0; expected a positive number, or greedy choice"),
        (["mac", "hi", "--temperature", "warm"], "'--temperature'"),
        (["mac", "hi", "--top-p", "0"], "top_p is 0.0; expected a number in (0, 1]"),
        (["mac", "hi", "--top-p", "1.5"], "top_p is 1.5; expected a number in (0, 1]"),
        (["mac", "hi", "--top-k", "0"], "'--top-k'"),
        (["mac", "hi", "--repetition-penalty", "0"], "repetition_penalty is 0.0; expected a positive number"),
        (["mac", "hi", "--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["mac", "hi", "--seed", "-1"], "'--seed'"),
        (["mac", "hi", "--stop", ""], "--stop takes a text of at least one character"),
        (["mac", "hi", "--device", "toaster"], "device is 'toaster', which cannot be used"),
        (["mac", "hi", "--dtype", "int8"], "--dtype is int8; expected one of float32, bfloat16, float16, float64"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_nothing_is_written(
    arguments: list[str | bytes], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.assert_refused(["generate", *map(os.fsdecode, arguments)], words, folder, capsys)


def test_without_transformers_the_command_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("mac", "hi") == 2
    assert "titan-memory[models]" in capsys.readouterr().err


def interrupt(process: subprocess.Popen[bytes]) -> tuple[bytes, list[str]]:
    """What a process says once it has been stopped with Ctrl-C."""
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in error
    return out, [line for line in error.decode().splitlines() if line]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pipes have another size elsewhere")
@pytest.mark.parametrize("exists", [False, True])
def test_ctrl_c_while_reading_saves_nothing_and_says_so(exists: bool, folder: Path) -> None:
    import fcntl  # which only Unix has

    if exists:
        run("lmm", "--context", "book.txt", "--memory", "book.mem")
    before = sorted(folder.rglob("*")), Path("book.mem").read_bytes() if exists else None
    os.mkfifo("pipe")
    process = start("lmm", "hi", "--context", "pipe", "--memory", "book.mem", folder=folder)
    with open("pipe", "wb", buffering=0) as pipe:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
        pipe.write(BOOK.encode() * 60)  # which waits until most of it has been read
        _, said = interrupt(process)
    os.unlink("pipe")
    state = "as it was" if exists else "not written"
    assert said[-2:] == [f"titans: pipe was not read to its end: book.mem is {state}.", "titans: interrupted."]
    assert (sorted(folder.rglob("*")), Path("book.mem").read_bytes() if exists else None) == before


def test_ctrl_c_while_writing_ends_the_line_of_what_was_streamed_in_utf8(folder: Path) -> None:
    arguments = ["mac", "é", "--echo", "--max-new-tokens", "1000000", "--memory", "new.mem", "--save-memory"]
    process = start(*arguments, folder=folder, env={"PYTHONIOENCODING": "ascii"})
    assert process.stdout is not None
    assert process.stdout.read(6).startswith("é".encode())
    out, said = interrupt(process)
    assert out.endswith(b"\n")
    assert said == ["titans: interrupted."]
    assert not Path("new.mem").exists()


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_fault(folder: Path) -> None:
    process = start("mac", "hi", "--max-new-tokens", "100000", folder=folder)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""


@pytest.mark.slow
def test_a_name_on_the_hub_is_a_model_that_was_downloaded(folder: Path) -> None:
    kept = folder / "hub" / "models--someone--titans"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("a" * 40)
    shutil.copytree(folder / "mac", kept / "snapshots" / ("a" * 40))
    offline = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    process = start("someone/titans", "hi", "--json", "--max-new-tokens", "3", folder=folder, env=offline)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, b"")
    assert json.loads(out)["new_tokens"] == 3
    process = start("someone/else", "hi", folder=folder, env=offline)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith(b"titans: Invalid value: someone/else is not there, and was not found on the hub (")
    assert error.count(b"\n") == 1
