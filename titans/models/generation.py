"""Reading a text of any length and going on with it, in memory that does not grow with what was read."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from titans.models.cache import TitansCache
from titans.models.configuration import TitansConfig
from titans.models.loading import bytes_for, load_model
from titans.models.text import TextStream, encode, encode_blocks, opening

PIECE = 2048  # tokens of a call at most


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: below 1: likely tokens become likelier.
        top_k: choose among so many of the likeliest tokens; None: all.
        top_p: choose among the likeliest tokens that have this probability together; None: all.
        greedy: always the likeliest; the three above do not matter.
        repetition_penalty: above 1: the tokens of prompt and answer become less likely.
        seed: the same one makes the same choices.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                hint = ", or greedy choice" if name == "temperature" else ""
                raise ValueError(f"{name} is {value}; expected a positive number{hint}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; expected a whole number of at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected a number in (0, 1]")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; expected a whole number from 0 to 2**63 - 1")

    def processors(self) -> LogitsProcessorList:
        """What transformers does to the logits for it, in the order that ``generate`` does it."""
        made = LogitsProcessorList()
        if self.repetition_penalty != 1:
            made.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if not self.greedy:
            if self.temperature != 1:
                made.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k is not None:
                made.append(TopKLogitsWarper(self.top_k))
            if self.top_p is not None and self.top_p < 1:
                made.append(TopPLogitsWarper(self.top_p))
        return made


class Reader:
    """A model that reads tokens piece by piece, and writes what follows.

    ``generate`` of transformers wants all the tokens that a cache has seen, or a mask as long as they are; this needs
    neither, and can go on without a prompt.

    Args:
        model: ours, or a causal language model of transformers.
        cache: what went before, changed by reading on; None: nothing did.

    Attributes:
        logits: (1, vocabulary), of the next token; None before the first call.
        unread: the token that was written last, which the next call reads first.
    """

    def __init__(self, model: PreTrainedModel, cache: Any = None) -> None:
        names = inspect.signature(model.forward).parameters
        ours = isinstance(model.config, TitansConfig)
        self.model = model
        self.cache = cache
        self.logits: Tensor | None = None
        self.unread: list[int] = []
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._longest: int | None = None if ours else getattr(model.config, "max_position_embeddings", None)
        self._seen = 0
        self.grows = not ours and self._cache_name == "past_key_values"  # with every token, as a transformer's does

    @torch.no_grad()
    def read(self, ids: Iterable[int], piece: int = PIECE, on_piece: Callable[[int], None] | None = None) -> int:
        """Reads tokens, ``piece`` at a time, and returns how many there were; ``on_piece`` is told as they are read."""
        count = 0
        rest = chain(self.unread, ids)
        while part := list(islice(rest, piece)):
            self.check(part)
            batch = torch.tensor([part], device=self.model.device)
            output = self.model(batch, use_cache=True, **{self._cache_name: self.cache}, **self._options)
            self.cache = output[self._cache_name]
            self.logits = output.logits[:, -1]
            self.unread = []
            self._seen += len(part)
            count += len(part)
            if on_piece is not None:
                on_piece(count)
        return count

    def check(self, ids: Sequence[int]) -> None:
        """Raises a ``ValueError`` if the model cannot read these tokens next."""
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"the text has the token {low if low < 0 else high} and the vocabulary of the model has "
                f"{self.vocab_size}; expected a tokenizer that fits the model"
            )
        if self._longest is not None and self._seen + len(ids) > self._longest:
            raise ValueError(f"the text is too long for the model; expected at most {self._longest:,} tokens")

    @torch.no_grad()
    def write(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        ends: Collection[int] = (),
        known: int | None = None,
    ) -> Iterator[int]:
        """Reads the prompt and goes on with it, one token at a time.

        Args:
            prompt: may be empty if something was read before.
            ends: tokens after which there is no more to come.
            known: only tokens below this number are chosen; None: all.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; expected a whole number of at least 1")
        sampling = sampling or Sampling()
        processors = sampling.processors()
        generator = torch.Generator(self.model.device).manual_seed(sampling.seed)
        ids = torch.tensor([list(prompt)], dtype=torch.int64, device=self.model.device)
        self.read(prompt)
        for _ in range(max_new_tokens):
            if self._longest is not None and self._seen + len(self.unread) > self._longest:
                return
            self.read([])
            if self.logits is None:
                raise ValueError("the prompt is empty and nothing was read before it; expected at least one token")
            scores = self.logits.to(torch.float32, copy=True)
            if not bool(scores.isfinite().all()):
                raise ValueError("the model gives logits that are not finite; expected weights that were trained well")
            if known is not None:
                scores[:, known:] = -math.inf
            scores = processors(ids, scores)
            if sampling.greedy:
                chosen = scores.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial(scores.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, chosen], dim=1)
            self.unread = [int(chosen)]
            yield self.unread[0]
            if self.unread[0] in ends:
                return


@dataclass(frozen=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: without the stop text, and without the token that ends a text.
        tokens: all of them.
        finish: why it ended: at "length", at the "end" of the text, or at a "stop" text.
        tokens_per_second: from the first to the last; None: there is only one.
    """

    text: str
    tokens: list[int]
    finish: str
    tokens_per_second: float | None


class Session:
    """A model that reads texts and answers, one after the other; :attr:`cache` is all that it keeps of them.

    Args:
        model: ours, or a causal language model of transformers.
        tokenizer: of transformers.
        cache: what went before, which is changed by what follows; None: nothing did.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, cache: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.reader = Reader(model, cache)
        self.ends = end_tokens(model, tokenizer)
        self.known = max(tokenizer.get_vocab().values()) + 1

    @classmethod
    def load(
        cls,
        name: str,
        memory: str | os.PathLike[str] | None = None,
        device: torch.device | str = "auto",
        dtype: torch.dtype | None = None,
    ) -> Session:
        """The model in a folder or on the hub, at the beginning or where the file ``memory`` left off."""
        model, tokenizer = load_model(name, device, dtype)
        cache = None
        if memory is not None:
            check_keeps_memory(model, name)
            cache = TitansCache.load(memory, model.device)
            try:
                cache.check(model.config, batch_size=1)
            except ValueError as error:
                raise ValueError(f"{os.fspath(memory)} does not fit {name}: {error}") from error
        return cls(model, bytes_for(model, name) if tokenizer is None else tokenizer, cache)

    @property
    def cache(self) -> Any:
        """What was read, but for the last token of an answer: see :meth:`settle`."""
        return self.reader.cache

    def settle(self) -> Any:
        """The cache, after the last token of an answer has been read too."""
        self.reader.read([])
        return self.reader.cache

    def encode(self, text: str, first: bool = True) -> list[int]:
        """The tokens of a prompt, once they have been found fit for the model.

        Args:
            first: the prompt does not follow a text that is yet to be read. Where there was none before it either, it
                begins with the tokens that the tokenizer begins a text with, and an empty one with bos or eos.
        """
        ids = encode(self.tokenizer, text)
        if first and self.cache is None:
            ids = opening(self.tokenizer) + ids
        if first and self.reader.logits is None and not ids:
            named = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
            ids = [number for number in named if number is not None and number < self.reader.vocab_size][:1]
            if not ids:
                raise ValueError("the prompt is empty and the model has no token to begin with; expected a prompt")
        self.reader.check(ids)
        return ids

    def read(self, blocks: Iterable[str], piece: int = PIECE, on_piece: Callable[[int], None] | None = None) -> int:
        """Reads a text that comes in blocks, as :meth:`Reader.read` does its tokens."""
        begin = opening(self.tokenizer) if self.cache is None else []
        tokens = chain(begin, chain.from_iterable(encode_blocks(self.tokenizer, blocks)))
        return self.reader.read(tokens, piece, on_piece)

    def answer(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 200,
        sampling: Sampling | None = None,
        stops: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Goes on with the tokens of a prompt, see :meth:`encode`; ``on_text`` gets the text as it is written."""
        stream = TextStream(self.tokenizer, stops)
        pieces: list[str] = []
        tokens: list[int] = []
        times: list[float] = []

        def give(text: str) -> None:
            pieces.append(text)
            if on_text is not None:
                on_text(text)

        for token in self.reader.write(prompt, max_new_tokens, sampling, self.ends, self.known):
            tokens.append(token)
            times.append(time.perf_counter())
            give(stream.put(token))
            if stream.stopped:
                break
        give(stream.end())
        finish = "stop" if stream.stopped else "end" if self.ends.intersection(tokens[-1:]) else "length"
        rate = (len(tokens) - 1) / (times[-1] - times[0]) if len(tokens) > 1 else None
        return Answer("".join(pieces), tokens, finish, rate)


def check_keeps_memory(model: PreTrainedModel, name: str) -> None:
    """Raises a ``ValueError`` if what a model keeps of a text is not a memory that a file can hold."""
    kind = model.config.model_type
    if kind != TitansConfig.model_type:
        raise ValueError(f"{name} is a {kind} model, which has no memory to keep in a file; expected a Titans model")


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those that the model's configs name."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {tokenizer.eos_token_id}
    for config in (model.config, getattr(model, "generation_config", None)):
        value = getattr(config, "eos_token_id", None)
        named = set(value) if isinstance(value, (list, tuple)) else {value}
        # the configs of transformers name tokens of some well-known tokenizer where nobody has told them any
        ends |= named if isinstance(model.config, TitansConfig) else named & special
    return ends - {None}
