"""schemathesis against a real server: whatever is sent, the answer is one that the OpenAPI description names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS

from tests.docs.blocks import ROOT
from tests.service import schema_hooks  # noqa: F401
from tests.service.conftest import Serve, Server

Guarded = tuple[Server, str]  # and a key
ROUTES = 16
CONFIGURATION = Path(__file__).with_name("schemathesis.toml")


@pytest.fixture(scope="module")
def guarded(serve: Serve) -> Guarded:
    """A server with a key that is bound to a user."""
    server = serve()
    return server, server.app.state.keys.add("tester", user="ada")


def besiege(guarded: Guarded, folder: Path, *options: str) -> dict[str, Any]:
    """The report of all checks of schemathesis, with no failure and no error in it."""
    server, key = guarded
    report = folder / "report.json"
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION), "run",
        f"{server.url}/openapi.json", "--checks", "all",
        "--header", f"Authorization: Bearer {key}", "--report-json-path", str(report), "--no-color", *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.slow
def test_some_requests_to_every_route_are_answered_as_described(guarded: Guarded) -> None:
    server, key = guarded
    headers = {"Authorization": f"Bearer {key}"}
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    assert len(operations) == ROUTES
    excluded: Any = [CHECKS.get_one("positive_data_acceptance")]

    @given(st.data())
    @settings(max_examples=3, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def call_all(data: st.DataObject) -> None:
        for operation in operations:
            case = data.draw(operation.as_strategy())
            case.call_and_validate(headers=headers, excluded_checks=excluded)

    call_all()


@pytest.mark.slow
def test_thousands_of_requests_with_a_key_are_answered_as_described(guarded: Guarded, tmp_path: Path) -> None:
    report = besiege(guarded, tmp_path, "--max-examples", "50")
    assert report["operations"]["tested"] == ROUTES
    assert report["test_cases"]["generated"] > 1_500


@pytest.mark.slow
def test_thousands_of_requests_about_any_user_are_answered_as_described(server: Server, tmp_path: Path) -> None:
    report = besiege((server, "none"), tmp_path, "--max-examples", "50", "--exclude-checks", "ignored_auth")
    assert report["test_cases"]["generated"] > 1_500
