"""The fake sampler keeps the promises that the real one keeps."""

from __future__ import annotations

import pytest

from evidence_targets import process, target_of
from stallwatch.clock import SystemClock
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.model import Rung, Target
from stallwatch.evidence.sampler import StackSampler
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.testing.sampler import FakeSampler

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(params=["real", "fake"])
def sampler(request) -> StackSampler:
    if request.param == "real":
        return Ladder(SystemClock(), ToolRegistry())
    return FakeSampler(gone={1 << 22})


def test_first_answers_for_every_target(sampler):
    """Each target, dead or alive, has an entry under its pid with its own target and a rung."""
    with process("idle") as child:
        alive, dead = target_of(child), Target((1 << 22), 1, "core", 0)
        found = sampler.first([alive, dead], deadline_s=5)
        assert set(found) == {alive.pid, dead.pid}
        assert found[alive.pid].target == alive
        assert found[alive.pid].rung is Rung.PYSPY
        assert found[alive.pid].facts["state"] == "S"
        assert "MainThread" in {thread.name for thread in found[alive.pid].threads}
        assert found[dead.pid].rung is Rung.NONE
        assert found[dead.pid].problems == ("the process is gone",)


@pytest.mark.parametrize(("native", "samples"), [(True, 1), (False, 2), (False, 0)])
def test_more_is_native_then_samples(sampler, native, samples):
    """`more` returns the native set first when asked for, then that many samples."""
    with process("idle") as child:
        found = target_of(child)
        first = sampler.first([found], deadline_s=5)
        sets = sampler.more([found], first, native=native, samples=samples, gap_s=0.02)
        rungs = [s[found.pid].rung for s in sets]
        assert rungs == [Rung.NATIVE] * native + [Rung.PYSPY] * samples


def test_no_targets_no_evidence(sampler):
    """Nothing to look at is no error."""
    assert sampler.first([]) == {}
    assert sampler.more([], {}, samples=0) == []


def test_without_a_device_the_answer_says_so(sampler, monkeypatch):
    """No device tool: available is False and why is a sentence."""
    monkeypatch.setenv("PATH", "/nowhere")
    answer = sampler.gpu(deadline_s=2)
    assert answer == {"available": False, "why": "no device tool is installed"}
