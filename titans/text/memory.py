"""The text memory: write texts, find them again, and know how surprising each was."""

from __future__ import annotations

import json
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from titans.files import write_atomically
from titans.text.database import FORMAT
from titans.text.encoder import Progress, TextEncoder
from titans.text.index import LocalIndex, Selection
from titans.text.neural import NeuralTextMemory, ScopeMemory
from titans.text.qdrant import QdrantIndex
from titans.text.ranking import Eviction, Ranking, choose_evicted
from titans.text.records import (
    MAX_FOUND,
    Event,
    Found,
    OtherEncoder,
    Record,
    Scope,
    StoreError,
    UnknownRecord,
    check_count,
    check_filters,
    check_metadata,
    check_name,
    check_role,
    check_text,
    check_threshold,
    check_time,
    new_id,
    read_records,
    utc_now,
)
from titans.text.replay import Replay, advance
from titans.text.search import Search
from titans.text.sqlite import ScopeRow, SqliteStore, State

BATCH = 1_000  # texts that are encoded and written at a time
SCOPES_KEPT = 64  # scopes whose memories stay in this process


class Update(NamedTuple):
    """A record that takes the place of its last version."""

    record: Record
    vector: np.ndarray | None  # None: the text stays
    keep_old: bool


class Memory:
    """A store of texts with a neural memory per scope; safe to share between threads and between processes.

    Every text belongs to a user, and may belong to an agent and a session. Each such triple is a scope with a neural
    memory of its own, which is a pure function of the scope's texts in their order. A search with fewer names covers
    all records of that user that match those given. No call reads or counts another user's records, except those that
    concern the whole store: ``stats``, ``scopes`` and ``export`` without a user, ``reindex``, eviction.

    Args:
        path: folder of the store, or its file if the name ends in .sqlite3, .sqlite or .db; made if it does not exist.
        encoder: what turns texts into vectors, or its folder or name; default: the one that ships with the package.
        neural: the neural memory's projections, or their folder; default: untrained ones.
        limit: the largest number of records in the store; beyond it, ``eviction`` says which are erased.
        ranking: how the signals of a search are weighted.
        eviction: a policy, or its name: ``"surprise"``, ``"fifo"``, ``"random"`` or ``"longest"``.
        url: uses Qdrant as the vector index: the URL of a server, a folder for its local mode, or ":memory:".
        read_only: nothing is written, and the store must exist.
    """

    def __init__(
        self,
        path: str | Path = "titans-memory",
        encoder: TextEncoder | str | Path | None = None,
        neural: NeuralTextMemory | str | Path | None = None,
        limit: int | None = None,
        ranking: Ranking = Ranking(),  # noqa: B008 (frozen)
        eviction: Eviction | str = "surprise",
        url: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.limit = None if limit is None else check_count(limit, "limit", 1)
        self.ranking = ranking
        self.eviction = eviction if isinstance(eviction, Eviction) else Eviction(eviction)
        self._encoder: TextEncoder | str | Path | None = encoder
        self._neural: NeuralTextMemory | str | Path | None = neural
        self._untrained = False  # the projections are the default ones
        self._version: str | None = None
        self._memories: OrderedDict[int, tuple[int, ScopeMemory]] = OrderedDict()
        self._uses: Counter[int] = Counter()
        self._local: LocalIndex | None = None
        self._qdrant: QdrantIndex | None = None
        self.url = url
        self.store = SqliteStore(path, read_only)
        self._lock = self.store.lock  # one lock for all: two could wait for each other
        if self.store.damage:
            warnings.warn(self.store.damage, stacklevel=2)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes down which records were used, and closes the store."""
        if self._uses and not self.store.read_only:
            try:
                with self.store.writing():
                    self._write_uses()
            except StoreError:  # counting uses is not worth a failure at the end
                pass
        if self._qdrant is not None:
            self._qdrant.close()
        self.store.close()

    @property
    def encoder(self) -> TextEncoder:
        """What turns texts into vectors; loaded when first needed."""
        with self._lock:
            if not isinstance(self._encoder, TextEncoder):
                self._encoder = TextEncoder.load(self._encoder)
            return self._encoder

    @property
    def neural(self) -> NeuralTextMemory:
        """The projections of the neural memories; loaded when first needed."""
        with self._lock:
            if self._neural is None:
                with self.store.reading():
                    width = self.store.get_meta("width")
                self._neural = NeuralTextMemory.default(self.encoder.width if width is None else int(width))
                self._untrained = True
            elif not isinstance(self._neural, NeuralTextMemory):
                self._neural = NeuralTextMemory.load(self._neural)
            return self._neural

    def _neural_version(self) -> str:
        if self._version is None:
            self._version = self.neural.fingerprint
        return self._version

    def add(
        self,
        text: str,
        *,
        user: str = "default",
        agent: str | None = None,
        session: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        role: str | None = None,
        created: str | datetime | None = None,
    ) -> Record:
        """Remembers a text; it is on the disk when this returns."""
        return self.add_many(
            [text], user=user, agent=agent, session=session, metadata=metadata, role=role, created=created
        )[0]

    def add_many(
        self,
        texts: Sequence[str],
        *,
        user: str = "default",
        agent: str | None = None,
        session: str | None = None,
        metadata: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        role: str | Sequence[str | None] | None = None,
        created: str | datetime | Sequence[str | datetime] | None = None,
    ) -> list[Record]:
        """Remembers texts of one scope, in their order: all of them or, if anything is wrong with one, none.

        ``metadata``, ``role`` and ``created`` apply to all of them, or are lists with one entry per text.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one text; expected a list of them")
        scope = Scope(user, agent, session)
        now = utc_now()
        of_each = zip(
            texts, _for_each(metadata, len(texts), "metadata"), _for_each(role, len(texts), "role"),
            _for_each(created, len(texts), "created"), strict=True,
        )  # fmt: skip
        records = []
        for index, (text, data, who, at) in enumerate(of_each):
            moment = now if at is None else check_time(at, "created")
            records.append(
                Record(
                    id=new_id(), text=check_text(text, "text" if len(texts) == 1 else f"texts[{index}]"),
                    user=scope.user, agent=scope.agent, session=scope.session, role=check_role(who),
                    metadata=check_metadata(data), created=moment, updated=moment,
                )
            )  # fmt: skip
        return self._write(records)

    def _write(self, records: Sequence[Record]) -> list[Record]:
        """Writes records in one transaction, each scope's memory with them; returns them with their surprise."""
        if not records:
            return []
        self.store.require_writable()
        vectors = self.encoder.encode([record.text for record in records])
        groups: dict[Scope, list[int]] = {}
        for index, record in enumerate(records):
            groups.setdefault(record.scope, []).append(index)
        written = list(records)
        memories = {}
        with self.store.writing():
            self._check_fits(take=True)
            rows = {scope: self.store.make_scope(scope) for scope in groups}
            for scope, members in groups.items():
                row = rows[scope]
                memory, surprises, states = advance(self.neural, self._memory_of(row), vectors[members])
                self.store.put_states(row.id, states)
                self.store.advance_scope(row.id, len(members))
                memories[row.id] = (row.version + 1, memory)
                for index, surprise in zip(members, surprises, strict=True):
                    written[index] = replace(records[index], surprise=float(surprise))
            seqs = [
                self.store.insert(record, rows[record.scope], vector, self.encoder.fingerprint)
                for record, vector in zip(written, vectors, strict=True)
            ]
            self._write_uses()
        for scope_id, known in memories.items():
            self._remember(scope_id, known)
        self._evict(frozenset(seqs))
        self._follow()
        if self.url is None:
            for user in {record.user for record in records}:
                self._index().build(user)
        return written

    def search(
        self,
        query: str,
        *,
        user: str = "default",
        agent: str | None = None,
        session: str | None = None,
        filters: Mapping[str, Any] | None = None,
        limit: int = 10,
        threshold: float | None = None,
        count_uses: bool = True,
    ) -> Found:
        """The records that match a question best.

        Args:
            query: the question.
            user, agent, session: whose records; None matches any agent or session. The neural signal, if the ranking
                has one, comes from the memory of exactly this triple.
            filters: on metadata, such as ``{"topic": "food"}``, ``{"year": {"gte": 2020}}``; see ``check_filters``.
            limit: the largest number of hits.
            threshold: records whose cosine with the question is lower are left out, and counted. (The cosine is the
                one part of a score that means the same in every store.)
            count_uses: every hit counts as used, which eviction may respect; if not, tell :meth:`use` which ones were.
        """
        query = check_text(query, "query")
        scope = Scope(user, agent, session)
        tests = check_filters(filters)
        limit = check_count(limit, "limit", 1, MAX_FOUND)
        threshold = check_threshold(threshold)
        with self.store.reading():
            if self._select(scope, {}) is None:
                return Found([], 0, threshold, f"nothing is remembered of {scope}")
        vector = self.encoder.encode([query])[0]
        self._follow()
        with self.store.reading():
            self._check_fits()
            selection = self._select(scope, tests)
            if selection is None:
                return Found([], 0, threshold, f"nothing is remembered of {scope}")
            local = self._index()
            index = local if self.url is None else self._mirror()
            answer = self._answer(vector, scope) if self.ranking.neural else None
            search = Search(self.store, local, index, selection, query, vector, answer, self._project)
            found, seqs = search.find(self.ranking, limit, threshold)
            if count_uses:
                self._uses.update(seqs)
            return found

    def use(self, ids: Sequence[str], *, user: str | None = None) -> None:
        """Counts records as used once more; with ``user``, only those of that user. Unknown ids are skipped.

        The count is written with the next text, or when the memory is closed.
        """
        if isinstance(ids, str):
            raise ValueError("ids is one id; expected a list of them")
        found = [self._find(id, user) for id in ids]
        with self._lock:
            self._uses.update(seq for seq, _ in filter(None, found))

    def _select(self, scope: Scope, tests: Mapping[str, Mapping[str, Any]]) -> Selection | None:
        """The records of a user that match the names and pass the tests; None if the names match none."""
        user = self.store.find_user(scope.user)
        if user is None or not user.count:
            return None
        scopes = None
        if scope.agent is not None or scope.session is not None:
            scopes = self.store.matching_scopes(user.id, scope.agent, scope.session)
            if not scopes:
                return None
        return Selection(scope.user, user, scopes, self.store.matching(user.id, tests) if tests else None)

    def _answer(self, vector: np.ndarray, scope: Scope) -> np.ndarray | None:
        """What the memory of exactly this scope answers to a question; None if nothing was written to it."""
        row = self.store.find_scope(scope)
        if row is None or not row.count:
            return None
        answer: np.ndarray = self.neural.turn(self._memory_of(row), torch.from_numpy(vector[None])).o[0].numpy()
        return answer

    @torch.no_grad()
    def _project(self, vectors: np.ndarray) -> np.ndarray:
        projected: np.ndarray = self.neural.project(torch.from_numpy(vectors)).numpy()
        return projected

    def _vectors(self, seqs: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.store.vectors([int(seq) for seq in seqs], self._width())

    def get(self, id: str, *, user: str | None = None) -> Record | None:
        """A record by its id, None if there is none; with ``user``, only one of that user."""
        found = self._find(id, user)
        return None if found is None else found[1]

    def _find(self, id: str, user: str | None) -> tuple[int, Record] | None:
        check_name(id, "id")
        if user is not None:
            check_name(user, "user")
        with self.store.reading():
            found = self.store.find(id)
        return found if found is None or user is None or found[1].user == user else None

    def _find_or_raise(self, id: str, user: str | None) -> tuple[int, Record]:
        found = self._find(id, user)
        if found is None:
            raise UnknownRecord(f"there is no record {id!r}" + ("" if user is None else f" of user {user!r}"))
        return found

    def records(
        self,
        *,
        user: str = "default",
        agent: str | None = None,
        session: str | None = None,
        filters: Mapping[str, Any] | None = None,
        limit: int = 100,
    ) -> list[Record]:
        """The newest records of a user that match, newest first."""
        scope, tests = Scope(user, agent, session), check_filters(filters)
        limit = check_count(limit, "limit", 1)
        with self.store.reading():
            selection = self._select(scope, tests)
            if selection is None:
                return []
            known = self._index().catalogue(selection.user, vectors=False)
            allowed = known.allowed(selection)
            seqs = known.seqs if allowed is None else known.seqs[allowed]
            return list(self.store.records(seqs[::-1][:limit]).values())

    def update(
        self,
        id: str,
        text: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        user: str | None = None,
        keep_old: bool = False,
    ) -> Record:
        """Replaces a record's text or metadata; returns the record.

        The scope's memory is made anew, as if the new text had always stood there. The old text and metadata are
        erased as by :meth:`delete`; with ``keep_old`` they stay in the record's history until it is deleted.
        """
        if text is None and metadata is None:
            raise ValueError("text and metadata are both None; expected something to change")
        self.store.require_writable()
        wanted = None if text is None else check_text(text)
        data = None if metadata is None else check_metadata(metadata)
        vector = None if wanted is None else self.encoder.encode([wanted])[0]
        while True:
            seq, old = self._find_or_raise(id, user)
            record = replace(
                old, text=old.text if wanted is None else wanted, metadata=old.metadata if data is None else data,
                updated=utc_now(), version=old.version + 1,
            )  # fmt: skip
            if record.text == old.text:
                vector = None
            if self._change({seq}, "update", Update(record, vector, keep_old)):
                break
        self._follow()
        return self._find_or_raise(id, user)[1]

    def delete(self, id: str | Sequence[str], *, user: str | None = None) -> int:
        """Erases a record, or several at once; returns how many.

        Text, vector, words and the texts in the log go, and the scope's memory is made again without them by replay:
        bit for bit that of a store which never saw them. With ``user``, only that user's records can be erased.
        """
        ids = [id] if isinstance(id, str) else list(id)
        self.store.require_writable()
        seqs = {self._find_or_raise(one, user)[0] for one in ids}
        self._change(seqs, "delete")
        self._follow()
        return len(seqs)

    def delete_all(self, *, user: str, agent: str | None = None, session: str | None = None) -> int:
        """Erases every record of a user, or those of an agent or session, with their history; returns how many.

        Nothing of such a scope stays in the store, not even its name.
        """
        scope = Scope(user, agent, session)
        with self.store.writing():
            row = self.store.find_user(scope.user)
            if row is None:
                return 0
            scopes = self.store.matching_scopes(row.id, scope.agent, scope.session, empty=True)
            count = sum(self.store.remove_scope(number) for number in scopes)
            self.store.begin_erasing()
        for number in scopes:
            self._memories.pop(number, None)
        self.store.finish_erasing()
        self._follow()
        return count

    def _change(self, seqs: set[int], kind: str, update: Update | None = None) -> bool:
        """Removes records, or updates one, and erases what was there.

        Returns False if the record to be updated has changed meanwhile: then nothing was done.
        """
        vector = None if update is None else update.vector
        only_metadata = update is not None and vector is None

        def scopes() -> dict[ScopeRow, list[int]]:
            return {} if only_metadata else self.store.scopes_holding(seqs)

        with self.store.reading():
            before = scopes()
        # Replayed before the transaction, which others wait for; again inside it if they wrote to the scope meanwhile.
        replays = {scope: self._replay(scope, members, vector) for scope, members in before.items()}
        memories = {}
        with self.store.writing():
            if update is not None:
                if vector is not None:
                    self._check_fits()
                now = self.store.find(update.record.id)
                if now is None or now[1].version != update.record.version - 1:
                    return False
            for scope, members in scopes().items():
                replay = replays.get(scope) or self._replay(scope, members, vector)
                self.store.drop_states(scope.id, replay.base)
                self.store.put_states(scope.id, replay.states)
                self.store.set_surprises(replay.surprises)
                self.store.advance_scope(scope.id, -len(members) if update is None else 0)
                if replay.memory is not None:
                    memories[scope.id] = (scope.version + 1, replay.memory)
                if update is None:
                    for seq in members:
                        self.store.remove(seq, kind)
            if update is not None:
                encoder = "" if vector is None else self.encoder.fingerprint
                self.store.change(min(seqs), update.record, vector, encoder, update.keep_old)
            self.store.begin_erasing()
        for number, known in memories.items():
            self._remember(number, known)
        if update is None:
            for seq in seqs:
                self._uses.pop(seq, None)
        self.store.finish_erasing()
        return True

    def _replay(self, scope: ScopeRow, touched: Sequence[int], vector: np.ndarray | None) -> Replay:
        """A scope's memory without the texts ``touched``, or with ``vector`` in place of the only one of them."""
        with self.store.reading():
            seqs = self.store.scope_seqs(scope.id)
            first = next((index for index, seq in enumerate(seqs) if seq in touched), len(seqs))
            if self.store.get_meta("neural") != self._neural_version():
                # Other projections made this store's memories: they are dropped, and whoever has those replays them.
                return Replay(first, None, [], [])
            state = self.store.find_state(scope.id, first)
            memory = self.neural.empty() if state is None else self.neural.unpack(state)
            rest = [seq for seq in seqs[memory.count :] if vector is not None or seq not in touched]
            vectors = self._vectors(rest)
        if vector is not None:
            vectors[np.isin(rest, touched)] = vector
        base = memory.count
        memory, surprises, states = advance(self.neural, memory, vectors)
        return Replay(base, memory, [*zip(rest, map(float, surprises), strict=True)], states)

    def _evict(self, new: frozenset[int]) -> None:
        """Makes room if the store is over its limit."""
        if self.limit is None:
            return
        with self.store.reading():
            count = self.store.count()
            if count <= self.limit:
                return
            rows = self.store.weighed()
        many = count - self.limit + int(self.limit * self.eviction.spare)
        self._change(set(choose_evicted(rows, many, self.eviction, new)), "evict")

    def history(self, id: str, *, user: str | None = None) -> list[Event]:
        """What happened to a record, oldest first; erased texts are None. Empty for an unknown id."""
        check_name(id, "id")
        with self.store.reading():
            return self.store.history(id, user)

    def surprise(
        self, text: str, *, user: str = "default", agent: str | None = None, session: str | None = None
    ) -> float:
        """How surprising a text would be to a scope, without writing it."""
        vector = self.encoder.encode([check_text(text)])
        memory = self.scope_memory(user=user, agent=agent, session=session)
        return float(self.neural.write(memory, torch.from_numpy(vector))[1][0])

    def scope_memory(
        self, *, user: str = "default", agent: str | None = None, session: str | None = None
    ) -> ScopeMemory:
        """The neural memory of exactly this scope; an empty one if nothing was written to it."""
        with self.store.reading():
            row = self.store.find_scope(Scope(user, agent, session))
            if row is None:
                return self.neural.empty()
            self._check_fits(encoder=False)
            return self._memory_of(row)

    def _memory_of(self, row: ScopeRow) -> ScopeMemory:
        """A scope's memory: as kept in this process, or the last state and the texts since."""
        known = self._memories.get(row.id)
        if known is not None and known[0] == row.version:
            return known[1]
        state = self.store.find_state(row.id, row.count)
        memory = self.neural.empty() if state is None else self.neural.unpack(state)
        rest = self.store.scope_seqs(row.id, memory.count)
        if rest:
            memory = self.neural.write(memory, torch.from_numpy(self._vectors(rest)))[0]
        if memory.count != row.count:
            raise StoreError(f"scope {row.id} has {memory.count} texts; expected {row.count}, so reindex the store")
        self._remember(row.id, (row.version, memory))
        return memory

    def _remember(self, scope: int, known: tuple[int, ScopeMemory]) -> None:
        with self._lock:
            self._memories[scope] = known
            self._memories.move_to_end(scope)
            while len(self._memories) > SCOPES_KEPT:
                self._memories.popitem(last=False)

    def scopes(self, user: str | None = None) -> list[tuple[Scope, int]]:
        """Every scope that has records, or those of a user, with the number of its records."""
        with self.store.reading():
            return self.store.list_scopes(user)

    def stats(self, user: str | None = None) -> dict[str, Any]:
        """Figures of the store, or of one user in it."""
        with self.store.reading():
            figures = self.store.stats(user)
            if user is None:
                figures |= {"encoder": self.store.get_meta("encoder"), "neural": self.store.get_meta("neural")}
                figures["width"] = int(self.store.get_meta("width") or 0)
        if user is None:
            figures |= {"path": str(self.store.file), "format": FORMAT, "bytes": self._bytes()}
            figures |= {"limit": self.limit, "damage": self.store.damage}
        return figures

    def _bytes(self) -> int:
        files = [self.store.file, *self.store.file.parent.glob(self.store.file.name + "-*")]
        files += list(self.store.index_folder.glob("*")) if self.store.index_folder.is_dir() else []
        return sum(file.stat().st_size for file in files if file.is_file())

    def check(self) -> list[str]:
        """What is wrong with the store, one sentence each; reads all of it."""
        with self.store.reading() if self.store.read_only else self.store.writing():
            return self.store.check()

    def export(self, path: str | Path, user: str | None = None) -> int:
        """Writes every record, or those of a user, to a file of JSON lines in their order; returns how many."""
        with self.store.reading():
            lines = [json.dumps(record.to_dict(), ensure_ascii=False) for record in self.store.list_records(user)]
        write_atomically(Path(path), "".join(line + "\n" for line in lines).encode("utf-8"))
        return len(lines)

    def import_(self, path: str | Path, progress: Progress | None = None) -> int:
        """Adds the records of a file of JSON lines, in their order, with their ids; returns how many were added.

        A line needs only a ``text``. All lines are checked before any is written. A record that is already there, with
        the same id, text and scope, is skipped, so that an import that was cut off can be run again.
        """
        self.store.require_writable()
        records = [record for number, record in read_records(Path(path)) if not self._is_there(number, record, path)]
        return self.restore(records, progress)

    def restore(self, records: Sequence[Record], progress: Progress | None = None) -> int:
        """Adds records as they are, with their ids and times, in their order; returns how many.

        Their surprise is that of this store's memories.
        """
        done = 0
        for start in range(0, len(records), BATCH):
            done += len(self._write(records[start : start + BATCH]))
            if progress is not None:
                progress(done, len(records), "writing")
        return done

    def _is_there(self, number: int, record: Record, path: str | Path) -> bool:
        found = self._find(record.id, None)
        if found is None:
            return False
        if (found[1].text, found[1].scope) != (record.text, record.scope):
            raise ValueError(f"{path}, line {number}: the store has another record with the id {record.id!r}")
        return True

    def reindex(self, progress: Progress | None = None) -> int:
        """Makes all vectors and memories again, with this encoder and these projections; returns the number of records.

        One transaction replaces the old ones: if this is stopped before it, the store is as it was.
        """
        self.store.require_writable()
        default = self._neural is None or self._untrained
        neural = NeuralTextMemory.default(self.encoder.width) if default else self.neural
        self._check_width(neural)
        with self.store.reading():
            made_by = self.store.get_meta("encoder")
        old = None
        if self.url is not None and made_by not in (None, self.encoder.fingerprint):
            with self._qdrant_may_be_away():
                old = self._mirror()
        vectors: dict[tuple[int, str], np.ndarray] = {}
        while True:
            with self.store.reading():
                rows, last = self.store.texts(), self.store.last_event()
            missing = [(seq, text) for seq, _, text in rows if (seq, text) not in vectors]
            for start in range(0, len(missing), BATCH):
                part = missing[start : start + BATCH]
                vectors.update(zip(part, self.encoder.encode([text for _, text in part]), strict=True))
                if progress is not None:
                    progress(len(vectors), len(rows), "encoding")
            scopes: dict[int, list[int]] = {}
            for index, (_, scope, _) in enumerate(rows):
                scopes.setdefault(scope, []).append(index)
            matrix = [vectors[seq, text] for seq, _, text in rows]
            surprises: list[tuple[int, float]] = []
            states: dict[int, list[State]] = {}
            for scope, members in scopes.items():
                _, found, states[scope] = advance(neural, neural.empty(), np.stack([matrix[i] for i in members]))
                surprises += [(rows[i][0], float(value)) for i, value in zip(members, found, strict=True)]
            with self.store.writing():
                if self.store.last_event() != last:
                    continue  # others wrote meanwhile: only what is new is encoded
                new = ((row[0], vector.tobytes()) for row, vector in zip(rows, matrix, strict=True))
                self.store.replace_vectors(new, self.encoder.fingerprint)
                for scope, made in states.items():
                    self.store.put_states(scope, made)
                self.store.set_surprises(surprises)
                self._set_versions(neural)
                self.store.begin_erasing()
            break
        self._neural, self._version, self._local = neural, neural.fingerprint, None
        self._memories.clear()
        self.store.finish_erasing()
        if old is not None:
            with self._qdrant_may_be_away():
                old.drop()
            old.close()
            self._qdrant = None
        self._follow()
        return len(rows)

    def _check_fits(self, encoder: bool = True, take: bool = False) -> None:
        """Raises if other weights made what is in the store; with ``take``, an empty store is marked with these."""
        mine = {"neural": self._neural_version()}
        if encoder:
            mine["encoder"] = self.encoder.fingerprint
            self._check_width(self.neural)
        theirs = {name: self.store.get_meta(name) for name in mine}
        if theirs == mine:
            return
        if self.store.count():
            wrong = next(name for name in mine if theirs[name] != mine[name])
            what = {"encoder": "vectors were made by another encoder", "neural": "memories by other projections"}[wrong]
            raise OtherEncoder(
                f"{self.store.file}: its {what} ({theirs[wrong]}, this is {mine[wrong]}); open it with the same, or "
                "make them again with reindex (`titans memory reindex`)"
            )
        if take:
            self._set_versions(self.neural)
            self._local = None

    def _check_width(self, neural: NeuralTextMemory) -> None:
        if neural.config.width != self.encoder.width:
            raise OtherEncoder(
                f"the projections take vectors of {neural.config.width} numbers; the encoder makes {self.encoder.width}"
            )

    def _set_versions(self, neural: NeuralTextMemory) -> None:
        self.store.set_meta("encoder", self.encoder.fingerprint)
        self.store.set_meta("neural", neural.fingerprint)
        self.store.set_meta("width", str(self.encoder.width))

    def _width(self) -> int:
        with self.store.reading():
            return int(self.store.get_meta("width") or self.encoder.width)

    def _index(self) -> LocalIndex:
        if self._local is None:
            self._local = LocalIndex(self.store, self._width())
        return self._local

    def _mirror(self) -> QdrantIndex:
        if self._qdrant is None:
            assert self.url is not None
            with self.store.reading():
                store, encoder = self.store.get_meta("store"), self.store.get_meta("encoder")
            assert store is not None and encoder is not None
            self._qdrant = QdrantIndex(self.url, store, encoder, self._width())
        return self._qdrant

    def _follow(self) -> None:
        """Brings Qdrant, if it is used, up to date. The store has the records: a server that is away is no loss."""
        if self.url is None or self.store.read_only:
            return
        with self._qdrant_may_be_away():
            self._mirror().follow(self.store)

    @contextmanager
    def _qdrant_may_be_away(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            warnings.warn(f"what was written is in {self.store.file}, but not in Qdrant yet: {error}", stacklevel=4)

    def _write_uses(self) -> None:
        uses, self._uses = self._uses, Counter()
        self.store.add_uses(uses)


def _for_each(value: Any, many: int, name: str) -> list[Any]:
    """One value per text: the list as it is, or the same value for all."""
    if isinstance(value, (list, tuple)):
        if len(value) != many:
            raise ValueError(f"{name} has {len(value)} entries; expected {many}, one per text")
        return list(value)
    return [value] * many
