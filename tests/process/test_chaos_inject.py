"""Faults into a running engine, through the command line and a real daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import Daemon, daemon, place, request
from stallwatch import procfs

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

ENGINE = """
import os, subprocess, sys, threading, time
from stallwatch import heartbeat

def worker():
    board = heartbeat.attach(role="worker", rank=0)
    def aux():
        lane = board.lane("aux")
        while True:
            lane.idle()
            time.sleep(0.05)
    threading.Thread(target=aux, daemon=True).start()
    lane = board.lane("model")
    mark = lane.marker("execute_model", "step")
    board.ready()
    step = 0
    while True:
        step += 1
        mark(step)
        lane.progress(1)
        lane.idle()
        time.sleep(0.005)

def main():
    board = heartbeat.attach(role="api", rank=0)
    lane = board.lane("loop")
    child = subprocess.Popen([sys.executable, sys.argv[0], "worker"])
    board.pending(1)
    board.ready()
    while True:
        lane.enter("loop")
        if board.failure() is not None:
            board.pending(0)
        time.sleep(0.02)

worker() if sys.argv[1:] == ["worker"] else main()
"""
RIGHT = {
    "stop": "PROCESS_STOPPED",
    "kill": "CHILD_DIED",
    "gil": "GIL_HELD",
    "spin": "CPU_RUNAWAY",
    "block": "DEVICE_WAIT",
    "fill-pipe": "OUTPUT_BLOCKED",
}
ROOT = str(Path(__file__).resolve().parents[2] / "supervisor")


def engine(folder: Path, **more: object) -> dict[str, object]:
    path = folder / "engine.py"
    path.write_text(ENGINE)
    return {
        "command": [sys.executable, str(path)],
        "env": {"PYTHONPATH": ROOT},
        "port": None,
        "plugin": "off",
        "drain": "100ms",
        "stop_grace": "500ms",
        "limits": {"default": "1500ms", "loop": "1500ms", "compile": "1500ms", "start": "60s"},
        **more,
    }


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    """One daemon that allows chaos; each fault kills the engine, the next one hits the next start."""
    with place() as folder, daemon(folder, engine(folder), supervisor={"chaos": True}) as found:
        yield found


def inject(running: Daemon, *words: str) -> tuple[int, dict[str, object], str]:
    done = running.cli("chaos", "inject", running.name, *words, "-o", "json", seconds=120)
    card = json.loads(done.stdout)["items"][0] if done.stdout else {}
    return done.returncode, card, done.stderr


@pytest.fixture
def ready(running) -> Daemon:
    """The daemon with its engine READY, whatever the test before did to it."""

    def there() -> bool:
        view = running.engine()
        return view.get("state") == "ready" and len(view["processes"]) == 2

    running.wait(there, "READY with two processes")
    return running


@pytest.mark.parametrize("fault", list(RIGHT))
def test_a_fault_is_found_and_graded(ready, fault):
    """Kind and culprit are those of the fault, the card says right, and it exits 0."""
    code, card, err = inject(ready, fault, "--seed", "3", "--on", "worker:0")
    assert card.get("kind") == RIGHT[fault], (card, err)
    assert card["grade"] == "right", card
    assert code == 0
    assert card["wrong"] == []
    assert str(card["culprit"]).startswith("worker:0")
    assert card["latency_s"] is not None
    assert ready.report(str(card["report"]))["kind"] == RIGHT[fault]


def test_a_blocked_event_loop_is_named_as_such(ready):
    """`block` on the api's loop, the worker behind it at work: FRONTEND_BLOCKED of that lane."""
    code, card, err = inject(ready, "block", "--on", "api:0/loop")
    assert (card.get("kind"), card.get("culprit")) == ("FRONTEND_BLOCKED", "api:0/loop"), (
        card,
        err,
    )
    assert (card["grade"], card["expected"], code) == ("right", ["FRONTEND_BLOCKED"], 0)


def test_slowness_is_found_as_such():
    """`slow`: every mark sleeps; windows of two seconds tell DEGRADED, and nothing is killed."""
    with place() as folder:
        more = {"limits": {"default": "9s", "compile": "9s", "start": "60s", "degraded": "2s"}}
        with daemon(folder, engine(folder, **more), supervisor={"chaos": True}) as found:
            found.wait(lambda: settled(found, 500) and aged(found, 11), "a usual pace", seconds=60)
            code, card, err = inject(found, "slow", "--on", "worker:0/model")
            assert (card.get("kind"), code) == ("DEGRADED", 0), (card, err)
            assert card["action"] == "alert"
            assert found.engine()["incarnation"] == 1


def aged(running: Daemon, seconds: float) -> bool:
    """READY for that long."""
    view = running.engine()
    return view.get("state") == "ready" and view["age_s"] > seconds


def settled(running: Daemon, work: int) -> bool:
    """The model's lane has done that much."""
    return any(x["work"] > work for x in running.engine().get("lanes", ()))


def test_leaked_files_are_taken_and_given_back(ready):
    """`leak-fd`: the process is at its limit of open files, nobody is accused, and it ends."""
    pid = ready.pid("worker:0")
    with Path(f"/proc/{pid}/limits").open() as file:
        (row,) = [r for r in file if r.startswith("Max open files")]
    code, card, err = inject(ready, "leak-fd", "--on", "worker:0", "--for", "3s", "--wait", "1s")
    assert (code, card.get("grade")) == (0, "right"), (card, err)
    taken = len(os.listdir(f"/proc/{pid}/fd"))
    assert taken >= int(row.split()[3]) - 2
    ready.wait(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 100, "the files given back")
    assert ready.pid("worker:0") == pid


def test_a_fault_ends_by_itself(ready):
    """A stop shorter than anything's limit is over before it is found: wrong, and the process runs."""
    pid = ready.pid("worker:0")
    code, card, _ = inject(ready, "stop", "--on", "worker:0", "--for", "100ms", "--wait", "1s")
    assert (code, card["grade"], card["wrong"]) == (3, "wrong", ["nothing was found"])
    assert procfs.stat(pid).state not in "Tt"
    assert ready.pid("worker:0") == pid


def test_an_idle_lane_takes_no_order(ready):
    """A lane that enters no working phase: refused in a sentence, and the order is taken back."""
    code, card, err = inject(ready, "block", "--on", "worker:0/aux")
    assert (code, card) == (1, {})
    assert "worker:0/aux entered no working phase" in err
    ready.wait(lambda: settled(ready, 10), "it works on")
    assert ready.engine()["state"] == "ready"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gil", "--on", "worker:7"], "no lane 'worker:7'"),
        (["kill", "--on", "pid:1"], "no process 'pid:1'"),
        (["spin", "--on", "worker:0/none"], "known: api:0/loop, worker:0/aux, worker:0/model"),
    ],
)
def test_an_unknown_target_is_refused_with_the_known_ones(ready, words, says):
    """Nothing is injected into anybody else, what there is gets listed, and the exit code is that
    of an engine that is not there.
    """
    code, card, err = inject(ready, *words)
    assert (code, card) == (4, {})
    assert says in err


def test_an_unknown_fault_is_a_usage_error(ready):
    """Exit 2, with the faults there are."""
    code, _, err = inject(ready, "melt")
    assert code == 2
    assert "fill-pipe" in err


def test_it_is_in_the_events(ready):
    """Who did what to whom is recorded before it happens."""
    inject(ready, "stop", "--on", "worker:0", "--for", "50ms", "--wait", "100ms")
    (said, *_) = [e for e in reversed(ready.events()) if e["type"] == "chaos"]
    assert said["message"].startswith("chaos: stop into worker:0, asked for by uid")
    assert said["data"]["seed"] == 0


def test_loopback_without_a_token_may_not(ready):
    """The mutation rights of the control socket: a POST over TCP without the token is refused."""
    status, body = request("POST", ready.control, f"/v1/engines/{ready.name}:chaos")
    assert status == 401
    assert b"token" in body


def test_it_is_off_unless_the_configuration_says_so():
    """Without `chaos = true`: refused, no hook in the engine, and the variable is not passed on."""
    with place() as folder:
        env = {"PYTHONPATH": ROOT, "STALLWATCH_CHAOS": str(folder)}
        with daemon(folder, engine(folder, env=env), env={"STALLWATCH_CHAOS": "/x"}) as found:
            found.wait(lambda: settled(found, 1), "steps")
            for fault in ("stop", "gil"):
                code, card, err = inject(found, fault)
                assert (code, card) == (1, {})
                assert "chaos is off in this daemon" in err
            pid = found.pid("worker:0")
            assert b"STALLWATCH_CHAOS" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert not [n for n in os.listdir(folder) if n.endswith(".armed")]


def test_an_engine_without_heartbeats_takes_signals_only():
    """An uninstrumented engine: stop and kill work, the rest is refused with the reason."""
    with place() as folder:
        more = {
            "command": [sys.executable, "-c", "import time; time.sleep(600)"],
            "port": None,
            "plugin": "off",
        }
        with daemon(folder, more, supervisor={"chaos": True}) as found:
            found.wait_state("ready")
            code, _, err = inject(found, "gil")
            assert code == 1
            assert "only stop and kill can be injected" in err
            code, card, _ = inject(found, "kill")
            assert (code, card["kind"], card["grade"]) == (0, "CHILD_DIED", "right")
