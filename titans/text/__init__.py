"""A text memory for any LLM: it remembers across runs, finds again, and says what surprised it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans.text.async_memory import AsyncMemory
    from titans.text.chat import Conversation
    from titans.text.encoder import TextEncoder
    from titans.text.llm import LLM, LLMError, make_llm
    from titans.text.memory import Memory
    from titans.text.neural import NeuralConfig, NeuralTextMemory
    from titans.text.prompt import build_prompt
    from titans.text.ranking import Eviction, Ranking
    from titans.text.records import Found, Hit, Record, Scope, StoreError

_HOME = {
    "LLM": "llm", "AsyncMemory": "async_memory", "Conversation": "chat", "Eviction": "ranking", "Found": "records",
    "Hit": "records", "LLMError": "llm", "Memory": "memory", "NeuralConfig": "neural", "NeuralTextMemory": "neural",
    "Ranking": "ranking", "Record": "records", "Scope": "records", "StoreError": "records", "TextEncoder": "encoder",
    "build_prompt": "prompt", "make_llm": "llm",
}  # fmt: skip
__all__ = [
    "LLM", "AsyncMemory", "Conversation", "Eviction", "Found", "Hit", "LLMError", "Memory", "NeuralConfig",
    "NeuralTextMemory", "Ranking", "Record", "Scope", "StoreError", "TextEncoder", "build_prompt", "make_llm",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads torch only when a name that needs it is asked for: a client of a server needs the records alone."""
    if name in _HOME:
        return getattr(import_module(f"titans.text.{_HOME[name]}"), name)
    raise AttributeError(f"module 'titans.text' has no attribute {name!r}")
