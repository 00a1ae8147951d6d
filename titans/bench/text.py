"""How fast is a text memory with many records, and does its index find what exact search finds?

Cuts a folder of text files into sentences, remembers them (a session a file, one user), and asks with the beginnings of
sentences that are not among them. Prints and writes: writes per second, one by one and in a batch; the time of a search
beside the time of encoding its question; the share of the nearest ten that the index finds; the time of a deletion and
of opening the store. Vectors are kept in the folder, so that a second run only measures.

    python benchmarks/text_memory.py BOOKS --out runs/text-memory
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titans.files import write_atomically
from titans.text.encoder import TextEncoder
from titans.text.index import Selection, nearest_exact
from titans.text.memory import Memory

LONGEST = 300  # characters; longer sentences are cut at a comma or semicolon
SHORT = 60  # characters of a short text, such as a line of a conversation
USER = "reader"


class KnownEncoder(TextEncoder):
    """The encoder, with the vectors of some texts known before."""

    known: dict[str, np.ndarray]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors (n, width)."""
        if all(text in self.known for text in texts):
            return np.stack([self.known[text] for text in texts])
        return super().encode(texts)


def sentences(file: Path) -> list[str]:
    """The sentences of a text file."""
    text = " ".join(file.read_text(encoding="utf-8-sig").split())
    parts: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        pieces = re.split(r"(?<=[,;])\s+", sentence) if len(sentence) > LONGEST else [sentence]
        joined = pieces[0]
        for piece in pieces[1:]:
            if len(joined) + len(piece) < LONGEST:
                joined += " " + piece
            else:
                parts.append(joined)
                joined = piece
        parts.append(joined)
    return [part for part in parts if 12 <= len(part) <= 4 * LONGEST and part.isprintable()]


def cut(folder: Path, many: int, queries: int) -> tuple[list[tuple[str, str]], list[str]]:
    """(file, sentence) pairs without repetitions, and questions: the beginnings of other sentences."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("**/*.txt")):
        for sentence in sentences(file):
            found.setdefault(sentence, file.stem)
    pairs = [(name, sentence) for sentence, name in found.items()]
    draw = random.Random(0)
    asked = set(draw.sample(range(len(pairs)), queries))
    kept = [pair for index, pair in enumerate(pairs) if index not in asked]
    if len(kept) < many:
        raise SystemExit(f"{folder} has {len(kept):,} sentences; expected at least {many:,}")
    questions = [" ".join(pairs[index][1].split()[: draw.randint(5, 12)]) for index in sorted(asked)]
    return sorted(draw.sample(kept, many)), questions


def vectors_of(encoder: TextEncoder, texts: list[str], out: Path) -> tuple[np.ndarray, float | None]:
    """The vectors of all texts, and how many were made in a second; None if they were in the folder."""
    digest = hashlib.sha256("\n".join([encoder.fingerprint, *texts]).encode()).hexdigest()[:16]
    file = out / f"vectors-{digest}.npy"
    if file.is_file():
        return np.load(file), None
    parts, start = [], time.perf_counter()
    for first in range(0, len(texts), 2000):
        parts.append(encoder.encode(texts[first : first + 2000]))
        rate = (first + len(parts[-1])) / (time.perf_counter() - start)
        print(f"\rencoded {first + len(parts[-1]):,} of {len(texts):,}, {rate:.0f} a second", end="", flush=True)
    print()
    matrix = np.concatenate(parts)
    with (out / "vectors.tmp").open("wb") as stream:
        np.save(stream, matrix)
    (out / "vectors.tmp").replace(file)
    return matrix, rate


def seconds(work: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def batches(encoder: TextEncoder, texts: list[str], out: Path) -> dict[str, float]:
    """Writes per second, one by one and in a batch, with the encoding or with vectors that are known."""
    folder = out / "batches"
    shutil.rmtree(folder, ignore_errors=True)
    with Memory(folder / "one", encoder=encoder) as one, Memory(folder / "many", encoder=encoder) as many:
        one.add(texts[0])
        many.add(texts[0])
        single = seconds(lambda: [one.add(text) for text in texts])
        batch = seconds(lambda: many.add_many(texts))
        assert one.neural.pack(one.scope_memory()) == many.neural.pack(many.scope_memory())
    shutil.rmtree(folder)
    return {"one_by_one": len(texts) / single, "batch": len(texts) / batch, "speedup": single / batch}


def build(encoder: TextEncoder, pairs: list[tuple[str, str]], folder: Path) -> float:
    """A store of all sentences; returns how many were written in a second, without encoding."""
    shutil.rmtree(folder, ignore_errors=True)
    with Memory(folder, encoder=encoder) as memory:
        start = time.perf_counter()
        done = 0
        for name in sorted({name for name, _ in pairs}):
            texts = [text for other, text in pairs if other == name]
            for first in range(0, len(texts), 1000):
                done += len(memory.add_many(texts[first : first + 1000], user=USER, session=name))
                rate = done / (time.perf_counter() - start)
                print(f"\rwritten {done:,} of {len(pairs):,}, {rate:.0f} a second", end="", flush=True)
    print()
    return rate


def searches(memory: Memory, real: TextEncoder, questions: list[str]) -> dict[str, float]:
    """The time of a search with its encoding, beside the time of the encoding alone, in milliseconds."""
    for question in questions[:5]:
        memory.search(question, user=USER)
        real.encode([question])
    alone, whole = [], []
    for question in questions:
        alone.append(1e3 * seconds(lambda text=question: real.encode([text])))  # type: ignore[misc]
        whole.append(1e3 * seconds(lambda text=question: memory.search(text, user=USER)))  # type: ignore[misc]
    e50, e95 = np.percentile(alone, [50, 95])
    s50, s95 = np.percentile(whole, [50, 95])
    return {"encode_p50_ms": e50, "encode_p95_ms": e95, "search_p50_ms": s50, "search_p95_ms": s95,
            "search_p95_over_encode_p50": s95 / e50, "search_p95_over_encode_p95": s95 / e95}  # fmt: skip


def recall(memory: Memory, vectors: np.ndarray, many: int = 10) -> float:
    """The share of the exactly nearest ten that the index finds."""
    shares = []
    with memory.store.reading():
        user = memory.store.find_user(USER)
        assert user is not None
        index = memory._index()
        places, matrix = memory.store.vectors_between(user.id, 0, 1 << 60, vectors.shape[1])
        for vector in vectors:
            exact = set(places[nearest_exact(matrix, vector, many)[0]].tolist())
            found = index.nearest(Selection(USER, user), vector, many)[0]
            shares.append(len(exact & set(found.tolist())) / many)
    return float(np.mean(shares))


def main() -> None:
    """All figures, printed and written to FOLDER/text_memory.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="Folder of text files.")
    parser.add_argument("--out", type=Path, default=Path("runs/text-memory"))
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1_000, help="Texts of the comparison of one by one with a batch.")
    parser.add_argument("--threads", type=int, help="Of PyTorch; default: as many as cores.")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    real = TextEncoder.load()
    pairs, questions = cut(options.texts, options.records, options.queries)
    texts = [text for _, text in pairs]
    matrix, encoded = vectors_of(real, texts, options.out)
    known = KnownEncoder(real.name, real._model, real._tokenizer, real.pooling, real.max_tokens)
    known.known = dict(zip(texts, matrix, strict=True))
    results: dict[str, Any] = {"records": len(texts), "threads": torch.get_num_threads()}
    results["encoded_per_second"] = encoded
    short = [text for text in texts if len(text) <= SHORT]
    for name, encoder, source in (
        ("with_encoding", real, texts),
        ("short_with_encoding", real, short),
        ("without_encoding", known, texts),
    ):
        some = random.Random(1).sample(source, min(options.batch, len(source)))
        rates = batches(encoder, some, options.out)
        results |= {f"writes_{what}_{name}": rate for what, rate in rates.items()}
    folder = options.out / "store"
    results["written_per_second_without_encoding"] = build(known, pairs, folder)
    opened = time.perf_counter()
    with Memory(folder, encoder=known) as memory:
        results["open_seconds"] = time.perf_counter() - opened
        results["first_search_seconds"] = seconds(lambda: memory.search(questions[0], user=USER))
        results |= searches(memory, real, questions)
        results["index_recall_at_10"] = recall(memory, real.encode(questions))
        figures = memory.stats()
        results |= {"index_segments": figures["index_segments"], "megabytes": figures["bytes"] / 1e6}
        newest = memory.records(user=USER, limit=1)[0]
        results["delete_newest_seconds"] = seconds(lambda: memory.delete(newest.id))
        with memory.store.reading():
            oldest = memory.store.records([1])[1]
        results["delete_oldest_seconds"] = seconds(lambda: memory.delete(oldest.id))
    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:{width}}  {value:,.3f}" if isinstance(value, float) else f"{name:{width}}  {value}")
    write_atomically(options.out / "text_memory.json", (json.dumps(results, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
