"""A conversation with a language model that remembers: search, store, ask, store the answer."""

from __future__ import annotations

import unicodedata
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from titans.text.llm import LLM
from titans.text.memory import Memory
from titans.text.prompt import Message, Prompt, build_prompt
from titans.text.records import Found, Record, Scope

CANDIDATES = 20  # memories that are searched for; the budget says how many are shown


@dataclass
class Turn:
    """A message, what was recalled for it, and the answer.

    Attributes:
        message: as it was stored, with its surprise.
        found: what was recalled, best first.
        prompt: what the model was shown; None if it could not be made.
        answer: as it was stored; None if there was none.
    """

    message: Record
    found: Found
    prompt: Prompt | None = None
    answer: Record | None = None


class Conversation:
    """A conversation in one scope of a memory.

    Args:
        memory: where everything that is said is kept and found again.
        llm: the model that answers.
        scope: where memories are searched, and where what is said is written.
        budget: tokens of a prompt that memories may take.
        system: the persistent text; None: the one that suits the model.
        max_tokens: of an answer.
        temperature: None: the model's default.
        threshold: memories whose cosine with the message is lower are not recalled, but counted.

    Attributes:
        last: the last turn; None before the first.
    """

    def __init__(
        self,
        memory: Memory,
        llm: LLM,
        scope: Scope = Scope(),  # noqa: B008 (frozen)
        budget: int = 512,
        system: str | None = None,
        max_tokens: int = 256,
        temperature: float | None = None,
        threshold: float | None = None,
    ) -> None:
        for name, value, least in (("budget", budget, 0), ("max_tokens", max_tokens, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}; expected a whole number of at least {least}")
        if max_tokens >= llm.context:
            raise ValueError(f"max_tokens is {max_tokens}; expected less than {llm.context}, the context of {llm.name}")
        self.memory = memory
        self.llm = llm
        self.scope = scope
        self.budget = budget
        self.system = system
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.threshold = threshold
        self.last: Turn | None = None
        self._said: list[Record] = []  # messages and answers of this conversation, alternating

    @property
    def history(self) -> list[Message]:
        """What was said in this conversation, oldest first."""
        return [{"role": record.role or "user", "content": record.text} for record in self._said]

    def turn(self, message: str) -> Generator[str, None, None]:
        """Sends a message; returns the answer, piece by piece.

        The message is stored before this returns and before the model is asked, so that it is not lost if that fails.
        When the generator ends or is closed, the answer up to that point is stored.

        Raises:
            ValueError: the message cannot be stored, or is too long for the model.
            LLMError: from the generator: the model does not answer.
        """
        found = self.memory.search(
            message, **asdict(self.scope), limit=CANDIDATES, threshold=self.threshold, count_uses=False
        )
        self.last = turn = Turn(self._store(message, "user"), found)
        turn.prompt = build_prompt(
            message, found.hits, count_tokens=self.llm.count_tokens, system=self.system, history=self.history,
            budget=self.budget, room=self.llm.context - self.max_tokens, layout=self.llm.layout,
            specials=self.llm.specials,
        )  # fmt: skip
        self.memory.use([hit.record.id for hit in turn.prompt.used], user=self.scope.user)
        return self._answer(turn, turn.prompt)

    def _answer(self, turn: Turn, prompt: Prompt) -> Generator[str, None, None]:
        pieces: list[str] = []
        whole = False
        with closing(self.llm.stream(prompt.messages, self.max_tokens, self.temperature)) as stream:
            try:
                for piece in map(printable, stream):
                    pieces.append(piece)
                    yield piece
                whole = True
            finally:
                self._keep(turn, "".join(pieces), whole)

    def _keep(self, turn: Turn, answer: str, whole: bool) -> None:
        if not self.llm.answers or not answer.strip():
            return
        turn.answer = self._store(answer.strip(), "assistant", None if whole else {"stopped": True})
        self._said += [turn.message, turn.answer]

    def _store(self, text: str, role: str, metadata: dict[str, Any] | None = None) -> Record:
        return self.memory.add(text, **asdict(self.scope), role=role, metadata=metadata)

    def forget(self, id: str) -> None:
        """Erases a record of this scope from the memory, and its exchange from this conversation."""
        record = self.memory.get(id, user=self.scope.user)
        if record is None or not self.scope.covers(record.scope):
            raise ValueError(f"there is no record {id!r} of {self.scope}")
        self.memory.delete(id, user=self.scope.user)
        pairs = zip(self._said[::2], self._said[1::2], strict=True)
        self._said = [said for pair in pairs if id not in (pair[0].id, pair[1].id) for said in pair]
        self.last = None  # it may hold the text

    def forget_all(self) -> int:
        """Erases every record of exactly this scope, and this conversation; returns how many records there were.

        What was said to other agents or in other sessions of the user stays, even if this scope covers it.
        """
        count = self.memory.delete_all(**asdict(self.scope))
        self._said, self.last = [], None
        return count


def printable(text: str) -> str:
    """A text without control characters, which could steer a terminal and cannot be stored."""
    return "".join(each for each in text if each in "\n\t" or unicodedata.category(each) not in ("Cc", "Cs"))
