"""The load generator through its real dispatch path, against servers that answer, stop and never answer."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_server import ANSWER, Server, until, whole
from stallwatch_engine.bench.arrivals import constant, immediate, poisson, self_timed
from stallwatch_engine.bench.breaker import State
from stallwatch_engine.bench.client import Client
from stallwatch_engine.bench.errors import PlanRefused, TargetUnusable
from stallwatch_engine.bench.gate import parse_gate
from stallwatch_engine.bench.plan import Plan
from stallwatch_engine.bench.prompt import Prompt
from stallwatch_engine.bench.result import Outcome
from stallwatch_engine.bench.run import Hooks, Options, run, run_async
from stallwatch_engine.bench.target import Target, Timeouts
from stallwatch_engine.bench.timeouts import TimeoutKind
from stallwatch_engine.bench.transcript import Transcript

BOUND_S = 10.0  # a run that hangs fails here, not after its own ten minutes
READ = Timeouts(
    total=8.0, connect=5.0, read=0.4
)  # a busy machine may pause this long, rarely longer
COMPLETED, TIMED_OUT, ERROR, CANCELLED = (
    Outcome.COMPLETED,
    Outcome.TIMED_OUT,
    Outcome.ERROR,
    Outcome.CANCELLED,
)


def plan(texts, *, arrivals=None, concurrency=64, **fields) -> Plan:
    prompts = tuple(Prompt(text, 8, **fields) for text in texts)
    return Plan(prompts, arrivals or immediate(len(prompts)), concurrency)


async def bench(server, work, timeouts=READ, **options):
    """A run with everything in this process, bounded."""
    endpoint = options.pop("endpoint", "completions")
    stream = options.pop("stream", True)
    hooks = options.pop("hooks", None)
    target = Target(server.url, "tiny", endpoint=endpoint, stream=stream)
    async with asyncio.timeout(BOUND_S):
        return await run_async(work, target, Options(timeouts=timeouts, **options), hooks)


def outcomes(report) -> list[Outcome]:
    assert [result.index for result in report.results] == list(range(len(report.results)))
    return [result.outcome for result in report.results]


def serve(work, **options):
    """One run against a server of its own; returns the report and the server."""

    async def both():
        async with Server() as server:
            return await bench(server, work, **options), server

    return asyncio.run(both())


# -- the breaker ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("constant", "never"),
        ("poisson", "never"),
        ("self-timed", "never"),
        ("constant", "headers"),
        ("poisson", "some"),
    ],
)
def test_no_delayed_arrival_is_sent_after_the_first_timeout(mode, how):
    """In every delayed mode the server sees just the requests due before the timeout, and the run ends then."""
    count = 60
    texts = [f"{how if n == 2 else 'ok'} {n}" for n in range(count)]
    times = {
        "constant": constant(count, 20.0),
        "poisson": poisson(count, 20.0, seed=3),
        "self-timed": self_timed([5 + n / 20 for n in range(count)]),
    }[mode]
    known = []

    def watch(result):
        if result.timed_out:
            known.append(time.monotonic())

    began = time.monotonic()
    hooks = Hooks(on_result=watch)
    report, server = serve(plan(texts, arrivals=times), fail_fast=True, hooks=hooks)

    assert time.monotonic() - began < times[-1], "the run waited for arrivals of its future"
    sent = [result.index for result in report.results if result.sent_s is not None]
    assert sent == list(range(len(sent))), "requests were sent out of order"
    assert 3 <= len(sent) < count
    assert server.seen == texts[: len(server.seen)]
    assert 3 <= len(server.seen) <= len(sent)
    assert all(began + report.results[n].sent_s <= known[0] for n in sent)
    ends = outcomes(report)
    assert ends[2] is TIMED_OUT
    assert report.results[2].timeout is TimeoutKind.SOCK_READ
    assert set(ends[:2]) == {COMPLETED}
    assert set(ends[len(sent) :]) == {CANCELLED}
    assert report.breaker.state is State.TRIPPED
    assert report.breaker.cause.request == 2
    assert report.exit_code == 124


@pytest.mark.slow
def test_waiting_and_running_requests_are_cancelled_and_cleaned_up():
    """With two places and thirty requests the queue never moves: two were sent, both connections are closed."""
    report, server = serve(plan(["never"] * 30, concurrency=2), fail_fast=True)

    counts = report.summary.counts
    assert len(server.seen) == 2
    assert counts.timed_out + counts.cancelled == 30
    assert counts.timed_out >= 1
    assert counts.sent == 2
    assert len(report.results) == 30
    outcomes(report)


@pytest.mark.slow
def test_a_slow_request_in_flight_is_hung_up_on():
    """The server sees its client go when another request's timeout stops the run."""

    async def both():
        async with Server() as server:
            work = plan(["ok slow 5", "504 after 0.3"])
            return await bench(server, work, timeouts=Timeouts(total=8), fail_fast=True)

    began = time.monotonic()
    report = asyncio.run(both())
    assert time.monotonic() - began < 3
    assert outcomes(report) == [CANCELLED, TIMED_OUT]
    assert report.results[0].sent_s is not None
    assert report.results[0].ttft_s is not None, "what was seen of it is kept"


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("408", TimeoutKind.SERVER_408),
        ("504", TimeoutKind.SERVER_504),
        ("head-504", TimeoutKind.SERVER_504),
        ("stalled", TimeoutKind.ENGINE_STALLED),
        ("stalled-stream", TimeoutKind.ENGINE_STALLED),
        ("deadline", TimeoutKind.SERVER_DEADLINE),
    ],
)
def test_a_servers_own_timeout_opens_the_breaker(how, kind):
    """Statuses 408 and 504, engine_stalled and a deadline's error object are structural timeouts."""
    report, server = serve(plan([f"{how}", *["ok"] * 9], concurrency=1), fail_fast=True)

    assert report.results[0].timeout is kind
    assert outcomes(report) == [TIMED_OUT, *[CANCELLED] * 9]
    assert len(server.seen) == 1
    assert (report.results[0].failure_id is not None) == how.startswith("stalled")


@pytest.mark.slow
def test_the_total_limit_opens_the_breaker():
    """A request that streams for longer than its total limit is a timeout of kind total."""
    limits = Timeouts(total=0.6, connect=5.0)
    report, _ = serve(plan(["ok slow 5", "ok"]), timeouts=limits, fail_fast=True)

    assert outcomes(report) == [TIMED_OUT, COMPLETED]
    assert report.results[0].timeout is TimeoutKind.TOTAL


@pytest.mark.slow
def test_no_connection_in_time_opens_the_breaker():
    """A listener whose queue is full lets nobody in: kind connect."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(listener.getsockname())
            target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "tiny")
            options = Options(timeouts=Timeouts(total=8.0, connect=0.2), fail_fast=True)
            report = run(plan(["ok"] * 3, concurrency=1), target, options)
        finally:
            for each in waiting:
                each.close()
    assert outcomes(report) == [TIMED_OUT, CANCELLED, CANCELLED]
    assert report.results[0].timeout is TimeoutKind.CONNECT


@pytest.mark.slow
def test_what_completed_before_is_kept_in_order():
    """Completed results stay, with their figures, at their place between placeholders."""
    texts = ["ok", "ok slow 5", "ok", "504 after 0.4", "ok slow 5"]
    report, _ = serve(plan(texts), timeouts=Timeouts(total=8), fail_fast=True)

    assert outcomes(report) == [COMPLETED, CANCELLED, COMPLETED, TIMED_OUT, CANCELLED]
    assert report.results[2].output_tokens == 3
    assert report.results[2].text_sha256 == report.results[0].text_sha256
    counts = report.summary.counts
    assert (counts.completed, counts.timed_out, counts.cancelled) == (2, 1, 2)


@pytest.mark.slow
def test_without_the_breaker_a_timeout_stops_nothing_and_still_fails_the_gates():
    """Off by default: all other requests run, and the best latencies pass no gate beside one timeout."""
    gates = [parse_gate("ttft_p99=60s"), parse_gate("tokens_per_s=0"), parse_gate("error_rate=1")]
    report, server = serve(plan(["never", *["ok"] * 6], concurrency=2), gates=gates)

    assert outcomes(report) == [TIMED_OUT, *[COMPLETED] * 6]
    assert len(server.seen) == 7
    assert report.breaker.sends
    assert not any(judged.passed for judged in report.gates)
    assert report.exit_code == 3


def test_an_error_is_no_timeout_whatever_its_words_say():
    """A 500 that says "timed out" and a refused connection leave the breaker closed."""
    report, _ = serve(plan(["broken", "error-event", "hung-up", "ok"]), fail_fast=True)

    assert outcomes(report) == [ERROR, ERROR, ERROR, COMPLETED]
    assert report.breaker.sends
    assert report.exit_code == 1


@pytest.mark.slow
def test_the_first_of_many_timeouts_at_once_is_the_cause():
    """Thirty requests that time out together end as timed out or cancelled, none missing, with one cause."""
    report, _ = serve(plan(["never"] * 30), fail_fast=True)

    assert set(outcomes(report)) <= {TIMED_OUT, CANCELLED}
    assert report.results[report.breaker.cause.request].timed_out


@pytest.mark.parametrize("steps", range(5))
def test_a_request_that_has_begun_is_not_written_after_the_stop(steps):
    """Stopped at any step of the loop after its task began: not a byte reaches the socket later."""

    async def both():
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m", stream=False)
            async with Client(target, READ, connections=1) as client:
                # a first exchange leaves an open connection: the next request can go at once
                first = asyncio.create_task(ask(client))
                near, _ = await loop.sock_accept(listener)
                with near:
                    near.setblocking(False)
                    await loop.sock_recv(near, 65536)
                    await loop.sock_sendall(near, whole("200 OK", ANSWER))
                    assert (await first).outcome is COMPLETED

                    second = asyncio.create_task(ask(client))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    client.sever()
                    second.cancel()
                    before = readable(near)
                    await asyncio.wait({second})
                    await asyncio.sleep(0.01)  # more turns of the loop than it needs to write
                    return before, readable(near)

    async def ask(client):
        prompt = Prompt("ok", 4)
        return await client.ask(prompt, Transcript(prompt, 0.0), lambda kind: None)

    def readable(sock):
        try:
            return sock.recv(65536)
        except BlockingIOError:
            return b""

    before, after = asyncio.run(asyncio.wait_for(both(), BOUND_S))
    assert after == b""
    assert before.startswith(b"POST") or steps < 3


ENDS = {"ok": COMPLETED, "cut": ERROR, "refused": ERROR, "hung-up": ERROR, "broken": ERROR,
        "504": TIMED_OUT, "stalled": TIMED_OUT, "deadline": TIMED_OUT}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(sorted(ENDS)), st.floats(0, 0.004)), min_size=1, max_size=30
    ),
    concurrency=st.integers(1, 8),
    fail_fast=st.booleans(),
)
def test_any_run_accounts_for_every_request(requests, concurrency, fail_fast):
    """Whatever the server does and whenever requests come: one result each, in order, as the server saw them."""
    names = [name for name, _ in requests]
    times = self_timed(itertools.accumulate(gap for _, gap in requests))
    work = plan(names, arrivals=times, concurrency=concurrency)
    report, server = serve(work, timeouts=Timeouts(total=8), fail_fast=fail_fast)

    ends = outcomes(report)
    assert len(ends) == len(names)
    sent = [result.index for result in report.results if result.sent_s is not None]
    assert sent == list(range(len(sent))), "a hole in what was sent"
    assert not Counter(server.seen) - Counter(names[: len(sent)]), "something was sent twice"
    assert server.most_active <= concurrency
    tripped = fail_fast and any(ENDS[name] is TIMED_OUT for name in names)
    assert report.breaker.sends != tripped
    if not tripped:
        assert ends == [ENDS[name] for name in names]
    else:
        assert ends[report.breaker.cause.request] is TIMED_OUT
        assert all(end in (ENDS[name], CANCELLED) for end, name in zip(ends, names, strict=True))
        assert report.exit_code == 124


# -- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("cut", "truncated"),
        ("aborted", "truncated"),
        ("aborted-after-done", "truncated"),
        ("hung-up", "connection"),
        ("given-up", "aborted"),
        ("garbage", "bad_answer"),
        ("page", "bad_answer"),
        ("refused", "bad"),
        ("error-event", "server_error"),
    ],
)
def test_a_truncated_or_broken_answer_is_never_complete(how, code):
    """No [DONE], an error event, an aborted body, no stream: an error result that counts for no latency."""
    report, _ = serve(plan([how]))

    result = report.results[0]
    assert (result.outcome, result.code) == (ERROR, code)
    assert result.e2e_s is None
    assert report.summary.output_tokens == 0
    assert report.summary.latency["ttft"].count == 0
    assert report.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_both_interfaces_stream(endpoint):
    """Times are in order, tokens are the server's count, gaps are between pieces."""
    report, server = serve(plan(["ok slow 0.25"], expect="two three"), endpoint=endpoint)

    result = report.results[0]
    assert result.outcome is COMPLETED
    assert 0 <= result.ttft_s < result.e2e_s
    assert result.itl_max_s >= 0.05
    assert result.tpot_s * 2 == pytest.approx(result.e2e_s - result.ttft_s)
    assert (result.prompt_tokens, result.output_tokens) == (7, 3)
    assert result.finish_reason == "stop"
    assert result.matched is True
    assert report.summary.latency["itl"].count == 2
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert ("messages" in server.bodies[0]) == (endpoint == "chat")
    assert report.passed


def test_an_answer_in_one_piece():
    """Without streaming there is an end, a count and no first token."""
    report, server = serve(plan(["ok", "refused"]), stream=False)

    first = report.results[0]
    assert first.outcome is COMPLETED
    assert first.ttft_s is None
    assert first.output_tokens == 3
    assert outcomes(report) == [COMPLETED, ERROR]
    assert server.bodies[0]["stream"] is False


def test_concurrency_is_held_and_used():
    """Never more than asked for in flight, and as many as asked for."""
    report, server = serve(plan(["ok slow 0.1"] * 10, concurrency=5))

    assert server.most_active == 5
    assert outcomes(report) == [COMPLETED] * 10
    assert report.summary.latency["queue"].greatest >= 0.05


def test_arrivals_are_kept():
    """Requests reach the server at their planned times, not in a burst and not early."""
    times = self_timed([10.0, 10.05, 10.05, 10.12])
    began = time.monotonic()
    report, server = serve(plan(["ok"] * 4, arrivals=times))

    assert [result.due_s for result in report.results] == pytest.approx([0, 0.05, 0.05, 0.12])
    for due, result in zip(times, report.results, strict=True):
        assert result.sent_s >= due
    assert server.times[3] - began >= 0.12


def test_expectations_count_whatever_happened_to_their_request():
    """A request that failed or was never sent lowers the accuracy; it is not left out of it."""
    work = plan(["ok", "504", "ok", "ok"], concurrency=1, expect="three")
    report, _ = serve(work, fail_fast=True, gates=[parse_gate("accuracy=0.1")])

    assert report.summary.accuracy == 0.25
    assert not report.gates[0].passed


# -- the API -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stop_waits_for_what_is_in_flight():
    """After the duration nothing new is sent, running requests complete, and the rest was never planned."""
    work = plan(["ok slow 0.1"] * 100, arrivals=constant(100, 50.0))
    report, server = serve(work, timeouts=Timeouts(total=8), duration_s=0.5)

    assert 1 < len(report.results) < 100
    assert outcomes(report) == [COMPLETED] * len(server.seen)
    assert report.ended_early
    assert report.passed


def test_an_interrupt_gives_the_partial_result():
    """What a signal handler calls ends the run at once: completed results stay, exit code 130."""

    async def both():
        async with Server() as server:
            started = []

            def seen(result):
                if result.index == 0:
                    started[0].interrupt()

            hooks = Hooks(on_result=seen, on_start=started.append)
            return await bench(server, plan(["ok", "never", "never"]), hooks=hooks)

    report = asyncio.run(both())
    assert outcomes(report) == [COMPLETED, CANCELLED, CANCELLED]
    assert report.exit_code == 130


def test_an_error_in_a_hook_is_raised_and_nothing_is_left():
    """A caller's own mistake ends the run with that error, not with a report."""

    def broken(result):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        serve(plan(["ok", "never"]), hooks=Hooks(on_result=broken))


def test_a_cancelled_run_leaves_no_request():
    """Cancelling run_async hangs up on the server and leaves no task behind."""

    async def both():
        async with Server() as server:
            task = asyncio.create_task(bench(server, plan(["never"] * 3)))
            async with asyncio.timeout(BOUND_S):
                await until(lambda: len(server.seen) == 3)
                task.cancel()
                await asyncio.wait({task})
                await until(lambda: not server.active)
            names = {each.get_name() for each in asyncio.all_tasks()}
            return server.gone, names

    gone, names = asyncio.run(both())
    assert gone == 3
    assert not any(name.startswith("bench-") for name in names)


def test_the_model_is_asked_for_when_none_is_named():
    """The first model of the server's list goes into every request."""

    async def both():
        async with Server() as server:
            report = await run_async(plan(["ok"]), Target(server.url))
            return report, server.bodies[0]["model"]

    report, model = asyncio.run(both())
    assert model == "tiny"
    assert report.passed


def test_no_server_is_said_before_the_run():
    """Without a server to ask for its model there is no run, but an error that names the address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(TargetUnusable, match="/v1/models"):
            run(plan(["ok"]), Target(url))
        report = run(plan(["ok"]), Target(url, "named"))
    assert report.results[0].code == "connection"


def test_token_ids_are_no_chat():
    """A plan that the endpoint does not take is refused before anything is sent."""
    work = Plan((Prompt((1, 2, 3), 4),), immediate(1), 1)
    with pytest.raises(PlanRefused, match="--endpoint completions"):
        run(work, Target("http://127.0.0.1:1", "m", endpoint="chat"))
