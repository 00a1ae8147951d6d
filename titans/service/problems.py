"""What went wrong, as RFC 9457 has it: a status and one sentence, and nothing of the server's inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from titans.text.records import StoreError, UnknownRecord

MEDIA_TYPE = "application/problem+json"
log = logging.getLogger("titans.service")


class Problem(Exception):
    """What is answered instead of a result.

    Attributes:
        status: of the answer.
        detail: one sentence for whoever sent the request.
        headers: that go with it.
    """

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.to_dict(), self.status, self.headers, MEDIA_TYPE)

    def to_dict(self) -> dict[str, Any]:
        """Its members, ready for JSON."""
        return {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            # What a client sent may be half a character, which no JSON can carry.
            "detail": self.detail.encode("utf-8", "backslashreplace").decode(),
        }


def to_problem(error: Exception) -> Problem:
    """The problem that an error of the memory is, in any door; what nobody expected is a 500 without its words."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, UnknownRecord):
        return Problem(404, str(error))
    if isinstance(error, StoreError):
        log.error("the store: %s", error)
        return Problem(503, "the store cannot be used")
    if isinstance(error, ValueError):
        return Problem(422, str(error))
    log.error("%s", type(error).__name__, exc_info=error)
    return Problem(500, "something went wrong in the server, which has written it to its log")


def add_handlers(app: FastAPI) -> None:
    """Makes every error of an application a problem."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return to_problem(error).response()

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return Problem(422, _first_sentence(error)).response()

    async def pass_on(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return Problem(error.status_code, str(error.detail), error.headers).response()

    app.add_exception_handler(RequestValidationError, refuse)
    app.add_exception_handler(HTTPException, pass_on)
    for kind in (Problem, ValueError, Exception):
        app.add_exception_handler(kind, answer)


def _first_sentence(error: RequestValidationError) -> str:
    """What is wrong with the first field that is."""
    found = error.errors()[0]
    where = ".".join(str(part) for part in found["loc"][1:]) or str(found["loc"][0])
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return f"{where} is not known here; expected only documented fields"
    if found["type"] == "missing":
        return f"{where} is missing"
    if found["type"] == "json_invalid":
        return "the body is not valid JSON"
    return f"{where}: {message[:1].lower()}{message[1:]}"
