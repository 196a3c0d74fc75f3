"""What a heartbeat costs, beside what others do.

    python tests/bench/bench_marks.py [--json] [--rounds N]

Nanoseconds per operation, loop overhead taken off, the best of many short rounds: the machine may be
shared, and the rounds of all candidates are interleaved so that a busy moment hits them alike. Exits 1
when a bar is missed. The reader's cost is the supervisor's CPU time per look at 256 lanes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from stallwatch.board.create import BoardFolder
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch.heartbeat import Board
from stallwatch.heartbeat.memory import open_board

BARS = {  # ns per operation
    "mark, two details": 250,
    "mark, no details": 250,
    "enter(), one detail": 1500,
    "push and pop": 1000,
    "the same without a board": 250,
}
NVRX_RATIO = 30
NUMBER = 5_000


def ours(folder: BoardFolder) -> dict[str, tuple[str, dict[str, object]]]:
    """Our own operations as (statement, names)."""
    board = Board(open_board(str(folder.path)), "bench", 0, 0)
    lane = board.lane("model")
    silent = Board(None, "bench", 0, 0).lane("model")
    details = ("step", "requests")
    return {
        "mark, two details": ("mark(12, 4)", {"mark": lane.marker("run", *details, limit=30.0)}),
        "mark, no details": ("mark()", {"mark": lane.marker("run", limit=30.0)}),
        "the same without a board": (
            "mark(12, 4)",
            {"mark": silent.marker("run", *details, limit=30.0)},
        ),
        "push and pop": ("push(); pop()", {"push": lane.pusher("inner"), "pop": lane.pop}),
        "progress()": ("progress(1)", {"progress": lane.progress}),
        "enter(), one detail": ("enter('load_shard', shard=3)", {"enter": lane.enter}),
        "enter(), limit and text": (
            "enter('load_shard', limit=30.0, text='model-00001', shard=3)",
            {"enter": lane.enter},
        ),
        "idle()": ("idle()", {"idle": lane.idle}),
        "with phase()": ("with phase('inner', n=1): pass", {"phase": lane.phase}),
        "pending()": ("pending(3)", {"pending": board.pending}),
        "failure()": ("failure()", {"failure": board.failure}),
    }


class Counter:
    """What SGLang's feed() does."""

    def __init__(self) -> None:
        self.value = 0

    def feed(self) -> None:
        self.value += 1


def theirs(file: int) -> dict[str, tuple[str, dict[str, object]]]:
    """The peers' operations."""
    found: dict[str, tuple[str, dict[str, object]]] = {
        "a bare counter (SGLang)": ("feed()", {"feed": Counter().feed}),
        "os.utime of a /dev/shm file (gunicorn)": (
            "now = clock(); utime(file, (now, now))",
            {"utime": os.utime, "file": file, "clock": time.monotonic},
        ),
    }
    nvrx = nvrx_client()
    if nvrx is not None:
        found["NVRx send_heartbeat()"] = ("beat()", {"beat": nvrx})
    return found


def nvrx_client() -> Callable[[], object] | None:
    """A connected NVRx client's heartbeat, where the package and its monitor are there."""
    try:
        module = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")
        client = module.RankMonitorClient()
        client.init_workload_monitoring()
    except Exception:
        return None
    beat: Callable[[], object] = client.send_heartbeat
    return beat


def measure(operations: dict[str, tuple[str, dict[str, object]]], rounds: int) -> dict[str, float]:
    """Best ns per operation, loop overhead taken off."""
    timers = {name: timeit.Timer(stmt, globals=given) for name, (stmt, given) in operations.items()}
    timers[""] = timeit.Timer("pass")
    best = dict.fromkeys(timers, float("inf"))
    for _ in range(rounds):
        for name, timer in timers.items():
            best[name] = min(best[name], timer.timeit(NUMBER) / NUMBER * 1e9)
    loop = best.pop("")
    return {name: ns - loop for name, ns in best.items()}


def reader_cost(parent: Path, lanes: int = 256) -> dict[str, float]:
    """Microseconds of CPU per look, the sleeps between two reads not counted."""
    folder = BoardFolder.create(parent, engine="bench", incarnation=1)
    try:
        board = Board(open_board(str(folder.path)), "bench", 0, 0)
        marks = [
            board.channel(f"c{n}").marker("run", "step", "requests", limit=30.0)
            for n in range(lanes)
        ]

        def all_mark(_: float = 0) -> None:
            for mark in marks:
                mark(12, 4)

        clock = SystemClock()
        quiet = BoardReader(folder.path, sleep=lambda _: None)
        moving = BoardReader(folder.path, sleep=all_mark)
        marking = _cpu(all_mark)
        quiet.look(clock)
        quiet.look(clock)
        found = {
            "quiet": _cpu(lambda: quiet.look(clock)),
            "all changed": _cpu(lambda: (all_mark(), quiet.look(clock))) - marking,
            "all moving": _cpu(lambda: (all_mark(), moving.look(clock))) - 3 * marking,
        }
        board.close()
        quiet.close()
        moving.close()
        return found
    finally:
        folder.remove()


def _cpu(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(15):
        began = time.process_time()
        for _ in range(20):
            call()
        best = min(best, (time.process_time() - began) / 20)
    return best * 1e6


def verdict(found: dict[str, float]) -> list[str]:
    """The bars that were missed, in words."""
    missed = [
        f"{name}: {found[name]:.0f} ns, bar {bar} ns"
        for name, bar in BARS.items()
        if found[name] > bar
    ]
    nvrx = found.get("NVRx send_heartbeat()")
    if nvrx is not None and found["mark, two details"] * NVRX_RATIO > nvrx:
        missed.append(f"a mark is not 1/{NVRX_RATIO} of NVRx's heartbeat ({nvrx:.0f} ns)")
    return missed


def report(found: dict[str, float], looks: dict[str, float], missed: list[str]) -> None:
    """The same for people."""
    mark = found["mark, two details"]
    for name, ns in sorted(found.items(), key=lambda item: item[1]):
        bar = f"  bar {BARS[name]}" if name in BARS else ""
        print(f"{name:42s}{ns:9.0f} ns {ns / mark:7.2f} marks{bar}")
    if "NVRx send_heartbeat()" not in found:
        print("NVRx send_heartbeat(): not installed here, not measured")
    for name, us in looks.items():
        print(f"a look at 256 lanes, {name:21s}{us:9.0f} us = {us / 1000:.2f} % of a core at 10 Hz")
    print("missed: " + "; ".join(missed) if missed else "every bar held")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    shm = Path("/dev/shm")
    folder = BoardFolder.create(shm, engine="bench", incarnation=1)
    try:
        with tempfile.TemporaryFile(dir=shm) as file:
            found = measure({**ours(folder), **theirs(file.fileno())}, options.rounds)
        looks = reader_cost(shm)
    finally:
        folder.remove()
    missed = verdict(found)
    if options.json:
        print(json.dumps({"ns": found, "look_us": looks, "missed": missed}, indent=2))
    else:
        report(found, looks, missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
