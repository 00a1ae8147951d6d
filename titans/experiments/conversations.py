"""Conversations in the format of LoCoMo: turns in dated sessions, and questions with the turns that answer them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
_SESSION = re.compile(r"session_(\d+)")
_EVIDENCE = re.compile(r"D:?(\d+):(\d+)")  # "D:11:26" and "D8:6; D9:17" are there as well as "D1:3"


@dataclass(frozen=True)
class Utterance:
    """A turn of a conversation.

    Attributes:
        id: such as ``"D1:3"``, the third turn of the first session.
        session: its number, from 1.
        date: of the session, as the file has it; empty if it has none.
        caption: what its photo shows; empty if it has none.
    """

    id: str
    speaker: str
    said: str
    session: int
    date: str = ""
    caption: str = ""

    @property
    def text(self) -> str:
        """What is remembered: who said what, and what the photo shows."""
        return f"{self.speaker}: {self.said}" + (f" [photo: {self.caption}]" if self.caption else "")


@dataclass(frozen=True)
class Question:
    """A question, its category (a key of ``CATEGORIES``), and the positions in ``turns`` of those that answer it."""

    text: str
    category: int
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
        turns: in their order.
        questions: those for which the file names at least one existing turn as evidence.
        unanswerable: how many other questions it has.
    """

    name: str
    turns: tuple[Utterance, ...]
    questions: tuple[Question, ...]
    unanswerable: int = 0


def read_locomo(path: str | Path) -> list[Conversation]:
    """The conversations of a file; a ``ValueError`` says in one sentence what is wrong with it."""
    file = Path(path)
    try:
        samples = json.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(samples, list) or not samples:
        raise ValueError(f"{file} holds {_shown(samples)}; expected a list of conversations as LoCoMo has it")
    made = [_conversation(sample, index, f"{file}, conversation {index + 1}") for index, sample in enumerate(samples)]
    names = [each.name for each in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{file} has two conversations with the sample_id {twice!r}; expected each once")
    return made


def _conversation(sample: Any, index: int, where: str) -> Conversation:
    sample = _check(sample, dict, where, "an object with a conversation and qa")
    talk = _field(sample, "conversation", dict, where, "an object of sessions")
    sessions = sorted((int(match[1]), key) for key in talk if (match := _SESSION.fullmatch(key)))
    turns = [
        _utterance(turn, session, str(talk.get(f"{key}_date_time", "")), f"{where}, {key}, turn {number}")
        for session, key in sessions
        for number, turn in enumerate(_check(talk[key], list, f"{where}, {key}", "a list of turns"), 1)
    ]
    if not turns:
        raise ValueError(f"{where} has no turns; expected session_1 and so on, each a list of them")
    places: dict[str, int] = {}
    for place, turn in enumerate(turns):
        if places.setdefault(_plain(turn.id), place) != place:
            raise ValueError(f"{where} has two turns with the dia_id {turn.id!r}; expected each once")
    asked = [
        _question(question, places, f"{where}, question {number}")
        for number, question in enumerate(_field(sample, "qa", list, where, "a list of questions"), 1)
    ]
    questions = tuple(question for question in asked if question.evidence)
    if not questions:
        raise ValueError(f"{where} has no question whose evidence is one of its turns; expected some, such as D1:3")
    return Conversation(str(sample.get("sample_id") or index + 1), tuple(turns), questions, len(asked) - len(questions))


def _utterance(turn: Any, session: int, date: str, where: str) -> Utterance:
    turn = _check(turn, dict, where, "an object with speaker, dia_id and text")
    speaker, name, said = (_field(turn, key, str, where, "words") for key in ("speaker", "dia_id", "text"))
    caption = turn.get("blip_caption") or ""
    return Utterance(name, speaker, said, session, date, _check(caption, str, f"{where}: blip_caption", "words"))


def _question(given: Any, places: dict[str, int], where: str) -> Question:
    given = _check(given, dict, where, "an object with question, evidence and category")
    text = _field(given, "question", str, where, "words")
    category = given.get("category")
    if type(category) is not int or category not in CATEGORIES:
        raise ValueError(f"{where}: category is {_shown(category)}; expected 1 to {max(CATEGORIES)}")
    names: list[str] = []
    for item in _field(given, "evidence", list, where, "a list of turns such as D1:3"):
        names += (f"D{int(a)}:{int(b)}" for a, b in _EVIDENCE.findall(_check(item, str, f"{where}: evidence", "words")))
    return Question(text, category, tuple(sorted({places[name] for name in names if name in places})))


def _plain(name: str) -> str:
    """The id of a turn as evidence names it."""
    match = _EVIDENCE.fullmatch(name)
    return f"D{int(match[1])}:{int(match[2])}" if match else name


def _field(given: dict[str, Any], key: str, kind: type, where: str, expected: str) -> Any:
    if key not in given:
        raise ValueError(f"{where} has no {key}; expected {expected}")
    return _check(given[key], kind, f"{where}: {key}", expected)


def _check(value: Any, kind: type, where: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {_shown(value)}; expected {expected}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"
