"""What `titans bench service` measures of a server."""

from __future__ import annotations

import asyncio
import re
import time

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.service.conftest import Serve, encoder, serve  # noqa: F401
from titans.bench.service import (
    CHATS,
    LOAD,
    QUICK,
    Seen,
    _client,
    _count_lost,
    figures,
    measure_chats,
    run_service_benchmark,
    running_upstream,
    sections,
)
from titans.bench.settings import ServiceBenchmarkSettings


def test_what_is_acknowledged_and_not_there_is_counted_as_lost(serve: Serve) -> None:  # noqa: F811
    server, seen = serve(), Seen()

    async def run() -> tuple[int, int]:
        async with httpx.AsyncClient(base_url=server.url) as http:
            await _client(http, 0, 1.0, time.perf_counter() + 0.3, seen)
            server.http.delete(f"/memories/{min(seen.written['user 0'])}", params={"user_id": "user 0"})
            return await _count_lost(http, seen.written), await _count_lost(http, {})

    assert asyncio.run(run()) == (1, 0)
    assert not seen.errors


def test_the_proxy_is_timed_against_an_upstream_that_answers_at_once(serve: Serve) -> None:  # noqa: F811
    with running_upstream() as upstream:
        found = measure_chats(serve(upstream=upstream).url, upstream, chats=2)
    assert found["chat_encoder_p50_ms"] > 0
    assert found["chat_added_p50_ms"] > 0


def test_a_report_says_what_was_measured() -> None:
    results = {
        "requests": 100, "requests_per_second": 50.0, "errors": 1, "kinds_of_errors": {"503": 1}, "acknowledged": 20,
        "lost": 0, "server_bytes": [1_000_000, 2_000_000, 2_000_000],
        **{f"{kind}_{share}_ms": 7.0 for kind in ("search", "write", "chat_added", "chat_encoder", "chat_overhead")
           for share in ("p50", "p99")},
    }  # fmt: skip
    settings = {"clients": 64, "seconds": 60, "writes": 20, "records": 1000, "chats": 200}
    made = sections({"results": results, "settings": settings, "notices": [], "version": "1"})
    assert [section.title for section in made] == [LOAD, CHATS, "Settings"]
    assert ["errors", "1 (503)"] in made[0].tables[0].rows
    assert list(figures({"results": results})) == [LOAD]


def test_settings_that_cannot_be_measured_are_refused() -> None:
    for wrong, sentence in (
        ({"writes": 101}, "writes is 101; expected at most 100"),
        ({"store": "nowhere"}, "store is nowhere; expected a URL such as"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            ServiceBenchmarkSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_server_under_load_answers_everything_and_loses_nothing() -> None:
    found = run_service_benchmark(ServiceBenchmarkSettings(**QUICK))["results"]
    assert (found["errors"], found["lost"]) == (0, 0)
    assert found["requests"] > 10 and len(found["server_bytes"]) == 3
