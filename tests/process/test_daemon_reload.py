"""A configuration that is read again in the middle of something else."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import Daemon, daemon, place

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def reload(run: Daemon) -> None:
    """Write the file as it is in memory, send SIGHUP, wait until it has been taken."""
    before = sum("re-read" in event["message"] for event in run.events())
    run.write()
    run.process.send_signal(signal.SIGHUP)
    run.wait(
        lambda: sum("re-read" in event["message"] for event in run.events()) > before, "the reload"
    )


def test_a_reload_during_a_pause_keeps_the_pause(folder):
    """New limits are raised by the lease as the old ones were: a promise to an operator holds."""
    with daemon(folder) as run:
        run.wait_ready()
        assert run.cli("pause", run.name, "--for", "60s").returncode == 0
        run.wait(lambda: run.said("rest for 60 s"), "the pause in the events")
        run.engine_config["limits"] |= {"default": "500ms", "compile": "500ms"}
        reload(run)
        run.order("worker", "stall")

        def waits_longer() -> bool:
            lanes = run.engine()["lanes"]
            ages = [x["age_s"] for x in lanes if x["phase"] == "execute_model"]
            return bool(ages) and max(ages) > 2.0

        run.wait(waits_longer, "a phase four times over the new limit")
        assert run.stalls() == []
        run.release()
        assert run.wait_ready()["incarnation"] == 1


def test_a_likely_slip_in_the_limits_is_told_at_the_start_and_at_a_reload(folder):
    """Any name may be a phase's: the daemon runs on, and names what was probably meant."""
    with daemon(folder, {"limits": {"defaul": "10s", "start": "30s"}}) as run:
        run.wait_ready()
        assert run.said("did you mean 'default'?")
        run.engine_config["limits"] = {"prefil": "10s", "start": "30s"}
        reload(run)
        run.wait(lambda: run.said("did you mean 'prefill'?"), "the slip of the new file")
        (line,) = [x for x in run.log().splitlines() if "'prefill'" in x]
        assert '"level": "warning"' in line


def test_a_stall_at_hand_ends_by_the_rule_it_began_with(folder):
    """observe -> restart while an observed stall lasts: nothing is killed; the next stall is."""
    with daemon(folder, {"enforce": "observe"}) as run:
        run.wait_ready()
        members = run.members()
        run.order("worker", "stall")
        first = run.wait_stall()["id"]
        run.wait_state("stalled")
        run.engine_config["enforce"] = "restart"
        reload(run)
        run.wait(lambda: run.said("holds once this stall is over"), "the word about it")
        assert run.engine()["state"] == "stalled"
        run.release()
        assert run.wait_ready()["incarnation"] == 1
        assert run.members() == members
        run.hold_again()
        run.order("worker", "stall")
        assert run.wait_stall({first})["action"] == "restart"
        run.wait_ready(2)
