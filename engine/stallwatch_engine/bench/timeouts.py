"""Which failures are structural timeouts. By type, status and code; never by the words of a message."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

STALLED = "engine_stalled"
_SERVER_STATUS = {408: "server_408", 504: "server_504"}


class TimeoutKind(StrEnum):
    """Where the time ran out."""

    TOTAL = "total"  # the whole request's limit, of the client
    CONNECT = "connect"  # no connection in time
    SOCK_READ = "sock_read"  # nothing read in time
    ASYNCIO = "asyncio"  # a timeout of asyncio other than the client's total
    SERVER_408 = "server_408"
    SERVER_504 = "server_504"
    SERVER_DEADLINE = "server_deadline"  # a server's own timeout as an OpenAI error object
    ENGINE_STALLED = STALLED


def of_exception(error: BaseException, *, total_expired: bool = False) -> TimeoutKind | None:
    """The kind of timeout that an exception of the HTTP client is; None when it is none.

    total_expired: the request's own total limit has passed; aiohttp raises asyncio's bare
    TimeoutError for it, like any other.
    """
    import aiohttp

    # The order matters: the first three are TimeoutErrors too, and that one is an OSError.
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return TimeoutKind.CONNECT
    if isinstance(error, aiohttp.ServerTimeoutError):  # and SocketTimeoutError
        return TimeoutKind.SOCK_READ
    if isinstance(error, aiohttp.ClientConnectorError):
        return TimeoutKind.CONNECT if _kernel_timeout(error.os_error) else None
    if isinstance(error, aiohttp.ClientError):
        return TimeoutKind.SOCK_READ if _kernel_timeout(error) else None
    if isinstance(error, TimeoutError):
        return TimeoutKind.TOTAL if total_expired else TimeoutKind.ASYNCIO
    return None


def of_status(status: int) -> TimeoutKind | None:
    """The kind of timeout that an HTTP status is."""
    found = _SERVER_STATUS.get(status)
    return TimeoutKind(found) if found else None


def of_error(error: Mapping[str, Any]) -> TimeoutKind | None:
    """The kind of timeout that an OpenAI error object is, in a body or in a stream's event."""
    code, type_ = error.get("code"), error.get("type")
    if STALLED in (code, type_):
        return TimeoutKind.ENGINE_STALLED
    if isinstance(code, int) and not isinstance(code, bool):  # vLLM puts the status there
        return of_status(code)
    if type_ == "timeout_error" or code == "deadline_exceeded":
        return TimeoutKind.SERVER_DEADLINE
    return None


def _kernel_timeout(error: BaseException) -> bool:
    """The kernel gave up: no answer to SYN, keep-alive or retransmissions."""
    return isinstance(error, OSError) and error.errno == errno.ETIMEDOUT
