"""The gate before every route: Host, access, body size, headers. Default deny, in one place."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stallwatch.control.auth import Access, Auth
from stallwatch.control.problem import NO_HEAD, ROUTED, problem

MAX_BODY = 16 * 1024
BODY_DEADLINE_S = 10.0

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CSP = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

# Reads that show an engine's own output or files: as private as a mutation.
_PRIVATE = re.compile(r"/v1/(engines/[^/]+/logs|stalls/[^/]+/artefacts(/.*)?)/?$")


# No route has another method (a test holds it): rights would change nothing about the router's 405.
SERVED = frozenset({*ROUTED, "HEAD"})


class TooLarge(Exception):
    """The body is larger than any request of ours."""


def peer_of(scope: Scope) -> tuple[bool, str | None]:
    """(over the unix socket, peer's address). Only the server writes `unix`, per listener: a TCP
    peer that hung up has no address either and must not be taken for a local socket.
    """
    state = scope.get("state") or {}
    client = scope.get("client")
    return bool(state.get("stallwatch_unix")), client[0] if client else None


def who_of(scope: Scope) -> str:
    """Who asks, for events and the ledger."""
    unix, peer = peer_of(scope)
    if not unix:
        return f"token from {peer}"
    return str((scope.get("state") or {}).get("stallwatch_peer") or "unix socket")


class Guard:
    """ASGI middleware round the whole control application."""

    def __init__(self, app: ASGIApp, *, auth: Auth, socket_path: str = "") -> None:
        self.app = app
        self.auth = auth
        self._socket_path = socket_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send)
        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, send)
            return
        if scope["method"] == "HEAD" and scope["path"] not in NO_HEAD:
            scope = {**scope, "method": "GET"}  # the server drops the body
        if scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                body = await _read_body(scope, receive)
        except TooLarge:
            refused = problem(
                413, "body-too-large", f"the body is larger than {MAX_BODY} bytes",
                instance=scope["path"], headers={"Connection": "close"},
            )  # fmt: skip
        except TimeoutError:
            refused = problem(
                408, "body-too-slow", f"no whole body within {BODY_DEADLINE_S:.0f} s",
                instance=scope["path"], headers={"Connection": "close"},
            )  # fmt: skip
        if refused is not None:
            await refused(scope, receive, send)
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        unix, peer = peer_of(scope)
        path, authorization = scope["path"], headers.get("authorization")
        access = self.auth.access(unix=unix, peer=peer, authorization=authorization)
        # A rebound page can send neither the token nor speak to the socket.
        if access is not Access.FULL and not self.auth.host_allowed(headers.get("host")):
            return problem(
                421,
                "unknown-host",
                "the Host header names a host that is not this supervisor",
                hint="use localhost or 127.0.0.1, or send the token",
                instance=path,
            )
        private = scope["method"] not in ("GET", "HEAD") or _PRIVATE.search(unquote(path))
        needed = Access.FULL if private and scope["method"] in SERVED else Access.READ
        if access.value >= needed.value:
            return None
        return problem(
            401,
            "token-needed",
            "this needs the unix socket or a bearer token",
            hint=self._hint(access),
            instance=path,
            headers={"WWW-Authenticate": 'Bearer realm="stallwatch"'},
        )

    def _hint(self, access: Access) -> str:
        """What would be allowed. Who may not read is not told where our files lie."""
        path = self._socket_path if access is Access.READ else "STATE_DIR/control.sock"
        socket = f"as the daemon's user: --socket {path}, or STALLWATCH_SOCKET"
        bearer = "a token: --token-file FILE, or STALLWATCH_TOKEN"
        return f"{socket}; or {bearer}" if path else bearer


class SecurityOnly:
    """Headers, HEAD and nothing that reads a body: the gate of the health address."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, _with_headers(send))


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Content-Security-Policy", _CSP)
        await send(message)

    return wrapped


async def _read_body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None when the client hung up."""
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY:
        raise TooLarge
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise TooLarge
        if not message.get("more_body"):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
