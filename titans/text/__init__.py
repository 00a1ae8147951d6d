"""A text memory for any LLM: it remembers across runs, finds again, and says what surprised it."""

from __future__ import annotations

from titans.text.async_memory import AsyncMemory
from titans.text.chat import Conversation
from titans.text.encoder import TextEncoder
from titans.text.llm import LLM, LLMError, make_llm
from titans.text.memory import Memory
from titans.text.neural import NeuralConfig, NeuralTextMemory
from titans.text.prompt import build_prompt
from titans.text.ranking import Eviction, Ranking
from titans.text.records import Found, Hit, Record, Scope, StoreError

__all__ = [
    "LLM", "AsyncMemory", "Conversation", "Eviction", "Found", "Hit", "LLMError", "Memory", "NeuralConfig",
    "NeuralTextMemory", "Ranking", "Record", "Scope", "StoreError", "TextEncoder", "build_prompt", "make_llm",
]  # fmt: skip
