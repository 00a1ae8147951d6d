"""What cannot be kept or compared with is refused in one sentence, before anything is written."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.text.conftest import Opener
from titans.text.records import (
    Record,
    Scope,
    check_count,
    check_filters,
    check_metadata,
    check_time,
    read_records,
)

LARGEST = 2**63 - 1
VALUES = "texts without U.0000, booleans, and finite numbers of at most 64 bits"
WRONG = [LARGEST + 1, -LARGEST - 2, 10**400, 10**5000, "a\0b"]
IDS = ["2^63", "-2^63-1", "400 digits", "5000 digits", "a zero"]


@pytest.mark.parametrize("value", [*WRONG, math.nan, math.inf], ids=[*IDS, "nan", "infinity"])
def test_a_filter_compares_with_what_a_database_can_hold(value: Any) -> None:
    for wanted in (value, [1, value], {"gt": value}, {"in": [value]}):
        with pytest.raises(ValueError, match=rf"^filters\['year'\] compares with .*; expected {VALUES}$"):
            check_filters({"year": wanted})


def test_metadata_are_not_nested_without_end() -> None:
    nested: list[Any] = []
    for _ in range(30):
        nested = [nested]
    assert check_metadata({"a": nested}) == {"a": nested}
    with pytest.raises(ValueError, match="more than 32 lists and objects"):
        check_metadata({"a": [nested]})


@pytest.mark.parametrize("value", WRONG, ids=IDS)
@pytest.mark.parametrize("place", [lambda v: {"a": v}, lambda v: {"a": [1, {"b": v}]}], ids=["top", "deep"])
def test_metadata_hold_what_a_database_can_hold(value: Any, place: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^metadata has the value .*; expected {VALUES}$|^metadata cannot be written"
    ):
        check_metadata(place(value))


def test_a_zero_byte_in_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^metadata has the value 'a.x00b'"):
        check_metadata({"a\0b": 1})


def test_the_largest_numbers_are_kept_and_found(open_memory: Opener) -> None:
    memory = open_memory()
    for value in (LARGEST, -LARGEST - 1, 1e300, True):
        record = memory.add("x", metadata={"value": value})
        assert record.metadata["value"] == value
        assert [hit.record.id for hit in memory.search("x", filters={"value": value})] == [record.id]
    for wanted in (LARGEST + 1, {"lt": 10**30}, {"in": [1, 10**400]}):
        with pytest.raises(ValueError, match=r"^filters\['value'\] compares with "):
            memory.search("x", filters={"value": wanted})
        with pytest.raises(ValueError, match=r"^filters\['value'\] compares with "):
            memory.records(filters={"value": wanted})


def test_nothing_of_a_number_that_is_too_large_is_written(open_memory: Opener, tmp_path: Path) -> None:
    memory = open_memory()
    with pytest.raises(ValueError, match=r"^metadata has the value 9223372036854775808; expected"):
        memory.add_many(["good", "bad"], metadata=[{}, {"year": LARGEST + 1}])
    lines = tmp_path / "lines.jsonl"
    for name, words in {"version": "version is 1", "uses": "uses is 1", "metadata": "metadata has the value"}.items():
        wrong: Any = 10**30 if name != "metadata" else {"year": 10**30}
        lines.write_text(json.dumps({"text": "good"}) + "\n" + json.dumps({"text": "bad", name: wrong}) + "\n")
        with pytest.raises(ValueError, match=rf"lines\.jsonl, line 2: {words}"):
            memory.import_(lines)
    with pytest.raises(ValueError, match=r"^limit is 1000+; expected a whole number, at least 1 and below 2\^63$"):
        memory.records(limit=10**30)
    assert memory.stats()["records"] == 0


def test_a_number_with_too_many_digits_to_read_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"text": "x", "metadata": {"a": ' + "9" * 5000 + "}}\n")
    with pytest.raises(ValueError, match=r"lines, line 1: "):
        list(read_records(tmp_path / "lines"))


@pytest.mark.parametrize("value", ["9999-12-31T23:59:59-10:00", "0001-01-01T00:00:00+10:00", "yesterday", 5])
def test_a_time_has_a_year_of_four_digits_in_utc(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^created is .*; expected a time such as 2026"):
        check_time(value, "created")


def test_a_time_is_kept_in_utc() -> None:
    assert check_time("2026-01-31T12:00:00+02:00", "created") == "2026-01-31T10:00:00.000000+00:00"
    assert check_time(datetime(2026, 1, 31, tzinfo=timezone.utc), "created") == "2026-01-31T00:00:00.000000+00:00"


def test_counts_are_whole_numbers_in_their_bounds() -> None:
    assert check_count(3, "limit", 1, 3) == 3
    for value in (0, 4, 2.0, True, "1", None):
        with pytest.raises(ValueError, match=r"^limit is .*; expected a whole number, 1 to 3$"):
            check_count(value, "limit", 1, 3)


def test_a_scope_covers_itself_and_what_is_below_it() -> None:
    ann = Scope("ann")
    assert ann.covers(ann) and ann.covers(Scope("ann", "a")) and ann.covers(Scope("ann", "a", "s"))
    assert Scope("ann", session="s").covers(Scope("ann", "a", "s"))
    assert not ann.covers(Scope("ben")) and not Scope("ann", "a").covers(ann)
    assert not Scope("ann", "a").covers(Scope("ann", "b"))
    assert Record("i", "x", "ann", "a").scope == Scope("ann", "a")
