from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from process_helpers import subreaper
from stallwatch import procfs
from stallwatch.errors import StateDirError
from stallwatch.process import maps, statefile
from stallwatch.process.reaper import Reaper
from stallwatch.process.statefile import LOCK, StateLock, TreeRecord, end_leftovers
from stallwatch.testing import tree as trees

pytestmark = pytest.mark.process

# A supervisor as it stands in the daemon: membership, state file at each change, and a lock.
SUPERVISOR = """
import os, sys, time
from stallwatch import procfs
from stallwatch.process import maps, statefile
from stallwatch.process.members import Membership
from stallwatch.process.reaper import Reaper, become_subreaper
from stallwatch.process.rundir import RunDir
from stallwatch.process.spawn import SpawnSpec, spawn
from stallwatch.testing import tree as trees
state, board, program = sys.argv[1:]
become_subreaper()
lock = statefile.StateLock(state)
reaper = Reaper()
identity = maps.identify(board + "/board")
run = RunDir.create("chat", 3, env={"TMPDIR": state})
env = {**os.environ, "STALLWATCH_BOARD": board}
child = spawn(SpawnSpec(trees.argv(program), env), hold=reaper.hold())
def save():
    statefile.save(state, statefile.TreeRecord(
        engine="chat", incarnation=3, boot_id=statefile.boot_id(), session=child.pid,
        supervisor=(os.getpid(), procfs.start_ticks(os.getpid())),
        members=tuple(members.ever().items()), board=board,
        board_file=(identity.dev, identity.inode), run_dirs=run.paths()))
members = Membership(reaper=reaper, board=identity, on_change=save)
members.add_root(child.pid, child.start_ticks, child.pidfd)
pids = {int(word) for word in trees.read_line(child.output).split()}
while not pids <= members.members().keys():
    members.poll()
    members.wait_any(0.01)
print(*pids, run.path, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def reaper():
    with subreaper() as it:
        yield it


@pytest.fixture
def board():
    folder = f"/dev/shm/sw-test-board-{os.getpid()}"
    os.mkdir(folder, 0o700)
    with open(f"{folder}/board", "wb") as file:
        file.write(bytes(4096))
    yield folder
    if os.path.isdir(folder):
        os.unlink(f"{folder}/board")
        os.rmdir(folder)


def killed_supervisor(state, board, program):
    """Start a supervisor and its tree, SIGKILL the supervisor; the tree's pids and run folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(state), board, program], stdout=subprocess.PIPE
    )
    try:
        *pids, run = trees.read_line(process.stdout.fileno(), 20).split()
    finally:
        process.kill()
        process.communicate()
    return [int(pid) for pid in pids], run


def alive(pids):
    return [pid for pid in pids if (s := procfs.stat(pid)) and s.state not in "ZX"]


@pytest.mark.slow
@pytest.mark.parametrize("program", [trees.PARENT, trees.SETSID, trees.DAEMON])
def test_a_killed_supervisor_leaves_nothing_for_long(reaper, board, tmp_path, program):
    """The next start ends the whole tree, whatever re-parented, and removes board and run folder."""
    pids, run = killed_supervisor(tmp_path, board, program)
    assert alive(pids) == pids
    assert os.path.isdir(run)

    lock = StateLock(str(tmp_path))
    [left] = end_leftovers(str(tmp_path), reaper=reaper)
    lock.release()

    assert alive(pids) == []
    assert (left.engine, left.incarnation, left.found) == ("chat", 3, 2)
    assert "had left 2 processes" in left.words()
    assert not os.path.exists(board)
    assert not os.path.exists(run)
    assert end_leftovers(str(tmp_path), reaper=reaper) == ()


def die(pid):
    """End a process that re-parented to us, and reap it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_also_a_child_that_was_never_written_down(reaper, board, tmp_path):
    """The root is dead and forked after the last save: its orphan is found by the old session."""
    program = trees._HEAD + (
        "signal.signal(signal.SIGUSR1, lambda *_: child(rest))\nsay()\nwhile 1: signal.pause()"
    )
    [root], _ = killed_supervisor(tmp_path, board, program)
    os.kill(root, signal.SIGUSR1)

    def in_session():
        stats = (procfs.stat(pid) for pid in procfs.pids())
        return [s.pid for s in stats if s and s.session == root and s.pid != root]

    trees.wait_until(in_session)
    young = in_session()
    die(root)
    [left] = end_leftovers(str(tmp_path), reaper=reaper)

    assert left.found == 1
    assert alive(young) == []


@pytest.mark.slow
def test_also_who_still_maps_the_old_board(reaper, board, tmp_path):
    """A process outside the session that maps the old board is the old engine's."""
    mapper = trees._HEAD + (
        f"import mmap; m = mmap.mmap(os.open({board + '/board'!r}, 2), 0); say(); rest()"
    )
    [root], _ = killed_supervisor(tmp_path, board, trees.SLEEPER)
    outsider = subprocess.Popen(trees.argv(mapper), stdout=subprocess.PIPE)
    try:
        trees.read_line(outsider.stdout.fileno())
        die(root)
        [left] = end_leftovers(str(tmp_path), reaper=reaper)

        assert left.found == 1
        assert alive([outsider.pid]) == []
    finally:
        outsider.kill()
        outsider.communicate()


def test_a_reused_pid_and_another_boot_are_left_alone(reaper, board, tmp_path):
    """Same pid with other ticks, or the same record from another boot: nobody is touched."""
    victim = subprocess.Popen(
        trees.argv(trees.SLEEPER), stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        trees.read_line(victim.stdout.fileno())
        ticks = procfs.start_ticks(victim.pid)
        record = TreeRecord(
            engine="chat",
            incarnation=1,
            boot_id=statefile.boot_id(),
            session=victim.pid,
            supervisor=(1, 1),
            members=((victim.pid, ticks - 1),),
        )
        statefile.save(str(tmp_path), record)
        assert end_leftovers(str(tmp_path), reaper=reaper) == ()

        other = replace(record, members=((victim.pid, ticks),), boot_id="another")
        statefile.save(str(tmp_path), other)
        assert end_leftovers(str(tmp_path), reaper=reaper) == ()

        assert victim.poll() is None
    finally:
        victim.kill()
        victim.communicate()


def test_a_damaged_or_hostile_file_removes_nothing(tmp_path):
    """Nonsense is skipped; folders that do not look like ours stay."""
    precious = tmp_path / "precious"
    precious.mkdir()
    state = tmp_path / "state"
    state.mkdir()
    (state / ("bad" + statefile.SUFFIX)).write_text('{"engine": [')
    record = TreeRecord(
        engine="chat",
        incarnation=1,
        boot_id="another",
        session=1,
        supervisor=(1, 1),
        members=(),
        board=str(precious),
        run_dirs=(str(precious),),
    )
    statefile.save(str(state), record)

    assert end_leftovers(str(state), reaper=Reaper()) == ()
    assert precious.is_dir()


def test_what_is_saved_is_loaded(tmp_path):
    """A record survives the way through its file, which only its owner may read."""
    record = TreeRecord(
        engine="chat",
        incarnation=2,
        boot_id="b",
        session=7,
        supervisor=(5, 6),
        members=((7, 8), (9, 10)),
        board="/dev/shm/x",
        board_file=(1, 2),
        run_dirs=("/tmp/sw-1",),
    )
    statefile.save(str(tmp_path), record)
    path = tmp_path / ("chat" + statefile.SUFFIX)

    assert statefile.load(str(path)) == record
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [path.name]
    statefile.forget(str(tmp_path), "chat")
    assert os.listdir(tmp_path) == []


def test_two_daemons_never_share_a_state_folder(tmp_path):
    """The second one is refused with the first one's pid and a way out; an ended one holds nothing."""
    first = StateLock(str(tmp_path))
    with pytest.raises(StateDirError, match=rf"pid {os.getpid()}\)") as error:
        StateLock(str(tmp_path))
    first.release()

    assert error.value.exit_code == 78
    assert "state_dir" in error.value.hint
    StateLock(str(tmp_path)).release()


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_a_lock_without_room_for_its_pid_still_locks(monkeypatch, tmp_path, call):
    """The pid is only for words: a full disk costs it, the lock holds, and nobody kills a guess."""

    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(statefile.os, call, full)
        first = StateLock(str(tmp_path))
    (tmp_path / LOCK).write_text("")
    with pytest.raises(StateDirError, match="another stallwatch uses") as error:
        StateLock(str(tmp_path))
    assert "kill" not in error.value.hint
    assert "state_dir" in error.value.hint
    first.release()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "right to write"),
    ],
)
def test_a_state_folder_that_takes_no_lock_is_named_with_the_remedy(
    monkeypatch, tmp_path, number, remedy
):
    """The folder, the reason and what mends it, with the exit code of a bad state_dir."""

    def refuse(*_args: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(statefile.os, "open", refuse)
        with pytest.raises(StateDirError, match=os.strerror(number)) as error:
            StateLock(str(tmp_path))
    assert error.value.exit_code == 78
    assert str(tmp_path) in error.value.message
    assert remedy in error.value.hint


def test_an_engine_does_not_inherit_the_lock(reaper, tmp_path):
    """The lock ends with the daemon although its engine lives on."""
    lock = StateLock(str(tmp_path))
    with trees.tree(trees.SLEEPER, reaper=reaper) as t:
        t.pids()
        lock.release()
        StateLock(str(tmp_path)).release()


def test_a_state_folder_that_cannot_be_used_is_named(tmp_path):
    """A file where the folder should be gives one clear error with exit code 78."""
    (tmp_path / "file").write_text("")

    with pytest.raises(StateDirError, match="cannot use the state folder") as error:
        StateLock(str(tmp_path / "file" / "state"))
    assert error.value.hint


def test_identity_is_device_and_inode(board):
    """The board's identity is the same by any name, and a mapping of it is recognised by it."""
    import mmap

    identity = maps.identify(f"{board}/board")
    fd = os.open(f"{board}/board", os.O_RDWR)
    view = mmap.mmap(fd, 4096)

    assert maps.maps_file(os.getpid(), identity)
    view.close()
    os.close(fd)
    assert not maps.maps_file(os.getpid(), identity)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_state_folder_that_others_can_write_is_refused(tmp_path, mode):
    """Whoever can write there could have any of our files overwritten, or read every report."""
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(StateDirError, match="chmod 700"):
        StateLock(str(folder))


def test_the_lock_follows_no_link(tmp_path):
    """A link in the lock's place must not get a stranger's file truncated."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    (folder / LOCK).symlink_to(precious)
    with pytest.raises(StateDirError):
        StateLock(str(folder))
    assert precious.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_state_folder_of_somebody_else_is_refused(tmp_path):
    """Another user's folder holds another user's reports."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(StateDirError, match="belongs to uid 65534"):
        StateLock(str(folder))
