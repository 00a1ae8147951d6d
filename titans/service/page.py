"""The page that shows the memory in a browser."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
