"""Events over a restart of the daemon."""

from __future__ import annotations

import json
import socket

import pytest

from control_helpers import read_until
from daemon_helpers import Daemon, daemon, place

pytestmark = [pytest.mark.process, pytest.mark.slow]


def stream(run: Daemon, last: int, mark: bytes) -> list[dict[str, object]]:
    """What a client that comes back with `last` is sent, up to the first event with `mark`."""
    head = f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: {last}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", run.control), 20) as sock:
        sock.sendall(head.encode())
        found = read_until(sock, mark)
        found += read_until(sock, b"\n\n")
    lines = found.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_client_misses_nothing_when_the_daemon_is_restarted():
    """Whatever id it brings from the daemon before, it is sent every event of the new one, once."""
    with place() as folder, daemon(folder) as run:
        run.wait_ready()
        before = run.events()
        assert run.stop() == 0
        run.start()
        run.wait_ready()
        run.wait(lambda: run.said("ready"), "the event that tells of READY")
        after = run.events()
        assert before[-1]["id"] < after[0]["id"]
        for last in (before[0]["id"], before[len(before) // 2]["id"], before[-1]["id"]):
            found = stream(run, last, json.dumps(after[-1]["message"]).encode())
            assert [event["id"] for event in found][: len(after)] == [e["id"] for e in after]
        assert '"lost_before"' not in run.log()
