"""Writers that are killed, and what must hold of the store they leave; run as a program, it prints a line of JSON.

    python tests/text/killing.py FOLDER --rounds 200 --writers 4

The writers are forked from a process that has loaded the encoder, so that a round takes no longer than its writing.
Each notes in a file what it is about to do and what has been acknowledged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.memory import Memory
from titans.text.records import UnknownRecord
from titans.text.sqlite import SqliteStore

PER_STORE = 20  # rounds until a new store is begun: what is checked is all of it, every round
TEXTS = [
    f"{who} {does} {what}."
    for who in ("Ann", "Ben", "The cat")
    for does in ("likes", "lost", "sells")
    for what in ("the red bicycle", "a house by the sea", "fresh bread")
]


def write(folder: Path, notes: Path, encoder: TextEncoder, seed: int) -> None:
    """Writes until it is killed."""
    draw = random.Random(seed)
    mine: list[str] = []
    with notes.open("a", buffering=1) as stream, Memory(folder, encoder=encoder) as memory:
        while True:
            kind = draw.choices(["add", "many", "delete", "update", "search"], [8, 2, 1, 1, 1])[0]
            session = draw.choice([None, "shared", f"own {seed % 4}"])
            text = draw.choice(TEXTS)
            if kind == "add":
                mine.append(memory.add(text, session=session).id)
                stream.write(json.dumps(["has", mine[-1], text]) + "\n")
            elif kind == "many":
                for record in memory.add_many([text] * draw.randint(2, 20), session=session):
                    mine.append(record.id)
                    stream.write(json.dumps(["has", record.id, text]) + "\n")
            elif kind == "search":
                memory.search(text, limit=3)
            elif mine:
                id = mine.pop(draw.randrange(len(mine)))
                stream.write(json.dumps(["maybe", id, kind, text]) + "\n")
                if kind == "delete":
                    memory.delete(id)
                else:
                    memory.update(id, text)
                    mine.append(id)
                stream.write(json.dumps(["done", id, kind, text]) + "\n")


def check(folder: Path, notes: list[Path], encoder: TextEncoder) -> tuple[int, float]:
    """Raises if anything that must hold does not; returns how many records there are, and seconds to open the store."""
    start = time.perf_counter()
    memory = Memory(folder, encoder=encoder)
    memory.search(TEXTS[0])
    seconds = time.perf_counter() - start
    with memory:
        problems = memory.check()
        assert problems == [], problems
        expected: dict[str, set[str | None]] = {}
        for file in notes:
            for line in file.read_text().splitlines():
                said = json.loads(line)
                if said[0] == "has":
                    expected[said[1]] = {said[2]}
                else:
                    new = None if said[2] == "delete" else said[3]
                    expected[said[1]] = {new} if said[0] == "done" else expected[said[1]] | {new}
        for id, texts in expected.items():
            record = memory.get(id)
            assert (None if record is None else record.text) in texts, f"{id} is {record}; expected {texts}"
        for scope, count in memory.scopes():
            with memory.store.reading():
                row = memory.store.find_scope(scope)
                assert row is not None
                logged = replay_log(memory.store, row.id)
                assert [seq for seq, _ in logged] == memory.store.scope_seqs(row.id)
            assert len(logged) == count
            again, surprises = memory.neural.write(
                memory.neural.empty(), torch.from_numpy(encoder.encode([text for _, text in logged]))
            )
            kept = memory.scope_memory(user=scope.user, agent=scope.agent, session=scope.session)
            assert memory.neural.pack(again) == memory.neural.pack(kept), f"the memory of {scope} is not its log's"
            with memory.store.reading():
                records = memory.store.records(seq for seq, _ in logged)
            assert [records[seq].surprise for seq, _ in logged] == surprises.tolist()
        return memory.stats()["records"], seconds


def replay_log(store: SqliteStore, scope: int) -> list[tuple[int, str]]:
    """The sequence numbers and texts of a scope's records in their order, as the log alone tells them."""
    texts: dict[int, str] = {}
    for seq, kind, body in store._all("SELECT seq, kind, body FROM events WHERE scope = ? ORDER BY n", (scope,)):
        if kind in ("delete", "evict"):
            texts.pop(seq, None)
        elif body is not None:
            texts[seq] = json.loads(body)["text"]
    return sorted(texts.items())


def fork(work: object, *arguments: object) -> int:
    """Runs a function in a process of its own; returns its id."""
    process = os.fork()
    if process:
        return process
    try:
        work(*arguments)  # type: ignore[operator]
    except UnknownRecord:  # another writer's change of a shared record: there is none, but say so
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run(folder: Path, rounds: int, writers: int, seconds: float, seed: int) -> dict[str, float]:
    """All rounds; returns figures."""
    torch.set_num_threads(1)
    encoder = CachedEncoder(TextEncoder.load())
    encoder.encode(TEXTS)
    draw = random.Random(seed)
    opened, most, records, died = [], 0, 0, 0
    for number in range(rounds):
        place = folder / f"store {number // PER_STORE}"
        if number % PER_STORE == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            notes: list[Path] = []
        new = [folder / f"notes {number} {writer}" for writer in range(writers)]
        for file in new:
            file.touch()
        started = [fork(write, place, file, encoder, 4 * number + i) for i, file in enumerate(new)]
        time.sleep(draw.uniform(0.05, seconds))
        for process in draw.sample(started, len(started)):
            if os.waitpid(process, os.WNOHANG)[0]:
                died += 1  # by itself, which none should
                continue
            os.kill(process, signal.SIGKILL)
            time.sleep(draw.choice([0, 0, 0.01]))
            os.waitpid(process, 0)
        assert died == 0, "a writer ended by itself"
        notes += new
        records, took = check(place, notes, encoder)
        opened.append(took)
        most = max(most, records)
    return {"rounds": rounds, "most_records": most, "slowest_opening": max(opened)}


def reopen(folder: Path, many: int) -> dict[str, float]:
    """Seconds to open a store of many records after a writer was killed, and to search it the first time."""
    torch.set_num_threads(1)
    encoder = CachedEncoder(TextEncoder.load())
    encoder.encode(TEXTS)
    with Memory(folder, encoder=encoder) as memory:
        draw = random.Random(0)
        for start in range(0, many, 1000):
            memory.add_many(draw.choices(TEXTS, k=min(1000, many - start)))
    notes = folder / "notes"
    notes.touch()
    process = fork(write, folder, notes, encoder, 1)
    while not notes.stat().st_size:
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    start = time.perf_counter()
    memory = Memory(folder, encoder=encoder)
    opened = time.perf_counter() - start
    found = memory.search(TEXTS[0])
    searched = time.perf_counter() - start
    memory.add(TEXTS[0])
    written = time.perf_counter() - start
    assert len(found) == 10 and memory.stats()["records"] > many
    memory.close()
    return {"records": many, "open": opened, "open_and_search": searched, "open_search_and_write": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reopen", type=int, help="Measure the opening of a store of so many records instead.")
    options = parser.parse_args()
    if options.reopen:
        figures = reopen(options.folder, options.reopen)
    else:
        figures = run(options.folder, options.rounds, options.writers, options.seconds, options.seed)
    print(json.dumps(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
