"""Files in the format of LoCoMo: what is read from them, and one sentence for what is wrong with them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from titans.experiments.conversations import CATEGORIES, read_locomo

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


def write(folder: Path, samples: Any) -> Path:
    file = folder / "locomo.json"
    file.write_text(json.dumps(samples), encoding="utf-8")
    return file


def test_turns_come_in_the_order_of_their_sessions_with_speaker_photo_and_date(tmp_path: Path) -> None:
    (conversation,) = read_locomo(write(tmp_path, [SAMPLE]))
    assert conversation.name == "conv-1"
    assert [turn.id for turn in conversation.turns] == ["D2:1", "D2:2", "D10:1"]
    assert [turn.session for turn in conversation.turns] == [2, 2, 10]
    assert [turn.date for turn in conversation.turns] == ["2 May, 2023", "2 May, 2023", "3 May, 2023"]
    assert conversation.turns[0].text == "Ann: Look at this! [photo: a photo of a red kite]"
    assert conversation.turns[1].text == "Bo: Lovely."


def test_evidence_is_found_however_it_is_spelled_and_questions_without_any_are_counted(tmp_path: Path) -> None:
    (conversation,) = read_locomo(write(tmp_path, [SAMPLE]))
    assert [question.evidence for question in conversation.questions] == [(0,), (0, 1, 2)]
    assert [CATEGORIES[question.category] for question in conversation.questions] == ["single-hop", "temporal"]
    assert conversation.unanswerable == 2


def changed(**fields: Any) -> list[dict[str, Any]]:
    """The sample with fields of its parts set, by their path; a value of None takes the field away."""
    sample = copy.deepcopy(SAMPLE)
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
        ([SAMPLE, SAMPLE], r"two conversations with the sample_id 'conv-1'; expected each once"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_that_names_the_place(samples: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_locomo(write(tmp_path, samples))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[{", "cannot be read as JSON"), (b'["\xff"]', "is not UTF-8: byte 2 is 0xff"), (None, "No such file")],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "locomo.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_locomo(file)
