"""The engine client in its loop, with the worker's end of the wire in the test's hands."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_helpers import byte_tokenizer
from stallwatch.heartbeat.failure import Failure
from stallwatch_engine.api.answer import ANSWER_S, ModelAnswer
from stallwatch_engine.api.client import EngineClient, Limits
from stallwatch_engine.api.errors import ApiError
from stallwatch_engine.api.exchange import MAX_UNREAD
from stallwatch_engine.api.heart import Heart
from stallwatch_engine.api.ledger import Source
from stallwatch_engine.api.metrics import Metrics
from stallwatch_engine.api.replies import CompletionReply
from stallwatch_engine.api.text import TextCodec
from stallwatch_engine.wire import Abort, Failed, Ready, Sampling, Submit, Tokens, WorkerEnd

CODEC = TextCodec(byte_tokenizer(), None, {})
READY = Ready(
    architecture="test",
    device="cpu",
    dtype="float32",
    vocab_size=258,
    max_model_len=100_000,
    max_num_seqs=64,
)
FAILURE = Failure("st-1", "chat", 1, "ORDER_CYCLE", "", "", 1.0, 1.0, "restart")
WAIT_S = 10.0


class Engine:
    """An EngineClient that is ready, and its worker's end."""

    def __init__(self, **limits) -> None:
        self.client = EngineClient(CODEC, Limits(**limits), Metrics())
        self.answers: Counter[int] = Counter()

    async def __aenter__(self) -> Self:
        near, far = socket.socketpair()
        await self.client.connect(near)
        self.worker = WorkerEnd(far)
        self.worker.send(READY)
        await self.client.ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self.worker.close()
        await asyncio.sleep(0)

    def submit(self, *, streaming: bool = True, timeout_s: float | None = None, arrived=None):
        now = asyncio.get_running_loop().time()
        exchange = self.client.submit(
            [1, 2],
            Sampling(max_tokens=50_000),
            [],
            arrived=now if arrived is None else arrived,
            timeout_s=timeout_s,
            streaming=streaming,
        )
        exchange.when_settled(lambda _: self.answers.update([exchange.id]))
        return exchange

    async def heard(self, count: int) -> list[Submit | Abort]:
        """That many messages at the worker."""
        found: list[Submit | Abort] = []
        while len(found) < count:
            new = await asyncio.to_thread(self.worker.receive, WAIT_S)
            assert new, f"only {len(found)} of {count} messages came"
            found += new
        return found

    async def settled(self, *exchanges) -> None:
        async with asyncio.timeout(WAIT_S):
            for exchange in exchanges:
                await exchange.all()


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


ACTS = st.sampled_from(
    ["token", "end", "fail", "hang_up", "overdue", "declare", "shut_down", "die"]
)


@given(st.integers(1, 4), st.lists(st.tuples(ACTS, st.integers(0, 3)), max_size=16))
def test_any_interleaving_of_all_that_can_happen_ends_each_request_once(requests, acts):
    """Every exchange is settled exactly once, and every later result is in the late counter."""

    async def test() -> None:
        async with Engine() as engine:
            client = engine.client
            exchanges = [engine.submit() for _ in range(requests)]
            late = 0
            for act, which in acts:
                exchange = exchanges[which % requests]
                over = exchange.answer is not None
                match act:
                    case "token":
                        client._on_message(Tokens(id=exchange.id, ids=[1]))
                    case "end":
                        client._on_message(Tokens(id=exchange.id, ids=[2], finish="stop"))
                    case "fail":
                        client._on_message(Failed(id=exchange.id, reason="internal"))
                    case "overdue":
                        client._overdue(exchange.id, 1.0)
                    case "hang_up":
                        client.hang_up(exchange)
                    case "declare":
                        client.declare(FAILURE)
                    case "shut_down":
                        client.shut_down()
                    case "die":
                        client.worker_died("test")
                        await asyncio.sleep(0.001)
                if over and act in {"token", "end", "fail", "overdue"}:
                    late += 1
            client.declare(FAILURE)

            assert all(engine.answers[exchange.id] == 1 for exchange in exchanges)
            assert len(client.ledger) == 0
            assert sum(client.ledger.settled.values()) == requests
            assert sum(client.ledger.late.values()) == late

    run(test())


@pytest.mark.slow
def test_an_end_that_is_not_the_workers_tells_it_to_abort():
    """Deadline, hang-up and stop string free the worker's slots; its own end needs no word."""

    async def test() -> None:
        async with Engine() as engine:
            hung, own = engine.submit(), engine.submit()
            engine.client.hang_up(hung)
            overdue = engine.submit(timeout_s=0.01)
            await engine.settled(overdue)
            engine.worker.send(Tokens(id=own.id, ids=[1], finish="stop"))
            await engine.settled(own)
            last = engine.submit()
            heard = await engine.heard(6)

            aborted = [message.id for message in heard if isinstance(message, Abort)]
            assert [hung.id, overdue.id] == aborted
            assert last.id == heard[-1].id

    run(test())


def test_a_deadline_counts_from_the_arrival():
    """What tokenising and queueing took is gone; nothing left is a deadline missed already."""

    async def test() -> None:
        async with Engine() as engine:
            now = asyncio.get_running_loop().time()
            with pytest.raises(ApiError) as caught:
                engine.submit(timeout_s=1.0, arrived=now - 1.0)
            assert caught.value.code == "deadline_exceeded"
            assert len(engine.client.ledger) == 0
            exchange = engine.submit(timeout_s=100.0, arrived=now - 99.98)
            await engine.settled(exchange)
            assert exchange.answer.source is Source.DEADLINE

    run(test())


def test_unread_output_is_one_piece_and_bounded():
    """A slow reader's backlog ends its own request; a whole answer may be as long as was asked for."""

    async def test() -> None:
        async with Engine() as engine:
            slow, whole = engine.submit(), engine.submit(streaming=False)
            for _ in range(MAX_UNREAD // 4096 + 1):
                for exchange in (slow, whole):
                    engine.client._on_message(Tokens(id=exchange.id, ids=[65] * 4096))
            assert slow.answer.source is Source.DISCONNECT
            assert "slower" in slow.answer.error.message
            assert whole.answer is None

    run(test())


@pytest.mark.slow
def test_a_client_that_does_not_read_cannot_delay_the_failures_answers():
    """Its handler gives up in time; the others' answers are written at once."""

    async def test() -> None:
        async with Engine() as engine:
            heard: list[bytes] = []
            writing = asyncio.Event()

            async def silent() -> dict:
                await asyncio.Event().wait()
                return {}

            async def deaf(_message) -> None:
                writing.set()
                await asyncio.Event().wait()

            async def hearing(message) -> None:
                heard.append(message.get("body", b""))

            served = engine.submit()
            engine.client._on_message(Tokens(id=served.id, ids=[65], finish="stop"))
            engine.client.written(served)  # an answer before the failure says nothing about it
            handlers = []
            for send in (deaf, hearing):
                exchange = engine.submit()
                answer = ModelAnswer(
                    engine.client, exchange, CompletionReply("m", logprobs=False), usage=False
                )
                handlers.append(asyncio.create_task(answer({"type": "http"}, silent, send)))
                engine.client._on_message(Tokens(id=exchange.id, ids=[65]))
            await writing.wait()
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert engine.client.declare(FAILURE) == 2
            await handlers[1]
            assert b"st-1" in b"".join(heard)
            assert not engine.client.all_written.is_set()
            await handlers[0]
            assert engine.client.all_written.is_set()
            assert ANSWER_S - 0.05 <= loop.time() - began < ANSWER_S + 1

    run(test())


class Gauge:
    """What the supervisor sees of a board, and the failure it declares there."""

    attached = True

    def __init__(self) -> None:
        self.said: list[int] = []
        self.beats = 0
        self.declared: Failure | None = None
        self.changed = asyncio.Event()

    def lane(self, _name: str) -> Gauge:
        return self

    def enter(self, _phase: str, /) -> None:
        self.beats += 1
        self.changed.set()

    def ready(self) -> None: ...

    def pending(self, n: int) -> None:
        self.said.append(n)
        self.changed.set()

    def failure(self) -> Failure | None:
        return self.declared

    async def until(self, true) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                self.changed.clear()
                await self.changed.wait()


@pytest.mark.slow
def test_the_pending_gauge_is_zero_only_once_the_failures_answers_are_written():
    """The supervisor kills when it reads zero; the loop's beat does not raise the gauge again."""

    async def test() -> None:
        async with Engine() as engine:
            gauge = Gauge()
            heart = Heart(gauge, engine.client)
            exchanges = [engine.submit(), engine.submit()]
            heart.start()
            await gauge.until(lambda: gauge.said[-1:] == [2])
            gauge.declared = FAILURE
            await engine.settled(*exchanges)
            assert gauge.said[-1] == 2
            engine.client.written(exchanges[0])
            gauge.said.clear()
            beat = gauge.beats
            await gauge.until(lambda: gauge.beats >= beat + 2)
            assert gauge.said == []
            engine.client.written(exchanges[1])
            await gauge.until(lambda: gauge.said == [0])
            await heart.stop()

    run(test())


def test_a_failure_declares_what_waits_even_before_the_next_beat():
    """A request that came since the last beat is counted among the answers to write."""

    async def test() -> None:
        async with Engine() as engine:
            gauge = Gauge()
            heart = Heart(gauge, engine.client)
            exchange = engine.submit()
            heart._fail(FAILURE)
            assert gauge.said == [1]
            engine.client.written(exchange)
            await gauge.until(lambda: gauge.said == [1, 0])

    run(test())


def test_a_second_ready_and_a_made_up_id_break_the_worker():
    """Its process is to be replaced: everything it has is answered."""

    async def test() -> None:
        for message in (READY, Tokens(id=99, ids=[1])):
            async with Engine() as engine:
                exchange = engine.submit()
                engine.worker.send(message)
                await engine.settled(exchange)
                assert exchange.answer.source is Source.PROCESS_DEATH

    run(test())
