"""Our BERT is that of transformers: the same tokens, vectors and fingerprint; other folders are left to the library."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from tests.text.small_bert import save_small_bert
from titans.text.bert import load_bert, load_tokenizer
from titans.text.encoder import Network, TextEncoder, _load_with_transformers, _packaged, _read_network

CPU = torch.device("cpu")
TEXTS = [
    "", " ", "Ann lives in Oslo.", "Été à l'ÎLE, naïve Ærøskøbing?", "東京 and 서울", "a" * 150, "\x00\x07\u200b\u00ad",
    "🙂 [MASK] [SEP] <s>", "tab\tand\nline\r\n", "don't $5.00 (x^2)", "I\u0307 ß ﬁ", "unbelievably " * 80,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_bert(tmp_path_factory.mktemp("bert"))


def read_with_both(folder: Path) -> tuple[Network, Network]:
    ours = _read_network(folder, CPU)
    assert ours is not None
    return ours, _load_with_transformers(str(folder), True, CPU)


@pytest.mark.parametrize(("size", "overlap"), [(16, 2), (40, 5), (256, 32)])
def test_the_tokens_are_those_of_transformers(folder: Path, size: int, overlap: int) -> None:
    ours, library = read_with_both(folder)
    rng = random.Random(0)
    drawn = [
        "".join(chr(rng.choice([rng.randrange(32, 0x250), rng.randrange(0x3000)])) for _ in range(60)) for _ in "ab"
    ]
    assert ours.tokenize(TEXTS + drawn, size, overlap) == library.tokenize(TEXTS + drawn, size, overlap)


@pytest.mark.parametrize("fields", [{}, {"hidden_act": "relu", "layer_norm_eps": 1e-5, "num_attention_heads": 4}])
@torch.inference_mode()
def test_hidden_states_of_random_weights_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    model = BertModel(BertConfig(**{"num_attention_heads": 2, **sizes, **fields})).eval()
    for weight in model.parameters():
        weight.normal_(std=0.3)  # biases and norms are not 0 and 1
    model.save_pretrained(tmp_path)
    ours = load_bert(tmp_path, CPU)
    assert ours is not None
    ids = torch.randint(99, (5, 20))
    mask = (torch.arange(20) < torch.tensor([20, 1, 7, 19, 12])[:, None]).long()
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    live = mask.bool()
    torch.testing.assert_close(ours(ids, mask)[live], expected[live], rtol=0, atol=1e-6)


def test_vectors_and_fingerprint_of_the_packaged_encoder_are_those_of_transformers() -> None:
    ours, library = read_with_both(Path(_packaged()))
    encoders = [TextEncoder("any", network, "mean", 256) for network in (ours, library)]
    np.testing.assert_allclose(encoders[0].encode(TEXTS), encoders[1].encode(TEXTS), rtol=0, atol=1e-6)
    assert encoders[0].fingerprint == encoders[1].fingerprint == "5bd0ed3d2da3e115"  # what stores have noted
    assert (ours.width, ours.longest, ours.padding) == (library.width, library.longest, library.padding)


def edit(file: str, **fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        known = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(known | fields))

    return change


def leave_out(field: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({name: known[name] for name in known if name != field}))

    return change


def rename_weights(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    save_file(
        {f"bert.{name}": tensor for name, tensor in found.items()}, folder / "model.safetensors", {"format": "pt"}
    )


OTHERS = {
    "case is kept": edit("tokenizer_config.json", do_lower_case=False),
    "no config of the tokenizer": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "more tokens": edit("tokenizer_config.json", mask_token="<mask>"),
    "another activation": edit("config.json", hidden_act="gelu_new"),
    "no epsilon": leave_out("layer_norm_eps"),
    "a decoder": edit("config.json", is_decoder=True),
    "weights of another class": rename_weights,
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=[name.replace(" ", "-") for name in OTHERS])
def test_what_is_not_quite_bert_is_left_to_transformers(
    change: Callable[[Path], object], folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    change(other)
    assert _read_network(other, CPU) is None
    encoder = TextEncoder.load(other)
    library = TextEncoder("any", _load_with_transformers(str(other), True, CPU), "mean", encoder.max_tokens)
    assert np.array_equal(encoder.encode(TEXTS), library.encode(TEXTS))


NONSENSE: dict[str, Callable[[Path], object]] = {
    "no heads": leave_out("num_attention_heads"),
    "heads that do not divide the width": edit("config.json", num_attention_heads=5),
    "heads in words": edit("config.json", num_attention_heads="two"),
    "an epsilon in words": edit("config.json", layer_norm_eps="small"),
    "a broken width": edit("config.json", hidden_size=32.5),
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=[name.replace(" ", "-") for name in NONSENSE])
def test_nonsense_in_a_config_is_one_sentence(change: Callable[[Path], object], folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    change(other)
    assert load_bert(other, CPU) is None
    with pytest.raises(ValueError, match="cannot be loaded as a text encoder"):
        TextEncoder.load(other)


@pytest.mark.parametrize("limit", [None, "many", 1e30])
def test_a_tokenizer_without_a_limit_leaves_it_to_the_model(limit: Any, folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    edit("tokenizer_config.json", model_max_length=limit)(other)
    assert [network.longest for network in read_with_both(other)] == [512, 512]


def test_a_tokenizer_that_allows_no_passage_is_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    edit("tokenizer_config.json", model_max_length=3)(other)
    with pytest.raises(ValueError, match="can read 3 tokens at once; expected at least 16"):
        TextEncoder.load(other)


def test_other_models_and_damaged_files_are_not_read(folder: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        damaged = shutil.copytree(folder, tmp_path / file)
        (damaged / file).write_bytes((folder / file).read_bytes()[:100])
        assert load_bert(damaged, CPU) is None
    other = shutil.copytree(folder, tmp_path / "other")
    edit("config.json", model_type="distilbert")(other)
    assert load_bert(other, CPU) is None
    (other / "tokenizer.json").write_text("{}")
    assert load_tokenizer(other) is None


def test_a_model_without_a_pooler_has_the_same_fingerprint_every_time(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    found = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in found.items() if not name.startswith("pooler.")}
    assert len(kept) == len(found) - 2
    save_file(kept, bare / "model.safetensors", {"format": "pt"})
    first, again = TextEncoder.load(bare), TextEncoder.load(bare)
    assert first.fingerprint == again.fingerprint
    assert np.array_equal(first.encode(TEXTS), TextEncoder.load(folder).encode(TEXTS))
