"""A local user takes every connection of the control port: whoever asks something is served all the same."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from control_helpers import Running, read_until, serving
from stallwatch.control.protocol import CONNECTIONS

pytestmark = [pytest.mark.http, pytest.mark.slow]

ASK = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def running(tmp_path) -> Iterator[Running]:
    with serving(tmp_path) as found:
        yield found


def crowd(running: Running, stack: contextlib.ExitStack, count: int) -> list[socket.socket]:
    return [stack.enter_context(running.tcp()) for _ in range(count)]


def ended(sock: socket.socket) -> bool:
    """The server closed it."""
    sock.settimeout(5.0)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_that_ask_nothing_make_room(running):
    """As many as there may be stand silent: ten clients after them are answered, the oldest are closed."""
    with contextlib.ExitStack() as stack:
        silent = crowd(running, stack, CONNECTIONS)
        assert all(running.ask("/livez", via="tcp").status == 200 for _ in range(10))
        assert ended(silent[0])


def test_connections_that_were_answered_make_room(running):
    """Kept alive after one answer each, they are idle too."""
    with contextlib.ExitStack() as stack:
        kept = crowd(running, stack, CONNECTIONS)
        for sock in kept:
            sock.sendall(ASK)
            read_until(sock, b"live\n")
        assert running.ask("/livez", via="tcp").status == 200
        assert ended(kept[0])
