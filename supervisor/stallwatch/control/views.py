"""Views as JSON: plain values only, no NaN, enums by their word."""

from __future__ import annotations

import dataclasses
import json
import math
from enum import Enum
from typing import Any

from starlette.responses import Response

from stallwatch.control.service import EngineView, Event

_DEEP = ("lanes", "processes")


def plain(value: Any) -> Any:
    """The value as JSON can say it; an infinite or undefined number is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str | int | bool) or value is None:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def dumps(value: Any) -> str:
    """Compact JSON of a view. ASCII only, so that one event is always one line."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def engine_json(view: EngineView, *, deep: bool) -> dict[str, Any]:
    """One engine; lanes and processes only when it is looked at alone."""
    found: dict[str, Any] = plain(view)
    for lane, shown in zip(view.lanes, found["lanes"], strict=True):
        shown["details"] = dict(lane.details)
    return found if deep else {k: v for k, v in found.items() if k not in _DEEP}


def event_json(event: Event) -> dict[str, Any]:
    found: dict[str, Any] = plain(event)
    return found
