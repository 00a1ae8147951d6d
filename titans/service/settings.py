"""What a server is started with, checked before anything is opened."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from titans.text.database import can_write, locate
from titans.text.encoder import TextEncoder
from titans.text.location import NAME, default_store, hide_password, is_server
from titans.text.neural import NeuralTextMemory
from titans.text.records import MAX_TEXT, check_count

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True)
class Limits:
    """What one request, and one caller, may take.

    Attributes:
        body_bytes: of a request, except an import and a chat.
        import_bytes: of an import.
        chat_bytes: of a chat, which may have images.
        texts: of one write.
        text_bytes: of one text.
        rate: requests of one key in a minute; 0: any number.
        concurrency: requests that are answered at the same time.
        body_seconds: until a request has to be there as a whole; more for a long one that keeps coming.
    """

    body_bytes: int = 4 << 20
    import_bytes: int = 256 << 20
    chat_bytes: int = 32 << 20
    texts: int = 1_000
    text_bytes: int = 100_000
    rate: int = 0
    concurrency: int = 256
    body_seconds: int = 30

    def __post_init__(self) -> None:
        for item in fields(self):
            check_count(getattr(self, item.name), item.name, 0 if item.name == "rate" else 1)
        if self.text_bytes > MAX_TEXT:
            raise ValueError(f"text_bytes is {self.text_bytes:,}; expected at most {MAX_TEXT:,}")


@dataclass(frozen=True)
class Settings:
    """What a server is started with.

    Attributes:
        store: folder, file or URL of the store; default: see :func:`titans.text.location.default_store`.
        encoder, neural: as :class:`titans.text.Memory` takes them.
        host, port: where it listens; port 0: any that is free.
        keys: the file of the keys; default: beside the store.
        upstream: base URL of the endpoint that answers chats, such as https://api.openai.com/v1; None: the local model.
        upstream_key: for that endpoint; None: the key of each request is passed on.
        budget: tokens of a prompt that memories may take.
        limits: of requests.
        cors: origins whose pages may call the server from a browser.
        workers: processes.
        log_level: of the log on standard error.
        shutdown_seconds: that running requests have to finish when the server is stopped.
        upstream_seconds: without a word of the upstream, after which it is given up.
    """

    store: str | Path | None = None
    encoder: TextEncoder | str | Path | None = field(default=None, repr=False)
    neural: NeuralTextMemory | str | Path | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    upstream: str | None = None
    upstream_key: str | None = field(default=None, repr=False)
    budget: int = 512
    limits: Limits = Limits()
    cors: tuple[str, ...] = ()
    workers: int = 1
    log_level: str = "info"
    shutdown_seconds: int = 30
    upstream_seconds: int = 300

    def __post_init__(self) -> None:
        check_count(self.port, "port", 0, 65_535)
        check_count(self.budget, "budget", 0)
        check_count(self.workers, "workers", 1, 64)
        check_count(self.shutdown_seconds, "shutdown_seconds", 1)
        check_count(self.upstream_seconds, "upstream_seconds", 1)
        if not self.host or any(char.isspace() for char in self.host):
            raise ValueError(f"host is {self.host!r}; expected a name or an address such as 127.0.0.1")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level is {self.log_level!r}; expected one of {', '.join(LOG_LEVELS)}")
        for origin in self.cors:
            parts = urlsplit(origin)
            if (
                parts.scheme not in ("http", "https")
                or not parts.netloc
                or origin != f"{parts.scheme}://{parts.netloc}"
            ):
                raise ValueError(f"cors is {origin!r}; expected an origin such as https://app.example.com")
        if self.upstream is not None:
            parts = urlsplit(self.upstream)
            # Paths are added at its end.
            if parts.scheme not in ("http", "https") or not parts.netloc or {"?", "#"} & {*self.upstream}:
                raise ValueError(f"upstream is {self.upstream!r}; expected a URL such as https://api.openai.com/v1")
        if self.upstream_key is not None and not re.fullmatch(r"[!-~]+", self.upstream_key):
            raise ValueError("upstream_key is empty or has a character that no key has; expected a key, or None")

    @property
    def place(self) -> str | Path:
        """Where the store is."""
        return default_store() if self.store is None else self.store

    @property
    def keys_file(self) -> Path:
        """Where the keys are: beside the store, or, for one on a server, in the user's data folder."""
        if self.keys is not None:
            return self.keys
        place = self.place
        if not is_server(place):
            file = locate(place)
            return file.with_name(f"{file.name}-keys")
        import platformdirs

        digest = hashlib.sha256(hide_password(str(place)).encode()).hexdigest()[:12]
        return platformdirs.user_data_path(NAME, appauthor=False) / f"keys-{digest}"


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_read_only(place: str | Path) -> bool:
    """Whether a store is there and cannot be written, so that it is opened to read."""
    return not is_server(place) and locate(place).is_file() and not can_write(place)
