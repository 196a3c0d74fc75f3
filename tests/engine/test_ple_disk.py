"""Tables on disk: believed only when complete and this checkpoint's, and never the end of the worker."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import ple_tables
from stallwatch.heartbeat import Board
from stallwatch_engine.ple.disk import fill, record
from stallwatch_engine.ple.disk.rows import open_disk
from stallwatch_engine.ple.errors import AnotherCheckpoint, NoRoom, PleFailed, TableChanged
from stallwatch_engine.ple.resident import ResidentBackend
from stallwatch_engine.ple.spec import Place, TableSpec
from stallwatch_engine.ple.tables import load
from stallwatch_kernels.ple.table import Format

LIMIT_S = 60.0


def lane():
    return Board(None, "worker", 0, 0).lane("ple")


def soon() -> float:
    return time.monotonic() + LIMIT_S


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return ple_tables.spec(tmp_path_factory.mktemp("tables"), Format.NVFP4, Format.FP32)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


def same_rows(tables, disk, steps: int = 10) -> bool:
    source, shape = load(tables, lane()), ple_tables.shape(tables)
    return all(
        torch.equal(ple_tables.rows_of(source, shape, n), ple_tables.rows_of(disk, shape, n))
        for n in range(steps)
    )


def test_a_second_start_reads_what_the_first_one_filled(tables, folder):
    """The files are not written again, and the rows are the same."""
    first = open_disk(tables, folder, lane())
    assert same_rows(tables, first)
    first.close()
    written = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    second = open_disk(tables, folder, lane())
    assert same_rows(tables, second)
    second.close()
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == written


def test_more_rows_than_fit_at_once_and_many_readers_give_the_same_bits(
    tables, folder, monkeypatch
):
    """Rows are gathered a few at a time by several threads; neither may show."""
    from stallwatch_engine.ple.disk import rows

    monkeypatch.setattr(rows, "ROOM", 24)
    monkeypatch.setattr(rows, "_LEAST", 2)
    disk = open_disk(tables, folder, lane(), readers=3)
    assert same_rows(tables, disk)
    disk.close()


@pytest.mark.parametrize("left", ["nothing", "layer-1.rows", "complete.json"])
def test_what_is_incomplete_is_filled_again(tables, folder, left):
    """No record, a missing file, or a record that is cut short: none of it counts."""
    open_disk(tables, folder, lane()).close()
    if left == "complete.json":
        (folder / left).write_bytes(b'{"version": 1, "finger')
    elif left == "layer-1.rows":
        os.truncate(folder / left, 100)
    else:
        record.remove(folder)
        (folder / "layer-0.rows").write_bytes(b"rubbish")
    disk = open_disk(tables, folder, lane())
    assert same_rows(tables, disk)
    disk.close()


def test_another_checkpoints_tables_are_refused_or_replaced_but_never_served(
    tables, folder, tmp_path
):
    """Same sizes, other bytes: the fingerprint tells, and only `replace` gives the folder away."""
    other = ple_tables.spec(tmp_path / "other", Format.NVFP4, Format.FP32, seed=1)
    open_disk(other, folder, lane()).close()
    with pytest.raises(AnotherCheckpoint, match="another checkpoint"):
        open_disk(tables, folder, lane())
    kept = open_disk(other, folder, lane())  # the refusal changed nothing
    disk = open_disk(tables, folder, lane(), replace=True)
    assert same_rows(tables, disk)
    assert same_rows(other, kept)  # whoever had the old files open still reads them
    disk.close()
    kept.close()


def test_a_fingerprint_follows_the_bytes_and_not_the_place(tables, tmp_path):
    """A moved checkpoint is the same one; another factor or another byte is not."""
    values = tables.describe()
    for layer in values["layers"]:
        for part in layer["parts"]:
            for place in filter(None, (part["codes"], part["scales"])):
                data = Place(**place).read().tobytes()
                moved = tmp_path / os.path.basename(place["path"])
                moved.write_bytes(data)
                place.update(path=str(moved), offset=0)
    copy = TableSpec.parse(json.loads(json.dumps(values)))
    assert copy.fingerprint() == tables.fingerprint()
    values["layers"][0]["parts"][0]["factor"] = 9.0
    assert TableSpec.parse(values).fingerprint() != tables.fingerprint()
    with open(copy.layers[1].parts[2].codes.path, "r+b") as file:
        file.write(b"\x55")
    assert copy.fingerprint() != tables.fingerprint()


def test_a_file_cut_short_while_served_is_a_failure_and_not_sigbus(tables, folder):
    """A mapping would kill the worker; rows before the cut are still right."""
    disk = open_disk(tables, folder, lane())
    shape = ple_tables.shape(tables)
    backend = ResidentBackend(disk, shape)
    backend.submit(0, *ple_tables.step(0))
    backend.wait(0, soon())
    backend.consumed(0)
    os.truncate(folder / "layer-1.rows", 0)
    with pytest.raises(TableChanged, match=r"layer-1\.rows was cut short"):
        backend.submit(1, *ple_tables.step(1))
    with pytest.raises(PleFailed):
        backend.wait(1, soon())
    disk.close()


def test_a_checkpoint_that_is_too_short_is_named_and_nothing_is_left(tables, folder, tmp_path):
    """Found while filling: the file and the byte are in the sentence."""
    broken = ple_tables.spec(tmp_path / "broken")
    os.truncate(broken.layers[1].parts[0].codes.path, 4200)
    with pytest.raises(TableChanged, match=r"fp32-1-0\.codes ends at byte 4200"):
        open_disk(broken, folder, lane())
    assert {p.name for p in folder.iterdir()} <= {"lock"}


def test_a_disk_without_room_is_refused_before_the_first_byte(tables, folder, monkeypatch):
    """The sentence says how much and where."""
    huge = os.statvfs("/")
    full = os.statvfs_result((*huge[:4], 0, *huge[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(NoRoom, match=r"no room for .* MiB of PLE tables"):
        open_disk(tables, folder, lane())
    assert {p.name for p in folder.iterdir()} <= {"lock"}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 30_000])
def test_a_disk_that_fills_up_during_the_fill_is_a_named_error_and_leaves_nothing(
    tables, folder, limit
):
    """The kernel refuses the bytes (a limit on file sizes stands for the full disk), after the check passed."""
    code = """
        import json, os, pathlib, resource, sys
        from stallwatch.heartbeat import Board
        from stallwatch_engine.ple.disk.rows import open_disk
        from stallwatch_engine.ple.errors import NoRoom
        from stallwatch_engine.ple.spec import TableSpec
        spec, folder = TableSpec.parse(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
        try:
            open_disk(spec, folder, Board(None, "offload", 0, 0).lane("ple"))
        except NoRoom as error:
            print(error)
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(code),
            json.dumps(tables.describe()),
            str(folder),
            str(limit),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "no room for" in done.stdout, done.stderr
    assert {p.name for p in folder.iterdir()} <= {"lock"}


@pytest.mark.process
@pytest.mark.slow
def test_a_disk_that_another_fills_up_meanwhile_is_the_same_named_error(tables, folder):
    """A real ENOSPC: a file system of its own, filled by somebody between the check and the fill."""
    code = """
        import ctypes, json, os, pathlib, sys
        from stallwatch.heartbeat import Board
        from stallwatch_engine.ple.disk import fill
        from stallwatch_engine.ple.disk.rows import open_disk
        from stallwatch_engine.ple.errors import NoRoom
        from stallwatch_engine.ple.spec import TableSpec
        spec, folder = TableSpec.parse(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2])
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000):  # CLONE_NEWNS
            sys.exit(77)
        libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None)  # MS_PRIVATE | MS_REC
        folder.mkdir()
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=1m"):
            sys.exit(77)
        check = fill._check_room

        def taken(*arguments):
            check(*arguments)
            (folder / "other").write_bytes(bytes((1 << 20) - (32 << 10)))

        fill._check_room = taken
        try:
            open_disk(spec, folder, Board(None, "offload", 0, 0).lane("ple"))
        except NoRoom as error:
            print(error.errno, error, sorted(os.listdir(folder)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(tables.describe()), str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this host does not allow a mount namespace")
    assert done.stdout.startswith(f"{errno.ENOSPC} no room for"), done.stderr
    assert "['lock', 'other']" in done.stdout


def test_two_fillers_fill_once(tables, folder, monkeypatch):
    """The second waits for the first and then believes its record."""
    fills, met = [], threading.Event()
    original, try_lock = fill._fill_layer, fill._try_lock

    def tried(fd):
        got = try_lock(fd)
        if not got:
            met.set()
        return got

    def counted(*arguments):
        fills.append(threading.get_ident())
        assert met.wait(LIMIT_S), "no other filler met the lock"
        original(*arguments)

    monkeypatch.setattr(fill, "_try_lock", tried)
    monkeypatch.setattr(fill, "_fill_layer", counted)
    opened, errors = [], []

    def run() -> None:
        try:
            opened.append(open_disk(tables, folder, lane()))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert errors == []
    assert len(fills) == 2
    assert len(set(fills)) == 1
    for disk in opened:
        assert same_rows(tables, disk, 2)
        disk.close()


def test_waiting_for_another_filler_has_a_deadline(tables, folder):
    """The error names the folder."""
    folder.mkdir()
    with (
        fill.locked(folder, soon(), lane()),
        pytest.raises(TimeoutError, match="being filled by another process"),
    ):
        open_disk(tables, folder, lane(), deadline=time.monotonic() + 0.1)
    open_disk(tables, folder, lane()).close()


@pytest.mark.process
@pytest.mark.slow
def test_a_filler_that_is_killed_leaves_nothing_that_is_believed(tables, folder):
    """SIGKILL between the last file and the record: the next start fills again, and the lock is free."""
    code = """
        import json, os, pathlib, signal, sys
        from stallwatch.heartbeat import Board
        from stallwatch_engine.ple.disk import record
        from stallwatch_engine.ple.disk.rows import open_disk
        from stallwatch_engine.ple.spec import TableSpec
        record.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        spec = TableSpec.parse(json.loads(sys.argv[1]))
        open_disk(spec, pathlib.Path(sys.argv[2]), Board(None, "offload", 0, 0).lane("ple"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(tables.describe()), str(folder)],
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == -9
    assert (folder / "layer-1.rows").exists()
    assert record.read(folder) is None
    disk = open_disk(tables, folder, lane())
    assert same_rows(tables, disk)
    disk.close()


def test_no_descriptor_is_left(tables, folder):
    """Files, lock and threads end with the tables."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_disk(tables, folder, lane()).close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
