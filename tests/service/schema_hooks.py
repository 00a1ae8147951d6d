"""What schemathesis needs to know to call the server: how JSON lines are sent."""

from __future__ import annotations

import schemathesis


@schemathesis.serializer("application/x-ndjson")
def write_lines(context: schemathesis.SerializationContext, value: object) -> bytes:
    """The body as it is."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
