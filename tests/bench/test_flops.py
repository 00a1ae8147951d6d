"""The formula for the operations of a memory and of a training step is what PyTorch counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from titans import NeuralMemory, TitansConfig, TitansForCausalLM
from titans.bench.flops import (
    GPUS,
    Flops,
    MemoryShape,
    figures,
    flops_report,
    memory_flops,
    rule_flops,
    sections,
    training_flops,
)
from titans.bench.memory import BOTH, CONTENDERS, FORWARD, needed_flops, run_pass
from titans.bench.settings import FlopsSettings, MemoryBenchmarkSettings
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


def counted_flops(model: TitansForCausalLM, ids: torch.Tensor, checkpointing: bool = False) -> tuple[int, int]:
    """What PyTorch counts for the forward and for the backward pass of ``model`` over ``ids`` (batch, time)."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def attend(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(q, k, v))

    def attend_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(grad, q, k, v))

    aten = torch.ops.aten
    of_a_cpu = {  # its attention, which the counter does not know
        aten._scaled_dot_product_flash_attention_for_cpu: attend,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attend_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=of_a_cpu) as counter:
        loss = model(ids, labels=ids, use_cache=False).loss
        forward = counter.get_total_flops()
        loss.backward()
    model.zero_grad()
    return forward, counter.get_total_flops() - forward


def count(memory: NeuralMemory, time: int, batch: int) -> tuple[int, int]:
    """What PyTorch counts for the forward and for the backward pass of a memory."""
    x = torch.randn(batch, time, memory.dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = memory(x)[0]
        forward = counter.get_total_flops()
        y.square().mean().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("time", [64, 60, 256])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("forget_to", ["start", "zero"])
def test_the_formula_for_a_memory_is_what_is_counted(forget_to: str, momentum: bool, depth: int, time: int) -> None:
    memory = NeuralMemory(
        64, heads=2, depth=depth, chunk_size=16, mode="chunked", forget_to=forget_to, momentum=momentum
    )
    shape = MemoryShape(64, 2, (32,) * (depth + 1), 16, gates=2 + momentum, momentum=momentum, forget_to=forget_to)
    whole = sum(memory_flops(shape, time, batch=3).values(), Flops())
    assert (whole.forward, whole.backward + whole.recomputed) == count(memory, time, batch=3)


def test_forgetting_to_the_start_takes_one_more_product_with_the_weights() -> None:
    shape = MemoryShape(64, 2, (32, 48, 32), 16)
    start, zero = (rule_flops(replace(shape, forget_to=to), 64) for to in ("start", "zero"))
    assert start.forward - zero.forward == 2 * 2 * 64 * (32 * 48 + 48 * 32)  # heads, tokens, weights


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", ["chunked", "chunked-op"])
@pytest.mark.parametrize("which", [FORWARD, BOTH])
def test_the_benchmark_of_the_memory_uses_the_formula(name: str, which: str) -> None:
    settings = MemoryBenchmarkSettings(dim=64, heads=2, chunk_size=16)
    subject = CONTENDERS[name].build(settings)
    with FlopCounterMode(display=False) as counter:
        run_pass(subject, subject.make_inputs(64), which)
    assert needed_flops(name, settings, 64, which) == counter.get_total_flops()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_the_formula_is_what_is_counted(variant: str) -> None:
    config = TitansConfig(**TINY, variant=variant)
    counted = counted_flops(TitansForCausalLM(config), torch.randint(50, (1, 64)))
    whole = sum(training_flops(config, 64).values(), Flops())
    assert (whole.forward, whole.backward) == counted and whole.recomputed == 0


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
    assert (whole.forward, whole.backward + whole.recomputed) == counted


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
    assert (whole.forward, whole.backward + whole.recomputed) == counted


def test_the_page_about_760m_parameters_quotes_the_formula() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "training-760m.md").read_text(encoding="utf-8")
    own = TitansConfig.from_json_file(root / "configs" / "mac-760m.json").to_dict() | {"memory_mode": "chunked"}
    parts = training_flops(TitansConfig(**own), 4096, 4, checkpointing=True)
    for flops in parts.values():
        row = [f"{value / 4 / 4096 / 1e6:,.1f}" for value in (flops.forward, flops.backward, flops.recomputed)]
        assert f"| {' | '.join(row)} |".replace("| 0.0 |", "| 0 |") in page
    executed = sum(flops.total for flops in parts.values()) / 4 / 4096
    assert f"**{executed / 1e9:.2f} GFLOP per token**" in page and f"{30e9 * executed:.3g}".replace("e+", "e") in page


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
        ({"memory_bias": True}, "squared loss, without biases and without a cache"),
        ({"memory_cache_segment_size": 1024}, "squared loss, without biases and without a cache"),
        ({"memory_chunk_size": 12}, "memory_chunk_size is 12; expected a divisor of the segment, 32"),
    ],
)
def test_what_the_formula_does_not_cover_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        training_flops(TitansConfig(**{**TINY, **fields}, variant="mac"), 64)


def test_a_plan_is_the_operations_over_the_peak() -> None:
    report = flops_report(FlopsSettings("mac", "10m", 1024, tokens=1e9))
    a100 = GPUS[0]
    plan = next(p for p in report["plans"] if p["gpu"] == "A100" and p["share"] == 0.4 and p["memory"] == "float32")
    rest = report["executed"] - report["float32"]
    seconds = 1e9 * (rest / a100.bf16 + report["float32"] / a100.float32) / 0.4
    assert plan["gpu_hours"] == pytest.approx(seconds / 3600)
    assert plan["dollars"] == pytest.approx([2 * seconds / 3600, 3 * seconds / 3600])
    assert plan["days"] == pytest.approx([seconds / 86400 / 8, seconds / 86400 / 64])
    assert report["needed"][0] == {"days": 3, "gpus": 8, "tokens_per_second": 1e9 / (3 * 86400 * 8)}


def test_the_page_has_every_part_and_every_plan() -> None:
    report = flops_report(FlopsSettings("mag", "1m", 512))
    operations, plans, settings = sections(report)
    assert f"{report['executed'] / 1e9:.3f} GFLOP per token are executed" in operations.paragraphs[0]
    assert [row[0] for row in operations.tables[0].rows] == list(report["parts"])
    assert len(plans.tables[0].rows) == len(report["plans"])
    assert ["length", "512"] in settings.tables[0].rows
    assert figures(report)[operations.title][0].png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"length": 100, "size": "1m"}, "length is 100; expected a multiple of the segment, 64"),
        ({"model": "mamba2"}, "model is 'mamba2'; the formula is for lmm, mac, mag, mal, sliding-window"),
        ({"size": "3b"}, "size is '3b'; expected one of"),
        ({"tokens": 0}, "tokens is 0; expected a positive number"),
        ({"batch": 0}, "batch is 0; expected at least 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flops_report(FlopsSettings(**fields))
