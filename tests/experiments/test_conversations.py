"""Files of LoCoMo, LongMemEval and BEAM: what is read from them, and one sentence for what is wrong with them."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from titans.experiments import conversations
from titans.experiments.conversations import BEAM_QUESTIONS, CATEGORIES, Conversation, read_conversations, read_locomo

SAMPLE: dict[str, Any] = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ann",
        "speaker_b": "Bo",
        "session_10_date_time": "3 May, 2023",
        "session_10": [{"speaker": "Bo", "dia_id": "D10:1", "text": "Hello again."}],
        "session_2_date_time": "2 May, 2023",
        "session_2": [
            {"speaker": "Ann", "dia_id": "D2:1", "text": "Look at this!", "blip_caption": "a photo of a red kite"},
            {"speaker": "Bo", "dia_id": "D2:2", "text": "Lovely."},
        ],
        "session_3_date_time": "nobody spoke",
    },
    "qa": [
        {"question": "What did Ann show?", "answer": "a kite", "evidence": ["D2:1"], "category": 4},
        {"question": "When did they meet?", "answer": 2023, "evidence": ["D2:2; D10:01", "D:2:1"], "category": 2},
        {"question": "What did Cy say?", "evidence": ["D", "D7:1"], "category": 5},
        {"question": "Who is Cy?", "evidence": [], "category": 3},
    ],
}


# One question with its own history: sessions out of order, one of them twice, one empty, an empty turn.
HISTORY: dict[str, Any] = {
    "question_id": "q1",
    "question_type": "temporal-reasoning",
    "question": "When did I plant the plum tree?",
    "answer": 3,
    "question_date": "2023/06/01 (Thu) 10:00",
    "haystack_session_ids": ["answer_b", "a", "a", "c"],
    "haystack_dates": [
        "2023/05/30 (Tue) 09:05", "2023/05/20 (Sat) 02:21", "2023/05/21 (Sun) 11:00", "2023/05/29 (Mon) 12:00"
    ],
    "haystack_sessions": [
        [
            {"role": "user", "content": "I planted a plum tree last week.", "has_answer": True},
            {"role": "assistant", "content": "Water it well.", "has_answer": False},
        ],
        [{"role": "assistant", "content": "How can I help?"}, {"role": "user", "content": " "}],
        [{"role": "user", "content": "What is a\x00 plum?"}],
        [],
    ],
    "answer_session_ids": ["answer_b"],
}  # fmt: skip
CHAT: list[Any] = [
    {
        "batch_number": 1,
        "turns": [
            [
                {"role": "user", "id": 0, "time_anchor": "March-15-2024", "content": "I build a boat. ->-> 1,1"},
                {"role": "assistant", "id": 1, "content": "Of wood?"},
            ],
            [{"role": "user", "id": 2, "content": "Of oak."}, {"role": "assistant", "id": 3, "content": "Good."}],
        ],
    },
    {"batch_number": 2, "turns": [[{"role": "user", "id": 4, "time_anchor": "April-02-2024", "content": "It leaks."}]]},
]
PROBES: dict[str, Any] = {
    "abstention": [{"question": "What is its name?", "rubric": []}],
    "event_ordering": [{"question": "What came first?", "source_chat_ids": [[0, 2], [4, "--"]]}],
    "knowledge_update": [
        {"question": "Is it of oak?", "source_chat_ids": {"original_info": [0], "updated_info": [2, 2]}}
    ],
    "summarization": [{"question": "What happened?", "source_chat_ids": [77]}],
}


def write(folder: Path, samples: Any) -> Path:
    file = folder / "locomo.json"
    file.write_text(json.dumps(samples), encoding="utf-8")
    return file


def write_beam(folder: Path, chat: Any = CHAT, probes: Any = PROBES, chat_name: str = "chat.json") -> Path:
    (folder / BEAM_QUESTIONS).parent.mkdir(parents=True, exist_ok=True)
    (folder / BEAM_QUESTIONS).write_text(json.dumps(probes), encoding="utf-8")
    (folder / chat_name).write_text(json.dumps(chat), encoding="utf-8")
    return folder


def read_one(path: Path) -> Conversation:
    (conversation,) = read_conversations(path)
    return conversation


def test_turns_come_in_the_order_of_their_sessions_with_speaker_photo_and_date(tmp_path: Path) -> None:
    (conversation,) = read_locomo(write(tmp_path, [SAMPLE]))
    assert conversation.name == "conv-1"
    assert [turn.id for turn in conversation.turns] == ["D2:1", "D2:2", "D10:1"]
    assert [turn.session for turn in conversation.turns] == [2, 2, 10]
    assert [turn.date for turn in conversation.turns] == ["2 May, 2023", "2 May, 2023", "3 May, 2023"]
    assert conversation.turns[0].text == "Ann: Look at this! [photo: a photo of a red kite]"
    assert conversation.turns[1].text == "Bo: Lovely."
    assert conversation.turns[0].created == datetime(2023, 5, 2)


def test_evidence_is_found_however_it_is_spelled_and_questions_without_any_are_counted(tmp_path: Path) -> None:
    (conversation,) = read_locomo(write(tmp_path, [SAMPLE]))
    assert [question.evidence for question in conversation.questions] == [(0,), (0, 1, 2)]
    assert [CATEGORIES[question.category] for question in conversation.questions] == ["single-hop", "temporal"]
    assert [question.kind for question in conversation.questions] == ["single-hop", "temporal"]
    assert [question.sessions for question in conversation.questions] == [(2,), (2, 10)]
    assert conversation.unanswerable == 2
    assert read_one(write(tmp_path, [SAMPLE])) == conversation


def test_a_history_is_read_in_the_order_of_its_dates_and_empty_turns_are_left_out(tmp_path: Path) -> None:
    conversation = read_one(write(tmp_path, [HISTORY]))
    assert (conversation.name, conversation.benchmark, conversation.unanswerable) == ("q1", "LongMemEval", 0)
    assert [turn.text for turn in conversation.turns] == [
        "How can I help?", "What is a  plum?", "I planted a plum tree last week.", "Water it well."
    ]  # fmt: skip
    assert [turn.speaker for turn in conversation.turns] == ["assistant", "user", "user", "assistant"]
    assert [turn.session for turn in conversation.turns] == [1, 1, 3, 3]  # one id is one session
    assert conversation.turns[0].created == datetime(2023, 5, 20, 2, 21)


def test_a_history_marks_turns_and_sessions(tmp_path: Path) -> None:
    (question,) = read_one(write(tmp_path, [HISTORY])).questions
    assert (question.text, question.kind) == ("When did I plant the plum tree?", "temporal-reasoning")
    assert question.evidence == (2,) and question.sessions == (3,)
    unmarked = changed(HISTORY, haystack_sessions__0__0__has_answer=False)
    (question,) = read_one(write(tmp_path, unmarked)).questions
    assert question.evidence == () and question.sessions == (3,)


def test_a_question_that_nothing_answers_is_only_counted(tmp_path: Path) -> None:
    asked, abstains = read_conversations(write(tmp_path, [HISTORY, *changed(HISTORY, question_id="q2_abs")]))
    assert len(asked.questions) == 1 and len(asked.turns) == len(abstains.turns)
    assert abstains.questions == () and abstains.unanswerable == 1
    with pytest.raises(ValueError, match="has no question whose evidence is marked"):
        list(read_conversations(write(tmp_path, changed(HISTORY, question_id="q2_abs"))))


def test_a_chat_has_a_session_per_batch_and_no_marks_of_its_plan(tmp_path: Path) -> None:
    conversation = read_one(write_beam(tmp_path / "7"))
    assert (conversation.name, conversation.benchmark) == ("7", "BEAM")
    assert [turn.text for turn in conversation.turns] == [
        "I build a boat.",
        "Of wood?",
        "Of oak.",
        "Good.",
        "It leaks.",
    ]
    assert [turn.session for turn in conversation.turns] == [1, 1, 1, 1, 2]
    assert conversation.turns[3].created == datetime(2024, 3, 15)
    assert conversation.turns[4].created == datetime(2024, 4, 2)


def test_ids_of_messages_are_found_in_lists_and_objects_however_nested(tmp_path: Path) -> None:
    conversation = read_one(write_beam(tmp_path / "7"))
    assert {question.kind: question.evidence for question in conversation.questions} == {
        "event ordering": (0, 2, 4), "knowledge update": (0, 2)
    }  # fmt: skip
    assert conversation.questions[0].sessions == (1, 2)
    assert conversation.unanswerable == 2  # an abstention, and an id that no message has


def test_an_id_that_two_messages_have_names_neither(tmp_path: Path) -> None:
    conversation = read_one(write_beam(tmp_path / "7", changed(CHAT, **{"1__turns__0__0__id": 0})[0]))
    assert [question.evidence for question in conversation.questions] == [(2,), (2,)]


def test_all_forms_of_a_chat_read_the_same(tmp_path: Path) -> None:
    whole = read_one(write_beam(tmp_path / "7"))
    flat = [[message for turn in batch["turns"] for message in turn] for batch in CHAT]  # as the hub has it
    blank = [[{"time_anchor": None, **message} for message in batch] for batch in flat]
    plans = [{"plan-1": CHAT[:1], "plan-2": None}, {"plan-1": None, "plan-2": CHAT[1:]}]
    for chat in (flat, blank, plans):
        assert read_one(write_beam(tmp_path / "7", chat)) == whole
    write_beam(tmp_path / "7", CHAT[:1])
    assert read_one(write_beam(tmp_path / "7", CHAT, chat_name="chat_trunecated.json")) == whole


def test_a_folder_of_chats_is_read_by_number(tmp_path: Path) -> None:
    for name in ("100K/2", "100K/10", "1M/1"):
        write_beam(tmp_path / name)
    assert [each.name for each in read_conversations(tmp_path / "100K")] == ["2", "10"]
    assert [each.name for each in read_conversations(tmp_path)] == ["100K/2", "100K/10", "1M/1"]


@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_file_is_read_the_same_however_much_at_a_time(step: int, tmp_path: Path, monkeypatch: Any) -> None:
    histories = [*changed(HISTORY, question="Où est l’arbre? 🌳"), *changed(HISTORY, question_id="q2", answer=12345)]
    file = write(tmp_path, histories)
    file.write_text(json.dumps(histories, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    whole = list(read_conversations(file))
    assert [each.name for each in whole] == ["q1", "q2"]
    monkeypatch.setattr(conversations, "STEP", step)
    assert list(read_conversations(file)) == whole


def changed(given: Any = SAMPLE, **fields: Any) -> list[Any]:
    """The sample with fields of its parts set, by their path; a value of None takes the field away."""
    sample = copy.deepcopy(given)
    for path, value in fields.items():
        *parents, last = path.split("__")
        place: Any = sample
        for parent in parents:
            place = place[int(parent) if isinstance(place, list) else parent]
        key = int(last) if isinstance(place, list) else last
        if value is None:
            del place[key]
        else:
            place[key] = value
    return [sample]


TURNS = "conversation__session_2__0__"


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], r"holds \[\]; expected a list of conversations"),
        ({"qa": []}, r"expected a list of conversations"),
        ([3], r"conversation 1 is 3; expected an object with a conversation and qa"),
        (5, r"holds 5; expected a list of conversations"),
        (changed(conversation=None), r"conversation 1 has no conversation; expected an object of sessions"),
        (changed(qa=None), r"conversation 1 has no qa; expected a list of questions"),
        (changed(conversation={"session_1": []}), r"conversation 1 has no turns"),
        (changed(conversation__session_2="hi"), r"session_2 is \"hi\"; expected a list of turns"),
        (changed(conversation__session_2__0=[]), r"session_2, turn 1 is \[\]; expected an object with speaker"),
        (changed(**{f"{TURNS}text": None}), r"session_2, turn 1 has no text; expected words"),
        (changed(**{f"{TURNS}text": 5}), r"session_2, turn 1: text is 5; expected words"),
        (changed(**{f"{TURNS}dia_id": "D2:2"}), r"two turns with the dia_id 'D2:2'; expected each once"),
        (changed(qa__0="why?"), r"question 1 is \"why\?\"; expected an object with question"),
        (changed(qa__0__question=None), r"question 1 has no question; expected words"),
        (changed(qa__0__category=6), r"question 1: category is 6; expected 1 to 5"),
        (changed(qa__0__category=True), r"question 1: category is true; expected 1 to 5"),
        (changed(qa__0__category=[1]), r"question 1: category is \[1\]; expected 1 to 5"),
        (changed(qa__0__evidence="D2:1"), r"question 1: evidence is \"D2:1\"; expected a list"),
        (changed(qa__0__evidence=[7]), r"question 1: evidence is 7; expected words"),
        (changed(qa=[]), r"conversation 1 has no question whose evidence is one of its turns"),
        ([SAMPLE, SAMPLE], r"two conversations named 'conv-1'; expected each once"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_that_names_the_place(samples: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_locomo(write(tmp_path, samples))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


TURN = "haystack_sessions__0__0__"


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([3], r"conversation 1 is 3; expected one as LoCoMo or LongMemEval has it"),
        ([{"text": 1}], r"conversation 1 is {\"text\": 1}; expected one as LoCoMo or LongMemEval has it"),
        ([HISTORY, SAMPLE], r"conversation 2 has no question_id; expected words"),
        ([HISTORY, HISTORY], r"two conversations named 'q1'; expected each once"),
        (changed(HISTORY, question_type="hard"), r"question_type is \"hard\"; expected one of single-session-user, "),
        (changed(HISTORY, haystack_dates=[]), r"has 4 haystack_session_ids, 0 haystack_dates and 4 haystack_sessions"),
        (changed(HISTORY, haystack_dates__1="May"), r"session 2: its date is \"May\"; expected one such as 2023/05/20"),
        (changed(HISTORY, haystack_session_ids__1=7), r"session 2: its id is 7; expected words"),
        (changed(HISTORY, haystack_sessions__1="hi"), r"session 2 is \"hi\"; expected a list of turns"),
        (changed(HISTORY, haystack_sessions__0__0=[]), r"session 1, turn 1 is \[\]; expected an object with role"),
        (changed(HISTORY, **{f"{TURN}content": None}), r"session 1, turn 1 has no content; expected words"),
        (changed(HISTORY, **{f"{TURN}role": "human"}), r"turn 1: role is \"human\"; expected one of user, assistant"),
        (changed(HISTORY, **{f"{TURN}has_answer": "yes"}), r"turn 1: has_answer is \"yes\"; expected true or false"),
        (changed(HISTORY, answer_session_ids=["z"]), r"has 'z'; expected some of the haystack_session_ids"),
        (changed(HISTORY, haystack_sessions=[[]] * 4), r"conversation 1 has no turns; expected some"),
    ],
)
def test_what_is_wrong_with_a_history_is_said_in_one_sentence(samples: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        list(read_conversations(write(tmp_path, samples)))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


FIRST = "0__turns__0__0__"


@pytest.mark.parametrize(
    ("chat", "probes", "words"),
    [
        ({}, PROBES, r"chat.json is {}; expected a list of batches"),
        ([], PROBES, r"chat.json has no messages; expected batches of them"),
        ([3], PROBES, r"batch 1 is 3; expected an object with turns, or a list of messages"),
        ([{"batch_number": 1}], PROBES, r"batch 1 has no turns; expected a list of turns"),
        ([{"plan-1": 3}], PROBES, r"chat.json, plan-1 is 3; expected a list of batches"),
        (changed(CHAT, **{"0__turns__0": 3})[0], PROBES, r"batch 1, turn 1 is 3; expected a list of messages"),
        (
            changed(CHAT, **{f"{FIRST}role": "system"})[0],
            PROBES,
            r"batch 1, message 1: role is \"system\"; expected one",
        ),
        (changed(CHAT, **{f"{FIRST}id": "a"})[0], PROBES, r"message 1: id is \"a\"; expected a whole number"),
        (changed(CHAT, **{f"{FIRST}time_anchor": 5})[0], PROBES, r"message 1: time_anchor is 5; expected a date"),
        (CHAT, [], r"probing_questions.json is \[\]; expected an object with a list of questions per ability"),
        (CHAT, {"riddles": []}, r"probing_questions.json: an ability is \"riddles\"; expected one of abstention, "),
        (CHAT, {"abstention": 3}, r"abstention is 3; expected a list of questions"),
        (CHAT, {"abstention": [3]}, r"abstention, question 1 is 3; expected an object with a question"),
        (CHAT, {"abstention": [{}]}, r"abstention, question 1 has no question; expected words"),
        (CHAT, {"abstention": [{"question": "a", "source_chat_ids": [0.5]}]}, r"ids is 0.5; expected a whole number"),
        (CHAT, {"abstention": []}, r"has no question whose evidence is marked; expected some"),
    ],
)
def test_what_is_wrong_with_a_chat_is_said_in_one_sentence(chat: Any, probes: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        list(read_conversations(write_beam(tmp_path, chat, probes)))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_a_folder_without_chats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has no probing_questions/probing_questions.json in it; expected a folder of BEAM"
    ):
        list(read_conversations(tmp_path))
    (write_beam(tmp_path) / "chat.json").unlink()
    with pytest.raises(ValueError, match=r"chat.json cannot be read: No such file"):
        list(read_conversations(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[{", "cannot be read as JSON"),
        (b"[1 2]", "cannot be read as JSON: Expecting ',' delimiter, at \"2]\""),
        (b"[1,]", "cannot be read as JSON: Expecting value"),
        (b"[1] 2", "cannot be read as JSON: Extra data"),
        (b"", "cannot be read as JSON: Expecting value"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'["\xff"]', "is not UTF-8: byte 2 is 0xff"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "locomo.json"
    if content is not None:
        file.write_bytes(content)
    for read in (conversations._items, conversations._load):
        with pytest.raises(ValueError, match=words) as caught:
            list(read(file))
        assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)
