"""The paper's common-sense tasks as local files, in the formats in which they are published."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titans.tasks.language import read_passages, read_rows

# found in the name of a file or of its folder, in lower-case letters and digits only
NAMES = {
    "lambada": "lambada_openai",
    "piqa": "piqa",
    "hellaswag": "hellaswag",
    "winogrande": "winogrande",
    "arceasy": "arc_easy",
    "arcchallenge": "arc_challenge",
    "socialiqa": "social_iqa",
    "siqa": "social_iqa",
    "boolq": "boolq",
}
TESTED = ("lambada_openai", "arc_easy", "arc_challenge")  # judged on the test set; the others, on the validation set
SUFFIXES = (".jsonl", ".json", ".txt")
CHOICES, SCHEMA = {"query", "choices", "gold"}, {"context_options", "continuation", "gold"}
LETTERS = "ABCDEFGHIJ"
ADAPTERS = re.compile(  # how LLM-Adapters words a row of Social IQa
    r"question: (?P<context>\S+) (?P<question>.+?)\s+Answer1: (?P<answerA>.*?)\s+Answer2: (?P<answerB>.*?)"
    r"\s+Answer3: (?P<answerC>.*?)\s+Answer format",
    re.DOTALL,
)

Row = dict[str, Any]


def find_files(folder: Path) -> dict[str, Path]:
    """The file of each task in a folder and its subfolders."""
    found: dict[str, list[Path]] = {}
    others: dict[str, list[Path]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        inside = str(path.relative_to(folder))
        letters = re.sub(r"[^a-z0-9]", "", inside.lower())
        name = next((task for key, task in NAMES.items() if key in letters), None)
        if name is not None and (path.suffix != ".txt" or name == "hellaswag"):
            found.setdefault(name, []).append(path)
        elif name is None and path.suffix == ".jsonl" and any(_fields(path) >= known for known in (CHOICES, SCHEMA)):
            others.setdefault(path.stem, []).append(path)
    return {name: _one(name, paths) for name, paths in (found | others).items()}


def _fields(path: Path) -> set[str]:
    """The fields of the first row; empty if it has none."""
    with path.open("rb") as source:
        try:
            row = json.loads(source.readline())
        except ValueError:
            return set()
    return set(row) if isinstance(row, dict) else set()


def _one(name: str, paths: Sequence[Path]) -> Path:
    """Of several sets, the one that lm-eval judges."""
    words = ("test",) if name in TESTED else ("val", "dev")
    chosen = [path for path in paths if any(word in path.name.lower() for word in words)] or [
        path for path in paths if "train" not in path.name.lower()
    ]
    if len(chosen) != 1:
        files = ", ".join(map(str, chosen or paths))
        raise ValueError(f"{name} has {len(chosen)} files to be judged on ({files}); expected one")
    return chosen[0]


def read_local(task: str, path: Path) -> list[Row]:
    """The rows of a file, with the fields of the original data of a task; those of any other task as they are."""
    if task == "lambada_openai":
        return [{"text": f"{context} {word.strip()}"} for context, word in read_passages(str(path))]
    rows = read_file(path)
    make = CONVERTED.get(task)
    if make is None:
        return rows
    made = []
    for number, row in enumerate(rows, start=1):
        try:
            made.append(make(row))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{path} has {', '.join(row)} in row {number}, which is no row of {task}") from None
    return made


def read_file(path: Path) -> list[Row]:
    """The rows of a file, with their labels if these are in a file of their own."""
    if path.suffix == ".txt":
        return _six_lines(path)
    rows = read_rows(path)
    beside = path.with_name(f"{path.stem}-labels.lst")
    if beside.is_file():
        labels = beside.read_text(encoding="utf-8").split()
        if len(labels) != len(rows):
            raise ValueError(
                f"{beside} has {len(labels)} labels; expected {len(rows)}, one for each row of {path.name}"
            )
        rows = [row | {"label": label} for row, label in zip(rows, labels, strict=True)]
    return rows


def _six_lines(path: Path) -> list[Row]:
    """HellaSwag as text: for each row the query, the number of the right ending, and four endings."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) % 6 or not all(label in ("0", "1", "2", "3") for label in lines[1::6]):
        raise ValueError(f"{path} has {len(lines)} lines; expected six per row: query, label from 0 to 3, four endings")
    return [
        {"query": lines[i], "choices": lines[i + 2 : i + 6], "gold": int(lines[i + 1])} for i in range(0, len(lines), 6)
    ]


def _piqa(row: Row) -> Row:
    if "goal" in row:
        return {name: row[name] for name in ("goal", "sol1", "sol2")} | {"label": int(row["label"])}
    first, second = row["choices"]
    return {"goal": _question(row["query"]), "sol1": first, "sol2": second, "label": int(row["gold"])}


def _hellaswag(row: Row) -> Row:
    if "endings" in row:
        fields = {name: row[name] for name in ("activity_label", "ctx_a", "ctx_b", "endings")}
        return fields | {"label": str(row["label"])}
    return {"query": row["query"], "choices": row["choices"], "label": str(row["gold"])}


def _winogrande(row: Row) -> Row:
    if "sentence" in row:
        return {name: str(row[name]) for name in ("sentence", "option1", "option2", "answer")}
    first, second = row["context_options"]
    # the _ is where an option goes
    return {"sentence": f"_ {row['continuation']}", "option1": first, "option2": second, "answer": str(row["gold"] + 1)}


def _arc(row: Row) -> Row:
    if "query" in row:
        choices = {"text": row["choices"], "label": list(LETTERS[: len(row["choices"])])}
        return {"question": _question(row["query"]), "choices": choices, "answerKey": choices["label"][row["gold"]]}
    if isinstance(row["question"], str):
        return {name: row[name] for name in ("question", "choices", "answerKey")}
    given = row["question"]["choices"]
    choices = {name: [choice[name] for choice in given] for name in ("text", "label")}
    return {"question": row["question"]["stem"], "choices": choices, "answerKey": row["answerKey"]}


def _social_iqa(row: Row) -> Row:
    names = ("context", "question", "answerA", "answerB", "answerC")
    if "answerA" in row:
        return {name: row[name] for name in names} | {"label": str(row["label"])}
    found = ADAPTERS.search(row["instruction"])
    if found is None:
        raise ValueError("no such words")
    return found.groupdict() | {"label": row["answer"].removeprefix("answer")}


def _boolq(row: Row) -> Row:
    if "query" in row:
        passage, question = row["query"].removeprefix("Passage: ").rsplit("\nQuestion: ", 1)
        right = row["choices"][row["gold"]] == "yes"
    else:
        passage, question = row["passage"], row["question"]
        if "title" in row:  # as the hub's copy has it
            passage = f"{row['title']} -- {passage}"
        right = row["answer"] if "answer" in row else row["label"]
    return {"passage": passage, "question": question.strip().removesuffix("?"), "label": int(right)}


def _question(query: str) -> str:
    return query.removeprefix("Question: ").strip()


CONVERTED = {
    "piqa": _piqa,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "social_iqa": _social_iqa,
    "boolq": _boolq,
}
