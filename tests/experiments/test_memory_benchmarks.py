"""The benchmarks of the text memory: what they count as found, what they leave behind, and what they keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titans.experiments import memory_benchmarks
from titans.experiments.conversations import BEAM_QUESTIONS, Conversation, Question, Utterance
from titans.experiments.memory_benchmarks import (
    ARMS,
    LEVELS,
    METRICS,
    MemoryBenchmarks,
    measure,
    run_memory_benchmarks,
    score_hits,
    summarize,
)
from titans.experiments.retrieval import make_corpus, score
from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.memory import Memory

THINGS = ["kite", "lamp", "drum", "vase", "boat", "harp", "clock", "tent", "spade", "mirror", "ladder", "bell"]


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    """The packaged encoder."""
    return CachedEncoder(TextEncoder.load())


def make_histories(folder: Path, count: int = 4) -> Path:
    """A file of LongMemEval: four sessions of three turns per question, which is about a turn of the second."""
    histories = []
    for number in range(count):
        things = THINGS[number:] + THINGS[:number]
        sessions = [
            [{"role": "user", "content": f"I bought a {things[3 * session + turn]}."} for turn in range(3)]
            for session in range(4)
        ]
        sessions[1][2]["has_answer"] = True
        histories.append({
            "question_id": f"q{number}", "question_type": ("multi-session", "knowledge-update")[number % 2],
            "question": f"When did I buy the {things[5]}?", "answer": "then", "question_date": "2023/06/01 (Thu) 10:00",
            "haystack_session_ids": [f"s{number}-{session}" for session in range(4)],
            "haystack_dates": [f"2023/05/2{session} (Sat) 10:00" for session in range(4)],
            "haystack_sessions": sessions, "answer_session_ids": [f"s{number}-1"],
        })  # fmt: skip
    file = folder / "histories.json"
    file.write_text(json.dumps(histories), encoding="utf-8")
    return file


def make_chat(folder: Path) -> Path:
    """A folder of BEAM with one chat of two batches."""
    (folder / "1" / BEAM_QUESTIONS).parent.mkdir(parents=True)
    batches = [
        {"turns": [[{"role": "user", "id": 6 * batch + turn, "content": f"I sold the {THINGS[6 * batch + turn]}."}]
                   for turn in range(6)]}
        for batch in range(2)
    ]  # fmt: skip
    probes = {
        "information_extraction": [{"question": "Who got the boat?", "source_chat_ids": [4]}],
        "event_ordering": [{"question": "Was the clock or the bell sold first?", "source_chat_ids": [[6], [11]]}],
        "abstention": [{"question": "Who got the sofa?"}],
    }
    (folder / "1" / "chat.json").write_text(json.dumps(batches), encoding="utf-8")
    (folder / "1" / BEAM_QUESTIONS).write_text(json.dumps(probes), encoding="utf-8")
    return folder


def test_recall_is_over_all_that_the_first_hits_hold_and_the_rank_is_of_the_first_that_helps() -> None:
    hits = [[place] for place in range(100, 120)]
    assert score_hits(hits, (100,)) == [1.0, 1.0, 1.0, 1.0]
    assert score_hits(hits, (103, 107, 115, 7)) == [1 / 4, 2 / 4, 1.0, 1 / 4]
    assert score_hits(hits, (110,)) == [0.0, 0.0, 0.0, 1 / 11]
    assert score_hits([[1], [2, 5], [3]], (3, 5)) == [1.0, 1.0, 1.0, 1 / 2]
    assert score_hits([], (3,)) == [0.0, 0.0, 0.0, 0.0]
    assert score_hits(hits, ()) is None


def test_a_session_stands_at_the_rank_of_its_best_turn() -> None:
    found = [[4], [4], [2, 4], [2], [9]]
    assert memory_benchmarks._only_new(found) == [[4], [2], [9]]
    assert score_hits(memory_benchmarks._only_new(found), (9,)) == [1.0, 1.0, 1.0, 1 / 3]


def conversation(texts: list[str], *questions: Question) -> Conversation:
    turns = [Utterance(f"{n}", "user", text, 1 + n // 4, f"{1 + n // 4} May, 2023") for n, text in enumerate(texts)]
    return Conversation("c", tuple(turns), questions)


def test_every_arm_finds_what_the_evaluation_of_the_store_finds(encoder: TextEncoder) -> None:
    texts = [f"I bought a {thing} for the garden." for thing in THINGS]
    asked = [Question(f"When did I buy the {THINGS[n]}?", 1, (n,), "single-hop", (1 + n // 4,)) for n in (0, 5, 11)]
    asked.append(Question("Which musical instrument do I own?", 1, (5,), "single-hop", (2,)))
    found = measure(conversation(texts, *asked), encoder)
    corpus = make_corpus("c", texts, [(each.text, each.evidence, 1) for each in asked], encoder)
    for arm, orders in (("BM25", corpus.bm25), ("cosine", corpus.cosine), ("as shipped", corpus.shipped)):
        for row, (ten, five, rank) in zip(found["arms"][arm], score(corpus, orders), strict=True):
            assert (row["turns"][1], row["turns"][0], row["turns"][3]) == (ten, five, rank)
    assert found["arms"]["BM25"][1]["turns"] == [1.0, 1.0, 1.0, 1.0]
    assert found["arms"]["BM25"][3]["turns"][1] == 0 and found["arms"]["cosine"][3]["turns"][1] == 1


def test_sessions_are_ranked_by_their_best_turn_and_not_by_all_of_them(encoder: TextEncoder) -> None:
    texts = [f"The harp, the {thing}." for thing in THINGS[:8]] + [f"They said that the harp fell on a {THINGS[-1]}."]
    found = measure(conversation(texts, Question("The harp?", 1, (8,), "single-hop", (3,))), encoder)["arms"]["BM25"][0]
    assert found["turns"] == [0.0, 1.0, 1.0, 1 / 9] and found["sessions"] == [1.0, 1.0, 1.0, 1 / 3]


def test_ten_of_the_hits_that_are_asked_for_are_those_of_a_search_without_options(
    encoder: TextEncoder, tmp_path: Path
) -> None:
    with Memory(tmp_path, encoder=encoder) as memory:
        memory.add_many([f"I {verb} the {thing}." for verb in ("bought", "sold") for thing in THINGS])
        plain = [hit.record.id for hit in memory.search("Who bought the harp?")]
        many = [hit.record.id for hit in memory.search("Who bought the harp?", limit=memory_benchmarks.FOUND)]
    assert len(plain) == 10 and many[:10] == plain


def test_turns_that_say_the_same_are_found_together_or_apart_and_all_count(encoder: TextEncoder) -> None:
    said = ["I lost the lamp.", *(f"I bought a {thing}." for thing in THINGS), "I lost the lamp."]
    asked = Question("Where was the lamp lost?", 1, (0, 13), "single-hop", (1, 4))
    found = measure(conversation(said, asked), encoder)
    assert found["arms"]["BM25"][0]["turns"] == [1.0, 1.0, 1.0, 1.0]
    assert found["arms"]["BM25"][0]["sessions"] == [1.0, 1.0, 1.0, 1.0]


def test_the_memory_is_told_dates_and_roles_and_a_scope_per_session_if_asked(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    class Watched(Memory):
        def add_many(self, texts: Any, **given: Any) -> Any:
            written.extend(super().add_many(texts, **given))
            return written[-len(texts) :]

    monkeypatch.setattr(memory_benchmarks, "Memory", Watched)
    asked = Question("What did I buy?", 1, (0,), "single-hop", (1,))
    told = conversation([f"I bought a {thing}." for thing in THINGS], asked)
    measure(told, encoder, per_session=True)
    assert [record.session for record in written] == ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert {record.role for record in written} == {"user"}
    assert [record.created[:10] for record in written[::4]] == ["2023-05-01", "2023-05-02", "2023-05-03"]
    written.clear()
    undated = [replace(turn, date="once") if turn.session == 2 else turn for turn in told.turns]
    measure(replace(told, turns=tuple(undated)), encoder)
    assert {record.session for record in written} == {None}
    assert [record.created[:10] for record in written[::4]] == ["2023-05-01", "2023-05-01", "2023-05-03"]


def test_the_mean_is_over_conversations_and_leaves_out_what_is_not_marked() -> None:
    def cell(kinds: list[str], turns: list[list[float] | None]) -> dict[str, Any]:
        rows = [{"turns": row, "sessions": [1.0] * 4, "tokens": 40, "seconds": 0.01} for row in turns]
        return {"kinds": kinds, "tokens": 100, "seconds_per_write": 0.002, "arms": dict.fromkeys(ARMS, rows)}

    found = summarize([cell(["a", "b"], [[1.0] * 4, None]), cell(["a", "a"], [[0.0] * 4, [1.0] * 4])])
    arm = found["levels"]["turns"]["BM25"]
    assert {metric: each["value"] for metric, each in arm["all"].items()} == dict.fromkeys(METRICS, 0.75)
    assert arm["b"] is None and found["levels"]["sessions"]["BM25"]["b"]["R@10"]["value"] == 1
    assert found["kinds"] == {"a": 3, "b": 1}
    assert found["write_ms"] == 2 and found["search_ms"]["hybrid"] == 10
    assert found["whole_tokens"] == 100 and found["tokens"]["hybrid"] == 40


def test_a_limit_takes_questions_from_all_of_a_file(tmp_path: Path) -> None:
    file = str(make_histories(tmp_path, 9))
    names = [each.name for each in MemoryBenchmarks((file,), limit=3).choose(file, 9)]
    assert names == ["q0", "q3", "q6"]
    assert len(list(MemoryBenchmarks((file,), limit=50).choose(file, 9))) == 9


def test_a_quick_run_keeps_the_sessions_that_answer(tmp_path: Path) -> None:
    file = str(make_histories(tmp_path))
    whole = next(MemoryBenchmarks((file,)).choose(file, 4))
    short = next(replace(MemoryBenchmarks((file,)).quick(), sessions=2).choose(file, 4))
    assert [turn.session for turn in short.turns] == [1, 1, 1, 2, 2, 2]
    assert short.turns == whole.turns[:6]
    alone = next(MemoryBenchmarks((file,), sessions=1).choose(file, 4))
    assert alone.turns == whole.turns[3:6] and alone.questions[0].evidence == (2,)
    histories = json.loads(Path(file).read_text())
    histories[0]["haystack_sessions"][3][0]["has_answer"] = True
    Path(file).write_text(json.dumps(histories))
    alone = next(MemoryBenchmarks((file,), sessions=1).choose(file, 4))
    assert [turn.session for turn in alone.turns] == [2, 2, 2, 4, 4, 4] and alone.questions[0].evidence == (2, 3)


def test_the_report_has_every_file_arm_and_level_and_what_reading_everything_costs(
    encoder: TextEncoder, tmp_path: Path
) -> None:
    data = (str(make_histories(tmp_path)), str(make_chat(tmp_path / "chats")))
    steps: list[tuple[int, int]] = []
    report = run_memory_benchmarks(
        MemoryBenchmarks(data), tmp_path / "out", lambda done, total, what: steps.append((done, total)), "", encoder
    )
    assert steps == [(0, 6), (1, 6), (2, 6), (3, 6), (4, 6)]
    assert json.loads((tmp_path / "out" / "memory-benchmarks.json").read_text()) == json.loads(json.dumps(report))
    histories, chat = report["files"]
    assert (histories["benchmark"], chat["benchmark"]) == ("LongMemEval", "BEAM")
    assert (chat["questions"], chat["without_evidence"]) == (2, 1)
    assert set(histories["kinds"]) == {"multi-session", "knowledge-update"}
    assert histories["levels"]["turns"]["BM25"]["all"]["R@5"]["value"] == 1
    assert histories["whole_tokens"] > histories["tokens"]["as shipped"] > 0
    text = (tmp_path / "out" / "memory-benchmarks.md").read_text()
    assert all(text.count(f"\n| {arm} | ") == 4 for arm in (*ARMS, "whole context"))
    assert all(f"\n{name}: {level} that" in text for name in ("histories.json", "chats") for level in LEVELS)
    assert (tmp_path / "out" / "report.html").is_file() and (tmp_path / "out" / "memory-benchmarks-2.png").is_file()


def test_what_was_measured_before_an_interruption_is_kept(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, out = MemoryBenchmarks((str(make_histories(tmp_path)),)), tmp_path / "out"
    measured: list[str] = []

    def stop_after_two(*given: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(given[0].name)
        return measure(*given)

    monkeypatch.setattr(memory_benchmarks, "measure", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        run_memory_benchmarks(experiment, out, encoder=encoder)
    assert measured == ["q0", "q1"] and not (out / "memory-benchmarks.json").exists()
    again: list[str] = []
    monkeypatch.setattr(memory_benchmarks, "measure", lambda *given: again.append(given[0].name) or measure(*given))
    first = run_memory_benchmarks(experiment, out, encoder=encoder)
    assert again == ["q2", "q3"]
    assert run_memory_benchmarks(experiment, out, encoder=encoder)["files"] == first["files"] and len(again) == 2
    run_memory_benchmarks(replace(experiment, per_session=True, limit=1), out, encoder=encoder)
    assert again == ["q2", "q3", "q0"]  # other scopes: measured anew


@pytest.mark.parametrize(
    ("given", "words"),
    [({"data": ()}, "at least one"), ({"data": ("a", "a")}, "each once"), ({"limit": 0}, "limit is 0; expected at")],
)
def test_wrong_settings_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MemoryBenchmarks(**{"data": ("a",), **given})
