"""An encoder for many threads: texts that wait at the same time are encoded together."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from titans.service.metrics import Metrics
from titans.text.encoder import TextEncoder

TOGETHER = 256  # texts of one batch; a longer call is a batch of its own


@dataclass(eq=False)
class Call:
    """Texts that somebody waits for, and then their vectors or what went wrong."""

    texts: Sequence[str]
    result: np.ndarray | Exception | None = None


class BatchingEncoder(TextEncoder):
    """An encoder whose calls from several threads become one call; the vectors are the same, to the bit.

    While one thread encodes, the texts of the others gather; whoever is free next encodes all of them.
    """

    def __init__(self, encoder: TextEncoder, metrics: Metrics) -> None:
        self.name, self.pooling, self.max_tokens = encoder.name, encoder.pooling, encoder.max_tokens
        self.width, self.fingerprint = encoder.width, encoder.fingerprint
        self._encoder, self._metrics = encoder, metrics
        self._changed = threading.Condition()
        self._at_work = False
        self._waiting: list[Call] = []
        # Always the same thread: each that ever encoded would keep the buffers of its largest batch.
        self._worker = ThreadPoolExecutor(1, "encoder")

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 (n, width), as of the encoder itself."""
        mine = Call(texts)
        with self._changed:
            self._waiting.append(mine)
            self._changed.wait_for(lambda: mine.result is not None or not self._at_work)
            calls = [] if mine.result is not None else self._take(mine)
            self._at_work = self._at_work or bool(calls)
        if calls:
            results = self._worker.submit(self._encode_all, [call.texts for call in calls]).result()
            with self._changed:
                for call, result in zip(calls, results, strict=True):
                    call.result = result
                self._at_work = False
                self._changed.notify_all()
        if isinstance(mine.result, Exception):
            raise mine.result
        assert mine.result is not None
        return mine.result

    def _take(self, first: Call) -> list[Call]:
        """This call and those that wait beside it, up to a batch."""
        calls, many = [first], len(first.texts)
        for call in self._waiting:
            if call is not first and many + len(call.texts) <= TOGETHER:
                calls.append(call)
                many += len(call.texts)
        self._waiting = [call for call in self._waiting if call not in calls]
        return calls

    def _encode_all(self, calls: Sequence[Sequence[str]]) -> list[np.ndarray | Exception]:
        """The vectors of several calls; if something is wrong, each on its own, so that it is wrong with one only."""
        begun = time.perf_counter()
        results: list[np.ndarray | Exception]
        try:
            vectors = self._encoder.encode([text for texts in calls for text in texts])
            results = [*np.split(vectors, np.cumsum([len(texts) for texts in calls])[:-1])]
        except Exception as error:
            results = [error] if len(calls) == 1 else [self._encode_all([texts])[0] for texts in calls]
        self._metrics.count("titans_encoder_seconds_total", time.perf_counter() - begun)
        self._metrics.count("titans_encoder_texts_total", sum(map(len, calls)))
        self._metrics.count("titans_encoder_batches_total")
        return results
