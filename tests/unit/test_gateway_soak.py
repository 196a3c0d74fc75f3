"""Failures of every sort at any moment, with many clients: nobody hangs, nobody is told half an answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import threading
from collections import Counter

import pytest

from gateway_helpers import (
    CHAT,
    SSE,
    Peer,
    Running,
    completion,
    drain,
    json_answer,
    post,
    running,
    token,
)

pytestmark = pytest.mark.slow
CLIENTS, ROUNDS, TOKENS = 16, 25, 12


async def chancy(peer: Peer) -> None:
    """A stream or an answer that may stop, break off or end early at any place."""
    chance = random.Random(peer.body)
    stop = chance.choice([None, None, None, "close", "hang", "end", "garbage"])
    at = chance.randrange(TOKENS)
    if b"true" not in peer.body:
        await asyncio.sleep(chance.random() * 0.02)
        if stop == "hang":
            await peer.gone()
        elif stop == "close":
            peer.writer.close()
        else:
            await peer.send(json_answer(completion("whole")))
        return
    await peer.send(SSE)
    for n in range(TOKENS):
        if stop is not None and n == at:
            if stop == "hang":
                await peer.gone()
            elif stop == "end":
                await peer.send(b"0\r\n\r\n")
                return
            elif stop == "garbage":
                await peer.send(b"xyz\r\n")
            peer.writer.close()
            return
        await peer.event(token(f"t{n}"))
        await asyncio.sleep(chance.random() * 0.004)
    await peer.event("[DONE]")
    await peer.send(b"0\r\n\r\n")


def judge(got: bytes, *, stream: bool) -> str:
    """'whole', 'error', 'cut': whole means that a client believes it, and then it must be."""
    head, _, body = got.partition(b"\r\n\r\n")
    if not stream or not head.startswith(b"HTTP/1.1 200"):
        assert head, "a connection that ended without a word"
        value = json.loads(body)
        return "error" if "error" in value else "whole"
    texts = re.findall(rb'"content": "(t\d+)"', body)
    assert texts == [b"t%d" % n for n in range(len(texts))]
    ended = body.endswith(b"0\r\n\r\n")
    if ended:
        assert b"[DONE]" in body
        assert len(texts) == TOKENS
        return "whole"
    assert b'"error"' in body, body[-200:]
    return "error"


class Crowd:
    """Clients that ask again and again, and note how each request ended."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway
        self.ends: Counter[str] = Counter()
        self.ids: Counter[bytes] = Counter()
        self.left = 0
        self.problems: list[BaseException] = []
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]

    def _run(self, number: int) -> None:
        try:
            for turn in range(ROUNDS):
                self._ask(random.Random(number * 1000 + turn), f"{number}/{turn}")
        except BaseException as error:
            self.problems.append(error)

    def _ask(self, chance: random.Random, name: str) -> None:
        stream = chance.random() < 0.7
        with self.gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": stream, "name": name}, "Connection: close"))
            if chance.random() < 0.1:  # this one loses its patience
                sock.recv(100)
                sock.shutdown(socket.SHUT_RDWR)
                with self._lock:
                    self.left += 1
                return
            got = drain(sock)
        end = judge(got, stream=stream)
        with self._lock:
            self.ends[end] += 1
            if found := re.search(rb'"failure_id": "(st-[^"]*)"', got):
                self.ids[found[1]] += 1


def test_every_request_ends_and_everybody_counts_alike():
    """400 requests on two replicas, with failures declared all the time: all end; what was believed
    was whole; and the gateway has counted the same failures under the same ids.
    """
    with running(chancy, chancy, first_token=1.0, between_tokens=1.0, whole_answer=1.0) as gateway:
        crowd = Crowd(gateway)
        chance = random.Random(7)
        for thread in crowd.threads:
            thread.start()
        number, incarnations = 0, {"a": 1, "b": 1}
        while any(thread.is_alive() for thread in crowd.threads):
            number += 1
            name = chance.choice("ab")
            gateway.fail(name, number)
            incarnations[name] += 1
            gateway.state(name, "ready", incarnation=incarnations[name])
            crowd.threads[number % CLIENTS].join(0.1)
            assert number < 400, "somebody hangs"
        assert not crowd.problems, crowd.problems[:3]
        assert sum(crowd.ends.values()) + crowd.left == CLIENTS * ROUNDS
        assert crowd.ends["whole"] > 50
        assert crowd.ends["error"] > 50
        gateway.wait_in_flight(0)
        totals = gateway.call(lambda: dict(gateway.gateway.totals))
        assert totals.pop("requests") == CLIENTS * ROUNDS == sum(totals.values())
        told = gateway.call(lambda: dict(gateway.gateway.by_failure))
        recent = set(list(told)[-32:])  # older ids are forgotten
        seen = {key.decode(): n for key, n in crowd.ids.items() if key.decode() in recent}
        missing = {key: told[key] - seen.get(key, 0) for key in recent}
        assert all(0 <= n <= crowd.left for n in missing.values()), missing
