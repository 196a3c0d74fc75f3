"""Opening a backend by its settings, and what is left when it is closed: nothing."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch

import ple_tables
from ple_cycle import Harness
from stallwatch.heartbeat import Board
from stallwatch_engine.faults import Faults
from stallwatch_engine.ple.open import PleSettings, Where, open_backend
from stallwatch_engine.ple.tables import load

LIMIT_S = 120.0


def quiet() -> Board:
    return Board(None, "worker", 0, 0)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return ple_tables.spec(tmp_path_factory.mktemp("tables"))


def settings(name: str, folder) -> PleSettings:
    return {
        "resident": PleSettings(),
        "disk": PleSettings(Where.DISK, folder),
        "process": PleSettings(Where.PROCESS),
        "process over disk": PleSettings(Where.PROCESS, folder),
    }[name]


def left() -> tuple[int, int, int, set[str]]:
    """Descriptors, threads, children, and names in /dev/shm that could be ours."""
    gc.collect()
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(psutil.Process().children(recursive=True)),
        {name for name in os.listdir("/dev/shm") if "ple" in name},
    )


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["resident", "disk", "process", "process over disk"])
def test_every_setting_serves_run_ahead_steps_and_leaves_nothing(tables, tmp_path, name, capfd):
    """Right rows, one step ahead of them; afterwards no descriptor, thread, process or shared file more."""
    shape = ple_tables.shape(tables)
    source = load(tables, quiet().lane("load"))
    before = left()
    opened = open_backend(
        settings(name, tmp_path), tables, shape, lane=quiet().lane("main"), faults=Faults()
    )
    with opened as backend:
        harness = Harness(backend, quiet())
        inputs = harness.staged_inputs()
        try:
            harness.run(inputs, range(100))
            harness.finish()
            addresses = {backend.buffer(slot).data_ptr() for slot in range(2)}
            assert len(addresses) == 2
            for seq in range(100):
                assert torch.equal(harness.rows[seq], ple_tables.rows_of(source, shape, seq))
        finally:
            harness.close(inputs)
    del harness, inputs, backend, opened
    deadline = time.monotonic() + 5
    while left() != before and time.monotonic() < deadline:
        time.sleep(0.05)  # a poll with a deadline
    assert left() == before
    said = capfd.readouterr().err
    if name == "process over disk":
        assert "layer-1.rows: prefault of" in said
    assert ("offload: memory policy" in said) == name.startswith("process")


def test_tables_on_disk_need_a_folder():
    """Refused when the settings are made, not when the first row is read."""
    with pytest.raises(ValueError, match="need a folder"):
        PleSettings(Where.DISK)


def _may_mount() -> bool:
    return os.geteuid() == 0 and hasattr(ctypes.CDLL(None), "unshare")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not _may_mount(), reason="needs a mount namespace of its own")
def test_a_full_dev_shm_changes_nothing(tables):
    """64 KiB of /dev/shm, all used: the buffers are no files there, so rows come and no access is SIGBUS."""
    code = """
        import ctypes, json, os, sys, time
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000):  # CLONE_NEWNS
            sys.exit(77)
        libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None)  # MS_PRIVATE | MS_REC
        if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"):
            sys.exit(77)
        try:
            with open("/dev/shm/full", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
        import torch
        import ple_tables
        from stallwatch.heartbeat import Board
        from stallwatch_engine.faults import Faults
        from stallwatch_engine.ple.open import PleSettings, Where, open_backend
        from stallwatch_engine.ple.spec import TableSpec
        from stallwatch_engine.ple.tables import load
        spec = TableSpec.parse(json.loads(sys.argv[1]))
        shape, lane = ple_tables.shape(spec), Board(None, "worker", 0, 0).lane("main")
        source = load(spec, lane)
        settings = PleSettings(Where.PROCESS)
        with open_backend(settings, spec, shape, lane=lane, faults=Faults()) as backend:
            for seq in range(10):
                backend.submit(seq, *ple_tables.step(seq))
                rows = backend.wait(seq, time.monotonic() + 60)
                assert torch.equal(rows, ple_tables.rows_of(source, shape, seq))
                backend.consumed(seq)
        print(os.statvfs("/dev/shm").f_bavail, "right")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(tables.describe())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this host does not allow a mount namespace")
    assert done.stdout.split() == ["0", "right"], done.stderr
