"""The text memory as a service: REST, MCP, an OpenAI-compatible proxy and a page, in one process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans.service.app import create_app
    from titans.service.settings import Limits, Settings

_HOME = {"Limits": "settings", "Settings": "settings", "create_app": "app"}
__all__ = ["Limits", "Settings", "create_app"]


def __getattr__(name: str) -> Any:
    """Loads torch only when a name that needs it is asked for, so that `titans mcp` answers at once."""
    if name in _HOME:
        return getattr(import_module(f"titans.service.{_HOME[name]}"), name)
    raise AttributeError(f"module 'titans.service' has no attribute {name!r}")
