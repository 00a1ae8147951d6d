"""An encoder for tests that need one, but not a good one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from titans.text.encoder import _packaged


def save_small_bert(folder: Path) -> Path:
    """A BERT with random weights and the packaged tokenizer, saved as Hugging Face does."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=512,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(Path(_packaged()) / name, folder)
    return folder
