"""retry = before-first-byte: what a request that is sent once more waits for, and what it does not hear."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway_helpers import (
    CHAT,
    CLOSE,
    Peer,
    Running,
    completion,
    json_answer,
    post,
    running,
    until,
)

pytestmark = pytest.mark.slow
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOLD = "st-20261130T000000Z-00000001"


async def answer(peer: Peer) -> None:
    await peer.send(json_answer(completion("well")))


def own_503(failure_id: str | None) -> bytes:
    """What an engine says that was failed; with an id if it reads its FAILURE on its board."""
    body = json.dumps({"error": {"code": "engine_stalled", "failure_id": failure_id}}).encode()
    head = b"HTTP/1.1 503 X\r\ncontent-type: application/json\r\nx-should-retry: false\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def later(gateway: Running) -> Callable[[], bytes]:
    """A request in a thread: call the result to get its answer."""
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(gateway.raw, post(CHAT, ASK, CLOSE))
    pool.shutdown(wait=False)
    return lambda: asked.result(15)


def held_back(gateway: Running) -> bool:
    """An answer of the engine is complete, and its client has not got it."""
    return any(gateway.call(lambda: [e.ended.done() for e in gateway.gateway.exchanges]))


def fail(gateway: Running) -> None:
    """The FAILURE is declared; until the request waits for the next incarnation."""
    gateway.state("a", "stalled")
    gateway.fail("a")
    until(lambda: gateway.call(lambda: gateway.gateway.router.waiting) == 1, what="it waits")


@pytest.mark.parametrize("late", ["closes", "answers"])
def test_the_failed_incarnations_connection_has_no_say_in_the_next_attempt(late):
    """A front end that stands keeps its connection until the kill: what comes over it then, an end or an
    answer, is not taken for that of the repeated request, which waits for incarnation 2.
    """
    wakes = asyncio.Event()

    async def script(peer: Peer) -> None:
        if len(peer.engine.requests) > 1:
            await answer(peer)
            return
        await wakes.wait()
        if late == "answers":
            await peer.send(json_answer(completion("late")))
        peer.writer.transport.abort()

    with running(script, hold=20.0, retry="before-first-byte") as gateway:
        result = later(gateway)
        gateway.wait_sent(1)
        fail(gateway)
        gateway.call(wakes.set)
        assert gateway.engines[0].hung_up.wait(5)
        for _ in range(5):  # turns of the loop, which both ends share
            gateway.call(lambda: None)
        gateway.state("a", "starting", incarnation=2)
        gateway.state("a", "ready", incarnation=2)
        got = result()
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"well" in got
        assert len(gateway.engines[0].requests) == 2
        assert gateway.total("broken") == 0


def test_the_hold_of_a_repeated_request_begins_with_the_failure():
    """It ran for longer than `hold` before: it waits for the restart all the same."""

    async def script(peer: Peer) -> None:
        if len(peer.engine.requests) == 1:
            await peer.gone()
        else:
            await answer(peer)

    with running(script, hold=2.0, retry="before-first-byte") as gateway:
        result = later(gateway)
        gateway.wait_sent(1)
        (known,) = gateway.gateway.exchanges
        until(lambda: time.monotonic() - known.began_s > 2.1, what="longer than its hold")
        fail(gateway)
        gateway.state("a", "ready", incarnation=2)
        assert result().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("id_", [TOLD, None], ids=["its FAILURE", "no id"])
def test_an_engines_own_503_before_any_byte_is_repeated_after_the_restart(id_):
    """The front end lives and answers first: the request is sent once more all the same."""

    async def script(peer: Peer) -> None:
        if len(peer.engine.requests) > 1:
            await answer(peer)
        else:
            await peer.send(own_503(id_))

    with running(script, hold=20.0, retry="before-first-byte") as gateway:
        gateway.state("a", "suspect")
        result = later(gateway)
        until(lambda: held_back(gateway), what="its words are held back")
        fail(gateway)
        gateway.state("a", "ready", incarnation=2)
        assert result().startswith(b"HTTP/1.1 200 ")
        assert gateway.call(lambda: gateway.gateway.repeats["retried"]) == 1
        assert gateway.call(lambda: gateway.gateway.by_failure) == {}


def test_an_engines_own_503_that_nobody_declares_passes_as_it_came(monkeypatch):
    """The request is not sent to the same incarnation again; the id counts as told."""
    monkeypatch.setattr("stallwatch.gateway.gateway.DECLARED_S", 0.2)

    async def script(peer: Peer) -> None:
        await peer.send(own_503(TOLD))

    with running(script, hold=20.0, retry="before-first-byte") as gateway:
        assert later(gateway)().endswith(own_503(TOLD).partition(b"\r\n\r\n")[2])
        assert gateway.total("failed") == 1
        assert len(gateway.engines[0].requests) == 1
        assert gateway.call(lambda: gateway.gateway.by_failure) == {TOLD: 1}


def test_a_repeated_request_that_gets_another_503_is_not_sent_a_third_time():
    """It was there at two failures: the second incarnation's own words are its answer."""

    async def script(peer: Peer) -> None:
        await peer.send(own_503(TOLD))

    with running(script, hold=20.0, retry="before-first-byte") as gateway:
        result = later(gateway)
        until(lambda: held_back(gateway), what="its words are held back")
        fail(gateway)
        gateway.state("a", "ready", incarnation=2)
        assert result().endswith(own_503(TOLD).partition(b"\r\n\r\n")[2])
        assert len(gateway.engines[0].requests) == 2


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("state", ["exhausted", "unkillable"])
def test_an_engine_that_was_given_up_is_said_to_be_and_promises_nothing(state, known):
    """Nobody starts it again by itself: no Retry-After, with a known FAILURE or without one."""
    with running(answer, hold=30.0) as gateway:
        failure = gateway.fail("a") if known else None
        gateway.state("a", state)
        got = gateway.raw(post(CHAT, ASK))
        assert b"given up" in got
        assert b"retry-after" not in got.lower()
        assert b"x-should-retry: false" in got
        said = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
        assert said.get("failure_id") == (failure.id if failure else None)
        assert said["code"] == ("engine_stalled" if known else "engine_not_ready")
        gateway.state("a", "starting", incarnation=2)  # an operator asked
        assert "given up" not in gateway.call(gateway.gateway.router.refusal).message


def test_one_engine_that_was_given_up_says_nothing_of_another_that_starts():
    """Of two replicas one is exhausted, the other comes: there is something to come again for."""
    with running(answer, answer) as gateway:
        gateway.state("a", "exhausted")
        gateway.state("b", "starting")
        assert b"\r\nretry-after: 1\r\n" in gateway.raw(post(CHAT, ASK))
