"""What an engine's own error says of itself: that it was failed, by which FAILURE, or only "not now". Pure."""

from __future__ import annotations

import re

from stallwatch.gateway.errors import STALLED
from stallwatch.gateway.head import Response

_TROUBLE = frozenset({500, 502, 503, 504})  # what an engine says whose own part was lost
_STALLED = STALLED.encode()
_FAILURE_ID = re.compile(rb'"failure_id": ?"(st-[0-9TZ]{16}-[0-9a-f]{8})"')
# In a text that an engine wrote these quotes are escaped.
_NO_ID = re.compile(rb'"failure_id": ?null')


def stalled(data: bytes) -> bool:
    """It says that it was failed."""
    return _STALLED in data


def failure_id(data: bytes) -> str:
    """The FAILURE that it names, or ''."""
    told = _FAILURE_ID.search(data)
    return told[1].decode() if told is not None else ""


def knows_no_id(data: bytes) -> bool:
    """It says that there is a FAILURE and that it does not know which."""
    return _NO_ID.search(data) is not None


def doubtful(response: Response) -> bool:
    """An error that may be the first sign of a FAILURE."""
    return response.status in _TROUBLE


def refuses(response: Response, body: bytes) -> bool:
    """The engine takes nothing just now. An engine that was failed says so and is no such case."""
    later = any(name.lower() == b"retry-after" for name, _ in response.headers)
    return later and not stalled(body)
