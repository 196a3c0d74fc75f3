"""What is sent twice and what never is; and an engine's own error that a FAILURE explains."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import pytest

from gateway_helpers import (
    CHAT,
    CLOSE,
    SSE,
    Peer,
    drain,
    get,
    json_answer,
    post,
    running,
    token,
    until,
)
from stallwatch.gateway.upstream import Pool

pytestmark = pytest.mark.slow


def later(work):
    """The work's result, from a thread."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()

    def result() -> bytes:
        thread.join(10)
        assert not thread.is_alive(), "the client hangs"
        return found[0]

    return result


async def first_only(peer: Peer) -> None:
    """Answers the first request of all, and closes each later connection without a byte."""
    if len(peer.engine.requests) == 1:
        await peer.send(json_answer(b"{}"))
    else:
        peer.writer.transport.abort()


class TestKeptConnections:
    def test_with_never_a_post_that_met_a_closing_one_is_answered_and_not_sent_again(self):
        """The engine has read it, and perhaps begun: the client is told, the engine hears it once."""
        with running(first_only, retry="never") as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {"n": 1}))
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            sock.sendall(post(CHAT, {"n": 2}))
            got = drain(sock)
            assert got.startswith(b"HTTP/1.1 503 ")
            assert b"x-should-retry: false" in got
            assert [json.loads(body)["n"] for _, body in gateway.engines[0].requests] == [1, 2]

    @pytest.mark.parametrize(
        ("retry", "second"),
        [("never", get("/v1/models")), ("before-first-byte", post(CHAT, {"n": 2}))],
        ids=["a GET", "a POST that may be repeated"],
    )
    def test_what_may_be_sent_again_is(self, retry, second):
        """A GET changes nothing, and `before-first-byte` is the operator's word for the rest."""

        async def script(peer: Peer) -> None:
            if len(peer.engine.requests) == 2:
                peer.writer.transport.abort()
            else:
                await peer.send(json_answer(b"{}"))

        with running(script, retry=retry) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {"n": 1}))
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            sock.sendall(second)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            assert len(gateway.engines[0].requests) == 3

    @pytest.mark.parametrize("left", ["closed", "unread bytes"])
    def test_one_that_has_ended_is_noticed_before_anything_is_sent(self, left):
        """The close is in the socket and the loop has not said so yet: another one is opened."""

        async def look() -> None:
            with socket.create_server(("127.0.0.1", 0)) as server:
                pool = Pool(f"127.0.0.1:{server.getsockname()[1]}")
                kept = await pool.fresh()
                far, _ = server.accept()
                pool.put(kept)
                assert await pool.take() is kept
                pool.put(kept)
                if left == "unread bytes":
                    far.sendall(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
                far.close()
                taken = await pool.take()
                assert taken is not kept
                assert not taken.reused
                taken.abort()
                await asyncio.sleep(0)

        asyncio.run(look())

    def test_with_never_a_post_that_ran_for_long_does_not_move_when_its_engine_is_stopped(
        self, monkeypatch
    ):
        """Only one that met the stop just then is sent to another replica: this one was computed."""
        monkeypatch.setattr("stallwatch.gateway.gateway.JUST_S", 0.2)
        go = asyncio.Event()

        async def stops(peer: Peer) -> None:
            await go.wait()
            await asyncio.sleep(0.3)
            peer.writer.transport.abort()

        async def well(peer: Peer) -> None:
            await peer.send(json_answer(b"{}"))

        with running(stops, well) as gateway:
            gateway.state("b", "starting")
            result = later(lambda: gateway.raw(post(CHAT, {}, CLOSE)))
            gateway.wait_sent(1)
            gateway.state("b", "ready")
            gateway.state("a", "stopping")
            gateway.call(go.set)
            assert result().startswith(b"HTTP/1.1 503 ")
            assert gateway.engines[1].requests == []


def trouble(
    status: int, body: bytes = b'{"error": {"message": "worker lost"}}', kind="application/json"
):
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def failure_in(result, failure_id: str) -> bool:
    return failure_id.encode() in result()


class TestTheEnginesOwnError:
    @pytest.mark.parametrize("kind", ["application/json", "text/plain"])
    def test_a_failure_told_a_moment_later_takes_its_place(self, kind):
        """The engine says 500 before its supervisor has declared: the client gets the failure's id."""

        async def script(peer: Peer) -> None:
            await peer.send(trouble(500, kind=kind))

        with running(script) as gateway:
            gateway.state("a", "suspect")
            result = later(lambda: gateway.raw(post(CHAT, {"stream": False})))
            gateway.wait_sent(1)
            until(lambda: gateway.call(lambda: gateway.gateway.in_flight), what="it waits")
            failure = gateway.fail("a")
            got = result()
            assert got.startswith(b"HTTP/1.1 503 ")
            assert failure.id.encode() in got
            assert b"x-should-retry: false" in got
            assert b"worker lost" not in got
            assert gateway.call(lambda: gateway.gateway.by_failure) == {failure.id: 1}
            assert gateway.total("failed") == 1

    def test_a_failure_that_is_known_takes_its_place_at_once(self):
        """The 500 comes after the FAILURE of that incarnation, over a request that was not ended."""
        go = asyncio.Event()

        async def script(peer: Peer) -> None:
            await go.wait()
            await peer.send(trouble(500))

        with running(script) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {}))
            gateway.wait_sent(1)
            failure = gateway.fail("a")
            assert failure.id.encode() in drain(sock)

    def test_one_that_says_itself_that_it_was_failed_is_given_the_whole_time(self):
        """The engine's own engine_stalled without an id: a starved supervisor may be later than a second."""
        told = b'{"error": {"code": "engine_stalled", "failure_id": null}}'

        async def script(peer: Peer) -> None:
            await peer.send(trouble(503, told))

        with running(script) as gateway:
            result = later(lambda: gateway.raw(post(CHAT, {})))
            gateway.wait_sent(1)
            time.sleep(1.5)  # the length of the delay is what is tested
            assert failure_in(result, gateway.fail("a").id)

    @pytest.mark.parametrize("status", [500, 502, 503])
    def test_without_a_failure_it_passes_as_it_came(self, status):
        """An engine that stays well has only refused this one: byte for byte, and soon."""

        async def script(peer: Peer) -> None:
            await peer.send(trouble(status))

        with running(script) as gateway, gateway.connect() as sock:
            for _ in range(2):
                sock.sendall(post(CHAT, {}))
                assert sock.recv(4096) == trouble(status)
            assert gateway.engines[0].connections == 1
            assert gateway.total("answered") == 2

    def test_a_client_that_leaves_meanwhile_is_counted_as_gone(self):
        """Nobody is there to be answered."""

        async def script(peer: Peer) -> None:
            await peer.send(trouble(500))

        with running(script) as gateway:
            gateway.state("a", "suspect")
            with gateway.connect() as sock:
                sock.sendall(post(CHAT, {}))
                gateway.wait_sent(1)
                until(
                    lambda: gateway.call(
                        lambda: [e for e in gateway.gateway.exchanges if e.ended.done()]
                    ),
                    what="the 500 is held",
                )
            until(lambda: not gateway.call(lambda: gateway.gateway.clients), what="it has gone")
            gateway.wait_in_flight(0)
            assert gateway.total("client_gone") == 1

    @pytest.mark.parametrize(
        "request_", [get("/health", CLOSE), post(CHAT, {}, CLOSE)], ids=["GET", "404"]
    )
    def test_other_answers_are_not_held(self, request_):
        """A probe's 503 and a client's own mistake pass at once, whatever the engine's state."""
        status = 503 if request_.startswith(b"GET") else 404

        async def script(peer: Peer) -> None:
            await peer.send(trouble(status))

        with running(script) as gateway:
            gateway.state("a", "suspect")
            assert gateway.raw(request_).startswith(b"HTTP/1.1 %d " % status)


class TestCounts:
    """Clients of libraries hang up as soon as they know how it ended."""

    async def stream(self, peer: Peer, last: str) -> None:
        await peer.send(SSE)
        await peer.event(token("part"))
        await peer.event(last)
        await peer.gone()

    def ask(self, gateway, wanted: bytes) -> None:
        with gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": True}))
            got = b""
            while wanted not in got:
                got += sock.recv(4096)
        gateway.wait_in_flight(0)

    def test_one_that_leaves_at_done_has_its_answer(self):
        """The last chunk has not left yet: it counts as answered, not as gone."""
        with running(lambda peer: self.stream(peer, "[DONE]")) as gateway:
            self.ask(gateway, b"[DONE]\n\n")
            assert gateway.total("answered") == 1

    def test_one_that_leaves_at_the_engines_own_failure_has_failed(self):
        """The engine told the FAILURE in its stream: it is counted by its id."""
        id_ = "st-20261130T000000Z-00000001"
        told = json.dumps({"error": {"code": "engine_stalled", "failure_id": id_}})
        with running(lambda peer: self.stream(peer, told)) as gateway:
            self.ask(gateway, b"failure_id")
            assert gateway.total("failed") == 1
            assert gateway.call(lambda: gateway.gateway.by_failure) == {id_: 1}

    @pytest.mark.parametrize("declared", [True, False])
    def test_the_engines_own_failure_without_an_id_is_told_with_one(self, declared, monkeypatch):
        """In a stream too the FAILURE takes its place, and otherwise an end that counts as broken."""
        monkeypatch.setattr("stallwatch.gateway.gateway.DECLARED_S", 3.0 if declared else 0.2)
        told = json.dumps({"error": {"code": "engine_stalled", "failure_id": None, "by": "engine"}})
        with running(lambda peer: self.stream(peer, told)) as gateway:
            result = later(lambda: gateway.raw(post(CHAT, {"stream": True})))
            gateway.wait_sent(1)
            until(
                lambda: (
                    gateway.call(lambda: [e for e in gateway.gateway.exchanges if e.ended.done()])
                    or gateway.total("broken")
                ),
                what="it is held",
            )
            id_ = gateway.fail("a").id if declared else "null"
            got = result()
            assert b'"by"' not in got
            assert got.count(b'"error"') == 1
            assert id_.encode() in got
            assert not got.endswith(b"0\r\n\r\n")
            assert gateway.total("failed" if declared else "broken") == 1

    def test_a_text_that_speaks_of_it_is_a_text(self):
        """What the model writes is quoted once more, and passes."""
        said = json.dumps({"error": {"code": "engine_stalled", "failure_id": None}})

        async def script(peer: Peer) -> None:
            await peer.send(SSE)
            await peer.event(token(said))
            await peer.event("[DONE]")
            await peer.send(b"0\r\n\r\n")

        with running(script) as gateway:
            assert gateway.raw(post(CHAT, {"stream": True}, CLOSE)).endswith(b"0\r\n\r\n")
            assert gateway.total("answered") == 1

    def test_one_that_leaves_before_has_gone(self):
        """A part of the stream is no answer."""
        with running(lambda peer: self.stream(peer, "more")) as gateway:
            self.ask(gateway, b"more")
            assert gateway.total("client_gone") == 1

    def test_the_engines_own_stall_without_an_id_counts_as_broken(self, monkeypatch):
        """It passes as it came when nothing explains it, and is no answer by our count."""
        monkeypatch.setattr("stallwatch.gateway.gateway.DECLARED_S", 0.2)
        told = b'{"error": {"code": "engine_stalled", "failure_id": null}}'

        async def script(peer: Peer) -> None:
            head, _, body = trouble(503, told).partition(b"\r\n\r\n")
            await peer.send(head + b"\r\nretry-after: 1\r\n\r\n" + body)

        with running(script) as gateway:
            assert gateway.raw(post(CHAT, {}, CLOSE)).endswith(told)
            assert gateway.total("broken") == 1


class TestLeaving:
    def test_a_second_signal_ends_what_the_first_lets_finish(self):
        """Within the drain a request runs on; hurried, it ends at once, and in words."""

        async def script(peer: Peer) -> None:
            await peer.gone()

        with running(script) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {}))
            gateway.wait_sent(1)
            leaving = gateway.call(lambda: asyncio.ensure_future(gateway.gateway.leave(60.0)))
            assert b"gateway_stopping" in gateway.raw(post(CHAT, {}))
            assert gateway.call(lambda: gateway.gateway.in_flight) == 1
            gateway.call(gateway.gateway.hurry)
            got = drain(sock)
            assert got.startswith(b"HTTP/1.1 503 ")
            assert b"gateway_stopping" in got
            until(lambda: gateway.call(leaving.done), what="it has left")


class TestAddresses:
    def test_a_replica_at_another_address_keeps_its_requests_and_their_failure(self):
        """What was sent to the old place is still told of that engine's FAILURE; new ones go to the new."""

        async def script(peer: Peer) -> None:
            if b"wait" in peer.body:
                await peer.gone()
            else:
                await peer.send(json_answer(b"{}"))

        with running(script, script) as gateway, gateway.connect() as sock:
            gateway.state("b", "stopped")
            sock.sendall(post(CHAT, {"wait": 1}))
            gateway.wait_sent(1)
            address, view = gateway.views["a"]
            gateway.views["a"] = (gateway.engines[1].address, view)
            gateway.call(lambda: gateway.gateway.router.learn(gateway.views))
            assert gateway.raw(post(CHAT, {}, CLOSE)).startswith(b"HTTP/1.1 200 ")
            assert [len(e.requests) for e in gateway.engines] == [1, 1]
            assert gateway.call(lambda: len(gateway.gateway.router.replicas["a"].exchanges)) == 1
            failure = gateway.fail("a")
            assert failure.id.encode() in drain(sock)
            assert address != gateway.engines[1].address

    def test_a_kept_connection_to_the_old_address_is_not_used(self):
        """Neither one that was idle nor one that was busy at the change."""
        go = asyncio.Event()

        async def script(peer: Peer) -> None:
            if b"wait" in peer.body:
                await go.wait()
            await peer.send(json_answer(b"{}"))

        with running(script, script) as gateway, gateway.connect() as sock:
            gateway.state("b", "stopped")
            gateway.raw(post(CHAT, {}, CLOSE))
            sock.sendall(post(CHAT, {"wait": 1}))
            gateway.wait_sent(2)
            gateway.views["a"] = (gateway.engines[1].address, gateway.views["a"][1])
            gateway.call(lambda: gateway.gateway.router.learn(gateway.views))
            gateway.call(go.set)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            sock.sendall(post(CHAT, {}))
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            assert [len(e.requests) for e in gateway.engines] == [2, 1]

    def test_a_request_on_an_engine_that_is_not_named_any_more_is_still_watched(self):
        """Nobody will declare a failure of it: the gateway ends it at its limit."""

        async def script(peer: Peer) -> None:
            await peer.gone()

        with running(script, first_token=0.4) as gateway:
            result = later(lambda: gateway.raw(post(CHAT, {"stream": True})))
            gateway.wait_sent(1)
            gateway.call(lambda: gateway.gateway.router.learn({}))
            assert b"engine_silent" in result()
            until(
                lambda: not gateway.call(lambda: gateway.gateway.router.departed), what="forgotten"
            )
