"""The load generator against the embedded engine's real api process, over both interfaces."""

from __future__ import annotations

import pytest

from api_helpers import serving, write_checkpoint
from stallwatch_engine.bench.arrivals import constant, immediate
from stallwatch_engine.bench.plan import Plan
from stallwatch_engine.bench.prompt import Prompt
from stallwatch_engine.bench.result import Outcome
from stallwatch_engine.bench.run import Options, run
from stallwatch_engine.bench.target import Target, Timeouts
from stallwatch_engine.bench.timeouts import TimeoutKind

pytestmark = [pytest.mark.slow, pytest.mark.process]
LIMITS = Timeouts(total=20.0)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))) as api:
        yield f"http://127.0.0.1:{api.port}/v1"


def plan(*texts, arrivals=None, expect=None, concurrency=8) -> Plan:
    prompts = tuple(Prompt(text, 64, expect) for text in texts)
    return Plan(prompts, arrivals or immediate(len(texts)), concurrency)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_answers_are_complete_and_counted(url, endpoint, stream):
    """Every text arrives whole, with the server's own token counts, streamed or not."""
    target = Target(url, endpoint=endpoint, stream=stream, extra={"temperature": 0.0})
    report = run(plan(*["echo:hello"] * 12, expect="hello"), target, Options(LIMITS))

    assert report.passed, [result.error for result in report.results]
    assert report.summary.accuracy == 1.0
    assert {result.output_tokens for result in report.results} == {5}
    assert len({result.text_sha256 for result in report.results}) == 1
    assert (report.results[0].ttft_s is not None) == stream


@pytest.mark.parametrize("stream", [True, False])
def test_a_stall_declared_by_the_engine_stops_a_run_with_arrivals_to_come(url, stream):
    """engine_stalled, as a 503 or in a stream, is a structural timeout: the run ends there."""
    texts = ["echo:a", "fail:stalled", *["echo:b"] * 40]
    target = Target(url, "tiny", stream=stream)
    work = plan(*texts, arrivals=constant(len(texts), 5.0), concurrency=1)
    report = run(work, target, Options(LIMITS, fail_fast=True))

    assert report.exit_code == 124
    assert report.results[0].outcome is Outcome.COMPLETED
    assert report.results[1].timeout is TimeoutKind.ENGINE_STALLED
    assert {result.outcome for result in report.results[2:]} == {Outcome.CANCELLED}
    assert report.summary.duration_s < 5


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_of_the_server_is_a_timeout(url, stream):
    """The engine's own request timeout, a 504 or an event in the stream, is marked as one."""
    target = Target(url, "tiny", stream=stream, extra={"timeout": 0.3})
    report = run(plan("hang:abc"), target, Options(LIMITS))

    assert report.results[0].timed_out
    assert report.results[0].timeout in (TimeoutKind.SERVER_504, TimeoutKind.SERVER_DEADLINE)
    assert report.exit_code == 1


def test_a_request_it_refuses_is_an_error(url):
    """A parameter that the engine does not have is a 400: an error, no timeout."""
    report = run(plan("echo:a"), Target(url, "tiny", extra={"nonsense": 1}), Options(LIMITS))
    assert (report.results[0].outcome, report.results[0].status) == (Outcome.ERROR, 400)
    assert "nonsense" in report.results[0].error
