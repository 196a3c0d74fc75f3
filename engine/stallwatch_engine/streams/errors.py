"""What goes wrong between streams, named by who must act."""

from __future__ import annotations


class NotRecorded(RuntimeError):
    """The caller asked about an event that was never recorded.

    An accelerator calls such an event complete and such a wait a no-op, so a forgotten record looks
    like success. Here it is an error: record the event before anybody waits for it.
    """


class StreamFailed(RuntimeError):
    """Work on a stream raised. Nothing after it ran, and everything that waits for it fails too."""

    def __init__(self, stream: str, operation: str, cause: BaseException) -> None:
        super().__init__(f"stream {stream}: {operation} failed: {cause}")
        self.stream = stream
        self.operation = operation
        self.cause = cause


class StreamClosed(RuntimeError):
    """The caller enqueued on a stream that was closed or aborted."""

    def __init__(self, stream: str) -> None:
        super().__init__(f"stream {stream} takes no more work: it was closed")
        self.stream = stream


class OverContract(RuntimeError):
    """More steps are in flight than the engine's contract allows: the scheduler must launch fewer.

    Raised at once, never waited for: waiting here is how a model thread stops without a word.
    """

    def __init__(self, what: str, allowed: int) -> None:
        super().__init__(f"{what}: {allowed} at a time is the contract and one more was asked for")
        self.what = what
        self.allowed = allowed
