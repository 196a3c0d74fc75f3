"""`stallwatch show` of real reports, on a terminal of 80 columns and as data."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from daemon_helpers import STALLWATCH, Daemon, daemon, place
from stallwatch.diagnosis.kinds import KINDS, Kind

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]

SECTIONS = [
    "What every process was doing",
    "Who waits for whom",
    "Stacks, merged",
    "What was done",
    "What to do next",
    "What is not known",
]


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    """One daemon for all reports."""
    with place() as folder, daemon(folder) as found:
        yield found


def told(running: Daemon, word: str) -> dict[str, Any]:
    """The whole report of a worker that was ordered to do that."""
    running.wait_ready()
    known = {each["id"] for each in running.stalls()}
    running.order("worker", word)
    stall = running.wait_stall(known)
    running.wait(
        lambda: any("tree gone" in t["text"] for t in running.report(stall["id"])["timeline"]),
        "the whole report",
        seconds=40,
    )
    return running.report(stall["id"])


def on_terminal(running: Daemon, *words: str) -> list[str]:
    """What a terminal of 80 columns gets."""
    master, slave = pty.openpty()
    argv = [STALLWATCH, words[0], "--socket", str(running.state / "control.sock"), *words[1:]]
    env = {**running.env, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen(argv, stdout=slave, env=env)
    os.close(slave)
    out = b""
    try:
        while part := os.read(master, 65536):
            out += part
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(30) == 0
    return out.decode().replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize(("word", "frame"), [("gil", "hold_the_gil"), ("spin", "compute_for_ever")])
def test_a_real_report_is_readable(running, word, frame):
    """Sentence first, then kind and culprit, every section in order; 80 columns; the frame leads."""
    report = told(running, word)
    lines = on_terminal(running, "show", report["id"])
    flat = " ".join(" ".join(lines).split())

    assert flat.startswith(report["summary"])
    assert max(map(len, lines)) <= 80
    assert "".join(lines).isprintable()
    assert [line for line in lines if line in SECTIONS] == SECTIONS
    assert f"kind {report['kind']}: {KINDS[Kind(report['kind'])].meaning}" in flat
    assert f"culprit worker:0/model (pid {report['culprit']['pid']})" in flat
    assert KINDS[Kind(report["kind"])].advice in flat
    stacks = lines[lines.index("Stacks, merged") + 1 :]
    first = "\n".join(stacks[: stacks.index("")]).partition("thread\n")[2].partition("  [")[0]
    assert frame in first
    assert "processes were killed" in flat


def test_json_is_the_report(running):
    """`show -o json` is what the daemon answers, key by key; `explain` knows its kind."""
    report = told(running, "exit3")
    done = running.cli("show", report["id"], "-o", "json")
    assert json.loads(done.stdout) == running.report(report["id"])
    page = running.cli("show", report["id"]).stdout
    assert "`stallwatch explain CHILD_DIED` has the page of this kind." in page
