"""The memory for clients of chat endpoints."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
