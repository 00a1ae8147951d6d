"""What a text memory holds and finds, and the checks of its input."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

MAX_TEXT = 1_000_000  # bytes of a text
MAX_METADATA = 65_536  # bytes of a record's metadata, as JSON
MAX_NESTING = 32  # lists and objects of metadata in each other
MAX_NAME = 200  # characters of a user, agent, session, role or id
MAX_FOUND = 1_000  # records of one search
MAX_NUMBER = 2**63 - 1  # of a whole number, as databases have them
MAX_COUNT = 2**53  # of something that is counted further
ANY_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
CONTROLS = re.compile(r"(?![\t\n\r\v\f\x85])[\x00-\x1f\x7f-\x9f]")  # not allowed in a text
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # not allowed in metadata
COMPARISONS = ("ne", "gt", "gte", "lt", "lte", "in")
VALUES = "texts without U+0000, booleans, and finite numbers of at most 64 bits"  # of metadata and filters


class StoreError(ValueError):
    """What is wrong with a store, or with what was asked of it, in one sentence."""


class DamagedStore(StoreError):
    """The store's file cannot be read as it should; what is left can be salvaged into a new one."""


class OtherEncoder(StoreError):
    """The store's vectors or memory states were made by another encoder or by other projections."""


class UnknownRecord(StoreError):
    """No record has that id, or none of that user."""


class BusyStore(StoreError):
    """Others have been writing for too long, or the server does not answer: it may do so later."""


class FullStore(StoreError):
    """There is no space left to write to."""


class ReadOnlyStore(StoreError):
    """Nothing can be written to the store."""


class UsedRequest(StoreError):
    """A request has the key of another one, or of one whose records were erased since."""


@dataclass(frozen=True)
class Scope:
    """Whose memory it is: exactly this user, agent and session; no agent is a scope of its own, not "any agent"."""

    user: str = "default"
    agent: str | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        check_name(self.user, "user")
        for name in ("agent", "session"):
            if getattr(self, name) is not None:
                check_name(getattr(self, name), name)

    @property
    def names(self) -> tuple[str, str, str]:
        """User, agent and session, an empty name for none: several scopes are locked in the order of these."""
        return self.user, self.agent or "", self.session or ""

    def covers(self, other: Scope) -> bool:
        """Whether ``other`` is this scope or below it: no agent, or no session, stands for any."""
        return other.user == self.user and self.agent in (None, other.agent) and self.session in (None, other.session)

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, name)!r}" for name in ("user", "agent", "session") if getattr(self, name))
        return ", ".join(parts)


@dataclass(frozen=True)
class Record:
    """A text that was remembered.

    Attributes:
        created: UTC, ISO 8601 with microseconds, as ``updated``.
        surprise: the loss of the scope's memory on this text, before it was written.
        version: 1, and one more with every update.
        uses: how often a search has returned it, as of the last write.
        repeats: how often the same was told again; ``updated`` is then the last time.
        replaces: the id of the older record that says the same with another value, or in other words.
    """

    id: str
    text: str
    user: str = "default"
    agent: str | None = None
    session: str | None = None
    role: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    created: str = ""
    updated: str = ""
    surprise: float = 0.0
    version: int = 1
    uses: int = 0
    repeats: int = 0
    replaces: str | None = None

    @property
    def said(self) -> tuple[str, str | None, str]:
        """What a repeat has in common with it: text, role and metadata, whatever the order of its keys."""
        return self.text, self.role, json.dumps(self.metadata, sort_keys=True)

    @property
    def scope(self) -> Scope:
        """The exact user, agent and session."""
        return Scope(self.user, self.agent, self.session)

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Record:
        """A checked record from its fields; only ``text`` is required."""
        if not isinstance(given, Mapping):
            raise ValueError(f"a record is a {type(given).__name__}; expected an object with a text")
        unknown = sorted(set(given) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(f"a record has the unknown field {unknown[0]!r}; expected those of an export")
        if "text" not in given:
            raise ValueError("a record has no text")
        created = check_time(_default(given.get("created"), utc_now()), "created")
        record = cls(
            id=check_name(_default(given.get("id"), new_id()), "id"),
            text=check_text(given["text"]),
            user=_default(given.get("user"), "default"),
            agent=given.get("agent"),
            session=given.get("session"),
            role=check_role(given.get("role")),
            metadata=check_metadata(given.get("metadata")),
            created=created,
            updated=check_time(_default(given.get("updated"), created), "updated"),
            version=check_count(given.get("version", 1), "version", 1, MAX_COUNT),
            uses=check_count(given.get("uses", 0), "uses", 0, MAX_COUNT),
            repeats=check_count(given.get("repeats", 0), "repeats", 0, MAX_COUNT),
            replaces=None if given.get("replaces") is None else check_name(given["replaces"], "replaces"),
        )
        Scope(record.user, record.agent, record.session)
        return record


@dataclass(frozen=True)
class Hit:
    """A record that was found, and why: its rank (from 1) and value for each signal that named it.

    Attributes:
        score: 1 if every signal ranked it first, closer to 0 the lower it was ranked.
        cosine: of the question's vector and the text's.
        bm25: how well the words match; None if the words did not name it.
        neural: how well it matches, with the text before it, what the memory of its scope does not expect of the
            question; None if the memory did not name it.
        surprise: of the record when it was written.
        age: seconds since it was created.
        replaced_by: the id of the record that says the same with a newer value.
    """

    record: Record
    score: float
    cosine: float
    cosine_rank: int | None = None
    bm25: float | None = None
    bm25_rank: int | None = None
    neural: float | None = None
    neural_rank: int | None = None
    surprise: float = 0.0
    age: float = 0.0
    replaced_by: str | None = None


@dataclass(frozen=True)
class Found:
    """What a search found, best first.

    Attributes:
        below: how many candidates were left out because their cosine was below the threshold.
        threshold: what was asked for.
        note: a sentence if nothing could be found, such as that the scope is unknown.
        ignored: words of the question that too many records have to look them up; the meaning still has them.
    """

    hits: list[Hit]
    below: int = 0
    threshold: float | None = None
    note: str | None = None
    ignored: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def __bool__(self) -> bool:
        return bool(self.hits)


@dataclass(frozen=True)
class Event:
    """A line of a record's history; the text is None once it has been erased."""

    kind: str  # "add", "repeat", "update", "delete" or "evict"
    id: str
    at: str
    version: int
    text: str | None
    metadata: dict[str, Any] | None


def read_records(path: Path) -> Iterator[tuple[int, Record, bool]]:
    """The records of a file of JSON lines, as :func:`parse_records` gives them."""
    with path.open("rb") as stream:
        yield from parse_records(stream, str(path))


def parse_records(
    lines: Iterable[bytes], source: str, defaults: Mapping[str, Any] | None = None
) -> Iterator[tuple[int, Record, bool]]:
    """The records of JSON lines: the line's number, the record, and whether the line had its id.

    A ``ValueError`` names the source and the line that is wrong. What a line does not have is taken from ``defaults``.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line.decode("utf-8"))
            if defaults and isinstance(given, dict):
                given |= {name: value for name, value in defaults.items() if given.get(name) is None}
            record = Record.from_dict(given)
        except UnicodeDecodeError:
            raise ValueError(f"{source}, line {number} is not valid UTF-8") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}, line {number} cannot be read as JSON: {error}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
        if record.id in seen:
            raise ValueError(f"{source}, line {number}: the id {record.id!r} is used twice")
        seen.add(record.id)
        yield number, record, given.get("id") is not None


def new_id() -> str:
    """32 hexadecimal digits that nobody can guess."""
    return uuid.uuid4().hex


def utc_now() -> str:
    """The time as it is written in records."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def check_text(text: object, name: str = "text") -> str:
    """The text, if it can be kept: not empty, not enormous, valid Unicode, no control characters.

    Tabs, line breaks and form feeds are allowed. Other control characters are refused rather than removed: what is
    stored is what was said, and what is shown on a terminal cannot steer it.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}; expected a text")
    if not text.strip():
        raise ValueError(f"{name} is empty; expected a text")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid UTF-8 at character {error.start}; expected Unicode text") from None
    if size > MAX_TEXT:
        raise ValueError(f"{name} has {size:,} bytes; expected at most {MAX_TEXT:,}, so cut it into parts")
    _refuse(CONTROLS, text, name)
    return text


def check_name(value: object, name: str) -> str:
    """The name of a user, agent, session, role or record, if it is valid."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is of type {type(value).__name__}; expected a name")
    if not value.strip() or len(value) > MAX_NAME:
        raise ValueError(f"{name} has {len(value)} characters; expected a name of 1 to {MAX_NAME}")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{name} is not valid UTF-8; expected Unicode text")
    _refuse(ANY_CONTROLS, value, name)
    return value


def check_role(role: object) -> str | None:
    """Who said it, such as ``"user"``; None if nobody says."""
    return None if role is None else check_name(role, "role")


def check_metadata(metadata: object) -> dict[str, Any]:
    """The metadata as JSON will return them; None: there are none."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise ValueError(f"metadata is {_shown(metadata)}; expected an object whose keys are texts")
    try:
        text = json.dumps(dict(metadata), allow_nan=False, ensure_ascii=False)
        size = len(text.encode("utf-8"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata cannot be written as JSON: {error}") from None
    if size > MAX_METADATA:
        raise ValueError(f"metadata has {size:,} bytes as JSON; expected at most {MAX_METADATA:,}")
    made: dict[str, Any] = json.loads(text)
    if _nesting(made) > MAX_NESTING:
        raise ValueError(f"metadata has more than {MAX_NESTING} lists and objects in each other; expected fewer")
    for value in _scalars(made):
        if value is not None and not _is_scalar(value):
            raise ValueError(f"metadata has the value {_shown(value)}; expected {VALUES}")
    return made


def check_filters(filters: object) -> dict[str, dict[str, Any]]:
    """Filters as ``{key: {comparison: value}}``.

    ``{"topic": "food"}`` asks for equality, ``{"topic": ["food", "drink"]}`` for one of several, and
    ``{"year": {"gte": 2020, "lt": 2024}}`` compares; ``ne``, ``gt``, ``gte``, ``lt``, ``lte`` and ``in`` are known.
    A record that has no such key is never found.
    """
    if filters is None:
        return {}
    if not isinstance(filters, Mapping) or not all(isinstance(key, str) for key in filters):
        raise ValueError(f"filters is {_shown(filters)}; expected an object whose keys are texts")
    made: dict[str, dict[str, Any]] = {}
    for key, wanted in filters.items():
        check_name(key, "a filter's key")
        if isinstance(wanted, Mapping):
            tests = dict(wanted)
            if not tests or not set(tests) <= set(COMPARISONS):
                raise ValueError(f"filters[{key!r}] is {_shown(wanted)}; expected {', '.join(COMPARISONS)} and values")
        else:
            tests = {"in": list(wanted)} if isinstance(wanted, (list, tuple, set)) else {"eq": wanted}
        for name, value in tests.items():
            values = value if name == "in" else [value]
            if not isinstance(values, Sequence) or isinstance(values, str) or not all(map(_is_scalar, values)):
                raise ValueError(f"filters[{key!r}] compares with {_shown(value)}; expected {VALUES}")
        made[key] = tests
    return made


def check_time(value: object, name: str) -> str:
    """A time as it is written in records, from a datetime or ISO 8601; without a zone it is UTC."""
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        moment = moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):  # in UTC it may be after the last year, or before the first
        raise ValueError(f"{name} is {_shown(value)}; expected a time such as 2026-01-31T12:00:00+00:00") from None
    return moment.isoformat(timespec="microseconds")


def check_count(value: object, name: str, least: int, most: int = MAX_NUMBER) -> int:
    """A whole number between ``least`` and ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return int(value)
    bounds = f"at least {least} and below 2^63" if most == MAX_NUMBER else f"{least} to {most:,}"
    raise ValueError(f"{name} is {_shown(value)}; expected a whole number, {bounds}")


def check_threshold(value: object) -> float | None:
    """A cosine, or None for no threshold."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:
        raise ValueError(f"threshold is {_shown(value)}; expected a cosine between -1 and 1")
    return float(value)


def _refuse(controls: re.Pattern[str], text: str, name: str) -> None:
    found = controls.search(text)
    if found:
        raise ValueError(
            f"{name} has the control character U+{ord(found[0]):04X} at character {found.start()}; "
            "expected text without any"
        )


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _scalars(value: object) -> Iterator[object]:
    """Every key, text and number in a JSON value."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list):
            left += each
        else:
            yield each


def _nesting(value: object) -> int:
    """How many lists and objects are in each other."""
    layer, depth = [value], 0
    while layer := [each for each in layer if isinstance(each, (dict, list))]:
        layer = [inner for each in layer for inner in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


def _is_scalar(value: object) -> bool:
    if isinstance(value, str):
        return not UNUSABLE.search(value)
    if isinstance(value, int):  # a boolean, too
        return -MAX_NUMBER - 1 <= value <= MAX_NUMBER
    return isinstance(value, float) and math.isfinite(value)


def _shown(value: object) -> str:
    try:
        shown = ascii(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number of too many digits"
    return shown if len(shown) <= 60 else shown[:57] + "..."
