"""What enforce, exit_when, limits of a start and the budget make of the same trouble."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemon_helpers import ENGINES, Daemon, daemon, gone, place, until
from stallwatch.evidence.deeds import sentences

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def test_observing_reports_kills_nothing_and_sees_the_recovery(folder):
    """observe: a report and STALLED; when it moves again, READY, in the same processes."""
    with daemon(folder, {"enforce": "observe"}) as run:
        run.wait_ready()
        members = run.members()
        run.order("worker", "stall")
        report = run.wait_stall()
        assert report["action"] == "observe"
        run.wait_state("stalled")
        assert run.get("/healthz")[0] == 503
        run.release()
        view = run.wait_ready()
        assert view["incarnation"] == 1
        assert run.members() == members
        assert "FAILURE" not in run.log()
        run.wait(
            lambda: "it moves again" in json.dumps(run.report(report["id"])), "it in the report"
        )
        run.wait(
            lambda: not [s for s in sentences(run.report(report["id"])) if "being collected" in s],
            "the report to say that its evidence is whole",
        )
        run.hold_again()
        run.order("worker", "stall")
        assert run.wait_stall({report["id"]})["id"] != report["id"]
        run.release()
        run.wait_ready()


def test_observing_an_engine_that_ends_is_stopped_without_a_restart(folder):
    """observe: an exit nobody asked for is reported; what was alive of it is left alone."""
    with daemon(folder, {"enforce": "observe"}) as run:
        run.wait_ready()
        worker = run.pid("worker:0")
        run.order("api", "exit0")
        assert run.wait_stall()["kind"] == "CHILD_DIED"
        assert not gone({worker})
        assert run.engine()["incarnation"] == 1


def test_failing_ends_the_engine_and_the_daemon_with_1(folder):
    """fail: clients are told, the tree is killed, no restart; exit_when all makes it status 1."""
    with daemon(folder, {"enforce": "fail"}, supervisor={"exit_when": "all"}) as run:
        run.wait_ready()
        members = run.members()
        run.order("worker", "stall")
        assert run.wait_exit() == 1
        assert gone(members)
        assert "FAILURE st-" in run.log()
        assert '"action": "fail"' in run.log()


def test_failing_without_exit_when_leaves_the_daemon_up(folder):
    """fail in a file: FAILED is a state of the engine; the daemon answers and a restart helps."""
    with daemon(folder, {"enforce": "fail"}) as run:
        run.wait_ready()
        run.order("worker", "stall")
        run.wait_state("failed")
        run.wait(lambda: not run.members(), "the tree is gone")
        assert run.get("/healthz")[0] == 503
        assert run.get("/livez")[0] == 200
        assert run.cli("wait", run.name, "--timeout", "20s").returncode == 3
        assert run.cli("restart", run.name).returncode == 0
        assert run.wait_ready(2)["incarnation"] == 2


def test_a_start_phase_without_side_progress_is_never_ready(folder):
    """A load that moves nothing is NEVER_READY, with the phase; the next start finds it mended."""
    settings = {
        "command": [sys.executable, ENGINES, "loader", str(folder)],
        "port": None,
        "limits": {"start": "1500ms", "start_silence": "1s"},
    }
    with daemon(folder, settings) as run:
        report = run.wait_stall()
        assert report["kind"] == "NEVER_READY"
        assert report["culprit"]["phase"] == "load_weights"
        run.release()
        run.wait_ready(2)


def test_an_engine_that_never_listens_is_never_ready(folder):
    """Nothing attached, nothing on the port: the start limit ends it, and the daemon with 3."""
    settings = {
        "command": [sys.executable, ENGINES, "sleeper", str(folder)],
        "limits": {"start": "700ms"},
        "restart": {"backoff": ["10ms"], "budget": 1},
    }
    with daemon(folder, settings, supervisor={"exit_when": "all"}) as run:
        assert run.wait_exit(40) == 3
        assert run.log().count('"kind": "NEVER_READY"') == 2
        assert "1 restarts within" in run.log()


def test_an_engine_deaf_to_sigterm_is_reported_and_killed_after_its_grace(folder):
    """SHUTDOWN_HANG with stacks in the ledger, killed soon after the grace, exit status 0."""
    with daemon(folder, {"stop_grace": "1s"}, "deaf") as run:
        run.wait_ready()
        members = run.members()
        assert run.stop() == 0
        assert gone(members)
        assert '"kind": "SHUTDOWN_HANG"' in run.log()
        # read from the ledger of the next daemon: it was written before the first one ended
        run.start()
        run.wait_ready(2)
        (stall,) = run.stalls()
        report = run.report(stall["id"])
        assert report["kind"] == "SHUTDOWN_HANG"
        assert "daemon_engines.py" in json.dumps(report["stacks"])
        run.process.send_signal(signal.SIGTERM)
        run.wait(lambda: run.said("SIGTERM"), "the signal was read")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_exit() == 0


def test_a_second_signal_kills_and_the_log_says_so(folder):
    """Who was killed because a signal came twice did not stop by itself; both are said."""
    with daemon(folder, {"stop_grace": "60s"}, "deaf") as run:
        run.wait_ready()
        members = run.members()
        run.process.send_signal(signal.SIGTERM)
        run.wait(lambda: run.said("SIGTERM: stopping"), "the first signal was read")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_exit(20) == 0
        assert gone(members)
        words = f"{run.name} may finish requests and end within 1m5s (drain, then stop_grace)"
        assert words in run.log()
        assert "a second Ctrl-C or SIGTERM kills at once" in run.log()
        assert "SIGTERM while stopping: killing what has not ended" in run.log()
        assert "it was killed at once: a signal asked for it" in run.log()
        assert "it stopped by itself" not in run.log()


def test_half_of_a_limit_is_said_when_it_is_over(folder):
    """A stopped process is named at the first look, and not as if half of its limit were over."""
    with daemon(folder, {"limits": {"default": "1600ms", "loop": "1600ms"}}) as run:
        run.wait_ready()
        os.kill(run.pid("worker:0"), signal.SIGSTOP)
        assert run.wait_stall()["kind"] == "PROCESS_STOPPED"
        run.wait_ready(2)
        log = run.log()
    assert "seen: worker:0 in process-stopped" in log
    for spent, limit in re.findall(
        r"half of a limit is over: .*? for ([\d.]+) s of ([\d.]+) s", log
    ):
        assert 2 * float(spent) + 0.1 >= float(limit)


def exhaust(run: Daemon) -> dict:
    """Two stalls under a budget of one."""
    run.wait_ready()
    run.order("worker", "exit1")
    run.wait_ready(2)
    run.order("worker", "exit1")
    return run.wait_state("exhausted")


def test_a_spent_budget_is_a_state_that_an_operator_resets(folder):
    """EXHAUSTED: 503 on /readyz and /healthz, /livez fine; `restart` forgives and it runs again."""
    with daemon(folder, {"restart": {"budget": 1, "backoff": ["10ms"]}}) as run:
        view = exhaust(run)
        assert view["restarts_in_window"] == 1
        assert "the budget is 1" in view["exhausted_reason"]
        codes = {path: run.get(path)[0] for path in ("/readyz", "/healthz", "/livez")}
        assert codes == {"/readyz": 503, "/healthz": 503, "/livez": 200}
        assert run.cli("wait", run.name, "--timeout", "20s").returncode == 3
        assert run.cli("restart", run.name).returncode == 0
        assert run.wait_ready(3)["restarts_in_window"] == 0
        assert run.get("/readyz")[0] == 200


def test_a_spent_budget_outlives_the_daemon(folder):
    """kill -9 of the daemon and a new start are no way round the budget, nor round a count."""
    with daemon(folder, {"restart": {"budget": 1, "backoff": ["10ms"]}}) as run:
        run.wait_ready()
        run.order("worker", "exit1")
        run.wait_ready(2)
        run.process.kill()
        run.process.wait(10)
        run.start()
        view = run.wait_ready(3)
        assert view["restarts_in_window"] == 1
        run.order("worker", "exit1")
        run.wait_state("exhausted")
        run.process.kill()
        run.process.wait(10)
        run.start()
        run.wait_state("exhausted")
        assert run.cli("restart", run.name).returncode == 0
        run.wait_ready(4)


def test_a_back_off_is_seen_and_outlives_the_daemon(folder):
    """The time that is left shows in the status, also after a kill -9 of the daemon."""
    with daemon(folder, {"restart": {"budget": 5, "backoff": ["1h"]}}) as run:
        run.wait_ready()
        run.order("worker", "exit1")
        view = run.wait_state("backoff")
        assert 200 < view["backoff_s"] <= 300
        assert run.get("/healthz") == (200, b"restarting\n")
        assert "backoff" in run.cli("status").stdout
        run.process.kill()
        run.process.wait(10)
        run.start()
        assert run.wait_state("backoff")["backoff_s"] > 200
        assert run.cli("restart", run.name).returncode == 0
        run.wait_ready(2)


def test_one_engine_stalls_and_the_other_is_untouched(folder):
    """Two engines in one daemon: the one that stalls restarts, the other keeps pid and incarnation."""
    (folder / "other").mkdir()
    other = {
        "command": [sys.executable, ENGINES, "api", str(folder / "other"), "0"],
        "limits": {"default": "1s"},
    }
    name = f"{folder.name.replace('_', '-').lower()}-other"
    with daemon(folder, more={name: other}) as run:
        run.wait_ready()
        before = run.wait_ready(name=name)
        run.order("worker", "stall")
        report = run.wait_stall()
        assert report["engine"] == run.name
        run.wait_ready(2)
        after = run.engine(name)
        assert after["incarnation"] == 1
        assert after["root_pid"] == before["root_pid"]
        assert after["state"] == "ready"
        assert {s["engine"] for s in run.stalls()} == {run.name}
        (folder / "other" / "api.order").write_text("exit1")
        run.wait_ready(2, name=name)
        assert run.engine()["incarnation"] == 2


def test_after_kill_9_the_next_start_ends_what_was_left(folder):
    """Whatever re-parented, a double-forked setsid grandchild included, is gone; folders too."""
    with daemon(folder, None, "setsid", "orphan") as run:
        run.wait_ready()
        run.wait(lambda: list(folder.glob("sleeper.*")), "the grandchild lives")
        run.wait(lambda: run.engine()["members"] == 3, "the grandchild is known")
        sleeper = int(next(folder.glob("sleeper.*")).suffix[1:])
        old = {*run.members(), sleeper}
        board = next(Path("/dev/shm").glob(f"stallwatch-{run.name}-1-*"))
        temporary = set(os.listdir(folder / "tmp"))
        run.process.kill()
        run.process.wait(10)
        assert psutil.pid_exists(sleeper)
        run.start()
        run.wait_ready(2)
        until(lambda: gone(old), seconds=2.0, what="the old members are gone")
        assert not board.exists()
        assert not temporary & set(os.listdir(folder / "tmp"))
        assert any(e["type"] == "leftover" for e in run.events())
        assert run.stalls() == []


TWO_LANES = """
import os, sys, threading, time
from stallwatch import heartbeat

board = heartbeat.attach(role="worker", rank=0)

def live(name):
    lane = board.lane(name)
    while True:
        lane.enter("execute_model")
        while os.path.exists(os.path.join(sys.argv[1], name + ".hold")):
            time.sleep(0.01)
        lane.progress()
        lane.idle()
        time.sleep(0.01)

threading.Thread(target=live, args=("b",), daemon=True).start()
board.ready()
live("a")
"""


def test_a_stall_confirmed_during_another_case_is_followed_when_that_one_led_to_nothing(folder):
    """Lane b stalls while a's case is at hand; a moves again: b gets a report of its own."""
    (folder / "two.py").write_text(TWO_LANES)
    settings = {
        "command": [sys.executable, str(folder / "two.py"), str(folder)],
        "port": None,
        "enforce": "observe",
    }
    with daemon(folder, settings) as run:
        run.wait_ready()
        (folder / "a.hold").touch()
        first = run.wait_stall()
        assert first["culprit"]["lane"] == "worker:0/a"
        (folder / "b.hold").touch()
        run.wait(lambda: "worker:0/b in execute_model" in run.log(), "the warning about b")
        run.wait(lambda: stuck(run, "worker:0/b"), "b over its limit and confirmed")
        (folder / "a.hold").unlink()

        second = run.wait_stall({first["id"]})

        assert second["culprit"]["lane"] == "worker:0/b"
        (folder / "b.hold").unlink()
        run.wait_ready()


def stuck(run: Daemon, address: str) -> bool:
    """The lane has been over its limit for longer than a confirmation takes."""
    for lane in run.engine().get("lanes", ()):
        if lane["address"] == address:
            return lane["age_s"] > lane["limit_s"] + 0.5
    return False


GOODBYE = """
from stallwatch import heartbeat
import time
board = heartbeat.attach(role="worker", rank=0)
lane = board.lane("main")
lane.enter("work")
board.ready()
time.sleep(0.6)
board.close()
"""


def test_a_root_that_says_goodbye_and_ends_is_down_all_the_same(folder):
    """A goodbye explains a helper's exit, never the engine's own: it is found and restarted."""
    (folder / "bye.py").write_text(GOODBYE)
    settings = {"command": [sys.executable, str(folder / "bye.py")], "port": None}
    with daemon(folder, settings) as run:
        assert run.wait_stall()["kind"] == "CHILD_DIED"
        run.wait_ready(2)


def test_observing_an_engine_that_dies_before_it_is_ready_ends_the_daemon(folder):
    """observe: an engine that never became READY and is gone leaves nothing to observe: status 3."""
    settings = {"command": ["sh", "-c", "sleep 0.2; exit 7"], "port": None, "enforce": "observe"}
    with daemon(folder, settings, supervisor={"exit_when": "all"}) as run:
        assert run.wait_exit() == 3
        assert "exit status 7" in run.log()


def test_a_drained_engine_is_not_given_up(folder):
    """drain promises that a restart starts it again: the daemon stays, and keeps the promise."""
    with daemon(folder, supervisor={"exit_when": "all"}) as run:
        run.wait_ready()
        assert run.cli("drain", run.name).returncode == 0
        run.wait_state("stopped")
        assert run.cli("restart", run.name).returncode == 0
        run.wait_ready(2)


def test_an_engine_without_heartbeats_is_told_so(folder):
    """READY by its port alone: the log and the reason say that only exits and stops can be seen."""
    (folder / "www").mkdir()
    settings = {
        "command": [
            *(sys.executable, "-m", "http.server", "--bind", "127.0.0.1"),
            *("-d", str(folder / "www"), "{port}"),
        ],
    }
    with daemon(folder, settings) as run:
        assert "no heartbeats" in run.wait_ready()["reason"]
        assert '"type": "no-lanes"' in run.log()


def test_status_says_what_ready_waits_for(folder):
    """A worker that forgot board.ready() is named while the engine is starting."""
    (folder / "forgot.py").write_text(GOODBYE.replace("board.ready()", "").replace("0.6", "30"))
    settings = {"command": [sys.executable, str(folder / "forgot.py")], "port": None}
    with daemon(folder, settings) as run:
        run.wait(
            lambda: "board.ready() of worker:0" in run.engine().get("reason", ""), "the reason"
        )


PENDING = """
import signal, sys, time
from stallwatch import heartbeat
board = heartbeat.attach(role="mine", rank=0)
lane = board.lane("main")
board.ready()
board.pending(3)
until = time.monotonic() + 2.0
signal.signal(signal.SIGTERM, lambda *_: sys.exit("cut short" if time.monotonic() < until else 0))
while time.monotonic() < until:
    lane.enter("work"); lane.progress(); time.sleep(0.01)
board.pending(0)
print("all served", flush=True)
time.sleep(60)
"""


def test_a_drain_waits_for_whatever_role_has_work_pending(folder):
    """The front end's role need not be called api: nothing pending is cut short."""
    (folder / "mine.py").write_text(PENDING)
    settings = {
        "command": [sys.executable, str(folder / "mine.py")],
        "port": None,
        "drain": "20s",
    }
    with daemon(folder, settings) as run:
        run.wait_ready()
        assert run.cli("drain", run.name).returncode == 0
        run.wait_state("stopped")
        assert "all served" in run.log()
        assert "cut short" not in run.log()


DAMAGE = """
import os, time
from stallwatch import heartbeat
board = heartbeat.attach(role="worker", rank=0)
lane = board.lane("main")
lane.enter("work"); board.ready()
time.sleep(1.0)
os.truncate(os.path.join(os.environ["STALLWATCH_BOARD"], "board"), 0)
time.sleep(60)
"""


def test_an_engine_whose_board_is_damaged_is_not_called_ready(folder):
    """Its lanes cannot be judged any more: readyz and status say so, with what to do."""
    (folder / "damage.py").write_text(DAMAGE)
    settings = {"command": [sys.executable, str(folder / "damage.py")], "port": None}
    with daemon(folder, settings) as run:
        run.wait(lambda: "damaged" in run.engine().get("reason", ""), "the reason")
        run.wait(lambda: run.get("/readyz")[0] == 503, "readyz")
