"""The REST interface of a real server."""

from __future__ import annotations

from tests.service.conftest import Server


def test_what_was_told_is_found(server: Server) -> None:
    answer = server.http.post("/memories", json={"text": "Ada's piano lesson is on Tuesday.", "user_id": "ada"})
    assert answer.status_code == 201, answer.text
    (written,) = answer.json()["results"]
    assert (written["event"], written["user_id"]) == ("ADD", "ada")
    found = server.http.post("/search", json={"query": "When is the piano lesson?", "user_id": "ada"}).json()
    assert found["results"][0]["id"] == written["id"]
    assert found["results"][0]["parts"]["cosine_rank"] == 1
    listed = server.http.get("/memories", params={"user_id": "ada"}).json()
    assert [each["id"] for each in listed["results"]] == [written["id"]]


def test_unknown_fields_are_refused_in_one_sentence(server: Server) -> None:
    answer = server.http.post("/memories", json={"text": "Anything.", "infer": True})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == "infer is not a known field; expected only documented ones"
