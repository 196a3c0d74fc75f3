"""The control plane over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from control_helpers import STALL, TOKEN, Running, read_until, serving
from stallwatch.control import probes, protocol
from stallwatch.control.server import ControlServer, bind_unix
from stallwatch.errors import ConfigError
from stallwatch.lifecycle.states import State
from stallwatch.testing.service import FakeService, engine_view, stall_report

pytestmark = pytest.mark.http


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    service = FakeService([engine_view(), engine_view("code", State.STARTING)])
    service.reports[STALL] = stall_report(STALL)
    with serving(tmp_path_factory.mktemp("c"), service) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/livez", 200, "live\n"),
        ("/readyz", 200, "ready\n"),
        ("/healthz", 200, "loading\n"),
        (
            "/readyz?verbose",
            200,
            "[+]engine/chat ok: ready\n[-]engine/code failed: loading\nready\n",
        ),
    ],
)
@pytest.mark.parametrize("via", ["unix", "tcp", "health"])
def test_probes(running: Running, path, *, status, text, via):
    """All three addresses answer the probes, as plain text that nobody caches."""
    found = running.ask(path, via=via)

    assert (found.status, found.text) == (status, text)
    assert found.headers["content-type"].startswith("text/plain")
    assert found.headers["cache-control"] == "no-store"


def test_head_has_no_body(running: Running):
    """HEAD answers like GET without a body."""
    found = running.ask("/livez", method="HEAD")

    assert (found.status, found.body) == (200, b"")


def test_engines(running: Running):
    """The list is short, one engine has its lanes, and an unknown one is a 404 with a hint."""
    listed = running.ask("/v1/engines", via="tcp").json["items"]
    one = running.ask("/v1/engines/chat", via="tcp").json
    missing = running.ask("/v1/engines/nope", via="tcp")

    assert [each["name"] for each in listed] == ["chat", "code"]
    assert "lanes" not in listed[0]
    assert one["lanes"][0]["address"] == "worker:0/model"
    assert (missing.status, missing.json["hint"]) == (404, "engines: chat, code")


def test_stalls(running: Running):
    """Newest first under items; one id is the report."""
    assert [s["id"] for s in running.ask("/v1/stalls").json["items"]] == [STALL]
    assert running.ask(f"/v1/stalls/{STALL}").json["kind"] == "DEVICE_WAIT"
    assert running.ask("/v1/stalls?engine=code").json == {"items": []}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nope", None, 404, "not-found"),
        ("GET", "/livez/", None, 404, "not-found"),
        ("POST", "/livez", None, 405, "method-not-allowed"),
        ("OPTIONS", "/v1/engines", None, 405, "method-not-allowed"),
        ("GET", "/v1/engines/chat:restart", None, 405, "method-not-allowed"),
        ("GET", "/v1/stalls?limit=0", None, 422, "invalid-parameter"),
        ("GET", "/v1/stalls?limit=x", None, 422, "invalid-parameter"),
        ("POST", "/v1/engines/chat:pause", {"seconds": -1}, 422, "invalid-parameter"),
        ("POST", "/v1/engines/chat:pause", {"seconds": 1, "x": 2}, 422, "invalid-parameter"),
        ("POST", "/v1/engines/chat:pause", b"{", 422, "invalid-parameter"),
        ("POST", "/v1/engines/nope:restart", None, 404, "unknown-engine-or-stall"),
        ("GET", "/v1/engines/nope/logs", None, 404, "unknown-engine-or-stall"),
    ],
)
def test_errors_are_problems(running: Running, method, path, *, body, status, code):
    """Every error is a problem document with all members of RFC 9457, a code and a hint."""
    found = running.ask(
        path, method=method, body=body, headers={"Content-Type": "application/json"}
    )

    assert found.status == status
    assert found.headers["content-type"] == "application/problem+json"
    assert found.json["code"] == code
    assert found.json["status"] == status
    assert found.json["instance"] == path.partition("?")[0]
    assert {"type", "title", "detail", "hint"} <= set(found.json)


def test_an_error_of_ours_says_nothing_of_it(tmp_path, caplog):
    """An unexpected exception is a 500 problem without its text; the log has the traceback."""
    service = FakeService()

    def broken(name: str) -> None:
        if name == "engine":
            raise RuntimeError("/secret/path")

    with serving(tmp_path, service) as running:
        service.before = broken
        found = running.ask("/v1/engines/chat")
    assert (found.status, found.json["code"]) == (500, "internal-error")
    assert "secret" not in found.text
    assert "/secret/path" in caplog.text


def test_verbs_reach_the_service_with_who_asked(running: Running):
    """Socket: uid and pid of the caller; token: the peer's address."""
    running.service.asked.clear()
    first = running.ask("/v1/engines/chat:restart", method="POST")
    running.ask(
        "/v1/engines/chat:pause", method="POST", via="tcp", token=TOKEN, body={"seconds": 2}
    )

    assert first.json["message"].startswith("chat restarts")
    assert running.service.asked == [
        ("restart", "chat", f"uid {os.getuid()} (pid {os.getpid()})"),
        ("pause", "chat", 2.0, "token from 127.0.0.1"),
    ]


def test_openapi_lists_every_route(running: Running):
    """The description is complete: verbs, reads and probes."""
    found = running.ask("/openapi.json").json["paths"]

    assert {"/livez", "/metrics", "/v1/engines/{name}:restart", "/v1/stalls/{stall_id}"} <= set(
        found
    )


def test_metrics_on_both_addresses(running: Running):
    """/metrics is on control and on the health address, the same registry."""
    for via in ("tcp", "health"):
        found = running.ask("/metrics", via=via)
        assert 'stallwatch_engine_ready{engine="chat"} 1.0' in found.text
        assert found.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/", "/v1/engines", "/v1/stalls", "/v1/events", "/openapi.json"])
def test_health_address_has_nothing_else(running: Running, path):
    """The health address serves probes and metrics only."""
    assert running.ask(path, via="health").status == 404


def test_socket_is_private(running: Running):
    """The socket is 0600 in a folder of its owner."""
    assert stat.S_IMODE(os.stat(running.path).st_mode) == 0o600


@pytest.mark.slow
def test_probes_answer_while_the_service_blocks(tmp_path, monkeypatch):
    """A blocked service: probes answer in under 100 ms, and after a while they say so."""
    monkeypatch.setattr(probes, "SILENT_S", 0.4)
    service, release = FakeService(), threading.Event()
    with serving(tmp_path, service) as running, running.tcp() as sock:
        assert running.ask("/livez").status == 200
        service.before = lambda _: release.wait(20)
        took, until = [], time.monotonic() + 10
        status = b"200"
        try:
            while b"503" not in status and time.monotonic() < until:
                started = time.perf_counter()
                sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                status = sock.recv(4096).partition(b"\r\n")[0]
                took.append(time.perf_counter() - started)
        finally:
            release.set()
        assert b"503" in status
        assert sorted(took)[len(took) // 2] < 0.1


def test_stacks_are_bounded(tmp_path):
    """More than two requests for stacks at once are refused with Retry-After, not queued."""
    service, release, inside = FakeService(), threading.Event(), threading.Semaphore(0)

    def block(name: str) -> None:
        if name == "stacks":
            inside.release()
            release.wait(20)

    service.before = block
    with serving(tmp_path, service) as running, contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(contextlib.closing(running.connection("unix")))
            connection.request("POST", "/v1/engines/chat:stacks")
            assert inside.acquire(timeout=10)
        try:
            refused = running.ask("/v1/engines/chat:stacks", method="POST")
        finally:
            release.set()
        assert (refused.status, refused.json["code"]) == (503, "busy")
        assert connection.getresponse().status == 200


@pytest.mark.slow
@pytest.mark.process
def test_a_blocked_service_does_not_keep_the_process(tmp_path):
    """With the service stuck for ever, stop() returns and the process ends."""
    code = """
import sys, threading
from stallwatch.control.server import ControlServer, bind_unix
from stallwatch.testing.service import FakeService
from stallwatch.cli.client import Client
from stallwatch.cli.settings import Settings
service = FakeService()
server = ControlServer(service, socket_path=sys.argv[1])
server.start()
service.before = lambda _: threading.Event().wait()
print(Client(Settings(socket=sys.argv[1])).status("/livez"))
server.stop(5.0)
print("stopped", flush=True)
"""
    path = Path(__file__).parents[2] / "supervisor"
    found = subprocess.run(
        [sys.executable, "-c", code, f"{tmp_path}/s"],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip

    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[-1] == "stopped"


def test_a_busy_port_names_its_holder(tmp_path):
    """The error for a held port names the process that holds it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}") as caught:
            ControlServer(FakeService(), control=address, socket_path=f"{tmp_path}/s")
    assert caught.value.exit_code == 78
    assert not os.path.exists(f"{tmp_path}/s")


def test_a_second_daemon_on_one_socket_is_refused(running: Running):
    """A living daemon's socket is not taken away."""
    with pytest.raises(ConfigError, match="another stallwatch"):
        ControlServer(FakeService(), socket_path=running.path)
    assert running.ask("/livez").status == 200


def test_a_stale_socket_is_replaced(tmp_path):
    """What a killed daemon left is replaced; a file of another kind is not."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{tmp_path}/control.sock")
    with serving(tmp_path) as running:
        assert running.ask("/livez").status == 200
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        ControlServer(FakeService(), socket_path=f"{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_long_socket_path_is_one_sentence(tmp_path):
    """A path beyond 107 bytes is a configuration error that says so."""
    with pytest.raises(ConfigError, match="107"):
        ControlServer(FakeService(), socket_path=f"{tmp_path}/{'x' * 120}")


def test_only_a_default_socket_folder_is_made(tmp_path, monkeypatch):
    """A given socket's folder must exist; that of a default place is made, private."""
    with pytest.raises(ConfigError, match=f"{tmp_path}/nope is no folder") as caught:
        ControlServer(FakeService(), socket_path=f"{tmp_path}/nope/x.sock")
    assert caught.value.exit_code == 78
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with contextlib.closing(bind_unix(f"{tmp_path}/stallwatch/control.sock")):
        assert (tmp_path / "stallwatch").stat().st_mode & 0o777 == 0o700


def test_stop_leaves_nothing(tmp_path):
    """After stop() no thread, no socket file and no listening port is left, streams included."""
    before = set(threading.enumerate())
    with serving(tmp_path) as running:
        stream = running.connection("unix")
        stream.request("GET", "/v1/events")
        response = stream.getresponse()
        address = running.server.control_address
    with contextlib.closing(stream):
        assert b"stallwatch events" in response.read()
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError), socket.create_connection((host, int(port))):
        pass
    assert not os.path.exists(running.path)
    left = [
        t for t in set(threading.enumerate()) - before if not t.name.startswith(("Any", "asyncio"))
    ]
    until = time.monotonic() + 5
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    assert not [t for t in left if t.is_alive()]


def test_stop_does_not_remove_a_successors_socket(tmp_path):
    """A socket that somebody else made at the same path meanwhile stays."""
    with serving(tmp_path) as running:
        os.unlink(running.path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(running.path)
    assert os.path.exists(running.path)


@pytest.mark.slow
def test_a_second_head_that_never_ends_is_closed_too(tmp_path, monkeypatch):
    """One answered request buys no connection for ever: there are 256 of them in all."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    with serving(tmp_path) as running, running.tcp() as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(sock, b"\r\n\r\n")
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: loc")
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass


def test_a_silent_connection_is_closed(tmp_path, monkeypatch):
    """A connection that asks nothing, or never ends its headers, is closed."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    with serving(tmp_path) as running, running.tcp() as silent, running.tcp() as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\nHost: loc")
        for sock in (silent, slow):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""


@pytest.mark.slow
def test_too_many_connections(tmp_path, monkeypatch):
    """While every one is being answered, one more is closed at once; the unix socket has a bound of its own."""
    monkeypatch.setattr(protocol, "CONNECTIONS", 4)
    with serving(tmp_path) as running, contextlib.ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(running.tcp())
            sock.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in read_until(sock, b"\r\n\r\n")
        extra = stack.enter_context(running.tcp())
        with contextlib.suppress(ConnectionResetError):
            assert extra.recv(1) == b""
        assert running.ask("/livez", via="unix").status == 200


def test_one_peer_cannot_take_every_place_of_the_probes(tmp_path, monkeypatch):
    """On the health address a peer has its share of the places: whoever else probes is answered."""
    monkeypatch.setattr(protocol.HealthProtocol, "per_peer", 4)
    ask = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(tmp_path) as running, contextlib.ExitStack() as stack:
        host, _, port = running.server.health_address.rpartition(":")

        def come(source: str) -> socket.socket:
            made = socket.create_connection((host, int(port)), 10, source_address=(source, 0))
            return stack.enter_context(made)

        def served(sock: socket.socket) -> bool:
            with contextlib.suppress(ConnectionError):
                sock.sendall(ask)
                return b" 200 " in sock.recv(4096)
            return False

        greedy = [come("127.0.0.1") for _ in range(4)]
        assert all(served(sock) for sock in greedy)
        assert not served(come("127.0.0.1"))
        assert served(come("127.0.0.2"))
        assert running.ask("/livez", via="tcp").status == 200
        greedy[0].close()  # its place is free again, once the server has seen it
        until = time.monotonic() + 10
        while not served(come("127.0.0.1")):
            assert time.monotonic() < until


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        (("10.0.0.7", 1), "10.0.0.7"),
        (("::ffff:10.0.0.7", 1, 0, 0), "10.0.0.7"),
        (("2001:db8::1", 1, 0, 0), "2001:db8::/64"),
        (("2001:db8::2", 9, 0, 0), "2001:db8::/64"),
        (("2001:db8:0:1::1", 1, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("", 1), ""),
        ("", ""),
        (None, ""),
    ],
)
def test_who_counts_as_one_peer(peer, found):
    """An IPv4 address however it is written, and the whole /64 that one IPv6 host may use."""
    assert protocol.origin(peer) == found


class Reports:
    """A desk that nobody wrote to."""

    def heard(self, _: object) -> tuple[str, ...]:
        return ()

    def view(self) -> dict[str, object]:
        return {}


def test_the_allow_header_names_every_method_of_the_path(tmp_path):
    """Two routes of one path are one answer; a verb's path has POST alone, a stream no HEAD."""
    with serving(tmp_path, desk=Reports()) as running:
        for path, allowed in {
            "/v1/gateway": "GET, HEAD, POST",
            "/v1/engines": "GET, HEAD",
            "/v1/engines/chat": "GET, HEAD",
            "/v1/engines/chat:restart": "POST",
            "/v1/engines/chat:pause": "POST",
            "/v1/engines/chat:nonsense": "GET, HEAD",
            "/v1/engines/chat/logs": "GET, HEAD",
            "/v1/events": "GET",
            "/live": "GET",
            "/livez": "GET, HEAD",
            "/metrics": "GET, HEAD",
            "/": "GET, HEAD",
            "/openapi.json": "GET, HEAD",
        }.items():
            for method in ("PUT", "DELETE", "OPTIONS", "GET", "HEAD", "POST"):
                found = running.ask(path, method=method) if method not in allowed else None
                if found is not None:
                    assert (found.status, found.headers["allow"]) == (405, allowed), (method, path)
        health = running.ask("/livez", via="health", method="PUT")
        assert (health.status, health.headers["allow"]) == (405, "GET, HEAD")
