"""A real control server over a fake service, and plain ways to ask it things."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stallwatch.control.auth import Auth
from stallwatch.control.server import ControlServer
from stallwatch.testing.service import FakeService

TOKEN = "a-token-of-good-length"
STALL = "st-20261130T031502Z-9f2c41aa"


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Running:
    """The server under test."""

    def __init__(self, server: ControlServer, service: FakeService, path: str) -> None:
        self.server, self.service, self.path = server, service, path

    def connection(self, via: str) -> http.client.HTTPConnection:
        if via == "unix":
            return UnixConnection(self.path)
        address = self.server.control_address if via == "tcp" else self.server.health_address
        return http.client.HTTPConnection(address, timeout=10)

    def ask(self, path: str, *, via: str = "unix", method: str = "GET", **more: Any) -> Answer:
        """One request. more: body, headers, token."""
        headers = dict(more.get("headers") or {})
        if "token" in more:
            headers["Authorization"] = f"Bearer {more['token']}"
        body = more.get("body")
        if isinstance(body, dict):
            body, headers["Content-Type"] = json.dumps(body), "application/json"
        connection = self.connection(via)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            found = {k.lower(): v for k, v in response.getheaders()}
            return Answer(response.status, response.read(), found)

    def tcp(self, via: str = "tcp") -> socket.socket:
        """A bare connection, for what http.client would not send."""
        address = self.server.control_address if via == "tcp" else self.server.health_address
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)


@contextlib.contextmanager
def serving(folder: Any, service: FakeService | None = None, **more: Any) -> Iterator[Running]:
    """A server on the socket, TCP and the health address; it must end in time."""
    service = service or FakeService()
    path = f"{folder}/control.sock"
    server = ControlServer(
        service,
        control="127.0.0.1:0",
        socket_path=path,
        health_listen="127.0.0.1:0",
        auth=more.get("auth") or Auth.for_address("127.0.0.1:0", token=TOKEN),
        desk=more.get("desk"),
    )
    try:
        server.start()
        yield Running(server, service, path)
    finally:
        assert server.stop()


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """What came up to and including `mark`, and no byte of what follows; fails at the socket's timeout or the end."""
    found = b""
    while mark not in found:
        seen = sock.recv(65536, socket.MSG_PEEK)
        assert seen, f"ended before {mark!r}: {found[-500:]!r}"
        at = (found + seen).find(mark)
        found += sock.recv(len(seen) if at < 0 else at + len(mark) - len(found))
    return found
