"""Every endpoint of a real daemon is asked for nonsense, with and without rights; it stays up."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import time
from urllib.parse import quote

import pytest

from daemon_helpers import daemon, place

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

TOKEN = "a-token-of-good-length"
PAGES = ("/", "/engines/{name}", "/stalls", "/stalls/{stall_id}", "/stalls/{stall_id}.txt", "/live")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")
NASTY = (
    "", ".", "..", "../../etc/passwd", "%2e%2e", "a" * 5000, "\0", "\r\nX-Evil: 1", "é", "\U0001f525",
    "'; drop table stalls", "<script>", "${7*7}", "-1", "0", "1e308", "NaN", "9" * 40, "true", "{}",
    "st-20261130T031502Z-00000000", ":restart", "\u202e", "%", "%zz", "null", "[]",
)  # fmt: skip
FAST_S = 10.0


@pytest.fixture(scope="module")
def run():
    """A daemon with one stall in its ledger."""
    with place() as folder:
        settings = {"limits": {"default": "20s", "start": "60s"}}
        with daemon(folder, settings, env={"STALLWATCH_TOKEN": TOKEN}) as found:
            found.wait_ready()
            found.order("worker", "exit3")
            found.stall_id = found.wait_stall()["id"]
            found.wait_ready(2)
            yield found


@pytest.fixture(autouse=True)
def stays_up(run):
    """Whatever was asked: the same daemon, live, without a traceback in its log."""
    yield
    assert run.process.poll() is None
    assert run.get("/livez")[0] == 200
    log = run.log()
    at = log.find("Traceback")
    assert at < 0, log[max(0, at - 200) : at + 6000]


def operations(run):
    """Every (method, path) of the description, and the pages that it leaves out."""
    paths = run.json("/openapi.json")["paths"]
    described = [(m.upper(), path) for path, found in paths.items() for m in found]
    return described + [("GET", path) for path in PAGES]


def test_no_route_has_a_method_that_the_guard_lets_pass(run):
    """GET and POST are all there is: the guard leaves every other method to the router's 405."""
    assert {method for method, _ in operations(run)} == {"GET", "POST"}
    for method in METHODS[3:]:
        status, _, _ = answer(run, method, "/v1/engines", body=None, headers={})
        assert status == 405, method


class Asker:
    """Seeded nonsense for one operation."""

    def __init__(self, run, seed: int) -> None:
        self.run = run
        self.pick = random.Random(seed)

    def value(self) -> str:
        known = (self.run.name, self.run.stall_id)
        return self.pick.choice((*NASTY, *known, str(self.pick.getrandbits(70))))

    def path(self, template: str) -> str:
        path = template
        for part in ("name", "stall_id"):
            path = path.replace(
                f"{{{part}}}", quote(self.value(), safe=self.pick.choice(("", "/")))
            )
        if self.pick.random() < 0.6:
            names = ("limit", "engine", "after", "follow", "page", "lines", "native", "verbose")
            given = [
                f"{self.pick.choice(names)}={quote(self.value())}"
                for _ in range(self.pick.randint(1, 3))
            ]
            path += "?" + "&".join(given)
        return path

    def body(self):
        choice = self.pick.randrange(5)
        if choice == 0:
            return None
        if choice == 1:
            return self.pick.randbytes(self.pick.randrange(3000))
        if choice == 2:
            return b"[" * 9000
        keys = ("seconds", "fault", "on", "seed", "silent", "counts")
        values = (self.value(), 1e308, -1, None, [], {}, True, "5")
        return json.dumps({self.pick.choice(keys): self.pick.choice(values)}).encode()

    def headers(self):
        found = {"Content-Type": self.pick.choice(("application/json", "text/plain", "x"))}
        if self.pick.random() < 0.3:
            found["Last-Event-ID"] = self.pick.choice(("x", "-1", "9" * 30, "0"))
        if self.pick.random() < 0.2:
            found["Accept"] = self.pick.choice(("*/*", "application/openmetrics-text", "x" * 500))
        return found


def answer(run, method, path, *, body, headers):
    """Status, media type and body of one answer; an endless one is not read to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", run.control, timeout=FAST_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        kind = (response.getheader("content-type") or "").partition(";")[0]
        endless = kind == "text/event-stream"
        return response.status, kind, b"" if endless or method == "HEAD" else response.read()


@pytest.mark.parametrize("rights", ["none", "token"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_endpoint_answers_nonsense_in_time_and_without_an_error_of_ours(run, rights, seed):
    """No status 500, each refusal a problem document, and nothing changes without the token."""
    ask = Asker(run, seed)
    for method, template in operations(run):
        if rights == "token" and template.endswith((":stacks", ":drain")):
            continue  # these would take their time, or leave no engine for the next test
        for _ in range(4):
            used = method if ask.pick.random() < 0.7 else ask.pick.choice(METHODS)
            headers = ask.headers()
            if rights == "token":
                headers["Authorization"] = f"Bearer {TOKEN}"
            path = ask.path(template)
            began = time.monotonic()
            status, kind, body = answer(run, used, path, body=ask.body(), headers=headers)
            said = (used, path[:200], status, body[:300])

            assert status != 500, said
            assert time.monotonic() - began < FAST_S, said
            probe = path.partition("?")[0] in ("/livez", "/readyz", "/healthz")
            if status >= 400 and used != "HEAD" and not probe and kind != "text/plain":
                assert kind == "application/problem+json", said
                assert json.loads(body)["code"], said
            if rights == "none" and used in ("POST", "PUT", "DELETE", "PATCH"):
                assert status >= 400, said


def test_bytes_that_are_no_http_end_the_connection_and_nothing_else(run):
    """Random bytes, half a request, endless headers: answered or closed, never followed."""
    pick = random.Random(7)
    parts = [
        pick.randbytes(2000),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/engines/x:pause HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx\x00\x00 no head",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n\x00\x01\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",  # the begin of TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    for part in parts:
        with socket.create_connection(("127.0.0.1", run.control), timeout=FAST_S) as sock:
            sock.sendall(part)
            sock.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while got := sock.recv(65536):
                    found += got
        assert found.count(b"HTTP/1.1 200") <= part.count(b"HTTP/1.1\r\nHost"), part[:80]


def test_the_engine_has_heard_nothing_of_it(run):
    """After all that the engine serves, and asked with the token alone it obeys."""
    run.wait_ready()
    name = run.name
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    status, _, body = answer(
        run, "POST", f"/v1/engines/{name}:pause", body=b'{"seconds": 1}', headers=headers
    )

    assert status == 200, body
