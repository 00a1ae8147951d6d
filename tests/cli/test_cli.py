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


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"titans {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [(), ("--help",), ("bench",), ("bench", "--help"), ("demo", "--help")],
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
        "except SystemExit: print([name for name in sys.modules if name.startswith(('titans.evalu', 'titans.bench'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option: --nonsense"),
        (["bench", "nonsense"], "No such command 'nonsense'"),
        (["demo", "--seed", "one"], "valid integer"),
        (["demo", "--seed", "-1", "--quick"], "seeds is [-1]; expected one or more different numbers"),
        (["demo", "--out-dir", "{file}"], "it is a file"),
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
