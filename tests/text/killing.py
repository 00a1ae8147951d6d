"""Writers that are killed, and what must hold of the store they leave; run as a program, it prints a line of JSON.

    python tests/text/killing.py FOLDER --rounds 200 --writers 4 --engines sqlite postgres

The writers are forked from a process that has loaded the encoder, so that a round takes no longer than its writing.
Each notes in a file what it is about to do and what has been acknowledged. A PostgreSQL server is killed in every other
round, while they write, and started again; they go on by themselves until they are killed, too.
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
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from titans.text.encoder import CachedEncoder, TextEncoder
from titans.text.memory import Memory
from titans.text.records import StoreError
from titans.text.store import Store

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program, it is not part of a package
from tests.text.postgres_server import PostgresServer

PER_STORE = 20  # rounds until a new store is begun: what is checked is all of it, every round
TEXTS = [
    f"{who} {does} {what}."
    for who in ("Ann", "Ben", "The cat")
    for does in ("likes", "lost", "sells")
    for what in ("the red bicycle", "a house by the sea", "fresh bread")
]


def write(place: str, notes: Path, encoder: TextEncoder, seed: int) -> None:
    """Writes until it is killed."""
    draw = random.Random(seed)
    mine: list[str] = []
    memory: Memory | None = None
    with notes.open("a", buffering=1) as stream:
        while True:
            try:
                memory = memory or Memory(place, encoder=encoder)
                step(memory, draw, seed, mine, lambda *said: stream.write(json.dumps(said) + "\n"))
            except StoreError as error:  # while the server is away
                if "does not answer" not in str(error) and "refuses: the database system" not in str(error):
                    raise
                time.sleep(0.02)


def step(memory: Memory, draw: random.Random, seed: int, mine: list[str], note: Callable[..., object]) -> None:
    """One random call; what is not acknowledged may have been done or not."""
    kind = draw.choices(["add", "many", "again", "delete", "update", "search"], [6, 2, 2, 1, 1, 1])[0]
    session = draw.choice([None, "shared", f"own {seed % 4}"])
    text = draw.choice(TEXTS)
    if kind == "again":  # maybe a repeat; in a session of its own, where nobody else deletes it
        told = [memory.add(text, session=f"own {seed % 4}")]
    elif kind in ("add", "many"):
        many = 1 if kind == "add" else draw.randint(2, 20)
        metadata = [{"n": draw.getrandbits(60)} for _ in range(many)]
        told = memory.add_many([text] * many, session=session, metadata=metadata)
    elif kind == "search":
        memory.search(text, limit=3)
        return
    else:
        if mine:
            id = mine.pop(draw.randrange(len(mine)))
            note("maybe", id, kind, text)
            if kind == "delete":
                memory.delete(id)
            else:
                memory.update(id, text)
                mine.append(id)
            note("done", id, kind, text)
        return
    for record in told:
        if record.id not in mine:
            mine.append(record.id)
        note("has", record.id, text)


def check(place: str, notes: list[Path], encoder: TextEncoder) -> tuple[int, float]:
    """Raises if anything that must hold does not; returns how many records there are, and seconds to open the store."""
    start = time.perf_counter()
    memory = Memory(place, encoder=encoder)
    memory.search(TEXTS[0])
    seconds = time.perf_counter() - start
    with memory:
        problems = memory.check()
        assert problems == [], problems
        check_notes(memory, notes)
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


def check_notes(memory: Memory, notes: list[Path]) -> None:
    """Raises if something is not there that was acknowledged."""
    expected: dict[str, set[str | None]] = {}
    told: Counter[str] = Counter()
    for file in notes:
        for line in file.read_text().splitlines():
            said = json.loads(line)
            if said[0] == "has":
                expected[said[1]] = {said[2]}
                told[said[1]] += 1
            else:
                new = None if said[2] == "delete" else said[3]
                expected[said[1]] = {new} if said[0] == "done" else expected[said[1]] | {new}
    for id, texts in expected.items():
        record = memory.get(id)
        assert (None if record is None else record.text) in texts, f"{id} is {record}; expected {texts}"
        assert record is None or record.repeats + 1 >= told[id], f"{id} was told {told[id]} times: {record}"


def replay_log(store: Store, scope: int) -> list[tuple[int, str]]:
    """The sequence numbers and texts of a scope's records in their order, as the log alone tells them."""
    texts: dict[int, str] = {}
    rows = store._all(f"SELECT seq, kind, body FROM events WHERE scope = {scope} ORDER BY n")  # type: ignore[attr-defined]
    for seq, kind, body in rows:
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
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run(
    folder: Path, encoder: TextEncoder, engine: str, rounds: int, writers: int, seconds: float, seed: int
) -> dict[str, float]:
    """All rounds; returns figures."""
    draw = random.Random(seed)
    opened, most, killed = [], 0, 0
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer()) if engine == "postgres" else None
        for number in range(rounds):
            store = f"store {number // PER_STORE}"
            place = str(folder / store) if server is None else server.url(store.replace(" ", "_"))
            if number % PER_STORE == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                notes: list[Path] = []
            new = [folder / f"notes {number} {writer}" for writer in range(writers)]
            for file in new:
                file.touch()
            started = [fork(write, place, file, encoder, 4 * number + i) for i, file in enumerate(new)]
            time.sleep(draw.uniform(0.05, seconds))
            if server is not None and number % 2:
                server.kill()
                server.start()
                killed += 1
                time.sleep(draw.uniform(0.05, seconds))
            for process in draw.sample(started, len(started)):
                assert not os.waitpid(process, os.WNOHANG)[0], "a writer ended by itself"
                os.kill(process, signal.SIGKILL)
                time.sleep(draw.choice([0, 0, 0.01]))
                os.waitpid(process, 0)
            if server is not None:
                server.wait_for_clients()
            notes += new
            records, took = check(place, notes, encoder)
            opened.append(took)
            most = max(most, records)
    return {"rounds": rounds, "server_kills": killed, "most_records": most, "slowest_opening": max(opened)}


def reopen(folder: Path, encoder: TextEncoder, many: int) -> dict[str, float]:
    """Seconds to open a store of many records after a writer was killed, and to search it the first time."""
    with Memory(folder, encoder=encoder) as memory:
        draw = random.Random(0)
        for start in range(0, many, 1000):
            numbers = range(start, min(start + 1000, many))
            memory.add_many(draw.choices(TEXTS, k=len(numbers)), metadata=[{"n": number} for number in numbers])
    notes = folder / "notes"
    notes.touch()
    process = fork(write, str(folder), notes, encoder, 1)
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
    parser.add_argument("--engines", nargs="+", choices=["sqlite", "postgres"], default=["sqlite"])
    parser.add_argument("--reopen", type=int, help="Measure the opening of a store of so many records instead.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    encoder = CachedEncoder(TextEncoder.load())
    encoder.encode(TEXTS)
    figures: dict[str, Any]
    if options.reopen:
        figures = reopen(options.folder, encoder, options.reopen)
    else:
        given = (options.rounds, options.writers, options.seconds, options.seed)
        figures = {engine: run(options.folder, encoder, engine, *given) for engine in options.engines}
    print(json.dumps(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
