"""Is a statement a newer version of another: the same subject and attribute, with another value or in other words?"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from titans.bm25 import STOP_WORDS
from titans.text.details import CALENDAR, SELF, WORD, split_speaker
from titans.text.records import Record

ALIKE = 0.64  # likeness from which on a text replaces an older one; chosen on generated facts, see docs/log.md
OVERLAP = 0.25  # what the same words add to the cosine
APART = 0.15  # by how much it has to be more alike than most of what else is said of the subject
SAME_WORDS = 3  # around one place where two statements differ: "I live in" is enough, whatever the cosine
NEARLY = 0.58  # the same among the first hits of a search, where both have to do with the question
WITHIN = 0.1  # cosine with the question by which the newer of them may be behind
FIRST = 3  # hits that are looked at
LEAST_COSINE = ALIKE - OVERLAP  # of two versions
MOST_WORDS = 20  # of a statement; what is longer says several things
_END = re.compile(r"[.!?…]+(?=\s+\W*[A-Z]|\s*$)")
# Statements with one of these stand beside each other: who likes tea may like coffee, who went to Rome may go to Oslo.
_BESIDE = frozenset(
    """
    adore adores ate bought enjoy enjoyed enjoys hate hated hates like liked likes love loved loves met saw tried
    visited watched went
    """.split()  # noqa: SIM905
)
_VERBS = frozenset(("are", "had", "has", "have", "is", "was", "were"))  # before them stands what is talked about
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


def likeness(new: str, old: str, cosine: float) -> float:
    """How alike two statements are: their cosine, and more for the words they share.

    Args:
        new, old: the texts. Names are told from other words by their capitals, and stop words are English.
        cosine: of the vectors of the two texts alone, without the context of other texts.

    Returns:
        at least ``ALIKE`` if ``new`` says ``old`` again, with another value or in other words; 0 if one of them is no
        single plain statement, if they are about different subjects or said by different speakers, or if both may be
        true at once, such as what somebody likes.
    """
    (speaker, new), (other, old) = split_speaker(new), split_speaker(old)
    if speaker != other or not (is_statement(new) and is_statement(old)):
        return 0.0
    words, others = _words(new), _words(old)
    subject, subject_of_other = _subject(words), _subject(others)
    mine, theirs = ({plain for _, plain in each} for each in (words, others))
    if (subject not in theirs and subject_of_other not in mine) or mine & theirs & _BESIDE:
        return 0.0
    things, other_things = _things(words), _things(others)
    if things - other_things and other_things - things:
        return 0.0
    alike = ALIKE if len(mine & theirs) >= SAME_WORDS and _differ_in_one_place(new, old) else 0.0
    mine, theirs = (each - STOP_WORDS - {subject, subject_of_other} for each in (mine, theirs))
    return max(alike, cosine + OVERLAP * len(mine & theirs) / max(1, len(mine | theirs)))


def find_older_version(new: Record, candidates: Sequence[tuple[Record, float]]) -> Record | None:
    """The record that ``new`` is a newer version of, if one is.

    Args:
        new: what is written.
        candidates: older records of its scope, each with its cosine; those below ``LEAST_COSINE`` are not needed.
    """
    found = [(likeness(new.text, old.text, cosine), old) for old, cosine in candidates if old.role == new.role]
    value, best = max(found, key=lambda each: each[0], default=(0.0, None))
    others = sorted(alike for alike, old in found if alike and old is not best)
    if value < ALIKE or (len(others) > 1 and value - statistics.median(others) < APART):
        return None
    return best


def find_newest(
    hits: Sequence[tuple[Record, float]], vectors: np.ndarray, query: str, told_at: Callable[[Record], str]
) -> int:
    """Which of the first hits of a search to put first: the newest that says nearly the same as the first.

    Two wordings of a statement may be too different to be linked when they are written. That both are among the first
    hits and answer the question about equally well makes up for it.

    Args:
        hits: records with the cosine of each with the question, best first; only the first ``FIRST`` count.
        vectors: (n, width), of the hits.
        query: the question.
        told_at: when a record was told last.
    """
    best, cosine = hits[0]
    newest = 0
    for index, (record, value) in enumerate(hits[1:FIRST], 1):
        if (
            record.scope == best.scope
            and record.role == best.role
            and told_at(record) > told_at(hits[newest][0])
            and value >= cosine - WITHIN
            and likeness(record.text, best.text, float(vectors[index] @ vectors[0])) >= NEARLY
            and not asked_for(query, best.text, record.text)
        ):
            newest = index
    return newest


def asked_for(query: str, one: str, other: str) -> frozenset[str]:
    """The words of a question that ``one`` has and ``other`` has not, if these are built alike: then it means that one.

    In statements that are put in different ways, such words may be those of the question by chance.
    """
    words, others = ([plain for _, plain in _words(split_speaker(text)[1])] for text in (one, other))
    if len(words) != len(others) or 2 * sum(map(str.__eq__, words, others)) < len(words):
        return frozenset()
    return frozenset(_telling(query) & _telling(one) - _telling(other))


def contradiction(new: str, old: str, cosine: float) -> float:
    """How sure it is that ``new`` gives another value to what ``old`` states, between 0 and 1.

    0 if neither is a version of the other, 1 if they differ in a number or in one place of the same words. Otherwise
    more the less similar they are, since another value is less similar than the same value in other words.
    """
    if likeness(new, old, cosine) < ALIKE:
        return 0.0
    numbers, others = set(_NUMBER.findall(new)), set(_NUMBER.findall(old))
    if (numbers and others and numbers != others) or _differ_in_one_place(new, old):
        return 1.0
    return min(1.0, max(0.0, 1 - cosine))


def _differ_in_one_place(new: str, old: str) -> bool:
    """At most two words of each stand for each other, between at least twice as many that are the same."""
    one, other = ([word for word, _ in _words(text.casefold())] for text in (new, old))
    shorter = min(len(one), len(other))
    start = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    end = next((i for i in range(shorter - start) if one[-1 - i] != other[-1 - i]), shorter - start)
    mine, theirs = len(one) - start - end, len(other) - start - end
    return 0 < mine <= 2 and 0 < theirs <= 2 and start + end >= 2 * max(mine, theirs)


def is_statement(text: str) -> bool:
    """One sentence that is neither a question nor an exclamation, and not long."""
    ends = _END.findall(text)
    return len(ends) <= 1 and not any(mark in text for mark in "?!") and 0 < len(WORD.findall(text)) <= MOST_WORDS


def _words(text: str) -> list[tuple[str, str]]:
    """Words as they are written, and to compare: in small letters, without 's, and one word for whoever speaks."""
    found = []
    for word in WORD.findall(text):
        plain = word.casefold().replace("’", "'")
        found.append((word, "i" if plain in SELF else plain.removesuffix("'s")))
    return found


def _telling(text: str) -> set[str]:
    """The words by which things are told apart: no stop words, but numbers, and single capitals as in door A."""
    words = _words(split_speaker(text)[1])
    letters = {plain for word, plain in words[1:] if len(word) == 1 and word.isupper() and plain != "i"}
    return {plain for _, plain in words if plain not in STOP_WORDS and (len(plain) > 1 or plain.isdigit())} | letters


def _things(words: Sequence[tuple[str, str]]) -> set[str]:
    """Names and numbers before the verb: what a statement is about, and not what it says of it."""
    end = next((index for index, (_, plain) in enumerate(words) if plain in _VERBS), 0)
    inside = enumerate(words[:end])
    return {
        plain
        for index, (word, plain) in inside
        if plain != "i" and (word[0].isdigit() or (index and word[0].isupper()))
    }


def _subject(words: Sequence[tuple[str, str]]) -> str:
    """What a statement is about: the first name, whoever speaks or what is theirs; else its first content word."""
    content = [(word, plain) for word, plain in words if plain == "i" or plain not in STOP_WORDS]
    for index, (word, plain) in enumerate(content):
        if word.casefold() in ("my", "our") and index + 1 < len(content):
            return content[index + 1][1]
        if plain == "i" or (word[0].isupper() and plain.removesuffix("s") not in CALENDAR):
            return plain
    return content[0][1] if content else ""
