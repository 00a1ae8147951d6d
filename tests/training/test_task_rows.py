"""Training on tasks: rows are a function of their number, sequences grow, and only answers count."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.tasks.test_quote import book
from tests.training.conftest import TINY
from titans.models.tokenizer import byte_tokenizer
from titans.tasks import IGNORED, WrongLengthError, example, make_task, make_tasks
from titans.training.config import TrainConfig, load_config
from titans.training.data import TaskRows, collate
from titans.training.growth import AHEAD, SEEN, Growth
from titans.training.run import train

FIELDS: dict[str, Any] = {
    "model": {"name": "mac", **TINY}, "data": "task:recall", "task": {"pairs": 2}, "length": 32, "batch_tokens": 128,
    "steps": 4, "log_every": 1, "eval_every": 2, "eval_tokens": 128, "final_eval_tokens": 256, "save_every": 2,
    "trackers": [], "memory_stats_every": 0,
}  # fmt: skip


def test_a_row_holds_a_sequence_or_several_shorter_ones() -> None:
    task = make_task("recall", {"pairs": 2})
    rows = TaskRows([task], None, 32, "train", 7, 4, lambda row: 8 if row < 2 else 32)
    assert [tuple(rows[index]["input_ids"].shape) for index in range(4)] == [(4, 8), (4, 8), (1, 32), (1, 32)]
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].shape == batch["labels"].shape == (8, 8)
    drawn = example(task, "train", 7, 3 * 32, 32)
    assert rows[3]["input_ids"][0].tolist() == list(drawn.tokens)
    asked = rows[3]["labels"][0] != IGNORED
    assert rows[3]["labels"][0][asked].tolist() == [answer.wanted[0] for answer in drawn.answers]
    with pytest.raises(IndexError):
        rows[4]


def test_rows_are_the_same_whoever_asks_and_differ_between_splits_and_seeds() -> None:
    tasks = make_tasks(["recall", "reassigned"], {"pairs": 2})

    def ids(split: str, seed: int, workers: int = 0) -> torch.Tensor:
        rows = TaskRows(tasks, None, 32, split, seed, 6)
        return torch.cat([b["input_ids"] for b in DataLoader(rows, 2, collate_fn=collate, num_workers=workers)])

    assert torch.equal(ids("train", 0), ids("train", 0, workers=2))
    assert not torch.equal(ids("train", 0), ids("train", 1))
    assert not torch.equal(ids("train", 0), ids("validation", 0))


def test_a_task_that_has_no_sequence_of_a_length_sits_it_out() -> None:
    long, short = make_task("recall", {"pairs": 8}), make_task("recall", {"pairs": 2})
    rows = TaskRows([long, short], None, 32, "train", 0, 16, lambda row: 8 if row < 8 else 32)
    asked = [(rows[index]["labels"] != IGNORED).sum(-1).tolist() for index in range(16)]
    assert all(each == [2, 2, 2, 2] for each in asked[:8])
    assert {number for each in asked[8:] for number in each} == {2, 8}
    with pytest.raises(WrongLengthError, match="length is 8; expected at least 24"):
        TaskRows([long], None, 8, "train", 0, 1)[0]
    with pytest.raises(WrongLengthError, match="length is 300; expected at most 256, the longest of phonebook"):
        example(make_task("phonebook", {"longest": 256}), "train", 0, 0, 300, byte_tokenizer())


def test_sequences_double_until_they_have_the_length() -> None:
    config = TrainConfig(**FIELDS | {"length": 64, "shortest": 16, "growth": 0.5})
    assert [config.sequence_length(step, 8) for step in range(8)] == [16, 16, 32, 32, 64, 64, 64, 64]
    assert TrainConfig(**FIELDS).sequence_length(0, 8) == 32


def test_sequences_double_when_the_loss_has_fallen() -> None:
    growth = Growth(TrainConfig(**FIELDS | {"length": 64, "shortest": 16, "grow_below": 1.0, "growth": 0.5}), 1000)
    for step in range(100):
        growth.see(step, 2.0)
    assert (growth.length(499), growth.length(500)) == (16, 64)  # in the end they are long in any case
    for step in range(100, 200):
        growth.see(step, 0.5)
    # 14 of the last 20 losses have to be low; a doubling starts the count anew
    first = 100 + 13 + AHEAD
    second = first + SEEN - 1 + AHEAD
    assert growth.doubled == [first, second]
    assert [growth.length(step) for step in (first - 1, first, second - 1, second)] == [16, 32, 32, 64]


def test_a_loss_that_is_not_finite_starts_the_count_anew_and_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    config = TrainConfig(**FIELDS | {"length": 64, "shortest": 16, "grow_below": 1.0, "growth": 1.0})
    growth, again = Growth(config, 1000), Growth(config, 1000)
    for step in range(SEEN - 1):
        growth.see(step, 0.5)
    growth.see(SEEN - 1, math.nan)
    growth.save(tmp_path)
    again.load(tmp_path)
    for step in range(SEEN, 2 * SEEN):
        assert again.doubled == []
        again.see(step, 0.5)
    assert again.doubled == [2 * SEEN - 1 + AHEAD]


def test_a_run_that_grows_by_its_loss_resumes_to_the_same_losses(tmp_path: Path) -> None:
    fields = FIELDS | {"length": 64, "shortest": 8, "grow_below": 100.0, "growth": 1.0}
    fields |= {"steps": 50, "save_every": 24, "eval_every": 0}
    whole = train(TrainConfig(**fields, output=str(tmp_path / "run")))
    lengths = _logged(tmp_path / "run", "length")
    assert lengths[1] == 8 and set(lengths.values()) == {8, 16, 32}
    kept = json.loads((tmp_path / "run" / "checkpoint-48" / "growth.json").read_text())
    assert len(kept["doubled"]) == 2

    for name in ("result.json", "checkpoint-50"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    again = train(TrainConfig(**fields, output=str(tmp_path / "run")), resume=True)
    assert again.metrics["eval_loss"] == whole.metrics["eval_loss"]
    assert _logged(tmp_path / "run", "length") == lengths


def _logged(run: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def test_a_run_on_a_task_is_validated_resumes_to_the_same_losses_and_can_be_loaded(tmp_path: Path) -> None:
    fields = FIELDS | {"shortest": 16, "schedule": "stable"}
    whole = train(TrainConfig(**fields, output=str(tmp_path / "whole")))
    assert whole.finished and 0 <= whole.metrics["eval_accuracy"] <= 1
    assert whole.metrics["eval_tokens"] == 8 * 2  # two answers a sequence

    output = tmp_path / "whole"
    for path in (output / "result.json", output / "checkpoint-4"):
        path.rename(tmp_path / path.name)
    again = train(TrainConfig(**fields, output=str(output)), resume=True)
    assert again.metrics["eval_loss"] == whole.metrics["eval_loss"]
    assert (output / "config.json").is_file() and not (output / "tokenizer.json").exists()
    assert json.loads((output / "config.json").read_text())["vocab_size"] == 192


@pytest.mark.parametrize("name", ["needle-noise", "book-quote"])
def test_a_text_task_brings_its_tokenizer_along(name: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(book(1500))
    fields = FIELDS | {
        "data": f"task:{name}",
        "task": {"haystack": str(tmp_path / "book.txt")} if name == "book-quote" else {},
        "tokenizer": "bytes",
        "length": 512,
        "batch_tokens": 512,
    }
    done = train(TrainConfig(**fields | {"steps": 1, "final_eval_tokens": 1}, output=str(tmp_path / "run")))
    assert done.finished and (tmp_path / "run" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "task:recal"}, r"task is 'recal': did you mean recall\?"),
        ({"task": {"pears": 2}}, "pears is not a setting of recall"),
        ({"carry": 2, "batch_tokens": 64}, "data is drawn by a task: expected carry 0"),
        ({"separate_documents": True}, "separate_documents is for text; data is drawn by a task: expected false"),
        ({"steps": None, "epochs": 1.0}, "a task has no end: expected steps or tokens"),
        ({"grow_below": 1.0}, "grow_below is 1.0 and shortest is None; expected a length to begin with"),
        ({"grow_below": 1.0, "shortest": 16, "workers": 1}, "workers is 1; expected 0, as workers read ahead"),
        ({"grow_below": 0.0, "shortest": 16}, "grow_below is 0.0; expected a positive number"),
        ({"shortest": 12}, "shortest is 12 and length is 32; expected a length that is shortest doubled some times"),
        ({"data": "text", "task": {}, "shortest": 16}, "shortest is given and data is not drawn by a task"),
        ({"data": "task:recall,babilong", "task": {}}, "expected tasks of text, or tasks of plain tokens, not both"),
        (
            {"data": "task:babilong", "task": {}},
            "tokenizer is missing; expected one, such as bytes, as babilong is text",
        ),
        ({"tokenizer": "bytes"}, "expected none, as recall draws plain tokens"),
        ({"validation": "set"}, "validation is 'set'; expected none, as a task draws its own"),
        ({"length": 4, "batch_tokens": 4}, "length is 4; expected at least 6"),
        ({"schedule": "linear"}, "schedule is 'linear'; expected cosine or stable"),
    ],
)
def test_what_a_task_cannot_be_trained_with_is_one_sentence(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        train(TrainConfig(**FIELDS | {"output": str(tmp_path / "run")} | changes))
    assert not (tmp_path / "run").exists()


def test_settings_of_a_task_are_flags_too() -> None:
    config = load_config(None, ["--data", "task:recall", "--task.pairs", "4", "--task.lengths=[16,32]"])
    assert config.task == {"pairs": 4, "lengths": [16, 32]}
