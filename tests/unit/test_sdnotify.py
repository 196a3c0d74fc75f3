"""The service manager's side is a real datagram socket."""

from __future__ import annotations

import os
import socket
import time

import pytest

from stallwatch.sdnotify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = str(tmp_path / "n") if request.param == "path" else f"@stallwatch-{os.getpid()}"
        sock.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        sock.settimeout(5)
        yield name, lambda: sock.recv(4096).decode().split("\n")


@pytest.fixture
def notify(manager):
    notifier = Notifier({"NOTIFY_SOCKET": manager[0]})
    yield notifier
    notifier.close()


def test_every_message(manager, notify):
    """Each call arrives as the assignments that systemd documents."""
    receive = manager[1]
    for call, lines in (
        (
            lambda: notify.ready("2 engines"),
            ["READY=1", f"MAINPID={os.getpid()}", "STATUS=2 engines"],
        ),
        (lambda: notify.status("loading"), ["STATUS=loading"]),
        (notify.watchdog, ["WATCHDOG=1"]),
        (notify.watchdog_failed, ["WATCHDOG=trigger"]),
        (lambda: notify.extend(30.5), ["EXTEND_TIMEOUT_USEC=30500000"]),
        (notify.stopping, ["STOPPING=1"]),
    ):
        assert call()
        assert receive() == lines


def test_reloading_carries_the_monotonic_time(manager, notify):
    """Type=notify-reload needs MONOTONIC_USEC of now."""
    before = time.monotonic_ns() // 1000
    assert notify.reloading()
    first, second = manager[1]()

    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000


def test_a_value_cannot_smuggle_an_assignment(manager, notify):
    """A newline in a status does not become READY=1."""
    notify.status("a\nREADY=1\rSTOPPING=1")

    assert manager[1]() == ["STATUS=a READY=1 STOPPING=1"]


def test_children_do_not_inherit_the_address(manager):
    """The variables are gone from the environment after they are read."""
    env = {"NOTIFY_SOCKET": manager[0], "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1", "A": "b"}
    Notifier(env).close()

    assert env == {"A": "b"}


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "x"}, 0.0),
        ({}, 0.0),
    ],
)
def test_watchdog_interval(env, seconds):
    """Half of what systemd gave, and only if it gave it to this process."""
    assert Notifier(env).watchdog_s == seconds


@pytest.mark.parametrize(
    "address", ["", "@", "/nowhere/at/all", "vsock:2:1", "/" + "x" * 300, "/a\0b"]
)
def test_nobody_there_is_no_error(address):
    """Without a listener every call returns False and none raises."""
    notifier = Notifier({"NOTIFY_SOCKET": address})
    try:
        assert not notifier.ready()
        assert not notifier.watchdog()
    finally:
        notifier.close()


def test_a_full_queue_never_blocks(manager, notify):
    """A manager that does not read costs nothing: the send is refused at once."""
    started = time.monotonic()
    sent = [notify.status("x" * 1000) for _ in range(5000)]

    assert not all(sent)
    assert time.monotonic() - started < 2.0
