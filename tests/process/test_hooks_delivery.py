"""Commands and webhooks for real, each with what may go wrong with it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_helpers import free_port, gone, until
from hooks_helpers import SECRET, Receiver, notice, receiver
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.hooks.command import CommandHook
from stallwatch.hooks.webhook import WebhookHook
from stallwatch.hooks.worker import Outcome, Worker

pytestmark = [pytest.mark.process, pytest.mark.slow]

READS = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
HANGS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {child}")
    os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
TALKS = "import sys; [print('x' * 70000) for _ in range(300)]; sys.exit('no such channel')"


def command(*argv: str, deadline_s: float = 20.0) -> CommandHook:
    return CommandHook(argv, ToolRegistry(), deadline_s=deadline_s)


def webhook(url: str, **settings: Any) -> WebhookHook:
    known: dict[str, Any] = {
        "place": "http://there/***", "secret": SECRET, "deadline_s": 10.0, "attempts": 4,
        "backoff": (0.01,), **settings,
    }  # fmt: skip
    return WebhookHook(url, **known)


def test_a_command_reads_the_notice_on_stdin(tmp_path):
    """The whole JSON, then the end of the file; status 0 is success."""
    file = tmp_path / "got"
    outcome = command(sys.executable, "-c", READS, str(file)).deliver(notice(), threading.Event())
    assert outcome == Outcome()
    assert json.loads(file.read_bytes())["failure"]["id"] == "stall-1"


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    """It ignores SIGTERM and has forked: after the deadline nothing of it lives, none is a zombie."""
    file = tmp_path / "pids"
    hook = command(sys.executable, "-c", HANGS, str(file), deadline_s=2.0)
    outcome = hook.deliver(notice(), threading.Event())
    assert "was killed: 2 s were over" in outcome.problem
    pids = {int(pid) for pid in file.read_text().split()}
    until(lambda: gone(pids), what="the command's tree ended")
    assert not Path(f"/proc/{file.read_text().split()[0]}").exists(), "it was not reaped"


def test_an_abort_ends_a_command_at_once(tmp_path):
    """Its deadline is far away; the daemon ends now."""
    file, abort, found = tmp_path / "pids", threading.Event(), []
    hook = command(sys.executable, "-c", HANGS, str(file), deadline_s=500.0)
    thread = threading.Thread(target=lambda: found.append(hook.deliver(notice(), abort)))
    thread.start()
    until(file.exists, what="the command runs")
    abort.set()
    thread.join(10)
    assert "this daemon ends" in found[0].problem
    pids = {int(pid) for pid in file.read_text().split()}
    until(lambda: gone(pids), what="the command's tree ended")


def test_a_command_may_say_a_lot_and_its_last_line_tells_why():
    """21 MB of output are read and forgotten; the status and the last line are kept."""
    outcome = command(sys.executable, "-c", TALKS).deliver(notice(), threading.Event())
    assert outcome.problem.endswith("exited with status 1: no such channel")
    assert len(outcome.problem) < 400


@pytest.mark.parametrize("argv", ["/no/such/command", "/etc/hostname", "/"])
def test_a_command_that_cannot_start_is_a_sentence(argv):
    """Missing, not executable, a folder: a problem, no exception."""
    assert "cannot start" in command(argv).deliver(notice(), threading.Event()).problem


def test_a_webhook_that_fails_first_is_tried_again_and_each_try_is_signed():
    """503, 429, then 200: three requests with one id, each with a true signature of time and body."""
    with receiver([503, 429, 200]) as there:
        times = iter((100.0, 200.0, 300.0))
        hook = webhook(there.url, wall=lambda: next(times))
        assert hook.deliver(notice(), threading.Event()) == Outcome(attempts=3)
    assert len(there.got) == 3
    assert {r.headers["Stallwatch-Delivery"] for r in there.got} == {"run-1"}
    assert [r.headers["Stallwatch-Timestamp"] for r in there.got] == ["100", "200", "300"]
    for each in there.got:
        signed = each.headers["Stallwatch-Timestamp"].encode() + b"." + each.body
        expected = hmac.new(SECRET, signed, hashlib.sha256).hexdigest()
        assert each.headers["Stallwatch-Signature"] == f"v1={expected}"
        assert SECRET not in repr(each).encode()


@pytest.mark.parametrize(("status", "requests"), [(500, 4), (400, 1), (404, 1), (302, 1)])
def test_attempts_are_bounded_and_a_refusal_is_final(status, requests):
    """5xx until the attempts are spent; 4xx and redirects once. The path of the URL is not said."""
    with receiver([status]) as there:
        outcome = webhook(there.url).deliver(notice(), threading.Event())
    assert f"answered {status}" in outcome.problem
    assert len(there.got) == outcome.attempts == requests
    assert "T0123456789abcdef" not in outcome.problem


def test_without_a_secret_there_is_no_signature():
    """An unsigned webhook says nothing that looks like proof."""
    with receiver() as there:
        assert not webhook(there.url, secret=b"").deliver(notice(), threading.Event()).problem
    assert "Stallwatch-Signature" not in there.got[0].headers


def test_nobody_at_the_port_is_a_sentence():
    """Refused connections are tried again, then told."""
    outcome = webhook(f"http://127.0.0.1:{free_port()}/x").deliver(notice(), threading.Event())
    assert "Connection refused (attempt 4 of 4)" in outcome.problem


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl to make a certificate")
def test_a_certificate_that_nobody_vouches_for_gets_no_notice(tmp_path, monkeypatch):
    """Self-signed: nothing is sent, and the reason is told; once the store has it, it is delivered."""
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key, "-out", cert,
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with receiver(tls=tls) as there:
        hook = webhook(there.url.replace("http:", "https:"), attempts=2)
        problem = hook.deliver(notice(), threading.Event()).problem
        assert "its certificate was not accepted" in problem
        assert "attempt 2 of 2" in problem
        assert not there.got
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        assert not hook.deliver(notice(), threading.Event()).problem
    assert there.got[0].headers["Stallwatch-Delivery"] == "run-1"


@contextlib.contextmanager
def dripping() -> Iterator[int]:
    """A server that never ends its answer: one byte of a header ten times a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                peer, _ = server.accept()
                with peer:
                    peer.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                    while True:
                        peer.sendall(b"x")
                        time.sleep(0.1)  # the peer's own pace

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
    thread.join(5)


def test_a_server_that_drips_is_left_at_the_deadline():
    """Each byte would start a socket's timeout anew; the attempt as a whole has one."""
    with dripping() as port:
        began = time.monotonic()
        hook = webhook(f"http://127.0.0.1:{port}/", deadline_s=1.0, attempts=1)
        outcome = hook.deliver(notice(), threading.Event())
        assert "no whole answer within 1 s" in outcome.problem
        assert time.monotonic() - began < 8.0


def test_an_abort_ends_the_wait_between_attempts():
    """The back-off is long; the daemon ends now."""
    abort, found = threading.Event(), []
    with receiver([500]) as there:
        hook = webhook(there.url, backoff=(500.0,))
        thread = threading.Thread(target=lambda: found.append(hook.deliver(notice(), abort)))
        thread.start()
        there.wait(1)
        abort.set()
        thread.join(10)
    assert "this daemon ends" in found[0].problem


class Slow:
    """Deliveries that wait until they are let go."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.done: list[str] = []

    def deliver(self, told: Any, abort: threading.Event) -> Outcome:
        self.began.set()
        self.go.wait(30)
        self.done.append(told.id)
        return Outcome()


def test_a_full_queue_drops_counts_and_tells():
    """One under way, three queued, five dropped: offering never waits, and the loss is said once."""
    slow, said = Slow(), []
    worker = Worker("hook-x", slow.deliver, lambda *w: said.append(w), capacity=3)
    worker.start()
    assert worker.offer(notice(0))
    assert slow.began.wait(10)
    taken = [worker.offer(notice(n)) for n in range(1, 9)]
    assert taken == [True] * 3 + [False] * 5
    assert worker.dropped == 5
    slow.go.set()
    assert worker.idle(10)
    assert worker.stop(10) == 0
    assert slow.done == ["run-0", "run-1", "run-2", "run-3"]
    assert [w[2] for w in said if "dropped" in w[2]] == [
        "hook-x: 5 notices were dropped, the queue was full"
    ]


def test_a_delivery_that_breaks_does_not_take_the_next_one_along():
    """An exception is told by its type alone; the thread goes on."""
    said: list[Any] = []

    def deliver(told: Any, abort: threading.Event) -> Outcome:
        if told.id == "run-1":
            raise ValueError("http://host/T0123456789abcdef")
        return Outcome()

    worker = Worker("hook-x", deliver, lambda *w: said.append(w), capacity=3)
    worker.start()
    worker.offer(notice(1))
    worker.offer(notice(2))
    assert worker.stop(10) == 0
    assert [w[1] for w in said] == ["fault", "hook"]
    assert "ValueError" in said[0][2]
    assert "T0123456789abcdef" not in repr(said)


def test_what_is_not_delivered_in_time_is_counted_at_the_end():
    """Patience over: the delivery under way is aborted, those behind it are the result."""

    def deliver(told: Any, abort: threading.Event) -> Outcome:
        abort.wait(30)
        return Outcome("this daemon ends")

    worker = Worker("hook-x", deliver, lambda *_: None, capacity=3)
    worker.start()
    for number in range(3):
        worker.offer(notice(number))
    assert worker.stop(0.2) in (2, 3)  # 3: the thread had not begun the first
    assert not worker.idle(0.0)


def test_helpers_are_used_up():
    """No descriptor is left by ten deliveries of both ways."""
    abort = threading.Event()
    with receiver() as there:
        ways = (webhook(there.url), command(sys.executable, "-c", ""))
        for way in ways:
            assert not way.deliver(notice(), abort).problem
        assert isinstance(there, Receiver)
    before = len(os.listdir("/proc/self/fd"))
    with receiver() as there:
        hook = webhook(there.url)
        for _ in range(5):
            assert not hook.deliver(notice(), abort).problem
            assert not ways[1].deliver(notice(), abort).problem
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, what="descriptors closed")
