"""What went wrong, as RFC 9457 has it: a status and one sentence, and nothing of the server's inside."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from titans.text.records import BusyStore, FullStore, ReadOnlyStore, StoreError, UnknownRecord, UsedRequest

MEDIA_TYPE = "application/problem+json"
MEANINGS = {  # of every status that is not a success
    400: "The request cannot be read, such as a body that is not JSON.",
    401: "The key is missing, unknown or revoked.",
    403: "The key is bound to another user or agent, or lacks the right; or the page that calls is not allowed to.",
    404: "There is no such memory of this user.",
    408: "The body did not arrive in time.",
    409: "The idempotency key was used for something else, or the store can only be read.",
    413: "The body, or a text in it, is too large, or there are too many texts.",
    415: "The body is of another type than expected.",
    422: "A field is missing, unknown or wrong.",
    429: "The key has sent too many requests; Retry-After says when to come back.",
    500: "Something went wrong in the server.",
    503: "The store is busy or damaged, or the server has too much to do; Retry-After may say when to come back.",
    507: "There is no space left in the store.",
}
SENTENCES = {  # for the words of the frameworks
    "Not Found": "there is nothing at this address",
    "Method Not Allowed": "this address does not know that method",
    "There was an error parsing the body": "the body cannot be read as JSON",
}
SCHEMA = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "description": "Always about:blank: the status says what kind of problem it is."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "One sentence that says what was wrong and what was expected."},
    },
}
FRAMES = 5  # of an error, in the log
log = logging.getLogger("titans.service")


class Problem(HTTPException):
    """What is answered instead of a result.

    Attributes:
        status_code: of the answer.
        detail: one sentence for whoever sent the request.
        headers: that go with it.
    """

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, dict(headers or {}))

    def to_dict(self) -> dict[str, Any]:
        """Its members, ready for JSON."""
        return {
            "type": "about:blank",
            "title": HTTPStatus(self.status_code).phrase,
            "status": self.status_code,
            # What a client sent may be half a character, which no JSON can carry.
            "detail": self.detail.encode("utf-8", "backslashreplace").decode(),
        }

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.to_dict(), self.status_code, self.headers, MEDIA_TYPE)


def to_problem(error: Exception) -> Problem:
    """The problem that an error is, in any door; what nobody expected is a 500 without its words."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, UnknownRecord):
        return Problem(404, str(error))
    if isinstance(error, UsedRequest):
        return Problem(409, str(error))
    if isinstance(error, StoreError):
        log.error("%s", error)
        return _store_problem(error)
    if isinstance(error, ValueError):
        return Problem(422, str(error))
    # The words of an error may quote a text; the places in the code do not.
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    log.error("%s in %s", type(error).__name__, ", ".join(f"{each.filename}:{each.lineno}" for each in frames))
    return Problem(500, "something went wrong in the server, which has noted it in its log")


def _store_problem(error: StoreError) -> Problem:
    """Of a store that cannot do what it should; its place is the server's affair."""
    if isinstance(error, BusyStore):
        return Problem(503, "the store is busy or away; try again later", {"Retry-After": "5"})
    if isinstance(error, FullStore):
        return Problem(507, "the store is full; nothing was written")
    if isinstance(error, ReadOnlyStore):
        return Problem(409, "the store can only be read; nothing was written")
    return Problem(503, "the store cannot be used; the log of the server says why")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems that a route may answer with, for the description of the interface."""
    made: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, 413, 408, 429, 500, 503}):
        example = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": "..."}
        content = {MEDIA_TYPE: {"schema": SCHEMA, "example": {**example, "detail": MEANINGS[status]}}}
        made[status] = {"description": MEANINGS[status], "content": content}
        if status in (429, 503):
            seconds = {"description": "Seconds to wait.", "schema": {"type": "string"}}
            made[status]["headers"] = {"Retry-After": seconds}
    return made


def add_handlers(app: FastAPI) -> None:
    """Makes every error of an application a problem."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return to_problem(error).response()

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _explain(request, error).response()

    async def pass_on(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:  # the router names only the methods of the first route that it found
            described = app.openapi()["paths"].get(getattr(request.scope.get("route"), "path", None), {})
            headers["Allow"] = ", ".join(sorted(method.upper() for method in described)) or headers.get("Allow", "")
        return Problem(error.status_code, SENTENCES.get(error.detail, error.detail), headers).response()

    app.add_exception_handler(RequestValidationError, refuse)
    app.add_exception_handler(StarletteHTTPException, pass_on)
    for kind in (Problem, ValueError):
        app.add_exception_handler(kind, answer)


def _explain(request: Request, error: RequestValidationError) -> Problem:
    """What is wrong with the first field that is."""
    found = error.errors()[0]
    place = [str(part) for part in found["loc"]]
    where = ".".join(place[1:]) or f"the {place[0]}"
    message = found["msg"].removeprefix("Value error, ")
    kind = request.headers.get("content-type", "")
    if place == ["body"] and "json" not in kind.lower() and found["type"] != "missing":
        return Problem(415, "the body is of another type; expected Content-Type: application/json")
    if found["type"] == "json_invalid":
        return Problem(400, "the body is not valid JSON")
    if found["type"] == "extra_forbidden":
        return Problem(422, f"{where[:60]} is not a known field; expected only documented ones")
    if found["type"] == "missing":
        return Problem(422, f"{where} is missing")
    return Problem(422, f"{where[:200]}: {message[:1].lower()}{message[1:]}")
