from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from process_helpers import subreaper
from stallwatch import procfs
from stallwatch.process import kill as killing
from stallwatch.process.bounded import bounded
from stallwatch.process.kill import KillLimits, kill
from stallwatch.process.stop import stop
from stallwatch.testing import tree as trees
from stallwatch.testing.tree import tree, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def reaper():
    with subreaper() as it:
        yield it


def alive(pids) -> list[int]:
    return [pid for pid in pids if (s := procfs.stat(pid)) and s.state not in "ZX"]


@pytest.mark.parametrize("program", [trees.PARENT, trees.SETSID, trees.DAEMON, trees.ROOT_DIES])
def test_nothing_is_left(reaper, program):
    """After a kill no process of the tree lives, whoever left the session or lost its parent."""
    with tree(program, reaper=reaper) as t:
        pids = t.pids()

        result = kill(t.members)

        assert result.gone
        assert alive(pids) == []
        assert all(e.signal == 9 and e.expected for e in t.members.exits() if not e.root)


def test_a_stopped_tree_dies_stopped(reaper):
    """SIGKILL needs no SIGCONT: a tree in state T is gone without running another line."""
    with tree(trees.STUBBORN, reaper=reaper) as t:
        pids = t.pids()
        t.settle(set(pids))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(procfs.stat(pid).state == "T" for pid in pids))

        assert kill(t.members).gone
        assert alive(pids) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", [trees.SPREADER, trees.HOPPER])
def test_forking_does_not_outrun_it(reaper, program):
    """A tree that forks while it is being killed is gone within the time, new children included."""
    with tree(program, reaper=reaper) as t:
        t.pids()
        wait_until(lambda: len(t.members.ever()) > 3 or t.members.scan() < 0)

        result = kill(t.members)

        assert result.gone
        assert t.members.scan() == 0


@pytest.mark.slow
def test_orphans_that_change_their_pid_faster_than_a_tick_do_not_survive(reaper):
    """Double-forked, own sessions, 30 ms old at most: none is a member before the kill, all die."""
    with tree(trees.HYDRA, reaper=reaper) as t:
        t.pids()

        assert kill(t.members).gone

        until = time.monotonic() + 0.3
        while time.monotonic() < until:  # ten of their lives: somebody would show
            assert t.members.scan(maps=False) == 0


def test_who_is_born_between_look_and_strike_dies_too(reaper, monkeypatch):
    """A child forked just before its parent is killed is met by the last look, on any host."""
    program = (
        trees._HEAD + "signal.signal(signal.SIGUSR1, lambda *_: say(child(rest))); say(); rest()"
    )
    with tree(program, reaper=reaper) as t:
        t.pids()
        wait_until(
            lambda: int(procfs.status(t.child.pid)["SigCgt"], 16) & 1 << (signal.SIGUSR1 - 1)
        )
        real, born = t.members.signal, []

        def fork_first(pid: int, number: int) -> bool:
            if not born:
                os.kill(pid, signal.SIGUSR1)
                born.extend(t.pids()[1:])
            return real(pid, number)

        monkeypatch.setattr(t.members, "signal", fork_first)
        look = t.members._census.look  # a crowded host: only full looks see anything
        monkeypatch.setattr(
            t.members._census, "look", lambda *, full=False: look(full=True) if full else []
        )

        assert kill(t.members).gone
        assert len(born) == 1
        assert alive(born) == []


def test_pending_answers_are_waited_for_but_not_long(reaper):
    """The kill waits for pending to reach 0, and at most the given time."""
    with tree(trees.SLEEPER, reaper=reaper) as t:
        t.pids()
        counts = [2, 1, 0]
        result = kill(t.members, pending=lambda: counts.pop(0))
        assert result.gone
        assert counts == []

    with tree(trees.SLEEPER, reaper=reaper) as t:
        t.pids()
        result = kill(t.members, pending=lambda: 1, limits=KillLimits(pending_s=0.05))
        assert result.gone
        assert 0.05 <= result.waited_s < 1


def test_the_resource_tracker_ends_by_itself(reaper):
    """Python's tracker is not signalled: it exits with 0 once the others are dead."""
    with tree(trees.TRACKER, reaper=reaper) as t:
        _, tracker = t.pids()
        wait_until(lambda: killing.is_tracker(tracker))
        t.settle({t.child.pid, tracker})

        result = kill(t.members)

        assert result.gone
        [end] = [e for e in t.members.exits() if e.pid == tracker]
        assert (end.status, end.signal) == (0, None)
        assert result.killed == 1


def test_a_tracker_that_hangs_is_killed_too(reaper):
    """A stopped tracker gets its time and then SIGKILL."""
    with tree(trees.TRACKER, reaper=reaper) as t:
        _, tracker = t.pids()
        wait_until(lambda: killing.is_tracker(tracker))
        t.settle({t.child.pid, tracker})
        os.kill(tracker, signal.SIGSTOP)

        result = kill(t.members, limits=KillLimits(tracker_s=0.05))

        assert result.gone
        [end] = [e for e in t.members.exits() if e.pid == tracker]
        assert end.signal == 9


def test_shared_memory_goes_with_its_last_user(reaper):
    """A /dev/shm file that only the tree mapped is unlinked; one that another maps stays."""
    theirs, shared = (f"/dev/shm/sw-test-{os.getpid()}-{n}" for n in "ab")
    program = trees._HEAD + (
        "import mmap\n"
        f"for name in ({theirs!r}, {shared!r}):\n"
        "    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600); os.truncate(fd, 4096)\n"
        "    globals()[name] = mmap.mmap(fd, 4096)\n"
        "say(); rest()"
    )
    user = trees._HEAD + f"import mmap; m = mmap.mmap(os.open({shared!r}, 2), 0); say(); rest()"
    try:
        with tree(program, reaper=reaper, adopt_orphans=False) as t:
            t.pids()
            with tree(user, reaper=reaper, adopt_orphans=False) as other:
                other.pids()
                result = kill(t.members)

                assert result.unlinked == (theirs,)
                assert not os.path.exists(theirs)
                assert os.path.exists(shared)
    finally:
        for name in (theirs, shared):
            if os.path.exists(name):
                os.unlink(name)


def test_shared_memory_of_a_tree_that_died_by_itself(reaper):
    """What was noted while it lived is removed although nobody maps it at the kill."""
    name = f"/dev/shm/sw-test-{os.getpid()}-d"
    program = trees._HEAD + (
        "import mmap\n"
        f"fd = os.open({name!r}, os.O_RDWR | os.O_CREAT, 0o600); os.truncate(fd, 4096)\n"
        "m = mmap.mmap(fd, 4096); say(); rest()"
    )
    try:
        with tree(program, reaper=reaper) as t:
            t.pids()
            t.members.shared.note(t.members.members())
            os.kill(t.child.pid, signal.SIGKILL)
            t.settle(set())

            assert kill(t.members).unlinked == (name,)
    finally:
        if os.path.exists(name):
            os.unlink(name)


def test_a_process_that_cannot_be_read_holds_nobody_up():
    """A read of /proc that blocks is left behind at its deadline, and the default is the answer."""
    go = threading.Event()
    began = time.monotonic()

    assert bounded(lambda: go.wait(10), 0.05, "late") == "late"
    assert time.monotonic() - began < 1
    go.set()
    wait_until(lambda: "bounded-read" not in {t.name for t in threading.enumerate()})


def test_a_replaced_name_is_not_unlinked(reaper, tmp_path):
    """A symlink, or another file under the old name, is left alone."""
    name = f"/dev/shm/sw-test-{os.getpid()}-c"
    program = trees._HEAD + (
        "import mmap\n"
        f"fd = os.open({name!r}, os.O_RDWR | os.O_CREAT, 0o600); os.truncate(fd, 4096)\n"
        "m = mmap.mmap(fd, 4096); say(); rest()"
    )
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    try:
        with tree(program, reaper=reaper) as t:
            t.pids()

            def replace() -> int:
                if not os.path.islink(name):
                    os.unlink(name)
                    os.symlink(precious, name)
                return 0

            result = kill(t.members, pending=replace)

            assert result.unlinked == ()
            assert precious.read_text() == "keep me"
            assert os.path.islink(name)
    finally:
        os.unlink(name)


def test_what_survives_is_named(reaper, monkeypatch):
    """A process that SIGKILL does not end makes UNKILLABLE, with pid, state and wait channel."""
    with tree(trees.SLEEPER, reaper=reaper) as t:
        t.pids()
        # No process can be made to survive SIGKILL from user space: the signal gets lost instead.
        real = t.members.signal
        monkeypatch.setattr(t.members, "signal", lambda pid, number: True)

        result = kill(t.members, limits=KillLimits(die_s=0.1, tracker_s=0.1))
        monkeypatch.setattr(t.members, "signal", real)

        assert not result.gone
        [survivor] = result.survivors
        assert survivor.pid == t.child.pid
        assert survivor.state == "S"
        assert f"pid {t.child.pid}" in result.words()


def test_a_stop_asks_the_root_only(reaper, monkeypatch):
    """SIGTERM goes to the root; a graceful root ends its children itself, and no kill was needed."""
    program = trees._HEAD + (
        "def polite():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: os._exit(66))\n"
        "    signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))\n"
        "    rest()\n"
        "pid = child(polite)\n"
        "def end(*_): os.kill(pid, signal.SIGUSR1); os.waitpid(pid, 0); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end); say(pid); rest()"
    )
    with tree(program, reaper=reaper) as t:
        root, child = t.pids()
        wait_until(lambda: int(procfs.status(child)["SigCgt"], 16) & 1 << (signal.SIGUSR1 - 1))
        t.settle({root, child})
        called, sent = [], []
        real = t.members.signal
        monkeypatch.setattr(
            t.members, "signal", lambda *args: sent.append(args) is None and real(*args)
        )

        result = stop(
            t.members,
            grace_s=10,
            drain=lambda: called.append("drain"),
            before_kill=lambda: called.append("stack"),
        )

        assert result.graceful
        assert called == ["drain"]
        assert sent == [(root, signal.SIGTERM)]
        assert {e.pid: e.status for e in t.members.exits()} == {child: 5, root: 0}


def test_a_stop_that_is_ignored_ends_in_a_kill(reaper):
    """When the grace is over the stack is taken first, then everything is killed."""
    with tree(trees.STUBBORN, reaper=reaper) as t:
        pids = t.pids()
        t.settle(set(pids))
        seen = []

        result = stop(t.members, grace_s=0.1, before_kill=lambda: seen.extend(alive(pids)))

        assert not result.graceful
        assert result.gone
        assert seen == pids
        assert alive(pids) == []


def test_a_failing_stack_does_not_stop_the_kill(reaper):
    """Whatever before_kill raises, the tree is dead when stop() is left."""
    with tree(trees.STUBBORN, reaper=reaper) as t:
        pids = t.pids()

        def fail() -> None:
            raise RuntimeError("no stack")

        with pytest.raises(RuntimeError, match="no stack"):
            stop(t.members, grace_s=0.05, before_kill=fail)

        assert alive(pids) == []


def test_a_kill_of_nothing_is_quick(reaper):
    """Killing a tree that is already gone answers gone at once: orders may be repeated."""
    with tree(trees.SLEEPER, reaper=reaper) as t:
        t.pids()
        kill(t.members)
        began = time.monotonic()

        assert kill(t.members).gone
        assert time.monotonic() - began < 1
