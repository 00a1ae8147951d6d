"""Conversations, questions about them, and the turns that answer: files of LoCoMo and LongMemEval, folders of BEAM."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
LONGMEMEVAL_KINDS = (
    "single-session-user", "single-session-assistant", "single-session-preference", "multi-session",
    "knowledge-update", "temporal-reasoning",
)  # fmt: skip
BEAM_KINDS = (
    "abstention", "contradiction_resolution", "event_ordering", "information_extraction", "instruction_following",
    "knowledge_update", "multi_session_reasoning", "preference_following", "summarization", "temporal_reasoning",
)  # fmt: skip
ROLES = ("user", "assistant")
ABSTENTION = "_abs"  # ends the question_id of a question of LongMemEval that nothing answers
BEAM_QUESTIONS = Path("probing_questions") / "probing_questions.json"
BEAM_CHATS = ("chat_trunecated.json", "chat.json")  # the first of them that is there, as BEAM itself reads it
DATES = ("%I:%M %p on %d %B, %Y", "%d %B, %Y", "%Y/%m/%d (%a) %H:%M", "%B-%d-%Y")
STEP = 1 << 22  # bytes of a file that are read at a time
_SESSION = re.compile(r"session_(\d+)")
_EVIDENCE = re.compile(r"D:?(\d+):(\d+)")  # "D:11:26" and "D8:6; D9:17" are there as well as "D1:3"
_PLAN = re.compile(r"plan-\d+")
_PLAN_MARK = re.compile(r"\s*->->\s*\d+\s*,\s*\d+\s*$")  # where a message stands in BEAM's plan; nobody said it
# What no text memory keeps: control characters other than white space, and half surrogates.
_UNSAYABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Utterance:
    """A turn of a conversation.

    Attributes:
        id: such as ``"D1:3"``, the third turn of the first session.
        speaker: a name, or one of ``ROLES``.
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
        """What is remembered: who said what, if it is somebody with a name, and what the photo shows."""
        who = "" if self.speaker in ROLES else f"{self.speaker}: "
        return f"{who}{self.said}" + (f" [photo: {self.caption}]" if self.caption else "")

    @property
    def created(self) -> datetime | None:
        """The date, if it is in one of the forms of the three benchmarks."""
        return _moment(self.date)


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        category: its number in LoCoMo, a key of ``CATEGORIES``; 0 elsewhere.
        evidence: the positions in ``turns`` of those that answer it; may be empty if sessions are marked.
        kind: the name of its category.
        sessions: the numbers of the sessions that answer it.
    """

    text: str
    category: int
    evidence: tuple[int, ...]
    kind: str = ""
    sessions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
        turns: in their order.
        questions: those for which the file names at least one existing turn or session as evidence.
        unanswerable: how many other questions it has.
        benchmark: whose format it is in.
    """

    name: str
    turns: tuple[Utterance, ...]
    questions: tuple[Question, ...]
    unanswerable: int = 0
    benchmark: str = "LoCoMo"


def read_locomo(path: str | Path) -> list[Conversation]:
    """The conversations of a file of LoCoMo; a ``ValueError`` says in one sentence what is wrong with it."""
    file = Path(path)
    return list(_each_once(file, (_locomo(item, where) for item, where in _items(file))))


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """The conversations of a file of LoCoMo or LongMemEval, or of a folder of BEAM, one at a time.

    A ``ValueError`` says in one sentence what is wrong, when the reading comes to it.
    """
    place = Path(path)
    answered = False
    for conversation in _each_once(place, _read_beam(place) if place.is_dir() else _read_list(place)):
        answered = answered or bool(conversation.questions)
        yield conversation
    if not answered:
        raise ValueError(f"{place} has no question whose evidence is marked; expected some")


def _each_once(place: Path, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    names = set()
    for conversation in conversations:
        if conversation.name in names:
            raise ValueError(f"{place} has two conversations named {conversation.name!r}; expected each once")
        names.add(conversation.name)
        yield conversation


def _read_list(file: Path) -> Iterator[Conversation]:
    read: Callable[[Any, str], Conversation] | None = None
    for item, where in _items(file):
        if read is None:
            keys = item if isinstance(item, dict) else ()
            read = next((each for key, each in _FORMATS.items() if key in keys), None)
            if read is None:
                raise ValueError(f"{where} is {_shown(item)}; expected one as LoCoMo or LongMemEval has it")
        yield read(item, where)


def _locomo(sample: Any, where: str) -> Conversation:
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
        _locomo_question(question, places, turns, f"{where}, question {number}")
        for number, question in enumerate(_field(sample, "qa", list, where, "a list of questions"), 1)
    ]
    if not any(question.evidence for question in asked):
        raise ValueError(f"{where} has no question whose evidence is one of its turns; expected some, such as D1:3")
    return _conversation(str(sample.get("sample_id") or where.split()[-1]), turns, asked, "LoCoMo")


def _utterance(turn: Any, session: int, date: str, where: str) -> Utterance:
    turn = _check(turn, dict, where, "an object with speaker, dia_id and text")
    speaker, name, said = (_field(turn, key, str, where, "words") for key in ("speaker", "dia_id", "text"))
    caption = turn.get("blip_caption") or ""
    caption = _sayable(_check(caption, str, f"{where}: blip_caption", "words"))
    return Utterance(name, speaker, _sayable(said), session, date, caption)


def _locomo_question(given: Any, places: dict[str, int], turns: list[Utterance], where: str) -> Question:
    given = _check(given, dict, where, "an object with question, evidence and category")
    text = _field(given, "question", str, where, "words")
    category = given.get("category")
    if type(category) is not int or category not in CATEGORIES:
        raise ValueError(f"{where}: category is {_shown(category)}; expected 1 to {max(CATEGORIES)}")
    names: list[str] = []
    for item in _field(given, "evidence", list, where, "a list of turns such as D1:3"):
        names += (f"D{int(a)}:{int(b)}" for a, b in _EVIDENCE.findall(_check(item, str, f"{where}: evidence", "words")))
    evidence = sorted({places[name] for name in names if name in places})
    return Question(_sayable(text), category, tuple(evidence), CATEGORIES[category], _sessions_of(evidence, turns))


def _plain(name: str) -> str:
    """The id of a turn as evidence names it."""
    match = _EVIDENCE.fullmatch(name)
    return f"D{int(match[1])}:{int(match[2])}" if match else name


def _longmemeval(given: Any, where: str) -> Conversation:
    """A question with a history of its own; sessions of the same id are one session, empty turns are left out."""
    given = _check(given, dict, where, "an object with question, haystack_sessions and answer_session_ids")
    name, text, kind = (_field(given, key, str, where, "words") for key in ("question_id", "question", "question_type"))
    _check_kind(kind, LONGMEMEVAL_KINDS, f"{where}: question_type")
    ids, dates, sessions = (
        _field(given, f"haystack_{key}", list, where, "a list with an entry for each session")
        for key in ("session_ids", "dates", "sessions")
    )
    if not len(ids) == len(dates) == len(sessions):
        raise ValueError(
            f"{where} has {len(ids)} haystack_session_ids, {len(dates)} haystack_dates and {len(sessions)} "
            "haystack_sessions; expected as many of each"
        )
    history = []
    for number, (id, date, session) in enumerate(zip(ids, dates, sessions, strict=True), 1):
        place = f"{where}, session {number}"
        _check(id, str, f"{place}: its id", "words")
        moment = _moment(_check(date, str, f"{place}: its date", "a date"))
        if moment is None:
            raise ValueError(f"{place}: its date is {_shown(date)}; expected one such as 2023/05/20 (Sat) 02:21")
        history.append((moment, id, date, _check(session, list, place, "a list of turns"), place))
    numbers: dict[str, int] = {}
    turns: list[Utterance] = []
    marked = []
    for _, id, date, session, place in sorted(history, key=lambda each: each[0]):
        numbers.setdefault(id, len(numbers) + 1)
        for number, turn in enumerate(session, 1):
            speaker, said = _message(turn, f"{place}, turn {number}")
            if said.strip():
                if _check(
                    turn.get("has_answer") or False, bool, f"{place}, turn {number}: has_answer", "true or false"
                ):
                    marked.append(len(turns))
                turns.append(Utterance(f"{id}:{number}", speaker, said, numbers[id], date))
    answers = _field(given, "answer_session_ids", list, where, "a list of ids of sessions")
    for id in answers:
        if _check(id, str, f"{where}: answer_session_ids", "words") not in numbers:
            raise ValueError(f"{where}: answer_session_ids has {id!r}; expected some of the haystack_session_ids")
    if not turns:
        raise ValueError(f"{where} has no turns; expected some in haystack_sessions")
    if name.endswith(ABSTENTION):
        marked, answers = [], []
    asked = Question(_sayable(text), 0, tuple(marked), kind, tuple(sorted({numbers[id] for id in answers})))
    return _conversation(name, turns, [asked], "LongMemEval")


_FORMATS = {"conversation": _locomo, "haystack_sessions": _longmemeval}  # by a key that only this one has


def _read_beam(folder: Path) -> Iterator[Conversation]:
    """The conversations below a folder, each a folder with a chat and probing questions."""
    homes = [
        file.parent.parent for file in folder.rglob(BEAM_QUESTIONS.name) if file.parent.name == BEAM_QUESTIONS.stem
    ]
    if not homes:
        raise ValueError(
            f"{folder} has no {BEAM_QUESTIONS.as_posix()} in it; expected a folder of BEAM, or a file of LoCoMo or "
            "LongMemEval"
        )
    for home in sorted(homes, key=lambda home: [(int(part) if part.isdigit() else 0, part) for part in home.parts]):
        name = home.relative_to(folder).as_posix()
        yield _beam(home, home.resolve().name if name == "." else name)


def _beam(home: Path, name: str) -> Conversation:
    """A chat, a batch of which is a session; an id that two of its messages have names none of them."""
    file = next((home / chat for chat in BEAM_CHATS if (home / chat).is_file()), home / BEAM_CHATS[-1])
    turns: list[Utterance] = []
    places: dict[int, int | None] = {}
    for session, (where, date, messages) in enumerate(_batches(_load(file), str(file)), 1):
        for number, message in enumerate(messages, 1):
            place = f"{where}, message {number}"
            speaker, said = _message(message, place)
            date = _check(message.get("time_anchor") or date, str, f"{place}: time_anchor", "a date")
            id = message.get("id")
            said = _PLAN_MARK.sub("", said).strip()
            if id is not None:
                _check_number(id, f"{place}: id")
                places[id] = None if id in places or not said else len(turns)
            if said:
                turns.append(Utterance(f"{session}:{number}", speaker, said, session, date))
    if not turns:
        raise ValueError(f"{file} has no messages; expected batches of them")
    file = home / BEAM_QUESTIONS
    asked = []
    for kind, questions in _check(
        _load(file), dict, str(file), "an object with a list of questions per ability"
    ).items():
        _check_kind(kind, BEAM_KINDS, f"{file}: an ability")
        for number, given in enumerate(_check(questions, list, f"{file}, {kind}", "a list of questions"), 1):
            where = f"{file}, {kind}, question {number}"
            given = _check(given, dict, where, "an object with a question and source_chat_ids")
            text = _sayable(_field(given, "question", str, where, "words"))
            found = {places.get(id) for id in _flat(given.get("source_chat_ids"), f"{where}: source_chat_ids")}
            evidence = sorted(place for place in found if place is not None)
            asked.append(Question(text, 0, tuple(evidence), kind.replace("_", " "), _sessions_of(evidence, turns)))
    return _conversation(name, turns, asked, "BEAM")


def _batches(chat: Any, where: str) -> Iterator[tuple[str, str, list[Any]]]:
    """Where each batch stands, its date if it has one, and its messages.

    A batch is an object with turns, which are lists of messages; in a chat that was downloaded from the hub it is one
    list of messages. The longest chats are lists of plans, ``{"plan-1": batches}``, where null stands for others.
    """
    for number, batch in enumerate(_check(chat, list, where, "a list of batches"), 1):
        place = f"{where}, batch {number}"
        if isinstance(batch, dict) and batch and all(map(_PLAN.fullmatch, batch)):
            for plan, batches in batch.items():
                if batches is not None:
                    yield from _batches(batches, f"{where}, {plan}")
        elif isinstance(batch, dict):
            groups = _field(batch, "turns", list, place, "a list of turns")
            date = _check(batch.get("time_anchor") or "", str, f"{place}: time_anchor", "a date")
            yield (
                place,
                date,
                [
                    message
                    for turn, group in enumerate(groups, 1)
                    for message in _check(group, list, f"{place}, turn {turn}", "a list of messages")
                ],
            )
        else:
            yield place, "", _check(batch, list, place, "an object with turns, or a list of messages")


def _flat(ids: Any, where: str) -> list[int]:
    """The ids of messages in a list or an object, however nested; words, such as "--", name none."""
    if ids is None or isinstance(ids, str):
        return []
    if isinstance(ids, dict | list):
        each = ids.values() if isinstance(ids, dict) else ids
        return [id for part in each for id in _flat(part, where)]
    return [_check_number(ids, where)]


def _message(given: Any, where: str) -> tuple[str, str]:
    """The role and the words of a message in a chat."""
    given = _check(given, dict, where, "an object with role and content")
    role, said = (_field(given, key, str, where, "words") for key in ("role", "content"))
    if role not in ROLES:
        raise ValueError(f"{where}: role is {_shown(role)}; expected one of {', '.join(ROLES)}")
    return role, _sayable(said)


def _conversation(name: str, turns: list[Utterance], asked: list[Question], benchmark: str) -> Conversation:
    questions = tuple(question for question in asked if question.evidence or question.sessions)
    return Conversation(name, tuple(turns), questions, len(asked) - len(questions), benchmark)


def _sessions_of(evidence: Iterable[int], turns: list[Utterance]) -> tuple[int, ...]:
    return tuple(sorted({turns[place].session for place in evidence}))


def _moment(date: str) -> datetime | None:
    for form in DATES:
        try:
            return datetime.strptime(date, form)
        except ValueError:
            continue
    return None


def _sayable(text: str) -> str:
    return _UNSAYABLE.sub(" ", text)


def _items(file: Path) -> Iterator[tuple[Any, str]]:
    """The items of a file that holds a list, and where each stands; one at a time, since a file may have gigabytes."""
    decode = json.JSONDecoder().raw_decode
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, number = "", 0
    with _reading(file), file.open("rb") as stream:

        def more() -> bool:
            """Reads as much again as is not used up; not at the end of the file."""
            nonlocal text
            block = stream.read(max(STEP, len(text)))
            try:
                text += decoder.decode(block, not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(file, error, stream.tell() - len(error.object)) from error
            return bool(block)

        def peek() -> str:
            nonlocal text
            while not (text := text.lstrip()) and more():
                pass
            return text[:1]

        def take() -> Any:
            nonlocal text
            while True:
                try:
                    value, end = decode(text)
                    text = text[end:]
                    return value
                except json.JSONDecodeError:
                    if not more():
                        raise

        if peek() != "[":
            raise ValueError(f"{file} holds {_shown(take())}; expected a list of conversations")
        text = text[1:]
        while peek() != "]":
            number += 1
            yield take(), f"{file}, conversation {number}"
            if peek() == ",":
                text = text[1:]
                if peek() == "]":
                    take()  # which raises
            elif peek() != "]":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, 0)
        text = text[1:]
        if peek():
            raise json.JSONDecodeError("Extra data", text, 0)
    if not number:
        raise ValueError(f"{file} holds []; expected a list of conversations")


def _load(file: Path) -> Any:
    with _reading(file):
        content = file.read_bytes()
        try:
            return json.loads(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error) from error


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file} cannot be read as JSON: {error.msg}, at {_shown(error.doc[error.pos :][:40])}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error


def _not_utf8(file: Path, error: UnicodeDecodeError, before: int = 0) -> ValueError:
    return ValueError(f"{file} is not UTF-8: byte {before + error.start} is {error.object[error.start]:#04x}")


def _field(given: dict[str, Any], key: str, kind: type, where: str, expected: str) -> Any:
    if key not in given:
        raise ValueError(f"{where} has no {key}; expected {expected}")
    return _check(given[key], kind, f"{where}: {key}", expected)


def _check(value: Any, kind: type, where: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {_shown(value)}; expected {expected}")
    return value


def _check_number(value: Any, where: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{where} is {_shown(value)}; expected a whole number")
    return value


def _check_kind(kind: str, known: tuple[str, ...], where: str) -> None:
    if kind not in known:
        raise ValueError(f"{where} is {_shown(kind)}; expected one of {', '.join(known)}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"
