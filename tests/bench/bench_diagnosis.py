"""What judging and diagnosing cost: one look of a large engine, and one whole report of a small one.

python tests/bench/bench_diagnosis.py [--processes 64] [--looks 200] [--reports 5]

The look is the judging thread's own CPU time (a shared core does not count), of a snapshot of a real
board and a real /proc and the evaluation of all rules, at ten looks a second. The report is wall
time, from a confirmed finding to report and files in the ledger: stacks of 8 real processes by the
real py-spy, the verdict, the report. The bars are 2 ms and 2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench_judge import PARENT, await_children

from stallwatch import procfs
from stallwatch.board.create import BoardFolder
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch.diagnosis.classify import diagnose
from stallwatch.diagnosis.verdict import Case
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.ledger import Ledger
from stallwatch.evidence.model import Target
from stallwatch.evidence.report import Context, artefacts, build_report
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.heartbeat.failure import Failure
from stallwatch.lifecycle.states import State
from stallwatch.testing.watched import FakeEngine
from stallwatch.watch.host import HostWitness
from stallwatch.watch.looker import Looker
from stallwatch.watch.policy import Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import EngineFacts, Snapshot

REPORT_PROCESSES = 8
LOOK_MS, REPORT_S = 2.0, 2.0


@contextlib.contextmanager
def engine(count: int, limits: Policy) -> Iterator[tuple[FakeEngine, Path]]:
    """`count` real processes with four lanes each on a real board, and their end."""
    room = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    folder = BoardFolder.create(room, engine="bench", incarnation=1)
    group: subprocess.Popen[bytes] | None = None
    reader: BoardReader | None = None
    try:
        group = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(count), "0.02"],
            stdout=subprocess.PIPE,
            env={**os.environ, **folder.environment()},
            start_new_session=True,
        )
        await_children(group, count)
        stats = [s for pid in procfs.pids() if (s := procfs.stat(pid)) and s.session == group.pid]
        reader = BoardReader(folder.path)
        now = time.monotonic_ns()
        yield (
            FakeEngine(
                "bench",
                reader=reader,
                now=EngineFacts("bench", 1, State.READY, group.pid, started_ns=now, ready_ns=now),
                pids={s.pid: s.start_ticks for s in stats},
                limits=limits,
            ),
            folder.path,
        )
    finally:
        if group is not None:
            os.killpg(group.pid, signal.SIGKILL)
            with group:
                pass
        if reader is not None:
            reader.close()
        folder.remove()


def looks(processes: int, count: int) -> dict[str, Any]:
    """CPU of one snapshot and its evaluation."""
    took: list[float] = []
    limits = Policy(compile_steps=0)
    with engine(processes, limits) as (fake, _):
        looker = Looker(fake, clock=SystemClock(), host=HostWitness())
        snapshot: Snapshot | None = None
        for number in range(count + 10):
            begun = time.thread_time_ns()
            snapshot = looker.look(time.monotonic_ns())
            evaluate(snapshot, snapshot.now_ns, limits)
            if number >= 10:  # the first ones open files
                took.append((time.thread_time_ns() - begun) / 1e6)
            threading.Event().wait(0.1)
        looker.close()
    assert snapshot is not None
    return {
        "processes": len(snapshot.processes) - 1,
        "lanes": len(snapshot.image.lanes) if snapshot.image else 0,
        "look_ms_median": round(median(took), 3),
        "look_ms_p99": round(quantiles(took, n=100)[98], 3),
    }


def reports(count: int) -> dict[str, Any]:
    """Wall time of whole reports of one engine, one after the other."""
    limits = Policy(compile_steps=0, default_ns=1_000)  # whoever works is late
    took: list[float] = []
    rungs: set[str] = set()
    with engine(REPORT_PROCESSES, limits) as (fake, board), tempfile.TemporaryDirectory() as kept:
        looker = Looker(fake, clock=SystemClock(), host=HostWitness())
        ledger = Ledger(Path(kept))
        before = looker.look(time.monotonic_ns())
        threading.Event().wait(1.0)
        for _ in range(count):
            snapshot = looker.look(time.monotonic_ns(), frozenset(fake.pids))
            begun = time.monotonic()
            report = whole(fake, before, snapshot, board=board, ledger=ledger, limits=limits)
            took.append(time.monotonic() - begun)
            rungs |= {str(p["rung"]) for p in report["processes"] if p["role"]}
        looker.close()
    return {
        "report_processes": REPORT_PROCESSES,
        "report_s_median": round(median(took), 3),
        "report_s_max": round(max(took), 3),
        "rungs": sorted(rungs),
    }


def whole(
    fake: FakeEngine,
    before: Snapshot,
    snapshot: Snapshot,
    *,
    board: Path,
    ledger: Ledger,
    limits: Policy,
) -> dict[str, Any]:
    """As a case does it: stacks, verdict, report and files on disk."""
    found = evaluate(snapshot, snapshot.now_ns, limits)
    assert found, "nothing was late"
    assert snapshot.image is not None
    targets = [
        Target(p.pid, p.start_ticks, p.role, p.rank, p.dump_signal, p.dump_path)
        for p in snapshot.image.processes
    ]
    ladder = Ladder(SystemClock(), ToolRegistry(), run_folder=board)
    stacks = ladder.first(targets, deadline_s=2.0)
    case = Case(found[0], found, before, snapshot, stacks)
    verdict = diagnose(case)
    ident = ledger.new_id(time.time())
    failure = Failure(ident, "bench", 1, str(verdict.kind), verdict.culprit.address, "", 1, 1, "")
    report = build_report(failure, verdict, case, Context(time.time(), policy=limits))
    trouble = ledger.insert(report)
    assert not trouble, trouble
    for name, data in artefacts(case).items():
        ledger.artefact(ident, name, data)
    return report


def main() -> int:
    """Measure and print one JSON line and one sentence; 1 when over a bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--looks", type=int, default=200)
    parser.add_argument("--reports", type=int, default=5)
    asked = parser.parse_args()
    result = looks(asked.processes, asked.looks) | reports(asked.reports)
    print(json.dumps(result))
    print(
        f"a look at {result['processes']} processes x 4 lanes: {result['look_ms_median']} ms of CPU "
        f"(p99 {result['look_ms_p99']}, bar {LOOK_MS:g}); a report of {REPORT_PROCESSES} processes: "
        f"{result['report_s_median']} s (longest {result['report_s_max']}, bar {REPORT_S:g}), "
        f"by {', '.join(result['rungs'])}"
    )
    return int(result["look_ms_median"] > LOOK_MS or result["report_s_max"] > REPORT_S)


if __name__ == "__main__":
    sys.exit(main())
