"""A small server that speaks the chat protocols, to stand behind the proxy; as a program it prints its URL."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.programs import running

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
MODELS = {"object": "list", "data": [{"id": "words", "object": "model", "created": 1, "owned_by": "them"}]}


class Seen(NamedTuple):
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes


class Upstream(ThreadingHTTPServer):
    """Answers every chat with ``words``; how, the name of the model says.

    Models: "words"; "slow" (a twentieth of a second between words, for ever); "silent" (nothing for 3 seconds);
    "broken" (drops the connection in the middle of an event after the words); "tools" (calls one); "limited" (429);
    "failing" (an error event after the words), "unfinished" (an end that nothing announces), "finished" (an end
    without [DONE]), "folded" (lines that end in a carriage return only, and two of data in an event).
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, words: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.words = words
        self.seen: list[Seen] = []
        self.abandoned = threading.Event()  # a client went away before its answer was complete

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def last(self) -> Seen:
        return self.seen[-1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a client that goes away."""
        self.abandoned.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # what is not flushed goes out together
    disable_nagle_algorithm = True
    server: Upstream

    def log_message(self, format: str, *args: Any) -> None:
        """Not to the terminal."""

    def do_GET(self) -> None:
        self.server.seen.append(Seen(self.path, {name.lower(): value for name, value in self.headers.items()}, {}, b""))
        self._json(200, MODELS)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append(Seen(self.path, headers, body, raw))
        model = body["model"]
        if model == "silent":
            time.sleep(3)
        if model == "limited":
            return self._json(429, {"error": {"message": "Slow down.", "type": "requests", "code": "limit"}})
        if self.path.startswith("/v1/messages"):
            return self._say_as_anthropic(body)
        if not body.get("stream"):
            message: dict[str, Any] = {"role": "assistant", "content": "".join(self.server.words)}
            if model == "tools":
                message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            head = {"id": "x", "object": "chat.completion", "created": 0, "model": model}
            return self._json(200, {**head, "choices": [choice], "usage": USAGE, "new_field": [1]})
        self._begin()
        self._chunk(model, [{"role": "assistant", "content": ""}])
        if model == "tools":
            self._chunk(model, [{"tool_calls": [{"index": 0, **CALL}]}])
        else:
            self._words(model)
        if model == "failing":
            self._send(b'data: {"error": {"message": "Too much to do.", "type": "server_error"}}\n\n')
        elif model == "finished":
            self._send(b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n')
        elif model != "unfinished":
            self._chunk(model, [], usage=USAGE)
            self._send(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _words(self, model: str) -> None:
        for word in self.server.words * (1000 if model == "slow" else 1):
            self._chunk(model, [{"content": word}])
            if model == "slow":
                time.sleep(0.05)
        if model == "broken":
            self._send(b'data: {"choices": [{"ind')
            self.connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError

    def _say_as_anthropic(self, body: dict[str, Any]) -> None:
        text = "".join(self.server.words)
        if not body.get("stream"):
            return self._json(
                200, {"type": "message", "role": "assistant", "content": [{"type": "text", "text": text}]}
            )
        self._begin()
        for kind, data in (
            ("message_start", {"message": {"role": "assistant", "content": []}}),
            *(("content_block_delta", {"delta": {"type": "text_delta", "text": word}}) for word in self.server.words),
            ("message_stop", {}),
        ):
            self._send(f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("X-Request-Id", "req_1")
        self.send_header("Set-Cookie", "theirs=1")
        self.end_headers()

    def _chunk(self, model: str, deltas: list[dict[str, Any]], **more: Any) -> None:
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": model}
        data = json.dumps({**head, "choices": choices, **more}).encode()
        if model == "folded":
            return self._send(b"data: " + data.replace(b', "choices"', b',\rdata: "choices"') + b"\r\r")
        self._send(b"data: " + data + b"\n\n")

    def _send(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def answering(*words: str) -> AbstractContextManager[Upstream]:
    """A running server."""
    return running(Upstream(list(words)))


if __name__ == "__main__":
    with Upstream(["Fine", "."]) as program:
        print(program.url, flush=True)
        program.serve_forever()
