"""The formula for a training step's operations is what PyTorch counts, and a plan is arithmetic on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from titans import TitansConfig, TitansForCausalLM
from titans.bench.flops import GPUS, Flops, counted_flops, flops_report, training_flops
from titans.cli import main
from titans.ops.native.library import library

TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "segment_size": 32,
    "window_size": 32,
    "num_persistent_tokens": 3,
    "memory_heads": 2,
    "memory_mode": "chunked",
    "memory_chunk_size": 8,
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything in PyTorch's own operations: compiled loops are not counted."""
    monkeypatch.setenv("TITANS_NATIVE", "0")
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_the_formula_is_what_is_counted(variant: str) -> None:
    config = TitansConfig(**TINY, variant=variant)
    counted = counted_flops(TitansForCausalLM(config), torch.randint(50, (1, 64)))
    whole = sum(training_flops(config, 64).values(), Flops())
    assert (whole.forward, whole.backward) == counted and whole.again == 0


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("variant", ["mac", "mag"])
@pytest.mark.parametrize(
    "fields",
    [
        {"checkpointing": True},
        {"batch": 2},
        {"memory_checkpoint_every": 2},
        {"memory_checkpoint_every": 2, "checkpointing": True, "memory_first_order": True},
        {"memory_first_order": True},
        {"memory_depth": 1},
        {"memory_depth": 3, "memory_expansion": 2.0, "memory_heads": 1},
        {"memory_momentum": False, "memory_conv_kernel": 0},
        {"memory_forgetting": False, "ffn": "plain"},
        {"memory_bounded": False, "num_persistent_tokens": 0},
        {"memory_forget_to": "zero", "memory_gates": "constant"},
        {"length": 192, "window_size": 50},
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_the_formula_is_what_is_counted_for_any_memory(variant: str, fields: dict[str, Any]) -> None:
    fields = dict(fields)
    length, batch = fields.pop("length", 64), fields.pop("batch", 1)
    checkpointing = fields.pop("checkpointing", False)
    config = TitansConfig(**{**TINY, **fields}, variant=variant)
    ids = torch.randint(config.vocab_size, (batch, length))
    counted = counted_flops(TitansForCausalLM(config), ids, checkpointing)
    whole = sum(training_flops(config, length, batch, checkpointing).values(), Flops())
    assert (whole.forward, whole.backward + whole.again) == counted


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("variant", ["mac", "mag"])
def test_the_formula_holds_without_memory_and_beyond_a_piece_of_the_window(variant: str) -> None:
    config = TitansConfig(**TINY, variant=variant, use_memory=False)
    for length in (96, 2048 + 96):
        counted = counted_flops(TitansForCausalLM(config), torch.randint(50, (1, length)))
        whole = sum(training_flops(config, length).values(), Flops())
        assert (whole.forward, whole.backward) == counted


@pytest.mark.usefixtures("plain")
@pytest.mark.slow
def test_the_formula_is_what_is_counted_for_a_layer_of_760m_parameters() -> None:
    own = TitansConfig.from_json_file(Path(__file__).parents[2] / "configs" / "mac-760m.json").to_dict()
    fields = {"num_hidden_layers": 1, "memory_mode": "chunked", "vocab_size": 50, "memory_checkpoint_every": 2}
    config = TitansConfig(**{**own, **fields})
    counted = counted_flops(TitansForCausalLM(config), torch.randint(50, (1, 1024)), checkpointing=True)
    whole = sum(training_flops(config, 1024, checkpointing=True).values(), Flops())
    assert (whole.forward, whole.backward + whole.again) == counted


def test_the_page_of_training_quotes_the_formula() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "training.md").read_text(encoding="utf-8")
    own = TitansConfig.from_json_file(root / "configs" / "mac-760m.json").to_dict() | {"memory_mode": "chunked"}
    parts = training_flops(TitansConfig(**own), 4096, 4, checkpointing=True)
    for flops in parts.values():
        row = [f"{value / 4 / 4096 / 1e6:,.1f}" for value in (flops.forward, flops.backward, flops.again)]
        assert f"| {' | '.join(row)} |".replace("| 0.0 |", "| 0 |") in page
    executed = sum(flops.total for flops in parts.values()) / 4 / 4096
    assert f"**{executed / 1e9:.2f} GFLOP a token**" in page and f"{30e9 * executed:.3g}".replace("e+", "e") in page


def test_layers_tokens_and_sequences_count_in_proportion() -> None:
    def total(length: int = 64, batch: int = 1, **fields: Any) -> int:
        parts = training_flops(TitansConfig(**{**TINY, "variant": "mac", **fields}), length, batch)
        return sum(flops.total for name, flops in parts.items() if name != "head")

    assert total(num_hidden_layers=6) == 3 * total()
    assert total(batch=3, num_persistent_tokens=0) == 3 * total(num_persistent_tokens=0)
    assert 1.9 < total(length=128) / total() < 2.1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"memory_mode": "exact"}, "memory_mode is 'exact'; the formula is for 'chunked'"),
        ({"memory_bias": True}, "squared loss and without biases"),
        ({"memory_chunk_size": 12}, "memory_chunk_size is 12; expected a divisor of the segment, 32"),
    ],
)
def test_what_the_formula_does_not_cover_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        training_flops(TitansConfig(**{**TINY, **fields}, variant="mac"), 64)


def test_a_plan_is_the_operations_over_the_peak() -> None:
    report = flops_report("mac", "10m", 1024, tokens=1e9)
    a100 = GPUS[0]
    plan = next(p for p in report["plans"] if p["gpu"] == "A100" and p["share"] == 0.4 and p["memory"] == "float32")
    rest = report["executed"] - report["float32"]
    seconds = 1e9 * (rest / a100.bf16 + report["float32"] / a100.float32) / 0.4
    assert plan["gpu_hours"] == pytest.approx(seconds / 3600)
    assert plan["dollars"] == pytest.approx([2 * seconds / 3600, 3 * seconds / 3600])
    assert plan["days"] == pytest.approx([seconds / 86400 / 8, seconds / 86400 / 64])
    assert report["needed"][0] == {"days": 3, "gpus": 8, "tokens_per_second": 1e9 / (3 * 86400 * 8)}


def test_the_command_prints_tables_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flops.json"
    with pytest.raises(SystemExit) as caught:
        main(["bench", "flops", "--model", "mag", "--size", "1m", "--length", "512", "--json", str(file)])
    assert caught.value.code == 0
    report = json.loads(file.read_text())
    said = capsys.readouterr().out
    assert f"{report['executed'] / 1e9:.3f} GFLOP a token are run" in said
    assert all(part in said for part in report["parts"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--length", "100", "--size", "1m"], "length is 100; expected a multiple of the segment, 64"),
        (["--model", "mamba2"], "model is 'mamba2'; the formula is for lmm, mac, mag, mal, sliding-window"),
        (["--size", "3b"], "size is '3b'; expected one of"),
        (["--tokens", "0"], "tokens is 0.0; expected a positive number"),
        (["--batch", "0", "--size", "1m"], "batch is 0; expected at least 1"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "flops", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
