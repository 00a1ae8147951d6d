"""Search instead of memory: BM25 finds the facts among sentences, and a model reads only what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titans import TitansConfig, TitansForCausalLM
from titans.evaluation import kinds
from titans.evaluation.evaluate import evaluate
from titans.evaluation.measure import Evaluation
from titans.evaluation.retrieval import keep_sentences, rank_sentences
from titans.models.tokenizer import byte_tokenizer
from titans.tasks import example
from titans.tasks.babilong import Babilong

BYTES = byte_tokenizer()


def books(path: Path, test: str) -> Babilong:
    """Stories about Mary in books that do not know her."""
    for ending in ("train", "test"):
        story = "1 John went to the barn.\n2 Mary went to the attic.\n3 John went home.\n4 Where is Mary?\tattic\t2\n"
        (path / f"qa1_story_{ending}.txt").write_text(story if ending == "test" else story.replace("Mary", "Ann"))
    (path / "book").mkdir()
    (path / "book" / "book.txt").write_text(f"The {test} is far away, and Otto is there. " * 400)
    return Babilong(data=str(path), background=str(path / "book"), lengths=(1024,))


def test_the_fact_that_is_asked_for_is_found_and_read_between_instruction_and_question(tmp_path: Path) -> None:
    drawn = example(books(tmp_path, "sea"), "test", 0, 0, {"length": 1024}, BYTES)
    ranked = rank_sentences(drawn, BYTES)
    assert ranked == list(drawn.needed)  # no other sentence has a word of the question that is not a stop word
    cut = keep_sentences(drawn, [*ranked, 0])
    text = BYTES.decode(cut.tokens)
    assert text.startswith(BYTES.decode(drawn.tokens[: drawn.sentences[0]]))
    assert text.count("Mary went to the attic.") == 1 and text.endswith("attic") and "John" not in text
    assert BYTES.decode(cut.tokens[cut.boundary :]) == BYTES.decode(drawn.tokens[drawn.boundary :])
    (answer,) = cut.answers
    assert BYTES.decode(cut.tokens[answer.place :]) == " attic" == BYTES.decode(answer.wanted)
    everything = keep_sentences(drawn, range(len(drawn.sentences)))
    assert list(everything.tokens) == list(drawn.tokens) and everything.boundary == drawn.boundary


def test_a_model_that_searches_is_a_row_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "TUNED_ON", 2)
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "memory_heads": 1, "segment_size": 8}
    model = TitansForCausalLM(TitansConfig(variant="mac", vocab_size=257, num_persistent_tokens=2, **fields))
    model.save_pretrained(tmp_path / "model")
    task = books(tmp_path, "sea")
    settings = {"data": task.data, "background": task.background, "lengths": [1024]}
    result = evaluate(str(tmp_path / "model"), Evaluation(("babilong",), settings, 2, control="bm25"), tmp_path / "out")
    (cell,) = result["tasks"]["babilong bm25"]["cells"]
    assert (cell["count"], cell["found"]) == (2, 1.0) and cell["sentences"] in (1, 2, 4, 8, 16, 32)
    assert result == json.loads((tmp_path / "out" / "eval.json").read_text())
    said = "control is 'bm25' and recall has no sentences; expected babilong or book-quote"
    with pytest.raises(ValueError, match=said):
        evaluate(str(tmp_path / "model"), Evaluation(("recall",), samples=2, control="bm25"), tmp_path / "other")
