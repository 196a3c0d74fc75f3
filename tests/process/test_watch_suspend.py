"""F5: judge and engine are stopped together, as when a machine is suspended, and continued."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

# The judge in a process of its own, with one worker inside a phase of 1.5 s that it always finishes
# in time: it sleeps 0.4 s in each, counted by its own steps.
JUDGE = """
import json, os, subprocess, sys, time
from pathlib import Path
from stallwatch import procfs
from stallwatch.board.create import BoardFolder
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch.lifecycle.states import State
from stallwatch.testing.watched import FakeEngine
from stallwatch.watch.judge import Judge
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import EngineFacts
folder = BoardFolder.create(Path(sys.argv[1]), engine='chat', incarnation=1, lanes=8, processes=4)
worker = subprocess.Popen(
    [sys.executable, '-c', sys.argv[2]], stdout=subprocess.PIPE,
    env={**os.environ, **folder.environment()})
worker.stdout.readline()
engine = FakeEngine('chat', reader=BoardReader(folder.path),
    now=EngineFacts('chat', 1, State.READY, worker.pid, started_ns=1, ready_ns=1),
    pids={worker.pid: procfs.start_ticks(worker.pid)},
    limits=Policy(default_ns=1_500_000_000, compile_steps=0))
def say(*words):
    os.write(1, json.dumps(words).encode() + b'\\n')  # one write: two threads speak
def sink(name, notice):
    kind = type(notice).__name__
    if kind != 'Warned':
        say(kind, getattr(notice, 'witness', ''))
judge = Judge(SystemClock(), sink)
judge.add(engine)
judge.start()
say('worker', worker.pid)
for line in sys.stdin:
    say('looks', judge.looks, judge.late_looks)
judge.stop()
"""
WORKER = """
import threading
from stallwatch import heartbeat
lane = heartbeat.attach(role='worker').lane('model')
print('up', flush=True)
rest = threading.Event()
n = 0
while True:
    n += 1
    lane.enter('execute_model')
    for _ in range(8): rest.wait(0.05)
    lane.progress(1)
"""


def read(child: subprocess.Popen[bytes], deadline_s: float = 20.0) -> list[object]:
    """The next line; read byte by byte, so that select() never misses what a buffer holds."""
    line, end = b"", time.monotonic() + deadline_s
    while not line.endswith(b"\n"):
        left = max(0.0, end - time.monotonic())
        assert select.select([child.stdout], [], [], left)[0], "the judge says nothing"
        byte = os.read(child.stdout.fileno(), 1)
        assert byte, "the judge ended"
        line += byte
    return json.loads(line)


def ask(child: subprocess.Popen[bytes]) -> tuple[list[list[object]], int, int]:
    """(notices since the last question, looks, late looks)."""
    child.stdin.write(b"\n")
    child.stdin.flush()
    told = []
    while (line := read(child))[0] != "looks":
        told.append(line)
    return told, int(line[1]), int(line[2])


@pytest.fixture
def pair(tmp_path: Path):
    """(judge process, worker pid), both in one process group, ended afterwards."""
    child = subprocess.Popen(
        [sys.executable, "-c", JUDGE, str(tmp_path), WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    word, pid = read(child)
    assert word == "worker"
    yield child, pid
    os.killpg(child.pid, signal.SIGCONT)
    os.killpg(child.pid, signal.SIGKILL)
    with child:
        pass


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def looks_past(child: subprocess.Popen[bytes], target: int) -> list[list[object]]:
    told, end = [], time.monotonic() + 20
    while time.monotonic() < end:
        more, looks, _ = ask(child)
        told += more
        if looks >= target:
            return told
        select.select([], [], [], 0.05)
    raise AssertionError("the judge stopped looking")


def test_a_suspension_of_everybody_accuses_nobody(pair):
    """Twice the limit passes while all are stopped; afterwards the worker finishes and nothing is confirmed."""
    child, worker = pair
    looks_past(child, 5)
    os.killpg(child.pid, signal.SIGSTOP)
    end = time.monotonic() + 10
    while {state(child.pid), state(worker)} != {"T"} and time.monotonic() < end:
        select.select([], [], [], 0.01)
    select.select([], [], [], 3.2)  # the stretch that must not count: it is the subject here
    os.killpg(child.pid, signal.SIGCONT)
    told, looks, _ = ask(child)
    told += looks_past(child, looks + 15)
    more, _, late = ask(child)
    told += more
    assert late >= 1
    assert "Confirmed" not in [kind for kind, _ in told]


def test_the_same_stop_of_the_worker_alone_is_confirmed(pair):
    """The control: without the witness of our own lateness the verdict comes."""
    child, worker = pair
    looks_past(child, 5)
    os.kill(worker, signal.SIGSTOP)
    end, told = time.monotonic() + 20, []
    while "Confirmed" not in [kind for kind, _ in told] and time.monotonic() < end:
        told += ask(child)[0]
        select.select([], [], [], 0.02)
    assert "Confirmed" in [kind for kind, _ in told]
