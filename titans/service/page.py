"""The page that shows the memory in a browser: files that fetch nothing but the server's own routes."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from titans.service.problems import Problem

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src data:",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",  # no text ever becomes markup
    )
)  # fmt: skip
router = APIRouter(include_in_schema=False)
_FILES = {file.name: file.read_bytes() for file in (files("titans.service") / "page").iterdir()}


@router.get("/")
async def index() -> Response:
    """The page; it has no secrets, so that somebody without a key can enter one."""
    return await part("index.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    """A file of the page."""
    if name not in _FILES:
        raise Problem(404, "there is nothing at this address")
    kind = TYPES[name.rpartition(".")[2]]
    return Response(_FILES[name], media_type=f"{kind}; charset=utf-8", headers={"Content-Security-Policy": POLICY})
