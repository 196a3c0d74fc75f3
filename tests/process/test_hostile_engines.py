"""Engines that do everything wrong, all under one real daemon: bounded time and memory, no crash."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon_helpers import Daemon, daemon, place, tag

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = str(Path(__file__).resolve().parents[2] / "supervisor")
BEGIN = """
import os, random, sys, threading, time
from stallwatch import heartbeat
FOLDER, NAME = sys.argv[1], sys.argv[2]
ESC = "\\x1b[2J\\x1b]0;pwned\\x07\\u202e\\x9b31m"
board = heartbeat.attach(role="worker", rank=0)
lane = board.lane("model")
def ordered():
    return os.path.exists(os.path.join(FOLDER, NAME))
def begun():
    while not os.path.exists(os.path.join(FOLDER, "begin")):
        lane.idle(); time.sleep(0.05)
def stand():
    lane.enter("execute_model", step=1)
    threading.Event().wait()
"""
PROGRAMS = {
    # The whole lane table and the names, overwritten with noise for ever.
    "noise": """
import mmap
from stallwatch.heartbeat import layout
board.ready()
begun()
with open(os.path.join(os.environ["STALLWATCH_BOARD"], "board"), "r+b") as file:
    image = mmap.mmap(file.fileno(), 0)
    dice = random.Random(1)
    at, size = layout.lane_offset(64, 0), len(image)
    while not ordered():
        for _ in range(16):
            begin = dice.randrange(at, size - 4096)
            image[begin:begin + 4096] = dice.randbytes(4096)
        time.sleep(0.001)
os._exit(3)
""",
    "names": """
for number in range(10_000):
    lane.enter(f"phase-{number}", **{f"detail-{number}": number})
board.ready()
while not ordered():
    lane.enter(f"phase-{random.randrange(10_000)}"); lane.progress(1); time.sleep(0.01)
stand()
""",
    "escapes": """
other = board.lane(ESC + "lane")
board.ready()
sys.stdout.write(ESC + "\\n"); sys.stdout.flush()
while not ordered():
    lane.enter(ESC + "phase", text=ESC * 8); lane.progress(1); lane.idle(); time.sleep(0.01)
def \u0410_frame():
    threading.Event().wait()
threading.current_thread().name = ESC + "thread"
lane.enter(ESC + "stuck", text=ESC * 8, on=ESC + "peer", **{ESC: 1})
\u0410_frame()
""",
    "flipper": """
def flip():
    mine = board.lane("flipper")
    a, b = mine.marker("a", "n"), mine.marker("b", "n")
    while True:
        a(1); b(2)
board.ready()
begun()
threading.Thread(target=flip, daemon=True).start()
while not ordered():
    lane.enter("x"); lane.progress(1); time.sleep(0.01)
stand()
""",
    "threads": """
threading.stack_size(128 * 1024)
end = threading.Event()
def work(number):
    mine = board.lane(f"lane-{number}")
    mine.idle()
    end.wait()
for number in range(2000):
    threading.Thread(target=work, args=(number,), daemon=True).start()
board.ready()
while not ordered():
    lane.enter("x"); lane.progress(1); lane.idle(); time.sleep(0.01)
stand()
""",
}
REPORT_S = 20.0  # the evidence of 2,000 threads on a busy machine included
MAX_REPORT = 4 << 20
MAX_RSS = 160 << 20


def engines(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, body in PROGRAMS.items():
        path = folder / f"{name}.py"
        path.write_text(BEGIN + body)
        found[f"{tag(folder)}-{name}"] = {
            "command": [sys.executable, str(path), str(folder), f"{name}.go"],
            "env": {"PYTHONPATH": ROOT},
            "plugin": "off",
            "enforce": "fail",
            "limits": {"default": "2s", "compile": "2s", "start": "60s"},
        }
    return found


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    """One daemon; the first engine is harmless, the others are not."""
    with place() as folder, daemon(folder, None, "workerless", more=engines(folder)) as found:
        found.wait_state("ready")
        for name in engines(folder):
            found.wait(
                lambda name=name: found.engine(name).get("state") != "starting", name, seconds=60
            )
        (folder / "begin").touch()
        yield found


def printable(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_memory_and_time_of_the_daemon_are_bounded(running):
    """All of them at once for three seconds: its memory stays, and its judge keeps looking."""
    process = psutil.Process(running.process.pid)
    before, looks = process.memory_info().rss, running.metric("stallwatch_judge_looks_total")
    begun = time.monotonic()
    running.wait(lambda: time.monotonic() - begun > 3.0, "three seconds")
    assert process.memory_info().rss < max(MAX_RSS, before + (8 << 20))
    assert running.metric("stallwatch_judge_looks_total") - looks >= 5
    status, _ = running.get("/livez")
    assert status == 200


def test_what_commands_print_is_clean(running):
    """status, describe, logs and events of every one of them: no control character."""
    for words in (["status"], ["events"], *(["describe", n] for n in running.more)):
        done = running.cli(*words)
        assert done.returncode == 0, done.stderr
        assert printable(done.stdout), words
    assert printable(running.cli("logs", next(n for n in running.more if "escapes" in n)).stdout)


@pytest.mark.parametrize("name", ["names", "escapes", "flipper", "threads"])
def test_its_stall_is_reported_all_the_same(running, name):
    """A verdict in bounded time, the worker named, the report small and its text clean."""
    full = f"{tag(running.folder)}-{name}"
    (running.folder / f"{name}.go").touch()

    def found() -> dict[str, Any] | None:
        mine = [s for s in running.stalls() if s["engine"] == full]
        return mine[0] if mine else None

    stall = running.wait(found, f"a report of {name}", seconds=REPORT_S)
    report = running.report(stall["id"])
    assert report["culprit"]["lane"] == "worker:0/model"
    assert len(json.dumps(report)) < MAX_REPORT
    shown = running.cli("show", stall["id"])
    assert shown.returncode == 0
    assert printable(shown.stdout)
    assert printable(running.cli("stacks", full).stdout)


def test_the_end_of_the_one_that_writes_noise_is_reported(running):
    """Its lanes are worth nothing; that it ended is seen, and the others are not touched by it."""
    full = f"{tag(running.folder)}-noise"
    begun = [s["id"] for s in running.stalls() if s["engine"] == full]
    (running.folder / "noise.go").touch()
    report = running.wait(
        lambda: next(
            (
                s
                for s in running.stalls()
                if s["engine"] == full and s["id"] not in begun and s["kind"] == "CHILD_DIED"
            ),
            None,
        ),
        "the end of noise",
        seconds=REPORT_S,
    )
    assert printable(running.cli("show", report["id"]).stdout)
    assert os.path.exists(f"/proc/{running.process.pid}")
