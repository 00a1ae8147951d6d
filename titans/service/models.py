"""What goes in and comes out of the REST interface; unknown fields are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from titans.text.records import MAX_FOUND, MAX_NAME, Hit, Record, check_name, utc_now
from titans.text.records import Event as RecordEvent

# What check_name and check_text refuse, for the description of the interface: they do the checking.
_CONTROL = r"\x00-\x1f\x7f-\x9f"
_NAME = rf"^[^{_CONTROL}]*[^\s{_CONTROL}][^{_CONTROL}]*$"
_PLAIN = r"[^\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]*"
_TEXT = rf"^{_PLAIN}[^\s{_CONTROL}]{_PLAIN}$"
Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_NAME),
    AfterValidator(lambda value: check_name(value, "the name")),
    Field(json_schema_extra={"pattern": _NAME}),
]
Text = Annotated[str, StringConstraints(min_length=1), Field(json_schema_extra={"pattern": _TEXT})]
# JSON knows one kind of number: 5.0 is a whole one.
Whole = Annotated[int, BeforeValidator(lambda given: int(given) if _is_whole(given) else given)]
ID = "9f1c2d3e4b5a69788796a5b4c3d2e1f0"
MEMORY: dict[str, Any] = {
    "id": ID, "memory": "Ada's piano lesson is on Tuesday at five.", "user_id": "ada", "agent_id": None,
    "run_id": None, "role": "user", "metadata": {"topic": "music"}, "created_at": "2026-01-31T12:00:00.000000+00:00",
    "updated_at": "2026-01-31T12:00:00.000000+00:00", "surprise": 0.62, "version": 1, "uses": 0, "repeats": 0,
    "replaces": None,
}  # fmt: skip


def _given(name: str, kind: str) -> dict[str, Any]:
    """A schema of objects in which a field is not left out."""
    return {"required": [name], "properties": {name: {"type": kind}}}


def _is_whole(given: object) -> bool:
    return isinstance(given, float) and given.is_integer()


class Input(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Scoped(Input):
    """Whose memories: those of a user, and of one agent or one run of that user."""

    user_id: Name | None = Field(None, description="Whose memories; by default the key's user.")
    agent_id: Name | None = Field(None, description="Of this agent; by default of any.")
    run_id: Name | None = Field(None, description="Of this run or session; by default of any.")


class Message(Input):
    """A message of a chat."""

    role: Name
    content: Text


class NewMemories(Scoped):
    """One text, several, or the messages of a chat."""

    text: Text | None = None
    texts: list[Text] | None = Field(None, min_length=1)
    messages: list[Message] | None = Field(None, min_length=1)
    metadata: dict[str, Any] | None = Field(None, description="Kept with every text.")
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"text": MEMORY["memory"], "user_id": "ada", "metadata": MEMORY["metadata"]},
                {"messages": [{"role": "user", "content": "My name is Ada."}], "user_id": "ada", "run_id": "monday"},
            ],
            "oneOf": [_given("text", "string"), _given("texts", "array"), _given("messages", "array")],
        }
    )

    @model_validator(mode="after")
    def _one_kind(self) -> NewMemories:
        if [self.text, self.texts, self.messages].count(None) != 2:
            raise ValueError("expected one of text, texts and messages")
        return self

    @property
    def said(self) -> list[tuple[str, str | None]]:
        """Each text with the role of who said it."""
        if self.messages is not None:
            return [(message.content, message.role) for message in self.messages]
        return [(text, None) for text in (self.texts or [self.text or ""])]


class Query(Scoped):
    """A question to the memory."""

    query: Text
    filters: dict[str, Any] | None = Field(
        None, description='On metadata: {"topic": "food"}, {"topic": ["food", "drink"]} or {"year": {"gte": 2020}}.'
    )
    limit: Whole = Field(10, ge=1, le=MAX_FOUND, description="The largest number of results.")
    threshold: float | None = Field(
        None, ge=-1, le=1, allow_inf_nan=False, description="Results whose cosine is lower are left out and counted."
    )
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "When is the piano lesson?", "user_id": "ada", "limit": 5}]}
    )


class Update(Input):
    """What to change of a memory."""

    text: Text | None = Field(None, description="The new text; by default it stays.")
    metadata: dict[str, Any] | None = Field(None, description="The new metadata; by default they stay.")
    keep_old: bool = Field(False, description="Keep the old text in the history instead of erasing it.")
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"text": "Ada's piano lesson is on Friday at five."}],
            "anyOf": [_given("text", "string"), _given("metadata", "object")],
        }
    )

    @model_validator(mode="after")
    def _something(self) -> Update:
        if self.text is None and self.metadata is None:
            raise ValueError("expected a text or metadata to change")
        return self


class Statement(Scoped):
    """A text that is not written."""

    text: Text
    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "The lesson was moved.", "user_id": "ada"}]})


class Selection(Scoped):
    """What to export; without names, all that the caller may read."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"user_id": "ada"}]})


class Parameters(BaseModel):
    """What a client sends in the query of a URL."""

    model_config = ConfigDict(extra="forbid")


class Owner(Parameters):
    """Whose memory it is."""

    user_id: Name | None = Field(None, description="Whose memory; by default the key's user.")


class ScopeParameters(Owner):
    """Whose memories."""

    agent_id: Name | None = Field(None, description="Of this agent; by default of any.")
    run_id: Name | None = Field(None, description="Of this run or session; by default of any.")


class PageParameters(ScopeParameters):
    """A page of the memories of a scope."""

    filters: str | None = Field(
        None, description='On metadata, as JSON: {"topic": "food"}.', examples=['{"year": 2026}']
    )
    limit: int = Field(100, ge=1, le=MAX_FOUND, description="The largest number of results.")
    cursor: str | None = Field(None, description="The `next` of the page before.", pattern="^[0-9]{1,19}$")


class ErasedScope(ScopeParameters):
    """The memories to erase: those of exactly these names."""

    below: bool = Field(False, description="Those of every agent and run that is not named, too.")


class MemoryOut(BaseModel):
    """A text that was remembered."""

    id: str
    memory: str = Field(description="The text.")
    user_id: str
    agent_id: str | None
    run_id: str | None
    role: str | None
    metadata: dict[str, Any]
    created_at: str
    updated_at: str
    surprise: float = Field(description="Loss of the scope's memory on this text before it was written.")
    version: int
    uses: int
    repeats: int = Field(description="How often the same was told again.")
    replaces: str | None = Field(description="Id of the older memory that this one is a newer version of.")
    model_config = ConfigDict(json_schema_extra={"examples": [MEMORY]})


class Written(MemoryOut):
    """A text that was written: a new one, or one that was known already."""

    event: Literal["ADD", "REPEAT"]


class WrittenList(BaseModel):
    """What was written, in the order of the texts."""

    results: list[Written]


class MemoryPage(BaseModel):
    """Memories, newest first."""

    results: list[MemoryOut]
    next: str | None = Field(description="The cursor of the next page; null after the last.")


class Parts(BaseModel):
    """Why a memory was found: the value and the rank, from 1, of each signal that named it."""

    cosine: float
    cosine_rank: int | None
    bm25: float | None
    bm25_rank: int | None
    neural: float | None
    neural_rank: int | None


class FoundMemory(MemoryOut):
    """A memory that was found."""

    score: float
    parts: Parts
    replaced_by: str | None = Field(description="Id of the memory that says the same with a newer value.")


class FoundList(BaseModel):
    """What was found, best first."""

    results: list[FoundMemory]
    below: int = Field(description="How many were left out because their cosine was below the threshold.")
    ignored: list[str] = Field(description="Words of the question that too many memories have to look them up.")


class Event(BaseModel):
    """What happened to a memory."""

    id: str
    event: str = Field(description="ADD, REPEAT, UPDATE, DELETE or EVICT.", examples=["UPDATE"])
    at: str
    version: int
    memory: str | None = Field(description="The text; null once it has been erased.")
    metadata: dict[str, Any] | None


class History(BaseModel):
    """What happened to a memory and to those that it replaced, oldest first."""

    results: list[Event]


class Deleted(BaseModel):
    """How many memories were erased."""

    deleted: int


class Imported(BaseModel):
    """How many memories were added; those that were there already are not."""

    imported: int


class SurpriseParts(BaseModel):
    """How a text differs from what a scope was told; every part is 0 for what is nothing new."""

    loss: float = Field(description="What the scope's memory does not expect, 0 to 4.")
    drift: float = Field(description="High where the topic changes.")
    novelty: float = Field(description="High for what was never talked about.")
    contradiction: float = Field(description="How sure it is that a statement has another value now, 0 to 1.")
    contradicts: str | None = Field(description="Id of the memory with that statement.")


class Layer(BaseModel):
    """A layer of a scope's neural memory: Frobenius norms after all texts."""

    shape: list[int]
    norm: float = Field(description="Of the weights.")
    learned: float = Field(description="Of what the texts changed of them.")
    momentum: float


class NeuralState(BaseModel):
    """The neural memory of a scope, and the rule by which it learns."""

    texts: int = Field(description="Written to it, in all.")
    open: int = Field(description="Those of them in the chunk that is not full yet.")
    chunk_size: int
    theta: float = Field(description="The step; where it starts, if it is learned.")
    eta: float = Field(description="The momentum.")
    alpha: float = Field(description="The forgetting.")
    layers: list[Layer]


class ScopeCount(BaseModel):
    """How many memories a scope has."""

    user_id: str
    agent_id: str | None
    run_id: str | None
    records: int


class Stats(BaseModel):
    """Figures of the store, or of one user or agent in it; null: of no meaning there."""

    records: int
    scopes: int
    by_scope: list[ScopeCount]
    text_bytes: int | None = None
    mean_surprise: float | None = None
    oldest: str | None = None
    newest: str | None = None
    users: int | None = None
    bytes: int | None = None
    encoder: str | None = None
    neural: str | None = None
    width: int | None = None
    limit: int | None = None


class Status(BaseModel):
    """Whether the server can do its work."""

    status: Literal["ok"]


def memory_of(record: Record) -> dict[str, Any]:
    """A record as clients know it."""
    given = record.to_dict()
    names = {"memory": "text", "user_id": "user", "agent_id": "agent", "run_id": "session",
             "created_at": "created", "updated_at": "updated"}  # fmt: skip
    return {name: given[names.get(name, name)] for name in MemoryOut.model_fields}


def found_of(hit: Hit) -> dict[str, Any]:
    """A hit as clients know it."""
    parts = {name: getattr(hit, name) for name in Parts.model_fields}
    return {**memory_of(hit.record), "score": hit.score, "parts": parts, "replaced_by": hit.replaced_by}


def event_of(event: RecordEvent) -> dict[str, Any]:
    """A line of a record's history as clients know it."""
    return {
        "id": event.id, "event": event.kind.upper(), "at": event.at, "version": event.version, "memory": event.text,
        "metadata": event.metadata,
    }  # fmt: skip


def written_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Records as :meth:`titans.text.Memory.add_many` returns them, each with whether it is new or was known already."""
    left = Counter(record.id for record in records)
    results = []
    for record in records:
        # A new record that the same call repeats was told once for each of its other places, and not before.
        event = "REPEAT" if record.repeats >= left[record.id] else "ADD"
        left[record.id] = 0
        results.append({**memory_of(record), "event": event})
    return results


def as_sent(written: Mapping[str, Any]) -> dict[str, Any]:
    """What was written, for a key that may not read: as if nothing had been there before."""
    now = utc_now()
    unknown = {"surprise": 0.0, "version": 1, "uses": 0, "repeats": 0, "replaces": None}
    return {**written, **unknown, "created_at": now, "updated_at": now}
