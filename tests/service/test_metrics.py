"""What the server counts and what it logs."""

from __future__ import annotations

import logging

import pytest

from tests.service.conftest import Server
from titans.service.metrics import Metrics


def test_requests_writes_and_searches_are_counted_without_what_they_said(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("titans.service").addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO"):
            server.http.post("/memories", json={"texts": ["A secret one.", "Two."], "user_id": "private"})
            server.http.post("/search", json={"query": "secret", "user_id": "private"})
            server.http.get("/memories/private-id?user_id=private")
            answer = server.http.get("/metrics")  # a line is logged after its answer is sent
    finally:
        logging.getLogger("titans.service").removeHandler(caplog.handler)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    figures = answer.text
    values = {
        line.rpartition(" ")[0].partition('pid="')[0]: line.rpartition(" ")[2]
        for line in figures.splitlines()
        if not line.startswith("#")
    }
    assert values['titans_requests_total{route="/memories",method="POST",status="201",'] == "1"
    assert values['titans_requests_total{route="/memories/{id}",method="GET",status="404",'] == "1"
    assert values["titans_texts_written_total{"] == "2"
    assert values["titans_searches_total{"] == "1"
    assert values['titans_request_seconds_count{route="/search",'] == "1"
    assert float(values["titans_encoder_seconds_total{"]) > 0
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name == "titans.service")
    assert "POST /memories 201" in logged
    assert "GET /memories/{id} 404" in logged
    for text in (figures, logged):
        assert "secret" not in text
        assert "private" not in text


def test_a_histogram_counts_up() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.02, 99.0):
        metrics.observe(seconds, route="/x")
    buckets = [line.rpartition(" ")[2] for line in metrics.render().splitlines() if "_bucket" in line]
    assert buckets[0] == "1"
    assert buckets[2] == "2"
    assert buckets[-2:] == ["2", "3"]


def test_an_error_that_nobody_expected_shows_nothing_of_the_inside(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the text was: secret")

    monkeypatch.setattr(server.memory, "search", fail)
    logging.getLogger("titans.service").addHandler(caplog.handler)
    try:
        answer = server.http.post("/search", json={"query": "x"})
    finally:
        logging.getLogger("titans.service").removeHandler(caplog.handler)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text + caplog.text
    assert "RuntimeError" in caplog.text
