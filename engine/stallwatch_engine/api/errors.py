"""Errors as clients see them: OpenAI error objects with the status that makes their client act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

STALLED = "engine_stalled"
RETRY_AFTER_S = 15  # a restart of the engine
SOON_S = 1


class FailureRecord(Protocol):
    """What the board's FAILURE offers here."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    def sentence(self) -> str: ...


class ApiError(Exception):
    """An answer that is no result. `retry`: None leaves the choice to the client's own rules."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
        retry: bool | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type_
        self.param = param
        self.retry_after_s = retry_after_s
        self.retry = retry
        self.extra = dict(extra or {})

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        error = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return {"error": error | self.extra}

    def headers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.retry_after_s is not None:
            found["retry-after"] = str(self.retry_after_s)
        if self.retry is not None:
            found["x-should-retry"] = "true" if self.retry else "false"
        return found


def refused(message: str, param: str | None, code: str = "unsupported_parameter") -> ApiError:
    """The request itself is wrong; sending it again changes nothing."""
    return ApiError(400, code, message, param=param)


def too_long(prompt: int, new: int, capacity: int) -> ApiError:
    wanted = f"{prompt} tokens of prompt" + (f" and {new} new ones" if new else "")
    return ApiError(
        400,
        "context_length_exceeded",
        f"{wanted} do not fit the {capacity} tokens of this engine: shorten one of them",
        param="max_tokens" if prompt < capacity else "prompt",
    )


def overloaded(message: str) -> ApiError:
    return ApiError(429, "overloaded", message, type_="overloaded_error", retry_after_s=SOON_S)


def deadline(seconds: float) -> ApiError:
    return ApiError(
        504,
        "deadline_exceeded",
        f"no complete answer within {seconds:g} s, queueing included: "
        "give a longer `timeout` or ask for fewer tokens",
        type_="timeout_error",
        retry=False,
    )


def nan_logits() -> ApiError:
    return ApiError(
        500,
        "nan_logits",
        "the model computed NaN or infinite logits for this request; others are not affected",
        type_="server_error",
        retry=False,
    )


def internal(message: str) -> ApiError:
    return ApiError(500, "internal_error", message, type_="server_error", retry=False)


def unavailable(code: str, message: str, *, retry_after_s: int = SOON_S) -> ApiError:
    """Not now: starting or draining."""
    return ApiError(503, code, message, type_="unavailable", retry_after_s=retry_after_s)


def stalled(message: str, *, failure_id: str | None, kind: str) -> ApiError:
    """The engine failed while this request waited: sent again at once it would meet the same engine."""
    return ApiError(
        503,
        STALLED,
        message,
        type_=STALLED,
        retry=False,
        extra={"failure_id": failure_id, "kind": kind},
    )


def declared(failure: FailureRecord) -> ApiError:
    """The supervisor's FAILURE as an error."""
    return stalled(failure.sentence(), failure_id=failure.id, kind=failure.kind)


def for_new(error: ApiError) -> ApiError:
    """The same failure for a request that comes after it: nothing was begun, so it may be sent again."""
    return ApiError(
        error.status,
        error.code,
        error.message,
        type_=error.type,
        retry_after_s=error.retry_after_s or RETRY_AFTER_S,
        extra=error.extra,
    )


def disconnected(message: str = "the client hung up") -> ApiError:
    return ApiError(499, "client_disconnected", message, retry=False)
