"""Clients of the api that say too little or too much at once."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from api_helpers import MODEL, Api, serving, write_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.slow]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SHORT_S = "0.5"
# The api's own main, with a limit that a test can wait for.
PROGRAM = (
    "import sys; from stallwatch_engine.api import connection; "
    f"connection.HEAD_S = {SHORT_S}; "
    "from stallwatch_engine.api.main import main; sys.exit(main())"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def connect(api: Api) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.port), timeout=10)


def ends(sock: socket.socket) -> bool:
    """The server hangs up within the socket's timeout."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@pytest.mark.parametrize("said", [b"", b"POST", HEAD])
def test_a_head_that_never_ends_is_ended(folder, said):
    """Whether the client says nothing, a word, or all but the last line."""
    with serving(folder, program=PROGRAM) as api, connect(api) as sock:
        sock.sendall(said)
        assert ends(sock)
        assert api.get("/health")[0] == 200


def test_a_second_head_that_never_ends_is_ended_too(folder):
    """After an answer on the same connection the clock runs anew."""
    with serving(folder, program=PROGRAM) as api, connect(api) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in sock.recv(4096)
        sock.sendall(HEAD)
        assert ends(sock)


def test_an_answer_that_takes_longer_than_a_head_may_is_given(folder):
    """The clock of the head stops with it."""
    with serving(folder, program=PROGRAM) as api, api.client() as client:
        found = client.completions.create(model=MODEL, prompt="paced:" + "a" * 50, max_tokens=200)
        assert found.choices[0].text == "a" * 50


def test_many_large_bodies_at_once_are_refused_before_memory_is(folder):
    """Forty bodies of nearly 4 MiB, none of them complete: those over the budget get 429."""
    size = 4_000_000
    with serving(folder) as api, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(api)) for _ in range(40)]
        refused = 0
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * (size - 1))
            sock.settimeout(0.1)
            with contextlib.suppress(TimeoutError, ConnectionError):
                refused += b" 429 " in sock.recv(4096)
        assert refused > 0
        assert api.get("/health")[0] == 200
        for sock in socks:
            sock.close()
        raw = json.dumps({"model": MODEL, "prompt": "echo:hi", "max_tokens": 9}).encode()

        def served() -> bool:
            with connect(api) as sock:
                sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
                return b" 200 " in sock.recv(65536)

        api.until(served)
