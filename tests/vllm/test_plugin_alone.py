"""The plugin in a real vLLM, without the daemon: lanes, faults, and the FAILURE that clients get."""

from __future__ import annotations

import json
import time

import pytest
import running as vllm_running

from stallwatch.heartbeat.failure import Failure

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_running.available(), reason="no vLLM environment: make venv-vllm"),
]
FAILURE = Failure(
    *("st-20261130T031502Z-9f2c41aa", "test", 1, "DEVICE_WAIT", "worker:0/main", "execute_model"),
    *(3.0, 2.0, "restart"),
)
ANSWERED_S = 2.0


@pytest.fixture
def folder(tmp_path):
    """A run folder beside which the checkpoint lies."""
    made = tmp_path / "run"
    made.mkdir()
    return made


def work(image, address: str) -> int:
    return image.lane(address).work


def test_lanes_move_with_work_and_a_blocked_worker_is_failed_to_every_client(folder):
    """From the first step to the FAILURE of three clients, on one running vLLM."""
    with vllm_running.running(folder) as vllm:
        idle = vllm.wait_ready()
        assert {lane.address for lane in idle.lanes} >= {
            "api:0/loop",
            "core:0/main",
            "core:0/input",
            "core:0/output",
            "worker:0/main",
        }
        assert vllm.request(path="/v1/chat/completions").wait(60).status == 200
        served = vllm.until(
            lambda image: (
                image.lane("core:0/main").phase.name == "idle"
                and all(process.pending == 0 for process in image.processes)
            ),
            seconds=10,
        )
        assert work(served, "core:0/main") >= 16
        assert work(served, "worker:0/main") >= work(served, "core:0/main")

        stream, whole = vllm.request(stream=True, tokens=3000), vllm.request(tokens=3000)
        assert stream.first.wait(30)
        vllm.until(lambda image: image.processes[0].pending == 2, seconds=10)
        vllm.faults.arm("worker/execute_model", "block_in_c")
        done = vllm.faults.wait_done()
        stuck = vllm.until(
            lambda image: (
                image.lane("core:0/main").phase.name == "wait_worker"
                and image.lane("worker:0/main").phase.name == "execute_model"
            ),
            seconds=10,
        )
        assert stuck.lane("worker:0/main").pid == done["pid"]
        assert stuck.lane("core:0/main").wait_on == "worker:*/main"
        assert [frame.name for frame in stuck.lane("core:0/main").stack] == ["step", "wait_worker"]
        assert vllm.get("/health") == 200  # what vLLM itself says

        declared = time.monotonic_ns()
        vllm.control.declare(FAILURE)
        for reply in (stream.wait(10), whole.wait(10)):
            assert (reply.answered_ns - declared) / 1e9 < ANSWERED_S
        assert whole.status == 503
        assert whole.headers["x-should-retry"] == "false"
        last = json.loads(stream.events()[-1])
        for error in (json.loads(whole.body)["error"], last["error"]):
            assert (error["failure_id"], error["kind"]) == (FAILURE.id, FAILURE.kind)
            assert error["type"] == error["code"] == "engine_stalled"
        assert stream.status == 200
        assert stream.broken
        refused = vllm.request().wait(10)
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert json.loads(refused.body)["error"]["failure_id"] == FAILURE.id
        assert vllm.get("/health") == 503
        assert vllm.get("/metrics") == 200
        vllm.until(
            lambda image: next(p for p in image.processes if p.role == "api").pending == 0,
            seconds=5,
        )


@pytest.mark.parametrize("fault", ["event_never", "event_raises"])
def test_an_output_copy_that_does_not_end_becomes_the_failure_of_the_worker(folder, fault):
    """A late copy is waited for; a lost one ends in vLLM's own FAILURE, which the client gets."""
    options = {"asynchronous": True, "environment": {"VLLM_ENGINE_ITERATION_TIMEOUT_S": "2"}}
    with vllm_running.running(folder, **options) as vllm:
        vllm.wait_ready()
        vllm.faults.arm("worker/output", "event_late")
        late = vllm.request(tokens=8)
        vllm.faults.wait_done()
        assert late.wait(60).status == 200
        assert vllm.look().lane("worker:0/output") is not None

        vllm.faults.arm("worker/output", fault)
        request = vllm.request(tokens=3000)
        done = vllm.faults.wait_done()
        if fault == "event_never":
            vllm.until(
                lambda image: image.lane("worker:0/output").phase.name == "out_copy", seconds=2
            )
        request.wait(20)
        answered_s = (request.answered_ns - done["at_ns"]) / 1e9
        assert request.status >= 500 or request.broken
        assert answered_s < (6 if fault == "event_never" else 4)
        said = vllm.log_path.read_text(errors="replace")
        expected = "did not complete within 2 s" if fault == "event_never" else "the device is lost"
        assert expected in said
        assert "Worker failed with error" in said
