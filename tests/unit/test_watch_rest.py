"""Which members of a large tree are read at a look, and which may rest."""

from __future__ import annotations

import pytest

from heartbeat_helpers import attach, folder_in, look, no_sleep
from stallwatch.board.reader import BoardReader
from stallwatch.watch.looker import _lane_threads
from stallwatch.watch.members import LIVELY_REST, REST, Members, Wants

PIDS = dict.fromkeys(range(1000, 1032), 7)


class Proc:
    """A /proc of its own."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, pid, state="S", ticks=7):
        (self.folder / str(pid)).mkdir(exist_ok=True)
        after = [
            state,
            "1",
            "0",
            str(pid),
            *["0"] * 13,
            "1",
            "0",
            str(ticks),
            "0",
            "9",
            *["0"] * 20,
        ]
        (self.folder / str(pid) / "stat").write_text(f"{pid} (x) {' '.join(after)}\n")


@pytest.fixture
def proc(tmp_path):
    proc = Proc(tmp_path)
    for pid in PIDS:
        proc.write(pid)
    return proc


@pytest.fixture
def members(proc):
    members = Members(proc.folder)
    yield members
    members.close()


def looks_until(members, state, *, lively=frozenset()):
    """How many looks it takes until member 1000 is seen in that state."""
    for count in range(1, 20):
        if members.look(PIDS, Wants(now_ns=0, lively=lively))[1000].state == state:
            return count
    return 0


def test_a_quiet_member_is_read_at_every_second_look(proc, members):
    """A stop of a member whose lanes do not beat shows within two looks, and its end at once."""
    members.look(PIDS, Wants(now_ns=0))
    proc.write(1000, "T")
    assert 1 <= looks_until(members, "T") <= REST + 1
    proc.write(1000, "S")
    assert looks_until(members, "S") == 1


def test_a_lively_member_is_read_at_every_eighth_look(proc, members):
    """Beats excuse from being read, but not for long: somebody else may write them."""
    for _ in range(3):
        members.look(PIDS, Wants(now_ns=0, lively=PIDS.keys()))
    proc.write(1000, "T")
    took = looks_until(members, "T", lively=PIDS.keys())
    assert REST + 1 < took <= LIVELY_REST + 1


@pytest.mark.parametrize("before", [1, 2])
def test_a_reused_pid_is_noticed_at_once(members, before):
    """Another member of the same pid inherits no facts, whether it was due at this look or not."""
    for _ in range(before):
        members.look(PIDS, Wants(now_ns=0))
    assert 1000 not in members.look({**PIDS, 1000: 8}, Wants(now_ns=0))


def test_only_who_beat_with_every_thread_is_lively(tmp_path):
    """Lively: each thread that owns a lane moved at this look; channels do not count."""
    with folder_in(tmp_path) as folder:
        board = attach(folder)
        lanes = [board.lane("own"), board.channel("stream")]
        marks = [lane.marker("step", "n") for lane in lanes]
        reader = BoardReader(folder.path, sleep=no_sleep)
        look(reader)
        seen = []
        for which in (0, 1, 0):
            marks[which](1 + len(seen))
            threads, lively = _lane_threads(look(reader))
            seen.append(bool(lively))
        assert len(threads) == 1
        assert seen == [True, False, True]
        reader.close()
        board.close()
