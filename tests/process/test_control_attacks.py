"""What others may try at the control address, and what they get."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct

import pytest

from control_helpers import STALL, TOKEN, Running, read_until, serving
from stallwatch.control.guard import MAX_BODY
from stallwatch.testing.service import FakeService, engine_view, stall_report

pytestmark = pytest.mark.http

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    (folder / "kept.txt").write_text("kept")
    (folder / "secret").write_text("secret")
    (folder / "link").symlink_to(folder / "secret")
    service = FakeService([engine_view(reason=EVIL)])
    service.reports[STALL] = {**stall_report(STALL), "kind": EVIL}
    service.files[STALL] = [f"{folder}/kept.txt", f"{folder}/link", f"{folder}/gone"]
    with serving(folder, service) as found:
        yield found


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9470", "127.0.0.1.evil", "10.1.2.3"]
)
@pytest.mark.parametrize("path", ["/livez", "/v1/engines", "/", "/nope"])
def test_dns_rebinding_is_refused(running: Running, host, path):
    """A page that points its own name at us gets nothing, on any path."""
    found = running.ask(path, via="tcp", headers={"Host": host})

    assert (found.status, found.json["code"]) == (421, "unknown-host")


def test_no_host_at_all(running: Running):
    """HTTP/1.0 without a Host header is refused too."""
    with running.tcp() as sock:
        sock.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 421")


def test_two_hosts(running: Running):
    """Two Host headers are no request."""
    with running.tcp() as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n")
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 400")


def test_the_socket_and_the_token_take_any_host(running: Running):
    """A rebound page has neither, so their Host is free."""
    assert running.ask("/livez", headers={"Host": "x"}).status == 200
    assert running.ask("/livez", via="tcp", token=TOKEN, headers={"Host": "x"}).status == 200


def mutating_paths(running: Running):
    paths = running.ask("/openapi.json").json["paths"]
    return [
        (method.upper(), path.replace("{name}", "chat"))
        for path, operations in paths.items()
        for method in operations
        if method not in ("get", "head")
    ]


@pytest.mark.parametrize("token", [None, "", "wrong-wrong-wrong-wrong", TOKEN[:-1], TOKEN + "x"])
def test_every_mutation_needs_the_token(running: Running, token):
    """Over TCP no verb of the whole description runs without the exact token."""
    found = mutating_paths(running)
    running.service.asked.clear()
    more = {} if token is None else {"token": token}

    assert len(found) >= 4
    for method, path in found:
        answer = running.ask(path, via="tcp", method=method, body={"seconds": 1}, **more)
        assert (answer.status, answer.json["code"]) == (401, "token-needed")
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert running.service.asked == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/engines/chat/logs",
        "/v1/engines/chat/logs/",
        "/v1/engines/chat%2Flogs",
        f"/v1/stalls/{STALL}/artefacts",
        f"/v1/stalls/{STALL}/artefacts/kept.txt",
        f"/v1/stalls/{STALL}/%61rtefacts",
        "/v1/engines/chat/l%6fgs",
    ],
)
def test_output_and_files_need_the_token(running: Running, path):
    """An engine's output and files are private, however the path is spelt."""
    answer = running.ask(path, via="tcp")

    assert answer.status in (401, 404)
    assert b"line 1" not in answer.body
    assert b"kept" not in answer.body or answer.status == 401


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "X-Real-IP", "Forwarded", "X-HTTP-Method-Override"]
)
def test_headers_give_no_rights(running: Running, header):
    """No header but Authorization changes what a peer may do."""
    answer = running.ask(
        "/v1/engines/chat:restart", via="tcp", method="POST", headers={header: "unix"}
    )

    assert answer.status == 401


def test_nobody_chooses_the_name_in_the_ledger(running: Running):
    """Who asked is the peer's own address, whatever a header says."""
    running.service.asked.clear()
    headers = {"X-Forwarded-For": "10.9.8.7", "X-Forwarded-Proto": "https"}
    running.ask("/v1/engines/chat:restart", via="tcp", method="POST", headers=headers, token=TOKEN)

    assert running.service.asked == [("restart", "chat", "token from 127.0.0.1")]


def test_a_peer_that_hung_up_is_no_unix_socket(running: Running):
    """A reset TCP connection has no address; its request still has no rights."""
    running.service.asked.clear()
    for _ in range(20):
        with running.tcp() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(b"POST /v1/engines/chat:restart HTTP/1.1\r\nHost: localhost\r\n\r\n")
    # a whole exchange on the same loop: what came before has been handled
    assert running.ask("/livez", via="tcp").status == 200
    assert running.service.asked == []


def test_a_declared_body_too_large(running: Running):
    """A large body is refused by its declared size, before it is sent."""
    with contextlib.closing(running.connection("unix")) as connection:
        connection.putrequest("POST", "/v1/engines/chat:pause")
        connection.putheader("Content-Length", str(MAX_BODY + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_a_chunked_body_too_large(running: Running):
    """A body without a declared size is counted while it arrives."""
    with contextlib.closing(running.connection("unix")) as connection:
        # The refusal may come, and the connection be closed, while we are still sending.
        with contextlib.suppress(BrokenPipeError):
            connection.request(
                "POST", "/v1/engines/chat:pause", iter([b"x" * 4096] * 5), encode_chunked=True,
                headers={"Transfer-Encoding": "chunked"},
            )  # fmt: skip
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["code"]) == (413, "body-too-large")


def test_headers_without_end(running: Running):
    """Headers beyond 16 KiB end the connection with a 400."""
    with running.tcp() as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 65536)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(4096).startswith((b"HTTP/1.1 400", b""))
    assert running.ask("/livez", via="tcp").status == 200


@pytest.mark.parametrize(
    "ident",
    [
        "..%2f..%2fetc%2fpasswd",
        "../../etc/passwd",
        "st-x",
        f"{STALL}%00",
        f"{STALL}%0a",
        "%2e%2e",
        f"{STALL}/../{STALL}",
        f" {STALL}",
        STALL.upper(),
        "st-20261130T031502Z-9f2c41a٣",
    ],
)
def test_only_ids_are_ids(running: Running, ident, monkeypatch):
    """Nothing but a well-formed id reaches the ledger."""
    asked: list[str] = []
    monkeypatch.setattr(running.service, "before", asked.append)
    with running.tcp() as sock:
        path = f"/v1/stalls/{ident}".encode().replace(b" ", b"%20")
        sock.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        first = read_until(sock, b"\r\n").split(b" ")[1]
        assert first in (b"404", b"400")
    assert "stall" not in asked


@pytest.mark.parametrize(
    "name",
    ["..%2fsecret", "secret", "link", "gone", "%2e%2e", "..%2f..%2fetc%2fpasswd", "kept.txt%00"],
)
def test_only_listed_regular_files_are_sent(running: Running, name):
    """A name that is not listed, a symbolic link and a vanished file are 404, never content."""
    assert running.ask(f"/v1/stalls/{STALL}/artefacts/{name}").status == 404


def test_listed_files_are_sent(running: Running):
    """What the service lists can be fetched over the socket."""
    listed = running.ask(f"/v1/stalls/{STALL}/artefacts").json["items"]

    assert listed == ["gone", "kept.txt", "link"]
    assert running.ask(f"/v1/stalls/{STALL}/artefacts/kept.txt").body == b"kept"


def test_a_fifo_does_not_block(tmp_path):
    """A FIFO in the place of a file is refused without waiting for a writer."""
    os.mkfifo(tmp_path / "pipe")
    service = FakeService()
    service.reports[STALL] = stall_report(STALL)
    service.files[STALL] = [f"{tmp_path}/pipe"]
    with serving(tmp_path, service) as running:
        assert running.ask(f"/v1/stalls/{STALL}/artefacts/pipe").status == 404


def test_the_page_escapes(running: Running):
    """No reason and no kind becomes markup, and the page may run no script but our own file."""
    found = running.ask("/", via="tcp")

    assert EVIL not in found.text
    assert "&lt;script&gt;" in found.text
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert "script-src 'self';" in found.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/", "/livez", "/v1/engines", "/nope"])
def test_every_answer_has_the_headers(running: Running, path):
    """Security headers are on successes and errors; no answer allows another origin."""
    found = running.ask(path, via="tcp", headers={"Origin": "http://evil.example"})

    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["x-frame-options"] == "DENY"
    assert "content-security-policy" in found.headers
    assert "access-control-allow-origin" not in found.headers
    assert "server" not in found.headers


@pytest.mark.parametrize(
    "path", ["/%0d%0aX-Evil:%201", "/v1/engines/a%0d%0aX-Evil:1", "/v1/engines/%ff%fe"]
)
def test_paths_cannot_write_headers(running: Running, path):
    """Line breaks in a path stay inside the JSON body."""
    found = running.ask(path, via="tcp")

    assert "x-evil" not in found.headers
    assert found.status == 404


def test_bad_last_event_id(running: Running):
    """A Last-Event-ID that is no number of ours is a problem, not an error of ours."""
    for bad in ("x", "-1", "1e9", "9" * 40, "١"):
        headers = {"Last-Event-ID": bad.encode().decode("latin-1")}
        assert running.ask("/v1/events?follow=false", headers=headers).status == 400
