"""A file is whole or not there; a folder belongs to one process, and to nobody after a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from titans import files
from titans.files import (
    LOCK,
    configs_folder,
    content,
    locked,
    may_be_on_hub,
    not_there,
    replacing,
    write_atomically,
    write_json,
)

HOLD = """
import sys, time
from pathlib import Path
from titans.files import locked
with locked(Path(sys.argv[1]), "titans train"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_and_its_name_are_on_disk_before_the_write_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    path = tmp_path / "file"
    write_atomically(path, b"new")
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]


def test_an_error_names_the_file_and_not_its_temporary_name(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as error:
        write_atomically(tmp_path / "folder", b"")
    assert error.value.filename == str(tmp_path / "folder")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_private_file_is_its_owners_alone_from_its_first_byte_whatever_the_umask(tmp_path, umask):
    path = tmp_path / "new" / "file"
    before = os.umask(umask)
    try:
        with replacing(path, private=True) as temporary:
            temporary.write_bytes(b"secret")
            assert temporary.stat().st_mode & 0o777 == 0o600
        write_atomically(tmp_path / "public", b"")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o666 & ~umask


def test_json_never_holds_nan(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"loss": math.nan, "steps": [1, -math.inf, {"x": (math.inf, 2.5)}], "name": "mac"})
    assert json.loads(path.read_text()) == {"loss": None, "steps": [1, None, {"x": [None, 2.5]}], "name": "mac"}


def test_a_second_process_is_told_in_one_sentence_who_has_the_folder(tmp_path):
    process = hold(tmp_path, 60)
    try:
        with (
            pytest.raises(ValueError, match=rf"in use by another process \(titans train, process {process.pid}\);"),
            locked(tmp_path, "titans train"),
        ):
            pass
    finally:
        process.kill()
        process.wait()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    process = hold(tmp_path, 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path, "titans train"):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()


def test_a_process_with_time_waits_for_the_other_to_end(tmp_path):
    process = hold(tmp_path, 0.3)
    with locked(tmp_path, "titans eval", timeout=30):
        assert process.wait() == 0


def test_a_lock_is_no_content_and_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "new" / "folder"
    with locked(folder, "titans train"):
        assert content(folder) == []
        assert (folder / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(folder, "titans train"):
        (folder / "file").touch()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_many_processes_add_to_a_file_and_none_is_lost(tmp_path):
    add = """
import json, sys
from pathlib import Path
from titans.files import locked, write_json
folder = Path(sys.argv[1])
for i in range(20):
    with locked(folder, "titans eval", timeout=60):
        path = folder / "eval.json"
        write_json(path, (json.loads(path.read_text()) if path.exists() else []) + [f"{sys.argv[2]}-{i}"])
"""
    processes = [subprocess.Popen([sys.executable, "-c", add, str(tmp_path), str(i)]) for i in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(set(json.loads((tmp_path / "eval.json").read_text()))) == 60


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_read_only_folder_is_refused_in_one_sentence():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # nothing is forbidden to root
        try:
            with (
                pytest.raises(ValueError, match=r"cannot be written to \(Permission denied\); expected a folder"),
                locked(folder, "titans train"),
            ):
                pass
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/titans"])
def test_a_folder_that_cannot_be_written_to_is_refused_in_one_sentence(tmp_path, place):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"cannot be written to \(.+\); expected a folder to write in"),
        locked(tmp_path / place, "titans train"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("gpt2", True),
        ("owner/name", True),
        ("runs/smal", False),
        ("./x", False),
        ("../x/y", False),
        (".runs/x", False),
        ("/x", False),
        ("~/x", False),
        ("x/", False),
        ("owner/name/x", False),
        ("two words", False),
        ("foo.yaml", False),
        ("", False),
    ],
)
def test_a_mistyped_path_is_not_looked_up_on_a_hub(name, may, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/small").mkdir(parents=True)
    assert may_be_on_hub(name) == may


def test_what_is_not_there_is_said_with_what_was_perhaps_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/small").mkdir(parents=True)
    assert not_there("runs/smal") == "runs/smal is not there (did you mean runs/small?)"
    assert not_there("rnus") == "rnus is not there (did you mean runs?)"
    assert not_there("elsewhere/small") == "elsewhere/small is not there"


def test_configs_are_found_in_a_checkout_and_in_an_installed_package(tmp_path, monkeypatch):
    assert configs_folder() == Path(__file__).parents[1] / "configs"
    (tmp_path / "titans" / "configs").mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "titans" / "files.py"))
    assert configs_folder() == tmp_path / "titans" / "configs"
