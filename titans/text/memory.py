"""The text memory: write texts, find them again, and know how surprising each was."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titans.files import replacing
from titans.text.index import highest
from titans.text.location import default_store, is_server
from titans.text.ranking import Eviction, Ranking, choose_evicted
from titans.text.records import (
    MAX_FOUND,
    MAX_NUMBER,
    Event,
    Found,
    OtherEncoder,
    Record,
    Scope,
    StoreError,
    UnknownRecord,
    UsedRequest,
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
from titans.text.search import Search, Voice
from titans.text.sqlite import SqliteStore
from titans.text.store import FORMAT, ScopeRow, Selection, State, Store
from titans.text.surprise import LAST, Surprise, assess
from titans.text.versions import LEAST_COSINE, find_older_version, is_statement

if TYPE_CHECKING:  # loaded when first needed, since torch takes seconds: whoever only lists or shows records needs none
    from titans.ops import MemoryState
    from titans.text.encoder import Progress, TextEncoder
    from titans.text.neural import NeuralTextMemory, ScopeMemory

BATCH = 1_000  # texts that are encoded and written at a time
SCOPES_KEPT = 64  # scopes whose memories stay in this process
NEAREST = 8  # records that a new text is compared with, to find what it replaces
VOICES = 16  # scopes whose memories are asked in one search, those written to last


class Update(NamedTuple):
    """A record that takes the place of its last version."""

    record: Record
    vector: np.ndarray | None  # None: the text stays
    keep_old: bool


class Request(NamedTuple):
    """A call that may be made again: nothing of it can be read from what the store keeps.

    What is kept of the texts cannot be guessed without the name, of which only a hash is kept.
    """

    key: str
    digest: str

    @classmethod
    def make(cls, name: str, said: Any) -> Request:
        """Of a name and of what was said under it."""
        return cls(*(hashlib.sha256(text.encode()).hexdigest() for text in (name, json.dumps([name, said]))))


class Known(NamedTuple):
    """A scope's memory as this process keeps it."""

    version: int
    memory: ScopeMemory
    state: MemoryState | None = None  # after all texts, made when first asked


class Memory:
    """A store of texts with a neural memory per scope; safe to share between threads and between processes.

    Every text belongs to a user, and may belong to an agent and a session. Each such triple is a scope with a neural
    memory of its own, which is a pure function of the scope's texts in their order. A search with fewer names covers
    all records of that user that match those given. No call reads or counts another user's records, except those that
    concern the whole store: ``stats``, ``scopes`` and ``export`` without a user, ``reindex``, ``import_``, eviction.

    Args:
        path: folder of the store, or its file if the name ends in .sqlite3, .sqlite or .db, made if it does not exist;
            or the URL of a PostgreSQL database, ``postgresql://...``; default: see
            :func:`titans.text.location.default_store`.
        encoder: what turns texts into vectors, or its folder or name; default: the one that ships with the package.
        neural: the neural memory's projections, or their folder; default: untrained ones.
        limit: the largest number of records in the store; beyond it, ``eviction`` says which are erased.
        ranking: how the signals of a search are weighted.
        eviction: a policy, or its name: see :class:`Eviction`.
        read_only: nothing is written, and the store must exist.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        encoder: TextEncoder | str | Path | None = None,
        neural: NeuralTextMemory | str | Path | None = None,
        limit: int | None = None,
        ranking: Ranking = Ranking(),  # noqa: B008 (frozen)
        eviction: Eviction | str = Eviction(),  # noqa: B008 (frozen)
        read_only: bool = False,
    ) -> None:
        self.limit = None if limit is None else check_count(limit, "limit", 1)
        self.ranking = ranking
        self.eviction = eviction if isinstance(eviction, Eviction) else Eviction(eviction)
        self._encoder: TextEncoder | str | Path | None = encoder
        self._neural: NeuralTextMemory | str | Path | None = neural
        self._untrained = False  # the projections are the default ones
        self._version: str | None = None
        self._memories: OrderedDict[int, Known] = OrderedDict()
        self._uses: Counter[int] = Counter()
        self.store = open_store(default_store() if path is None else path, read_only)
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
        self.store.close()

    @property
    def encoder(self) -> TextEncoder:
        """What turns texts into vectors; loaded when first needed."""
        with self._lock:
            if self._encoder is None or isinstance(self._encoder, (str, Path)):
                from titans.text.encoder import TextEncoder

                self._encoder = TextEncoder.load(self._encoder)
            return self._encoder

    @property
    def neural(self) -> NeuralTextMemory:
        """The projections of the neural memories; loaded when first needed."""
        from titans.text.neural import NeuralTextMemory

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
        request: str | None = None,
    ) -> Record:
        """Remembers a text; it is on the disk when this returns. For ``request`` see :meth:`add_many`."""
        return self.add_many(
            [text], user=user, agent=agent, session=session, metadata=metadata, role=role, created=created,
            request=request,
        )[0]  # fmt: skip

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
        request: str | None = None,
    ) -> list[Record]:
        """Remembers texts of one scope, in their order: all of them or, if anything is wrong with one, none.

        ``metadata``, ``role`` and ``created`` apply to all of them, or are lists with one entry per text.

        ``request`` is a name that the caller gives to this call, so that it can be made again if its answer was lost:
        within a day, the same call with the same name writes nothing and returns the records of the first. Another call
        with that name of the same user and agent raises a :class:`titans.text.records.UsedRequest`.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one text; expected a list of them")
        scope = Scope(user, agent, session)
        now = datetime.now(timezone.utc)
        times = _for_each(created, len(texts), "created")
        of_each = zip(
            texts, _for_each(metadata, len(texts), "metadata"), _for_each(role, len(texts), "role"), times, strict=True
        )
        records = []
        for index, (text, data, who, at) in enumerate(of_each):
            # A microsecond apart: of two versions of a statement the one that was told later is the newer.
            moment = check_time(now + timedelta(microseconds=index) if at is None else at, "created")
            records.append(
                Record(
                    id=new_id(), text=check_text(text, "text" if len(texts) == 1 else f"texts[{index}]"),
                    user=scope.user, agent=scope.agent, session=scope.session, role=check_role(who),
                    metadata=check_metadata(data), created=moment, updated=moment,
                )
            )  # fmt: skip
        if request is None:
            return self._write(records, merge=True)
        said = [scope.names, [(record.said, at and record.created) for record, at in zip(records, times, strict=True)]]
        name = json.dumps([scope.agent, check_name(request, "request")])
        return self._write(records, merge=True, request=Request.make(name, said))

    def _write(self, records: Sequence[Record], merge: bool = False, request: Request | None = None) -> list[Record]:
        """Writes records in one transaction, each scope's memory with them; returns them as they are in the store.

        With ``merge``, exact repeats are counted instead of written, and new versions of a statement are linked to the
        one before. A ``request`` has records of one scope, and is noted in the same transaction.
        """
        if not records:
            return []
        self.store.require_writable()
        vectors = self.encoder.encode([record.text for record in records])
        groups: dict[Scope, list[int]] = {}
        for index, record in enumerate(records):
            groups.setdefault(record.scope, []).append(index)
        written = list(records)
        new: list[int] = []
        seqs: dict[int, int] = {}
        repeats: dict[int, int] = {}
        memories = {}
        self._take_if_empty()
        with self.store.writing():
            self._check_fits()
            # In a fixed order, so that two writers never wait for each other.
            rows = {scope: self.store.make_scope(scope) for scope in sorted(groups, key=lambda scope: scope.names)}
            if request is not None:
                owner = rows[records[0].scope].user
                before = self._find_answer(owner, request, records[0].user)
                if before is not None:
                    return before
            for scope, row in rows.items():
                members = groups[scope]
                if merge:
                    members = self._find_repeats(row, members, records, seqs, repeats)
                    self._link_versions(row, members, written, vectors)
                else:
                    self._drop_foreign_links(members, written)
                if not members:
                    continue
                memory, surprises, states = advance(self.neural, self._memory_of(row), vectors[members])
                self.store.put_states(row.id, states)
                self.store.advance_scope(row.id, len(members))
                memories[row.id] = Known(row.version + 1, memory)
                for index, surprise in zip(members, surprises, strict=True):
                    written[index] = replace(written[index], surprise=float(surprise))
                new += members
            new.sort()
            made = self.store.insert([written[index] for index in new], rows, vectors[new], self.encoder.fingerprint)
            seqs |= zip(new, made, strict=True)
            for index, first in repeats.items():
                seqs[index] = seqs[first]
                self._count_repeat(seqs[index], records[index].created)
            told = self.store.records({seqs[index] for index in repeats})
            written = [told.get(seqs[index], record) for index, record in enumerate(written)]
            if request is not None:
                answer = [(record.id, record.repeats) for record in written]
                self.store.put_request(owner, request.key, request.digest, answer)
            self._write_uses()
        for scope_id, known in memories.items():
            self._remember(scope_id, known)
        with self._after_commit():
            self._evict(frozenset(seqs.values()))
            for user in {record.user for record in records}:
                self.store.build_index(user)
        return written

    def _find_answer(self, owner: int, request: Request, user: str) -> list[Record] | None:
        """What a request wrote before, as it is now but for its repeats; None if it is a new one."""
        before = self.store.find_request(owner, request.key)
        if before is None:
            return None
        digest, written = before
        if digest != request.digest:
            raise UsedRequest("the request has the name of another one; expected a new name for each")
        found = [self.store.find(id, user) for id, _ in written]
        if None in found:
            raise UsedRequest("what the request wrote before was erased since; expected a new name to write it again")
        records = (record for _, record in filter(None, found))
        return [replace(record, repeats=repeats) for record, (_, repeats) in zip(records, written, strict=True)]

    def _find_repeats(
        self,
        row: ScopeRow,
        members: Sequence[int],
        records: Sequence[Record],
        seqs: dict[int, int],
        repeats: dict[int, int],
    ) -> list[int]:
        """The members that the scope has not been told before.

        ``repeats`` notes of each of the others which member said the same first: itself if a record of the scope did,
        whose number goes to ``seqs``.
        """
        known = self.store.find_same(row.id, [records[index] for index in members])
        new: dict[tuple[str, str | None, str], int] = {}
        for place, index in enumerate(members):
            record = records[index]
            if place in known:
                repeats[index], seqs[index] = index, known[place]
                continue
            first = new.setdefault(record.said, index)
            if first != index:
                repeats[index] = first
        return list(new.values())

    def _count_repeat(self, seq: int, at: str) -> None:
        """Counts a repeat; one that is dated before the last does not set the clock back."""
        self.store.repeat(seq, max(at, self.store.records([seq])[seq].updated))

    def _drop_foreign_links(self, members: Sequence[int], records: list[Record]) -> None:
        """A record replaces only one that its scope has been told before: what else it names is forgotten."""
        before: set[str] = set()
        for index in members:
            record = records[index]
            if record.replaces is not None and record.replaces not in before:
                found = self.store.find(record.replaces, record.user)
                if found is None or found[1].scope != record.scope:
                    records[index] = replace(record, replaces=None)
            before.add(record.id)

    def _link_versions(self, row: ScopeRow, members: Sequence[int], records: list[Record], vectors: np.ndarray) -> None:
        """Notes of each text which text of its scope it replaces: one that says the same with another value."""
        members = [index for index in members if is_statement(records[index].text)]
        statements: dict[str, str] = {}  # by id of a version, that of the newest one when this began
        newest: dict[str, str] = {}  # and of that one, the newest now
        for start in range(0, len(members), BATCH):
            part, before = members[start : start + BATCH], members[max(0, start - BATCH) : start]
            near = self._nearest_of(row, vectors[part], LEAST_COSINE)
            statements |= self.store.newest_versions(list({old.id for each in near for old, _ in each}))
            cosines = vectors[part] @ vectors[before + part].T
            for place, index in enumerate(part):
                rows, values = highest(cosines[place, : len(before) + place], NEAREST)
                close = [(records[(before + part)[i]], value) for i, value in zip(rows, values.tolist(), strict=True)]
                close = [(old, cosine) for old, cosine in close if cosine >= LEAST_COSINE]
                found = sorted([*near[place], *close], key=lambda each: each[1])[-NEAREST:]
                # One version of each statement, the nearest: many versions do not make it the usual thing to say.
                candidates = {statements.get(old.id, old.id): (old, cosine) for old, cosine in found}
                old = find_older_version(records[index], list(candidates.values()))
                if old is not None:
                    statement = statements.get(old.id, old.id)
                    records[index] = replace(records[index], replaces=newest.get(statement, statement))
                    statements[records[index].id] = statement
                    newest[statement] = records[index].id

    def _nearest_of(self, row: ScopeRow, vectors: np.ndarray, least: float) -> list[list[tuple[Record, float]]]:
        """For each vector the nearest records of a scope, with their cosines, which are ``least`` at least."""
        if not row.count or not len(vectors):
            return [[] for _ in vectors]
        found = [
            [(seq, value) for seq, value in zip(seqs.tolist(), cosines.tolist(), strict=True) if value >= least]
            for seqs, cosines in self.store.nearest(Selection(row.user, (row.id,)), vectors, NEAREST)
        ]
        records = self.store.records(sorted({seq for each in found for seq, _ in each}))
        return [[(records[seq], cosine) for seq, cosine in each] for each in found]

    @contextmanager
    def _after_commit(self) -> Iterator[None]:
        """What is written stays written: what fails after that is told, not raised, or it would be written twice."""
        try:
            yield
        except Exception as error:  # whatever it is
            warnings.warn(f"everything is written to {self.store.name}, but afterwards: {error}", stacklevel=4)

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
            user, agent, session: whose records; None matches any agent or session. The neural signal comes from the
                memories of the scopes that match, of those written to last if there are more than a few.
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
            if self.store.select(scope, {}) is None:
                return Found([], 0, threshold, f"nothing is remembered of {scope}")
        vector = self.encoder.encode([query])[0]
        with self.store.reading():
            self._check_fits()
            selection = self.store.select(scope, tests)
            if selection is None:
                return Found([], 0, threshold, f"nothing is remembered of {scope}")
            voice = self._voice(selection, vector) if self.ranking.neural else None
            project = None if self.neural.in_encoder_space else self._project
            search = Search(self.store, selection, query, vector, voice, project, self.ranking)
            found, seqs = search.find(limit, threshold)
        if count_uses:
            with self._lock:
                self._uses.update(seqs)
        return found

    def use(self, ids: Sequence[str], *, user: str = "default") -> None:
        """Counts records of a user as used once more; unknown ids are skipped.

        The count is written with the next text, or when the memory is closed.
        """
        if isinstance(ids, str):
            raise ValueError("ids is one id; expected a list of them")
        found = [self._find(id, user) for id in ids]
        with self._lock:
            self._uses.update(seq for seq, _ in filter(None, found))

    def _voice(self, selection: Selection, vector: np.ndarray) -> Voice:
        """What the memories of a selection's scopes do not expect of a question."""
        import torch

        states = [self._state_of(row) for row in self.store.rows_of(selection, VOICES)]
        with torch.no_grad():
            left = self.neural.unexpected(states, torch.from_numpy(vector)[None])[0]
            return Voice(left.numpy(), (left @ self.neural.to_dim.weight).numpy())

    def _project(self, vectors: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            projected: np.ndarray = self.neural.project(torch.from_numpy(vectors)).numpy()
        return projected

    def _vectors(self, seqs: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.store.vectors([int(seq) for seq in seqs], self._width())

    def get(self, id: str, *, user: str = "default") -> Record | None:
        """A record of a user by its id; None if there is none."""
        found = self._find(id, user)
        return None if found is None else found[1]

    def _find(self, id: str, user: str) -> tuple[int, Record] | None:
        check_name(id, "id")
        check_name(user, "user")
        with self.store.reading():
            return self.store.find(id, user)

    def _find_or_raise(self, id: str, user: str) -> tuple[int, Record]:
        found = self._find(id, user)
        if found is None:
            raise UnknownRecord(f"there is no record {id!r} of user {user!r}")
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
        limit = check_count(limit, "limit", 1)
        return list(self._newest(Scope(user, agent, session), filters, limit).values())

    def page(
        self,
        *,
        user: str = "default",
        agent: str | None = None,
        session: str | None = None,
        filters: Mapping[str, Any] | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> tuple[list[Record], str | None]:
        """As :meth:`records`, and where the next page begins: the ``cursor`` to ask with; None after the last."""
        limit = check_count(limit, "limit", 1, MAX_FOUND)
        before = MAX_NUMBER if cursor is None else _check_cursor(cursor)
        found = self._newest(Scope(user, agent, session), filters, limit + 1, before)
        numbers = list(found)[:limit]
        return [found[number] for number in numbers], str(numbers[-1]) if len(found) > limit else None

    def _newest(
        self, scope: Scope, filters: Mapping[str, Any] | None, limit: int, before: int = MAX_NUMBER
    ) -> dict[int, Record]:
        tests = check_filters(filters)
        with self.store.reading():
            selection = self.store.select(scope, tests)
            return {} if selection is None else self.store.newest(selection, limit, before)

    def export_page(
        self, user: str | None = None, limit: int = BATCH, cursor: str | None = None
    ) -> tuple[list[Record], str | None]:
        """As :meth:`page`, of all records or those of a user, oldest first: others can write between two pages."""
        with self.store.reading():
            found = self.store.records_after(0 if cursor is None else _check_cursor(cursor), user, limit)
        return list(found.values()), str(max(found)) if found else None

    def update(
        self,
        id: str,
        text: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        user: str = "default",
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
            # Looked at again every time: others may have changed the text to this one, or from it.
            if self._change({seq}, "update", Update(record, None if record.text == old.text else vector, keep_old)):
                break
        return self._find_or_raise(id, user)[1]

    def delete(self, id: str | Sequence[str], *, user: str = "default") -> int:
        """Erases a record of a user, or several at once; returns how many.

        Text, vector, words and the texts in the log go, and the scope's memory is made again without them by replay:
        bit for bit that of a store which never saw them.
        """
        ids = [id] if isinstance(id, str) else list(id)
        self.store.require_writable()
        seqs = {self._find_or_raise(one, user)[0] for one in ids}
        self._change(seqs, "delete")
        return len(seqs)

    def delete_all(
        self, *, user: str, agent: str | None = None, session: str | None = None, below: bool = False
    ) -> int:
        """Erases every record of exactly this scope, with its history and its name; returns how many.

        With ``below``, those of every scope of the user that has the names given: of all agents and sessions if only
        the user is given.
        """
        scope = Scope(user, agent, session)
        with self.store.writing():
            scopes = self.store.matching_scopes(scope, below)
            count = sum(self.store.remove_scope(number) for number in scopes)
            self.store.begin_erasing()
        for number in scopes:
            self._memories.pop(number, None)
        with self._after_commit():
            self.store.finish_erasing()
        return count

    def _change(self, seqs: set[int], kind: str, update: Update | None = None) -> bool:
        """Removes records, or updates one, and erases what was there.

        Returns False if the record to be updated has changed meanwhile: then nothing was done.
        """
        vector = None if update is None else update.vector
        only_metadata = update is not None and vector is None
        with self.store.reading():
            before = {} if only_metadata else self.store.lock_scopes(seqs)
        # Replayed before the transaction, which others wait for; again inside it if they wrote to the scope meanwhile.
        replays = {scope: self._replay(scope, members, vector) for scope, members in before.items()}
        memories = {}
        with self.store.writing():
            locked = self.store.lock_scopes(seqs)
            if update is not None:
                if vector is not None:
                    self._check_fits()
                now = self.store.find(update.record.id, update.record.user)
                if now is None or now[1].version != update.record.version - 1:
                    return False
            for scope, members in () if only_metadata else locked.items():
                replay = replays.get(scope) or self._replay(scope, members, vector)
                self.store.drop_states(scope.id, replay.base)
                self.store.put_states(scope.id, replay.states)
                self.store.set_surprises(replay.surprises)
                self.store.advance_scope(scope.id, -len(members) if update is None else 0)
                if replay.memory is not None:
                    memories[scope.id] = Known(scope.version + 1, replay.memory)
                if update is None:
                    self.store.remove(members, kind)
            if update is not None:
                encoder = "" if vector is None else self.encoder.fingerprint
                if vector is not None and self._leaves_versions(update.record, vector):
                    self.store.unlink(update.record.id)
                self.store.change(min(seqs), update.record, vector, encoder, update.keep_old)
            self.store.begin_erasing()
        for number, known in memories.items():
            self._remember(number, known)
        if update is None:
            for seq in seqs:
                self._uses.pop(seq, None)
        with self._after_commit():
            self.store.finish_erasing()
        return True

    def _leaves_versions(self, record: Record, vector: np.ndarray) -> bool:
        """Whether a record's new text no longer says the same as its older and its newest version."""
        ids = [id for id in (record.replaces, *self.store.newest_versions([record.id]).values()) if id is not None]
        found = [each for each in (self.store.find(id, record.user) for id in ids) if each is not None]
        if not found:
            return False
        cosines = self._vectors([seq for seq, _ in found]) @ vector
        candidates = [(each, float(cosine)) for (_, each), cosine in zip(found, cosines, strict=True)]
        return find_older_version(record, candidates) is None

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

    def history(self, id: str, *, user: str = "default") -> list[Event]:
        """What happened to a record of a user and to the versions that it replaced, oldest first.

        Erased texts are None. Empty for an unknown id.
        """
        check_name(id, "id")
        check_name(user, "user")
        events: list[Event] = []
        with self.store.reading():
            following: str | None = id
            while following is not None:
                events = self.store.history(following, user) + events
                found = self.store.find(following, user)
                following = None if found is None else found[1].replaces
        return sorted(events, key=lambda event: event.at)

    def surprise(
        self, text: str, *, user: str = "default", agent: str | None = None, session: str | None = None
    ) -> Surprise:
        """What is surprising about a text to exactly this scope, in parts; without writing it."""
        vector = self.encoder.encode([check_text(text)])
        with self.store.reading():
            row = self.store.find_scope(Scope(user, agent, session))
            if row is None:
                memory, last, near = self.neural.empty(), vector[:0], []
            else:
                self._check_fits()
                memory, last = (
                    self._memory_of(row),
                    self._vectors(self.store.scope_seqs(row.id, max(0, row.count - LAST))),
                )
                near = self._nearest_of(row, vector, -1.0)[0]
        loss = float(self.neural.write(memory, vector)[1][0])
        return assess(text, vector[0], loss, last, near)

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
        if known is not None and known.version == row.version:
            return known.memory
        state = self.store.find_state(row.id, row.count)
        memory = self.neural.empty() if state is None else self.neural.unpack(state)
        rest = self.store.scope_seqs(row.id, memory.count)
        if rest:
            memory = self.neural.write(memory, self._vectors(rest))[0]
        if memory.count != row.count:
            raise StoreError(f"scope {row.id} has {memory.count} texts; expected {row.count}, so reindex the store")
        self._remember(row.id, Known(row.version, memory))
        return memory

    def _state_of(self, row: ScopeRow) -> MemoryState:
        """A scope's memory after all its texts, ready to be read."""
        memory = self._memory_of(row)
        known = self._memories.get(row.id)
        if known is not None and known.version == row.version and known.state is not None:
            return known.state
        state = self.neural.current(memory)
        self._remember(row.id, Known(row.version, memory, state))
        return state

    def _remember(self, scope: int, known: Known) -> None:
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
            figures |= {"path": self.store.name, "format": FORMAT, "bytes": self.store.size()}
            figures |= {"limit": self.limit, "damage": self.store.damage}
        return figures

    def check(self) -> list[str]:
        """What is wrong with the store, one sentence each; reads all of it."""
        return self.store.check()

    def compact(self) -> int:
        """Rewrites the store without the space of what was erased; returns how many bytes smaller it is.

        On a PostgreSQL server it also removes what was erased from the files of the tables.
        """
        before = self.store.size()
        self.store.compact()
        return before - self.store.size()

    def export(self, path: str | Path, user: str | None = None) -> int:
        """Writes every record, or those of a user, to a file of JSON lines in their order; returns how many."""
        count = 0
        with (
            replacing(Path(path), private=True) as temporary,
            temporary.open("w", encoding="utf-8") as stream,
            self.store.reading(),
        ):
            for record in self.store.list_records(user):
                stream.write(json.dumps(record.to_dict(), ensure_ascii=False) + "\n")
                count += 1
        return count

    def import_(self, path: str | Path, progress: Progress | None = None) -> int:
        """Adds the records of a file of JSON lines, in their order, with their ids; returns how many were added.

        A line needs only a ``text``. All lines are checked before any is written. A record that is already there, with
        the same id, text and scope, is skipped, so that an import that was cut off can be run again; without an id, one
        with the same text, role, metadata and scope.
        """
        return self.import_records(read_records(Path(path)), str(path), progress)

    def import_records(
        self,
        records_of_lines: Iterable[tuple[int, Record, bool]],
        source: str,
        progress: Progress | None = None,
        is_visible: Callable[[Record], bool] = lambda record: True,
    ) -> int:
        """As :meth:`import_`, from what :func:`titans.text.records.parse_records` gives.

        A record whose id belongs to one that is not visible to the caller gets a new id.
        """
        self.store.require_writable()
        records: list[Record] = []
        told: set[tuple[Scope, Any]] = set()  # by lines without an id
        for number, record, has_id in records_of_lines:
            found = self._find_anywhere(record.id) if has_id else None
            if found is not None and is_visible(found):
                if (found.text, found.scope) != (record.text, record.scope):
                    raise ValueError(f"{source}, line {number}: the store has another record with the id {record.id!r}")
                continue
            if found is not None:
                record, has_id = replace(record, id=new_id()), False
            if not has_id:
                if (record.scope, record.said) in told or self._was_told(record):
                    continue
                told.add((record.scope, record.said))
            records.append(record)
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

    def _find_anywhere(self, id: str) -> Record | None:
        """A record of any user."""
        with self.store.reading():
            found = self.store.find(id, None)
        return None if found is None else found[1]

    def _was_told(self, record: Record) -> bool:
        """Whether its scope has a record that says the same."""
        with self.store.reading():
            row = self.store.find_scope(record.scope)
            return row is not None and bool(self.store.find_same(row.id, [record]))

    def reindex(self, progress: Progress | None = None) -> int:
        """Makes all vectors and memories again, with this encoder and these projections; returns the number of records.

        One transaction replaces the old ones: if this is stopped before it, the store is as it was.
        """
        from titans.text.neural import NeuralTextMemory

        self.store.require_writable()
        default = self._neural is None or self._untrained
        neural = NeuralTextMemory.default(self.encoder.width) if default else self.neural
        self._check_width(neural)
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
            with self.store.writing(alone=True):
                if self.store.last_event() != last:
                    continue  # others wrote meanwhile: only what is new is encoded
                new = ((row[0], vector) for row, vector in zip(rows, matrix, strict=True))
                self.store.replace_vectors(new, self.encoder.fingerprint)
                for scope, made in states.items():
                    self.store.put_states(scope, made)
                self.store.set_surprises(surprises)
                self._set_versions(neural)
                self.store.begin_erasing()
            break
        self._neural, self._version = neural, neural.fingerprint
        self._memories.clear()
        with self._after_commit():
            self.store.finish_erasing()
        return len(rows)

    def _check_fits(self, encoder: bool = True) -> None:
        """Raises if other weights made what is in the store."""
        wrong = self._differences(encoder)
        if wrong and self.store.count():
            name, theirs, mine = wrong[0]
            what = {
                "encoder": "vectors were made by another encoder",
                "neural": "memories were made by other projections",
            }[name]
            raise OtherEncoder(
                f"{self.store.name}: its {what} ({theirs}, this is {mine}); open it with the same, or make them again "
                f"from its texts: `titans memory reindex --store {self.store.name}`"
            )

    def _differences(self, encoder: bool = True) -> list[tuple[str, str | None, str]]:
        """What of this process is not what made the store: its name, theirs and ours."""
        mine = {"neural": self._neural_version()}
        if encoder:
            mine["encoder"] = self.encoder.fingerprint
            self._check_width(self.neural)
        theirs = {name: self.store.get_meta(name) for name in mine}
        return [(name, theirs[name], mine[name]) for name in mine if theirs[name] != mine[name]]

    def _take_if_empty(self) -> None:
        """Marks a store without records with what will make its vectors and memories."""
        with self.store.reading():
            if not self._differences() or self.store.count():
                return
        with self.store.writing(alone=True):
            if not self.store.count():
                self._set_versions(self.neural)

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

    def _write_uses(self) -> None:
        uses, self._uses = self._uses, Counter()
        self._uses.update(self.store.add_uses(uses))


def open_store(path: str | Path, read_only: bool = False) -> Store:
    """The store at a path or URL, made if it does not exist and may be written to."""
    if is_server(path):
        from titans.text.postgres import PostgresStore

        return PostgresStore(str(path), read_only)
    return SqliteStore(path, read_only)


def _check_cursor(cursor: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", cursor):
        raise ValueError(f"cursor is {ascii(cursor)[:60]}; expected what the page before gave")
    return min(int(cursor), MAX_NUMBER)


def _for_each(value: Any, many: int, name: str) -> list[Any]:
    """One value per text: the list as it is, or the same value for all."""
    if isinstance(value, (list, tuple)):
        if len(value) != many:
            raise ValueError(f"{name} has {len(value)} entries; expected {many}, one per text")
        return list(value)
    return [value] * many
