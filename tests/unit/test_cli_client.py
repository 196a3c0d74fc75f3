"""The token goes only to a daemon that was named, and only where it is needed."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stallwatch import paths
from stallwatch.cli.client import Client
from stallwatch.cli.settings import Settings
from stallwatch.errors import DaemonUnreachable, StallwatchError

TOKEN = "a-token-of-good-length"
GIVEN = f"Bearer {TOKEN}"
PUBLIC = ["/v1/engines", "/v1/engines/chat", "/v1/stalls", "/v1/events?follow=false", "/livez"]
PRIVATE = ["/v1/engines/chat/logs?lines=5", "/v1/stalls/st/artefacts", "/v1/stalls/st/artefacts/a"]


class UnixServer(socketserver.UnixStreamServer):
    def get_request(self):
        sock, _ = super().get_request()
        return sock, ("local", 0)


@contextlib.contextmanager
def anyone(folder=None, *, refuse=False, **words):
    """A server that keeps every Authorization header it is sent; refuse: 401 without one."""
    seen: list[str | None] = []

    class Keeper(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            given = self.headers.get("Authorization")
            seen.append(given)
            body = json.dumps(words).encode()
            self.send_response(401 if words or (refuse and not given) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer()

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer()

        def log_message(self, *_):
            pass

    kind = HTTPServer if folder is None else UnixServer
    with kind(("127.0.0.1", 0) if folder is None else f"{folder}/s", Keeper) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address, seen
        finally:
            server.shutdown()
            thread.join(10)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("STALLWATCH_TOKEN", TOKEN)


def ask(found: Settings) -> None:
    one = Client(found)
    try:
        for path in (*PUBLIC, *PRIVATE):
            one.get(path)
        one.post("/v1/engines/chat:restart")
        one.post("/v1/engines/chat:stacks")
        list(one.lines("/v1/engines/chat/logs", timeout=5, headers={}))
    finally:
        one.close()


WANTED = [*(None for _ in PUBLIC), *(GIVEN for _ in PRIVATE), GIVEN, GIVEN, GIVEN]


def test_a_named_address_gets_the_token_where_it_is_needed():
    """Changes, stacks, logs and artefacts carry it; what is free does not."""
    with anyone() as ((host, port), seen):
        ask(Settings(url=f"http://{host}:{port}"))
    assert seen == WANTED


def test_a_socket_gets_the_token_where_it_is_needed(tmp_path):
    """Over the unix socket as over a named address."""
    with anyone(tmp_path) as (path, seen):
        ask(Settings(socket=path))
    assert seen == WANTED


def test_the_default_port_never_gets_the_token(monkeypatch, tmp_path):
    """Any user of the machine may hold it."""
    monkeypatch.setattr(paths, "client_sockets", lambda: [f"{tmp_path}/none"])
    with anyone() as ((host, port), seen):
        monkeypatch.setattr(paths, "DEFAULT_CONTROL", f"{host}:{port}")
        ask(Settings())
    assert seen == [None] * len(WANTED)


def test_who_finds_no_daemon_learns_how_to_point_at_one(monkeypatch, tmp_path):
    """Both flags with the form of their values, and where a daemon says its own."""
    monkeypatch.setattr(paths, "client_sockets", lambda: [f"{tmp_path}/none"])
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and nobody listens
        port = nobody.getsockname()[1]
        monkeypatch.setattr(paths, "DEFAULT_CONTROL", f"127.0.0.1:{port}")
        with pytest.raises(DaemonUnreachable) as raised:
            Client(Settings()).get("/v1/engines")
    for words in ("--socket STATE_DIR/control.sock", "--url http://HOST:PORT", "'serving' line"):
        assert words in raised.value.hint


def test_who_withholds_the_token_says_how_to_send_it(monkeypatch, tmp_path):
    """Refused at the default port, the hint names --url and not the variable that is set."""
    monkeypatch.setattr(paths, "client_sockets", list)
    with anyone(detail="this needs a token", hint="set STALLWATCH_TOKEN") as ((host, port), _):
        monkeypatch.setattr(paths, "DEFAULT_CONTROL", f"{host}:{port}")
        one = Client(Settings())
        with pytest.raises(StallwatchError) as raised:
            one.post("/v1/engines/chat:restart")
        one.close()
    assert f"--url http://{host}:{port}" in raised.value.hint


def test_a_daemon_behind_a_forwarded_port_gets_the_token_when_it_asks():
    """Loopback here may be another machine there: a read that is refused is asked again with it."""
    with anyone(refuse=True) as ((host, port), seen):
        one = Client(Settings(url=f"http://{host}:{port}"))
        one.get("/v1/engines")
        one.close()
    assert seen == [None, GIVEN]


def test_a_servers_words_cannot_drive_the_terminal():
    """Detail and hint come without escapes, line ends and characters that turn a line round."""
    evil = "a\x1b[2Jb\r\nc\u202ed\x9be"
    with anyone(detail=evil, hint=evil) as ((host, port), _):
        one = Client(Settings(url=f"http://{host}:{port}"))
        with pytest.raises(StallwatchError) as raised:
            one.get("/v1/engines")
        one.close()
    assert str(raised.value.args[0]).isprintable()
    assert raised.value.hint.isprintable()
