from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest

from process_helpers import Owned, subreaper
from stallwatch import procfs
from stallwatch.process import maps, pidfd
from stallwatch.process.members import Membership
from stallwatch.testing import tree as trees
from stallwatch.testing.tree import tree, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def reaper():
    with subreaper() as it:
        yield it


@pytest.mark.parametrize("program", [trees.PARENT, trees.SETSID, trees.DAEMON])
def test_whoever_descends_is_a_member(reaper, program):
    """Children, children with their own session and double-forked daemons are all found."""
    with tree(program, reaper=reaper) as t:
        pids = set(t.pids())

        t.settle(pids)

        assert len(pids) == 2


def test_membership_outlives_the_root(reaper):
    """The root's exit is reported with its status; its orphan stays a member until it ends."""
    with tree(trees.ROOT_DIES, reaper=reaper) as t:
        root, orphan = t.pids()
        t.settle({orphan})
        [end] = [e for e in t.members.exits() if e.root]

        assert (end.pid, end.status, end.expected) == (root, 0, False)
        assert procfs.stat(orphan).ppid == os.getpid()
        assert t.members.ever().keys() == {root, orphan}


def test_the_status_of_somebody_elses_child_is_known(reaper):
    """A grandchild that its own parent reaped still tells its exit status (PIDFD_GET_INFO)."""
    with tree(trees.REAPS_ITS_OWN, reaper=reaper) as t:
        middle, grandchild = t.pids()
        t.settle({t.child.pid, middle, grandchild})
        t.members.signal(middle, signal.SIGUSR1)
        assert t.pids() == [middle, grandchild]
        t.settle({t.child.pid, middle})

        [end] = [e for e in t.members.exits() if e.pid == grandchild]
        assert end.status == 7
        assert end.words() == "exit status 7"


def test_a_signal_is_told_and_comm_kept(reaper):
    """A member killed by a signal is reported with it, once."""
    with tree(trees.PARENT, reaper=reaper) as t:
        _, child = t.pids()
        t.settle({t.child.pid, child})
        os.kill(child, signal.SIGKILL)
        t.settle({t.child.pid})

        [end] = t.members.exits()
        assert (end.pid, end.signal, end.root, end.comm != "") == (child, 9, False, True)


def test_an_exit_tells_whose_child_it_was(reaper):
    """A child's exit still names its parent after that has ended as well."""
    with tree(trees.PARENT, reaper=reaper) as t:
        _, child = t.pids()
        t.settle({t.child.pid, child})
        os.kill(t.child.pid, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        t.settle(set())

        assert {e.pid: e.ppid for e in t.members.exits()} == {t.child.pid: 0, child: t.child.pid}


def test_a_goodbye_makes_an_exit_expected(reaper):
    """A member that detached on the board may end; others may not."""
    with tree(trees.PARENT, reaper=reaper) as t:
        _, child = t.pids()
        t.settle({t.child.pid, child})
        ticks = t.members.members()
        t.members.poll(detached=[(child, ticks[child])])
        os.kill(child, signal.SIGTERM)
        os.kill(t.child.pid, signal.SIGTERM)
        t.settle(set())

        assert {e.pid: e.expected for e in t.members.exits()} == {child: True, t.child.pid: False}


def test_our_tools_are_never_members(reaper):
    """A child that a Popen of ours owns is left alone by ticks and scans; an orphan is taken in."""
    owned = Owned()
    with tree(trees.SLEEPER, reaper=reaper, owned=owned) as t:
        t.pids()
        # Older processes cannot come from the engine: start it a clock tick later.
        wait_until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) * 100 > t.child.start_ticks + 2)
        tools = [
            subprocess.Popen(trees.argv(trees.SLEEPER), stdout=subprocess.PIPE) for _ in range(2)
        ]
        owned.set.add(tools[0].pid)
        try:
            for tool in tools:
                trees.read_line(tool.stdout.fileno())
            for _ in range(3):
                t.members.scan()

            assert t.members.members().keys() == {t.child.pid, tools[1].pid}
        finally:
            for tool in tools:
                tool.kill()
                tool.communicate()


def test_a_registration_counts_only_with_the_board_mapped(reaper, tmp_path):
    """What the board says about a pid is believed only if that process maps the board."""
    board = tmp_path / "board"
    board.write_bytes(bytes(4096))
    program = (
        trees._HEAD + f"import mmap; m = mmap.mmap(os.open({str(board)!r}, 2), 0); say(); rest()"
    )
    liar = subprocess.Popen(trees.argv(trees.SLEEPER), stdout=subprocess.PIPE)
    honest = subprocess.Popen(trees.argv(program), stdout=subprocess.PIPE)
    try:
        for process in (liar, honest):
            trees.read_line(process.stdout.fileno())
        identity = maps.identify(str(board))
        with tree(trees.SLEEPER, reaper=reaper, board=identity, adopt_orphans=False) as t:
            t.pids()
            claims = [(p.pid, procfs.start_ticks(p.pid)) for p in (liar, honest)]
            t.members.poll([*claims, (1, procfs.start_ticks(1)), (os.getpid(), 5)])

            assert t.members.members().keys() == {t.child.pid, honest.pid}
    finally:
        for process in (liar, honest):
            process.kill()
            process.communicate()


def test_who_maps_the_board_is_found_before_a_kill(reaper, tmp_path):
    """A process outside session and descent that maps the board joins at scan()."""
    board = tmp_path / "board"
    board.write_bytes(bytes(4096))
    program = (
        trees._HEAD + f"import mmap; m = mmap.mmap(os.open({str(board)!r}, 2), 0); say(); rest()"
    )
    outsider = subprocess.Popen(trees.argv(program), stdout=subprocess.PIPE)
    try:
        trees.read_line(outsider.stdout.fileno())
        identity = maps.identify(str(board))
        with tree(trees.SLEEPER, reaper=reaper, board=identity, adopt_orphans=False) as t:
            t.pids()
            t.members.poll()
            assert outsider.pid not in t.members.members()

            t.members.scan()
            assert outsider.pid in t.members.members()
    finally:
        outsider.kill()
        outsider.communicate()


def test_a_reused_pid_is_nobodys(reaper):
    """The same number with other start ticks is not added and not signalled."""
    members = Membership(reaper=reaper)

    assert pidfd.open_exact(os.getpid(), 1) is None
    assert not members.add(os.getpid(), 1)
    assert not members.signal(os.getpid(), signal.SIGKILL)
    members.close()


def test_growth_is_told_at_once(reaper):
    """on_change runs for the root and for each growth, and sees the new member."""
    told = []
    with tree(trees.PARENT, reaper=reaper) as t:
        _, child = t.pids()
        t.members._on_change = lambda: told.append(set(t.members.ever()))
        t.settle({t.child.pid, child})

        assert told[-1] == {t.child.pid, child}


def test_many_threads_may_ask(reaper):
    """Ticks, scans and questions from several threads report each exit exactly once."""
    with tree(trees.SPREADER, reaper=reaper) as t:
        t.pids()
        ended, stop, errors = [], threading.Event(), []

        def tick():
            try:
                while not stop.is_set():
                    ended.extend(t.members.poll())
                    t.members.wait_any(0.01)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=tick) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(t.members.members()) > 20)
        for _ in range(20):
            for pid in list(t.members.members()):
                t.members.signal(pid, signal.SIGKILL)
            t.members.scan()
        wait_until(lambda: not t.members.members())
        stop.set()
        for thread in threads:
            thread.join()

        assert not errors
        known = [(e.pid, e.start_ticks) for e in ended]
        assert len(known) == len(set(known))
