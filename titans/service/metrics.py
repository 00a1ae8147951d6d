"""How much the server does, for Prometheus; of this process, since each worker counts for itself."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]
HELP = {
    "titans_requests_total": "Requests that were answered, by route and status.",
    "titans_texts_written_total": "Texts that were written.",
    "titans_searches_total": "Searches that were answered.",
    "titans_encoder_seconds_total": "Seconds in which the encoder was at work.",
    "titans_encoder_texts_total": "Texts that were encoded.",
    "titans_encoder_batches_total": "Times that the encoder was called; fewer than texts if it takes several at once.",
    "titans_request_seconds": "Seconds until an answer was complete, by route.",
    "titans_requests_running": "Requests that are being answered.",
}


class Metrics:
    """Counters and histograms by name and labels; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[tuple[str, Labels]] = Counter()
        self._histograms: dict[Labels, list[int]] = {}
        self._seconds: Counter[Labels] = Counter()
        self.running = 0

    def count(self, name: str, more: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counters[name, tuple(labels.items())] += more  # type: ignore[assignment]

    def observe(self, seconds: float, **labels: str) -> None:
        """Adds the time of a request."""
        key = tuple(labels.items())
        with self._lock:
            self._histograms.setdefault(key, [0] * (len(BOUNDS) + 1))[bisect_left(BOUNDS, seconds)] += 1
            self._seconds[key] += seconds  # type: ignore[assignment]

    def render(self) -> str:
        """All of them, as Prometheus reads them."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        process = ("pid", str(os.getpid()))
        for name in sorted({name for name, _ in self._counters}):
            yield from _head(name, "counter")
            for (other, labels), value in self._counters.items():
                if other == name:
                    yield f"{name}{_labelled((*labels, process))} {value:.10g}"
        name = "titans_request_seconds"
        yield from _head(name, "histogram")
        for labels, counts in self._histograms.items():
            total = 0
            for bound, many in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True):
                total += many
                yield f"{name}_bucket{_labelled((*labels, process, ('le', bound)))} {total}"
            yield f"{name}_sum{_labelled((*labels, process))} {self._seconds[labels]:.10g}"
            yield f"{name}_count{_labelled((*labels, process))} {total}"
        yield from _head("titans_requests_running", "gauge")
        yield f"titans_requests_running{_labelled([process])} {self.running}"


def _head(name: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {HELP[name]}"
    yield f"# TYPE {name} {kind}"


def _labelled(labels: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}"
