"""Batches that transformers' collators pack: the model reads each document as if it were alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tests.ecosystem.documents import loss_alone
from tests.models.cases import VARIANTS, VOCAB, config, model
from titans import TitansForCausalLM

SIZES = [3, 11, 1, 6, 11]
every_variant = pytest.mark.parametrize("kind", VARIANTS)


def documents() -> list[list[int]]:
    return [[(7 * number + 3 * place) % VOCAB for place in range(size)] for number, size in enumerate(SIZES)]


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


@pytest.mark.parametrize("column", ["position_ids", "seq_idx"])
def test_a_trainer_hands_on_a_column_that_says_where_documents_begin(column: str, tmp_path: Path) -> None:
    ids = [place % VOCAB for place in range(6)]
    labels = [-100 if place == 3 else token for place, token in enumerate(ids)]  # as packers have it
    told = {"position_ids": [0, 1, 2, 0, 1, 2], "seq_idx": [0, 0, 0, 1, 1, 1]}[column]
    rows = Dataset.from_dict({"input_ids": [ids], "labels": [labels], column: [told]})
    made = model("lmm", torch.float32)
    found = Trainer(made, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)).evaluate(rows)
    expected = loss_alone(made, torch.tensor([ids]), [0, 3])
    assert found["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
