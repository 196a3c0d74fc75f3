"""A secret that the engine was given leaves the daemon by no way, whatever the engine does with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import daemon, place

pytestmark = [pytest.mark.process, pytest.mark.slow]

ARGUMENT, VARIABLE, INHERITED = "plainargument", "plainvariable", "plaininherited"
ENGINE = """
import os, sys, threading, time
from stallwatch import heartbeat
secrets = " ".join([sys.argv[3], os.environ["MY_API_KEY"], os.environ["SOME_TOKEN"]])
print("using", secrets, flush=True)
board = heartbeat.attach(role="worker", rank=0)
threading.current_thread().name = secrets
lane = board.lane("model")
lane.enter(sys.argv[3], cls="start", text=os.environ["MY_API_KEY"])
board.ready()
while not os.path.exists(sys.argv[1] + "/order"):
    lane.idle(os.environ["SOME_TOKEN"])
    time.sleep(0.01)
lane.enter(sys.argv[3], text=secrets)
while True:
    time.sleep(1)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def test_a_secret_of_the_engine_leaves_by_no_way(folder):
    """Status, events, logs, probes, report, files, stacks, metrics, and what each command prints."""
    script = folder / "engine.py"
    script.write_text(ENGINE)
    settings = {
        "command": [sys.executable, str(script), str(folder), "--api-key", ARGUMENT],
        "port": None,
        "env": {"MY_API_KEY": VARIABLE},
        "enforce": "observe",
    }
    with daemon(folder, settings, env={"SOME_TOKEN": INHERITED}) as run:
        run.wait_state("ready")
        shown = [repr(run.engine()), run.cli("logs", run.name).stdout]
        assert "using ***" in shown[-1]
        (folder / "order").touch()
        stall = run.wait_stall()
        run.wait(lambda: list(run.state.rglob("stacks.json")), "the files")
        run.cli("dump", stall["id"], "-o", str(folder / "d"))
        assert list((folder / "d").rglob("stacks.json"))
        shown += [repr(run.engine()), repr(run.events()), repr(run.report(stall["id"]))]
        shown += [
            run.get(path)[1].decode()
            for path in ("/healthz?verbose", "/readyz?verbose", "/metrics")
        ]
        for words in (["status"], ["describe", run.name], ["events", run.name], ["show", stall["id"]],
                      ["logs", run.name], ["stacks", run.name]):  # fmt: skip
            found = run.cli(*words)
            shown.append(found.stdout + found.stderr)
        shown += [p.read_text() for p in (folder / "d").rglob("*.*") if p.is_file()]
        shown.append(run.log().replace(f"using {ARGUMENT} {VARIABLE} {INHERITED}", ""))
        for text in shown:
            for secret in (ARGUMENT, VARIABLE, INHERITED):
                assert secret not in text, text[max(0, text.find(secret) - 300) :][:600]
