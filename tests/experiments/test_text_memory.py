"""The evaluation of the text memory: what it measures is what the store does, and it never sees what it tests on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from titans.cli import app
from titans.experiments import text_memory, text_tests
from titans.experiments.conversations import read_locomo
from titans.experiments.retrieval import HYBRID, Corpus, make_corpus, rank_fused, rank_nearest, score, score_order
from titans.experiments.text_memory import (
    ANOTHER,
    ARMS,
    SHIPPED,
    WITH,
    WITHOUT,
    ZEROED,
    TextExperiment,
    choose,
    run_cell,
    run_text_memory,
    score_untrained,
    summarize,
    train_ranker,
)
from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.memory import Memory
from titans.text.training import TextTraining

TOPICS = {
    "Ann": "garden roses tulips spade rain seeds",
    "Bo": "guitar concert stage drums chords singer",
    "Cy": "mountain climbing rope summit snow tent",
}


def make_file(folder: Path) -> Path:
    """Three conversations of three sessions with five turns each, and a question about every third turn."""
    samples = []
    for speaker, topic in TOPICS.items():
        words, talk, questions = topic.split(), {}, []
        for session in range(1, 4):
            turns = []
            for turn in range(1, 6):
                word, other = words[(session + turn) % 6], words[(2 * session + turn) % 6]
                said = f"On day {session}{turn} I thought about the {word} and bought something for the {other}."
                turns.append({"speaker": speaker, "dia_id": f"D{session}:{turn}", "text": said})
                if turn % 3 == 0:
                    asked = f"What did {speaker} buy when thinking about the {word}?"
                    evidence = [f"D{session}:{turn}"]
                    questions.append({"question": asked, "evidence": evidence, "category": 1 + session})
            talk[f"session_{session}"] = turns
            talk[f"session_{session}_date_time"] = f"{session} May, 2023"
        samples.append({"sample_id": speaker, "conversation": talk, "qa": questions})
    file = folder / "locomo.json"
    file.write_text(json.dumps(samples), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    """The packaged encoder."""
    return CachedEncoder(TextEncoder.load())


def random_corpus(name: str, seed: int, turns: int = 40, mixing: torch.Tensor | None = None) -> Corpus:
    """Random turns, and for each of them a question: a noisy copy, of which ``mixing`` takes a part away."""
    generator = torch.Generator().manual_seed(seed)
    texts = F.normalize(torch.randn(turns, 16, generator=generator), dim=-1)
    asked = texts + 0.3 * torch.randn(turns, 16, generator=generator)
    asked = F.normalize(asked if mixing is None else asked @ mixing, dim=-1)
    near = rank_nearest(asked, texts)
    categories = [1 + position % 5 for position in range(turns)]
    return Corpus(name, texts, asked, [(position,) for position in range(turns)], categories, near, near, near)


TRAINING = TextTraining(epochs=1, written=24, neighbours=4)
SMALL = TextExperiment("", seeds=(0,), training=TRAINING, plain=TRAINING)


def test_recall_is_the_share_of_the_evidence_and_the_reciprocal_rank_is_of_the_first() -> None:
    order = list(range(100, 120))
    assert score_order(order, (100,)) == (1.0, 1.0, 1.0)
    assert score_order(order, (103, 107, 115, 7)) == (2 / 4, 1 / 4, 1 / 4)
    assert score_order(order, (110,)) == (0.0, 0.0, 1 / 11)
    assert score_order(order, (7,)) == (0.0, 0.0, 0.0)


def test_orders_are_fused_as_a_search_in_the_store_fuses_them(encoder: TextEncoder, tmp_path: Path) -> None:
    conversation = read_locomo(make_file(tmp_path))[0]
    texts = [turn.text for turn in conversation.turns]
    questions = [(each.text, each.evidence, each.category) for each in conversation.questions]
    corpus = make_corpus("Ann", texts, questions, encoder)
    ranking = replace(HYBRID, cosine=0.5, constant=5.0)
    with Memory(tmp_path / "store", encoder=encoder, ranking=ranking) as memory:
        memory.add_many(texts)
        for (question, _, _), order in zip(questions, rank_fused(corpus, ranking), strict=True):
            assert [hit.record.text for hit in memory.search(question)] == [texts[position] for position in order[:10]]
    with Memory(tmp_path / "default", encoder=encoder) as memory:
        memory.add_many(texts)
        for (question, _, _), order in zip(questions, corpus.shipped, strict=True):
            assert [hit.record.text for hit in memory.search(question)] == [texts[position] for position in order[:10]]


def test_an_order_without_weight_is_not_used() -> None:
    few = [[0, 1, 2]] * 40
    corpus = replace(random_corpus("a", 0), bm25=few, cosine=few)
    first = [[39, 38]] * 40
    assert rank_fused(corpus, HYBRID, neural=first) == few
    assert all(order[0] == 39 for order in rank_fused(corpus, replace(HYBRID, neural=99.0), neural=first))


@pytest.mark.parametrize("remembers", [False, True])
def test_training_on_some_conversations_helps_to_find_turns_of_another(remembers: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    # What is asked has a direction that says nothing; to project it away is what there is to learn.
    noise = F.normalize(torch.randn(16, generator=generator), dim=-1)
    mixing = torch.eye(16) + 3 * torch.outer(torch.randn(16, generator=generator), noise)
    corpora = [random_corpus(str(seed), seed, mixing=mixing) for seed in range(3)]
    settings = replace(TRAINING, learning_rate=1e-2, share=0.0, neighbours=0)

    def recall(epochs: int) -> float:
        ranker = train_ranker(corpora[:2], replace(settings, epochs=epochs), remembers)
        return float(score(corpora[2], ranker.rank(corpora[2], 0.0, corpora[2].texts))[:, 1].mean())

    assert recall(30) > recall(0) + 0.1


def test_what_is_chosen_and_trained_depends_on_nothing_of_the_conversation_left_out() -> None:
    corpora = [random_corpus(str(seed), seed) for seed in range(4)]
    stranger = random_corpus("0", 99)
    for seed in range(3):
        cells = []
        for first in (corpora[0], stranger):
            given = [first, *corpora[1:]]
            cells.append(run_cell(given, 0, seed, SMALL, score_untrained(given)))
        assert cells[0]["chosen"] == cells[1]["chosen"]
        assert cells[0]["rows"] != cells[1]["rows"]
        used = [cells[0]["validation"], *cells[0]["trained_on"]]
        assert sorted(used) == ["1", "2", "3"] and cells[0]["another"] != "0"


def test_the_best_choice_is_taken_and_among_equals_the_first() -> None:
    options: dict[Any, np.ndarray] = {
        name: np.full((2, 3), value) for name, value in zip("abc", (1, 2, 2), strict=True)
    }
    assert choose(options) == ("b", 2.0)


def make_cells(gain: dict[str, float]) -> list[dict[str, Any]]:
    """Cells of five conversations and two seeds, in which some arms are better by so much."""
    cells = []
    for seed in range(2):
        for place in range(5):
            rows = {arm: [[0.5 + 0.01 * place + gain.get(arm, 0.0)] * 3] * 4 for arm in ARMS}
            chosen = {arm: {"R@10": 0.5 + gain.get(arm, 0.0)} for arm in text_memory.TUNED_ARMS}
            cells.append({"seed": seed, "left_out": str(place), "kinds": [1, 2, 4, 5], "rows": rows, "chosen": chosen})
    return cells


def test_the_test_is_passed_only_if_both_others_are_beaten() -> None:
    passed = summarize(make_cells({WITH: 0.1}))
    assert passed["passed"] and passed["best_on_validation"] == WITH
    assert passed["test"][WITHOUT]["value"] == pytest.approx(0.1)
    assert passed["shipped"]["BM25"]["value"] == pytest.approx(0.0)
    better = summarize(make_cells({SHIPPED: 0.2, "BM25": 0.1}))["shipped"]
    assert better["BM25"]["value"] == pytest.approx(0.1) and better["hybrid, tuned"]["low"] == pytest.approx(0.2)
    assert not summarize(make_cells({WITH: 0.1, ANOTHER: 0.1}))["passed"]
    assert not summarize(make_cells({WITH: 0.1, WITHOUT: 0.2}))["passed"]
    assert summarize(make_cells({WITH: 0.1, ZEROED: 0.2}))["passed"]


def test_a_category_that_no_question_has_is_left_out() -> None:
    arms = summarize(make_cells({}))["arms"]
    assert arms["BM25"]["open-domain"] is None
    assert arms["BM25"]["all"]["R@10"]["value"] == pytest.approx(0.52)
    low, high = (arms["BM25"]["all"]["R@10"][end] for end in ("low", "high"))
    assert 0.5 <= low < 0.52 < high <= 0.54


@pytest.fixture(scope="module")
def finished(encoder: TextEncoder, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextExperiment, Path]:
    """A whole experiment on a small file."""
    folder = tmp_path_factory.mktemp("text-memory")
    experiment = TextExperiment(str(make_file(folder)), seeds=(0,)).quick()
    run_text_memory(experiment, folder / "out", encoder=encoder)
    return experiment, folder / "out"


def test_an_experiment_leaves_its_figures_a_text_and_a_page(finished: tuple[TextExperiment, Path]) -> None:
    _, out = finished
    report = json.loads((out / "text-memory.json").read_text())
    assert list(report["arms"]) == list(ARMS)
    assert {row["policy"] for row in report["store"]} == set(text_tests.POLICIES)
    assert {row["change"] for row in report["drift"]} == {"session", "conversation"}
    text = (out / "text-memory.md").read_text()
    assert all(f"| {arm} |" in text for arm in ARMS) and ("PASSED" in text)
    assert (out / "report.html").is_file() and (out / "text-memory-R10.png").is_file()


def test_what_is_finished_is_not_measured_again_and_gives_the_same(
    finished: tuple[TextExperiment, Path], encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, out = finished
    before = json.loads((out / "text-memory.json").read_text())
    trained = []
    monkeypatch.setattr(text_memory, "train_ranker", lambda *given: trained.append(given) or train_ranker(*given))
    assert run_text_memory(experiment, out, encoder=encoder)["arms"] == before["arms"]
    assert not trained
    (out / "cells" / "0-1.json").unlink()
    assert run_text_memory(experiment, out, encoder=encoder)["arms"] == before["arms"]
    assert len(trained) == 2  # with and without memory, of one cell
    with pytest.raises(RuntimeError, match="begun"):  # other settings: nothing is taken over
        monkeypatch.setattr(text_memory, "score_untrained", stop)
        run_text_memory(replace(experiment, plain=TRAINING), out, encoder=encoder)


def stop(*given: Any) -> None:
    raise RuntimeError("begun")


def test_the_command_says_what_is_wrong_with_its_data(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text())[:2]))
    result = CliRunner().invoke(app, ["experiment", "text-memory", str(file), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "has 2 conversations; expected at least 3" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
