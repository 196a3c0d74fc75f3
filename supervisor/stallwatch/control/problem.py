"""Errors as application/problem+json (RFC 9457), each with a code for programs and a hint for people."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from stallwatch import errors

log = logging.getLogger("stallwatch.control")

# No route has another method (a test holds it). HEAD is a GET by the gate in front, but for streams:
# they have no end to answer a HEAD with.
ROUTED = ("GET", "POST")
NO_HEAD = frozenset({"/v1/events", "/live"})

_MEDIA = "application/problem+json"
_TEXTS = ("type", "title", "detail", "instance", "code", "hint")
# For the description of every operation: what is not a success is this document.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem (RFC 9457). Match on `code`; `hint` says what to do.",
        "content": {
            _MEDIA: {
                "schema": {
                    "type": "object",
                    "required": [*_TEXTS, "status"],
                    "properties": {
                        **{name: {"type": "string"} for name in _TEXTS},
                        "status": {"type": "integer"},
                        "errors": {"type": "array", "items": {"type": "object"}},
                    },
                }
            }
        },
    }
}
_HINTS = {
    404: ("not-found", "GET /openapi.json lists every path"),
    405: ("method-not-allowed", "the Allow header names the methods of this path"),
}


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    hint: str = "",
    instance: str = "",
    headers: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Response:
    """One problem document. `code` names the type; clients match on it, never on `detail`."""
    body = {
        **(extra or {}),
        "type": f"urn:stallwatch:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
        "code": code,
        "hint": hint,
    }
    return Response(json.dumps(body).encode(), status, dict(headers or {}), media_type=_MEDIA)


def _status_of(exc: errors.StallwatchError) -> tuple[int, str]:
    if isinstance(exc, errors.UnknownEngine):
        return 404, "unknown-engine-or-stall"
    if isinstance(exc, errors.ConfigError):
        return 400, "bad-request"
    return 409, "refused"


async def _stallwatch_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, errors.StallwatchError)
    status, code = _status_of(exc)
    return problem(status, code, exc.message, hint=exc.hint, instance=request.url.path)


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    code, hint = _HINTS.get(exc.status_code, (f"http-{exc.status_code}", ""))
    headers = dict(exc.headers or {})
    if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = _allowed(request)
    return problem(
        exc.status_code, code, str(exc.detail), hint=hint, instance=request.url.path,
        headers=headers,
    )  # fmt: skip


def _allowed(request: Request) -> str:
    """Every method that this path has: the router names those of the first of its routes only."""
    routes = request.app.router.routes
    found = [
        method
        for method in ROUTED
        if any(r.matches({**request.scope, "method": method})[0] is Match.FULL for r in routes)
    ]
    if "GET" in found and request.url.path not in NO_HEAD:
        found.append("HEAD")  # the gate in front turns it into a GET
    return ", ".join(sorted(found))


async def _invalid(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    wrong = [
        {"where": "/".join(str(part) for part in error["loc"]), "message": str(error["msg"])}
        for error in exc.errors()[:16]
    ]
    detail = "; ".join(f"{each['where']}: {each['message']}" for each in wrong)
    return problem(
        422,
        "invalid-parameter",
        detail,
        hint="GET /openapi.json describes every parameter",
        instance=request.url.path,
        extra={"errors": wrong},
    )


async def _unexpected(request: Request, exc: Exception) -> Response:
    log.error("request %s %s failed", request.method, request.url.path, exc_info=exc)
    return problem(
        500,
        "internal-error",
        "the supervisor failed to answer this request",  # the cause may hold paths: log only
        hint="the daemon's log has the traceback",
        instance=request.url.path,
    )


def install(app: FastAPI) -> None:
    """Make every error of the application a problem document."""
    app.add_exception_handler(errors.StallwatchError, _stallwatch_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)
