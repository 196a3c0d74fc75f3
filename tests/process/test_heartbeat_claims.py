"""Slots are owned once, whatever many processes do at the same time, and a dead owner's is reused."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from heartbeat_helpers import attach, folder_in, look, no_sleep, python
from stallwatch.board.reader import BoardReader
from stallwatch.heartbeat import claims, layout
from stallwatch.heartbeat.proc import start_ticks

pytestmark = pytest.mark.process

# Waits for one line on stdin, so that all start at the same moment, then claims and reports.
CLAIMER = """
    import sys
    from stallwatch.heartbeat import claims
    folder, count, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print("here", flush=True)
    sys.stdin.readline()
    mine = [claims.claim(folder, "l", count) for _ in range(wanted)]
    print(*mine, flush=True)
    sys.stdin.readline()
"""


def claim_at_once(folder, processes: int, slots: int, each: int) -> list[list[int]]:
    """What each of many processes got when all claim at once; they live until all have answered."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        arguments = (str(folder.path / layout.CLAIMS), str(slots), str(each))
        children = [
            stack.enter_context(python(CLAIMER, folder, *arguments)) for _ in range(processes)
        ]
        for child in children:
            assert child.stdout.readline() == "here\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        return [[int(n) for n in child.stdout.readline().split()] for child in children]


@pytest.mark.slow
def test_no_slot_is_owned_twice(tmp_path):
    """Eight processes that claim 30 slots each at the same moment share 200 slots without overlap."""
    with folder_in(tmp_path) as folder:
        got = claim_at_once(folder, 8, 200, 30)
        owned = [slot for mine in got for slot in mine if slot >= 0]
        assert len(owned) == 200
        assert sorted(owned) == list(range(200))


@pytest.mark.slow
def test_dead_owners_slots_are_stolen_once(tmp_path):
    """When every owner is dead, eight thieves at the same moment share the slots without overlap."""
    with folder_in(tmp_path) as folder:
        with python("pass", folder) as dead:
            dead.wait(20)
        for slot in range(60):
            (folder.path / layout.CLAIMS / f"l{slot}").write_text(f"{dead.pid} 12345\n")
        got = claim_at_once(folder, 8, 60, 10)
        owned = [slot for mine in got for slot in mine if slot >= 0]
        assert max(collections.Counter(owned).values()) == 1
        for slot in owned:
            held = claims.owner(str(folder.path / layout.CLAIMS / f"l{slot}"))
            assert held is not None
            assert held != (dead.pid, 12345)


def test_a_living_or_unreadable_owner_keeps_its_slot(tmp_path):
    """Only a claim that names a dead process is taken over."""
    folder = str(tmp_path)
    mine = f"{os.getpid()} {start_ticks(os.getpid())}\n"
    for slot, content in enumerate([mine, "", "12", "12 34", "x y\n", "1 2 3\n", "-1 5\n"]):
        (tmp_path / f"l{slot}").write_text(content)
    (tmp_path / "l7").mkdir()
    (tmp_path / "l8").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "l9")
    assert claims.claim(folder, "l", 10) == -1
    (tmp_path / "l3").write_text(f"{os.getpid()} 1\n")  # our pid, another start: a recycled pid
    assert claims.claim(folder, "l", 10) == 3


def test_a_stopped_thief_hangs_nobody(tmp_path):
    """While somebody holds the steal lock, a claim gives up at once instead of waiting."""
    import fcntl

    (tmp_path / "l0").write_text("4194303 1\n")
    with open(tmp_path / ".steal", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert claims.claim(str(tmp_path), "l", 1) == -1
    assert claims.claim(str(tmp_path), "l", 1) == 0


@pytest.mark.slow
def test_a_killed_processs_slots_are_reused_without_its_past(tmp_path):
    """On a full board a new process takes the killed one's slots; its lanes start from nothing."""
    writer = """
        import sys
        from stallwatch import heartbeat
        lane = heartbeat.attach("old", 7).lane("model")
        lane.enter("stuck", text="old text", a=1)
        lane.progress(99)
        print("ready", flush=True)
        sys.stdin.readline()
    """
    with folder_in(tmp_path, lanes=1, processes=1) as folder:
        reader = BoardReader(folder.path, sleep=no_sleep)
        with python(writer, folder) as child:
            assert child.stdout.readline() == "ready\n"
            old = look(reader).lanes[0]
            assert (old.address, old.pid, old.work) == ("old:7/model", child.pid, 99)
            assert not attach(folder, "new").attached
            child.send_signal(signal.SIGKILL)
            child.wait(10)
        board = attach(folder, "new")
        assert board.attached
        board.lane("loop")
        (new,) = look(reader).lanes
        assert (new.address, new.pid, new.work, new.text) == ("new:0/loop", os.getpid(), 0, "")
        assert (new.phase.name, new.beats, new.details) == ("attached", 1, ())
        board.close()
        reader.close()


FULL = """
    import sys
    from pathlib import Path
    from stallwatch.board.create import BoardFolder
    from stallwatch.errors import BoardError
    try:
        BoardFolder.create(Path(sys.argv[1]), engine="chat", incarnation=1)
    except BoardError as error:
        print(error.message, list(Path(sys.argv[1]).iterdir()), flush=True)
"""


@pytest.mark.slow
def test_a_full_shared_memory_is_an_error_and_leaves_nothing(tmp_path):
    """On a private 1 MiB tmpfs the board is refused at once, with the size, and removed again."""
    script = (
        'mount -t tmpfs -o size=1m none "$1" 2>/dev/null || { echo cannot mount; exit 0; }\n'
        'exec "$2" -c "$3" "$1"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    try:
        done = subprocess.run(
            [*command, textwrap.dedent(FULL)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode or done.stdout.startswith("cannot"):
        pytest.skip("no private mounts here")
    assert done.stdout.startswith("no room for the heartbeat board")
    assert done.stdout.rstrip().endswith("[]")


def test_a_full_table_costs_its_searchers_little(tmp_path, monkeypatch):
    """Thousands of asks for a slot of a full table read its claims a few times, not each time."""
    folder = str(tmp_path)
    for slot in range(64):
        assert claims.claim(folder, "l", 64) == slot
    reads = []
    owner = claims.owner
    monkeypatch.setattr(claims, "owner", lambda path: reads.append(path) or owner(path))
    assert {claims.claim(folder, "l", 64) for _ in range(2000)} == {-1}
    assert len(reads) < 100 * 64
    claims.release(folder, "l", 5)
    assert claims.claim(folder, "l", 64) == 5


def test_a_slow_look_at_a_full_table_counts_too(tmp_path, monkeypatch):
    """Where one look takes longer than the time it counts for, the searchers still stop looking."""
    folder, now, looks = str(tmp_path), [0], []
    for slot in range(4):
        assert claims.claim(folder, "l", 4) == slot

    def slow(*_):
        looks.append(now[0])
        now[0] += 10**9
        return -1

    monkeypatch.setattr(claims, "_steal", slow)
    monkeypatch.setattr(claims.time, "monotonic_ns", lambda: now[0])
    assert {claims.claim(folder, "l", 4) for _ in range(2000)} == {-1}
    assert len(looks) < 40
