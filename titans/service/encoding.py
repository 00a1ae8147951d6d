"""An encoder for many threads: texts that wait at the same time are encoded together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from titans.service.metrics import Metrics
from titans.text.encoder import TextEncoder

SLICE = 16_000  # bytes of a call that are encoded before others have their turn, or one text; some 16 passages
TOGETHER = 32_000  # bytes of a batch, unless its first slice has more
LEAST = 64  # bytes that a shorter text counts as


@dataclass(eq=False)
class Slice:
    """Texts that somebody waits for, and then their vectors or what went wrong."""

    texts: Sequence[str]
    size: int
    vectors: Future[np.ndarray] = field(default_factory=Future)


class BatchingEncoder(TextEncoder):
    """An encoder whose calls from several threads become one call; the vectors are the same, to the bit.

    While some texts are encoded, those of others gather and are encoded together next. A long call is cut into slices,
    so that nobody waits for the whole of it.
    """

    def __init__(self, encoder: TextEncoder, metrics: Metrics) -> None:
        self.name, self.pooling, self.max_tokens = encoder.name, encoder.pooling, encoder.max_tokens
        self.width, self.fingerprint = encoder.width, encoder.fingerprint
        self._encoder, self._metrics = encoder, metrics
        self._lock = threading.Lock()
        self._waiting: list[Slice] = []
        # Always the same thread: each that ever encoded would keep the buffers of its largest batch.
        self._worker = ThreadPoolExecutor(1, "encoder")

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 (n, width), as of the encoder itself."""
        return np.concatenate([self._wait_for(part) for part in _cut(texts)])

    def _wait_for(self, part: Slice) -> np.ndarray:
        with self._lock:
            self._waiting.append(part)
        self._worker.submit(self._encode_next)
        return part.vectors.result()

    def _encode_next(self) -> None:
        with self._lock:
            batch = self._take()
        if batch:  # else it was encoded together with one before
            for part, result in zip(batch, self._encode_all([part.texts for part in batch]), strict=True):
                if isinstance(result, Exception):
                    part.vectors.set_exception(result)
                else:
                    part.vectors.set_result(result)

    def _take(self) -> list[Slice]:
        """The slice that waits longest, and the shortest of the others beside it."""
        batch, size = self._waiting[:1], sum(part.size for part in self._waiting[:1])
        for part in sorted(self._waiting[1:], key=lambda part: part.size):
            size += part.size
            if size > TOGETHER:
                break
            batch.append(part)
        self._waiting = [part for part in self._waiting if part not in batch]
        return batch

    def _encode_all(self, parts: Sequence[Sequence[str]]) -> list[np.ndarray | Exception]:
        """The vectors of several slices; if something is wrong, each on its own, so that it is wrong with one only."""
        begun = time.perf_counter()
        results: list[np.ndarray | Exception]
        try:
            vectors = self._encoder.encode([text for texts in parts for text in texts])
            results = [*np.split(vectors, np.cumsum([len(texts) for texts in parts])[:-1])]
        except Exception as error:
            results = [error] if len(parts) == 1 else [self._encode_all([texts])[0] for texts in parts]
        self._metrics.count("titans_encoder_seconds_total", time.perf_counter() - begun)
        self._metrics.count("titans_encoder_texts_total", sum(map(len, parts)))
        self._metrics.count("titans_encoder_batches_total")
        return results


def _cut(texts: Sequence[str]) -> Iterator[Slice]:
    """The texts in their order, in slices of a size, or of one text that is longer."""
    start = size = 0
    for index, text in enumerate(texts):
        more = max(LEAST, len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0)
        if index > start and size + more > SLICE:
            yield Slice(texts[start:index], size)
            start, size = index, 0
        size += more
    yield Slice(texts[start:], size)
