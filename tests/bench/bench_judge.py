"""What the judge costs: N processes x 4 lanes at 10 Hz, real /proc, a real board.

python tests/bench/bench_judge.py [--processes 64] [--seconds 20] [--beat 0.02]

Children are cheap: one parent that imports the heartbeat library and forks them, so that they share
their memory. Each child owns 4 lanes; a quarter of the children beats every `--beat` seconds in all
of them, the rest stands in an idle or in a fresh phase. CPU is the judge thread's own, so the load
of the machine does not count, although a shared core makes each look dearer.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from stallwatch import procfs
from stallwatch.board.create import BoardFolder
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch.lifecycle.states import State
from stallwatch.testing.watched import FakeEngine
from stallwatch.watch.judge import Judge
from stallwatch.watch.notice import Notice
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import EngineFacts

PARENT = """
import os, signal, sys, threading, time
from stallwatch import heartbeat
count, beat = int(sys.argv[1]), float(sys.argv[2])
def child(rank):
    board = heartbeat.attach(role='worker', rank=rank)
    end, ready = threading.Event(), threading.Barrier(4)
    def run(name):
        lane = board.lane(name)
        mark = lane.marker('execute_model', 'step', 'requests')
        mark(0, 0)
        ready.wait(30)
        if name == 'l0': board.ready(); board.pending(1); os.write(1, b'.')
        n = 0
        while rank % 4 == 0:
            n += 1; mark(n, 4); lane.progress(1); time.sleep(beat)
        lane.idle()
        end.wait()
    for i in range(1, 4): threading.Thread(target=run, args=(f'l{i}',), daemon=True).start()
    run('l0')
for rank in range(count):
    if os.fork() == 0:
        child(rank)
os.write(1, b'!')
signal.pause()
"""


def main() -> int:
    """Measure and print one JSON line and one sentence; 1 when over the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--beat", type=float, default=0.02)
    asked = parser.parse_args()
    parent_dir = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    folder = BoardFolder.create(parent_dir, engine="bench", incarnation=1)
    group: subprocess.Popen[bytes] | None = None
    try:
        group = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(asked.processes), str(asked.beat)],
            stdout=subprocess.PIPE,
            env={**os.environ, **folder.environment()},
            start_new_session=True,
        )
        await_children(group, asked.processes)
        result = measure(folder, group.pid, asked.seconds)
    finally:
        if group is not None:
            os.killpg(group.pid, signal.SIGKILL)
            with group:
                pass
        folder.remove()
    print(json.dumps(result))
    print(
        f"{result['processes']} processes x 4 lanes at {result['looks_per_s']} looks/s: "
        f"{result['cpu_percent']} % of a core, {result['rss_mib']} MiB "
        f"(bars for the whole supervisor: 2 %, 100 MB); {result['notices']} notices"
    )
    return int(result["cpu_percent"] > 2.0 or result["rss_mib"] > 100)


def await_children(group: subprocess.Popen[bytes], count: int) -> None:
    assert group.stdout is not None
    seen, end = b"", time.monotonic() + 60
    while seen.count(b".") < count or b"!" not in seen:
        left = end - time.monotonic()
        if left <= 0 or not select.select([group.stdout], [], [], left)[0]:
            raise SystemExit(f"only {seen.count(b'.')} of {count} children attached")
        seen += os.read(group.stdout.fileno(), 4096)


def measure(folder: BoardFolder, session: int, seconds: float) -> dict[str, float]:
    """CPU of the judging thread over `seconds`, after a second of settling."""
    stats = [s for pid in procfs.pids() if (s := procfs.stat(pid)) and s.session == session]
    reader = BoardReader(folder.path)
    now = time.monotonic_ns()
    engine = FakeEngine(
        "bench",
        reader=reader,
        now=EngineFacts("bench", 1, State.READY, session, started_ns=now, ready_ns=now),
        pids={s.pid: s.start_ticks for s in stats},
        limits=Policy(compile_steps=0),
    )
    notices: list[Notice] = []
    judge = Judge(SystemClock(), lambda _, notice: notices.append(notice))
    judge.add(engine)
    clock: list[tuple[int, int]] = []
    judge.on_tick.append(lambda: clock.append((time.thread_time_ns(), time.monotonic_ns())))
    judge.start()
    threading.Event().wait(seconds + 1.0)
    latest = judge.latest("bench")
    judge.stop()
    reader.close()
    settled = [c for c in clock if c[1] - clock[0][1] >= 1_000_000_000]
    (cpu0, t0), (cpu1, t1) = settled[0], settled[-1]
    rss = procfs.stat(os.getpid())
    assert latest is not None
    assert rss is not None
    return {
        "processes": len(latest.processes) - 1,
        "lanes": len(latest.image.lanes) if latest.image else 0,
        "cpu_percent": round(100 * (cpu1 - cpu0) / (t1 - t0), 2),
        "ms_per_look": round((cpu1 - cpu0) / (len(settled) - 1) / 1e6, 3),
        "looks_per_s": round((len(settled) - 1) / ((t1 - t0) / 1e9), 1),
        "late_looks": judge.late_looks,
        "rss_mib": round(rss.rss_pages * os.sysconf("SC_PAGESIZE") / 2**20, 1),
        "notices": len(notices),
    }


if __name__ == "__main__":
    sys.exit(main())
