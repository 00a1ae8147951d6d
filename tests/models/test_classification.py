"""The classifier: padding, all kinds of labels, saving and loading, the Trainer, and the start as a language model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from tests.models.cases import VARIANTS, VOCAB, config, model, tokens
from titans import TitansForCausalLM, TitansForSequenceClassification
from titans.models.tokenizer import dna_tokenizer

LABELS = 3
PAD = VOCAB - 1


def classifier(variant: str = "lmm", **fields: Any) -> TitansForSequenceClassification:
    torch.manual_seed(0)
    made = TitansForSequenceClassification(config(variant, **{"num_labels": LABELS, **fields}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return made.double().eval()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pooling", ["mean", "last"])
@torch.no_grad()
def test_padding_anywhere_gives_what_each_sequence_gives_alone(variant: str, pooling: str) -> None:
    made = classifier(variant, pooling=pooling, pad_token_id=PAD)
    ids = tokens(11, batch=3) % PAD
    mask = torch.tensor([[1] * 11, [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])
    alone = torch.cat([made(ids[row : row + 1, mask[row] == 1]).logits for row in range(3)])
    assert alone.shape == (3, LABELS)
    torch.testing.assert_close(made(ids, attention_mask=mask).logits, alone)
    torch.testing.assert_close(made(ids.where(mask == 1, PAD)).logits, alone)  # found by pad_token_id
    embedded = made.model.embed_tokens(ids)
    torch.testing.assert_close(made(inputs_embeds=embedded, attention_mask=mask).logits, alone)


@torch.no_grad()
def test_last_looks_at_the_last_token_and_mean_at_all_of_them() -> None:
    ids = tokens(9, batch=1)
    for pooling, pooled in {"last": lambda x: x[:, -1], "mean": lambda x: x.mean(1)}.items():
        made = classifier(pooling=pooling)
        torch.testing.assert_close(made(ids).logits, made.score(pooled(made.model(ids).last_hidden_state)))


@pytest.mark.parametrize(
    ("labels", "count", "kind", "loss"),
    [
        (torch.tensor([2, 0]), 3, "single_label_classification", torch.nn.functional.cross_entropy),
        (
            torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64), 3, "multi_label_classification",
            torch.nn.functional.binary_cross_entropy_with_logits,
        ),
        (torch.tensor([0.5, -2.0], dtype=torch.float64), 1, "regression", None),
    ],
)  # fmt: skip
def test_the_kind_of_problem_follows_from_the_labels_and_is_the_loss_of_torch(
    labels: Tensor, count: int, kind: str, loss: Any
) -> None:
    made = classifier(num_labels=count)
    output = made(tokens(7), labels=labels)
    wanted = (output.logits[:, 0] - labels).square().mean() if loss is None else loss(output.logits, labels)
    assert made.config.problem_type == kind
    torch.testing.assert_close(output.loss, wanted)
    output.loss.backward()
    assert made.score.weight.grad.abs().sum() > 0
    torch.testing.assert_close(made(tokens(7), labels=labels, return_dict=False)[0], output.loss)


def test_a_saved_classifier_is_the_same_and_comes_back_from_the_auto_class(tmp_path: Path) -> None:
    names = dict(enumerate(("enhancer", "promoter", "neither")))
    made = classifier(id2label=names, label2id={name: number for number, name in names.items()}, pooling="last")
    made.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(again) is TitansForSequenceClassification
    assert again.config.id2label == names and again.config.pooling == "last"
    for name, weight in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    torch.testing.assert_close(again(tokens(7)).logits, made(tokens(7)).logits)


def test_a_classifier_built_on_a_language_model_has_its_weights_and_warns_of_the_new_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    language = model("lmm", torch.float32)
    language.save_pretrained(tmp_path / "lm")
    with caplog.at_level(logging.WARNING), _heard("transformers"), _heard("titans"):
        made = TitansForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=LABELS)
    assert "score.weight" in caplog.text and "lm_head" not in caplog.text
    for name, weight in language.model.state_dict().items():
        assert torch.equal(made.model.state_dict()[name], weight), name
    assert torch.isfinite(made.score.weight).all() and made.score.weight.std() > 0
    caplog.clear()
    made.save_pretrained(tmp_path / "classifier")
    with caplog.at_level(logging.WARNING), _heard("titans"):
        TitansForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert "score" not in caplog.text


class _heard:
    """While open, the records of a library that keeps them to itself reach pytest."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self.before, self.logger.propagate = self.logger.propagate, True

    def __exit__(self, *_: object) -> None:
        self.logger.propagate = self.before


def test_weights_of_another_shape_are_still_refused(tmp_path: Path) -> None:
    TitansForCausalLM(config("lmm", hidden_size=32)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not fit the config"):
        TitansForSequenceClassification.from_pretrained(tmp_path, config=config("lmm", num_labels=LABELS))


def test_wrong_labels_and_sequences_without_tokens_are_refused_in_a_sentence() -> None:
    made = classifier(pad_token_id=PAD)
    with pytest.raises(ValueError, match="labels has 3; expected numbers from 0 to 2"):
        made(tokens(5), labels=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="expected one label per sequence, 2 of them"):
        made(tokens(5), labels=torch.tensor([0]))
    with pytest.raises(ValueError, match="no tokens besides padding"):
        made(torch.full((1, 4), PAD))
    with pytest.raises(ValueError, match="pooling is 'max'; expected one of mean, last"):
        config("lmm", pooling="max")


def test_the_trainer_learns_which_dna_has_more_g_than_c(tmp_path: Path) -> None:
    tokenizer = dna_tokenizer()
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(5, (64, 12), generator=generator).tolist()
    letters = ("AACTT", "AAGTT")
    texts = ["".join(letters[row % 2][each] for each in draw[: 6 + row % 7]) for row, draw in enumerate(draws)]
    data = [{**tokenizer(text), "labels": row % 2} for row, text in enumerate(texts)]
    torch.manual_seed(0)
    made = TitansForSequenceClassification(
        config("lmm", num_labels=2, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_hidden_layers=1)
    )
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=20, per_device_train_batch_size=32, learning_rate=2e-2, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(made, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    trainer.train()
    predicted = trainer.predict(data)
    right = (torch.from_numpy(predicted.predictions).argmax(-1) == torch.from_numpy(predicted.label_ids)).float()
    assert right.mean() > 0.9
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    batch = AutoTokenizer.from_pretrained(tmp_path / "saved")(["ACC", "agggaggt"], padding=True, return_tensors="pt")
    assert again(**batch).logits.argmax(-1).tolist() == [0, 1]
