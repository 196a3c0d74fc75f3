"""What api and worker say to each other: length-prefixed JSON over an inherited socket pair.

The worker holds one end as `WorkerEnd.from_fd(n)` and says `Ready` first, once. Then the api sends
`Submit` and `Abort`; the worker answers a Submit with any number of `Tokens`, the last of which has
`finish`, or with one `Failed`. After an Abort it owes nothing, and what it still sends is late:
dropped and counted. `Failed(id=None)` ends everything it has, for good. `Stats` come at will.
Whatever breaks these rules, and the end of the connection, is the worker's death to the api. An end
of file at the worker means that the api is gone: it ends too.
"""

from __future__ import annotations

from stallwatch_engine.wire.frame import MAX_FRAME, PeerBroke, PeerBusy, PeerGone, WireError
from stallwatch_engine.wire.link import ApiLink
from stallwatch_engine.wire.messages import (
    Abort,
    ApiMessage,
    Failed,
    Ready,
    Sampling,
    Stats,
    Submit,
    TokenLogprob,
    Tokens,
    WorkerMessage,
)
from stallwatch_engine.wire.worker_end import WorkerEnd

__all__ = [
    "MAX_FRAME",
    "Abort",
    "ApiLink",
    "ApiMessage",
    "Failed",
    "PeerBroke",
    "PeerBusy",
    "PeerGone",
    "Ready",
    "Sampling",
    "Stats",
    "Submit",
    "TokenLogprob",
    "Tokens",
    "WireError",
    "WorkerEnd",
    "WorkerMessage",
]
