"""Loading: a checkpoint that fits in part, and one under a changed config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.cases import VARIANTS, config, model
from titans import TitansForCausalLM
from titans.models.loading import changed


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


def test_a_changed_model_keeps_its_weights_and_an_impossible_change_is_refused() -> None:
    known = model("lmm", torch.float32)
    other = changed(known, {"memory_chunk_size": 4, "memory_mode": "chunked"})
    assert other.config.memory_chunk_size == 4
    assert all(torch.equal(a, b) for a, b in zip(known.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="memory_size is not a field of the model's config"):
        changed(known, {"memory_size": 4})
    with pytest.raises(ValueError, match=r"the model cannot be changed to \{'hidden_size': 32\}"):
        changed(known, {"hidden_size": 32})


def test_a_change_may_add_parameters_if_told_so() -> None:
    known, fields = model("mac", torch.float32), {"memory_cache_segment_size": 8}
    with pytest.raises(ValueError, match="the model cannot be changed"):
        changed(known, fields)
    old, new = known.state_dict(), changed(known, fields, new_parameters=True).state_dict()
    assert all(torch.equal(weight, new[name]) for name, weight in old.items())
    assert {name.rpartition(".")[2] for name in new.keys() - old.keys()} == {"to_fit"}
