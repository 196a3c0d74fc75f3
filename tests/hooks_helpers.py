"""A receiver of webhooks on loopback, and notices to send to it."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from daemon_helpers import until
from stallwatch.hooks.notice import Notice

SECRET = b"a-secret-nobody-may-see-4711"


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers the given statuses in turn, then the last of them for ever."""

    port: int
    statuses: list[int]
    got: list[Received] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/T0123456789abcdef"

    def wait(self, count: int) -> list[Received]:
        until(lambda: len(self.got) >= count, what=f"{count} requests, got {len(self.got)}")
        return self.got


@contextlib.contextmanager
def receiver(
    statuses: Sequence[int] = (200,), *, tls: ssl.SSLContext | None = None
) -> Iterator[Receiver]:
    """A real HTTP server for one test; with `tls` a real HTTPS server."""
    state = Receiver(0, list(statuses))

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = state.statuses[min(len(state.got), len(state.statuses) - 1)]
            state.got.append(Received(self.path, dict(self.headers), body))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # refused handshakes
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def notice(number: int = 1) -> Notice:
    return Notice(
        id=f"run-{number}",
        event="stall",
        engine="chat",
        at="2026-01-01T00:00:00.000Z",
        message="DEVICE_WAIT: worker:0 waits",
        failure={"id": "stall-1", "kind": "DEVICE_WAIT"},
    )
