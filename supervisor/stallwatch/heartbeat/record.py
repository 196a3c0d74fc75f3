"""The failure record on the board: length-prefixed JSON under a sequence."""

from __future__ import annotations

import json
import struct

from stallwatch.heartbeat import layout
from stallwatch.heartbeat.failure import Failure

_TEXTS = ("id", "engine", "kind", "culprit", "phase", "action")


def encode(failure: Failure) -> bytes:
    """The record as at most FAILURE_MAX bytes: long texts are cut, the id never."""
    values = failure.as_dict()
    for room in (256, 96, 48):
        cut = {k: v[:room] if k in _TEXTS and k != "id" else v for k, v in values.items()}
        raw = json.dumps(cut, ensure_ascii=False).encode("utf-8", "replace")
        if len(raw) <= layout.FAILURE_MAX:
            return raw
    raise ValueError("the failure id alone does not fit")


def read(board: memoryview) -> Failure | None:
    """The record, or None when there is none, it is being replaced, or it makes no sense."""
    for _ in range(3):
        seq, length = struct.unpack_from("<QQ", board, layout.FAILURE_SEQ)
        if seq & 1 or not 0 < length <= layout.FAILURE_MAX:
            return None
        raw = bytes(board[layout.FAILURE_RECORD : layout.FAILURE_RECORD + length])
        if struct.unpack_from("<Q", board, layout.FAILURE_SEQ)[0] == seq:
            return decode(raw)
    return None


def decode(raw: bytes) -> Failure | None:
    """A record from its JSON; None when a field is missing or of the wrong type."""
    try:
        values = json.loads(raw)
        return Failure(
            **{key: str(values[key]) for key in _TEXTS},
            incarnation=int(values["incarnation"]),
            elapsed_s=float(values["elapsed_s"]),
            limit_s=float(values["limit_s"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
