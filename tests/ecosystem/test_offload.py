"""Models whose weights wait on a disk until they are needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.cases import VARIANTS, model, tokens
from titans import TitansForCausalLM
from titans.models import load_whole_blocks

accelerate = pytest.importorskip("accelerate")

IDS = tokens(20)
MAPS = {
    "everything": {"": "disk"},
    "a block": {
        "model.embed_tokens": "cpu", "model.embed_norm": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
        "model.norm": "cpu", "lm_head": "cpu",
    },
    "all but a norm": {
        "model.embed_tokens": "disk", "model.embed_norm": "disk", "model.layers": "disk", "model.norm": "cpu",
        "lm_head": "disk",
    },
}  # fmt: skip


def assert_same(found: TitansForCausalLM, expected: TitansForCausalLM) -> None:
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, expected(IDS).logits)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(found.generate(IDS[:, :6], **options), expected.generate(IDS[:, :6], **options))


@pytest.mark.parametrize("variant", [pytest.param(v, marks=() if v == "mac" else pytest.mark.slow) for v in VARIANTS])
@pytest.mark.parametrize("where", [pytest.param(w, marks=() if w == "a block" else pytest.mark.slow) for w in MAPS])
def test_weights_on_disk_give_the_same_logits_and_tokens(variant: str, where: str, tmp_path: Path) -> None:
    made = model(variant, torch.float32)
    made.save_pretrained(tmp_path / "model")
    loaded = TitansForCausalLM.from_pretrained(
        tmp_path / "model", device_map=MAPS[where], offload_folder=tmp_path / "offload"
    )
    assert all(p.is_meta for p in loaded.model.layers[1].parameters())
    assert_same(loaded, made)
    assert all(p.is_meta for p in loaded.model.layers[1].parameters())
    loaded.save_pretrained(tmp_path / "again")
    assert_same(TitansForCausalLM.from_pretrained(tmp_path / "again"), made)


OFFLOADS: dict[str, Callable[[TitansForCausalLM, Path], object]] = {
    "cpu": lambda made, _: accelerate.cpu_offload(made, "cpu"),
    "disk": lambda made, folder: accelerate.disk_offload(made, folder, "cpu"),
    "dispatched": lambda made, folder: accelerate.dispatch_model(made, MAPS["a block"], offload_dir=folder),
    "whole blocks already": lambda made, _: accelerate.cpu_offload(
        made, "cpu", preload_module_classes=made._no_split_modules
    ),
}


@pytest.mark.parametrize("variant", [pytest.param(v, marks=() if v == "mac" else pytest.mark.slow) for v in VARIANTS])
@pytest.mark.parametrize("where", [pytest.param(w, marks=() if w == "cpu" else pytest.mark.slow) for w in OFFLOADS])
def test_a_model_that_accelerate_has_offloaded_loads_whole_blocks(variant: str, where: str, tmp_path: Path) -> None:
    made, other = model(variant, torch.float32), model(variant, torch.float32)
    OFFLOADS[where](other, tmp_path)
    load_whole_blocks(other)
    assert all(p.is_meta for p in other.model.layers[1].parameters())
    assert_same(other, made)
    assert all(p.is_meta for p in other.model.layers[1].parameters())


def test_a_device_map_that_offloads_a_part_of_a_block_is_refused(tmp_path: Path) -> None:
    made = model("mag", torch.float32)
    made.save_pretrained(tmp_path)
    places = {name: place for name, place in MAPS["a block"].items() if name != "model.layers.1"}
    places |= {f"model.layers.1.{name}": "cpu" for name, _ in made.model.layers[1].named_children()}
    places |= {"model.layers.1.persistent": "cpu", "model.layers.1.memory": "disk"}
    with pytest.raises(ValueError, match=r"offloads a part of model.layers.1, .* expected each block in one place"):
        TitansForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
