"""Filling a text store with many records of many users, and several processes that write to it at once."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from titans.bench.timing import answer_of, resident_bytes
from titans.report.progress import Progress, silent
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory
from titans.text.store import WORD

WIDTH = 384  # of the vectors, as those of the encoder that ships with the package
VOCABULARY = 200_000  # running words that texts are made of
PART = 1_000  # records that are written at a time
SEARCHES = 200
WRITING = 10.0  # seconds that each writer writes


class RandomEncoder(TextEncoder):
    """Gives every text a random vector of its own, so that the store is measured and no model."""

    def __init__(self, width: int = WIDTH) -> None:
        self.name, self.pooling, self.max_tokens = "random", "mean", 256
        self.width, self.fingerprint = width, "random"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 (n, width)."""
        draws = (np.random.default_rng(zlib.crc32(text.encode("utf-8"))) for text in texts)
        made = np.array([draw.standard_normal(self.width) for draw in draws], dtype=np.float32)
        made = made.reshape(len(texts), self.width)
        return made / np.linalg.norm(made, axis=1, keepdims=True)


def running_words(folder: Path) -> list[str]:
    """The words of the text files of a folder as they stand there, common ones as often as in any text."""
    words: list[str] = []
    for file in sorted(folder.glob("**/*.txt")):
        words += WORD.findall(file.read_text(encoding="utf-8-sig"))
        if len(words) >= VOCABULARY:
            break
    return words[:VOCABULARY]


def new_texts(words: Sequence[str], many: int, draw: random.Random) -> list[str]:
    """Different texts of 8 to 20 words."""
    return [" ".join([*draw.choices(words, k=draw.randint(7, 19)), f"{draw.getrandbits(40):x}"]) for _ in range(many)]


def fill(place: str, words: Sequence[str], records: int, users: int, progress: Progress = silent) -> dict[str, float]:
    """Writes records of many users, one user after the other, and searches some of them.

    Returns:
        records per second; bytes of this process after the first users and at most; bytes of the store; milliseconds
        of a search.
    """
    draw = random.Random(0)
    seen = []
    with Memory(place, encoder=RandomEncoder()) as memory:
        start = time.perf_counter()
        for user in range(users):
            many = records * (user + 1) // users - records * user // users
            for first in range(0, many, PART):
                memory.add_many(new_texts(words, min(PART, many - first), draw), user=f"user {user}")
            seen.append(resident_bytes())
            progress(user, users, "filling the store")
        rate = records / (time.perf_counter() - start)
        times = []
        for text in new_texts(words, SEARCHES, draw):
            start = time.perf_counter()
            memory.search(text, user=f"user {draw.randrange(users)}")
            times.append(1e3 * (time.perf_counter() - start))
        size = memory.stats()["bytes"]
    return {
        "load_per_second": rate, "load_early_bytes": seen[len(seen) // 10], "load_most_bytes": max(seen),
        "load_store_bytes": size, "load_search_p50_ms": float(np.percentile(times, 50)),
        "load_search_p95_ms": float(np.percentile(times, 95)),
    }  # fmt: skip


def compare_writers(place: Callable[[str], str], words: Sequence[str], writers: int) -> dict[str, float]:
    """Records per second that one process writes one by one, and that several write to one store, each to a session."""
    rates = {}
    for name, many in (("one", 1), ("all", writers)):
        Memory(place(f"{name}-writers"), encoder=RandomEncoder()).close()
        jobs = [{"place": place(f"{name}-writers"), "words": words, "writer": number} for number in range(many)]
        with ThreadPoolExecutor(many) as pool:
            answers = list(pool.map(lambda job: answer_of(write, job, 1), jobs))
        # While all of them were writing.
        start, end = max(min(each["times"]) for each in answers), min(max(each["times"]) for each in answers)
        written = sum(start < moment <= end for each in answers for moment in each["times"])
        rates[f"{name}_writers_per_second"] = written / (end - start)
    return rates


def write(job: dict[str, Any]) -> dict[str, Any]:
    """Writes records one by one for some seconds; returns when each was acknowledged."""
    draw = random.Random(job["writer"])
    times: list[float] = []
    with Memory(job["place"], encoder=RandomEncoder()) as memory:
        end = time.time() + WRITING
        while not times or times[-1] < end:
            memory.add(new_texts(job["words"], 1, draw)[0], user="writer", session=str(job["writer"]))
            times.append(time.time())
    return {"times": times}
