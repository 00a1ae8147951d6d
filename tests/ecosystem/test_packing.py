"""Batches that transformers' and TRL's collators pack: the model reads each document as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tests.models.cases import VARIANTS, VOCAB, config, model
from titans import TitansForCausalLM
from titans.models.tokenizer import byte_tokenizer

SIZES = [3, 11, 1, 6, 11]
every_variant = pytest.mark.parametrize("kind", VARIANTS)


def documents() -> list[list[int]]:
    return [[(7 * number + 3 * place) % VOCAB for place in range(size)] for number, size in enumerate(SIZES)]


def loss_alone(made: TitansForCausalLM, ids: Tensor, starts: list[int]) -> Tensor:
    """The mean over all targets of the documents that begin at ``starts`` of one row."""
    total, count = torch.zeros(()), 0
    for start, stop in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
        if stop - start > 1:
            part = ids[:, start:stop]
            total, count = total + made(part, labels=part).loss * (stop - start - 1), count + stop - start - 1
    return total / count


@every_variant
def test_flattened_batches_are_read_document_by_document(kind: str) -> None:
    made = model(kind)
    given = [
        {"return_position_ids": True},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_seq_idx": True, "return_flash_attn_kwargs": True},
    ]
    for options in given:
        batch = DataCollatorWithFlattening(**options)([{"input_ids": ids} for ids in documents()])
        output, place = made(**batch), 0
        for ids in documents():
            alone = made(torch.tensor([ids])).logits
            torch.testing.assert_close(output.logits[:, place : place + len(ids)], alone, rtol=0, atol=1e-9)
            place += len(ids)
        starts = torch.tensor([0, *SIZES[:-1]]).cumsum(0).tolist()
        torch.testing.assert_close(output.loss, loss_alone(made, batch["input_ids"], starts), rtol=1e-6, atol=0)


def test_a_trainer_runs_on_flattened_batches(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=5, report_to="none", use_cpu=True)
    rows = Dataset.from_dict({"input_ids": documents()})
    made = TitansForCausalLM(config("mag"))
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    assert Trainer(made, args, data_collator=collate, train_dataset=rows).train().training_loss > 0


def sft(made: TitansForCausalLM, folder: Path, **options: Any) -> Any:
    """TRL's trainer, on texts of different lengths."""
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_dict({"text": ["one two " * count for count in (1, 2, 3, 1, 5, 2, 7, 1)]})
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none",
        "use_cpu": True, "bf16": False, "logging_steps": 1, "learning_rate": 1e-3, "gradient_checkpointing": False,
    }  # fmt: skip
    args = SFTConfig(**common | options)
    return SFTTrainer(made, args=args, train_dataset=texts, processing_class=byte_tokenizer())


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
