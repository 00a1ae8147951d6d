from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titans.tasks.commonsense import find_files, read_local

# one row of each task in the fields of the original data, and the same in other formats
PIQA = {"goal": "open a jar", "sol1": "twist the lid", "sol2": "eat the lid", "label": 0}
HELLASWAG = {
    "activity_label": "Roofing", "ctx_a": "A man is on a roof.", "ctx_b": "he",
    "endings": ["skis.", "removes tiles.", "holds a cube.", "sings."], "label": "1",
}  # fmt: skip
WINOGRANDE = {"sentence": "Ann beat Eve because _ was fast.", "option1": "Ann", "option2": "Eve", "answer": "1"}
ARC = {
    "question": "What melts?", "choices": {"text": ["ice", "fire", "air"], "label": ["A", "B", "C"]}, "answerKey": "A",
}  # fmt: skip
SIQA = {
    "context": "Kai", "question": "fell. What will Kai want?", "answerA": "help", "answerB": "a song",
    "answerC": "nothing", "label": "1",
}  # fmt: skip
BOOLQ = {"passage": "Ice -- Ice is cold.", "question": "is ice cold", "label": 1}
LAMBADA = {"text": "She fed the cat and stroked the cat"}

ADAPTED = """Please choose the correct answer to the question: Kai fell. What will Kai want?

Answer1: help Answer2: a song Answer3: nothing

Answer format: answer1/answer2/answer3"""
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("piqa", PIQA, PIQA | {"label": "0"}),
    ("piqa", PIQA, {"query": "Question: open a jar\n", "choices": ["twist the lid", "eat the lid"], "gold": 0}),
    ("hellaswag", HELLASWAG, HELLASWAG | {"ind": 3, "label": 1}),
    ("winogrande", WINOGRANDE, WINOGRANDE | {"qID": "x"}),
    ("arc_easy", ARC, ARC | {"id": "x"}),
    (
        "arc_challenge",
        ARC,
        {
            "question": {
                "stem": "What melts?",
                "choices": [{"text": t, "label": c} for t, c in zip(("ice", "fire", "air"), "ABC", strict=True)],
            },
            "answerKey": "A",
        },
    ),
    ("arc_easy", ARC, {"query": "Question: What melts?", "choices": ["ice", "fire", "air"], "gold": 0}),
    ("social_iqa", SIQA, SIQA | {"label": 1}),
    ("social_iqa", SIQA, {"instruction": ADAPTED, "input": "", "output": "", "answer": "answer1"}),
    ("boolq", BOOLQ, BOOLQ | {"idx": 4}),
    ("boolq", BOOLQ, {"title": "Ice", "passage": "Ice is cold.", "question": "is ice cold", "answer": True}),
    (
        "boolq",
        BOOLQ,
        {"query": "Passage: Ice -- Ice is cold.\nQuestion: is ice cold?", "choices": ["no", "yes"], "gold": 1},
    ),
    ("lambada_openai", LAMBADA, LAMBADA),
    ("lambada_openai", LAMBADA, {"context": "She fed the cat and stroked the", "continuation": "cat"}),
]


def _write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("task", "wanted", "row"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_every_format_is_read_as_the_original(
    tmp_path: Path, task: str, wanted: dict[str, Any], row: dict[str, Any]
) -> None:
    assert read_local(task, _write(tmp_path / "data.jsonl", [row, row])) == [wanted, wanted]


def test_a_list_in_one_file_is_read_as_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([WINOGRANDE, WINOGRANDE], indent=2), encoding="utf-8")
    assert read_local("winogrande", path) == [WINOGRANDE, WINOGRANDE]


def test_contexts_with_one_continuation_are_a_gap_at_the_start(tmp_path: Path) -> None:
    row = {"context_options": ["Ann beat Eve as Ann", "Ann beat Eve as Eve"], "continuation": "ran_fast.", "gold": 1}
    (made,) = read_local("winogrande", _write(tmp_path / "data.jsonl", [row]))
    gap = made["sentence"].index("_")
    assert [made["sentence"][:gap] + made[name] for name in ("option1", "option2")] == row["context_options"]
    assert made["sentence"][gap + 1 :].strip() == row["continuation"]
    assert made["answer"] == "2"


def test_six_lines_are_a_row_of_hellaswag(tmp_path: Path) -> None:
    path = tmp_path / "hellaswag.txt"
    path.write_text("Roofing: he\n3\na\nb\nc\nd\n", encoding="utf-8")
    assert read_local("hellaswag", path) == [{"query": "Roofing: he", "choices": ["a", "b", "c", "d"], "label": "3"}]
    path.write_text("Roofing: he\n3\na\nb\nc\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has 5 lines; expected six per row"):
        read_local("hellaswag", path)


def test_labels_in_a_file_of_their_own_are_found(tmp_path: Path) -> None:
    rows = [{name: value for name, value in PIQA.items() if name != "label"}] * 2
    path = _write(tmp_path / "valid.jsonl", rows)
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    assert [row["label"] for row in read_local("piqa", path)] == [1, 0]
    (tmp_path / "valid-labels.lst").write_text("1\n")
    with pytest.raises(ValueError, match=r"has 1 labels; expected 2, one for each row of valid\.jsonl"):
        read_local("piqa", path)


@pytest.mark.parametrize("task", ["piqa", "hellaswag", "winogrande", "arc_easy", "social_iqa", "boolq"])
def test_rows_of_another_task_are_refused(tmp_path: Path, task: str) -> None:
    path = _write(tmp_path / "data.jsonl", [{"a": 1, "query": 2}])
    with pytest.raises(ValueError, match=f"has a, query in row 1, which is no row of {task}"):
        read_local(task, path)


def test_names_of_files_and_folders_say_which_task_it_is(tmp_path: Path) -> None:
    files = {
        "piqa": "piqa/valid.jsonl",
        "hellaswag": "hellaswag_val.jsonl",
        "winogrande": "winogrande_1.1/dev.jsonl",
        "arc_easy": "ARC-V1/ARC-Easy/ARC-Easy-Test.jsonl",
        "arc_challenge": "ARC-V1/ARC-Challenge/ARC-Challenge-Test.jsonl",
        "social_iqa": "socialiqa-train-dev/dev.jsonl",
        "boolq": "boolq.jsonl",
        "lambada_openai": "lambada_test.jsonl",
        "own": "own.jsonl",
    }
    others = [
        "piqa/train.jsonl", "piqa/tests.jsonl", "winogrande_1.1/train_xl.jsonl", "ARC-V1/ARC-Easy/ARC-Easy-Dev.jsonl",
        "socialiqa-train-dev/train.jsonl", "piqa/README.txt",
    ]  # fmt: skip
    for name in [*files.values(), *others]:
        _write(tmp_path / name, [{"query": "a", "choices": ["b"], "gold": 0}])
    _write(tmp_path / "unrelated.jsonl", [{"text": "a"}])
    _write(tmp_path / "numbers.jsonl", [3])
    (tmp_path / "broken.jsonl").write_text("{")
    assert find_files(tmp_path) == {task: tmp_path / name for task, name in files.items()}


def test_two_files_of_a_task_are_refused(tmp_path: Path) -> None:
    for name in ("piqa_a.jsonl", "piqa_b.jsonl"):
        _write(tmp_path / name, [PIQA])
    with pytest.raises(ValueError, match=r"^piqa has 2 files to be judged on \(.*piqa_a.*piqa_b.*\); expected one$"):
        find_files(tmp_path)
