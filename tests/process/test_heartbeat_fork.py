"""A forked child speaks for itself and never with its parent's voice."""

from __future__ import annotations

import pytest

from heartbeat_helpers import folder_in, look, no_sleep, python
from stallwatch.board.reader import BoardReader

pytestmark = [pytest.mark.process, pytest.mark.slow]

PARENT = """
    import os, sys, threading
    from stallwatch import heartbeat
    name = "parent"
    board = heartbeat.attach(role=lambda: (name, 1))
    lane = board.lane("model")
    mark = lane.marker("phase", "n", limit=30)
    board.ready()
    board.pending(5)
    with lane.phase("outer"):
        mark(1)
        pid = os.fork()
        if pid == 0:
            name = "child"               # known only after the fork, as in multiprocessing
            print("forked", flush=True)
            sys.stdin.readline()
            mark(2)
            lane.progress(3)
            assert board.lane("model") is lane
            print("marked", flush=True)
            sys.stdin.readline()
            os._exit(0)
    lane.enter("parent still here")
    os.waitpid(pid, 0)
"""


def test_a_child_attaches_at_its_first_mark(tmp_path):
    """Until its first mark a child is invisible; then it has its own slots, role, thread and past."""
    with folder_in(tmp_path) as folder, python(PARENT, folder) as child:
        assert child.stdout.readline() == "forked\n"
        reader = BoardReader(folder.path, sleep=no_sleep)
        image = look(reader)
        assert [process.address for process in image.processes] == ["parent:1"]
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "marked\n"
        image = look(reader)
        parent, forked = image.processes
        assert (parent.address, parent.ready, parent.pending) == ("parent:1", True, 5)
        assert (forked.address, forked.ready, forked.pending) == ("child:1", False, 0)
        assert forked.pid != parent.pid
        assert forked.dump_path != parent.dump_path
        mine = image.lane("child:1/model")
        assert mine is not None
        assert (mine.pid, mine.tid, mine.work) == (forked.pid, forked.pid, 3)
        assert [frame.name for frame in mine.stack] == ["phase"]
        assert (mine.details, mine.phase.limit_ns) == ((("n", 2),), 30 * 10**9)
        reader.close()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(10) == 0


SILENT = """
    import os, sys
    from stallwatch import heartbeat
    board = heartbeat.attach(role="worker")
    lane = board.lane("model")
    lane.enter("mine")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(len(os.listdir(os.environ["STALLWATCH_BOARD"] + "/claims")), flush=True)
    sys.stdin.readline()
"""


def test_a_child_that_never_marks_takes_no_slot(tmp_path):
    """Helpers that fork and exec leave no trace on the board."""
    with folder_in(tmp_path) as folder, python(SILENT, folder) as child:
        assert child.stdout.readline() == "2\n"


HELD = """
    import os, sys, threading
    from stallwatch import heartbeat
    board = heartbeat.attach(role="worker")
    lane = board.lane("model")
    holding = threading.Event()
    def hold():
        with board._lock, board._names._lock:
            holding.set()
            threading.Event().wait()
    threading.Thread(target=hold, daemon=True).start()
    holding.wait()
    pid = os.fork()
    if pid == 0:
        lane.enter("free", new_name=1)
        board.lane("second")
        board.ready()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)
"""


def test_a_lock_held_by_another_thread_does_not_hang_the_child(tmp_path):
    """The library's locks are new in the child: the one in the parent has no owner there."""
    with folder_in(tmp_path) as folder, python(HELD, folder) as child:
        assert child.stdout.readline() == "7\n"


MULTIPROCESSING = """
    import multiprocessing, sys
    from stallwatch import heartbeat
    def role():
        return multiprocessing.current_process().name
    board = heartbeat.attach(role=role)
    lane = board.lane("main")
    def work(go, done):
        lane.enter("working")
        done.set()
        go.wait(20)
    if __name__ == "__main__":
        ctx = multiprocessing.get_context("fork")
        go, done = ctx.Event(), ctx.Event()
        child = ctx.Process(target=work, args=(go, done), name="EngineCore")
        child.start()
        done.wait(20)
        print("up", flush=True)
        sys.stdin.readline()
        go.set()
        child.join(20)
"""


def test_multiprocessing_children_get_their_own_role(tmp_path):
    """With the fork start method the name is the parent's at birth; the first mark knows better."""
    with folder_in(tmp_path) as folder, python(MULTIPROCESSING, folder) as child:
        assert child.stdout.readline() == "up\n"
        reader = BoardReader(folder.path, sleep=no_sleep)
        roles = {process.role for process in look(reader).processes}
        assert roles == {"MainProcess", "EngineCore"}
        reader.close()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(20) == 0


NAMES_ITSELF = """
    import os, sys
    from stallwatch import heartbeat
    board = heartbeat.attach(role="root", rank=0)
    board.lane("main").enter("wait")
    if (pid := os.fork()) == 0:
        mine = heartbeat.attach(role="w", rank=1)
        mine.lane("main").enter("work")
        print("named", flush=True)
        sys.stdin.readline()
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_child_that_attaches_by_itself_gets_the_role_it_names(tmp_path):
    """attach() in a forked child names the child: it must not speak under its parent's address."""
    with folder_in(tmp_path) as folder, python(NAMES_ITSELF, folder) as child:
        assert child.stdout.readline() == "named\n"
        reader = BoardReader(folder.path, sleep=no_sleep)
        addresses = [process.address for process in look(reader).processes]
        assert addresses == ["root:0", "w:1"]
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait(10)
        reader.close()
