"""BERT and its tokenizer, read from a folder without transformers, which takes longer to import than to encode a text.

A folder that holds anything else, or that is damaged, gives None: the library then loads it, or says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings", "type_vocab_size",
)  # fmt: skip
SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}  # names of tokens


@dataclass(frozen=True)
class Bert:
    """The encoder of arXiv 1810.04805, for texts of one segment.

    Attributes:
        weights: by their names in transformers' BertModel.
        config: the fields of its config.json.
    """

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token numbers and which of them are no padding, (n, length) each -> hidden states (n, length, width)."""
        # The order of the sums is that of BertModel, and so are the bits.
        x = F.embedding(ids, self.weights["embeddings.word_embeddings.weight"])
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = x + self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self._normalise("embeddings.LayerNorm", x)
        seen = mask.bool()[:, None, None]  # by every head and token
        activation = ACTIVATIONS[self.config["hidden_act"]]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{index}"
            q, k, v = (self._heads(f"{layer}.attention.self.{name}", x) for name in ("query", "key", "value"))
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
            x = self._normalise(
                f"{layer}.attention.output.LayerNorm", self._linear(f"{layer}.attention.output.dense", found) + x
            )
            inner = activation(self._linear(f"{layer}.intermediate.dense", x))
            x = self._normalise(f"{layer}.output.LayerNorm", self._linear(f"{layer}.output.dense", inner) + x)
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """(n, length, width) -> (n, heads, length, width / heads)."""
        return self._linear(name, x).unflatten(-1, (self.config["num_attention_heads"], -1)).transpose(1, 2)

    def _normalise(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, bias.shape, weight, bias, self.config["layer_norm_eps"])


def load_bert(folder: Path, device: torch.device) -> Bert | None:
    """The model in a folder, in float32; None if it is another one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if (
            config["model_type"] != "bert"
            or config["hidden_act"] not in ACTIVATIONS
            or config.get("position_embedding_type", "absolute") != "absolute"
            or any(config.get(name) for name in ("is_decoder", "add_cross_attention", "quantization_config"))
            or (folder / "adapter_config.json").exists()
        ):
            return None
        if (
            any(type(config[name]) is not int or config[name] < 1 for name in SIZES)
            or config["hidden_size"] % config["num_attention_heads"]
            or type(config["layer_norm_eps"]) is not float
            or not 0 < config["layer_norm_eps"] < 1
        ):
            return None
        shapes = _shapes(config)
        found = load_file(folder / "model.safetensors", str(device))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError):
        return None
    weights = {name: tensor.float() for name, tensor in found.items() if tensor.is_floating_point()}
    # The pooler, which is not used here, is part of the fingerprint if it is there.
    used = {name: tuple(tensor.shape) for name, tensor in weights.items() if not name.startswith("pooler.")}
    return Bert(weights, config) if used == shapes else None


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the weights that are used, by name."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    linear: dict[str, tuple[int, int]] = {}
    norms = ["embeddings.LayerNorm"]
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        attention = [f"attention.self.{name}" for name in ("query", "key", "value")]
        linear |= {f"{layer}.{name}": (width, width) for name in (*attention, "attention.output.dense")}
        linear |= {f"{layer}.intermediate.dense": (inner, width), f"{layer}.output.dense": (width, inner)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    rows = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    return {
        **{f"embeddings.{name}_embeddings.weight": (config[many], width) for name, many in rows.items()},
        **{f"{name}.weight": shape for name, shape in linear.items()},
        **{f"{name}.bias": shape[:1] for name, shape in linear.items()},
        **{f"{name}.{part}": (width,) for name in norms for part in ("weight", "bias")},
    }


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder; None if transformers, which goes by its config, would make another one of it."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        fields = json.loads(text)
        special = {name: config.get(f"{name}_token", token) for name, token in SPECIAL.items()}
        normalizer = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            "strip_accents": config.get("strip_accents"),
            "lowercase": config.get("do_lower_case", True),
        }
        if (
            config["tokenizer_class"] not in ("BertTokenizer", "BertTokenizerFast")
            or config.get("truncation_side", "right") != "right"
            or fields["normalizer"] != normalizer
            or fields["pre_tokenizer"] != {"type": "BertPreTokenizer"}
            or [part[kind]["id"] for part in fields["post_processor"]["single"] for kind in part]
            != [special["cls"], "A", special["sep"]]
            or (fields["model"]["type"], fields["model"]["max_input_chars_per_word"]) != ("WordPiece", 100)
            or {token["content"] for token in fields["added_tokens"]} != set(special.values())
        ):
            return None
        tokenizer = Tokenizer.from_str(text)
    except Exception:  # damaged files: tokenizers raises no class of its own
        return None
    tokenizer.no_padding()
    return tokenizer
