"""The text memory as a service: REST, MCP, an OpenAI-compatible proxy and a page, in one process."""

from __future__ import annotations

from titans.service.app import create_app
from titans.service.settings import Limits, Settings

__all__ = ["Limits", "Settings", "create_app"]
