import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import run
from titans import __version__
from titans.bench import memory as memory_benchmark
from titans.cli import main

ROOT = Path(__file__).parents[2]
TINY = ["--dim", "16", "--heads", "2", "--chunk-size", "8", "--repeats", "1"]


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    code = "from titans.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"titans {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [(), ("--help",), ("bench",), ("bench", "--help"), ("bench", "memory", "--help"), ("bench", "model", "--help")],
)
def test_help_is_an_answer_and_not_an_error(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert "Usage: titans" in captured.out
    assert captured.err == ""


def test_help_loads_neither_the_benchmark_nor_the_demo() -> None:
    code = (
        "import sys; from titans.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print([name for name in sys.modules if name.startswith('titans.evaluation')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option: --nonsense"),
        (["bench", "nonsense"], "No such command 'nonsense'"),
        (["bench", "memory", "extra"], "unexpected extra argument"),
        (["bench", "memory", "--dim", "wide"], "'--dim'"),
        (["bench", "memory", "--dim", "0"], "dim must be at least 1, got 0"),
        (["bench", "memory", "--dim", "10", "--heads", "3"], "dim must be divisible by heads"),
        (["bench", "memory", "--lengths", "12,many"], "--lengths takes whole numbers"),
        (["bench", "memory", "--lengths", ""], "--lengths takes whole numbers"),
        (["bench", "memory", "--lengths", "64,-1"], "lengths must be at least 1, got -1"),
        (["bench", "memory", "--repeats", "0"], "repeats must be at least 1"),
        (["bench", "memory", "--only", "chunky"], "only must name contenders among"),
        (["bench", "memory", "--only", "recurrent", "--lengths", "4096"], "leave no contender to run"),
        (["bench", "memory", "--json", "{folder}"], "is a directory"),
        (["bench", "memory", "--json", "{file}/x.json"], "is not a directory"),
        (["bench", "memory", "--plot", "picture.doc"], "ends in .png, .svg or .pdf"),
        (["bench", "memory", "--out-dir", "{file}"], "is not a directory"),
        (["bench", "model", "--dim", "10", "--heads", "3"], "heads must divide dim into an even width"),
        (["bench", "model", "--lengths", "12,many"], "--lengths takes whole numbers"),
        (["bench", "model", "--decode-positions", ""], "--decode-positions takes whole numbers"),
        (["bench", "model", "--only", "llama"], "only must name contenders among lmm, mac"),
        (["bench", "model", "--memory-mode", "quick"], "memory_mode must name a mode among"),
        (["bench", "model", "--measures", "sleep"], "measures must name something among train, prefill, decode"),
        (["bench", "model", "--max-seconds", "-1"], "max_seconds must be a positive number"),
        (["bench", "model", "--segment", "0"], "segment must be at least 1, got 0"),
        (["bench", "model", "--out-dir", "{file}"], "is not a directory"),
        (["demo", "--seed", "one"], "valid integer"),
        (["demo", "--seed", "-1", "--quick"], "seeds must be one or more different numbers"),
        (["demo", "--out-dir", "{file}"], "must be a folder"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    places = {"folder": tmp_path, "file": tmp_path / "file"}
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.startswith("titans: ")
    assert captured.err.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("bench", "memory", "--plot", "memory.png") == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory_benchmark, "run_memory_benchmark", interrupted)
    assert run("bench", "memory", *TINY) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "titans: interrupted."


def test_a_fault_of_ours_is_not_dressed_up_as_a_wrong_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(memory_benchmark, "run_memory_benchmark", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["bench", "memory", *TINY])


@pytest.mark.slow
def test_bench_memory_measures_prints_and_writes(tmp_path: Path) -> None:
    arguments = ["--lengths", "16", "--only", "chunked", "--out-dir", str(tmp_path / "out")]
    done = start("bench", "memory", *TINY, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for words in ("Time, forward", "Peak growth", "of GEMM", "chunked", "memory.json", "memory.png"):
        assert words in done.stdout
    report = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert [(r["length"], r["pass"]) for r in report["results"]] == [(16, "forward"), (16, "forward+backward")]
    assert all(r["peak_growth_bytes"] is not None for r in report["results"])
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_bench_memory_without_titans_pytorch_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: None)
    assert run("bench", "memory", *TINY, "--lengths", "16", "--no-peak-memory") == 0
    captured = capsys.readouterr()
    assert captured.err.count("titans-pytorch is not installed") == 1
    assert "chunked" in captured.out


def test_bench_model_measures_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = ["--dim", "16", "--layers", "1", "--heads", "2", "--segment", "8", "--window", "8", "--persistent", "2"]
    places = ["--lengths", "16,24", "--decode-positions", "8,20", "--decode-tokens", "2", "--repeats", "1"]
    chosen = ["--only", "mag,transformer++", "--no-peak-memory", "--memory-mode", "chunked", "--chunk-size", "4"]
    assert run("bench", "model", *sizes, *places, *chosen, "--out-dir", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    for words in ("Training", "Prefill", "Decoding", "Update rule of mag", "transformer++", "model.json", "model.png"):
        assert words in captured.out
    assert "mag trains faster than" in captured.out or "mag does not train faster than" in captured.out
    report = json.loads((tmp_path / "out" / "model.json").read_text())
    assert {(r["contender"], r["measure"], r["length"]) for r in report["results"]} == {
        (name, measure, length)
        for name in ("mag", "transformer++")
        for measure, lengths in (("train", (16, 24)), ("prefill", (16, 24)), ("decode", (8, 20)))
        for length in lengths
    }
    assert (tmp_path / "out" / "model.png").read_bytes().startswith(b"\x89PNG")
