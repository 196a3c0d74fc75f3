"""The embedded engine for ten thousand steps: what it holds at the end is what it held at the beginning.

    make soak-engine                                       # 10,000 steps behind 1,000 of warm-up, each backend
    python scripts/soak_engine.py --steps 2000 --backend process

One request in twenty is aborted, at any age. Read before and after, over the engine and its tables' process:
descriptors, threads, files below /dev/shm, free slots and pages. The resident memory is read every 100 steps;
its slope, by least squares, may be 1 MiB a thousand steps. Exit status 1 when anything grew.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from engine_rig import rig  # noqa: E402
from engine_soak import MIB, soak  # noqa: E402
from stallwatch_engine.checkpoint.tiny import make_tiny  # noqa: E402

BACKENDS = ("resident", "process", "disk")
SLOPE = 1.0  # MiB a thousand steps


def run(folder: Path, tables: Path, backend: str, options: argparse.Namespace) -> bool:
    """One engine, one line; whether it held its bounds."""
    where = str(tables) if backend == "disk" else None
    given: dict[str, Any] = {"ple_backend": backend, "ple_folder": where, "runner": options.runner}
    began = time.monotonic()
    with rig(folder, max_num_seqs=4, max_model_len=96, **given) as engine:
        found = soak(engine, warm_up=options.warm_up, steps=options.steps)
        whole = found.after.free_slots == engine.built.limits.slots
        whole = whole and found.after.free_pages == engine.built.limits.pages
    held, first, last = found.after, found.memory[0][1], found.memory[-1][1]
    print(
        f"{backend:8}  {options.steps:6} steps  {found.requests:5} requests  {found.aborted:4} aborted"
        f"  slope {found.slope:+.3f} MiB/1000  resident {first / MIB:.1f} -> {last / MIB:.1f} MiB"
        f"  {time.monotonic() - began:.0f} s"
    )
    print(
        f"{'':8}  {held.processes} processes, {held.descriptors} descriptors, {held.threads} threads, "
        f"{held.shared_files} files in /dev/shm, {held.free_slots} free slots, {held.free_pages} free pages"
    )
    grown = found.differences()
    if not whole:
        grown.append("slots or pages are still taken")
    if found.slope > SLOPE:
        grown.append(f"memory grows by more than {SLOPE} MiB a thousand steps")
    for line in grown:
        print(f"{'':8}  NOT EQUAL: {line}")
    return not grown


def main() -> int:
    """Every backend in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=1000)
    parser.add_argument("--backend", choices=BACKENDS, help="that one alone")
    parser.add_argument("--runner", choices=("mrv1", "mrv2"), default="mrv2")
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="stallwatch-soak-") as name:
        folder = Path(name) / "tiny"
        make_tiny(folder)
        for backend in [options.backend] if options.backend else BACKENDS:
            good &= run(folder, Path(name) / "tables", backend, options)
    return not good


if __name__ == "__main__":
    sys.exit(main())
