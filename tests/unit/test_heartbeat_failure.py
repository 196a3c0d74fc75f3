"""The one sentence that a waiting client gets."""

from __future__ import annotations

import pytest

from stallwatch.heartbeat.failure import Failure


@pytest.mark.parametrize(
    ("kind", "elapsed_s", "limit_s", "said"),
    [
        ("DEVICE_WAIT", 61.0, 60.0, "(61.0 s, limit 60.0 s) [st-1]"),
        ("PROCESS_STOPPED", 0.7, 0.5, "(stopped for 0.7 s) [st-1]"),
        ("PROCESS_STOPPED", 61.0, 60.0, "(61.0 s, limit 60.0 s) [st-1]"),
        ("SHUTDOWN_HANG", 31.0, 30.0, "(31.0 s after the stop was asked for, grace 30.0 s) [st-1]"),
        ("CHILD_DIED", 0.0, 0.0, "phase execute_model [st-1]"),
    ],
)
def test_the_sentence_says_which_limit(
    kind: str, elapsed_s: float, limit_s: float, said: str
) -> None:
    """A limit without a word is the phase's own; an event has neither time nor limit."""
    failure = Failure(
        "st-1", "chat", 1, kind, "worker:0/main", "execute_model", elapsed_s, limit_s, "restart"
    )
    begin = f"engine chat failed: {kind} in worker:0/main, phase execute_model "
    assert failure.sentence().startswith(begin)
    assert failure.sentence().endswith(said)
