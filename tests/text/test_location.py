from __future__ import annotations

from pathlib import Path

import pytest

from titans.text.location import default_store, hide_password, is_server
from titans.text.records import StoreError


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder, which is not there yet, while the current folder is another."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def make_store(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.sqlite3").touch()


def test_the_default_store_is_in_the_users_data_folder_wherever_one_is(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert default_store() == data / "titans-memory"
    monkeypatch.chdir(tmp_path)
    assert default_store() == data / "titans-memory"
    assert not data.exists()


@pytest.mark.parametrize("named", ["elsewhere", "postgresql://ann:secret@host/memories"])
def test_the_environment_can_name_another(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(Path("titans-memory"))
    monkeypatch.setenv("TITANS_MEMORY", named)
    assert default_store() == named


def test_an_empty_name_in_the_environment_is_none(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANS_MEMORY", "")
    assert default_store() == data / "titans-memory"


def test_a_store_in_the_old_default_place_is_not_passed_over_silently(data: Path) -> None:
    make_store(Path("titans-memory"))
    with pytest.raises(StoreError, match=r"`--store titans-memory`") as refusal:
        default_store()
    assert str(data / "titans-memory") in str(refusal.value)
    Path("titans-memory").rename("moved")
    assert default_store() == data / "titans-memory"


def test_once_there_is_a_store_in_the_new_place_it_is_the_default(data: Path) -> None:
    make_store(Path("titans-memory"))
    make_store(data / "titans-memory")
    assert default_store() == data / "titans-memory"


def test_a_server_is_given_by_its_url() -> None:
    assert is_server("postgresql://host/db") and is_server("postgres:///db")
    assert not is_server("titans-memory") and not is_server(Path("postgresql:/host")) and not is_server("my.db")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:secret@host:5432/db", "postgresql://ann:***@host:5432/db"),
        ("postgresql://:secret@host/db", "postgresql://:***@host/db"),
        ("postgresql://ann:sec/re@t?s:@host/db", "postgresql://ann:***@host/db"),
        ("postgresql://a/nn:secret@host/db", "postgresql://a/nn:***@host/db"),
        ("postgresql://host/db?user=ann&password=secret&x=1", "postgresql://host/db?user=ann&password=***&x=1"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db?sslpassword=***"),
        ("postgresql://ann@host:5432/db", "postgresql://ann@host:5432/db"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown
