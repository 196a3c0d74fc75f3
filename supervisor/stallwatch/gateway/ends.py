"""How a stream of events must end to count as complete. Pure."""

from __future__ import annotations

import re

from stallwatch.gateway.framing import EVENT_ENDS

# By the last component(s) of the path: the payload's last bytes must hold this. A stream elsewhere
# is complete when its framing is.
_DONE = re.compile(rb"data: ?\[DONE\]\s*\Z")
_PATHS = re.compile(
    rb"/(?:chat/completions|completions|audio/transcriptions|audio/translations)/?\Z"
)


def complete(path: bytes, tail: bytes) -> bool:
    """Whether a stream for `path` whose payload ends in `tail` says that it is over."""
    return _PATHS.search(path) is None or _DONE.search(tail) is not None


def done(tail: bytes) -> bool:
    """Whether the payload's last event is `[DONE]`: its reader has all, however the connection ends."""
    return _DONE.search(tail) is not None


def between_events(tail: bytes) -> bool:
    """Whether an event put here would be one of its own."""
    return not tail or tail.endswith(EVENT_ENDS)
