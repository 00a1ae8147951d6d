"""A small server that speaks the streaming chat protocol, for a real client to talk to."""

from __future__ import annotations

import json
import socket
import time
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.programs import running

KEY = "secret"


class Endpoint(ThreadingHTTPServer):
    """Answers every prompt with ``words``; how, the name of the model says.

    Models: "words"; "slow" (a tenth of a second between words); "late" (nothing for a second); "broken" (drops the
    connection after a word); "garbage" (no JSON); "new" (wants max_completion_tokens); others are not there.
    """

    daemon_threads = True

    def __init__(self, words: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.words = words
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint

    def log_message(self, format: str, *args: Any) -> None:
        """Not to the terminal."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        model = request["model"]
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self._refuse(401, "Incorrect API key provided")
        if model == "new" and "max_completion_tokens" not in request:
            return self._refuse(400, "Use 'max_completion_tokens' instead.")
        if model not in ("words", "slow", "late", "broken", "garbage", "new"):
            return self._refuse(404, f"The model {model} does not exist")
        if model == "late":
            time.sleep(1)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk({"role": "assistant", "content": ""})
        for word in self.server.words:
            self._chunk({"content": word})
            if model == "slow":
                time.sleep(0.1)
            if model == "garbage":
                self._send(b"data: {never ends\n\n")
            if model == "broken":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
        self._send(
            b"data: " + json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": []}).encode() + b"\n\n"
        )
        self._send(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, delta: dict[str, Any]) -> None:
        choices = [{"index": 0, "delta": delta, "finish_reason": None}]
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": choices}
        self._send(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _send(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "error", "code": None}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(*words: str) -> AbstractContextManager[Endpoint]:
    """A running endpoint."""
    return running(Endpoint(list(words)))


def closed_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
