from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def run(name: str, *arguments: str) -> str:
    """What an example prints, run as a user runs it."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_has_at_most_sixty_lines_and_says_how_to_run_it(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"    python examples/{script.name}" in text.split('"""')[1]


@pytest.mark.slow
def test_the_memory_in_a_module_of_ones_own_recalls_and_without_writes_it_does_not() -> None:
    found = re.findall(r"memory (on|off), (\d+) tokens: (\d+)% recalled", run("own_module.py"))
    assert len(found) == 6
    assert all(int(share) >= 80 if state == "on" else int(share) <= 20 for state, _, share in found)


@pytest.mark.slow
def test_a_book_is_read_in_constant_memory_and_its_file_gives_the_same_answer(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a bright cold day in April. " * 500, encoding="utf-8")
    said = run("stream_a_book.py", str(book), "--question", "Which month?")
    kept = re.findall(r"tokens read, (\d+) KiB kept", said)
    assert len(kept) == 2 and len(set(kept)) == 1
    assert "17,500 tokens read" in said
    assert "the answers are equal" in said


@pytest.mark.slow
def test_a_memory_for_an_llm_is_searched_shown_and_forgotten() -> None:
    said = run("llm_memory.py")
    assert "found 'My dog is called Bruno.'" in said
    assert '- "My dog is called Bruno." (user,' in said
    assert "after the deletion Bruno is gone" in said


@pytest.mark.slow
def test_a_task_of_ones_own_is_learned_and_comes_from_the_memory() -> None:
    found = re.findall(r"(its own|another) memory: (\d+) of 50", run("own_task.py"))
    assert len(found) == 6
    assert all(int(right) >= 45 if whose == "its own" else int(right) <= 15 for whose, right in found)


@pytest.mark.slow
def test_training_on_a_text_learns_from_it(tmp_path: Path) -> None:
    said = run("train_on_your_text.py", "--out", str(tmp_path / "out"))
    losses = re.findall(r"validation loss (\d\.\d\d) nats", said)
    assert len(losses) == 1 and float(losses[0]) < 2.5
    assert (tmp_path / "out" / "run" / "model.safetensors").is_file()


@pytest.mark.slow
def test_in_neuralforecast_titans_and_patchtst_are_both_ahead_of_the_last_season(tmp_path: Path) -> None:
    said = run("forecast_neuralforecast.py", "--plot", str(tmp_path / "forecast.png"))
    errors = {name: float(mae) for name, mae in re.findall(r"^(\w+(?: \w+)?) +(\d+\.\d) ±", said, re.MULTILINE)}
    assert set(errors) == {"Titans", "PatchTST", "last season"}
    assert max(errors["Titans"], errors["PatchTST"]) < errors["last season"] - 5
    assert (tmp_path / "forecast.png").is_file()


@pytest.mark.slow
def test_a_stream_is_forecast_in_constant_memory_and_the_memory_pays() -> None:
    said = run("forecast_stream.py")
    kept = [float(size) for size in re.findall(r"values, (\d+\.\d) KiB kept", said)]
    assert len(kept) == 5 and max(kept) < 20
    errors = dict(re.findall(r"(.+): mean absolute error (\d\.\d\d)", said))
    assert float(errors["memory on"]) < 0.95 * float(errors["contexts alone"])
    assert float(errors["memory on"]) < 0.9 * float(errors["memory off"])
    assert "in place and from the file: equal is True" in said
