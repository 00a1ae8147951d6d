from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from titans import TitansConfig, TitansForCausalLM
from titans.evaluation.language import Perplexity, windows
from titans.evaluation.score import position_losses
from titans.models.tokenizer import byte_tokenizer, save_tokenizer, train_tokenizer
from titans.training.prepare import prepare

BYTES = byte_tokenizer()
TEXT = "In the beginning there was a harbour, and the harbour had boats; the boats had sails and the sails had holes. "
TEXTS = [TEXT * 2, TEXT[:40], "It ends here, ånd nöt before."]


def _model(variant: str = "mac", vocab_size: int = 257, dtype: torch.dtype = torch.float64) -> TitansForCausalLM:
    torch.manual_seed(0)
    config = TitansConfig(
        variant=variant, vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        segment_size=8, window_size=8, num_persistent_tokens=2, memory_heads=2, initializer_range=0.5,
    )  # fmt: skip
    return TitansForCausalLM(config).to(dtype).eval()


def _llama(longest: int = 512) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=longest, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float64).eval()


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def _plain(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The loss of each token but the first, by the definition."""
    with torch.no_grad():
        scores = model(ids, use_cache=False).logits.log_softmax(-1)
    return -scores[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


def perplexity(model: PreTrainedModel, tokenizer: Any, data: Any, piece: int = 2048, **options: Any) -> dict[str, Any]:
    return Perplexity(data, **options).run(model, tokenizer, piece)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names = []
    for number, text in enumerate(TEXTS):
        path = tmp_path / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        names.append(str(path))
    return names


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
@pytest.mark.parametrize("piece", [1, 7, 16, 100])
def test_losses_piece_by_piece_are_those_of_one_call(variant: str, piece: int) -> None:
    model, ids = _model(variant), _ids(2, 41)
    losses = position_losses(model, ids, piece)
    assert bool(losses[:, 0].isnan().all())
    torch.testing.assert_close(losses[:, 1:], _plain(model, ids), rtol=0, atol=1e-8)


def test_other_models_read_all_at_once() -> None:
    model, ids = _llama(), _ids(2, 41)
    torch.testing.assert_close(position_losses(model, ids, 7)[:, 1:], _plain(model, ids), rtol=0, atol=1e-8)


def test_what_fills_up_a_row_changes_nothing_before_it() -> None:
    model, ids = _model(), _ids(1, 30)
    longer = torch.cat([ids, torch.zeros(1, 9, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(position_losses(model, longer)[:, 1:30], position_losses(model, ids)[:, 1:])


def test_a_model_in_training_is_left_in_training() -> None:
    model = _model().train()
    position_losses(model, _ids(1, 5))
    assert model.training


def test_half_precision_gives_losses_in_single_precision() -> None:
    model = _model(dtype=torch.bfloat16)
    assert position_losses(model, _ids(1, 5)).dtype == torch.float32


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_windows_judge_every_token_but_the_first_once_and_with_the_context_asked_for(
    size: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    judged = []
    for part, first in windows(range(size), 1, length, stride):
        assert len(part) <= length + 1
        for place in range(first, len(part)):
            assert place >= min(part[place], length - stride + 1)  # tokens that are read before it
            judged.append(part[place])
    assert judged == list(range(1, size))


def test_windows_side_by_side_are_the_plain_loss_of_each(files: list[str]) -> None:
    model, length = _model(), 16
    ids = torch.tensor([list(TEXTS[0].encode())])
    rows = [ids[:, begin : begin + length + 1] for begin in range(0, ids.shape[1] - 1, length)]
    wanted = torch.cat([_plain(model, row)[0] for row in rows])
    for stride in (None, length):
        result = perplexity(model, BYTES, files[0], context="sliding", length=length, stride=stride, batch_size=3)
        assert result["tokens"] == ids.shape[1] - 1 == len(wanted)
        assert result["loss"] == pytest.approx(float(wanted.mean()), abs=1e-10)


def test_windows_that_overlap_judge_their_last_tokens(files: list[str]) -> None:
    model, length, stride = _llama(), 16, 5
    ids = torch.tensor([list(TEXTS[0].encode())])
    losses = [_plain(model, ids[:, : length + 1])[0]]
    for begin in range(stride, ids.shape[1] - length - 1 + stride, stride):
        part = ids[:, begin : begin + length + 1]
        losses.append(_plain(model, part)[0, length - stride :])
    result = perplexity(model, BYTES, files[0], context="sliding", length=length, stride=stride)
    assert result["loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-10)


def test_a_streamed_text_is_read_from_its_beginning(files: list[str]) -> None:
    model = _model()
    result = perplexity(model, BYTES, files[0], piece=16)
    wanted = _plain(model, torch.tensor([list(TEXTS[0].encode())]))
    assert result["loss"] == pytest.approx(float(wanted.mean()), abs=1e-10)
    short = perplexity(model, BYTES, files[0], length=20)
    assert (short["tokens"], short["loss"]) == (20, pytest.approx(float(wanted[0, :20].mean()), abs=1e-10))


def test_buckets_of_positions_double_and_make_up_the_whole(files: list[str]) -> None:
    result = perplexity(_model(), BYTES, files)
    losses = [_plain(_model(), torch.tensor([list(text.encode())]))[0] for text in TEXTS]
    cells = {cell["group"]["position"]: cell for cell in result["cells"]}
    assert list(cells) == [64, 128, 256]
    for end, begin in ((64, 0), (128, 64), (256, 128)):
        parts = [part for each in losses if len(part := each[begin:end])]
        assert cells[end]["value"] == pytest.approx(float(torch.cat(parts).mean()), abs=1e-10)
        assert cells[end]["values"] == pytest.approx([float(part.mean()) for part in parts], abs=1e-6)
    assert cells[64]["low"] <= cells[64]["value"] <= cells[64]["high"]
    assert cells[128]["low"] is cells[128]["high"] is None  # one text is that long: how sure it is, nobody knows
    assert sum(cell["count"] for cell in cells.values()) == result["tokens"]
    total = sum(cell["count"] * cell["value"] for cell in cells.values())
    assert result["loss"] == pytest.approx(total / result["tokens"])


def test_many_windows_are_few_values(files: list[str]) -> None:
    Path(files[0]).write_text(TEXT * 8)
    result = perplexity(_model(), BYTES, files[0], context="sliding", length=3, batch_size=64)
    (cell,) = result["cells"]
    assert len(cell["values"]) == 256 < cell["count"] / 3


def test_perplexity_and_bits_are_other_names_of_the_loss(files: list[str]) -> None:
    result = perplexity(_model(), BYTES, files)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bytes"] == result["tokens"] == sum(len(text.encode()) - 1 for text in TEXTS)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))
    assert result["texts"] == 3
    tokenizer = train_tokenizer([TEXT], 300)
    words = perplexity(_model(vocab_size=300), tokenizer, files[0])
    assert words["tokens"] < words["bytes"]
    assert words["bits_per_byte"] == pytest.approx(words["loss"] * words["tokens"] / words["bytes"] / math.log(2))


def test_texts_side_by_side_are_those_one_by_one(files: list[str]) -> None:
    model = _model()
    one, three = (perplexity(model, BYTES, files, batch_size=size) for size in (1, 3))
    assert three["loss"] == pytest.approx(one["loss"], abs=1e-10)


def test_the_limit_counts_tokens_of_the_data(files: list[str]) -> None:
    model = _model()
    wanted = perplexity(model, BYTES, files[0])
    limited = perplexity(model, BYTES, files, limit=len(TEXTS[0]))
    assert (limited["loss"], limited["texts"]) == (wanted["loss"], 1)
    assert perplexity(model, BYTES, files, limit=50)["tokens"] == 49
    some = perplexity(model, BYTES, files, limit=30, length=20)  # 21 tokens of the first text, 9 of the second
    assert (some["tokens"], some["texts"]) == (28, 2)


def test_a_window_fills_the_bucket_of_its_length_and_none_above(files: list[str]) -> None:
    result = perplexity(_model(), BYTES, files[0], context="sliding", length=64, stride=32)
    (cell,) = result["cells"]
    assert cell["group"] == {"position": 64}


def test_prepared_data_give_what_their_texts_give(tmp_path: Path, files: list[str]) -> None:
    model = _model()
    prepare(files, tmp_path / "data")
    wanted = perplexity(model, BYTES, files)
    result = perplexity(model, BYTES, str(tmp_path / "data"))
    assert result == wanted | {"split": "train"}
    prepare(files[:1], tmp_path / "parts", validation=files[1:])
    assert perplexity(model, BYTES, str(tmp_path / "parts"))["loss"] == perplexity(model, BYTES, files[1:])["loss"]
    assert perplexity(model, BYTES, str(tmp_path / "parts"), split="train")["texts"] == 1


def test_data_of_another_tokenizer_are_refused(tmp_path: Path, files: list[str]) -> None:
    save_tokenizer(train_tokenizer([TEXT], 300), tmp_path / "tokenizer")
    prepare(files, tmp_path / "data", str(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match="expected data that was prepared with the tokenizer of the model"):
        perplexity(_model(), BYTES, str(tmp_path / "data"))


def test_a_text_that_is_too_long_for_a_model_is_refused(files: list[str]) -> None:
    with pytest.raises(
        ValueError, match=r"^a sequence has \d+ tokens; expected at most 32, the model's longest context$"
    ):
        perplexity(_llama(32), BYTES, files[0])
    assert perplexity(_llama(32), BYTES, files[0], context="sliding", length=32)["tokens"] == len(TEXTS[0]) - 1


def test_a_model_with_too_few_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="the token 99 and the model knows 64"):
        position_losses(_model(vocab_size=64), torch.tensor([[1, 2, 99]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": "whole"}, r"^context is 'whole'; expected one of streamed, sliding$"),
        ({"context": "sliding"}, r"^length is None and context is 'sliding'"),
        ({"context": "sliding", "length": 4, "stride": 5}, r"^stride is 5; expected at most length, 4"),
        ({"stride": 5}, r"^stride is 5 and context is 'streamed'"),
        ({"length": 0}, r"^length is 0; expected at least 1$"),
        ({"limit": 0}, r"^limit is 0; expected at least 1$"),
        ({"limit": 1}, r"has nothing to predict"),
        ({"split": "test"}, r"^split is 'test'; expected data that `titans prepare` wrote"),
        ({"piece": 0}, r"^piece is 0; expected at least 1$"),
        ({"length": "abc"}, r"^length is 'abc'; expected a whole number$"),
        ({"batch_size": True}, r"^batch_size is True; expected a whole number$"),
        ({"batch_size": None}, r"^batch_size is None; expected a whole number$"),
        ({"limit": 1.5}, r"^limit is 1\.5; expected a whole number$"),
        ({"context": ["streamed"]}, r"^context is \['streamed'\]; expected one of"),
        ({"split": 1}, r"^split is 1; expected the name of one$"),
    ],
)
def test_wrong_options_are_refused(files: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(_model(), BYTES, files[0], **options)


def test_data_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no text; expected a file or a folder"):
        perplexity(_model(), BYTES, str(tmp_path))
    for data in (5, [], ["a.txt", 5]):
        with pytest.raises(ValueError, match=r"^data is .*; expected the name of a file or folder"):
            perplexity(_model(), BYTES, data)
