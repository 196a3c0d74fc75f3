"""READY is a fact about our engine: the answering socket must belong to a member."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stallwatch import procfs
from stallwatch.board.image import BoardImage
from stallwatch.errors import ConfigError
from stallwatch.process import sockets
from stallwatch.process.preflight import describe


@dataclass(frozen=True, slots=True)
class Ready:
    """A member listens on the port."""

    pid: int


@dataclass(frozen=True, slots=True)
class Foreign:
    """Somebody else does. pid 0: not visible to us."""

    pid: int
    words: str


@dataclass(frozen=True, slots=True)
class NotListening:
    """Nobody does yet."""


PortOwner = Ready | Foreign | NotListening


def port_owner(port: int, members: Iterable[int], proc: Path = procfs.PROC) -> PortOwner:
    """Who answers on the port. One foreign listener is enough to be Foreign: clients may hit it."""
    inodes = sockets.listening(port, proc)
    if not inodes:
        return NotListening()
    ours = sockets.holders(inodes, members, proc)
    others = inodes - ours.keys()
    if not others:
        return Ready(next(iter(ours.values())))
    theirs = sockets.holders(others, proc=proc)
    if not theirs:
        return Foreign(0, f"port {port} is answered by a process of another user (not ours)")
    pid = next(iter(theirs.values()))
    return Foreign(pid, f"port {port} is answered by {describe(pid, proc)} (not ours)")


def all_ready(image: BoardImage | None) -> bool | None:
    """True when every attached process called ready(); None when none is attached."""
    attached = [p for p in image.processes if not p.detached] if image else []
    return all(p.ready for p in attached) if attached else None


@dataclass(frozen=True, slots=True)
class Probe:
    """Where to ask: a path on the engine's port, or what `ready.http` says."""

    scheme: str  # http, https, unix
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str, port: int | None) -> Probe:
        """'/health', 'https://host:1/ready' or 'unix:/run/e.sock:/health'. Raises ConfigError."""
        where = "ready.http"
        if text.startswith("/"):
            if port is None:
                raise ConfigError(
                    "a path needs a port", where=where, hint="Set port, or write a whole URL."
                )
            return cls("http", "127.0.0.1", port, text)
        if text.startswith("unix:"):
            name, _, path = text[5:].removeprefix("//").partition(":")
            if name.startswith("/"):
                return cls("unix", name, 0, path or "/")
        with contextlib.suppress(ValueError):
            url = urlsplit(text)
            if url.scheme in ("http", "https") and url.hostname:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                usual = 443 if url.scheme == "https" else 80
                return cls(url.scheme, url.hostname, url.port or usual, path)
        raise ConfigError(
            f"{text!r} is no address",
            where=where,
            hint="Write a path (/health), an http(s) URL, or unix:/path/to.sock:/health.",
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the probe got. status 0: no answer, `detail` says why."""

    ok: bool
    status: int
    detail: str


def ask(probe: Probe, deadline_s: float = 2.0) -> Answer:
    """One GET. Ends within the deadline whatever the server does. 200-399 is ready (as kubelet)."""
    connection = _connection(probe, deadline_s)
    try:
        with _cut_after(connection, deadline_s) as was_cut:
            connection.request("GET", probe.path, headers={"User-Agent": "stallwatch"})
            status = connection.getresponse().status
        if was_cut.is_set():  # http.client takes headers that end early for complete
            return Answer(ok=False, status=0, detail=f"no whole answer in {deadline_s:g} s")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(ok=False, status=0, detail=f"no answer: {str(error) or type(error).__name__}")
    finally:
        connection.close()
    return Answer(ok=200 <= status < 400, status=status, detail=f"HTTP {status}")


def _connection(probe: Probe, timeout: float) -> http.client.HTTPConnection:
    if probe.scheme == "unix":
        return _UnixConnection(probe.host, timeout)
    if probe.scheme == "https":
        # Like kubelet's: it asks whether somebody serves, and trusts the answer with nothing.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(probe.host, probe.port, timeout=timeout, context=context)
    return http.client.HTTPConnection(probe.host, probe.port, timeout=timeout)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextlib.contextmanager
def _cut_after(connection: http.client.HTTPConnection, seconds: float) -> Iterator[threading.Event]:
    """The timeout of a socket is per read: a server that drips one byte a second would hold us."""
    was_cut = threading.Event()

    def cut() -> None:
        was_cut.set()
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield was_cut
    finally:
        timer.cancel()
        timer.join(1.0)
