"""How fast is a text memory with many records, and does its index find what exact search finds?

    titans bench text BOOKS --out runs/bench-text

Cuts a folder of text files into sentences, remembers them (one session per file, one user), and asks with the
beginnings of sentences that are not among them. Measured are: writes per second, one by one and in a batch; the time of
a search beside the time of encoding its question; the share of the nearest ten that the index finds; the time of a
deletion and of opening the store. Vectors are kept in the output folder, so that a second run only measures.

    titans bench text BOOKS --store postgresql://USER:PASSWORD@HOST/DATABASE --load 1000000 --writers 2

measures a store on a PostgreSQL server instead of one in a file, fills another one with many users before, and compares
several writers with one.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titans.bench.settings import TextBenchmarkSettings
from titans.bench.text_load import compare_writers, fill, running_words
from titans.bench.timing import about, bar_figure, new_report, times_text, work_folder
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent
from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.index import nearest_exact
from titans.text.location import hide_password
from titans.text.memory import Memory
from titans.text.records import Scope
from titans.text.store import Matches, Selection, Store

LONGEST = 300  # characters; longer sentences are cut at a comma or semicolon
SHORT = 60  # characters of a short text, such as a line of a conversation
WARM_UP = 5  # questions before the first that is timed
NEAREST = 10
MANY = 2_000  # candidates of the neural voice in an exact ranking
PART = 1000  # sentences that are written at a time
USER = "reader"
STORE, WRITTEN = "Search, deletion and size", "Records written per second"  # titles of sections
FILLED, WRITERS = "A store of many users", "Several writers"
WRITES = {"sentences": "with_encoding", "short texts": "short_with_encoding", "known vectors": "without_encoding"}
QUICK: dict[str, Any] = {"records": 200, "queries": 10, "batch": 20}
Place = Callable[[str], str]


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


def cut(folder: Path, records: int, queries: int) -> tuple[list[tuple[str, str]], list[str]]:
    """(file, sentence) pairs without repetitions, and questions: the beginnings of other sentences."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("**/*.txt")):
        for sentence in sentences(file):
            found.setdefault(sentence, file.stem)
    pairs = [(name, sentence) for sentence, name in found.items()]
    if len(pairs) < records + queries:
        raise ValueError(
            f"{folder} has {len(pairs):,} different sentences; expected at least {records + queries:,}, "
            "or ask for fewer records or queries"
        )
    draw = random.Random(0)
    asked = set(draw.sample(range(len(pairs)), queries))
    kept = [pair for index, pair in enumerate(pairs) if index not in asked]
    questions = [" ".join(pairs[index][1].split()[: draw.randint(5, 12)]) for index in sorted(asked)]
    return sorted(draw.sample(kept, records)), questions


def seconds(work: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def places(url: str | None, folder: Path) -> Iterator[Place]:
    """Where stores are, by name: in a folder, or in schemas of a database; none of them stays."""
    if url is None:
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            yield lambda name: str(Path(inside) / name)
        return
    from titans.text.postgres import drop_store
    from titans.text.postgres_connection import split_url

    plain, schema = split_url(url)
    made: dict[str, str] = {}

    def place(name: str) -> str:
        mark = "&" if "?" in plain else "?"
        return made.setdefault(name, f"{plain}{mark}schema={schema}-{uuid.uuid4().hex[:8]}-{name}")

    try:
        yield place
    finally:
        for each in made.values():
            drop_store(each)


def compare_writes(encoder: TextEncoder, texts: list[str], place: Place) -> dict[str, float]:
    """Writes per second, one by one and in a batch; both leave the same memory behind."""
    with Memory(place("one"), encoder=encoder) as one, Memory(place("many"), encoder=encoder) as many:
        one.add(texts[0])
        many.add(texts[0])
        single = seconds(lambda: [one.add(text) for text in texts])
        batch = seconds(lambda: many.add_many(texts))
        assert one.neural.pack(one.scope_memory()) == many.neural.pack(many.scope_memory())
    return {"one_by_one": len(texts) / single, "batch": len(texts) / batch}


def build(encoder: TextEncoder, pairs: list[tuple[str, str]], store: str, progress: Progress = silent) -> float:
    """Make a store of all sentences; returns how many were written per second."""
    files: dict[str, list[str]] = {}
    for name, text in pairs:
        files.setdefault(name, []).append(text)
    done, start = 0, time.perf_counter()
    with Memory(store, encoder=encoder) as memory:
        for name, texts in files.items():
            for first in range(0, len(texts), PART):
                progress(done, len(pairs), "writing records")
                done += len(memory.add_many(texts[first : first + PART], user=USER, session=name))
    return done / (time.perf_counter() - start)


def time_searches(memory: Memory, real: TextEncoder, questions: list[str]) -> dict[str, float]:
    """Milliseconds of a search with its encoding, beside those of the encoding alone."""
    for question in questions[:WARM_UP]:
        memory.search(question, user=USER)
        real.encode([question])
    alone, whole = [], []
    for question in questions[WARM_UP:]:
        alone.append(1e3 * seconds(partial(real.encode, [question])))
        whole.append(1e3 * seconds(partial(memory.search, question, user=USER)))
    found: dict[str, float] = {}
    for name, times in (("encode", alone), ("search", whole)):
        found |= {f"{name}_p50_ms": float(np.percentile(times, 50)), f"{name}_p95_ms": float(np.percentile(times, 95))}
    return found


class ExactStore:
    """A store that compares a question with every record and looks up every word: what the index is measured by."""

    def __init__(self, store: Store, width: int) -> None:
        self._store = store
        with store.reading():
            self._seqs = np.array([seq for seq, _, _ in store.texts()])
            self._matrix = store.vectors(self._seqs.tolist(), width)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def nearest(self, selection: Selection, vectors: np.ndarray, many: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """As :meth:`Store.nearest`, of the only user."""
        found = (nearest_exact(self._matrix, vector, many) for vector in vectors)
        return [(self._seqs[rows], scores) for rows, scores in found]

    def find_words(self, selection: Selection, words: list[str], many: int) -> Matches:
        """As :meth:`Store.find_words`, without a limit to how common they are."""
        return self._store.find_words(selection, words, many, most=1 << 60)


def measure_recall(memory: Memory, questions: list[str]) -> dict[str, float]:
    """The shares of the exactly nearest records, and of the hits of an exact ranking, that are found."""
    vectors = memory.encoder.encode(questions)
    exact, store, ranking = ExactStore(memory.store, vectors.shape[1]), memory.store, memory.ranking
    with store.reading():
        selection = store.select(Scope(USER), {})
        assert selection is not None
        of_index = [each.nearest(selection, vectors, NEAREST) for each in (exact, store)]
    hits, ignored = [], []
    for each, many in ((exact, MANY), (store, ranking.candidates)):
        memory.store, memory.ranking = each, replace(ranking, candidates=many)  # type: ignore[assignment]
        found = [memory.search(question, user=USER, limit=NEAREST) for question in questions]
        hits.append([{hit.record.id for hit in one} for one in found])
        ignored = [bool(one.ignored) for one in found]
    memory.store, memory.ranking = store, ranking
    return {
        "index_recall": _shared([[set(seqs.tolist()) for seqs, _ in each] for each in of_index]),
        "ranking_recall": _shared(hits),
        "questions_with_ignored_words": float(np.mean(ignored)),
    }


def _shared(found: Sequence[Sequence[set[Any]]]) -> float:
    """The mean share of each first set that the second one has."""
    return float(np.mean([len(whole & part) / len(whole) for whole, part in zip(*found, strict=True)]))


def run_text_benchmark(
    settings: TextBenchmarkSettings, progress: Progress = silent, out: Path | None = None
) -> dict[str, Any]:
    """Measure a text memory; returns the report, a dict that is ready for JSON.

    Args:
        out: folder where the vectors of the texts are kept; None: they are not.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    report = new_report("text", settings, torch.get_num_threads())
    if settings.store is not None:
        report["settings"]["store"] = hide_password(settings.store)
    pairs, questions = cut(Path(settings.texts), settings.records, settings.queries + WARM_UP + 1)
    texts = [text for _, text in pairs]
    results: dict[str, Any] = {}
    with work_folder(out) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        words = running_words(Path(settings.texts)) if settings.load or settings.writers > 1 else []
        if settings.load:
            with places(settings.store, folder) as place:
                results |= fill(place("full"), words, settings.load, settings.users, progress)
        if settings.writers > 1:
            progress(0, 1, "several writers")
            with places(settings.store, folder) as place:
                results |= compare_writers(place, words, settings.writers)
        real = TextEncoder.load()
        known = CachedEncoder(real, folder / "vectors.npz")
        known.learn(texts, progress)
        short = [text for text in texts if len(text) <= SHORT] or texts
        given = ((real, texts), (real, short), (known, texts))
        for index, (name, (encoder, source)) in enumerate(zip(WRITES.values(), given, strict=True)):
            progress(index, len(WRITES), "writing one by one and in a batch")
            some = random.Random(1).sample(source, min(settings.batch, len(source)))
            with places(settings.store, folder) as place:
                results |= {f"writes_{how}_{name}": rate for how, rate in compare_writes(encoder, some, place).items()}
        with places(settings.store, folder) as place:
            results["written_per_second"] = build(known, pairs, place("store"), progress)
            results |= _measure_store(place("store"), known, real, questions)
    return report | {"results": results}


def _measure_store(store: str, known: TextEncoder, real: TextEncoder, questions: list[str]) -> dict[str, Any]:
    """Everything that is measured of a store that is there."""
    results: dict[str, Any] = {}
    start = time.perf_counter()
    with Memory(store, encoder=known) as memory:
        results["open_seconds"] = time.perf_counter() - start
        results["first_search_seconds"] = seconds(lambda: memory.search(questions[0], user=USER))
        results |= time_searches(memory, real, questions[1:])
        results |= measure_recall(memory, questions)
        stats = memory.stats()
        results |= {"index_segments": stats["index_segments"], "megabytes": stats["bytes"] / 1e6}
        newest = memory.records(user=USER, limit=1)[0]
        results["delete_newest_seconds"] = seconds(lambda: memory.delete(newest.id, user=USER))
        with memory.store.reading():
            oldest = memory.store.records([1])[1]
        results["delete_oldest_seconds"] = seconds(lambda: memory.delete(oldest.id, user=USER))
    return results


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def sections(report: dict[str, Any]) -> list[Section]:
    """All figures, as text and tables."""
    found = report["results"]
    rows = [
        ["search with its encoding, median", f"{found['search_p50_ms']:.1f} ms"],
        ["search with its encoding, p95", f"{found['search_p95_ms']:.1f} ms"],
        ["encoding the question alone, median", f"{found['encode_p50_ms']:.1f} ms"],
        ["encoding the question alone, p95", f"{found['encode_p95_ms']:.1f} ms"],
        [f"of the exactly nearest {NEAREST}, found by the index", f"{found['index_recall']:.1%}"],
        [f"of the {NEAREST} hits of an exact ranking, found by a search", f"{found['ranking_recall']:.1%}"],
        ["questions with words too common to look up", f"{found['questions_with_ignored_words']:.1%}"],
        ["opening the store", _time(found["open_seconds"])],
        ["first search", _time(found["first_search_seconds"])],
        ["deleting the newest record", _time(found["delete_newest_seconds"])],
        ["deleting the oldest record", _time(found["delete_oldest_seconds"])],
        ["records written per second, vectors known", f"{found['written_per_second']:,.0f}"],
        ["size on disk", f"{found['megabytes']:,.1f} MB"],
    ]
    writes = []
    for name, key in WRITES.items():
        one, batch = (found[f"writes_{how}_{key}"] for how in ("one_by_one", "batch"))
        writes.append([name, f"{one:,.0f}", f"{batch:,.0f}", f"{batch / one:.1f}x"])
    header = ["texts", "one by one", "in a batch", "faster"]
    return [
        Section(STORE, [f"A store with {report['settings']['records']:,} records."], [Table(["", "measured"], rows)]),
        Section(WRITTEN, [], [Table(header, writes)]),
        *_of_many(report),
        about(report),
    ]


def _of_many(report: dict[str, Any]) -> list[Section]:
    """Of many users and of several writers, if they were measured."""
    found, settings = report["results"], report["settings"]
    made = []
    if settings["load"]:
        rows = [
            ["records written per second, random vectors", f"{found['load_per_second']:,.0f}"],
            ["memory of this process after a tenth", f"{found['load_early_bytes'] / 1e6:,.0f} MB"],
            ["memory of this process, at most", f"{found['load_most_bytes'] / 1e6:,.0f} MB"],
            ["search of one user, median", f"{found['load_search_p50_ms']:.1f} ms"],
            ["search of one user, p95", f"{found['load_search_p95_ms']:.1f} ms"],
            ["size of the store", f"{found['load_store_bytes'] / 1e6:,.0f} MB"],
        ]
        about_it = f"{settings['load']:,} records of {settings['users']:,} users; nothing is encoded."
        made.append(Section(FILLED, [about_it], [Table(["", "measured"], rows)]))
    if settings["writers"] > 1:
        one, several = found["one_writers_per_second"], found["all_writers_per_second"]
        rows = [["1", f"{one:,.0f}", ""], [str(settings["writers"]), f"{several:,.0f}", times_text(several / one)]]
        about_it = "Records written one by one, each process to a session of its own; nothing is encoded."
        made.append(Section(WRITERS, [about_it], [Table(["processes", "records per second", "more"], rows)]))
    return made


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """The time of a search beside its encoding, and writes per second, by the title of the section."""
    found = report["results"]
    writes = {
        name: [found[f"writes_{how}_{key}"] for key in WRITES.values()]
        for name, how in {"one by one": "one_by_one", "in a batch": "batch"}.items()
    }
    times = {
        name: [found[f"{key}_{share}_ms"] for share in ("p50", "p95")]
        for name, key in {"search with its encoding": "search", "encoding alone": "encode"}.items()
    }
    return {
        STORE: [bar_figure("text-search", "Time of a search", ["median", "p95"], times, "", "milliseconds")],
        WRITTEN: [bar_figure("text-writes", WRITTEN, list(WRITES), writes, "texts", "records per second")],
    }
