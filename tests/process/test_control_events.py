"""The event stream: replay, follow, and clients that do not read."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from control_helpers import Running, read_until, serving
from stallwatch.control import stream
from stallwatch.testing.service import FakeService

pytestmark = pytest.mark.http


@pytest.fixture
def running(tmp_path):
    with serving(tmp_path) as found:
        yield found


@contextlib.contextmanager
def listening(running: Running, query: str = "", last: int | None = None):
    """A stream whose head has arrived."""
    header = f"Last-Event-ID: {last}\r\n" if last is not None else ""
    with running.tcp() as sock:
        sock.sendall(f"GET /v1/events{query} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
        head = read_until(sock, b"stallwatch events\n\n")
        assert b"text/event-stream" in head
        yield sock


def ids(raw: bytes) -> list[int]:
    lines = raw.decode().splitlines()
    return [json.loads(line[6:])["id"] for line in lines if line.startswith("data: ")]


def test_replay_then_follow(running: Running):
    """A client gets what it missed, then what happens, each event once and in order."""
    for i in range(5):
        running.service.emit("state", f"past {i}")
    with listening(running, last=2) as sock:
        found = read_until(sock, b'"past 4","data":{}}\n\n')
        running.service.emit("stall", "now")
        found += read_until(sock, b'"now","data":{}}\n\n')

    assert ids(found) == [3, 4, 5, 6]


def test_events_come_once_under_load(running: Running):
    """Events that arrive during the replay are neither lost nor doubled."""
    for i in range(600):
        running.service.emit("log", str(i))
    with listening(running) as sock:
        for i in range(100):
            running.service.emit("log", f"new {i}")
        running.service.emit("end", "the end")
        found = read_until(sock, b'"the end","data":{}}\n\n')

    assert ids(found) == list(range(1, 702))


def test_only_one_engine(running: Running):
    """?engine= leaves out the events of others."""
    running.service.emit("state", "a", engine="chat")
    running.service.emit("state", "b", engine="code")
    with listening(running, "?engine=code") as sock:
        found = read_until(sock, b'"b"')
    page = running.ask("/v1/events?follow=false&engine=code").json

    assert b'"a"' not in found
    assert ([e["message"] for e in page["items"]], page["last"]) == (["b"], 2)


def test_an_id_of_an_earlier_daemon(running: Running):
    """A Last-Event-ID beyond ours is of another daemon: everything is sent."""
    running.service.emit("state", "first")
    with listening(running, last=10**6) as sock:
        assert b'"first"' in read_until(sock, b'"first"')


@pytest.mark.slow
def test_nothing_is_lost_between_replay_and_follow(running: Running):
    """An event that happens after a replay but before the reader's first look still arrives."""
    replayed, first = threading.Event(), threading.Event()

    def between(name: str) -> None:
        if name != "events":
            return
        if threading.current_thread().name != "stallwatch-events":
            replayed.set()
        elif not first.is_set():
            first.set()
            replayed.wait(0.3)
            running.service.emit("state", "between")

    running.service.before = between
    with listening(running) as sock:
        assert read_until(sock, b'"between"')


def test_an_event_during_the_replay_comes_once(running: Running):
    """An event that is both replayed and followed is shown once."""
    pages: list[str] = []
    over = threading.Event()

    def during(name: str) -> None:
        if name != "events" or threading.current_thread().name == "stallwatch-events":
            return
        pages.append(name)
        if len(pages) == 1:
            running.service.emit("state", "both")
        else:
            over.set()

    running.service.before = during
    with listening(running) as sock:
        found = read_until(sock, b'"both","data":{}}\n\n')
        assert over.wait(10)
        # an answer of the same loop: the replay has ended, and the queue is being read
        assert running.ask("/v1/engines").status == 200
        running.service.emit("state", "after")
        found += read_until(sock, b'"after","data":{}}\n\n')

    assert ids(found) == [1, 2]


def test_a_service_that_fails_once(running: Running, caplog, monkeypatch):
    """An error while reading events is logged, and the stream goes on."""
    failed = threading.Event()

    def once(name: str) -> None:
        if name == "events" and not failed.is_set():
            failed.set()
            raise RuntimeError("once")

    running.service.before = once
    with listening(running) as sock:
        running.service.emit("state", "after it")
        assert read_until(sock, b'"after it"')
    assert "once" in caplog.text


@pytest.mark.slow
def test_heartbeat(running: Running, monkeypatch):
    """A quiet stream says that it is still there."""
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.05)
    with listening(running) as sock:
        assert read_until(sock, b": still here\n\n")


@pytest.mark.slow
def test_a_client_that_does_not_read_is_dropped(running: Running, monkeypatch, caplog):
    """A client that takes nothing is cut off; another one is not held up by it."""
    monkeypatch.setattr(stream, "QUEUE", 16)
    monkeypatch.setattr(stream, "SEND_S", 0.5)
    hub = running.server._hub
    with listening(running) as lazy, listening(running) as eager:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until = time.monotonic() + 20
        while hub.clients > 1 and time.monotonic() < until:
            running.service.emit("log", "x" * 60000)
            read_until(eager, b"\n\n")
        assert hub.clients == 1
        running.service.emit("end", "the end")
        read_until(eager, b"the end")
        with pytest.raises(ConnectionResetError):
            read_until(lazy, b"never")
    assert not caplog.records


def test_too_many_streams(running: Running, monkeypatch):
    """Streams beyond the bound are refused with Retry-After."""
    monkeypatch.setattr(stream, "CLIENTS", 1)
    monkeypatch.setattr(stream, "OWN", 0)
    with listening(running):
        found = running.ask("/v1/events")

    assert (found.status, found.headers["retry-after"]) == (503, "5")


def test_listeners_over_tcp_do_not_keep_the_gateway_out(running: Running, monkeypatch):
    """Places over the unix socket are its own: FAILUREs reach it whoever listens too."""
    monkeypatch.setattr(stream, "CLIENTS", 1)
    ask = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with listening(running), running.tcp() as sock, socket.socket(socket.AF_UNIX) as own:
        sock.sendall(ask)
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 503")
        own.settimeout(10)
        own.connect(running.path)
        own.sendall(ask)
        assert read_until(own, b"\r\n").startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_is_forgotten(running: Running):
    """A closed connection frees its place."""
    with listening(running):
        assert running.server._hub.clients == 1
    until = time.monotonic() + 5
    while running.server._hub.clients and time.monotonic() < until:
        running.ask("/livez")
    assert running.server._hub.clients == 0


def test_pages(tmp_path):
    """?follow=false gives pages that end with the id to go on from."""
    service = FakeService()
    for i in range(5):
        service.emit("state", str(i))
    with serving(tmp_path, service) as running:
        first = running.ask("/v1/events?follow=false&limit=3").json
        second = running.ask(f"/v1/events?follow=false&after={first['last']}").json
        last = running.ask(f"/v1/events?follow=false&after={second['last']}").json

    assert [e["id"] for e in first["items"]] == [1, 2, 3]
    assert [e["id"] for e in second["items"]] == [4, 5]
    assert last == {"items": [], "last": 5}


def test_a_page_after_an_id_of_a_daemon_whose_clock_was_ahead(running: Running):
    """An id beyond ours is of another daemon, in a page as in a stream: everything is given."""
    running.service.emit("state", "first")
    page = running.ask(f"/v1/events?follow=false&after={10**6}").json

    assert [e["message"] for e in page["items"]] == ["first"]
    assert page["last"] == page["items"][-1]["id"]
