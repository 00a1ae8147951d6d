"""Tasks from outside: a file of one's own, or the entry point of another package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import install
from titans.evaluation import harness
from titans.evaluation.language import Perplexity
from titans.tasks import MEASURES, TASKS, example, find_task, known_tasks, make_task, make_tasks, plugins
from titans.tasks.recall import Recall

TASK = '''
from __future__ import annotations
import random
from dataclasses import dataclass
from typing import ClassVar
from titans.tasks import Answer, Example, Task

@dataclass(frozen=True)
class Echo(Task):
    """The first token again, after some of another."""

    name: ClassVar[str] = "echo"
    title: ClassVar[str] = "Echo"
    source: ClassVar[str] = "a test"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    lengths: tuple[int, ...] = (8, 16)
    vocab_size, chance = 8, 1 / 7

    def groups(self):
        return [{"length": length} for length in self.lengths]

    def draw(self, rng, group, split, tokenizer):
        first = rng.randrange(1, 8)
        tokens = [first] + [0] * (group["length"] - 2) + [first]
        return Example(tokens, [Answer(len(tokens) - 1, (first,))], len(tokens) - 2)
'''


def test_a_file_is_a_task(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    for name in (str(tmp_path / "mine.py"), f"{tmp_path / 'mine.py'}:Echo"):
        task = make_task(name, {"lengths": 32})
        assert (task.name, task.groups()) == ("echo", [{"length": 32}])
    assert len(example(task, "train", 0, 0, 16).tokens) == 16
    both = make_tasks([str(tmp_path / "mine.py"), "recall"], {"echo.lengths": [9], "pairs": 2})
    assert [each.settings()["lengths"] for each in both] == [(9,), Recall().lengths]


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        ("", "mine.py", "has 0 tasks; expected one, or .*mine.py:CLASS"),
        (TASK + TASK.partition("annotations")[2].replace("Echo", "Other"), "mine.py", "has 2 tasks; expected one"),
        (TASK, "mine.py:Eco", "has no task Eco: did you mean Echo?"),
        (TASK.replace('"echo"', '"recall"'), "mine.py", "has the name 'recall', which is taken"),
        (
            TASK.replace('"echo"', '"piqa"'),
            "mine.py",
            "has the name 'piqa', which is taken; expected",
        ),
        (TASK.replace("    title:", "    tilte:"), "mine.py", "has no title; expected it as a class variable"),
        (TASK.replace("@dataclass(frozen=True)", ""), "mine.py", "expected a dataclass that is a subclass of"),
        ("1 / 0", "mine.py", "mine.py cannot be imported: ZeroDivisionError: division by zero"),
        ("", "nowhere.py", "nowhere.py is not a file"),
    ],
)
def test_a_file_that_is_no_task_is_one_sentence(code: str, name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError, match=said.replace("?", r"\?")) as error:
        find_task(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_another_package_adds_a_task_and_a_broken_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"echo": "their_tasks:Echo", "recall": "their_tasks:Echo", "alias": "their_tasks:Echo"}
    points |= {"perplexity": "their_tasks:Echo", "piqa": "their_tasks:Echo", "none": "their_tasks:random"}
    install(tmp_path, monkeypatch, "their-tasks", {"titans.tasks": points}, TASK)
    install(tmp_path, monkeypatch, "broken-tasks", {"titans.tasks": {"broken": "broken_tasks:Task"}}, "import no_such")
    assert make_task("echo", {"lengths": [5]}).name == "echo"
    assert find_task("recall") is Recall
    known = known_tasks()
    assert [*TASKS, "echo"] == list(known)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 6 and all(line.startswith("titans: ") for line in said)
    assert any("broken = broken_tasks:Task of broken-tasks cannot be imported: ModuleNotFoundError" in s for s in said)
    where = "titans: the entry point {0} = their_tasks:{1} of their-tasks"
    for name in ("recall", "perplexity", "piqa"):
        left_out = f"{where.format(name, 'Echo')} is left out: there is another {name}; expected a name of its own."
        assert left_out in said
    assert f"{where.format('alias', 'Echo')} has the name 'echo'; expected 'alias'." in said
    assert any(line.startswith(f"{where.format('none', 'random')} is <module 'random'") for line in said)
    known_tasks()
    assert capsys.readouterr().err == ""  # said once
    with pytest.raises(ValueError, match=r"^the entry point broken = .* cannot be imported"):
        find_task("broken")
    with pytest.raises(ValueError, match=r"^task is 'ecko': did you mean echo\?$"):
        find_task("ecko")


def test_tasks_do_not_take_the_names_of_what_else_is_measured() -> None:
    assert [Perplexity.name, *harness.TASKS] == list(MEASURES)


def test_entry_points_are_read_once() -> None:
    assert plugins._entries("titans.tasks") is plugins._entries("titans.tasks")


@pytest.mark.slow
def test_the_command_line_measures_a_task_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.evaluation.test_evaluate import FIELDS
    from titans import TitansConfig, TitansForCausalLM

    install(tmp_path, monkeypatch, "their-tasks", {"titans.tasks": {"echo": "their_tasks:Echo"}}, TASK)
    TitansForCausalLM(TitansConfig(**FIELDS)).save_pretrained(tmp_path / "model")
    words = [sys.executable, "-m", "titans", "eval", str(tmp_path / "model"), "--tasks", "echo", "--quick"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(json.loads((tmp_path / "model" / "eval" / "eval.json").read_text())["tasks"]) == ["echo"]
