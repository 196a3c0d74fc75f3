"""In a process of its own nothing that an earlier test compiled can pass for warmed up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stallwatch_engine.checkpoint.tiny import make_tiny

CODE = """
import sys, torch
torch.set_num_threads(1)
from engine_rig import rig
from stallwatch_kernels import jit, warmup
folder, runner, backend, tables = sys.argv[1:]
more = {"ple_folder": tables} if backend == "disk" else {}
with rig(folder, runner=runner, ple_backend=backend, max_num_seqs=2, **more) as engine:
    before = jit.signatures()
    engine.add("long", range(1, 90), 6)
    engine.add("short", [5], 6)
    engine.drain()
    print(sorted(warmup.grown(before, jit.signatures())))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["resident", "disk"])
@pytest.mark.parametrize("runner", ["mrv1", "mrv2"])
def test_serving_compiles_nothing_in_a_fresh_process(tmp_path: Path, runner: str, backend: str):
    """After the warm-up no signature is added, by prompts, decodes or the runner's own bookkeeping."""
    make_tiny(tmp_path / "tiny")
    arguments = [str(tmp_path / "tiny"), runner, backend, str(tmp_path / "tables")]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr[-2000:]
