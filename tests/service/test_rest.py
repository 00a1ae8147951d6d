"""The REST interface of a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.service.conftest import Serve, Server
from titans.text.encoder import TextEncoder
from titans.text.memory import Memory

LESSON = "Ada's piano lesson is on Tuesday."


@pytest.fixture
def user(request: pytest.FixtureRequest) -> str:
    """A user of the test's own."""
    return request.node.name


def add(server: Server, user: str, *texts: str, **more: Any) -> list[dict[str, Any]]:
    answer = server.http.post("/memories", json={"texts": texts, "user_id": user, **more})
    assert answer.status_code == 201, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def detail(answer: httpx.Response, status: int) -> str:
    """The sentence of a problem."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    sentence: str = problem["detail"]
    return sentence


def test_what_was_told_is_found(server: Server, user: str) -> None:
    (written,) = add(server, user, LESSON, metadata={"topic": "music"})
    assert (written["event"], written["user_id"], written["metadata"]) == ("ADD", user, {"topic": "music"})
    found = server.http.post("/search", json={"query": "When is the piano lesson?", "user_id": user}).json()
    assert found["results"][0]["id"] == written["id"]
    assert found["results"][0]["parts"]["cosine_rank"] == 1
    question = {"query": "Whales.", "user_id": user, "threshold": 0.9}
    assert server.http.post("/search", json=question).json() == {"results": [], "below": 1, "ignored": []}
    assert server.http.get(f"/memories/{written['id']}", params={"user_id": user}).json()["memory"] == LESSON
    history = server.http.get(f"/memories/{written['id']}/history", params={"user_id": user}).json()["results"]
    assert [(event["event"], event["memory"]) for event in history] == [("ADD", LESSON)]


def test_messages_keep_their_roles_and_repeats_are_told_apart(server: Server, user: str) -> None:
    messages = [{"role": "user", "content": LESSON}, {"role": "assistant", "content": "Noted."}]
    answer = server.http.post("/memories", json={"messages": messages, "user_id": user, "run_id": "monday"})
    assert [(each["role"], each["run_id"]) for each in answer.json()["results"]] == [
        ("user", "monday"), ("assistant", "monday"),
    ]  # fmt: skip
    assert [each["event"] for each in add(server, user, "One.", "One.", "Two.")] == ["ADD", "REPEAT", "ADD"]
    assert [each["event"] for each in add(server, user, "One.", "One.")] == ["REPEAT", "REPEAT"]


def test_pages_have_every_memory_once(server: Server, user: str) -> None:
    add(server, user, *(f"Number {i}." for i in range(5)), metadata={"kind": "number"})
    asked = {"user_id": user, "limit": 2, "filters": '{"kind": "number"}'}
    pages = [server.http.get("/memories", params=asked).json()]
    while pages[-1]["next"] is not None:
        pages.append(server.http.get("/memories", params=asked | {"cursor": pages[-1]["next"]}).json())
    assert [each["memory"] for page in pages for each in page["results"]] == [f"Number {i}." for i in range(4, -1, -1)]
    assert len(pages) == 3


def test_a_memory_is_changed_and_erased(server: Server, user: str) -> None:
    (written,) = add(server, user, LESSON)
    path, of = f"/memories/{written['id']}", {"user_id": user}
    changed = server.http.put(path, params=of, json={"text": "It is on Friday."}).json()
    assert (changed["memory"], changed["version"]) == ("It is on Friday.", 2)
    assert server.http.delete(path, params=of).json() == {"deleted": 1}
    assert "there is no memory" in detail(server.http.get(path, params=of), 404)
    assert "there is no memory" in detail(server.http.delete(path, params=of), 404)


def test_a_scope_is_erased_exactly_or_with_what_is_below(server: Server, user: str) -> None:
    add(server, user, "One.")
    add(server, user, "Two.", agent_id="bot")
    assert server.http.delete("/memories", params={"user_id": user}).json() == {"deleted": 1}
    assert server.http.delete("/memories", params={"user_id": user, "below": True}).json() == {"deleted": 1}
    assert detail(server.http.delete("/memories"), 422) == "user_id is missing; expected whose memories to erase"


def test_surprise_and_figures(server: Server, user: str) -> None:
    add(server, user, LESSON)
    known = server.http.post("/surprise", json={"text": LESSON, "user_id": user}).json()
    other = server.http.post("/surprise", json={"text": "Whales sing in the ocean.", "user_id": user}).json()
    assert known["novelty"] < 0.01 < 0.5 < other["novelty"]
    stats = server.http.get("/stats", params={"user_id": user}).json()
    assert (stats["records"], stats["by_scope"][0]["user_id"]) == (1, user)
    assert server.http.get("/stats").json()["users"] >= 1


def test_an_export_is_an_import(server: Server, user: str) -> None:
    add(server, user, *(f"Number {i}." for i in range(7)))
    with server.http.stream("POST", "/export", json={"user_id": user}) as answer:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [line["text"] for line in lines] == [f"Number {i}." for i in range(7)]
    body = "".join(json.dumps({**line, "id": None, "user": f"{user} 2"}) + "\n" for line in lines)
    assert server.http.post("/import", content=body).json() == {"imported": 7}
    assert server.http.post("/import", content=body).json() == {"imported": 0}
    assert detail(server.http.post("/import", content=b'{"text": "One."}\n{"text": ""}'), 422) == (
        "the body, line 2: text is empty; expected a text"
    )


def test_a_retry_with_its_name_writes_once_even_at_the_same_time(server: Server, user: str) -> None:
    body, name = {"text": LESSON, "user_id": user}, {"Idempotency-Key": "retry 1"}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: server.http.post("/memories", json=body, headers=name), range(8)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.text for answer in answers}) == 1
    assert server.http.get("/memories", params={"user_id": user}).json()["results"][0]["repeats"] == 0
    other = server.http.post("/memories", json={**body, "text": "Another."}, headers=name)
    assert detail(other, 409) == "the request has the name of another one; expected a new name for each"


WRONG: list[tuple[str, Callable[[httpx.Client], httpx.Response], int, str]] = [
    ("unknown field", lambda http: http.post("/memories", json={"text": "A.", "infer": True}), 422,
     "infer is not a known field; expected only documented ones"),
    ("unknown parameter", lambda http: http.get("/memories?order=old"), 422,
     "order is not a known field; expected only documented ones"),
    ("no text", lambda http: http.post("/memories", json={}), 422,
     "the body: expected one of text, texts and messages"),
    ("two kinds", lambda http: http.post("/memories", json={"text": "A.", "texts": ["B."]}), 422,
     "the body: expected one of text, texts and messages"),
    ("empty", lambda http: http.post("/memories", json={"text": " "}), 422, "text is empty; expected a text"),
    ("no query", lambda http: http.post("/search", json={}), 422, "query is missing"),
    ("control", lambda http: http.post("/search", json={"query": "x", "user_id": "a\0"}), 422,
     "user_id: the name has the control character U+0000 at character 1; expected text without any"),
    ("limit", lambda http: http.post("/search", json={"query": "x", "limit": 0}), 422,
     "limit: input should be greater than or equal to 1"),
    ("filters", lambda http: http.get("/memories", params={"filters": "{"}), 422,
     'filters is not valid JSON; expected an object such as {"topic": "food"}'),
    ("cursor", lambda http: http.get("/memories", params={"cursor": "x"}), 422,
     "cursor: string should match pattern '^[0-9]{1,19}$'"),
    ("no JSON", lambda http: http.post("/search", content="{", headers={"Content-Type": "application/json"}), 400,
     "the body is not valid JSON"),
    ("bad UTF-8", lambda http: http.post("/search", content=b'{"query": "\xff"}',
                                         headers={"Content-Type": "application/json"}), 400,
     "the body cannot be read as JSON"),
    ("deep", lambda http: http.post("/search", content=b"[" * 100_000, headers={"Content-Type": "application/json"}),
     400, "the body cannot be read as JSON"),
    ("half a character", lambda http: http.post("/search", content=rb'{"query": "\ud800"}',
                                                headers={"Content-Type": "application/json"}), 422,
     "query: input should be a valid string, unable to parse raw data as a unicode string"),
    ("a form", lambda http: http.post("/search", data={"query": "x"}), 415,
     "the body is of another type; expected Content-Type: application/json"),
    ("an empty import", lambda http: http.post("/import"), 422,
     "the body is empty; expected a memory per line, as JSON"),
    ("no body", lambda http: http.post("/search"), 422, "the body is missing"),
    ("nowhere", lambda http: http.get("/nowhere"), 404, "there is nothing at this address"),
    ("method", lambda http: http.patch("/memories"), 405, "this address does not know that method"),
]  # fmt: skip


@pytest.mark.parametrize(("send", "status", "sentence"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_input_is_answered_with_one_sentence(
    server: Server, send: Callable[[httpx.Client], httpx.Response], status: int, sentence: str
) -> None:
    assert detail(send(server.http), status) == sentence


def test_the_description_has_every_route_with_examples_and_problems(server: Server) -> None:
    described = server.http.get("/openapi.json").json()
    assert {"/memories", "/memories/{id}", "/memories/{id}/history", "/search", "/surprise", "/stats", "/export",
            "/import", "/healthz", "/readyz", "/metrics"} <= set(described["paths"])  # fmt: skip
    write = described["paths"]["/memories"]["post"]
    assert {"201", "400", "401", "403", "409", "413", "415", "422", "429", "503", "507"} <= set(write["responses"])
    assert list(write["responses"]["422"]["content"]) == ["application/problem+json"]
    assert described["components"]["schemas"]["NewMemories"]["examples"]
    assert write["security"]


def test_a_wrong_method_is_told_the_right_ones(server: Server) -> None:
    assert server.http.patch("/memories").headers["allow"] == "DELETE, GET, POST"


@pytest.fixture
def other_writer(server: Server) -> Iterator[Memory]:
    with Memory(server.app.state.settings.store, encoder=server.memory.encoder) as memory:
        yield memory


def test_what_another_process_writes_is_there(server: Server, user: str, other_writer: Memory) -> None:
    other_writer.add(LESSON, user=user)
    assert server.http.get("/memories", params={"user_id": user}).json()["results"][0]["memory"] == LESSON


def test_a_busy_and_a_full_store_are_problems_that_pass(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, encoder: TextEncoder
) -> None:
    monkeypatch.setattr("titans.text.database.PATIENCE", 0.05)
    server = serve()
    add(server, "ada", "One.")
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with Memory(server.app.state.settings.store, encoder=encoder) as other, other.store.writing():
            locked.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(10)
    busy = server.http.post("/memories", json={"text": "Two.", "user_id": "ada"})
    release.set()
    holder.join()
    assert detail(busy, 503) == "the store is busy or away; try again later"
    assert busy.headers["retry-after"] == "5"
    with server.memory.store.reading():
        pages = server.memory.store._one("PRAGMA page_count")[0]
        server.memory.store._run(f"PRAGMA max_page_count = {pages}")
    full = server.http.post("/memories", json={"texts": [f"{i} {'x' * 9_000}" for i in range(50)], "user_id": "ada"})
    assert detail(full, 507) == "the store is full; nothing was written"
    assert server.http.get("/stats", params={"user_id": "ada"}).json()["records"] == 1


def test_a_store_that_can_only_be_read_is_read(serve: Serve, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    add(server, "reader", LESSON)
    monkeypatch.setattr("titans.service.settings.can_write", lambda place: False)  # root may write anything
    other = serve(store=server.app.state.settings.store)
    found = other.http.post("/search", json={"query": "piano", "user_id": "reader"})
    assert found.json()["results"][0]["memory"] == LESSON
    refused = other.http.post("/memories", json={"text": "No.", "user_id": "reader"})
    assert detail(refused, 409) == "the store can only be read; nothing was written"


def test_a_store_on_a_postgresql_server_is_served_the_same(serve: Serve, new_schema: Callable[[str], str]) -> None:
    server = serve(store=new_schema("served"), keys=None)
    (written,) = add(server, "ada", LESSON)
    name = {"Idempotency-Key": "one"}
    answers = [server.http.post("/memories", json={"text": "Two.", "user_id": "ada"}, headers=name) for _ in range(2)]
    assert answers[0].text == answers[1].text
    found = server.http.post("/search", json={"query": "piano", "user_id": "ada"}).json()
    assert found["results"][0]["id"] == written["id"]
    assert server.http.post("/export", json={}).text.count("\n") == 2
    assert server.http.delete("/memories", params={"user_id": "ada"}).json() == {"deleted": 2}
