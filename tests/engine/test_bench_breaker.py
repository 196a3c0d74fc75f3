"""The breaker's table and what counts as a structural timeout."""

from __future__ import annotations

import asyncio
import errno

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.bench.breaker import Breaker, Interrupted, State, TimedOut
from stallwatch_engine.bench.timeouts import TimeoutKind, of_error, of_exception, of_status

EVENTS = st.lists(
    st.builds(TimedOut, st.integers(0, 99), st.sampled_from(TimeoutKind)) | st.just(Interrupted()),
    max_size=20,
)
PLACE = aiohttp.client_reqrep.ConnectionKey("host", 1, False, True, None, None, None)


@given(events=EVENTS, fail_fast=st.booleans())
def test_the_first_cause_opens_it_for_good(events, fail_fast):
    """After any history it sends exactly if nothing opened it, and only the first opener is remembered."""
    breaker = Breaker(fail_fast=fail_fast)
    openers = [event for event in events if fail_fast or isinstance(event, Interrupted)]
    for event in events:
        was = breaker
        breaker = breaker.step(event)
        assert was.sends or breaker == was, "it changed after it had opened"

    assert breaker.sends == (not openers)
    first = openers[0] if openers else None
    assert breaker.cause == (first if isinstance(first, TimedOut) else None)
    expected = {type(None): State.CLOSED, TimedOut: State.TRIPPED, Interrupted: State.INTERRUPTED}
    assert breaker.state is expected[type(first)]


def test_it_is_off_unless_asked_for():
    """A breaker made without a word lets timeouts pass."""
    assert Breaker().step(TimedOut(0, TimeoutKind.TOTAL)).sends


@pytest.mark.parametrize(
    ("error", "expired", "kind"),
    [
        (aiohttp.ConnectionTimeoutError("x"), False, TimeoutKind.CONNECT),
        (aiohttp.SocketTimeoutError("x"), False, TimeoutKind.SOCK_READ),
        (aiohttp.ServerTimeoutError("x"), True, TimeoutKind.SOCK_READ),
        (TimeoutError("x"), True, TimeoutKind.TOTAL),
        (asyncio.TimeoutError(), False, TimeoutKind.ASYNCIO),  # noqa: UP041 - by its other name
        (
            aiohttp.ClientConnectorError(PLACE, OSError(errno.ETIMEDOUT, "")),
            False,
            TimeoutKind.CONNECT,
        ),
        (aiohttp.ClientOSError(errno.ETIMEDOUT, ""), False, TimeoutKind.SOCK_READ),
        (aiohttp.ClientConnectorError(PLACE, OSError(errno.ECONNREFUSED, "")), True, None),
        (aiohttp.ServerDisconnectedError("timed out"), True, None),
        (aiohttp.ClientPayloadError("TimeoutError: timed out"), True, None),
        (aiohttp.ClientOSError(errno.ECONNRESET, "timed out"), True, None),
        (ValueError("timeout"), True, None),
    ],
)
def test_exceptions_are_judged_by_type(error, expired, kind):
    """Types and errno decide; an error whose words speak of a timeout is none."""
    assert of_exception(error, total_expired=expired) is kind


@given(status=st.integers(100, 599))
def test_two_statuses_are_timeouts(status):
    """408 and 504, and no other."""
    assert (of_status(status) is not None) == (status in (408, 504))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": "engine_stalled"}, TimeoutKind.ENGINE_STALLED),
        ({"type": "engine_stalled", "code": 503}, TimeoutKind.ENGINE_STALLED),
        ({"type": "timeout_error"}, TimeoutKind.SERVER_DEADLINE),
        ({"code": "deadline_exceeded"}, TimeoutKind.SERVER_DEADLINE),
        ({"type": "GatewayTimeout", "code": 504}, TimeoutKind.SERVER_504),
        ({"code": 408}, TimeoutKind.SERVER_408),
        ({"code": 500, "message": "engine_stalled timeout 504"}, None),
        ({"message": "engine_stalled"}, None),
        ({"code": True, "type": None}, None),
        ({"code": ["engine_stalled"], "type": {}}, None),
        ({}, None),
    ],
)
def test_error_objects_are_judged_by_type_and_code(error, kind):
    """The message of an error object is never read."""
    assert of_error(error) is kind
