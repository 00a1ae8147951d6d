"""A search: each signal names candidates, reciprocal rank fusion joins them, and every hit can say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np

from titans.bm25 import content_words
from titans.text.details import split_speaker
from titans.text.ranking import Ranking, fuse, order_by
from titans.text.records import DamagedStore, Found, Hit, Record
from titans.text.store import WORD, Matches, Selection, Store
from titans.text.versions import FIRST, asked_for, find_newest, is_statement

SLACK = 0.2  # by how much a newer version may be further from the question than an older one
NEAREST = 10  # records by meaning that may count for being near
WINDOW = 20  # hits, and at least twice as many as asked for, among which newer versions go above older ones


@dataclass(frozen=True)
class Voice:
    """What the memories of the scopes that are searched do not expect of a question.

    Attributes:
        vector: (dim,), in the memories' space.
        in_encoder: (width,), the same in the encoder's space, to find candidates by the vector index.
    """

    vector: np.ndarray
    in_encoder: np.ndarray


class Search:
    """One question to a selection of records; used while the store is being read.

    Args:
        store: has the records.
        selection: nothing but these records is looked at.
        query: the question.
        vector: (width,), its vector.
        voice: of the memories; None: they are not asked.
        project: takes vectors to the space of the memories; None: the encoder's space is theirs.
        ranking: the weights.
    """

    def __init__(
        self,
        store: Store,
        selection: Selection,
        query: str,
        vector: np.ndarray,
        voice: Voice | None,
        project: Callable[[np.ndarray], np.ndarray] | None,
        ranking: Ranking,
    ) -> None:
        self.store, self.selection, self.query, self.vector = store, selection, query, vector
        self.voice, self._project, self.ranking = voice, project, ranking

    def find(self, limit: int, threshold: float | None) -> tuple[Found, list[int]]:
        """The hits, best first, and their sequence numbers."""
        ranking = self.ranking
        pool = max(ranking.pool, limit)
        words, asked = Matches({}), content_words(WORD.findall(self.query))
        named: dict[str, dict[int, float]] = {}
        if ranking.bm25:
            words = self.store.find_words(self.selection, asked, pool)
            named["bm25"] = words.scores
        questions = [self.vector] if self.voice is None else [self.vector, _unit(self.voice.in_encoder)]
        by_meaning, *by_memory = self.store.nearest(self.selection, np.stack(questions), max(pool, ranking.candidates))
        if ranking.cosine:
            named["cosine"] = dict(zip(*(each[:pool].tolist() for each in by_meaning), strict=True))
        if self.voice is not None:
            named["neural"] = self._by_memory(self.voice, by_memory[0][0][: ranking.candidates].tolist(), pool)
        orders = {name: order_by(list(values), values.__getitem__) for name, values in named.items()}
        candidates = sorted({seq for values in named.values() for seq in values})
        known: dict[int, Record] = {}
        if ranking.recency or ranking.surprise:
            known = self._records(candidates)
        if ranking.recency:
            orders["recency"] = order_by(candidates, lambda seq: known[seq].created)
        if ranking.surprise:
            orders["surprise"] = order_by(candidates, lambda seq: known[seq].surprise)

        nearest = orders.get("cosine", [])[:NEAREST] if ranking.near else []
        known |= self._records([seq for seq in nearest if seq not in known])
        # A long turn that is near to a question shares its topic; a plain statement answers it.
        stated = [seq for seq in nearest if is_statement(split_speaker(known[seq].text)[1])]
        fused = fuse(orders, ranking, {seq: named["cosine"][seq] for seq in stated})
        window = max(WINDOW, 2 * limit)
        known |= self._records([seq for seq, _ in fused[:window] if seq not in known])
        versions = Versions(self.store, {seq: known[seq] for seq, _ in fused[:window]}, bool(self.selection.tests))
        chosen: list[tuple[int, float]] = []
        cosines: dict[int, float] = {}
        # The index rounds its cosines, and has none for what only the words found.
        near = self._products([*versions.records], self.vector)
        for seq, score in versions.newest_first(fused, near, self.query):
            cosines[seq] = near[seq] if seq in near else self._products([seq], self.vector)[seq]
            if threshold is None or cosines[seq] >= threshold:
                chosen.append((seq, score))
                if len(chosen) == limit:
                    break
        known |= versions.records
        known |= self._records([seq for seq, _ in chosen if seq not in known])
        first = [seq for seq, _ in chosen[:FIRST]]
        newest = 0
        if len(first) > 1:
            answers = [(known[seq], cosines[seq]) for seq in first]
            newest = find_newest(answers, self._vectors(first), self.query, versions.told_at)
        if newest and not versions.linked(first[0], first[newest]):
            chosen.insert(0, (chosen.pop(newest)[0], chosen[0][1]))
        ranks = {name: {seq: rank for rank, seq in enumerate(order, 1)} for name, order in orders.items()}
        hits = [
            Hit(
                record=known[seq],
                score=score,
                cosine=cosines[seq],
                cosine_rank=ranks.get("cosine", {}).get(seq),
                bm25=named.get("bm25", {}).get(seq),
                bm25_rank=ranks.get("bm25", {}).get(seq),
                neural=named.get("neural", {}).get(seq),
                neural_rank=ranks.get("neural", {}).get(seq),
                surprise=known[seq].surprise,
                age=_age(known[seq]),
                replaced_by=versions.replaced_by(seq),
            )
            for seq, score in chosen
        ]
        return Found(hits, len(cosines) - len(chosen), threshold, ignored=words.ignored), [seq for seq, _ in chosen]

    def _by_memory(self, voice: Voice, nearest: list[int], pool: int) -> dict[int, float]:
        """How well the best records match what the memories do not expect of the question.

        Each record together with a share of the one before it in its scope. Candidates are the nearest records by
        themselves and those that follow them.
        """
        before: dict[int, int | None] = {}
        neighbours = self.store.neighbours(nearest)
        before |= {seq: earlier for seq, (earlier, _) in zip(nearest, neighbours, strict=True)}
        if not self.selection.tests:  # which what follows a record may not pass
            for seq, (_, later) in zip(nearest, neighbours, strict=True):
                if later is not None:
                    before.setdefault(later, seq)
        found = self._in_context(voice, before)
        return {seq: found[seq] for seq in order_by(list(found), found.__getitem__)[:pool]}

    def _in_context(self, voice: Voice, before: Mapping[int, int | None]) -> dict[int, float]:
        """The product of each record, with its share of the one before, with what the memory does not expect."""
        if not before:
            return {}
        seqs = sorted({*before, *(seq for seq in before.values() if seq is not None)})
        if self._project is None:
            products = self._products(seqs, voice.vector)
        else:
            projected = self._project(self._vectors(seqs))
            products = dict(zip(seqs, (projected @ voice.vector).tolist(), strict=True))
        share = self.ranking.context
        return {
            seq: products[seq] + (0.0 if earlier is None else share * products[earlier])
            for seq, earlier in before.items()
        }

    def _records(self, seqs: Sequence[int]) -> dict[int, Record]:
        found = self.store.records(seqs)
        if len(found) < len(seqs):
            raise DamagedStore(f"{self.store.name} is damaged: a record that is in its index is not in its tables")
        return found

    def _products(self, seqs: Sequence[int], vector: np.ndarray) -> dict[int, float]:
        return dict(zip(seqs, self.store.products(seqs, vector[None])[:, 0].tolist(), strict=True))

    def _vectors(self, seqs: Sequence[int]) -> np.ndarray:
        return self.store.vectors(seqs, len(self.vector))


class Versions:
    """The versions of the statements among some records, and the newest ones of these.

    Args:
        store: knows which record replaced which.
        records: by sequence number.
        filtered: only these records may be found; otherwise the newest versions of them may be, too.
    """

    def __init__(self, store: Store, records: Mapping[int, Record], filtered: bool) -> None:
        self._store = store
        self.records = dict(records)
        ids = [record.id for record in records.values()]
        self._newest = store.newest_versions(ids)
        if not filtered:
            found = (store.find(id, None) for id in set(self._newest.values()).difference(ids))
            self.records |= dict(each for each in found if each is not None)
        statements: dict[str, list[int]] = {}  # versions by the id of the newest
        for seq in sorted(self.records, key=lambda seq: (self.told_at(self.records[seq]), seq), reverse=True):
            id = self.records[seq].id
            statements.setdefault(self._newest.get(id, id), []).append(seq)
        self._versions = {seq: versions for versions in statements.values() for seq in versions}

    def told_at(self, record: Record) -> str:
        """When a record was told last; a change of its text or metadata is another matter."""
        if not record.repeats or record.version == 1:
            return record.updated if record.repeats else record.created
        events = self._store.history(record.id, record.user)
        return max((event.at for event in events if event.kind == "repeat"), default=record.created)

    def newest_first(
        self, ranked: Sequence[tuple[int, float]], cosines: Mapping[int, float], query: str
    ) -> Iterator[tuple[int, float]]:
        """Records and their scores, best first: the places of a statement go to its versions, the newest first.

        A version stays where it is if it is much further from the question than another, in case it is none. Those for
        which the question asks by a word that others lack change places among themselves only.
        """
        places = {seq for seq, _ in ranked}
        queues: dict[int, Iterator[int]] = {}  # by the first of the members
        asked: dict[int, frozenset[str]] = {}
        for seq, score in ranked:
            if seq in self.records and seq not in asked:
                asked |= self._asked_for(self._versions[seq], query)
            members = self._exchangeable(seq, cosines, asked) if seq in self.records else [seq]
            if seq not in members or len(members) == 1:
                yield seq, score
                continue
            for member in queues.setdefault(members[0], iter(members)):
                yield member, score
                if member in places:  # otherwise one that was not found by itself, and goes before one that was
                    break

    def _exchangeable(self, seq: int, cosines: Mapping[int, float], asked: Mapping[int, frozenset[str]]) -> list[int]:
        """The versions of a record, the newest first, that may take each other's places."""
        members = self._versions[seq]
        least = max(cosines[member] for member in members) - SLACK
        return [member for member in members if cosines[member] >= least and asked[member] == asked[seq]]

    def _asked_for(self, members: Sequence[int], query: str) -> dict[int, frozenset[str]]:
        """For each version the words of the question that tell it from others."""
        texts = {member: self.records[member].text for member in members}
        words = {
            member: {word.casefold() for word in content_words(WORD.findall(text))} for member, text in texts.items()
        }
        named = {word.casefold() for word in content_words(WORD.findall(query)) if len(word) > 1}  # not the s of Anna's
        asked = {}
        for member in members:
            others = [other for other in members if other != member]
            own = words[member].difference(*(words[other] for other in others))
            # In other words than the others, its own may be those of the question.
            alone = own & named if 2 * len(own) <= len(words[member]) else set()
            asked[member] = frozenset(alone).union(*(asked_for(query, texts[member], texts[other]) for other in others))
        return asked

    def linked(self, one: int, other: int) -> bool:
        """Whether two records are versions of one statement: their order is settled."""
        return other in self._versions.get(one, ())

    def replaced_by(self, seq: int) -> str | None:
        """The id of the newest version, if that is another record."""
        if seq not in self.records:
            return None
        id = self.records[seq].id
        newest = self._newest.get(id, id)
        if newest in {self.records[each].id for each in self._versions[seq]}:
            newest = self.records[self._versions[seq][0]].id  # which may have been told again since
        return None if newest == id else newest


def _unit(vector: np.ndarray) -> np.ndarray:
    unit: np.ndarray = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return unit


def _age(record: Record) -> float:
    return (datetime.now(timezone.utc) - datetime.fromisoformat(record.created)).total_seconds()
