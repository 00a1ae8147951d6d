from __future__ import annotations

import json
import math
from dataclasses import fields
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from titans.evaluation.demo import run_demo
from titans.evaluation.recall import (
    IGNORE,
    RecallConfig,
    RecallModel,
    evaluate_recall,
    learning_rate_factor,
    recall_stream,
    run_recall,
    sample_recall,
    train_recall,
)

SMALL = RecallConfig(
    pairs=2,
    length=12,
    num_keys=4,
    num_values=4,
    num_fillers=4,
    layers=1,
    dim=16,
    depth=1,
    steps=60,
    warmup=5,
    batch_size=16,
    eval_every=20,
    eval_sequences=16,
)


def sample(config: RecallConfig, batch_size: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return sample_recall(config, batch_size, length, torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(pairs=st.integers(1, 9), spare=st.integers(0, 60), seed=st.integers(0, 2**31))
def test_every_key_is_asked_once_and_its_label_is_the_value_it_was_paired_with(
    pairs: int, spare: int, seed: int
) -> None:
    config = RecallConfig(pairs=pairs, length=3 * pairs + spare, num_keys=10, num_values=5, num_fillers=3)
    tokens, labels = sample(config, 4, config.length, seed)
    assert tokens.shape == labels.shape == (4, config.length)
    for row, answers in zip(tokens.tolist(), labels.tolist(), strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs
        assert all(0 <= key < 10 for key in keys)
        assert all(10 <= value < 15 for value in values)
        asked = [position for position, answer in enumerate(answers) if answer != IGNORE]
        assert sorted(row[position] for position in asked) == sorted(keys)
        paired = dict(zip(keys, values, strict=True))
        assert [answers[position] for position in asked] == [paired[row[position]] for position in asked]
        rest = [token for position, token in enumerate(row) if position >= 2 * pairs and position not in asked]
        assert all(15 <= token < 18 for token in rest)


@pytest.mark.parametrize("length", [24, 25, 64, 1024])
def test_questions_stand_at_the_end_whatever_the_length(length: int) -> None:
    config = RecallConfig()
    _, labels = sample(config, 32, length)
    assert (labels != IGNORE).nonzero()[:, 1].min() >= max(2 * config.pairs, length - 2 * config.pairs)


def test_the_order_of_the_questions_says_nothing_about_the_order_of_the_pairs() -> None:
    config = RecallConfig()
    tokens, labels = sample(config, 2000, 64)
    asked = tokens[labels != IGNORE].view(2000, config.pairs)
    keys = tokens[:, 0 : 2 * config.pairs : 2]
    in_the_same_place = (asked == keys).double().mean().item()
    assert abs(in_the_same_place - 1 / config.pairs) < 0.02


def test_values_are_drawn_evenly_so_that_guessing_is_right_as_often_as_the_config_says() -> None:
    config = RecallConfig(num_values=5)
    _, labels = sample(config, 2000, 64)
    counts = torch.bincount(labels[labels != IGNORE] - config.num_keys, minlength=5)
    assert (counts / counts.sum() - config.chance).abs().max() < 0.02


def test_a_seed_gives_the_same_stream_again() -> None:
    first = list(islice(recall_stream(SMALL, "train", 3), 3))
    again = list(islice(recall_stream(SMALL, "train", 3), 3))
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(first[0][0], first[1][0])


def test_no_two_streams_share_a_sequence() -> None:
    config = RecallConfig()
    seen: set[tuple[int, ...]] = set()
    for split in ("train", "validation", "test"):
        for seed in range(4):
            for tokens, _ in islice(recall_stream(config, split, seed), 4):
                rows = {tuple(row) for row in tokens.tolist()}
                assert len(rows) == config.batch_size
                assert not rows & seen
                seen |= rows


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pairs": 0}, "pairs must be above 0, got 0"),
        ({"pairs": 9, "num_keys": 8}, "pairs must be at most num_keys = 8, got 9"),
        ({"length": 23}, "length must be at least 3 x pairs = 24, got 23"),
        ({"warmup": -1}, "warmup must not be negative, got -1"),
        ({"decay": 1.5}, r"decay must be in \[0, 1\], got 1.5"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0, got nan"),
        ({"stop_at": 2.0}, r"stop_at must be in \(0, 1\] or none, got 2.0"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_sentence(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecallConfig(**wrong)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length must be at least 3 x pairs = 6, got 5"):
        sample(SMALL, 1, 5)
    with pytest.raises(ValueError, match="batch_size must be above 0, got 0"):
        sample(SMALL, 0, 12)
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'dev'"):
        next(recall_stream(SMALL, "dev", 0))
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        next(recall_stream(SMALL, "test", -1))
    with pytest.raises(ValueError, match="seeds must be one or more different numbers"):
        run_demo(tmp_path, seeds=(0, 0))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out_dir must be a folder"):
        run_demo(tmp_path / "file")


def test_every_field_of_the_configuration_has_a_line_of_help() -> None:
    assert all(field.metadata["help"] for field in fields(RecallConfig))


def test_the_learning_rate_rises_is_held_and_falls_to_zero() -> None:
    config = RecallConfig(steps=100, warmup=10, decay=0.2)
    factors = [learning_rate_factor(config, step) for step in range(102)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert set(factors[10:81]) == {1.0}
    assert factors[81:101] == pytest.approx([0.05 * n for n in range(19, -1, -1)])
    assert factors[101] == 0
    assert learning_rate_factor(RecallConfig(steps=100, warmup=0, decay=0.0), 0) == 1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_where_asked_are_the_logits_at_those_positions(tied: bool) -> None:
    config = RecallConfig(layers=1, dim=16, depth=1, tied=tied)
    model = RecallModel(config)
    tokens, labels = sample(config, 3, 64)
    asked = labels != IGNORE
    logits = model(tokens)
    assert logits.shape == (3, 64, config.vocab_size)
    torch.testing.assert_close(model(tokens, asked), logits[asked])


@pytest.mark.parametrize("writes", [True, False], ids=["memory", "memory-off"])
def test_only_a_memory_that_is_written_carries_the_pairs_to_the_questions(writes: bool) -> None:
    config = RecallConfig(layers=2, dim=16, depth=1, writes=writes)
    torch.manual_seed(0)
    model = RecallModel(config)
    for name, parameter in model.named_parameters():
        if ".initial." in name:  # zero before training, which would hide what its decay gives away
            torch.nn.init.normal_(parameter)
    tokens, labels = sample(config, 4, 64)
    others = tokens.clone()
    others[:, 1] = config.num_keys + (tokens[:, 1] - config.num_keys + 1) % config.num_values
    asked = labels != IGNORE
    assert torch.equal(model(tokens, asked), model(others, asked)) != writes


def test_a_few_steps_lower_the_loss() -> None:
    run = train_recall(SMALL, seed=0)
    assert run.steps == 60
    assert not run.diverged
    assert [point.step for point in run.curve] == [20, 40, 60]
    assert run.curve[-1].loss < run.curve[0].loss - 0.1


def test_a_seed_trains_the_same_model_again() -> None:
    config = RecallConfig(**{**vars(SMALL), "steps": 5})
    first, again, other = (train_recall(config, seed).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_stops_once_the_accuracy_stays_above_the_limit() -> None:
    run = train_recall(RecallConfig(**{**vars(SMALL), "eval_every": 5, "stop_at": 1e-9}), seed=0)
    above = [point.accuracy > 1e-9 for point in run.curve]
    assert above[-2:] == [True, True]
    assert run.steps == run.curve[-1].step < 60


def test_a_model_that_is_not_finite_scores_nan_and_its_report_none() -> None:
    model = RecallModel(SMALL)
    torch.nn.init.constant_(model.model.lm_head.weight, math.nan)
    assert math.isnan(evaluate_recall(model, [12], sequences=2)[12])
    result = run_recall(RecallConfig(**{**vars(SMALL), "learning_rate": 1e30}), 0, [12], sequences=2)
    assert result["diverged"]
    assert result["recall"]["12"] is None
    json.dumps(result, allow_nan=False)


def test_accuracy_does_not_depend_on_how_many_sequences_are_read_at_once() -> None:
    model = RecallModel(SMALL)
    whole = evaluate_recall(model, [12, 48], sequences=40, tokens_at_once=10_000)
    parts = evaluate_recall(model, [12, 48], sequences=40, tokens_at_once=100)
    assert whole.keys() == {12, 48}
    assert whole == pytest.approx(parts)


def test_a_quick_demonstration_writes_its_report(tmp_path: Path) -> None:
    with open(tmp_path / "console.txt", "w") as file:
        report = run_demo(tmp_path / "new" / "demo", quick=True, console=Console(file=file, width=140))
    written = tmp_path / "new" / "demo"
    assert sorted(path.name for path in written.iterdir()) == ["recall.png", "report.html", "report.json"]
    assert json.loads((written / "report.json").read_text()) == report
    assert report["command"] == "titans demo --seed 0 --quick"
    assert {arm: [run["config"]["writes"] for run in runs] for arm, runs in report["arms"].items()} == {
        "memory": [True],
        "memory_off": [False],
    }
    assert (written / "recall.png").read_bytes().startswith(b"\x89PNG")
    page = (written / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert "memory off" in (tmp_path / "console.txt").read_text()
