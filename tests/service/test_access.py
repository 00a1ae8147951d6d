"""Who may read and write what: keys, and servers without any."""

from __future__ import annotations

import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cli.commands import assert_refused
from tests.cli.commands import run as command
from tests.service.conftest import Serve, Server
from titans.service.access import Keys
from titans.service.run import run
from titans.service.settings import Limits, Settings


@pytest.fixture(scope="module")
def guarded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server with keys, and a memory each of ada, of her agent, and of ben."""
    server = serve(keys=tmp_path_factory.mktemp("keys") / "keys")
    server.memory.add("Ada plays the piano.", user="ada")
    server.memory.add("Ada's bot pays the teacher.", user="ada", agent="bot")
    server.memory.add("Ben plays the drums.", user="ben")
    return server


def client(server: Server, name: str, **bound: str | tuple[str, ...]) -> httpx.Client:
    """A client with a new key."""
    key = server.app.state.keys.add(name, **bound)
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"})


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["memory"] for each in answer.json()["results"]]


def test_a_key_reaches_its_user_only(guarded: Server) -> None:
    with client(guarded, "ada", user="ada") as ada:
        assert len(texts(ada.get("/memories"))) == 2
        assert "Ben plays the drums." not in texts(ada.post("/search", json={"query": "Who plays the drums?"}))
        for answer in (
            ada.get("/memories", params={"user_id": "ben"}),
            ada.post("/search", json={"query": "drums", "user_id": "ben"}),
            ada.post("/memories", json={"text": "No.", "user_id": "ben"}),
            ada.delete("/memories", params={"user_id": "ben"}),
            ada.post("/import", content=json.dumps({"text": "No.", "user": "ben"})),
            ada.get("/metrics"),
        ):
            assert answer.status_code == 403
        (theirs,) = guarded.memory.records(user="ben")
        for answer in (ada.get(f"/memories/{theirs.id}"), ada.delete(f"/memories/{theirs.id}")):
            assert answer.status_code == 404
        assert {json.loads(line)["user"] for line in ada.post("/export", json={}).text.splitlines()} == {"ada"}
        assert {each["user_id"] for each in ada.get("/stats").json()["by_scope"]} == {"ada"}
        assert ada.get("/stats").json()["users"] is None


def test_a_key_of_an_agent_reaches_what_that_agent_was_told(guarded: Server) -> None:
    with client(guarded, "bot", user="ada", agent="bot") as bot:
        assert texts(bot.get("/memories")) == ["Ada's bot pays the teacher."]
        assert texts(bot.post("/search", json={"query": "piano"})) == ["Ada's bot pays the teacher."]
        (other,) = (record for record in guarded.memory.records(user="ada") if record.agent is None)
        assert bot.get(f"/memories/{other.id}").status_code == 404
        assert bot.get(f"/memories/{other.id}/history").status_code == 404
        assert bot.get("/stats").json()["records"] == 1
        assert bot.post("/export", json={}).text.count("\n") == 1
        assert bot.get("/memories", params={"agent_id": "other"}).status_code == 403


def test_rights_and_bounds_are_what_the_key_says(guarded: Server) -> None:
    with client(guarded, "eyes", user="ada", rights=("read",)) as eyes:
        assert eyes.post("/memories", json={"text": "No."}).json()["detail"] == "this key may not write"
    with client(guarded, "pen", user="ada", rights=("write",)) as pen:
        assert pen.get("/memories").json()["detail"] == "this key may not read"
    with client(guarded, "admin") as admin:
        missing = admin.get("/memories")
        assert (missing.status_code, missing.json()["detail"]) == (
            422, "user_id is missing; this key is bound to no user",
        )  # fmt: skip
        assert texts(admin.get("/memories", params={"user_id": "ben"})) == ["Ben plays the drums."]
        assert admin.get("/metrics").status_code == 200


def test_a_key_that_may_only_write_learns_nothing_of_what_was_there(guarded: Server) -> None:
    guarded.memory.add("The code of Ada's door is 1234.", user="ada", agent="door")
    headers = {"Accept": "application/json, text/event-stream", "X-Memory-Agent": "door"}
    with client(guarded, "scribe", user="ada", rights=("write",)) as scribe:
        for text in ("The code of Ada's door is 1234.", "The code of Ada's door is 5678."):
            (told,) = scribe.post("/memories", json={"text": text, "agent_id": "door"}).json()["results"]
            call = {"name": "add_memory", "arguments": {"text": text}}
            again = scribe.post(
                "/mcp", headers=headers, json={"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            ).json()["result"]
            assert again["content"][0]["text"] == "Remembered."
            for seen in (told, again["structuredContent"]):
                assert (seen["memory"], seen["repeats"], seen["uses"], seen["surprise"], seen["replaces"]) == (
                    text, 0, 0, 0, None,
                )  # fmt: skip


def test_an_import_tells_nothing_of_ids_of_others_and_takes_no_longer_texts(guarded: Server) -> None:
    (theirs,) = guarded.memory.records(user="ben")
    with client(guarded, "mover", user="cleo") as mover:
        for imported in (1, 0):
            answer = mover.post("/import", content=json.dumps({"id": theirs.id, "text": "Cleo sings."}))
            assert (answer.status_code, answer.json()) == (200, {"imported": imported})
        (own,) = mover.get("/memories").json()["results"]
        assert own["id"] != theirs.id
        long = mover.post("/import", content=json.dumps({"text": "word " * 20_001}))
        assert long.status_code == 413
        assert long.json()["detail"].startswith("the body, line 1: a text has 100,005 bytes")
    assert guarded.memory.get(theirs.id, user="ben") == theirs


def test_a_locked_file_of_keys_keeps_nobody_waiting_but_who_has_one(guarded: Server) -> None:
    with client(guarded, "patient", user="ada") as patient, ThreadPoolExecutor(1) as threads:
        with sqlite3.connect(guarded.app.state.keys.file, isolation_level=None) as other:
            other.execute("BEGIN EXCLUSIVE")
            waiting = threads.submit(patient.get, "/memories")
            time.sleep(0.1)
            assert guarded.http.get("/healthz", timeout=2).status_code == 200
            assert not waiting.done()
            other.execute("ROLLBACK")
        other.close()
        assert waiting.result(20).status_code == 200


def test_no_key_a_wrong_one_and_a_revoked_one_are_refused_at_once(guarded: Server) -> None:
    key = guarded.app.state.keys.add("short-lived", "ada")
    assert guarded.http.get("/memories").headers["www-authenticate"] == "Bearer"
    assert guarded.http.get("/memories").status_code == 401
    assert guarded.http.get("/memories", headers={"X-API-Key": key[:-1] + "!"}).status_code == 401
    assert guarded.http.get("/memories", headers={"X-API-Key": key}).status_code == 200
    Keys(guarded.app.state.settings.keys_file).revoke("short-lived")  # as another process does
    refused = guarded.http.get("/memories", headers={"X-API-Key": key})
    assert (refused.status_code, refused.json()["detail"]) == (401, "the key is unknown or was revoked")
    assert guarded.http.get("/healthz").status_code == 200


def test_a_key_is_not_in_its_file_and_the_file_is_private(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    key = keys.add("ada", "ada")
    assert key.split("_", 2)[2].encode() not in (tmp_path / "keys").read_bytes()
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert keys.find(key) is not None


def test_after_the_last_key_is_revoked_nobody_may_call(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    assert not keys.exist()
    keys.add("ada", "ada")
    keys.revoke("ada")
    assert keys.exist()


def test_without_keys_pages_of_the_web_are_kept_out(server: Server) -> None:
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Host": "["},
        {"Origin": "http://["},
    ):
        for path in ("/stats", "/healthz"):
            refused = server.http.get(path, headers=headers)
            assert refused.status_code == 403
            assert "IPv6" not in refused.text
    assert server.http.get("/stats", headers={"Origin": server.url}).status_code == 200
    assert "access-control-allow-origin" not in server.http.get("/stats", headers={"Origin": server.url}).headers


def test_answers_have_safe_headers_and_origins_are_allowed_by_name(serve: Serve) -> None:
    server = serve(cors=("https://app.example",))
    headers = server.http.get("/stats", headers={"Origin": "https://app.example"}).headers
    assert headers["access-control-allow-origin"] == "https://app.example"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"port": 70_000}, "port is 70000; expected a whole number, 0 to 65,535"),
        ({"cors": ("app.example",)}, "cors is 'app.example'; expected an origin such as https://app.example.com"),
        ({"upstream": "api"}, "upstream is 'api'; expected a URL such as https://api.openai.com/v1"),
        ({"log_level": "loud"}, "log_level is 'loud'; expected one of critical, error, warning, info, debug"),
        ({"host": ""}, "host is ''; expected a name or an address such as 127.0.0.1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace("(", r"\(")):
        Settings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rate is -1; expected a whole number"):
        Limits(rate=-1)


def test_other_machines_reach_only_a_server_with_keys(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^host is 0\.0\.0\.0, which others can reach, and there are no keys; make one"
    ):
        run(Settings(tmp_path / "store", host="0.0.0.0"))
    assert not (tmp_path / "store").exists()


def test_keys_are_made_listed_and_revoked_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--store", str(tmp_path / "store"))
    assert command("serve", "keys", "add", "editor", "--user", "ada", "--read-only", *where) == 0
    key = capsys.readouterr().out.strip()
    assert command("serve", "keys", "list", "--json", *where) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["user"], listed["rights"], listed["revoked"]) == ("editor", "ada", ["read"], None)
    keys = Keys(Settings(tmp_path / "store").keys_file)
    assert keys.find(key) is not None
    assert command("serve", "keys", "revoke", "editor", *where) == 0
    assert keys.find(key) is None
    assert_refused(
        ("serve", "keys", "revoke", "editor", *where), "there is no key 'editor' to revoke", tmp_path, capsys
    )
    assert_refused(("serve", "keys", "add", "x", *where), "expected --user, --agent or both", tmp_path, capsys)
    assert_refused(
        ("serve", "--host", "0.0.0.0", "--store", str(tmp_path / "b")), "there are no keys", tmp_path, capsys
    )
