"""Why a request is not taken. The client must change it, or come back later."""

from __future__ import annotations


class RequestRefused(ValueError):
    """The request was not added; nothing is held for it."""

    def __init__(self, request_id: object, problem: str) -> None:
        super().__init__(f"request {request_id}: {problem}")
        self.request_id = request_id
        self.problem = problem


class RequestTooLong(RequestRefused):
    """Prompt and answer together can never fit: ask for less."""

    def __init__(self, request_id: object, *, tokens: int, capacity: int) -> None:
        super().__init__(
            request_id, f"prompt and max_tokens need {tokens} tokens, and {capacity} fit"
        )
        self.tokens = tokens
        self.capacity = capacity


class QueueFull(RequestRefused):
    """As many requests wait as may wait: come back later."""

    def __init__(self, request_id: object, *, waiting: int) -> None:
        super().__init__(request_id, f"{waiting} requests are waiting already")
        self.waiting = waiting
