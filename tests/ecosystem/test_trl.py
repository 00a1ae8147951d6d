"""Rows that TRL packs: the model reads each document as if it were alone, and learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.ecosystem.documents import loss_alone
from tests.models.cases import VARIANTS, config
from titans import TitansForCausalLM
from titans.models.tokenizer import byte_tokenizer

trl = pytest.importorskip("trl", reason="trl is not installed; make test-tools installs it")


def sft(made: TitansForCausalLM, folder: Path, **options: Any) -> Any:
    """TRL's trainer, on texts of different lengths."""
    texts = Dataset.from_dict({"text": ["one two " * count for count in (1, 2, 3, 1, 5, 2, 7, 1)]})
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none",
        "use_cpu": True, "bf16": False, "logging_steps": 1, "learning_rate": 1e-3, "gradient_checkpointing": False,
    }  # fmt: skip
    args = trl.SFTConfig(**common | options)
    return trl.SFTTrainer(made, args=args, train_dataset=texts, processing_class=byte_tokenizer())


PACKINGS: dict[str, dict[str, Any]] = {
    "packing": {"packing": True, "max_length": 64},
    "padding_free": {"padding_free": True, "max_length": None},
    "packing, padded": {"packing": True, "max_length": 64, "pad_to_multiple_of": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
def test_what_trl_packs_is_read_document_by_document(packing: str, tmp_path: Path) -> None:
    made = TitansForCausalLM(config("mac", vocab_size=257)).train()
    trainer = sft(made, tmp_path, **PACKINGS[packing])
    batch = next(iter(trainer.get_train_dataloader()))
    ids, positions = batch["input_ids"], batch["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    assert len(ids) == 1 and len(starts) > 1
    real = {name: value for name, value in batch.items() if name != "labels"}
    logits = trainer.model.model(**real).last_hidden_state
    for start, stop in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
        alone = trainer.model.model(ids[:, start:stop]).last_hidden_state
        torch.testing.assert_close(logits[:, start:stop], alone, rtol=0, atol=1e-5)
    trained = [start for start in starts if positions[start : start + 2].tolist() == [0, 1]]  # the rest is padding
    with torch.no_grad():
        wanted = loss_alone(made, ids[:, : int((positions > 0).nonzero().max()) + 1], trained)
        got = trainer.compute_loss(made, dict(batch))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", VARIANTS)
def test_trl_trains_on_packed_rows(kind: str, tmp_path: Path) -> None:
    made = TitansForCausalLM(config(kind, vocab_size=257))
    trainer = sft(made, tmp_path, max_steps=12, **PACKINGS["packing"])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.1
