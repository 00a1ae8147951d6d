"""The local language model in the shapes of OpenAI's chat endpoint, for a server without an upstream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
from anyio.to_thread import run_sync

from titans.service.problems import Problem
from titans.text.llm import LLM, LLMError, make_llm
from titans.text.prompt import Message
from titans.text.records import check_count

ANSWER_TOKENS = 256  # of an answer, if the request does not say
HOTTEST = 2.0  # temperature
TEXT_ONLY = "the local model takes texts only; expected no {}, or a server with --upstream"


class Asked(NamedTuple):
    """What a request asks of the local model; other fields are ignored."""

    max_tokens: int
    temperature: float | None
    seed: int
    stream: bool
    with_usage: bool


class LocalModel:
    """The model of this process: loaded when it is first asked, for one answer at a time."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._loading, self._answering = anyio.Lock(), anyio.Lock()

    async def load(self) -> LLM:
        """The model itself."""
        async with self._loading:
            if self._llm is None:
                try:
                    self._llm = await run_sync(make_llm, "local")
                except LLMError as error:
                    raise Problem(503, f"there is no upstream, and {error}") from error
            return self._llm

    def close(self) -> None:
        """Frees the model."""
        if self._llm is not None:
            self._llm.close()

    async def answer(self, messages: Sequence[Message], asked: Asked) -> AsyncGenerator[bytes, None]:
        """The answer to a prompt: the events of a stream, or one JSON document."""
        llm = await self.load()
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": llm.name}
        said: list[str] = []
        async with self._answering:
            pieces = llm.stream(messages, asked.max_tokens, asked.temperature, asked.seed)
            try:
                if asked.stream:
                    yield _chunk(head, {"role": "assistant", "content": ""})
                while (piece := await run_sync(next, pieces, None)) is not None:
                    said.append(piece)
                    if asked.stream:
                        yield _chunk(head, {"content": piece})
            except LLMError as error:
                raise Problem(502, str(error)) from error
            finally:
                pieces.close()
        usage = await run_sync(_count, llm, messages, "".join(said))
        reason = "stop" if usage["completion_tokens"] < asked.max_tokens else "length"
        if not asked.stream:
            message = {"role": "assistant", "content": "".join(said)}
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            yield json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
            return
        yield _chunk(head, {}, reason)
        if asked.with_usage:
            yield _event({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def read_request(body: Mapping[str, Any], context: int) -> Asked:
    """What a request asks for, of a model that has so many tokens for prompt and answer."""
    if body.get("tools") or body.get("functions"):
        raise Problem(400, TEXT_ONLY.format("tools"))
    most = body.get("max_completion_tokens") or body.get("max_tokens") or ANSWER_TOKENS
    temperature = body.get("temperature")
    if temperature is not None and (
        isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature <= HOTTEST
    ):
        raise Problem(400, f"temperature is {str(temperature)[:20]!a}; expected a number from 0 to {HOTTEST:g}")
    options = body.get("stream_options")
    return Asked(
        # Clients ask for thousands, which would leave no room for a prompt.
        min(check_count(most, "max_tokens", 1), context // 2),
        temperature,
        check_count(body.get("seed") or 0, "seed", 0, 2**32 - 1),
        bool(body.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
    )


def list_models(llm: LLM) -> dict[str, Any]:
    """The only model there is."""
    return {"object": "list", "data": [{"id": llm.name, "object": "model", "created": 0, "owned_by": "local"}]}


def _count(llm: LLM, messages: Sequence[Message], answer: str) -> dict[str, int]:
    prompt, completion = sum(llm.count_tokens(item["content"]) for item in messages), llm.count_tokens(answer)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _chunk(head: Mapping[str, Any], delta: Mapping[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return _event({**head, "object": "chat.completion.chunk", "choices": [choice]})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
