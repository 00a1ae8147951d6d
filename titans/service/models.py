"""What goes in and comes out of the REST interface; unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from titans.text.records import MAX_FOUND, MAX_NAME, Hit, Record

Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, StringConstraints(min_length=1)]
ID = "9f1c2d3e4b5a69788796a5b4c3d2e1f0"
MEMORY: dict[str, Any] = {
    "id": ID, "memory": "Ada's piano lesson is on Tuesday at five.", "user_id": "ada", "agent_id": None,
    "run_id": None, "role": "user", "metadata": {"topic": "music"}, "created_at": "2026-01-31T12:00:00.000000+00:00",
    "updated_at": "2026-01-31T12:00:00.000000+00:00", "surprise": 0.62, "version": 1, "uses": 0, "repeats": 0,
    "replaces": None,
}  # fmt: skip


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
            ]
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
    limit: int = Field(10, ge=1, le=MAX_FOUND, description="The largest number of results.")
    threshold: float | None = Field(
        None, ge=-1, le=1, allow_inf_nan=False, description="Results whose cosine is lower are left out and counted."
    )
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "When is the piano lesson?", "user_id": "ada", "limit": 5}]}
    )


class Listed(Scoped):
    """A page of the memories of a scope."""

    limit: int = Field(100, ge=1, le=MAX_FOUND)
    model_config = ConfigDict(extra="forbid", strict=False)


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
