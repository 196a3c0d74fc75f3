"""Both ends of the wire over a real socket pair: order, ends, and peers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from typing import Self

import pytest

from stallwatch_engine.wire import (
    Abort,
    ApiLink,
    PeerBroke,
    PeerBusy,
    PeerGone,
    Sampling,
    Stats,
    Submit,
    Tokens,
    WireError,
    WorkerEnd,
)
from stallwatch_engine.wire.frame import encode
from stallwatch_engine.wire.link import MAX_UNSENT

WAIT_S = 10.0
STATS = Stats(running=1, waiting=2, free_pages=3, total_pages=4, steps=5)


def submit(request: int, length: int = 2) -> Submit:
    return Submit(id=request, prompt=[7] * length, sampling=Sampling(max_tokens=1), deadline_ns=1)


class Pair:
    """An ApiLink in this loop, and the worker's end or its bare socket."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.messages: list[object] = []
        self.ends: list[WireError] = []
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.link = await ApiLink.over(self.near, self._message, self._end)
        self.worker = WorkerEnd(self.far)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.link.close()
        self.worker.close()
        await asyncio.sleep(0)

    def _message(self, message: object) -> None:
        self.messages.append(message)
        self.changed.set()

    def _end(self, reason: WireError) -> None:
        self.ends.append(reason)
        self.changed.set()

    async def until(self, true) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    async def receive(self):
        return await asyncio.to_thread(self.worker.receive, WAIT_S)


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_messages_pass_in_order_in_both_directions():
    """More of them than one read takes."""

    async def test():
        async with Pair() as pair:
            for request in range(1, 301):
                pair.link.send(submit(request, 200))
            pair.link.send(Abort(id=7))
            found = []
            while len(found) < 301:
                found += await pair.receive()
            assert [message.id for message in found] == [*range(1, 301), 7]

            def answer() -> None:
                for number in range(1, 301):
                    pair.worker.send(Tokens(id=number, ids=[number]))

            sender = asyncio.create_task(asyncio.to_thread(answer))
            await pair.until(lambda: len(pair.messages) == 300)
            await sender
            assert [message.id for message in pair.messages] == list(range(1, 301))

    run(test)


def test_a_worker_waits_no_longer_than_it_was_told():
    """No message in time is an empty list, not an error."""
    near, far = socket.socketpair()
    with contextlib.closing(WorkerEnd(far)) as worker, near:
        assert worker.receive(0.01) == []


def test_each_end_learns_that_the_other_one_is_gone():
    """Once, and later sends say so too."""

    async def test():
        async with Pair() as pair:
            pair.worker.close()
            await pair.until(lambda: pair.ends)
            assert [type(reason) for reason in pair.ends] == [PeerGone]
            with pytest.raises(PeerGone):
                pair.link.send(submit(1))
        async with Pair() as pair:
            pair.link.close()
            await pair.until(lambda: pair.ends)
            with pytest.raises(PeerGone):
                await pair.receive()
            with pytest.raises(PeerGone):
                pair.worker.send(STATS)

    run(test)


@pytest.mark.parametrize("data", [b"\xff" * 8, encode(b"{}"), encode(b"\x00")])
def test_nonsense_ends_the_conversation_with_a_broken_peer(data):
    """At either end; what had been understood before it stays valid."""

    async def test():
        async with Pair() as pair:
            pair.worker.send(STATS)
            os.write(pair.far.fileno(), data)
            await pair.until(lambda: pair.ends)
            assert pair.messages == [STATS]
            assert [type(reason) for reason in pair.ends] == [PeerBroke]
        near, far = socket.socketpair()
        with contextlib.closing(WorkerEnd(far)) as worker, near:
            near.sendall(data)
            with pytest.raises(PeerBroke):
                worker.receive(WAIT_S)

    run(test)


def test_a_death_inside_a_frame_is_told_from_a_clean_end():
    """The log of a torn message is where a crash is seen first."""

    async def test():
        async with Pair() as pair:
            os.write(pair.far.fileno(), encode(b"{}")[:-1])
            pair.worker.close()
            await pair.until(lambda: pair.ends)
            assert "inside a frame" in str(pair.ends[0])

    run(test)


def test_a_worker_gives_up_on_an_api_that_does_not_read():
    """PeerBusy in time, which names the api; the stream is cut inside a message, so it cannot be continued."""
    near, far = socket.socketpair()
    with contextlib.closing(WorkerEnd(far)) as worker, near:

        def talk() -> None:
            while True:
                worker.send(Tokens(id=1, ids=[1] * 4096), timeout_s=0.05)

        with pytest.raises(PeerBusy, match=r"api:0/loop has read too little for 0\.05 s"):
            talk()
        with pytest.raises(PeerBroke):
            worker.send(STATS)


def test_threads_that_send_at_once_do_not_mix_their_frames():
    """Scheduler and output threads share one end."""

    async def test():
        async with Pair() as pair:

            def talk(first: int) -> None:
                for number in range(first, first + 100):
                    pair.worker.send(Tokens(id=number, ids=[1] * 500))

            threads = [threading.Thread(target=talk, args=(1 + 100 * at,)) for at in range(4)]
            for thread in threads:
                thread.start()
            await pair.until(lambda: len(pair.messages) == 400 or pair.ends)
            for thread in threads:
                thread.join(WAIT_S)
            assert sorted(message.id for message in pair.messages) == list(range(1, 401))

    run(test)


def test_what_a_deaf_worker_leaves_unread_is_bounded_and_aborts_still_pass():
    """The api refuses new requests instead of growing."""

    async def test():
        async with Pair() as pair:

            def insist() -> None:
                for request in range(1, 1000):
                    pair.link.send(submit(request, 1 << 16))

            with pytest.raises(PeerBusy):
                insist()
            assert MAX_UNSENT < pair.link.unsent < MAX_UNSENT + (2 << 20)
            pair.link.send(Abort(id=1))

    run(test)
