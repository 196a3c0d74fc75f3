"""The daemon as seen from a command: http.client over the unix socket or TCP, and clear errors."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from stallwatch import paths
from stallwatch.cli.settings import Settings, settings
from stallwatch.errors import DaemonUnreachable, StallwatchError, UnknownEngine

MAX_ANSWER = 128 * 1024 * 1024
_MAX_LINE = 1024 * 1024
_MAX_WORDS = 2000
# What a daemon on loopback answers only to its socket or the token; everything else is free there.
_PRIVATE = re.compile(r"/v1/(engines/[^/?]+/logs|stalls/[^/?]+/artefacts)")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """One connection to one daemon. Raises DaemonUnreachable, UnknownEngine or StallwatchError."""

    def __init__(self, found: Settings) -> None:
        self._settings = found
        self._connection: http.client.HTTPConnection | None = None
        self._token = _token(found)
        self._trusted = False  # whether the peer may have the token
        self.where = ""

    def get(self, path: str, **query: object) -> Any:
        return self._json(self.raw("GET", _with_query(path, query)))

    def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        **query: object,
    ) -> Any:
        return self._json(self.raw("POST", _with_query(path, query), body or {}, timeout=timeout))

    def _json(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError:
            raise _foreign(self.where, 200) from None

    def status(self, path: str) -> tuple[int, str]:
        """Status and text of a probe: no status is an error here."""
        response = self._ask("GET", path, None, None)
        return response.status, response.read(MAX_ANSWER).decode("utf-8", "replace")

    def raw(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> bytes:
        """The body of a successful answer."""
        response = self._ask(method, path, body, timeout)
        try:
            content = response.read(MAX_ANSWER)
        except TimeoutError:
            raise self._late(timeout) from None
        if response.status >= 400:
            raise self._error(response.status, content)
        return content

    def lines(self, path: str, *, timeout: float, headers: dict[str, str]) -> Iterator[str]:
        """The lines of an endless answer, until the daemon ends it."""
        response = self._ask("GET", path, None, timeout, headers=headers)
        if response.status >= 400:
            raise self._error(response.status, response.read(MAX_ANSWER))
        while line := response.readline(_MAX_LINE):
            yield line.decode("utf-8", "replace").rstrip("\r\n")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout: float | None,
        *,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        connection = self._connection or self._connect()
        if connection.sock is not None:
            connection.sock.settimeout(timeout or self._settings.timeout)
        sent = dict(headers or {})
        content = None
        if body is not None:
            content, sent["Content-Type"] = json.dumps(body).encode(), "application/json"
        token = {"Authorization": f"Bearer {self._token}"} if self._token and self._trusted else {}
        first = token if _needs_token(method, path, connection) else {}
        try:
            connection.request(method, path, content, sent | first)
            response = connection.getresponse()
            if response.status == 401 and token and not first:  # loopback here, not at its end
                response.read(MAX_ANSWER)
                connection.request(method, path, content, sent | token)
                response = connection.getresponse()
            return response
        except TimeoutError:
            raise self._late(timeout) from None
        except (OSError, http.client.HTTPException) as exc:
            self.close()
            raise DaemonUnreachable(
                f"the daemon at {self.where} ended the connection ({_words(exc)})",
                hint="it may be stopping; `stallwatch status` asks again",
            ) from None

    def _error(self, status: int, content: bytes) -> StallwatchError:
        error = _error(status, content, self.where)
        if status == 401 and self._token and not self._trusted:
            # Any user of this machine can hold the default port and collect what is sent to it.
            error.hint = f"the token is sent only where it is told to: add --url {self.where}"
        return error

    def _late(self, timeout: float | None) -> DaemonUnreachable:
        self.close()
        waited = timeout or self._settings.timeout
        return DaemonUnreachable(
            f"the daemon at {self.where} did not answer within {waited:g} s",
            hint="--timeout 60s waits longer; /livez says whether its loops turn",
        )

    def _connect(self) -> http.client.HTTPConnection:
        tried: list[str] = []
        for where, connection in self._candidates():
            try:
                connection.connect()
            except OSError as exc:
                connection.close()
                tried.append(f"{where}: {_words(exc)}")
                continue
            self.where, self._connection = where, connection
            self._trusted = bool(self._settings.url) or isinstance(connection, _UnixConnection)
            return connection
        hint = (
            "start one with `stallwatch serve -- COMMAND`, or point at one with --socket "
            "STATE_DIR/control.sock or --url http://HOST:PORT: the 'serving' line of its log says which"
        )
        if len(tried) == 1:
            raise DaemonUnreachable(f"no daemon at {tried[0]}", hint=hint)
        listed = "".join(f"\n  looked at {each}" for each in tried)
        raise DaemonUnreachable(f"no daemon answers{listed}", hint=hint)

    def _candidates(self) -> Iterator[tuple[str, http.client.HTTPConnection]]:
        timeout = self._settings.timeout
        if self._settings.url:
            yield _by_url(self._settings.url, timeout)
            return
        if self._settings.socket:
            yield self._settings.socket, _UnixConnection(self._settings.socket, timeout)
            return
        for path in paths.client_sockets():
            if os.path.exists(path):
                yield path, _UnixConnection(path, timeout)
        yield _by_url(f"http://{paths.DEFAULT_CONTROL}", timeout)


def client() -> Client:
    """A client by the settings of the command that runs."""
    return Client(settings())


def segment(name: str) -> str:
    """A name as one path segment. UnknownEngine when it cannot be a name of anything."""
    if "/" in name or not name.strip(".") or not name.isprintable():
        raise UnknownEngine(f"no such name: {name!r}", hint="`stallwatch status` lists the names")
    return quote(name, safe="")


def _needs_token(method: str, path: str, connection: http.client.HTTPConnection) -> bool:
    """A change, or what an engine wrote; from another machine, everything."""
    near = isinstance(connection, _UnixConnection) or _LOOPBACK.fullmatch(connection.host)
    return not near or method != "GET" or _PRIVATE.match(path) is not None


def _token(found: Settings) -> str | None:
    if not found.token_file and "STALLWATCH_TOKEN" not in os.environ:
        return None
    from stallwatch.control.auth import load_token

    return load_token(found.token_file or None)


def _by_url(url: str, timeout: float) -> tuple[str, http.client.HTTPConnection]:
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").replace("//", "/", 1)
        return path, _UnixConnection(path, timeout)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if not host or parts.scheme not in ("http", "https"):
        import click

        raise click.UsageError(f"--url: not an address: {url!r}: write http://127.0.0.1:9470")
    if parts.scheme == "https":
        return url, http.client.HTTPSConnection(host, port or 443, timeout=timeout)
    return url, http.client.HTTPConnection(host, port or 9470, timeout=timeout)


def _with_query(path: str, query: dict[str, object]) -> str:
    given = {
        k: str(v).lower() if isinstance(v, bool) else v for k, v in query.items() if v is not None
    }
    return f"{path}?{urlencode(given)}" if given else path


def _words(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror.lower()
    return str(exc) or type(exc).__name__


def _plain(text: object) -> str:
    """A server's words on one line without controls: they must not drive a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:_MAX_WORDS])


def _foreign(where: str, status: int) -> StallwatchError:
    return StallwatchError(
        f"what answers at {where} is no stallwatch (status {status})",
        hint="name the daemon with --socket or --url",
    )


def _error(status: int, content: bytes, where: str) -> StallwatchError:
    try:
        document = json.loads(content)
        detail, hint = _plain(document["detail"]), _plain(document.get("hint", ""))
        code = str(document.get("code", ""))
    except (ValueError, TypeError, KeyError):
        return _foreign(where, status)
    if code == "unknown-engine-or-stall":
        return UnknownEngine(detail, hint=hint)
    return StallwatchError(detail, hint=hint)
