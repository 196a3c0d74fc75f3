"""From a phase over its limit to a new incarnation, again and again under one daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from daemon_helpers import Daemon, boards, daemon, gone, place

pytestmark = [pytest.mark.process, pytest.mark.slow]

KEYS = (
    "schema", "id", "engine", "incarnation", "kind", "kinds", "confidence", "summary", "culprit",
    "elapsed_s", "limit_s", "action", "detected_at", "rung", "processes", "stacks", "stack_tree",
    "wait_graph", "host", "gpu", "logs", "requests", "timeline",
)  # fmt: skip
CULPRIT = {"process", "role", "rank", "pid", "lane", "phase", "thread", "frame"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """One daemon takes every stall of this file in turn."""
    with place() as path, daemon(path, None, "setsid") as run:
        yield run


class Round:
    """One stall: an engine that is READY before, a report, a new READY after."""

    def __init__(self, run: Daemon) -> None:
        run.hold_again()
        view = run.wait_ready()
        self.run = run
        self.before = view["incarnation"]
        self.members = run.members()
        self.known = {stall["id"] for stall in run.stalls()}

    def report(self) -> dict:
        """The new report, complete: after the new incarnation is READY."""
        found = self.run.wait_stall(self.known)
        self.run.wait_ready(self.before + 1)
        return self.run.report(found["id"])


@pytest.fixture
def stall(shared) -> Round:
    return Round(shared)


def test_a_stall_is_proved_told_ended_and_the_engine_serves_again(stall):
    """SUSPECT, STALLED, FAILED, BACKOFF, STARTING, READY; the report has every key of the contract."""
    run = stall.run
    mark = run.events()[-1]["id"]
    run.order("worker", "stall")
    report = stall.report()
    assert tuple(report) == KEYS
    assert set(report["culprit"]) == CULPRIT
    assert report["culprit"]["lane"] == "worker:0/model"
    assert report["culprit"]["phase"] == "execute_model"
    assert "wait_released" in report["culprit"]["frame"]
    assert report["engine"] == run.name
    assert report["incarnation"] == stall.before
    assert report["action"] == "restart"
    assert report["rung"] in ("py-spy", "py-spy-native")
    assert any("tree gone" in row["text"] for row in report["timeline"])
    seen = [e["data"]["state"] for e in run.events() if e["id"] > mark and e["type"] == "state"]
    assert seen == ["suspect", "stalled", "failed", "backoff", "starting", "ready"]


def test_what_waits_is_told_the_failure_and_everything_agrees_on_it(stall):
    """The engine reads the id from its board; ledger, events and metrics name the same stall."""
    run = stall.run
    restarts = run.metric("stallwatch_restarts_total")
    run.order("worker", "stall")
    report = stall.report()
    line = f"FAILURE {report['id']} {report['kind']} worker:0/model"
    run.wait(lambda: line in run.log(), "the FAILURE in the engine's own words")
    assert run.engine()["last_stall"] == report["id"]
    assert run.stalls()[0]["id"] == report["id"]
    assert any(e["type"] == "stall" and e["data"]["stall"] == report["id"] for e in run.events())
    run.wait(
        lambda: run.metric("stallwatch_stalls_total") == len(run.stalls()),
        "metrics and ledger agree",
    )
    found = run.metric("stallwatch_detection_latency_seconds_count")
    assert found == run.metric("stallwatch_stalls_total")
    run.wait(lambda: run.metric("stallwatch_restarts_total") == restarts + 1, "the restart counted")
    kind = f'kind="{report["kind"]}"'
    assert run.metric(f'stallwatch_stalls_total{{engine="{run.name}",{kind}}}') >= 1


def test_a_stall_is_confirmed_soon_after_its_limit(shared):
    """The best of three is within 250 ms of the limit; no one of them needs a second limit."""
    late = []
    for _ in range(3):
        stall = Round(shared)
        shared.order("worker", "stall")
        report = stall.report()
        assert report["elapsed_s"] <= 2 * report["limit_s"] + 1.0
        late.append(report["elapsed_s"] - report["limit_s"])
        if late[-1] <= 0.25:
            return
    raise AssertionError(f"confirmed late each time: {late}")


def test_nothing_of_the_old_incarnation_is_left(stall):
    """Its processes are dead, its board and temporary folder removed, the daemon's files closed."""
    run = stall.run
    files = len(os.listdir(f"/proc/{run.process.pid}/fd"))
    run.order("worker", "stall")
    stall.report()
    assert gone(stall.members)
    assert len(boards(run.folder)) == 1
    assert len(os.listdir(run.folder / "tmp")) == 1
    # Keep-alive connections and tools come and go; a leak of each round would be more than this.
    run.wait(
        lambda: len(os.listdir(f"/proc/{run.process.pid}/fd")) <= files + 1, "descriptors closed"
    )


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("thread", "THREAD_DIED"),
        ("gil", "GIL_HELD"),
        ("spin", "CPU_RUNAWAY"),
        ("exit0", "CHILD_DIED"),
        ("exit7", "CHILD_DIED"),
    ],
)
def test_a_worker_is_named_with_the_kind_of_its_end(stall, word, kind):
    """What the worker does to itself is told by kind and culprit, and the engine comes back."""
    stall.run.order("worker", word)
    report = stall.report()
    assert report["kind"] == kind, report["summary"]
    assert report["culprit"]["process"] == "worker:0"


@pytest.mark.parametrize("status", [0, 3])
def test_a_root_that_ends_unasked_takes_its_children_along(stall, status):
    """Whatever the status, it is CHILD_DIED of the root, and the worker that lived on is ended."""
    stall.run.order("api", f"exit{status}")
    report = stall.report()
    assert report["kind"] == "CHILD_DIED"
    assert report["culprit"]["process"] == "api:0"
    assert f"exit status {status}" in report["summary"]
    assert gone(stall.members)


def test_a_stopped_idle_worker_is_found_within_seconds(stall):
    """SIGSTOP on a worker that has nothing to do is PROCESS_STOPPED at once, not when work comes."""
    os.kill(stall.run.pid("worker:0"), signal.SIGSTOP)
    report = stall.report()
    assert report["kind"] == "PROCESS_STOPPED"
    assert report["culprit"]["process"] == "worker:0"
    assert report["elapsed_s"] <= 1.5


def test_a_pause_past_its_lease_is_an_alert_and_nothing_more(stall):
    """PAUSED_TOO_LONG is reported; no client is failed, nothing is killed, the engine goes on."""
    run = stall.run
    run.order("worker", "pause")
    report = run.wait_stall(stall.known)
    assert report["kind"] == "PAUSED_TOO_LONG"
    assert report["action"] == "alert"
    assert "trainer" in str(report)
    view = run.wait_ready()
    assert view["incarnation"] == stall.before
    assert report["id"] not in run.log().replace(f'"stall": "{report["id"]}"', "")
    run.release()
    work = next(lane["work"] for lane in view["lanes"] if lane["address"] == "worker:0/model")
    run.wait(lambda: any(x["work"] > work for x in run.engine()["lanes"]), "the engine works again")


def test_the_same_stall_again_is_told_as_such(stall):
    """Kind and culprit twice within a day: the second report names the first, and a metric counts it."""
    run = stall.run
    run.order("worker", "gil")
    first = stall.report()
    again = Round(run)
    run.order("worker", "gil")
    second = again.report()
    assert first["kind"] == second["kind"] == "GIL_HELD"
    assert any(f"culprit as {first['id']}" in row["text"] for row in second["timeline"])
    assert run.metric("stallwatch_stalls_repeated_total") >= 1


def test_live_stacks_logs_and_events_are_there_for_the_asking(stall):
    """`stacks`, `logs`, `events` and `describe` answer over the socket while the engine runs."""
    run = stall.run
    stacks = run.cli("stacks", run.name)
    assert stacks.returncode == 0, stacks.stderr
    assert "daemon_engines.py" in stacks.stdout
    run.order("api", "print3")
    run.wait(lambda: "x" * 200 in run.cli("logs", run.name).stdout, "the engine's output in logs")
    events = run.cli("events", run.name)
    assert f"incarnation {stall.before} started" in events.stdout
    described = run.cli("describe", run.name)
    assert "worker:0/model" in described.stdout


def test_wait_tells_ready_and_stalled_by_its_exit_code(stall):
    """`wait`: 0 for ready, 124 for no stall in time, 0 once there is one."""
    run = stall.run
    assert run.cli("wait", run.name, "--for", "ready", "--timeout", "20s").returncode == 0
    assert run.cli("wait", run.name, "--for", "stalled", "--timeout", "300ms").returncode == 124
    run.order("worker", "stall")
    assert run.cli("wait", run.name, "--for", "stalled", "--timeout", "20s").returncode == 0
    stall.report()
    assert run.cli("wait", "nobody", "--timeout", "1s").returncode == 4


def test_an_operators_pause_raises_the_limits_until_it_ends(stall):
    """While the lease lasts a late phase is no stall; when it is over, the same phase is one."""
    run = stall.run
    assert run.cli("pause", run.name, "--for", "4s").returncode == 0
    run.wait(lambda: run.said("rest for 4 s"), "the pause in the events")
    run.order("worker", "stall")
    report = stall.report()
    assert run.said("the pause is over")
    assert report["elapsed_s"] > 2.5


def test_a_restart_that_is_asked_for_is_no_failure(stall):
    """`restart` stops in order and starts again; no stall is written."""
    run = stall.run
    assert run.cli("restart", run.name).returncode == 0
    run.wait_ready(stall.before + 1)
    assert gone(stall.members)
    assert {s["id"] for s in run.stalls()} == stall.known


def test_a_list_of_stalls_is_short_and_a_report_is_whole(stall):
    """/v1/stalls holds summaries only; nobody waited, and the report does not claim an answer."""
    run = stall.run
    run.order("worker", "exit1")
    report = stall.report()
    (newest,) = [s for s in run.stalls() if s["id"] == report["id"]]
    assert "stacks" not in newest
    assert newest["culprit"] == "worker:0/model"
    assert run.cli("show", report["id"][-8:]).returncode == 0
    texts = [row["text"] for row in report["timeline"]]
    assert "no client was waiting" in texts
    assert not any("answered" in text for text in texts)


def test_an_alert_does_not_keep_a_stall_from_its_evidence(stall):
    """A pause over its lease, and right after it a real stall: the second one has its stacks too."""
    run = stall.run
    run.order("worker", "pause")
    alert = run.wait_stall(stall.known)
    run.order("worker", "nothing")
    run.release()
    run.wait(lambda: not (run.folder / "worker.order").exists(), "the pause is over")
    run.hold_again()
    run.order("worker", "stall")
    stall.known.add(alert["id"])
    report = stall.report()
    problems = [p["problems"] for p in report["processes"]]
    assert "earlier collection" not in str(problems)
    assert report["rung"] != "none", (report["summary"], problems)
