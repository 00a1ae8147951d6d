"""Loading: a checkpoint that fits in part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.cases import VARIANTS, config, model
from titans import TitansForCausalLM


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("field", "value", "changed"),
    [
        ("vocab_size", 37, ("embed_tokens", "lm_head")),
        ("memory_conv_kernel", 3, ("memory.conv",)),
        ("intermediate_size", 40, ("ffn.",)),
        ("memory_expansion", 2.0, ("memory.initial",)),
        ("num_persistent_tokens", 5, ("persistent",)),
    ],
)
def test_weights_that_fit_are_the_checkpoints_when_others_do_not(
    variant: str, field: str, value: float, changed: tuple[str, ...], tmp_path: Path
) -> None:
    saved = model(variant, torch.float32)
    saved.save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(
        tmp_path, config=config(variant, **{field: value}), ignore_mismatched_sizes=True
    )
    old, new = saved.state_dict(), loaded.state_dict()
    assert old.keys() == new.keys()
    for name, weight in new.items():
        if any(part in name for part in changed):
            assert weight.shape != old[name].shape and torch.isfinite(weight).all(), name
        else:
            assert torch.equal(weight, old[name]), name


@pytest.mark.parametrize("gates", ["token", "constant"])
def test_a_start_that_does_not_fit_is_initialised(gates: str, tmp_path: Path) -> None:
    options = {"memory_conv_kernel": 0, "memory_gates": gates}
    model("lmm", torch.float32, **options).save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(
        tmp_path, config=config("lmm", memory_expansion=3.0, **options), ignore_mismatched_sizes=True
    )
    for layer in loaded.model.layers:
        first, last = layer.memory.initial
        assert 0.1 < first.std() < 1 and not last.any()
