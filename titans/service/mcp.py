"""The memory for MCP clients."""

from __future__ import annotations

from fastapi import FastAPI


def mount(app: FastAPI) -> None:
    """Adds the MCP server to an application."""
