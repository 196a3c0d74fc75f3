"""Every request ends: with the engine's answer, or with an error that the openai client understands."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from gateway_helpers import (
    CHAT,
    CLOSE,
    SSE,
    Peer,
    completion,
    drain,
    get,
    json_answer,
    post,
    running,
    token,
    until,
)

pytestmark = pytest.mark.slow
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def answer(peer: Peer) -> None:
    await peer.send(json_answer(completion("well")))


async def silent(peer: Peer) -> None:
    await peer.gone()


async def one_token(peer: Peer) -> None:
    await peer.send(SSE)
    await peer.event(token("part"))
    await peer.gone()


def client(gateway, **more):
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="k", timeout=8, **more)


def words(chat):
    """The tokens of a stream, one by one."""
    for chunk in chat.chat.completions.create(**ASK, stream=True):
        yield chunk.choices[0].delta.content


def in_thread(work):
    """The work's result or exception, later."""
    found: list[object] = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(10)
        assert not thread.is_alive(), "the client hangs"
        return found[0]

    return result


class TestFailure:
    def test_before_the_first_byte_it_is_a_typed_503_that_is_not_sent_again(self):
        """The openai client raises InternalServerError with failure_id and kind, after one request."""
        with running(silent) as gateway, client(gateway) as chat:
            result = in_thread(lambda: chat.chat.completions.create(**ASK))
            gateway.wait_sent(1)
            failure = gateway.fail("a")
            error = result()
            assert isinstance(error, openai.InternalServerError)
            assert error.status_code == 503
            assert error.code == "engine_stalled"
            assert error.body["failure_id"] == failure.id
            assert error.body["kind"] == "DEVICE_WAIT"
            assert error.response.headers["x-should-retry"] == "false"
            assert len(gateway.engines[0].requests) == 1
            assert gateway.call(lambda: gateway.gateway.by_failure) == {failure.id: 1}

    def test_in_a_stream_it_is_an_error_event_and_no_end(self):
        """The client has its tokens, then APIError with the failure; the body never ends well."""
        with running(one_token) as gateway, client(gateway) as chat:
            tokens = []

            def read():
                tokens.extend(words(chat))

            result = in_thread(read)
            until(lambda: tokens, what="the first token")
            failure = gateway.fail("a")
            error = result()
            assert isinstance(error, openai.APIError)
            assert error.body["failure_id"] == failure.id
            assert tokens == ["part"]

    def test_the_raw_stream_ends_without_its_final_chunk(self):
        """Whoever reads no events still sees that the body is not complete."""
        with running(one_token) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": True}))
            while b"part" not in sock.recv(4096):
                pass
            gateway.fail("a")
            rest = drain(sock)
            size, _, body = rest.partition(b"\r\n")
            assert len(body) == int(size, 16) + 2
            assert json.loads(body[6:])["error"]["code"] == "engine_stalled"
            assert not rest.endswith(b"0\r\n\r\n")

    def test_thirty_clients_are_answered_within_two_seconds(self):
        """Streams and waiting requests together: every one of them ends with the failure's id."""

        async def either(peer: Peer) -> None:
            await (one_token(peer) if b"true" in peer.body else silent(peer))

        with running(either) as gateway, ThreadPoolExecutor(30) as pool:
            asks = [
                pool.submit(gateway.raw, post(CHAT, {"stream": n % 2 == 0, "n": n}))
                for n in range(30)
            ]
            gateway.wait_sent(30)
            failure = gateway.fail("a")
            began = time.monotonic()
            answers = [ask.result(5) for ask in asks]
            assert time.monotonic() - began < 2.0
            assert all(failure.id.encode() in each for each in answers)
            assert gateway.total("failed") == 30

    def test_a_new_request_is_told_to_come_again(self):
        """After the FAILURE nothing is begun: 503 with Retry-After, and the engine hears nothing."""
        with running(silent) as gateway:
            failure = gateway.fail("a")
            got = gateway.raw(post(CHAT, ASK))
            assert got.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 15\r\n" in got
            assert b"x-should-retry" not in got
            assert failure.id.encode() in got
            assert not gateway.engines[0].requests
            gateway.state("a", "ready", incarnation=2)
            assert gateway.call(lambda: gateway.gateway.router.pick().name) == "a"

    def test_an_upload_that_is_still_under_way_gets_the_answer_too(self):
        """Half of a 20 MB body is sent: the 503 is read before any reset."""

        async def slow(reader, writer):
            await reader.read()

        with running(silent) as gateway:
            gateway.engines[0]._serve = slow
            with gateway.connect() as sock:
                sock.sendall(
                    b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 20000000\r\n\r\n"
                    + bytes(100_000)
                )
                gateway.wait_in_flight(1)
                failure = gateway.fail("a")
                sock.sendall(bytes(100_000))
                assert failure.id.encode() in drain(sock)

    def test_only_the_failed_engines_requests_end(self):
        """Of two replicas one fails: the other's request goes on to its answer."""
        go = asyncio.Event()

        async def waits(peer: Peer) -> None:
            await go.wait()
            await answer(peer)

        with running(waits, silent) as gateway:
            asks = [in_thread(lambda: gateway.raw(post(CHAT, ASK, CLOSE))) for _ in range(2)]
            gateway.wait_sent(2)
            failure = gateway.fail("b")
            until(lambda: gateway.total("failed") == 1, what="one failed")
            gateway.call(go.set)
            answers = sorted(ask()[:12] for ask in asks)
            assert answers == [b"HTTP/1.1 200", b"HTTP/1.1 503"]
            assert failure.id in gateway.call(lambda: dict(gateway.gateway.by_failure))

    def test_a_failure_of_an_earlier_incarnation_says_nothing_against_this_one(self):
        """Told late, after a lost connection to the supervisor: nobody is ended, nothing leaves."""
        with running(silent) as gateway, gateway.connect() as sock:
            gateway.state("a", "ready", incarnation=3)
            sock.sendall(post(CHAT, ASK))
            gateway.wait_sent(1)
            gateway.fail("a", 1, incarnation=2)
            assert gateway.call(lambda: gateway.gateway.in_flight) == 1
            assert gateway.call(lambda: gateway.gateway.router.pick().name) == "a"
            failure = gateway.fail("a", 2)
            assert failure.id.encode() in drain(sock)

    def test_an_engine_that_answers_first_is_counted_by_its_failure(self):
        """Its own 503 passes untouched; its own error event in a stream is not said twice."""
        told = '{"error": {"code": "engine_stalled", "failure_id": "st-20261130T000000Z-00000001"}}'

        async def script(peer: Peer) -> None:
            if b"true" in peer.body:
                await peer.send(SSE)
                await peer.event(told)
                peer.writer.close()
                return
            body = told.encode()
            head = (
                b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nx-should-retry: false\r\n\r\n"
            )
            await peer.send(head % len(body) + body)

        with running(script) as gateway:
            assert gateway.raw(post(CHAT, ASK, CLOSE)).endswith(told.encode())
            assert gateway.call(lambda: gateway.gateway.by_failure) == {told[-31:-3]: 1}
            assert gateway.raw(post(CHAT, {"stream": True})).count(b"engine_stalled") == 1

    def test_an_observed_engine_keeps_its_clients(self):
        """enforce = observe and STALLED: requests are still sent to it."""
        with running(answer) as gateway:
            gateway.state("a", "stalled", enforce="observe")
            assert gateway.raw(post(CHAT, ASK, CLOSE)).startswith(b"HTTP/1.1 200 ")


def reset(peer: Peer) -> None:
    sock = peer.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.writer.close()


class TestBrokenAnswers:
    @pytest.mark.parametrize("end", ["done", "close", "reset", "mid-chunk", "mid-event"])
    def test_a_stream_without_done_is_an_error_in_the_client(self, end):
        """However a stream ends early, the openai client raises APIError; never a short answer."""

        async def script(peer: Peer) -> None:
            await peer.send(SSE)
            await peer.event(token("part"))
            if end == "done":  # a well-formed end that says nothing of [DONE]
                await peer.send(b"0\r\n\r\n")
                return
            if end == "mid-chunk":
                await peer.send(b"40\r\ndata: {")
            if end == "mid-event":
                await peer.send(b'8\r\ndata: {"\r\n')
            if end == "reset":
                reset(peer)
            peer.writer.close()

        with running(script) as gateway, client(gateway, max_retries=0) as chat:
            tokens = []
            with pytest.raises(openai.APIError) as raised:
                tokens.extend(words(chat))
            assert tokens == ["part"]
            assert raised.value.code == "engine_stalled"
            assert gateway.total("broken") == 1

    def test_a_failure_declared_a_moment_later_explains_the_lost_connection(self):
        """The process dies first and is declared then: its clients get the failure's id."""

        async def script(peer: Peer) -> None:
            reset(peer)

        with running(script) as gateway:
            gateway.state("a", "suspect")
            result = in_thread(lambda: gateway.raw(post(CHAT, ASK)))
            gateway.wait_sent(1)
            assert gateway.engines[0].hung_up.wait(5)
            failure = gateway.fail("a")
            got = result()
            assert failure.id.encode() in got
            assert b"x-should-retry: false" in got

    def test_a_short_json_body_is_a_503_and_not_half_an_answer(self):
        """Half of a small answer never reaches the client."""

        async def script(peer: Peer) -> None:
            await peer.send(json_answer(completion("well"))[:-20])
            peer.writer.close()

        with running(script) as gateway, client(gateway) as chat:
            with pytest.raises(openai.InternalServerError) as raised:
                chat.chat.completions.create(**ASK)
            assert raised.value.code == "engine_stalled"
            assert len(gateway.engines[0].requests) == 1

    def test_a_long_body_that_breaks_off_is_broken_off(self):
        """What was passed on already ends short of its length, and the client sees that."""

        async def script(peer: Peer) -> None:
            await peer.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: 999\r\n\r\nabc"
            )
            peer.writer.close()

        with running(script) as gateway:
            got = gateway.raw(post("/v1/audio/speech", {}))
            assert got.partition(b"\r\n\r\n")[2] == b"abc"

    @pytest.mark.parametrize(
        "raw",
        [
            b"SSH-2.0-OpenSSH\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
            b"\x00" * 100 + b"\r\n\r\n",
        ],
    )
    def test_an_upstream_that_speaks_no_http_is_502(self, raw):
        """A head that nobody can trust is not passed on."""

        async def script(peer: Peer) -> None:
            await peer.send(raw)
            await peer.gone()

        with running(script) as gateway:
            got = gateway.raw(post(CHAT, ASK))
            assert got.startswith(b"HTTP/1.1 502 ")
            assert b"bad_upstream" in got

    @pytest.mark.parametrize(
        "chunk", [b"zz\r\nx\r\n", b"5\r\nabcdefg\r\n", b"a" * 5000, b"0\r\nbad\r\n\r\n"]
    )
    def test_a_malformed_chunk_breaks_the_stream_off(self, chunk):
        """Bad framing in a stream is the error event and no end."""

        async def script(peer: Peer) -> None:
            await peer.send(SSE)
            await peer.event(token("part"))
            await peer.send(chunk)
            await peer.gone()

        with running(script) as gateway:
            got = gateway.raw(post(CHAT, {"stream": True}))
            assert b"bad_upstream" in got
            assert not got.endswith(b"0\r\n\r\n")

    @pytest.mark.parametrize(
        "raw",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n",
            b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 70_000,
        ],
    )
    def test_a_request_that_could_be_read_in_two_ways_is_refused(self, raw):
        """4xx and a closed connection: nothing of it is smuggled to the engine as a second request."""
        with running(answer) as gateway:
            got = gateway.raw(raw)
            assert got[:10] == b"HTTP/1.1 4"
            assert len(gateway.engines[0].requests) == 0

    def test_connect_is_told_what_there_is_instead(self):
        """A 405 names the methods that are served (RFC 9110, 15.5.6)."""
        with running(answer) as gateway:
            got = gateway.raw(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")
            head = got.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
            assert head[0].startswith(b"http/1.1 405 ")
            allowed = next(line for line in head if line.startswith(b"allow: "))
            assert {b"get", b"post"} <= set(allowed[7:].split(b", "))
            assert b"connect" not in allowed


class TestWaiting:
    def test_refused_while_starting(self):
        """Nobody is ready and nothing is held: 503 engine_not_ready with Retry-After."""
        with running(answer) as gateway:
            gateway.state("a", "starting")
            got = gateway.raw(post(CHAT, ASK))
            assert b"engine_not_ready" in got
            assert b"retry-after" in got

    def test_held_until_ready_first_in_first_out(self):
        """Five requests wait; at READY they are let go in the order in which they came."""
        with running(answer, hold=8.0) as gateway:
            order: list[int] = []
            attempt = gateway.gateway._attempt

            async def noted(exchange, replica):
                order.append(json.loads(b"".join(exchange.kept))["n"])
                return await attempt(exchange, replica)

            gateway.gateway._attempt = noted
            gateway.state("a", "backoff")
            asks = []
            for n in range(5):
                asks.append(in_thread(lambda n=n: gateway.raw(post(CHAT, {"n": n}, CLOSE))))
                until(
                    lambda n=n: gateway.call(lambda: gateway.gateway.router.waiting) == n + 1,
                    what="it waits",
                )
            gateway.state("a", "ready", incarnation=2)
            assert all(ask().startswith(b"HTTP/1.1 200 ") for ask in asks)
            assert order == list(range(5))

    def test_a_hold_ends(self):
        """Nobody becomes ready: the wait is over after `hold`, with the refusal."""
        with running(answer, hold=0.3) as gateway:
            gateway.state("a", "starting")
            began = time.monotonic()
            assert b"engine_not_ready" in gateway.raw(post(CHAT, ASK))
            assert 0.3 <= time.monotonic() - began < 3

    def test_no_more_wait_than_may(self):
        """The third of two that may wait is refused at once."""
        with running(answer, hold=8.0, hold_most=2) as gateway:
            gateway.state("a", "starting")
            asks = [in_thread(lambda: gateway.raw(post(CHAT, ASK, CLOSE))) for _ in range(2)]
            until(
                lambda: gateway.call(lambda: gateway.gateway.router.waiting) == 2, what="two wait"
            )
            assert b"gateway_full" in gateway.raw(post(CHAT, ASK))
            gateway.state("a", "ready")
            assert all(ask().startswith(b"HTTP/1.1 200 ") for ask in asks)

    def test_a_client_that_leaves_gives_its_place_up(self):
        """It hangs up while it waits: it is sent to nobody."""
        with running(answer, hold=8.0) as gateway:
            gateway.state("a", "starting")
            with gateway.connect() as sock:
                sock.sendall(post(CHAT, ASK))
                until(lambda: gateway.call(lambda: gateway.gateway.router.waiting), what="it waits")
            until(lambda: gateway.total("client_gone") == 1, what="it left")
            gateway.state("a", "ready")
            assert gateway.engines[0].requests == []

    def test_nothing_is_held_for_an_engine_that_will_not_come(self):
        """EXHAUSTED is nothing to wait for."""
        with running(answer, hold=30.0) as gateway:
            gateway.state("a", "exhausted")
            began = time.monotonic()
            assert b"engine_not_ready" in gateway.raw(post(CHAT, ASK))
            assert time.monotonic() - began < 5

    @pytest.mark.parametrize("state", ["exhausted", "unkillable", "failed", "stopped"])
    def test_a_wait_ends_when_nothing_is_left_to_wait_for(self, state):
        """The restart for which three requests wait is given up: all are told at once, not after `hold`."""
        with running(answer, hold=600.0) as gateway:
            gateway.state("a", "backoff")
            asks = [in_thread(lambda: gateway.raw(post(CHAT, ASK))) for _ in range(3)]
            until(
                lambda: gateway.call(lambda: gateway.gateway.router.waiting) == 3, what="three wait"
            )
            gateway.state("a", state, comes_back=False)
            for ask in asks:
                got = ask()
                assert got.startswith(b"HTTP/1.1 503 ")
                assert state == "stopped" or b"given up" in got
            assert gateway.engines[0].requests == []
            assert gateway.total("refused") == 3

    def test_a_wait_outlasts_a_failure_after_which_the_engine_comes_back(self):
        """Failed and being ended is on the way to the next incarnation: who waits gets its answer."""
        with running(answer, hold=600.0) as gateway:
            gateway.state("a", "starting")
            ask = in_thread(lambda: gateway.raw(post(CHAT, ASK, CLOSE)))
            until(lambda: gateway.call(lambda: gateway.gateway.router.waiting), what="it waits")
            gateway.state("a", "failed", comes_back=True)
            assert gateway.call(lambda: gateway.gateway.router.waiting) == 1
            gateway.state("a", "ready", incarnation=2)
            assert ask().startswith(b"HTTP/1.1 200 ")

    def test_a_wait_goes_on_while_another_engine_may_come(self):
        """One of two is given up, the other starts: there is something to wait for."""
        with running(answer, answer, hold=600.0) as gateway:
            gateway.state("a", "backoff")
            gateway.state("b", "starting")
            ask = in_thread(lambda: gateway.raw(post(CHAT, ASK, CLOSE)))
            until(lambda: gateway.call(lambda: gateway.gateway.router.waiting), what="it waits")
            gateway.state("a", "exhausted")
            assert gateway.call(lambda: gateway.gateway.router.waiting) == 1
            gateway.state("b", "ready")
            assert ask().startswith(b"HTTP/1.1 200 ")

    def test_a_second_try_that_nobody_can_serve_ends_with_the_first_failure(self):
        """It waits for the next incarnation, which will not come: its client gets the FAILURE it met."""
        with running(silent, hold=600.0, retry="before-first-byte") as gateway:
            ask = in_thread(lambda: gateway.raw(post(CHAT, ASK)))
            gateway.wait_sent(1)
            failure = gateway.fail("a")
            gateway.state("a", "backoff")
            until(lambda: gateway.call(lambda: gateway.gateway.router.waiting), what="it waits")
            gateway.state("a", "exhausted")
            got = ask()
            assert failure.id.encode() in got
            assert b"x-should-retry: false" in got

    def test_more_than_may_run_are_429(self):
        """Two run, the third is told to come again; probes pass."""

        async def script(peer: Peer) -> None:
            await (silent(peer) if b"POST" in peer.head else answer(peer))

        with running(script, max_in_flight=2) as gateway:
            held = [gateway.connect() for _ in range(2)]
            for sock in held:
                sock.sendall(post(CHAT, ASK))
            gateway.wait_in_flight(2)
            got = gateway.raw(post(CHAT, ASK))
            assert got.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after" in got
            assert gateway.raw(get("/health", CLOSE)).startswith(b"HTTP/1.1 200 ")
            for sock in held:
                sock.close()

    @pytest.mark.parametrize("sent", [b"", b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"])
    def test_a_connection_that_asks_nothing_is_closed(self, sent, monkeypatch):
        """Silent from the start, or in the middle of a head: it ends by itself."""
        limit = "HEAD_S" if sent else "IDLE_S"
        monkeypatch.setattr(f"stallwatch.gateway.watch.{limit}", 0.3)
        with running(answer) as gateway, gateway.connect() as sock:
            sock.sendall(sent)
            assert drain(sock) == b""
            assert not gateway.engines[0].requests

    def test_a_head_in_two_parts_after_a_long_pause_is_one_request(self):
        """The time for a head begins with its first byte, not with the end of the last answer."""
        with running(answer) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, ASK))
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            until(lambda: gateway.total("answered") == 1, what="it is idle")
            (known,) = gateway.gateway.clients
            known.since_s -= 100.0  # as if it had been idle for longer than a head may take
            raw = post(CHAT, ASK, CLOSE)
            sock.sendall(raw[:20])
            until(lambda: known.reading_head, what="a head is under way")
            gateway.call(gateway.watch.turn)
            sock.sendall(raw[20:])
            assert drain(sock).startswith(b"HTTP/1.1 200 ")

    def test_more_connections_than_may_are_closed(self):
        """The third of two is closed without a word; the two go on."""
        with running(answer, max_connections=2) as gateway:
            held = [gateway.connect() for _ in range(2)]
            until(lambda: len(gateway.gateway.clients) == 2, what="two are open")
            assert gateway.raw(post(CHAT, ASK)) == b""
            held[0].sendall(post(CHAT, ASK, CLOSE))
            assert drain(held[0]).startswith(b"HTTP/1.1 200 ")
            for sock in held:
                sock.close()

    def test_half_a_body_is_no_reason_to_wait_for_ever(self):
        """The client sends half of what it announced and falls silent: 408, and the place is free."""
        with running(answer, slow_client=0.4) as gateway, gateway.connect() as sock:
            sock.sendall(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nhalf")
            assert drain(sock).startswith(b"HTTP/1.1 408 ")
            gateway.wait_in_flight(0)

    @pytest.mark.parametrize("own", [True, False])
    def test_a_deadline_is_a_504(self, own):
        """By configuration or by the request's own header; the engine's request is aborted."""
        options = {} if own else {"deadline": 0.3}
        header = ["x-stallwatch-deadline: 0.3"] if own else []
        with running(silent, **options) as gateway:
            got = gateway.raw(post(CHAT, ASK, *header))
            assert got.startswith(b"HTTP/1.1 504 ")
            assert b"deadline_exceeded" in got
            assert gateway.engines[0].hung_up.wait(5)

    def test_without_a_supervisor_it_is_503_and_well_again_with_one(self):
        """Nobody knows how the engines are; a word of the supervisor suffices."""
        with running(answer) as gateway:
            gateway.call(gateway.gateway.router.orphaned)
            assert b"no_supervisor" in gateway.raw(post(CHAT, ASK))
            gateway.state("a", "ready")
            assert gateway.raw(post(CHAT, ASK, CLOSE)).startswith(b"HTTP/1.1 200 ")


class TestRetry:
    def test_a_request_without_a_byte_is_sent_to_another_replica_once(self):
        """retry = before-first-byte: the client sees only the good answer."""
        with running(silent, answer, retry="before-first-byte") as gateway:
            gateway.state("b", "starting")
            result = in_thread(lambda: gateway.raw(post(CHAT, ASK, CLOSE)))
            gateway.wait_sent(1)
            gateway.state("b", "ready")
            gateway.fail("a")
            assert result().startswith(b"HTTP/1.1 200 ")
            assert gateway.call(lambda: gateway.gateway.repeats["retried"]) == 1

    def test_bodies_are_not_kept_without_bound(self):
        """The budget of kept bodies is used up: the request runs, and is not sent a second time."""
        with running(silent, answer, retry="before-first-byte") as gateway:
            gateway.gateway._budget.most = 1000
            gateway.state("b", "starting")
            with gateway.connect() as sock:
                sock.sendall(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9000\r\n\r\nbegin")
                until(lambda: gateway.engines[0].connections, what="it is on its way")
                sock.sendall(bytes(8995))
                gateway.wait_sent(1)
                gateway.state("b", "ready")
                failure = gateway.fail("a")
                assert failure.id.encode() in drain(sock)
            assert gateway.engines[1].requests == []
            assert gateway.gateway._budget.used == 0

    def test_a_request_that_was_there_twice_is_not_sent_a_third_time(self):
        """The same body in flight at two failures: it may be the culprit, so it ends with the second."""
        with running(silent, silent, answer, retry="before-first-byte") as gateway:
            gateway.state("b", "starting")
            gateway.state("c", "starting")
            result = in_thread(lambda: gateway.raw(post(CHAT, ASK)))
            gateway.wait_sent(1)
            gateway.state("b", "ready")
            gateway.fail("a", 1)
            gateway.wait_sent(2)
            gateway.state("c", "ready")
            second = gateway.fail("b", 2)
            assert second.id.encode() in result()
            # and when its client sends it once more, and that engine fails too, nobody tries again
            assert gateway.engines[2].requests == []

    def test_a_stream_that_began_is_never_sent_again(self):
        """One byte was seen: the failure is the answer."""
        with running(one_token, answer, retry="before-first-byte") as gateway:
            gateway.state("b", "starting")
            with gateway.connect() as sock:
                sock.sendall(post(CHAT, {"stream": True}))
                while b"part" not in sock.recv(4096):
                    pass
                gateway.state("b", "ready")
                failure = gateway.fail("a")
                assert failure.id.encode() in drain(sock)
                assert gateway.engines[1].requests == []

    def test_a_rolling_restart_fails_nobody(self):
        """Two replicas stop and come back in turn under load: 300 requests, 300 answers."""

        async def brief(peer: Peer) -> None:
            await asyncio.sleep(0.01)
            await answer(peer)

        with running(brief, brief) as gateway, ThreadPoolExecutor(8) as pool:
            asks = [pool.submit(gateway.raw, post(CHAT, {"n": n}, CLOSE)) for n in range(300)]
            for name in ("a", "b", "a", "b"):
                done = sum(ask.done() for ask in asks)
                gateway.state(name, "draining")
                until(
                    lambda done=done: sum(a.done() for a in asks) > min(done + 20, 299), what="load"
                )
                gateway.state(name, "ready", incarnation=2)
            assert all(ask.result(10).startswith(b"HTTP/1.1 200 ") for ask in asks)

    def test_a_request_that_met_a_leaving_engine_moves_to_another(self):
        """The stop was asked for between the choice and the connection: no client notices."""

        async def leaves(peer: Peer) -> None:
            reset(peer)

        with running(leaves, answer) as gateway:
            gateway.state("b", "starting")
            gateway.state("a", "ready")
            gateway.call(lambda: None)
            result = in_thread(lambda: gateway.raw(post(CHAT, ASK, CLOSE)))
            gateway.wait_sent(1)
            gateway.state("b", "ready")
            gateway.state("a", "stopping")
            assert result().startswith(b"HTTP/1.1 200 ")
            assert gateway.call(lambda: gateway.gateway.repeats["moved"]) == 1

    def test_the_least_loaded_replica_is_chosen(self):
        """Four requests on two replicas: two each."""
        with running(silent, silent) as gateway:
            socks = [gateway.connect() for _ in range(4)]
            for sock in socks:
                sock.sendall(post(CHAT, ASK))
            gateway.wait_sent(4)
            assert [len(e.requests) for e in gateway.engines] == [2, 2]
            for sock in socks:
                sock.close()


class TestSilence:
    def test_an_engine_that_sends_nobody_anything_is_told(self):
        """The first token is late: the watch says which engine, what for, and since when."""
        with running(silent, first_token=0.5) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": True}))
            told = until(lambda: gateway.silent, what="a silence")[-1]
            assert (told.engine, told.phase, told.limit_s) == ("a", "first_token", 0.5)
            assert told.waiting == 1

    def test_between_tokens_has_a_limit_of_its_own(self):
        """A stream that began and stopped is told by that limit."""
        with running(one_token, between_tokens=0.5) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": True}))
            told = until(lambda: gateway.silent, what="a silence")[-1]
            assert told.phase == "between_tokens"

    def test_a_whole_answer_is_not_judged_by_the_token_limit(self):
        """A request that is not streamed has its own, longer limit."""
        with (
            running(silent, first_token=0.1, whole_answer=0.6) as gateway,
            gateway.connect() as sock,
        ):
            sock.sendall(post(CHAT, {"stream": False}))
            told = until(lambda: gateway.silent, what="a silence")[-1]
            assert told.phase == "whole_answer"

    def test_a_request_lost_among_others_is_answered_and_the_engine_not_accused(self):
        """Others get tokens all the time: this one is a 504, and nothing is told of the engine."""

        async def script(peer: Peer) -> None:
            if b"lost" in peer.body:
                await silent(peer)
                return
            await peer.send(SSE)
            while not peer.writer.is_closing():
                await peer.event(token("x"))
                await asyncio.sleep(0.01)

        with running(script, first_token=0.6) as gateway, gateway.connect() as busy:
            busy.sendall(post(CHAT, {"stream": True}))
            busy.recv(4096)
            reader = threading.Thread(target=drain, args=(busy,), daemon=True)
            reader.start()
            got = gateway.raw(post(CHAT, {"stream": True, "lost": 1}))
            assert b"request_lost" in got
            assert not gateway.silent
            busy.shutdown(socket.SHUT_RDWR)
            reader.join(5)

    def test_a_client_that_does_not_read_accuses_nobody(self):
        """The engine is held up by the client: its silence is not the engine's."""

        async def script(peer: Peer) -> None:
            await peer.send(SSE)
            while not peer.writer.is_closing():
                await peer.event(token("x" * 60_000))

        with running(script, between_tokens=0.3) as gateway, gateway.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(post(CHAT, {"stream": True}))
            until(
                lambda: gateway.call(
                    lambda: [e for e in gateway.gateway.exchanges if e.held_back_s]
                ),
                what="the client holds it up",
            )
            time.sleep(0.5)
            assert not gateway.silent
